"""What is known of the jobs of a cycle, on any target, and how they pass from state to state, as AWS Batch does it.

Pure: records in, records out.

A leaf is what runs: a job, or one child of an array. The parent of an array has no state of its own: it is PENDING
while children run, and FAILED when all have ended and one failed.

Source: the user guide of AWS Batch (job states, dependencies, array jobs, job retries).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from jobs.plan.spec import JobPlan, JobSpec, Retry
from pipeline.core.errors import EXIT_OK, EXIT_TABLE, GateRefused, Preempted, TransientError, headline
from pipeline.core.record import Record


class JobState(StrEnum):
    """States of AWS Batch, in the order in which a job passes them. A retry goes back to RUNNABLE.

    CANCELLED is ours: AWS Batch and SageMaker report such a job as failed or stopped.
    """

    SUBMITTED = "SUBMITTED"
    PENDING = "PENDING"
    RUNNABLE = "RUNNABLE"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        return self is JobState.SUCCEEDED or self.is_failure

    @property
    def is_failure(self) -> bool:
        """Whether the job has ended without success."""
        return self in (JobState.FAILED, JobState.CANCELLED)

    @property
    def is_active(self) -> bool:
        """Whether a try is under way."""
        return self in (JobState.STARTING, JobState.RUNNING)


class AttemptRecord(Record):
    """One try of one job. Times are seconds since 1970; None where it has not come to that."""

    started_at: float | None = None
    stopped_at: float | None = None
    exit_code: int | None = Field(None, description="Of the container, or of the main node's; none: it never ran")
    status_reason: str = ""
    reason: str = Field("", description="Of the container, such as OutOfMemoryError")
    log_streams: tuple[str, ...] = Field((), description="One a node, in the order of nodes")
    error: str = Field("", description="What its log says went wrong, in a few lines; empty: not known")
    error_node: int = Field(0, description="Of which node that log is")
    billable_s: float | None = Field(
        None, description="Of each machine, where the platform tells; none: from its times"
    )

    @property
    def seconds(self) -> float | None:
        """None until it has ended, or when it never ran."""
        return None if self.started_at is None or self.stopped_at is None else self.stopped_at - self.started_at


class JobRecord(Record):
    """One job, or one child of an array."""

    name: str = Field(description="As in the plan; of a child: name:index")
    id: str
    state: JobState
    status_reason: str = ""
    created_at: float
    started_at: float | None = None
    stopped_at: float | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    children: tuple["JobRecord", ...] = Field((), description="Of an array, by index")
    num_nodes: int = Field(0, description="0: an ordinary container")

    def tasks(self) -> tuple["JobRecord", ...]:
        """Return what runs: the children of an array, else the job itself."""
        return self.children or (self,)

    def all_attempts(self) -> list[AttemptRecord]:
        """Of all leaves."""
        return [attempt for task in self.tasks() for attempt in task.attempts]


Outcome = Literal["succeeded", "failed", "refused", "cancelled"]
"""Of a cycle. refused: the gate did its work, production stays as it is."""


class SubmittedJob(Record):
    """A job that was handed over. Written before the next one is submitted."""

    job: str
    id: str
    definition: str = ""
    submitted_at: float


class Cancel(Record):
    """Why a job is to end before its time. `at`: since when, in seconds since 1970."""

    reason: str
    at: float


class Closed(Record):
    """The end of a cycle: from then on the next one may start."""

    outcome: Outcome
    at: float
    reason: str = ""
    round: int | None = Field(None, description="Of submission, whose end it is; none: an earlier version wrote it")

    @property
    def text(self) -> str:
        return self.outcome + (f", {self.reason}" if self.reason else "")


class BlockedJob(Record):
    """A job that was seen blocked, at every look since `since` (seconds since 1970) for the same reason."""

    job: str = Field(description="Name of the record; of a child: name:index")
    id: str
    reason: str
    since: float


# How they pass from state to state.

EXITED = "Essential container in task exited"
TIMED_OUT = "Job attempt duration exceeded timeout"
TASK_NOT_STARTED = "Task failed to start"
HOST_TERMINATED = "Host EC2 (local) terminated."
SERVICE_FAULT = "Internal error of the service that runs the job"
"""SageMaker's, which tells no lost machine from a fault of its own."""
INTERRUPTED = "Interrupted with the command that ran the jobs"
"""Ours: such an attempt does not count, and the job goes on with the next submission."""
CANCELLED = "cancelled: "
"""Begins the reason that `trnjobs cancel` gives."""
UNNEEDED = "no longer needed: "
"""Begins the reason of a job that was ended because no job that waits for it can run any more."""
NOT_RUN = "not run: "
"""Begins the reason of a job of which a dependency did not succeed."""
PAGE_ANYWAY = "not needed: the end of the cycle writes the page"
"""Of the job `report` without which a cycle ended."""


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended. `exit_code` None: no container ran. `status_reason`: one of those above, or a user's."""

    exit_code: int | None
    status_reason: str
    reason: str = ""


