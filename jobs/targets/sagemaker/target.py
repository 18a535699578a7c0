"""SageMaker as a target of cycles: training jobs that a process looks after until the last has ended.

Nothing but names holds a cycle together: whoever comes next describes the training jobs that should exist and goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jobs.cycle import job_states
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import AttemptEnd, Cancel, JobRecord, JobState, SubmittedJob, Task
from jobs.plan.spec import JobPlan
from jobs.targets.base import (
    PATIENCE_S,
    LatestRecords,
    More,
    Target,
    job_id_of,
    latest_records,
    log_stream,
    no_log_error,
    read_cancels,
    sagemaker_placement_of,
    save_cancels,
)
from jobs.targets.batch.client import LogsClient
from jobs.targets.batch.target import next_command, reason_in
from jobs.targets.sagemaker.requests import CycleRun, check_plan
from jobs.targets.sagemaker.routes import QUEUED, QUOTA, DirectRoute, ObservedAttempt, QueueRoute
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


@dataclass(frozen=True)
class SageMakerTarget(Target):
    """`stop`: this process is to end; the training jobs go on.

    Each job takes the route of its plan, whatever the settings of the process that follows it.
    """

    name = "sagemaker"
    direct: DirectRoute
    queue: QueueRoute
    logs_client: LogsClient
    store: CycleStore
    say: Callable[[str], object]
    stop: StopSignal
    poll_s: float = 30.0

    def submit(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Raises Preempted when stopped, TransientError when nobody answers for 15 min; the same command goes on."""
        self.record_submissions(plan, submission, jobs)
        answered_at = self.store.clock()
        while True:
            try:
                if all(record.state.is_final for record in self.advance(plan)):
                    return
                answered_at = self.store.clock()
            except TransientError as error:
                self.say(f"not reached: {error.seen}")
                if self.store.clock() - answered_at > PATIENCE_S:
                    raise
            self.stop.wait(self.poll_s)
            self.stop.raise_if_set("following training jobs, which run on; trnjobs submit follows them again")

    def record_submissions(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Put the jobs on record; from then on any process can follow them."""
        done, cycle = self.store.submitted(submission), self._cycle(plan)
        for job in plan.jobs:
            if job.name in jobs and job.name not in done:
                one = SubmittedJob(
                    job=job.name, id=cycle.task_id(Task(job), submission), submitted_at=self.store.clock()
                )
                self.store.save_submitted(submission, one)

    def advance(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Make what may start now and end what is to end; return and save the records after it."""
        known, cycle = self._known(plan), self._cycle(plan)
        first = self._look(cycle, known)
        made = dict(first.records)
        for task in first.starts:
            record, attempt = made[task.name], attempt_of(made[task.name]) or 1
            one = self._route(plan, task).start(cycle, task, known.submissions[task.name], attempt)
            made[task.name] = observed_record(task, record, one, None, self.store.clock())
        now = self._look(cycle, replace(known, records=made)) if first.starts else first
        for name, record in now.records.items():
            if record.state is not known.records[name].state:
                self.say(job_states.change_line(record, log_stream(record, len(record.attempts), 0)))
        # A reason to cancel that came meanwhile is read by that second look: what was made before it is ended.
        for task, reason in now.stops:
            attempt = len(now.records[task.name].attempts)
            self._route(plan, task).stop(cycle, task, known.submissions[task.name], attempt, reason)
        records = known.by_job(plan, now.records)
        self.store.save_records(records)
        return records

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        known = self._known(plan)
        return known.by_job(plan, self._look(self._cycle(plan), known).records)

    def check(self, plan: JobPlan) -> None:
        """Check the plan. Without a queue the account is not asked: SageMaker refuses what does not fit it."""
        check_plan(plan)
        self.queue.check(plan)

    def check_blocked(self, records: Sequence[JobRecord]) -> tuple[str, ...]:
        """Return lines about quotas and capacity. Both may come, so no job is ended for them."""
        lines = []
        for task in (task for record in records for task in record.tasks()):
            if task.state is JobState.RUNNABLE and task.status_reason.startswith(QUOTA):
                lines.append(
                    f"{task.name} cannot start: {task.status_reason}; next: wait for the account's other jobs, or"
                    " aws service-quotas list-service-quotas --service-code sagemaker"
                )
            elif task.state is JobState.RUNNABLE and (reason := reason_in(task.status_reason)):
                lines.append(f"{task.name} cannot start: {task.status_reason}; next: {next_command(reason)}")
            elif task.state.is_active and task.status_reason:
                lines.append(f"{task.name} waits for machines of SageMaker: {task.status_reason}")
        return tuple(lines)

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the lines; where SageMaker started an attempt again in place, of all its starts."""
        prefix = log_stream(record, attempt, node)
        streams = self.logs_client.streams(LOG_GROUP, prefix) if prefix else ()
        if not streams:
            raise no_log_error(record, attempt, node)
        for stream in streams:
            yield from self.logs_client.lines(LOG_GROUP, stream, more if stream == streams[-1] else lambda: False)

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """Ask every training job to end, from the sinks backwards. What has not been made never will be."""
        ids = [record.id for record in self.records(plan) if not record.state.is_final]
        if ids:
            save_cancels(self.store, dict.fromkeys(ids, Cancel(reason=reason, at=self.store.clock())))
            self.advance(plan)

    def _look(self, cycle: CycleRun, known: LatestRecords) -> "CycleActions":
        asked = read_cancels(self.store)
        cancelled = {name: asked[job_id_of(one)] for name, one in known.records.items() if job_id_of(one) in asked}
        seen = dict[tuple[str, int], ObservedAttempt | None]()

        def look(task: Task, attempt: int) -> ObservedAttempt | None:
            key = task.name, attempt
            if key not in seen:
                seen[key] = self._route(cycle.plan, task).look(cycle, task, known.submissions[task.name], attempt)
            return seen[key]

        return decide_actions(known.tasks, known.records, look, cancelled=cancelled, at=self.store.clock())

    def _route(self, plan: JobPlan, task: Task) -> DirectRoute | QueueRoute:
        return self.queue if sagemaker_placement_of(plan, task.spec).queue else self.direct

    def _known(self, plan: JobPlan) -> LatestRecords:
        return latest_records(plan, self.store, (task for record in self.store.records() for task in record.tasks()))

    def _cycle(self, plan: JobPlan) -> CycleRun:
        claim = self.store.claim()
        return CycleRun(plan, claim.claimed_at if claim else 0.0)


# SageMaker knows no dependencies and no second attempt: both are decided here, by the rules of jobs/cycle/job_states.py
# that the local engine has. Whoever asks, and as often as they like, gets the same answer for the same knowledge.

LAG_S = 600.0
"""A training job that was made and is not described for so long is there no more."""


@dataclass(frozen=True)
class CycleActions:
    """The records of all leaves by name; which may be made, and which are to end, and why.

    An active leaf that may be made is one whose last attempt has vanished.
    """

    records: Mapping[str, JobRecord]
    starts: tuple[Task, ...]
    stops: tuple[tuple[Task, str], ...]


def decide_actions(
    tasks: Sequence[Task],
    records: Mapping[str, JobRecord],
    look: Callable[[Task, int], ObservedAttempt | None],
    *,
    cancelled: Mapping[str, Cancel],
    at: float,
) -> CycleActions:
    """Look at every attempt that may exist, until nothing new comes of it.

    `look` returns None for an attempt that does not exist. `cancelled`: by users, by name of leaf.
    """
    now, ends = dict(records), dict(cancelled)
    while True:
        before = dict(now)
        ended_at = min((one.stopped_at or at for one in now.values() if one.state.is_failure), default=at)
        for name, reason in job_states.unneeded_jobs(tasks, now).items():
            ends.setdefault(name, Cancel(reason=reason, at=ended_at))
        for task in tasks:
            record, cancel = now[task.name], ends.get(task.name)
            number = attempt_of(record)
            if number and (one := look(task, number)):
                now[task.name] = observed_record(task, record, one, cancel, at)
            elif number and cancel:
                # Never made; or made and deleted. What was handed over to a queue may be listed late.
                is_new = record.state is JobState.RUNNABLE and not record.status_reason.startswith(QUEUED)
                if is_new or at - cancel.at > LAG_S:
                    now[task.name] = job_states.failed_record(record, cancel.reason, at)
        failed = {task.spec.name for task in tasks if now[task.name].state.is_failure}
        waiting = [task for task in tasks if task.name in ends and now[task.name].state is JobState.PENDING]
        for task in waiting:
            if not failed.isdisjoint(task.waits_for()):  # it has not failed for what is cancelled with it
                now[task.name] = job_states.failed_record(now[task.name], ends[task.name].reason, at)
                failed.add(task.spec.name)
        now |= job_states.advance_waiting_jobs(tasks, now, at)
        if now != before:
            continue
        if not waiting:
            break
        now |= {task.name: job_states.failed_record(now[task.name], ends[task.name].reason, at) for task in waiting}
    active = [task for task in tasks if now[task.name].state.is_active]
    found = {task.name: look(task, number) for task in tasks if (number := attempt_of(now[task.name]))}
    order = [task for task in (*job_states.queue(tasks, now), *active) if found[task.name] is None]
    made = {name for name, one in found.items() if one is not None or now[name].state.is_active}
    return CycleActions(
        records=now,
        starts=tuple(task for task in order if task.name not in ends),
        stops=tuple((task, ends[task.name].reason) for task in reversed(tasks) if task.name in made & ends.keys()),
    )


def attempt_of(record: JobRecord) -> int | None:
    """Return the attempt that is under way or may be made; None for a leaf that waits for others or has ended."""
    if record.state.is_active:
        return len(record.attempts)
    return len(record.attempts) + 1 if record.state is JobState.RUNNABLE else None


def observed_record(
    task: Task, record: JobRecord, one: ObservedAttempt, cancelled: Cancel | None, at: float
) -> JobRecord:
    """Return the record with what was seen of the attempt that is under way, or may be made."""
    is_runnable = record.state is JobState.RUNNABLE
    if one.is_queued and is_runnable and one.end is not None:
        reason = cancelled.reason if cancelled else one.end.status_reason
        return job_states.failed_record(record, reason, one.ended_at or at)
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
    record = job_states.record_after_attempt(record, task.spec.retry, end, one.ended_at or at, again=one.again)
    return job_states.with_last_attempt(record, billable_s=one.billable_s)
