"""Records of the jobs of a cycle, and their state transitions, which all targets share.

The states and transitions are those of AWS Batch. A task is either a job that runs, or one child of an array. The state
of the parent of an array is derived from its children: it is PENDING while they are running, and becomes FAILED once
all of them have ended if at least one has failed.

Source: AWS Batch user guide (job states, dependencies, array jobs, job retries).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field

from jobs.plan.spec import JobPlan, JobSpec, Retry
from pipeline.core.errors import EXIT_NAMES, EXIT_OK, GateRefused, Preempted, TransientError, headline
from pipeline.core.record import Record


class JobState(StrEnum):
    """The states of a job in AWS Batch, in the order in which a job passes through them. A retry returns to RUNNABLE.

    CANCELLED is our own addition, because AWS Batch and SageMaker report a cancelled job as failed or stopped.
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
        """Return whether the job has ended without success."""
        return self in (JobState.FAILED, JobState.CANCELLED)

    @property
    def is_active(self) -> bool:
        """Return whether an attempt is running."""
        return self in (JobState.STARTING, JobState.RUNNING)


class AttemptRecord(Record):
    """One attempt of one task. Times are in seconds since 1970, and None until they are known."""

    started_at: float | None = None
    stopped_at: float | None = None
    exit_code: int | None = Field(None, description="Exit code of the container, or of the main node (none: never ran)")
    status_reason: str = ""
    reason: str = Field("", description="Reason reported for the container, such as OutOfMemoryError")
    log_streams: tuple[str, ...] = Field((), description="One log stream per node, in the order of nodes")
    error: str = Field("", description="The error in the log of the attempt, a few lines (empty: unknown)")
    error_node: int = Field(0, description="The node whose log contains the error")
    billable_s: float | None = Field(None, description="Billed seconds per machine, if the platform reports them")

    @property
    def seconds(self) -> float | None:
        """Return the duration, or None if the attempt never ran or has not ended."""
        return None if self.started_at is None or self.stopped_at is None else self.stopped_at - self.started_at

    @property
    def is_stopped(self) -> bool:
        """Return whether the platform ended the attempt, which has then failed even if its exit code is 0."""
        return self.status_reason not in ("", EXITED)

    @property
    def is_preempted(self) -> bool:
        """Return whether the attempt lost its machine, or saved its state and stopped because it would lose it."""
        is_stopped = self.status_reason == EXITED and self.exit_code == Preempted.exit_code
        return is_stopped or self.status_reason.startswith(HOST_LOST)


class JobRecord(Record):
    """One job, or one child of an array."""

    name: str = Field(description="Name in the plan (of a child: name:index)")
    id: str
    state: JobState
    status_reason: str = ""
    created_at: float
    started_at: float | None = None
    stopped_at: float | None = None
    attempts: tuple[AttemptRecord, ...] = ()
    children: tuple["JobRecord", ...] = Field((), description="Children of an array, by index")
    num_nodes: int = Field(0, description="0: a single container")

    def tasks(self) -> tuple["JobRecord", ...]:
        """Return the children of an array, or the job itself if it is not an array."""
        return self.children or (self,)

    def all_attempts(self) -> list[AttemptRecord]:
        """Return the attempts of all tasks."""
        return [attempt for task in self.tasks() for attempt in task.attempts]


Outcome = Literal["succeeded", "failed", "refused", "cancelled"]
"""The outcome of a cycle. `refused` means that the gate refused the candidate, so that production is unchanged."""


class SubmittedJob(Record):
    """The record of a submitted job, which is written before the next job is submitted."""

    job: str
    id: str
    definition: str = ""
    submitted_at: float


class Cancel(Record):
    """A request to end a job. `at` is in seconds since 1970."""

    reason: str
    at: float


class Closed(Record):
    """The end of a cycle, after which the next cycle may start."""

    outcome: Outcome
    at: float
    reason: str = ""
    round: int | None = Field(None, description="Number of the submission (none: written by an earlier version)")

    @property
    def text(self) -> str:
        return self.outcome + (f", {self.reason}" if self.reason else "")


class BlockedJob(Record):
    """A task that has been blocked for the same reason since `since` (seconds since 1970)."""

    job: str = Field(description="Name of the task (of a child: name:index)")
    id: str
    reason: str
    since: float


