"""SageMaker as a target of cycles: training jobs that a process looks after until the last has ended.

Nothing but names holds a cycle together: whoever comes next describes the training jobs that should exist and goes on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jobs.cycle import job_states
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Cancel, JobRecord, JobState, Submission
from jobs.cycle.job_states import Leaf
from jobs.plan.dag import Plan
from jobs.targets.base import (
    PATIENCE_S,
    LatestRecords,
    Target,
    job_id_of,
    keep_cancels,
    latest_records,
    log_stream,
    no_log,
    read_cancels,
)
from jobs.targets.batch.blocked import explain
from jobs.targets.batch.client import LogsClient
from jobs.targets.placement import sagemaker_placement_of
from jobs.targets.sagemaker.client import QUOTA
from jobs.targets.sagemaker.controller import Advance, Try, advance, observed_record
from jobs.targets.sagemaker.describe import Seen
from jobs.targets.sagemaker.limits import check_plan
from jobs.targets.sagemaker.requests import Cycle
from jobs.targets.sagemaker.routes import DirectRoute, QueueRoute
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

    def submit(self, plan: Plan, round_: int, jobs: Sequence[str]) -> None:
        """Raises Preempted when stopped, TransientError when nobody answers for 15 min; the same command goes on."""
        self.record_submissions(plan, round_, jobs)
        trouble_since: float | None = None
        while True:
            try:
                records = self.advance(plan)
                trouble_since = None
                if all(record.state.is_final for record in records):
                    return
            except TransientError as error:
                now = self.store.clock()
                trouble_since = trouble_since or now
                self.say(f"not reached: {error.seen}")
                if now - trouble_since > PATIENCE_S:
                    raise
            self.stop.wait(self.poll_s)
            self.stop.raise_if_set("following training jobs, which run on; trnjobs submit follows them again")

    def record_submissions(self, plan: Plan, round_: int, jobs: Sequence[str]) -> None:
        """From then on anybody may see these jobs through."""
        done, cycle = self.store.submitted(round_), self._cycle(plan)
        for job in plan.jobs:
            if job.name in jobs and job.name not in done:
                one = Submission(job=job.name, id=cycle.leaf_id(Leaf(job), round_), submitted_at=self.store.clock())
                self.store.save_submission(round_, one)

    def advance(self, plan: Plan) -> tuple[JobRecord, ...]:
        """Make what may start now and end what is to end; the records after it, which are saved."""
        known, cycle = self._known(plan), self._cycle(plan)
        step = self._look(cycle, known)
        made = dict(step.records)
        for leaf in step.starts:
            record = made[leaf.name]
            attempt = len(record.attempts) + (record.state is JobState.RUNNABLE)
            one = self._route(plan, leaf).start(cycle, leaf, known.rounds[leaf.name], attempt)
            made[leaf.name] = observed_record(leaf, record, one, None, self.store.clock())
        again = self._look(cycle, replace(known, records=made)) if step.starts else step
        for name, record in again.records.items():
            if record.state is not known.records[name].state:
                self.say(job_states.change_line(record))
        # A reason to cancel that came meanwhile is read by that second look: what was made before it is ended.
        for leaf, reason in again.stops:
            attempt = len(again.records[leaf.name].attempts)
            self._route(plan, leaf).stop(cycle, leaf, known.rounds[leaf.name], attempt, reason)
        records = known.by_job(plan, again.records)
        self.store.save_records(records)
        return records

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        known = self._known(plan)
        return known.by_job(plan, self._look(self._cycle(plan), known).records)

    def check(self, plan: Plan) -> None:
        """Without a queue the account is not asked: SageMaker refuses a request that does not fit it."""
        check_plan(plan)
        self.queue.check(plan)

    def check_blocked(self, records: Sequence[JobRecord], *, dwell_s: float) -> tuple[str, ...]:
        """Quotas and capacity: both may come, so no job is ended for them."""
        lines = []
        for leaf in (leaf for record in records for leaf in record.leaves()):
            if leaf.state is JobState.RUNNABLE and leaf.status_reason.startswith(QUOTA):
                lines.append(
                    f"{leaf.name} cannot start: {leaf.status_reason}; next: wait for the account's other jobs, or"
                    " aws service-quotas list-service-quotas --service-code sagemaker"
                )
            elif leaf.state is JobState.RUNNABLE and (block := explain(leaf.status_reason)):
                lines.append(f"{leaf.name} cannot start: {leaf.status_reason}; next: {block.next_command}")
            elif leaf.state.is_active and leaf.status_reason:
                lines.append(f"{leaf.name} waits for machines of SageMaker: {leaf.status_reason}")
        return tuple(lines)

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        """Lines of one try (from 1) on one node; where SageMaker started it again in place, of all its starts."""
        prefix = log_stream(record, attempt, node)
        streams = self.logs_client.streams(LOG_GROUP, prefix) if prefix else []
        if not streams:
            raise no_log(record, attempt, node)
        for stream in streams:
            yield from self.logs_client.lines(LOG_GROUP, stream)

    def cancel(self, plan: Plan, reason: str) -> None:
        """Ask every training job to end, from the sinks backwards. What has not been made never will be."""
        ids = [record.id for record in self.records(plan) if not record.state.is_final]
        if ids:
            keep_cancels(self.store, dict.fromkeys(ids, Cancel(reason=reason, at=self.store.clock())))
            self.advance(plan)

    def _look(self, cycle: Cycle, known: LatestRecords) -> Advance:
        """Ask for every try that may exist, until nothing new comes of it."""
        seen = dict[Try, Seen | None]()
        asked = read_cancels(self.store)
        cancelled = {name: asked[job_id_of(one)] for name, one in known.records.items() if job_id_of(one) in asked}
        leaves = {leaf.name: leaf for leaf in known.leaves}
        while True:
            step = advance(known.leaves, known.records, seen, cancelled=cancelled, at=self.store.clock())
            if not step.looks:
                return step
            for name, attempt in step.looks:
                leaf = leaves[name]
                seen[name, attempt] = self._route(cycle.plan, leaf).look(cycle, leaf, known.rounds[name], attempt)

    def _route(self, plan: Plan, leaf: Leaf) -> DirectRoute | QueueRoute:
        return self.queue if sagemaker_placement_of(plan, leaf.spec).queue else self.direct

    def _known(self, plan: Plan) -> LatestRecords:
        return latest_records(plan, self.store, (leaf for record in self.store.records() for leaf in record.leaves()))

    def _cycle(self, plan: Plan) -> Cycle:
        claim = self.store.claim()
        return Cycle(plan, claim.claimed_at if claim else 0.0)
