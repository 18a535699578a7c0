"""How a cycle ended, from how its jobs did. Pure."""

from collections.abc import Sequence

from jobs.cycle.records import Closed, JobRecord, JobState, Outcome
from jobs.cycle.states import EXITED
from jobs.plan.spec import CyclePlan
from pipeline.core.errors import EXIT_OK, EXIT_TABLE, GateRefused, TransientError

CANCELLED = "cancelled: "
"""Begins the reason that `trnjobs cancel` gives, so that it can be told from a failure."""
_MEANINGS = {rule.exit_code: rule.name for rule in EXIT_TABLE}


def outcome_of(plan: CyclePlan, records: Sequence[JobRecord], *, cancelled: Closed | None = None) -> Closed | None:
    """None while a job is not final, or was never submitted.

    A cycle that was submitted half also ends when it is cancelled: a record tells, or whoever cancels now (`cancelled`;
    it counts alone when every job that was submitted had succeeded).
    """
    if not all(record.state.is_final for record in records):
        return None
    is_whole = {job.name for job in plan.jobs} <= {record.name for record in records}
    ended = max((record.stopped_at or record.created_at for record in records), default=0.0)
    first = first_failure(records)
    if is_whole:
        return _closed(first, ended) if first else Closed(outcome="succeeded", at=ended)
    if any(record.status_reason.startswith(CANCELLED) for record in records) and first:
        return _closed(first, ended).model_copy(update={"outcome": "cancelled"})
    return cancelled


def exit_code_of_cycle(closed: Closed, records: Sequence[JobRecord]) -> int:
    """What a command that waited for the cycle exits with: the code of the job that ended it, if it is one of failure.

    75 for what has none: cancelled, timed out, lost.
    """
    if closed.outcome == "succeeded":
        return EXIT_OK
    if closed.outcome == "refused":
        return GateRefused.exit_code
    first = first_failure(records)
    code = exit_code(first) if first and closed.outcome == "failed" else None
    return code or TransientError.exit_code


def first_failure(records: Sequence[JobRecord]) -> JobRecord | None:
    """The job that ended the cycle, not one that failed because of it; None when none failed."""
    failed = [record for record in records if record.state is JobState.FAILED]
    return min(failed, key=_order, default=None)


def exit_code(record: JobRecord) -> int | None:
    """Of the last try of the first child that failed, or of the job; None when nothing ran."""
    leaves = [leaf for leaf in record.leaves() if leaf.state is JobState.FAILED] or [*record.leaves()]
    last = next((leaf.attempts[-1] for leaf in leaves if leaf.attempts), None)
    return last.exit_code if last else None


def reason_of(record: JobRecord) -> str:
    """Why it failed, in one line."""
    leaf = next((leaf for leaf in record.leaves() if leaf.state is JobState.FAILED), record)
    last = leaf.attempts[-1] if leaf.attempts else None
    code = None if last is None else last.exit_code
    words = [leaf.status_reason or record.status_reason]
    if last is not None and code is not None:
        meaning = f" ({_MEANINGS[code]})" if code in _MEANINGS else ""
        words = [word for word in words if word != EXITED]  # says less than the code
        words += [last.reason, f"exit code {code}{meaning}"]
    elif last is not None:
        words += [last.reason]
    return ", ".join(dict.fromkeys(word for word in words if word)) or "no reason given"


def _order(record: JobRecord) -> tuple[int, float]:
    """What ran comes before what was ended before it could, and that before what waited for them in vain."""
    if any(leaf.attempts for leaf in record.leaves()):
        rank = 0
    else:
        rank = 1 if record.status_reason.startswith(CANCELLED) else 2
    return rank, record.stopped_at or float("inf")


def _closed(first: JobRecord, at: float) -> Closed:
    return Closed(outcome=_kind(first), at=at, reason=f"{first.name}: {reason_of(first)}")


def _kind(first: JobRecord) -> Outcome:
    if first.status_reason.startswith(CANCELLED):
        return "cancelled"
    return "refused" if exit_code(first) == GateRefused.exit_code else "failed"