# State transitions.

EXITED = "Essential container in task exited"
TIMED_OUT = "Job attempt duration exceeded timeout"
TASK_NOT_STARTED = "Task failed to start"
HOST_LOST = "Host EC2"
"""Prefix of the reason of AWS Batch for a machine that was lost."""
HOST_TERMINATED = f"{HOST_LOST} (local) terminated."
SERVICE_FAULT = "Internal error of the service that runs the job"
"""Used for SageMaker, which does not distinguish lost machines from internal errors."""
INTERRUPTED = "Interrupted with the command that ran the jobs"
"""An attempt that was interrupted does not count towards the retries. The next submission continues the job."""
CANCELLED = "cancelled: "
"""Prefix of the reason of a job that was cancelled by `trnjobs cancel`."""
UNNEEDED = "no longer needed: "
"""Prefix of the reason of a job that was ended because none of the jobs that depend on it can run any more."""
NOT_RUN = "not run: "
"""Prefix of the reason of a job that did not run because a dependency did not succeed."""
PAGE_ANYWAY = "not needed: the end of the cycle writes the page"
"""The reason that is shown for the job `report` if the cycle ended before it could run."""


@dataclass(frozen=True)
class AttemptEnd:
    """How an attempt ended.

    `exit_code` is None if the container never ran. `status_reason` is one of the reasons above, or given by the user.
    """

    exit_code: int | None
    status_reason: str
    reason: str = ""


@dataclass(frozen=True)
class Task:
    """A job that runs, or one child of an array."""

    spec: JobSpec
    index: int | None = None

    @property
    def name(self) -> str:
        return self.spec.name if self.index is None else f"{self.spec.name}:{self.index}"

    def waits_for(self) -> Iterator[str]:
        """Yield the names of the jobs that must succeed before this task can start."""
        return (dependency.job for dependency in self.spec.depends_on)


def tasks_of(job: JobSpec) -> list[Task]:
    """Return the children of an array, or the job itself if it is not an array."""
    return [Task(job, index) for index in range(job.array_size)] if job.array_size else [Task(job)]


def new_record(task: Task, job_id: str, at: float) -> JobRecord:
    task_id = job_id if task.index is None else f"{job_id}:{task.index}"
    return JobRecord(name=task.name, id=task_id, state=JobState.SUBMITTED, created_at=at, num_nodes=task.spec.num_nodes)


def advance_waiting_jobs(tasks: Sequence[Task], records: Mapping[str, JobRecord], at: float) -> dict[str, JobRecord]:
    """Advance every task that waits for dependencies by one state, and return the changed records.

    This must be called repeatedly until nothing changes. Dependencies without a record are assumed to have succeeded in
    an earlier submission.
    """
    now = {task.name: records[task.name] for task in tasks}
    children = dict[str, list[str]]()
    for task in tasks:
        if task.index is not None:
            children.setdefault(task.spec.name, []).append(task.name)
    states = {name: record.state for name, record in now.items()}
    states |= {name: parent_state([states[child] for child in names]) for name, names in children.items()}
    changed = {}
    for task in tasks:
        record, needs = records[task.name], [states.get(name, JobState.SUCCEEDED) for name in task.waits_for()]
        if record.state is JobState.SUBMITTED:
            record = _move(record, JobState.PENDING if needs else JobState.RUNNABLE)
        elif record.state is JobState.PENDING and any(need.is_failure for need in needs):
            names = (part for name in task.waits_for() if name in states for part in children.get(name, [name]))
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
    """Return why a job could not run, such as `prepare failed`. `failed` are the dependencies that did not succeed.

    If these could not run either, this is the reason why they could not.
    """
    for record in failed:
        if not record.status_reason.startswith((NOT_RUN, UNNEEDED)):
            name = record.name.partition(":")[0]
            if record.state is JobState.CANCELLED:
                return f"{name} was cancelled"
            return f"{name} {'refused the model' if exit_code(record) == GateRefused.exit_code else 'failed'}"
    return failed[0].status_reason.partition(": ")[2]