@dataclass(frozen=True)
class Task:
    """A job, or one child of an array."""

    spec: JobSpec
    index: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name if self.index is None else f"{self.spec.name}:{self.index}"

    def waits_for(self) -> Iterator[str]:
        """Names of the jobs that must succeed before."""
        return (one.job for one in self.spec.depends_on)


def tasks_of(job: JobSpec) -> list[Task]:
    """Return the children of an array, else the job itself."""
    return [Task(job, index) for index in range(job.array_size)] if job.array_size else [Task(job)]


def new_record(task: Task, job_id: str, at: float) -> JobRecord:
    own = job_id if task.index is None else f"{job_id}:{task.index}"
    return JobRecord(name=task.name, id=own, state=JobState.SUBMITTED, created_at=at, num_nodes=task.spec.num_nodes)


def advance_waiting_jobs(tasks: Sequence[Task], records: Mapping[str, JobRecord], at: float) -> dict[str, JobRecord]:
    """One step of every leaf that waits for others; the changed records. Repeat until there is none.

    What is not among the records is of an earlier round, and has succeeded.
    """
    now = {task.name: records[task.name] for task in tasks}
    children = dict[str, list[str]]()
    for task in tasks:
        if task.index is not None:
            children.setdefault(task.spec.name, []).append(task.name)
    states = {name: record.state for name, record in now.items()}
    states |= {name: parent_state([states[one] for one in ones]) for name, ones in children.items()}
    changed = {}
    for task in tasks:
        record, needs = records[task.name], [states.get(name, JobState.SUCCEEDED) for name in task.waits_for()]
        if record.state is JobState.SUBMITTED:
            record = _move(record, JobState.PENDING if needs else JobState.RUNNABLE)
        elif record.state is JobState.PENDING and any(need.is_failure for need in needs):
            names = (one for name in task.waits_for() if name in states for one in children.get(name, [name]))
            failed = [now[name] for name in names if now[name].state.is_failure]
            record = failed_record(record, NOT_RUN + cause_text(failed), at)
        elif record.state is JobState.PENDING and all(need is JobState.SUCCEEDED for need in needs):
            record = _move(record, JobState.RUNNABLE)
        else:
            continue
        changed[task.name] = now[task.name] = record
        states[task.name] = record.state
    return changed


def cause_text(failed: Sequence[JobRecord]) -> str:
    """`prepare failed`: what kept a job from running. `failed`: records that it waited for, and that did not succeed.

    Of a job that was itself kept from running, or ended for another one, it is the cause of that.
    """
    for record in failed:
        if not record.status_reason.startswith((NOT_RUN, UNNEEDED)):
            name = record.name.partition(":")[0]
            if record.state is JobState.CANCELLED:
                return f"{name} was cancelled"
            return f"{name} {'refused the model' if exit_code(record) == GateRefused.exit_code else 'failed'}"
    return failed[0].status_reason.partition(": ")[2]


