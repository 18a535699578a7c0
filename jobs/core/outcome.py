"""How a cycle ended, from how its jobs did. Pure."""

from collections.abc import Sequence

from jobs.core.records import Closed, JobRecord, JobState, Outcome
from jobs.core.spec import CyclePlan
from pipeline.core.errors import EXIT_OK, GateRefused, TransientError

CANCELLED = "cancelled: "
"""Begins the reason that `trnjobs cancel` gives, so that it can be told from a failure."""


def outcome_of(plan: CyclePlan, records: Sequence[JobRecord]) -> Closed | None:
    """None while a job is not final, or was never submitted."""
    states = {record.name: record.state for record in records}
    if not all(states.get(job.name) and states[job.name].is_final for job in plan.jobs):
        return None
    ended = max((record.stopped_at or record.created_at for record in records), default=0.0)
    failed = [record for record in records if record.state is JobState.FAILED]
    if not failed:
        return Closed(outcome="succeeded", at=ended)
    first = min(failed, key=lambda record: (_is_consequence(record), record.stopped_at or ended))
    return Closed(outcome=_kind(first), at=ended, reason=f"{first.name}: {reason_of(first)}")


def exit_code_of_cycle(closed: Closed, records: Sequence[JobRecord]) -> int:
    """What a command that waited for the cycle exits with: the code of the job that ended it."""
    if closed.outcome == "succeeded":
        return EXIT_OK
    codes = {code for record in records if (code := exit_code(record)) not in (None, EXIT_OK)}
    if closed.outcome == "refused":
        return GateRefused.exit_code
    return next(iter(sorted(code for code in codes if code is not None)), TransientError.exit_code)


def exit_code(record: JobRecord) -> int | None:
    """Of the last try of the first child that failed, or of the job; None when nothing ran."""
    leaves = [leaf for leaf in record.leaves() if leaf.state is JobState.FAILED] or [*record.leaves()]
    last = next((leaf.attempts[-1] for leaf in leaves if leaf.attempts), None)
    return last.exit_code if last else None


def reason_of(record: JobRecord) -> str:
    """Why it failed, in one line."""
    leaf = next((leaf for leaf in record.leaves() if leaf.state is JobState.FAILED), record)
    last = leaf.attempts[-1] if leaf.attempts else None
    words = [leaf.status_reason or record.status_reason]
    if last is not None:
        words += [last.reason, f"exit code {last.exit_code}" if last.exit_code is not None else ""]
    return ", ".join(dict.fromkeys(word for word in words if word)) or "no reason given"


def _is_consequence(record: JobRecord) -> bool:
    """It never ran: another job had failed."""
    return not any(leaf.attempts for leaf in record.leaves())


def _kind(first: JobRecord) -> Outcome:
    if first.status_reason.startswith(CANCELLED):
        return "cancelled"
    return "refused" if exit_code(first) == GateRefused.exit_code else "failed"