def unneeded_jobs(tasks: Sequence[Task], records: Mapping[str, JobRecord]) -> dict[str, str]:
    """Return the names of tasks that are no longer needed, with the reason for ending them.

    A job is no longer needed if none of the jobs that depend on it can run any more. A job on which no other job
    depends is always needed. `tasks` must be in topological order.
    """
    failures = dict[str, list[JobRecord]]()
    for task in tasks:
        record = records[task.name]  # a job that was ended as unneeded, and its other children, stay unneeded
        if record.state.is_failure and not record.status_reason.startswith(UNNEEDED):
            failures.setdefault(task.spec.name, []).append(record)
    specs = {task.spec.name: task.spec for task in tasks}
    lost, unneeded = dict[str, str](), dict[str, str]()  # causes by job name
    for name, spec in specs.items():
        causes = [lost[dependency.job] for dependency in spec.depends_on if dependency.job in lost]
        if name in failures or causes:
            lost[name] = cause_text(failures[name]) if name in failures else causes[0]
    for name in reversed(specs):
        waiting = [other for other, spec in specs.items() if name in (needed.job for needed in spec.depends_on)]
        causes = [lost.get(other) or unneeded.get(other, "") for other in waiting]
        if name not in lost and causes and all(causes):
            unneeded[name] = causes[0]
    return {
        task.name: UNNEEDED + unneeded[task.spec.name]
        for task in tasks
        if task.spec.name in unneeded and not records[task.name].state.is_final
    }


def normalize_batch_records(
    plan: JobPlan, records: Sequence[JobRecord], cancelled: Mapping[str, Cancel]
) -> tuple[JobRecord, ...]:
    """Set the state of cancelled jobs and the reasons of skipped jobs, because AWS Batch reports both as FAILED.

    `cancelled` contains the recorded cancellations by job id.
    """
    normalized = dict[str, JobRecord]()

    def with_reason(record: JobRecord, cancel: Cancel | None) -> JobRecord:
        if record.state is not JobState.FAILED:
            return record
        reason = cancel.reason if cancel else record.status_reason
        return _move(record, failed_state(reason), reason=reason)

    for record in records:
        cancel = cancelled.get(record.id)
        children = (
            with_reason(child, cancel if cancel and (child.stopped_at or cancel.at) >= cancel.at else None)
            for child in record.children
        )
        record = with_reason(record, cancel).model_copy(update={"children": tuple(children)})
        dependencies = [
            normalized[needed.job] for needed in plan.job(record.name).depends_on if needed.job in normalized
        ]
        failed = [dependency for dependency in dependencies if dependency.state.is_failure]
        if record.state is JobState.FAILED and failed and cancel is None and not record.all_attempts():
            record = record.model_copy(update={"status_reason": NOT_RUN + cause_text(failed)})
        normalized[record.name] = record
    return tuple(normalized.values())


def starting_record(record: JobRecord, log_streams: Sequence[str]) -> JobRecord:
    attempt = AttemptRecord(log_streams=tuple(log_streams))
    return _move(record, JobState.STARTING, attempts=(*record.attempts, attempt))


def running_record(record: JobRecord, at: float) -> JobRecord:
    """Return the record of a job after its container, or that of its main node, has started."""
    record = with_last_attempt(record, started_at=at)
    return _move(record, JobState.RUNNING, started_at=record.started_at or at)


def record_after_attempt(
    record: JobRecord, retry: Retry, end: AttemptEnd, at: float, *, will_retry: bool | None = None
) -> JobRecord:
    """Return the record after an attempt has ended, which is SUCCEEDED, FAILED, or RUNNABLE if it is retried.

    If `will_retry` is None, the rules in `retry` decide whether to retry.
    """
    record = with_last_attempt(
        record, stopped_at=at, exit_code=end.exit_code, status_reason=end.status_reason, reason=end.reason
    )
    if has_succeeded(end):
        return _move(record, JobState.SUCCEEDED, reason=end.status_reason, stopped_at=at)
    if end.status_reason == INTERRUPTED:
        return _move(record, JobState.RUNNABLE, reason=end.status_reason)
    if should_retry(retry, counted_attempts(record, retry), end) if will_retry is None else will_retry:
        return _move(record, JobState.RUNNABLE, reason=end.status_reason)
    return failed_record(record, end.status_reason, at)