def unneeded_jobs(tasks: Sequence[Task], records: Mapping[str, JobRecord]) -> dict[str, str]:
    """Why to end jobs that have not ended, by name of leaf: none of the jobs that wait for them can run any more.

    A job that no other waits for is always needed. `leaves`: each after those it depends on.
    """
    failures = dict[str, list[JobRecord]]()
    for task in tasks:
        record = records[task.name]  # one that was ended as unneeded stays so, and so do the other children
        if record.state.is_failure and not record.status_reason.startswith(UNNEEDED):
            failures.setdefault(task.spec.name, []).append(record)
    specs = {task.spec.name: task.spec for task in tasks}
    lost, unneeded = dict[str, str](), dict[str, str]()  # by job, with the cause
    for name, spec in specs.items():
        causes = [lost[one.job] for one in spec.depends_on if one.job in lost]
        if name in failures or causes:
            lost[name] = cause_text(failures[name]) if name in failures else causes[0]
    for name in reversed(specs):
        waiting = [other for other, spec in specs.items() if name in (one.job for one in spec.depends_on)]
        ends = [lost.get(other) or unneeded.get(other) for other in waiting]
        if name not in lost and ends and all(ends):
            unneeded[name] = ends[0] or ""
    return {
        task.name: UNNEEDED + unneeded[task.spec.name]
        for task in tasks
        if task.spec.name in unneeded and not records[task.name].state.is_final
    }


def normalize_batch_records(
    plan: JobPlan, records: Sequence[JobRecord], cancelled: Mapping[str, Cancel]
) -> tuple[JobRecord, ...]:
    """Return records of AWS Batch, which reports every end without success as FAILED, in our states and reasons.

    `cancelled`: by id of job, what we have asked to end before it had ended.
    """
    found = dict[str, JobRecord]()

    def renamed(record: JobRecord, asked: Cancel | None) -> JobRecord:
        if record.state is not JobState.FAILED:
            return record
        reason = asked.reason if asked else record.status_reason
        return _move(record, failed_state(reason), reason=reason)

    for record in records:
        asked = cancelled.get(record.id)
        children = (
            renamed(child, asked if asked and (child.stopped_at or asked.at) >= asked.at else None)
            for child in record.children
        )
        one = renamed(record, asked).model_copy(update={"children": tuple(children)})
        failed = [found[of.job] for of in plan.job(one.name).depends_on if of.job in found]
        failed = [of for of in failed if of.state.is_failure]
        if one.state is JobState.FAILED and failed and asked is None and not one.all_attempts():
            one = one.model_copy(update={"status_reason": NOT_RUN + cause_text(failed)})
        found[one.name] = one
    return tuple(found.values())


def starting_record(record: JobRecord, log_streams: Sequence[str]) -> JobRecord:
    attempt = AttemptRecord(log_streams=tuple(log_streams))
    return _move(record, JobState.STARTING, attempts=(*record.attempts, attempt))


def running_record(record: JobRecord, at: float) -> JobRecord:
    """Return the record of a job whose container runs; of a node group, that of the main node."""
    record = with_last_attempt(record, started_at=at)
    return _move(record, JobState.RUNNING, started_at=record.started_at or at)


def record_after_attempt(
    record: JobRecord, retry: Retry, end: AttemptEnd, at: float, *, again: bool | None = None
) -> JobRecord:
    """After an attempt: SUCCEEDED, FAILED, or RUNNABLE for the next one. `again`: what the platform has decided of it;
    None: `retry` decides."""
    record = with_last_attempt(
        record, stopped_at=at, exit_code=end.exit_code, status_reason=end.status_reason, reason=end.reason
    )
    if has_succeeded(end):
        return _move(record, JobState.SUCCEEDED, reason=end.status_reason, stopped_at=at)
    if end.status_reason == INTERRUPTED:
        return _move(record, JobState.RUNNABLE, reason=end.status_reason)
    counted = sum(attempt.status_reason != INTERRUPTED for attempt in record.attempts)
    if should_retry(retry, counted, end) if again is None else again:
        return _move(record, JobState.RUNNABLE, reason=end.status_reason)
    return failed_record(record, end.status_reason, at)


def should_retry(retry: Retry, attempt: int, end: AttemptEnd) -> bool:
    """After attempt number `attempt` (from 1) failed. Those that were timed out or cancelled never are."""
    if attempt >= retry.attempts:
        return False
    if end.status_reason in (HOST_TERMINATED, TASK_NOT_STARTED, SERVICE_FAULT):
        return True
    return end.status_reason == EXITED and end.exit_code in retry.exit_codes


