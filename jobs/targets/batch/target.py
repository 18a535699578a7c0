"""The target that runs the jobs of a cycle on AWS Batch."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from jobs.cycle.cycle_store import AlreadySubmitted, CycleStore
from jobs.cycle.job_states import (
    AttemptRecord,
    BlockedJob,
    Cancel,
    JobRecord,
    JobState,
    SubmittedJob,
    Task,
    normalize_batch_records,
    unneeded_jobs,
)
from jobs.plan.spec import JobPlan, JobSpec
from jobs.targets.base import More, Target, log_stream, no_log, placement_of, seconds_of
from jobs.targets.batch.account import ensure_definition, preflight
from jobs.targets.batch.client import BatchClient, Detail, LogsClient, UnknownOutcome, is_unknown
from jobs.targets.batch.requests import definition_request, job_name, submit_request
from pipeline.core.format import format_duration

PLAN_TAG = "plan"
CLOCK_SKEW_S, DWELL_S = 300.0, 900.0
RETENTION_S = 7 * 86_400.0
"""Minimum time in seconds for which AWS Batch can describe a job after it has ended."""


@dataclass(frozen=True)
class BatchTarget(Target):
    """A target that runs the jobs of one cycle on AWS Batch.

    `renew` extends the lease of the submitter. `warn` prints a line for the user.
    """

    name = "batch"
    client: BatchClient
    logs_client: LogsClient
    store: CycleStore
    renew: Callable[[], None] = lambda: None
    warn: Callable[[str], object] = lambda line: None

    def submit(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Submit the jobs in plan order, and record each of them before submitting the next.

        It is safe to call this again after the process was killed at any point, because a job that is not on record is
        looked up by name before it is submitted. Raises ConfigError if the account cannot run the plan, before anything
        is submitted.
        """
        ids = {name: job.id for name, job in self.store.submitted(submission).items()}
        missing = [job for job in plan.jobs if job.name in jobs and job.name not in ids]
        if missing:
            self.check(plan)
        self._end_unrecorded(plan, range(1, submission), {job.name for job in missing})
        for job in missing:
            # Drop dependencies on earlier submissions. They have succeeded, and AWS Batch may no longer know them.
            dependencies = tuple(dependency for dependency in job.depends_on if dependency.job in jobs)
            spec = job.model_copy(update={"depends_on": dependencies})
            ids[job.name] = self._submit_job(plan, submission, spec, ids)
        self._end_unrecorded(plan, [submission, submission + 1], ids)  # a retry may have died at its first job

    def check(self, plan: JobPlan) -> None:
        """Check that the account can run the plan.

        Raises ConfigError if it cannot, or TransientError while a queue is being changed.
        """
        for warning in preflight(self.client, plan):
            self.warn(warning)

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Return the newest record of each job, falling back to the stored one if AWS Batch no longer knows the job."""
        current = self.store.current()
        stored = {record.id: record for record in self.store.records()}
        described = self.client.describe_jobs([job.id for job in current.values()])
        described |= self.client.describe_jobs([part for job in described.values() for part in _part_ids(job)])
        records = [self._record(current[job.name], described, stored) for job in plan.jobs if job.name in current]
        return normalize_batch_records(plan, records, self.store.cancels())

    def advance(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """End jobs that are no longer needed, and return the records."""
        records = {record.name: record for record in self.records(plan)}
        # Only consider the newest submission. While a retry is being submitted, or if it was interrupted, the jobs that
        # depend on its first jobs are still those of an earlier submission, which have failed.
        newest = self.store.submitted(max(self.store.submissions(), default=0))
        tasks = [Task(plan.job(name)) for name in records if name in newest]
        for name, reason in unneeded_jobs(tasks, records).items():
            self.store.save_cancels({records[name].id: Cancel(reason=reason, at=self.store.clock())})
            self.client.terminate_job(records[name].id, reason)
        return tuple(records.values())

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the log lines from CloudWatch Logs. Raises ConfigError if there is no such log."""
        stream, plan = log_stream(record, attempt, node), self.store.plan()
        if not stream or plan is None:
            raise no_log(record, attempt, node)
        placement = placement_of(plan, plan.job(record.name.partition(":")[0]))
        return self.logs_client.lines(placement.log_group, stream, more)

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """End every unfinished job, starting with the last one of the plan.

        TerminateJob sends SIGTERM to running jobs, followed by SIGKILL after 30 s.
        """
        # Include one more than recorded, because a retry may have died before it recorded its first job.
        submissions = range(1, max(self.store.submissions(), default=0) + 2)
        running = {record.name: record.id for record in self.records(plan) if not record.state.is_final}
        self.store.save_cancels(dict.fromkeys(running.values(), Cancel(reason=reason, at=self.store.clock())))
        for job in reversed(plan.jobs):
            named = [job_id for submission in submissions for job_id in self._live_ids(plan, job, submission)]
            for job_id in sorted({*named, *([running[job.name]] if job.name in running else [])}):
                self.client.terminate_job(job_id, reason)

    def check_blocked(self, records: Sequence[JobRecord]) -> tuple[str, ...]:
        """Return a line for each job that cannot start. Jobs that can never start are ended after 15 minutes."""
        now, since = self.store.clock(), {(job.id, job.reason): job.since for job in self.store.blocked_jobs()}
        blocked_jobs = tuple(  # keep the first time as long as a job is blocked for the same reason, and has not run
            BlockedJob(
                job=task.name,
                id=task.id,
                reason=reason,
                since=max([since.get((task.id, reason), now), *(each.stopped_at or 0.0 for each in task.attempts)]),
            )
            for record in records
            for task in record.tasks()
            if task.state is JobState.RUNNABLE and (reason := reason_in(task.status_reason))
        )
        self.store.save_blocked_jobs(blocked_jobs)
        lines = []
        for blocked in blocked_jobs:
            text, command = _REASONS[blocked.reason]
            waited = format_duration(now - blocked.since)
            lines.append(f"{blocked.job} cannot start: {text} ({blocked.reason}, for {waited}); next: {command}")
            if blocked.reason.startswith(NEVER_STARTS) and now - blocked.since >= DWELL_S:
                reason = f"blocked for {now - blocked.since:.0f} s: {blocked.reason}"
                self.client.terminate_job(blocked.id.partition(":")[0], reason)
        return tuple(lines)

    def _submit_job(self, plan: JobPlan, submission: int, job: JobSpec, ids: Mapping[str, str]) -> str:
        self.renew()
        definition = ensure_definition(self.client, definition_request(plan, job))
        request = submit_request(plan, job, definition=definition, ids=ids, submission=submission)
        request["tags"] |= {PLAN_TAG: plan.plan_id, "round": str(submission)}

        def find_or_submit() -> str:
            """Look up the job before every SubmitJob, because AWS Batch accepts multiple jobs with the same name."""
            jobs = self._live_jobs(plan, request["jobQueue"], request["jobName"])
            return str(jobs[0]["jobId"]) if jobs else self.client.submit_job(request, self.renew)

        job_id = self.client.repeat(f"submitting {request['jobName']}", find_or_submit, is_unknown)
        submitted_job = SubmittedJob(job=job.name, id=job_id, definition=definition, submitted_at=self.store.clock())
        try:
            self.store.save_submitted(submission, submitted_job)
        except AlreadySubmitted as error:
            if error.job_id:
                self.client.terminate_job(job_id, f"the same job as {error.job_id}, which another process submitted")
            raise
        return job_id

    def _end_unrecorded(self, plan: JobPlan, submissions: Iterable[int], jobs: Collection[str]) -> None:
        """End jobs of these submissions that are not on record.

        Such jobs exist if a driver died before it recorded them. A job may also have been submitted twice, if AWS Batch
        listed the first one too late or if two drivers submitted at the same time.
        """
        recorded = {job.id for number in self.store.submissions() for job in self.store.submitted(number).values()}
        for submission, job in product(submissions, [job for job in plan.jobs if job.name in jobs]):
            for job_id in self._live_ids(plan, job, submission):
                if job_id not in recorded:
                    self.renew()
                    reason = f"{job.name} was submitted twice, and this copy is not the recorded one"
                    self.client.terminate_job(job_id, reason)

    def _live_ids(self, plan: JobPlan, job: JobSpec, submission: int) -> list[str]:
        queue, name = placement_of(plan, job).queue, job_name(plan, job, submission)
        jobs = self.client.repeat(f"looking for {name}", lambda: self._live_jobs(plan, queue, name), is_unknown)
        return [str(job["jobId"]) for job in jobs if not JobState(job["status"]).is_final]

    def _live_jobs(self, plan: JobPlan, queue: str, name: str) -> list[Detail]:
        """Return the jobs with this name that have not failed and are not being ended, oldest first.

        Jobs that were created before the claim are ignored, because they belong to an earlier submission of the same
        plan in a workspace that was emptied since. A different workspace may use the same names in the same queue, but
        the tags of its jobs contain a different plan id.

        Raises UnknownOutcome if AWS Batch lists a job that it cannot describe yet.
        """
        claim = self.store.claim()
        since_ms = 1000 * ((claim.claimed_at if claim else 0.0) - CLOCK_SKEW_S)
        named = [job for job in self.client.jobs_named(queue, name) if job["status"] != JobState.FAILED]
        listed = [job["jobId"] for job in named if float(job["createdAt"]) >= since_ms]
        described = self.client.describe_jobs(listed)
        if unknown := [job_id for job_id in listed if job_id not in described]:
            raise UnknownOutcome(
                f"AWS Batch lists job {unknown[0]} ({name}) but does not describe it yet",
                next_command="trnjobs submit, in a minute",
            )
        jobs = [job for job in described.values() if job.get("tags", {}).get(PLAN_TAG) == plan.plan_id]
        # Jobs that are being ended keep running for up to 30 s.
        jobs = [job for job in jobs if not (job.get("isTerminated") or job.get("isCancelled"))]
        return sorted(jobs, key=lambda job: (job["createdAt"], job["jobId"]))

    def _record(self, job: SubmittedJob, described: Mapping[str, Detail], stored: Mapping[str, JobRecord]) -> JobRecord:
        if detail := described.get(job.id):
            return _job_record(job.job, detail, described)
        record = stored.get(job.id) or JobRecord(
            name=job.job, id=job.id, state=JobState.SUBMITTED, created_at=job.submitted_at
        )
        # It may take a few seconds after SubmitJob until a new job can be described.
        if record.state.is_final or self.store.clock() - job.submitted_at <= RETENTION_S:
            return record
        reason = "AWS Batch no longer knows this job, and its end was never recorded"
        return record.model_copy(update={"state": JobState.FAILED, "status_reason": reason})