def counted_attempts(record: JobRecord, retry: Retry) -> int:
    """Return how many attempts count towards `retry.attempts`."""
    interrupted = sum(attempt.status_reason == INTERRUPTED for attempt in record.attempts)
    return len(record.attempts) - interrupted - min(preempted_attempts(record), retry.preemptions)


def preempted_attempts(record: JobRecord) -> int:
    return sum(attempt.is_preempted for attempt in record.all_attempts())


def should_retry(retry: Retry, attempt: int, end: AttemptEnd) -> bool:
    """Return whether to retry after the attempt that counts as number `attempt` (from 1) has failed.

    Timeouts are never retried.
    """
    if attempt >= retry.attempts:
        return False
    if end.status_reason in (HOST_TERMINATED, TASK_NOT_STARTED, SERVICE_FAULT):
        return True
    return end.status_reason == EXITED and end.exit_code in retry.exit_codes


def has_succeeded(end: AttemptEnd) -> bool:
    """Return whether an attempt succeeded. If a container was stopped, it has failed even if its exit code is 0."""
    return end.exit_code == 0 and end.status_reason == EXITED


def failed_record(record: JobRecord, reason: str, at: float) -> JobRecord:
    """Return the record of a job after it has ended without success, for the given reason."""
    return _move(record, failed_state(reason), reason=reason, stopped_at=at)


def failed_state(reason: str) -> JobState:
    """Return CANCELLED if the job was cancelled by a user or is no longer needed, otherwise FAILED."""
    return JobState.CANCELLED if reason.startswith((CANCELLED, UNNEEDED)) else JobState.FAILED


def queue(tasks: Iterable[Task], records: Mapping[str, JobRecord]) -> list[Task]:
    """Return the RUNNABLE tasks in the order in which they should start: retries first, then first in, first out."""
    runnable = [task for task in tasks if records[task.name].state is JobState.RUNNABLE]
    retries = [task for task in runnable if records[task.name].attempts]
    retries.sort(key=lambda task: -(records[task.name].attempts[-1].stopped_at or 0.0))
    return retries + [task for task in runnable if not records[task.name].attempts]


def parent_state(children: Sequence[JobState]) -> JobState:
    """Return the state of the parent of an array.

    If a child fails, the others continue, so the parent only fails when the last child has ended.
    """
    if all(child.is_final for child in children):
        failures = [state for state in (JobState.FAILED, JobState.CANCELLED) if state in children]
        return failures[0] if failures else JobState.SUCCEEDED
    return JobState.SUBMITTED if set(children) == {JobState.SUBMITTED} else JobState.PENDING


def parent_record(job: JobSpec, job_id: str, children: Sequence[JobRecord]) -> JobRecord:
    """Return the record of the parent of an array, derived from the records of its children."""
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


# Messages about state changes.


class Change(str):
    """A line about a state change of a job. The live display omits these lines, because it shows all states anyway."""


def change_line(record: JobRecord, log: str = "") -> Change:
    """Return a line such as `train  RUNNABLE  attempt 1 ended with exit code 75; retrying`.

    `log` is the path of the log of a running job.
    """
    fields = [f"{record.name:<12} {shown_state(record):<9}"]
    if not record.attempts:
        reason = reason_of(record) if is_skipped(record) else record.status_reason
        return Change("  ".join([*fields, reason]).rstrip())
    last, attempt = record.attempts[-1], f"attempt {len(record.attempts)}"
    end = f"{attempt} ended{'' if last.exit_code is None else f' with exit code {last.exit_code}'}"
    why = last.status_reason if last.status_reason != EXITED or last.exit_code is None else ""
    end = ": ".join(filter(None, (end, ", ".join(filter(None, (why, last.reason))))))
    match record.state:
        case JobState.STARTING:
            fields.append(attempt)
        case JobState.RUNNING:
            fields += [attempt, log]
        case JobState.RUNNABLE:
            fields.append(end if last.status_reason == INTERRUPTED else f"{end}; retrying")
        case JobState.FAILED | JobState.CANCELLED:
            fields.append(end if record.status_reason == last.status_reason else record.status_reason)
    return Change("  ".join(fields).rstrip())


# The outcome of a cycle, determined from the records of its jobs.


