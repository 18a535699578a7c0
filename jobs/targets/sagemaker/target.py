"""The target that runs the jobs of a cycle as SageMaker training jobs.

A process starts the training jobs and follows them until the last one has ended. Their names are deterministic, so that
a different process can find the jobs of a cycle and continue.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    no_log,
    sagemaker_placement_of,
)
from jobs.targets.batch.client import LogsClient
from jobs.targets.batch.target import next_command, reason_in
from jobs.targets.sagemaker.requests import CycleRun, check_plan
from jobs.targets.sagemaker.routes import QUEUED, QUOTA, DirectRoute, ObservedAttempt, QueueRoute
from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
MAX_UNSEEN_S = 60
"""Seconds for which a job that was just started, but must end, is looked for. AWS does not show new jobs at once."""
UNSEEN_POLL_S = 5


@dataclass(frozen=True)
class SageMakerTarget(Target):
    """A target that runs the jobs of one cycle on SageMaker.

    When `stop` is set, this process ends but the training jobs continue. The route of each job is determined by the
    plan, and not by the settings of the process that follows it.
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
        """Submit the jobs and follow them until the last one has ended.

        Raises Preempted if this process is stopped, or TransientError if AWS was unreachable for 15 minutes.
        """
        self.record_submissions(plan, submission, jobs)
        answered_at = self.store.clock()
        while True:
            try:
                if all(record.state.is_final for record in self.advance(plan)):
                    return
                answered_at = self.store.clock()
            except TransientError as error:
                self.say(f"unreachable: {error.seen}")
                if self.store.clock() - answered_at > PATIENCE_S:
                    raise
            self.stop.wait(self.poll_s)
            self.stop.raise_if_set("following training jobs, which continue (trnjobs submit follows them again)")

    def record_submissions(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Record the jobs, so that any process can follow them from then on."""
        existing, cycle = self.store.submitted(submission), self._cycle(plan)
        for job in plan.jobs:
            if job.name in jobs and job.name not in existing:
                job_id = cycle.task_id(Task(job), submission)
                submitted_job = SubmittedJob(job=job.name, id=job_id, submitted_at=self.store.clock())
                self.store.save_submitted(submission, submitted_job)

    def advance(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Start all tasks that may start, stop those that must end, then save and return the records."""
        saved = self.store.records()
        latest, cycle = self._latest(plan, saved), self._cycle(plan)
        first = self._decide(cycle, latest)
        started = dict(first.records)
        for task in first.starts:
            record, attempt = started[task.name], attempt_of(started[task.name]) or 1
            observed = self._route(plan, task).start(cycle, task, latest.submissions[task.name], attempt)
            started[task.name] = observed_record(task, record, observed, None, self.store.clock())
        actions = self._decide(cycle, replace(latest, records=started)) if first.starts else first
        for name, record in actions.records.items():
            if record.state is not latest.records[name].state:
                self.say(job_states.change_line(record, log_stream(record, len(record.attempts), 0)))
        # The second decision reads the cancellations again, in case a job was cancelled while it was being started. Its
        # cycle may have been closed since then, so that nobody else would stop it.
        for task, reason in actions.stops:
            route, attempt = self._route(plan, task), len(actions.records[task.name].attempts)
            num_tries = MAX_UNSEEN_S // UNSEEN_POLL_S if task in first.starts else 1
            while not route.stop(cycle, task, latest.submissions[task.name], attempt, reason) and num_tries > 1:
                num_tries -= 1
                self.stop.wait(min(self.poll_s, UNSEEN_POLL_S))
        records = latest.by_job(plan, actions.records)
        if records != saved:
            self.store.save_records(records)
        return records

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        latest = self._latest(plan, self.store.records())
        return latest.by_job(plan, self._decide(self._cycle(plan), latest).records)

    def check(self, plan: JobPlan) -> None:
        """Check the plan, and the queues if there are any. Jobs without a queue are checked by SageMaker itself."""
        check_plan(plan)
        self.queue.check(plan)

    def check_blocked(self, records: Sequence[JobRecord]) -> tuple[str, ...]:
        """Return a line for each job that waits for quota or capacity. No job is ended, since waiting may help."""
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
                lines.append(f"{task.name} is waiting for SageMaker capacity: {task.status_reason}")
        return tuple(lines)

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the log lines of an attempt. If SageMaker restarted it in place, this includes all of its starts."""
        prefix = log_stream(record, attempt, node)
        streams = self.logs_client.streams(LOG_GROUP, prefix) if prefix else ()
        if not streams:
            raise no_log(record, attempt, node)
        for stream in streams:
            yield from self.logs_client.lines(LOG_GROUP, stream, more if stream == streams[-1] else lambda: False)

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """Stop every training job, starting with the last one of the plan. Tasks that are waiting are never started."""
        ids = [record.id for record in self.records(plan) if not record.state.is_final]
        if ids:
            self.store.save_cancels(dict.fromkeys(ids, Cancel(reason=reason, at=self.store.clock())))
            self.advance(plan)

    def _decide(self, cycle: CycleRun, latest: LatestRecords) -> "CycleActions":
        cancels = self.store.cancels()
        job_ids = {name: job_id_of(record) for name, record in latest.records.items()}
        cancelled = {name: cancels[job_id] for name, job_id in job_ids.items() if job_id in cancels}
        observed = dict[tuple[str, int], ObservedAttempt | None]()

        def observe(task: Task, attempt: int) -> ObservedAttempt | None:
            key = task.name, attempt
            if key not in observed:
                observed[key] = self._route(cycle.plan, task).observe(
                    cycle, task, latest.submissions[task.name], attempt
                )
            return observed[key]

        last = max(latest.submissions.values(), default=0)
        earlier = {name for name, submission in latest.submissions.items() if submission < last}
        at = self.store.clock()
        return decide_actions(latest.tasks, latest.records, observe, cancelled=cancelled, earlier=earlier, at=at)

    def _route(self, plan: JobPlan, task: Task) -> DirectRoute | QueueRoute:
        return self.queue if sagemaker_placement_of(plan, task.spec).queue else self.direct

    def _latest(self, plan: JobPlan, saved: Sequence[JobRecord]) -> LatestRecords:
        return latest_records(plan, self.store, (task for record in saved for task in record.tasks()))

    def _cycle(self, plan: JobPlan) -> CycleRun:
        claim = self.store.claim()
        return CycleRun(plan, claim.claimed_at if claim else 0.0)


# SageMaker does not support dependencies or retries, so both are implemented here, by the same rules that the local
# engine uses (jobs/cycle/job_states.py). Decisions only depend on the records and the observed states.

LAG_S = 600.0
"""Seconds after which a training job that was created but cannot be described is assumed to be gone."""


@dataclass(frozen=True)
class CycleActions:
    """The records of all tasks by name, the tasks to start, and the tasks to stop with the reason.

    `starts` may include an active task, if its last attempt no longer exists.
    """

    records: Mapping[str, JobRecord]
    starts: tuple[Task, ...]
    stops: tuple[tuple[Task, str], ...]


def decide_actions(
    tasks: Sequence[Task],
    records: Mapping[str, JobRecord],
    observe: Callable[[Task, int], ObservedAttempt | None],
    *,
    cancelled: Mapping[str, Cancel],
    earlier: Collection[str] = (),
    at: float,
) -> CycleActions:
    """Observe attempts until no record changes any more, then decide which tasks to start and stop.

    `cancelled` contains the cancellations by task name. `earlier` contains the names of tasks that are not part of the
    newest submission. While a retry is being recorded, their failures do not make its tasks unnecessary.
    """
    newest = [task for task in tasks if task.name not in earlier]
    now, ends = dict(records), dict(cancelled)
    while True:
        before = dict(now)
        failures = [record for record in now.values() if record.state.is_failure]
        ended_at = min((record.stopped_at or at for record in failures), default=at)
        for name, reason in job_states.unneeded_jobs(newest, now).items():
            ends.setdefault(name, Cancel(reason=reason, at=ended_at))
        for task in tasks:
            record, cancel = now[task.name], ends.get(task.name)
            number = attempt_of(record)
            if number and (observed := observe(task, number)):
                now[task.name] = observed_record(task, record, observed, cancel, at)
            elif number and cancel:
                # The attempt was never created, or was deleted. A job in a queue may only be listed after a while.
                is_new = record.state is JobState.RUNNABLE and not record.status_reason.startswith(QUEUED)
                if is_new or at - cancel.at > LAG_S:
                    now[task.name] = job_states.failed_record(record, cancel.reason, at)
        failed = {task.spec.name for task in tasks if now[task.name].state.is_failure}
        waiting = [task for task in tasks if task.name in ends and now[task.name].state is JobState.PENDING]
        for task in waiting:
            if not failed.isdisjoint(task.waits_for()):  # it counts as cancelled, not as failed by its dependency
                now[task.name] = job_states.failed_record(now[task.name], ends[task.name].reason, at)
                failed.add(task.spec.name)
        now |= job_states.advance_waiting_jobs(tasks, now, at)
        if now != before:
            continue
        if not waiting:
            break
        now |= {task.name: job_states.failed_record(now[task.name], ends[task.name].reason, at) for task in waiting}
    active = [task for task in tasks if now[task.name].state.is_active]
    attempts = {task.name: observe(task, number) for task in tasks if (number := attempt_of(now[task.name]))}
    order = [task for task in (*job_states.queue(tasks, now), *active) if attempts[task.name] is None]
    unseen = {name for name, record in now.items() if record.state.is_active or record.status_reason.startswith(QUEUED)}
    started = {name for name, attempt in attempts.items() if attempt is not None or name in unseen}
    return CycleActions(
        records=now,
        starts=tuple(task for task in order if task.name not in ends),
        stops=tuple((task, ends[task.name].reason) for task in reversed(tasks) if task.name in started & ends.keys()),
    )


def attempt_of(record: JobRecord) -> int | None:
    """Return the number of the current or next attempt, or None if the task has ended or has to wait for others."""
    if record.state.is_active:
        return len(record.attempts)
    return len(record.attempts) + 1 if record.state is JobState.RUNNABLE else None


def observed_record(
    task: Task, record: JobRecord, observed: ObservedAttempt, cancelled: Cancel | None, at: float
) -> JobRecord:
    """Return the record, updated with the observed state of its current or next attempt."""
    is_runnable = record.state is JobState.RUNNABLE
    if observed.is_queued and is_runnable and observed.end is not None:
        reason = cancelled.reason if cancelled else observed.end.status_reason
        return job_states.failed_record(record, reason, observed.ended_at or at)
    if observed.is_queued and observed.end is None:
        return record.model_copy(update={"status_reason": observed.note})
    if is_runnable:
        record = job_states.starting_record(record, observed.streams)
    end = observed.end
    if record.state is JobState.STARTING and (observed.started_at is not None or (end and end.exit_code == 0)):
        record = job_states.running_record(record, observed.started_at or observed.ended_at or at)
    record = job_states.with_last_attempt(record, log_streams=observed.streams or record.attempts[-1].log_streams)
    if end is None:
        return record.model_copy(update={"status_reason": observed.note})
    is_cancelled = cancelled is not None and (observed.ended_at or at) >= cancelled.at
    if cancelled and is_cancelled and not job_states.has_succeeded(end):
        end = AttemptEnd(end.exit_code, cancelled.reason, end.reason)
    ended_at, will_retry = observed.ended_at or at, observed.will_retry
    record = job_states.record_after_attempt(record, task.spec.retry, end, ended_at, will_retry=will_retry)
    return job_states.with_last_attempt(record, billable_s=observed.billable_s)