def has_succeeded(end: AttemptEnd) -> bool:
    """Return whether an attempt succeeded. A container that was ended from outside has failed, whatever its code."""
    return end.exit_code == 0 and end.status_reason == EXITED


def failed_record(record: JobRecord, reason: str, at: float) -> JobRecord:
    """Return the record of a job that never ran, or will not run again."""
    return _move(record, failed_state(reason), reason=reason, stopped_at=at)


def failed_state(reason: str) -> JobState:
    """Return CANCELLED if a user ended the job, or we did because it was of no use any more; else FAILED."""
    return JobState.CANCELLED if reason.startswith((CANCELLED, UNNEEDED)) else JobState.FAILED


def queue(tasks: Iterable[Task], records: Mapping[str, JobRecord]) -> list[Task]:
    """RUNNABLE leaves, first in first out; those to be tried again stand at the front."""
    runnable = [task for task in tasks if records[task.name].state is JobState.RUNNABLE]
    again = [task for task in runnable if records[task.name].attempts]
    again.sort(key=lambda task: -(records[task.name].attempts[-1].stopped_at or 0.0))
    return again + [task for task in runnable if not records[task.name].attempts]


def parent_state(children: Sequence[JobState]) -> JobState:
    """Of an array. Children go on when one fails, so the parent fails with the last of them."""
    if all(child.is_final for child in children):
        failures = [state for state in (JobState.FAILED, JobState.CANCELLED) if state in children]
        return failures[0] if failures else JobState.SUCCEEDED
    return JobState.SUBMITTED if set(children) == {JobState.SUBMITTED} else JobState.PENDING


def parent_record(job: JobSpec, job_id: str, children: Sequence[JobRecord]) -> JobRecord:
    state = parent_state([child.state for child in children])
    failures = [child.status_reason for child in children if child.state is state and state.is_failure]
    stopped = [child.stopped_at for child in children if child.stopped_at is not None]
    return JobRecord(
        name=job.name,
        id=job_id,
        state=state,
        status_reason=failures[0] if failures else "",
        created_at=min(child.created_at for child in children),
        started_at=min((child.started_at for child in children if child.started_at is not None), default=None),
        stopped_at=max(stopped, default=None) if state.is_final else None,
        children=tuple(children),
    )


def with_last_attempt(record: JobRecord, **changes: object) -> JobRecord:
    *earlier, last = record.attempts
    return record.model_copy(update={"attempts": (*earlier, last.model_copy(update=changes))})


def _move(record: JobRecord, to: JobState, *, reason: str = "", **changes: object) -> JobRecord:
    return record.model_copy(update={"state": to, "status_reason": reason, **changes})


# What is said of a job whose state has changed, for people. Pure.


class Change(str):
    """A line about a job whose state has changed, which a picture of all jobs shows by itself."""


def change_line(record: JobRecord, log: str = "") -> Change:
    """`train  RUNNABLE  attempt 1 ended with exit code 75; tried again`. `log`: of a job that runs."""
    words = [f"{record.name:<12} {record.state.value:<9}"]
    if not record.attempts:
        return Change("  ".join([*words, record.status_reason]).rstrip())
    last, attempt = record.attempts[-1], f"attempt {len(record.attempts)}"
    end = f"{attempt} ended{'' if last.exit_code is None else f' with exit code {last.exit_code}'}"
    why = last.status_reason if last.status_reason != EXITED or last.exit_code is None else ""
    end = ": ".join(filter(None, (end, ", ".join(filter(None, (why, last.reason))))))
    match record.state:
        case JobState.STARTING:
            words.append(attempt)
        case JobState.RUNNING:
            words += [attempt, log]
        case JobState.RUNNABLE:
            words.append(end if last.status_reason == INTERRUPTED else f"{end}; tried again")
        case JobState.FAILED | JobState.CANCELLED:
            words.append(end if record.status_reason == last.status_reason else record.status_reason)
    return Change("  ".join(words).rstrip())


# How a cycle ended, from how its jobs did. Pure.

_MEANINGS = {rule.exit_code: rule.name for rule in EXIT_TABLE}


