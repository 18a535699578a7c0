"""What is to be done for the jobs of a cycle, from what is known of their training jobs. Pure.

SageMaker knows no dependencies and no second try: both are decided here, by the rules of jobs/cycle/job_states.py,
which are those of the local engine. Whoever asks, and as often as they like, gets the same answer for the same
knowledge.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.cycle import job_states
from jobs.cycle.job_records import Cancel, JobRecord, JobState
from jobs.cycle.job_states import AttemptEnd, Leaf
from jobs.targets.sagemaker.describe import QUEUED, Seen

Try = tuple[str, int]
"""Name of a leaf, and which try of it, from 1."""


LAG_S = 600.0
"""A training job that was made and is not described for so long is there no more."""


@dataclass(frozen=True)
class Advance:
    """`records`: of all leaves by name, as they are now. `looks`: tries of which nobody knows yet whether they exist.

    `starts`: leaves whose next try may be made; of one that is active, its last, which has vanished.
    `stops`: leaves that are to be ended, and why.
    """

    records: Mapping[str, JobRecord]
    looks: tuple[Try, ...]
    starts: tuple[Leaf, ...]
    stops: tuple[tuple[Leaf, str], ...]


def advance(
    leaves: Sequence[Leaf],
    records: Mapping[str, JobRecord],
    seen: Mapping[Try, Seen | None],
    *,
    cancelled: Mapping[str, Cancel],
    at: float,
) -> Advance:
    """`seen`: what was found of tries; None for one that does not exist. `cancelled`: by users, by name of leaf.

    Ask again with more `seen` until nothing is left to look at.
    """
    now, ends = dict(records), dict(cancelled)
    while True:
        before = dict(now)
        ended_at = min((one.stopped_at or at for one in now.values() if one.state.is_failure), default=at)
        for name, reason in job_states.unneeded_jobs(leaves, now).items():
            ends.setdefault(name, Cancel(reason=reason, at=ended_at))
        for leaf in leaves:
            now[leaf.name] = _observed(leaf, now[leaf.name], seen, ends.get(leaf.name), at)
        failed = {leaf.spec.name for leaf in leaves if now[leaf.name].state.is_failure}
        waiting = [leaf for leaf in leaves if leaf.name in ends and now[leaf.name].state is JobState.PENDING]
        for leaf in waiting:
            if not failed.isdisjoint(leaf.waits_for()):  # it has not failed for what is cancelled with it
                now[leaf.name] = job_states.failed_record(now[leaf.name], ends[leaf.name].reason, at)
                failed.add(leaf.spec.name)
        now |= job_states.advance_waiting_jobs(leaves, now, at)
        if now != before:
            continue
        # Whoever has lost the records finds a job waiting until it has looked at those before it.
        is_known = all((leaf.name, number) in seen for leaf in leaves if (number := try_of(now[leaf.name])))
        if not waiting or not is_known:
            break
        now |= {leaf.name: job_states.failed_record(now[leaf.name], ends[leaf.name].reason, at) for leaf in waiting}
    live = [leaf for leaf in leaves if try_of(now[leaf.name]) is not None]
    tries = {leaf.name: (leaf.name, try_of(now[leaf.name]) or 1) for leaf in live}
    unknown = tuple(one for one in tries.values() if one not in seen)
    order = [*job_states.queue(leaves, now), *(leaf for leaf in live if now[leaf.name].state.is_active)]
    absent = [leaf for leaf in order if tries[leaf.name] in seen and seen[tries[leaf.name]] is None]
    made = {leaf.name for leaf in live if now[leaf.name].state.is_active or seen.get(tries[leaf.name]) is not None}
    return Advance(
        records=now,
        looks=unknown,
        starts=tuple(leaf for leaf in absent if leaf.name not in ends),
        stops=tuple((leaf, ends[leaf.name].reason) for leaf in reversed(live) if leaf.name in made & ends.keys()),
    )


def try_of(record: JobRecord) -> int | None:
    """The try that is under way, or may be made; None for a leaf that waits for others or has ended."""
    if record.state.is_active:
        return len(record.attempts)
    return len(record.attempts) + 1 if record.state is JobState.RUNNABLE else None


def observed_record(leaf: Leaf, record: JobRecord, one: Seen, cancelled: Cancel | None, at: float) -> JobRecord:
    """The record with what was seen of the try that is under way, or may be made."""
    is_runnable = record.state is JobState.RUNNABLE
    if one.is_queued and is_runnable and one.end is not None:
        return job_states.failed_record(
            record, cancelled.reason if cancelled else one.end.status_reason, one.ended_at or at
        )
    if one.is_queued and one.end is None:
        return record.model_copy(update={"status_reason": one.note})
    if is_runnable:
        record = job_states.starting_record(record, one.streams)
    if record.state is JobState.STARTING and (one.started_at is not None or (one.end and one.end.exit_code == 0)):
        record = job_states.running_record(record, one.started_at or one.ended_at or at)
    record = job_states.with_last_attempt(record, log_streams=one.streams or record.attempts[-1].log_streams)
    if one.end is None:
        return record.model_copy(update={"status_reason": one.note})
    end = one.end
    is_ours = cancelled is not None and (one.ended_at or at) >= cancelled.at
    if cancelled and is_ours and not job_states.has_succeeded(end):
        end = AttemptEnd(end.exit_code, cancelled.reason, end.reason)
    record = job_states.record_after_attempt(record, leaf.spec.retry, end, one.ended_at or at, again=one.again)
    return job_states.with_last_attempt(record, billable_s=one.billable_s)


def _observed(
    leaf: Leaf,
    record: JobRecord,
    seen: Mapping[Try, Seen | None],
    cancelled: Cancel | None,
    at: float,
) -> JobRecord:
    number = try_of(record)
    if number is None:
        return record
    one = seen.get((leaf.name, number))
    if one is None:
        if cancelled is None or (leaf.name, number) not in seen:
            return record
        # Never made; or made and deleted. What was handed over to a queue may be listed late.
        is_new = record.state is JobState.RUNNABLE and not record.status_reason.startswith(QUEUED)
        is_gone = is_new or at - cancelled.at > LAG_S
        return job_states.failed_record(record, cancelled.reason, at) if is_gone else record
    return observed_record(leaf, record, one, cancelled, at)
