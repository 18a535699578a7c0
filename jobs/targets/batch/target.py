"""AWS Batch as a target of cycles."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from jobs.cycle.cycle_store import CycleStore
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
from jobs.targets.base import (
    More,
    Target,
    log_stream,
    no_log_error,
    placement_of,
    read_cancels,
    save_cancels,
    seconds_of,
)
from jobs.targets.batch.account import ensure_definition, preflight
from jobs.targets.batch.client import BatchClient, Detail, LogsClient, UnknownOutcome, is_unknown
from jobs.targets.batch.requests import definition_request, job_name, submit_request
from pipeline.core.errors import TransientError
from pipeline.core.format import format_duration

PLAN_TAG = "plan"
CLOCK_SKEW_S, DWELL_S = 300.0, 900.0
KEPT_S = 7 * 86_400.0
"""AWS Batch describes a job for at least so long after its end."""


@dataclass(frozen=True)
class BatchTarget(Target):
    """Jobs of one cycle on AWS Batch. `renew` renews the lease of the one who submits; `warn` takes one line."""

    name = "batch"
    client: BatchClient
    logs_client: LogsClient
    store: CycleStore
    renew: Callable[[], None] = lambda: None
    warn: Callable[[str], object] = lambda line: None

    def submit(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Hand over the jobs in the plan's order, each recorded before the next.

        Killed anywhere and run again, every job exists once: a job that is not on record is looked for by its name
        before it is submitted. Raises ConfigError before anything is sent when the account would not run the plan.
        """
        ids = {name: one.id for name, one in self.store.submitted(submission).items()}
        missing = [job for job in plan.jobs if job.name in jobs and job.name not in ids]
        if missing:
            self.check(plan)
        self._end_unrecorded(plan, range(1, submission), {job.name for job in missing})
        for job in missing:
            # Without jobs of earlier rounds: those have succeeded, and AWS Batch may have forgotten them.
            waits_for = tuple(one for one in job.depends_on if one.job in jobs)
            spec = job.model_copy(update={"depends_on": waits_for})
            ids[job.name] = self._hand_over(plan, submission, spec, ids)
        self._end_unrecorded(plan, [submission, submission + 1], ids)  # the next: of a retry that died at its first job

    def check(self, plan: JobPlan) -> None:
        """Ask the account. Raises ConfigError, and TransientError while a queue is changing."""
        for warning in preflight(self.client, plan):
            self.warn(warning)

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Return the newest submission of each job; of jobs that AWS Batch has forgotten, what was last recorded."""
        current = self.store.current()
        known = {one.id: one for one in self.store.records()}
        described = self.client.describe_jobs([one.id for one in current.values()])
        described |= self.client.describe_jobs([one for job in described.values() for one in _parts(job)])
        found = [self._record(current[job.name], described, known) for job in plan.jobs if job.name in current]
        return normalize_batch_records(plan, found, read_cancels(self.store))

    def advance(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Return the records, after jobs were ended that are of no use any more."""
        found = {record.name: record for record in self.records(plan)}
        for name, reason in unneeded_jobs([Task(plan.job(name)) for name in found], found).items():
            save_cancels(self.store, {found[name].id: Cancel(reason=reason, at=self.store.clock())})
            self.client.terminate_job(found[name].id, reason)
        return tuple(found.values())

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the lines from CloudWatch. Raises ConfigError when there is no such log."""
        stream, plan = log_stream(record, attempt, node), self.store.plan()
        if not stream or plan is None:
            raise no_log_error(record, attempt, node)
        where = placement_of(plan, plan.job(record.name.partition(":")[0]))
        return self.logs_client.lines(where.log_group, stream, more)

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """End everything that has not ended, from the sinks backwards, so that nothing starts meanwhile.

        TerminateJob works in every state; Batch sends SIGTERM, and SIGKILL after 30 s.
        """
        # And one more: a retry may have died between its first job and the record of it.
        submissions = range(1, max(self.store.submissions(), default=0) + 2)
        running = {one.name: one.id for one in self.records(plan) if not one.state.is_final}
        save_cancels(self.store, dict.fromkeys(running.values(), Cancel(reason=reason, at=self.store.clock())))
        for job in reversed(plan.jobs):
            named = [job_id for submission in submissions for job_id in self._live_ids(plan, job, submission)]
            for job_id in sorted({*named, *([running[job.name]] if job.name in running else [])}):
                self.client.terminate_job(job_id, reason)

    def check_blocked(self, records: Sequence[JobRecord]) -> tuple[str, ...]:
        """Return why jobs cannot start. End those that never will, once that was seen for a quarter of an hour."""
        now, before = self.store.clock(), {(one.id, one.reason): one.since for one in self.store.blocked_jobs()}
        blocked_jobs = tuple(  # the time of first sight is kept while the same job has the same reason
            BlockedJob(job=task.name, id=task.id, reason=reason, since=before.get((task.id, reason), now))
            for record in records
            for task in record.tasks()
            if task.state is JobState.RUNNABLE and (reason := reason_in(task.status_reason))
        )
        self.store.save_blocked_jobs(blocked_jobs)
        lines = []
        for one in blocked_jobs:
            words, command = _REASONS[one.reason]
            waited = format_duration(now - one.since)
            lines.append(f"{one.job} cannot start: {words} ({one.reason}, for {waited}); next: {command}")
            if one.reason.startswith(NEVER_STARTS) and now - one.since >= DWELL_S:
                reason = f"blocked for {now - one.since:.0f} s: {one.reason}"
                self.client.terminate_job(one.id.partition(":")[0], reason)
        return tuple(lines)

    def _hand_over(self, plan: JobPlan, submission: int, job: JobSpec, ids: Mapping[str, str]) -> str:
        self.renew()
        definition = ensure_definition(self.client, definition_request(plan, job))
        request = submit_request(plan, job, definition=definition, ids=ids, submission=submission)
        request["tags"] |= {PLAN_TAG: plan.plan_id, "round": str(submission)}
        self.renew()  # nobody else may have taken over when the job is made

        def find_or_submit() -> str:
            """Ask before every SubmitJob, since jobs of one name cannot be told apart."""
            found = self._live(plan, request["jobQueue"], request["jobName"])
            return str(found[0]["jobId"]) if found else self.client.submit_job(request)

        job_id = self.client.repeat(f"submitting {request['jobName']}", find_or_submit, is_unknown)
        submitted_job = SubmittedJob(job=job.name, id=job_id, definition=definition, submitted_at=self.store.clock())
        try:
            self.store.save_submitted(submission, submitted_job)
        except TransientError:
            theirs = self.store.submitted(submission).get(job.name)
            if theirs is not None and theirs.id != job_id:
                self.client.terminate_job(job_id, f"the same job as {theirs.id}, which another process submitted")
            raise
        return job_id

    def _end_unrecorded(self, plan: JobPlan, submissions: Iterable[int], jobs: Collection[str]) -> None:
        """End jobs of these rounds that are not on record: of a driver that died in an earlier round, or twins of
        recorded ones, which appear when AWS Batch lists a new job late or two drivers met."""
        recorded = {
            one.id for submission in self.store.submissions() for one in self.store.submitted(submission).values()
        }
        for submission, job in product(submissions, [job for job in plan.jobs if job.name in jobs]):
            for job_id in self._live_ids(plan, job, submission):
                if job_id not in recorded:
                    self.renew()
                    reason = f"{job.name} was submitted twice, and this copy is not the recorded one"
                    self.client.terminate_job(job_id, reason)

    def _live_ids(self, plan: JobPlan, job: JobSpec, submission: int) -> list[str]:
        queue, name = placement_of(plan, job).queue, job_name(plan, job, submission)
        found = self.client.repeat(f"looking for {name}", lambda: self._live(plan, queue, name), is_unknown)
        return [str(one["jobId"]) for one in found if not JobState(one["status"]).is_final]

    def _live(self, plan: JobPlan, queue: str, name: str) -> list[Detail]:
        """Return jobs of this name that have not failed and are not being ended, the oldest first.

        Jobs made before the claim belong to an earlier life of the cycle: its workspace was emptied and the same plan
        submitted again. Another workspace may use the same names in the same queue: the tag tells whose a job is.
        Raises UnknownOutcome while AWS Batch lists a job that it does not describe yet.
        """
        claim = self.store.claim()
        since_ms = 1000 * ((claim.claimed_at if claim else 0.0) - CLOCK_SKEW_S)
        named = [one for one in self.client.jobs_named(queue, name) if one["status"] != JobState.FAILED]
        listed = [one["jobId"] for one in named if float(one["createdAt"]) >= since_ms]
        described = self.client.describe_jobs(listed)
        if unknown := [job_id for job_id in listed if job_id not in described]:
            raise UnknownOutcome(
                f"job {unknown[0]} ({name}) is listed and not described", next_command="trnjobs submit, in a minute"
            )
        ours = [one for one in described.values() if one.get("tags", {}).get(PLAN_TAG) == plan.plan_id]
        ours = [one for one in ours if not (one.get("isTerminated") or one.get("isCancelled"))]  # run on for 30 s
        return sorted(ours, key=lambda one: (one["createdAt"], one["jobId"]))

    def _record(
        self, submitted_job: SubmittedJob, described: Mapping[str, Detail], known: Mapping[str, JobRecord]
    ) -> JobRecord:
        if detail := described.get(submitted_job.id):
            return _job_record(submitted_job.job, detail, described)
        seen = known.get(submitted_job.id) or JobRecord(
            name=submitted_job.job, id=submitted_job.id, state=JobState.SUBMITTED, created_at=submitted_job.submitted_at
        )
        # A new job is described some seconds after SubmitJob.
        if seen.state.is_final or self.store.clock() - submitted_job.submitted_at <= KEPT_S:
            return seen
        reason = "AWS Batch no longer knows this job, and its end was never recorded"
        return seen.model_copy(update={"state": JobState.FAILED, "status_reason": reason})


# From DescribeJobs to records. Times of AWS are milliseconds.


def _parts(detail: Detail) -> list[str]:
    """Return the ids of the children of an array, or of the nodes of a group."""
    job_id = detail["jobId"]
    size = int(detail.get("arrayProperties", {}).get("size", 0))
    num_nodes = int(detail.get("nodeProperties", {}).get("numNodes", 0))
    return [*(f"{job_id}:{i}" for i in range(size)), *(f"{job_id}#{i}" for i in range(num_nodes))]


def _job_record(name: str, detail: Detail, described: Mapping[str, Detail]) -> JobRecord:
    """Return one job. `described`: also its children or nodes, by id; those that are not there yet are left out."""
    ids = _parts(detail)
    nodes = [described.get(one, {}) for one in ids if "#" in one]
    of_array = [one for one in ids if ":" in one]
    children = [
        _job_record(f"{name}{one[len(detail['jobId']) :]}", described[one], {}) for one in of_array if one in described
    ]
    attempts = []
    if not of_array:  # of an array the children run, it does not
        ended = list(detail.get("attempts") or ())
        attempts = [_attempt(one, nodes or [detail], index) for index, one in enumerate(ended)]
        busy_reason = JobState(detail["status"]).is_active and all(one.get("stoppedAt") for one in ended)
        if busy_reason or (not ended and detail.get("startedAt")):  # described at the top of the job only
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
    """Return the one of this `index`, from 0. A node or single container without a log has an empty stream."""
    container = detail.get("container") or {}
    code, streams = container.get("exitCode"), []
    for node in nodes:
        ended = node.get("attempts") or ()
        one = ended[index] if index < len(ended) else node
        streams.append(str((one.get("container") or {}).get("logStreamName") or ""))
    return AttemptRecord(
        started_at=seconds_of(detail.get("startedAt")),
        stopped_at=seconds_of(detail.get("stoppedAt")),
        exit_code=None if code is None else int(code),
        status_reason=str(detail.get("statusReason") or ""),
        reason=str(container.get("reason") or ""),
        log_streams=tuple(streams),
    )


# Jobs at the head of a queue that cannot start. AWS Batch writes why into statusReason of a RUNNABLE job (API
# reference, JobDetail.statusReason). While a compute environment grows from nothing it may say for minutes that no
# instance fits, although one is booting; so nothing is done on first sight.

NEVER_STARTS = "MISCONFIGURATION:"
"""Begins what waiting does not cure. Capacity comes back."""
_QUEUES = "aws batch describe-job-queues"
_REASONS = {  # in our words, and what to do
    "CAPACITY:": ("there is no capacity for it", "wait; or add a zone, a reservation or a capacity block"),
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE": (
        "it needs more vCPU than maxvCpus of any compute environment of the queue",
        "aws batch update-compute-environment --compute-resources maxvCpus=N, or fewer nodes in [jobs]",
    ),
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT": (
        "no instance type of the compute environments has the vCPU and memory it asks for",
        "ask for less in [jobs] (the agent keeps 4 % of the memory), then trnjobs submit",
    ),
    NEVER_STARTS: ("the queue, its environments or their limits are set up wrongly for it", _QUEUES),
    "UNDETERMINED": ("AWS Batch does not know why it cannot start", _QUEUES),
}


def reason_in(status_reason: str) -> str:
    """Return the word of the table in a status reason; empty if it tells of no block."""
    return next((word for word in _REASONS if word in status_reason), "")


def next_command(reason: str) -> str:
    return _REASONS[reason][1]