def outcome_of(plan: JobPlan, records: Sequence[JobRecord], *, cancelled: Closed | None = None) -> Closed | None:
    """None while a job is not final, or was never submitted.

    A cycle that was submitted half also ends when it is cancelled: a record tells, or whoever cancels now (`cancelled`;
    it counts alone when every job that was submitted had succeeded).
    """
    if not all(record.state.is_final for record in records):
        return None
    is_whole = {job.name for job in plan.jobs} <= {record.name for record in records}
    is_cancelled = any(record.status_reason.startswith(CANCELLED) for record in records)
    ended = max((record.stopped_at or record.created_at for record in records), default=0.0)
    first = first_failure(records)
    if first is None or not (is_whole or is_cancelled):
        return Closed(outcome="succeeded", at=ended) if is_whole else cancelled
    outcome: Outcome = "refused" if exit_code(first) == GateRefused.exit_code else "failed"
    if first.status_reason.startswith(CANCELLED) or not is_whole:
        outcome = "cancelled"
    return Closed(outcome=outcome, at=ended, reason=f"{first.name}: {reason_of(first)}")


def exit_code_of_cycle(closed: Closed, records: Sequence[JobRecord]) -> int:
    """Return the exit code of a command that waited for the cycle: that of the job that ended it, if it is a failure.

    143 for a cycle that was cancelled, 75 for a job that has no such code: timed out, lost.
    """
    if closed.outcome == "succeeded":
        return EXIT_OK
    if closed.outcome == "refused":
        return GateRefused.exit_code
    if closed.outcome == "cancelled":
        return Preempted.exit_code
    first = first_failure(records)
    return (exit_code(first) if first else None) or TransientError.exit_code


def first_failure(records: Sequence[JobRecord]) -> JobRecord | None:
    """Return the job that ended the cycle, not one that failed because of it; None when none failed."""

    def order(record: JobRecord) -> tuple[int, float]:
        """Sort jobs that ran first, then jobs that were cancelled before, then those that ended because of them."""
        why = record.status_reason
        rank = 0 if record.all_attempts() and not why.startswith(UNNEEDED) else 1 if why.startswith(CANCELLED) else 2
        return rank, record.stopped_at or float("inf")

    return min((record for record in records if record.state.is_failure), key=order, default=None)


def exit_code(record: JobRecord) -> int | None:
    """Of the last try of the first child that failed, or of the job; None when nothing ran."""
    tasks = [task for task in record.tasks() if task.state.is_failure] or record.tasks()
    return next((task.attempts[-1].exit_code for task in tasks if task.attempts), None)


def shown_state(record: JobRecord) -> str:
    """Return the state for people: a job that was left out because of another one has not failed itself."""
    return "NOT RUN" if _is_left_out(record) else record.state.value


def _is_left_out(record: JobRecord) -> bool:
    return record.state.is_failure and record.status_reason.startswith(NOT_RUN) and not record.all_attempts()


def reason_of(record: JobRecord) -> str:
    """Return why a job failed, for people."""
    if _is_left_out(record):
        return PAGE_ANYWAY if record.name == "report" else record.status_reason.removeprefix(NOT_RUN)
    task = next((task for task in record.tasks() if task.state is record.state and task.state.is_failure), record)
    words, error = [task.status_reason or record.status_reason], ""
    if task.attempts:
        last = task.attempts[-1]
        words, error = [*words, last.reason], headline(last.error.splitlines())
        if last.exit_code is not None:
            meaning = f" ({_MEANINGS[last.exit_code]})" if last.exit_code in _MEANINGS else ""
            words = [word for word in words if word != EXITED]  # it says less than the code
            words.append(f"exit code {last.exit_code}{meaning}")
    said = ", ".join(dict.fromkeys(word for word in words if word)) or "no reason given"
    return f"{said}: {error}" if error and error not in said else said


def without_error(reason: str, records: Iterable[JobRecord]) -> str:
    """Return a reason without the first line of an error, for output that shows the whole error."""
    for task in filter(None, map(failed_task, records)):
        reason = reason.removesuffix(f": {headline(task.attempts[-1].error.splitlines())}")
    return reason


def failed_task(record: JobRecord) -> JobRecord | None:
    """Of a job that failed by itself: the job, or the first child of an array that did; None for any other job."""
    return next((task for task in record.tasks() if task.state is JobState.FAILED and task.attempts), None)
