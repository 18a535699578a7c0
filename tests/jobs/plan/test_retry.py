"""Retry rules from the table of exit codes, and their matching, as AWS Batch documents it."""

import pytest

from jobs.plan.retry import MAX_RULES, AttemptEnd, after_attempt, matches, retry_strategy
from jobs.plan.spec import Action, RetryRule, RetryStrategy
from pipeline.core.errors import EXIT_BUG, EXIT_TABLE

EXITED = "Essential container in task exited"
OURS = retry_strategy(attempts=3)


def test_five_rules_at_most_and_the_last_is_final() -> None:
    assert len(OURS.rules) <= MAX_RULES
    assert OURS.rules[-1] == RetryRule(action=Action.EXIT, on_reason="*")
    assert retry_strategy(1).rules == OURS.rules


@pytest.mark.parametrize("rule", EXIT_TABLE, ids=lambda rule: rule.name)
def test_every_exit_code_is_retried_as_the_table_says(rule: object) -> None:
    assert isinstance(rule, type(EXIT_TABLE[0]))
    end = AttemptEnd(exit_code=rule.exit_code, status_reason=EXITED)
    assert after_attempt(OURS, 1, end) is (Action.RETRY if rule.retry else Action.EXIT)


@pytest.mark.parametrize(
    ("end", "action"),
    [
        (AttemptEnd(EXIT_BUG, EXITED), Action.EXIT),
        (AttemptEnd(137, EXITED, "OutOfMemoryError: Container killed due to memory usage"), Action.EXIT),
        (AttemptEnd(None, "Host EC2 (instance i-0abc) terminated."), Action.RETRY),
        (AttemptEnd(None, "Task failed to start", "CannotPullContainerError: pull"), Action.RETRY),
        (AttemptEnd(None, "Task failed to start", "DockerTimeoutError: Could not transition"), Action.RETRY),
        (AttemptEnd(75, "Job attempt duration exceeded timeout", timed_out=True), Action.EXIT),
        (AttemptEnd(75, "Dependent Job failed", cancelled=True), Action.EXIT),
    ],
)
def test_the_failures_batch_reports(end: AttemptEnd, action: Action) -> None:
    assert after_attempt(OURS, 1, end) is action
    assert after_attempt(OURS, 3, end) is Action.EXIT


@pytest.mark.parametrize(
    ("rule", "end", "expected"),
    [
        ({"on_exit_code": "75"}, AttemptEnd(75), True),
        ({"on_exit_code": "7*"}, AttemptEnd(75), True),
        ({"on_exit_code": "7"}, AttemptEnd(75), False),
        ({"on_exit_code": "*"}, AttemptEnd(None), False),
        ({"on_reason": "*"}, AttemptEnd(75), True),
        ({"on_reason": "Cannot*"}, AttemptEnd(None, reason="CannotPullContainerError"), True),
        ({"on_reason": "cannot*"}, AttemptEnd(None, reason="CannotPullContainerError"), False),
        ({"on_status_reason": "Host*terminated."}, AttemptEnd(None, "Host EC2 terminated."), False),
        ({"on_status_reason": "Host*", "on_exit_code": "75"}, AttemptEnd(75, "Task failed"), False),
        ({"on_status_reason": "Host*", "on_exit_code": "75"}, AttemptEnd(75, "Host EC2"), True),
    ],
)
def test_a_rule_matches_when_all_its_conditions_do(rule: dict[str, str], end: AttemptEnd, expected: bool) -> None:
    assert matches(RetryRule.model_validate({"action": "RETRY", **rule}), end) is expected


def test_the_first_match_decides_and_no_match_is_a_retry() -> None:
    rules = (
        RetryRule(action=Action.EXIT, on_exit_code="1*"),
        RetryRule(action=Action.RETRY, on_exit_code="12"),
    )
    strategy = RetryStrategy(attempts=2, rules=rules)
    assert after_attempt(strategy, 1, AttemptEnd(12)) is Action.EXIT
    assert after_attempt(strategy, 1, AttemptEnd(3)) is Action.RETRY
    assert after_attempt(RetryStrategy(attempts=2), 1, AttemptEnd(1)) is Action.RETRY
