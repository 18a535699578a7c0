"""When AWS Batch tries a job again: rules made from the table of exit codes, and the matching of rules.

Source: the API reference of AWS Batch, EvaluateOnExit: at most five entries; conditions are globs in which only a
trailing * is special; without a matching entry the job is retried, so the last entry here is a catch-all EXIT.
"""

from dataclasses import dataclass

from jobs.plan.spec import Action, RetryRule, RetryStrategy
from pipeline.core.errors import EXIT_TABLE

MAX_RULES = 5
HOST_LOST = "Host EC2*"
NOT_STARTED = "Task failed to start*"
"""Images that could not be pulled, containers that could not be created in time."""


def retry_strategy(attempts: int) -> RetryStrategy:
    """Rules for any stage: lost machines, containers that did not start, our own codes; everything else is final."""
    codes = sorted(rule.exit_code for rule in EXIT_TABLE if rule.retry)
    rules = (
        RetryRule(action=Action.RETRY, on_status_reason=HOST_LOST),
        RetryRule(action=Action.RETRY, on_status_reason=NOT_STARTED),
        *(RetryRule(action=Action.RETRY, on_exit_code=str(code)) for code in codes),
        RetryRule(action=Action.EXIT, on_reason="*"),
    )
    if len(rules) > MAX_RULES:
        raise ValueError(
            f"{len(rules)} retry rules, AWS Batch takes {MAX_RULES}: EXIT_TABLE has too many codes to retry"
        )
    return RetryStrategy(attempts=attempts, rules=rules)


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended, as DescribeJobs tells it. `exit_code` None: no container ran."""

    exit_code: int | None = None
    status_reason: str = ""
    reason: str = ""
    timed_out: bool = False
    cancelled: bool = False
    """By a user, or because a dependency failed."""


def after_attempt(strategy: RetryStrategy, attempt: int, end: AttemptEnd) -> Action:
    """What happens after attempt number `attempt` (from 1) failed. Time-outs and cancelled jobs are never retried."""
    if end.timed_out or end.cancelled or attempt >= strategy.attempts:
        return Action.EXIT
    return next((rule.action for rule in strategy.rules if matches(rule, end)), Action.RETRY)


def matches(rule: RetryRule, end: AttemptEnd) -> bool:
    """Whether every condition of a rule holds. Case matters; an exit code that is not there matches nothing."""
    code = None if end.exit_code is None else str(end.exit_code)
    conditions = (
        (rule.on_status_reason, end.status_reason),
        (rule.on_reason, end.reason),
        (rule.on_exit_code, code),
    )
    return all(seen is not None and _glob(pattern, seen) for pattern, seen in conditions if pattern)


def _glob(pattern: str, text: str) -> bool:
    return text.startswith(pattern[:-1]) if pattern.endswith("*") else text == pattern