# Conversion of DescribeJobs responses to records. Timestamps of AWS Batch are in milliseconds.


def _part_ids(detail: Detail) -> list[str]:
    job_id = detail["jobId"]
    size = int(detail.get("arrayProperties", {}).get("size", 0))
    num_nodes = int(detail.get("nodeProperties", {}).get("numNodes", 0))
    return [*(f"{job_id}:{i}" for i in range(size)), *(f"{job_id}#{i}" for i in range(num_nodes))]


def _job_record(name: str, detail: Detail, described: Mapping[str, Detail]) -> JobRecord:
    """Convert the description of a job to a record.

    `described` maps ids to descriptions, including those of its array children or nodes if they are available.
    """
    ids = _part_ids(detail)
    nodes = [described.get(part, {}) for part in ids if "#" in part]
    child_ids = [part for part in ids if ":" in part and part in described]
    children = [_job_record(f"{name}{part[len(detail['jobId']) :]}", described[part], {}) for part in child_ids]
    attempts = []
    if not detail.get("arrayProperties", {}).get("size"):  # the parent of an array has no attempts
        ended = list(detail.get("attempts") or ())
        attempts = [_attempt(attempt, nodes or [detail], index) for index, attempt in enumerate(ended)]
        is_running = JobState(detail["status"]).is_active and all(attempt.get("stoppedAt") for attempt in ended)
        if is_running or (not ended and detail.get("startedAt")):  # AWS Batch does not list the current attempt
            attempts.append(_attempt(detail, nodes or [detail], len(ended)))
    return JobRecord(
        name=name,
        id=str(detail["jobId"]),
        state=JobState(detail["status"]),
        status_reason=str(detail.get("statusReason") or ""),
        created_at=seconds_of(detail.get("createdAt")) or 0.0,
        started_at=seconds_of(detail.get("startedAt")),
        stopped_at=seconds_of(detail.get("stoppedAt")),
        attempts=tuple(attempts),
        children=tuple(children),
        num_nodes=len(nodes),
    )