def outcome_of(plan: JobPlan, records: Sequence[JobRecord], *, cancelled: Closed | None = None) -> Closed | None:
    """Return how the cycle ended, or None if any job was not submitted or has not ended.

    A cycle that was only partially submitted ends when it is cancelled. This is visible in its records, unless all
    submitted jobs had already succeeded. In that case, the caller must pass `cancelled`.
    """
    if not all(record.state.is_final for record in records):
        return None
    is_complete = {job.name for job in plan.jobs} <= {record.name for record in records}
    is_cancelled = any(record.status_reason.startswith(CANCELLED) for record in records)
    ended = max((record.stopped_at or record.created_at for record in records), default=0.0)
    first = first_failure(records)
    if first is None or not (is_complete or is_cancelled):
        return Closed(outcome="succeeded", at=ended) if is_complete else cancelled
    outcome: Outcome = "refused" if exit_code(first) == GateRefused.exit_code else "failed"
    if first.status_reason.startswith(CANCELLED) or not is_complete:
        outcome = "cancelled"
    return Closed(outcome=outcome, at=ended, reason=f"{first.name}: {reason_of(first)}")


def exit_code_of_cycle(closed: Closed, records: Sequence[JobRecord]) -> int:
    """Return the exit code of a command that waits for the cycle.

    This is the exit code of the job that failed first (75 if it has none), or 143 if the cycle was cancelled.
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
    """Return the job that caused the cycle to fail, or None if no job failed."""

    def order(record: JobRecord) -> tuple[int, float]:
        """Sort jobs that ran before cancelled jobs, and those before jobs that were skipped because of a dependency."""
        reason = record.status_reason
        has_run = record.all_attempts() and not reason.startswith(UNNEEDED)
        rank = 0 if has_run else 1 if reason.startswith(CANCELLED) else 2
        return rank, record.stopped_at or float("inf")

    return min((record for record in records if record.state.is_failure), key=order, default=None)


def exit_code(record: JobRecord) -> int | None:
    """Return the exit code of the last attempt, or None if nothing ran. For an array, use the first failed child."""
    tasks = [task for task in record.tasks() if task.state.is_failure] or record.tasks()
    return next((task.attempts[-1].exit_code for task in tasks if task.attempts), None)


def shown_state(record: JobRecord) -> str:
    """Return the state to display, which is NOT RUN if the job was skipped because of a dependency."""
    return "NOT RUN" if is_skipped(record) else record.state.value


def is_skipped(record: JobRecord) -> bool:
    """Return whether a job did not run because a dependency did not succeed."""
    return record.state.is_failure and record.status_reason.startswith(NOT_RUN) and not record.all_attempts()


def reason_of(record: JobRecord) -> str:
    """Return why a job failed, as text to display."""
    if is_skipped(record):
        return PAGE_ANYWAY if record.name == "report" else record.status_reason.removeprefix(NOT_RUN)
    task = next((task for task in record.tasks() if task.state is record.state and task.state.is_failure), record)
    causes, error = [task.status_reason or record.status_reason], ""
    if task.attempts:
        last = task.attempts[-1]
        causes, error = [*causes, last.reason], headline(last.error.splitlines())
        if last.exit_code is not None:
            meaning = f" ({EXIT_NAMES[last.exit_code]})" if last.exit_code in EXIT_NAMES else ""
            causes = [cause for cause in causes if cause != EXITED]  # the exit code is more specific
            causes.append(f"exit code {last.exit_code}{meaning}")
    reason = ", ".join(dict.fromkeys(cause for cause in causes if cause)) or "no reason given"
    return f"{reason}: {error}" if error and error not in reason else reason


def without_error(reason: str, records: Iterable[JobRecord]) -> str:
    """Return the reason without the first line of the error, for output that includes the whole error anyway."""
    for task in filter(None, map(failed_task, records)):
        reason = reason.removesuffix(f": {headline(task.attempts[-1].error.splitlines())}")
    return reason


def failed_task(record: JobRecord) -> JobRecord | None:
    """Return the job, or the first child of an array, that ran and failed.

    Return None if the job has not failed, or has only failed because of a dependency.
    """
    return next((task for task in record.tasks() if task.state is JobState.FAILED and task.attempts), None)
