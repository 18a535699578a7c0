"""The retry rules that AWS Batch gets, matched as it documents it, and what the engine of this machine decides."""

from collections.abc import Mapping

import pytest

from jobs.cycle.job_states import (
    EXITED,
    HOST_TERMINATED,
    TASK_NOT_STARTED,
    AttemptEnd,
    is_tried_again,
)
from jobs.plan.spec import Retry
from jobs.targets.batch.requests import definition_request
from pipeline.core.errors import EXIT_BUG, EXIT_TABLE
from tests.jobs.cycle.cases import job, plan

OURS = Retry.of(attempts=3)


def of_batch(end: AttemptEnd) -> str:
    """EvaluateOnExit: the first rule decides all of whose globs match; AWS Batch tries again without one."""
    request = definition_request(plan(job("train", retry=OURS)), job("train", retry=OURS))
    rules: list[Mapping[str, str]] = request["retryStrategy"]["evaluateOnExit"]
    seen = {
        "onStatusReason": end.status_reason,
        "onReason": end.reason,
        "onExitCode": None if end.exit_code is None else str(end.exit_code),
    }
    return next((rule["action"] for rule in rules if all(_glob(rule, name, text) for name, text in seen.items())), "")


def _glob(rule: Mapping[str, str], name: str, text: str | None) -> bool:
    pattern = rule.get(name, "")
    if not pattern:
        return True
    return text is not None and (text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern)


def test_five_rules_at_most_and_the_last_is_final() -> None:
    assert len(OURS.as_rules()) <= 5  # AWS Batch takes no more (user guide, job retries)
    assert OURS.as_rules()[-1] == {"action": "EXIT", "on_status_reason": "", "on_reason": "*", "on_exit_code": ""}
    assert Retry.model_validate_json(OURS.model_dump_json()) == OURS


@pytest.mark.parametrize("rule", EXIT_TABLE, ids=lambda rule: rule.name)
def test_every_exit_code_is_retried_as_the_table_says(rule: object) -> None:
    assert isinstance(rule, type(EXIT_TABLE[0]))
    end = AttemptEnd(rule.exit_code, EXITED)
    assert (is_tried_again(OURS, 1, end), of_batch(end)) == (rule.retry, "RETRY" if rule.retry else "EXIT")


@pytest.mark.parametrize(
    ("end", "again"),
    [
        (AttemptEnd(EXIT_BUG, EXITED), False),
        (AttemptEnd(137, EXITED, "OutOfMemoryError: Container killed due to memory usage"), False),
        (AttemptEnd(None, HOST_TERMINATED), True),
        (AttemptEnd(137, HOST_TERMINATED, "Killed from outside"), True),
        (AttemptEnd(None, TASK_NOT_STARTED, "CannotPullContainerError: pull"), True),
        (AttemptEnd(None, TASK_NOT_STARTED, "DockerTimeoutError: Could not transition"), True),
    ],
)
def test_the_failures_batch_reports(end: AttemptEnd, again: bool) -> None:
    assert (is_tried_again(OURS, 1, end), of_batch(end)) == (again, "RETRY" if again else "EXIT")
    assert not is_tried_again(OURS, 3, end)