def _attempt(detail: Detail, nodes: Sequence[Detail], index: int) -> AttemptRecord:
    """Return the record of one attempt (`index` from 0). For a node without a log, the name of the stream is empty."""
    container = detail.get("container") or {}
    code, streams = container.get("exitCode"), []
    for node in nodes:
        ended = node.get("attempts") or ()
        attempt = ended[index] if index < len(ended) else node
        streams.append(str((attempt.get("container") or {}).get("logStreamName") or ""))
    return AttemptRecord(
        started_at=seconds_of(detail.get("startedAt")),
        stopped_at=seconds_of(detail.get("stoppedAt")),
        exit_code=None if code is None else int(code),
        status_reason=str(detail.get("statusReason") or ""),
        reason=str(container.get("reason") or ""),
        log_streams=tuple(streams),
    )


# Jobs at the head of a queue that cannot start. AWS Batch reports the reason in the statusReason of a RUNNABLE job (API
# reference, JobDetail.statusReason). While a compute environment scales up from zero, it may claim for several minutes
# that no instance fits although one is already booting. For this reason, a job is not ended at the first report.

NEVER_STARTS = "MISCONFIGURATION:"
"""Prefix of the reasons that waiting does not resolve, in contrast to missing capacity."""
_QUEUES = "aws batch describe-job-queues"
_REASONS = {  # explanation and next command
    "CAPACITY:": ("no capacity is available", "wait; or add a zone, a reservation or a capacity block"),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": (
        "it needs more vCPU than the maxvCpus of any compute environment of the queue",
        "aws batch update-compute-environment --compute-resources maxvCpus=N, or fewer nodes in [jobs]",
    ),
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": (
        "no instance type of the compute environments has the vCPU and memory that it requests",
        "request less in [jobs] (the agent reserves 4 % of the memory), then trnjobs submit",
    ),
    NEVER_STARTS: ("the queue, its compute environments or their limits are misconfigured for it", _QUEUES),
    "UNDETERMINED": ("AWS Batch does not know why it cannot start", _QUEUES),
}


def reason_in(status_reason: str) -> str:
    """Return the key of _REASONS that a status reason contains, or an empty string if the job is not blocked."""
    return next((reason for reason in _REASONS if reason in status_reason), "")


def next_command(reason: str) -> str:
    return _REASONS[reason][1]
