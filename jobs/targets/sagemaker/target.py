"""SageMaker as a target of cycles: training jobs that a process looks after until the last has ended.

Nothing but names holds a cycle together: whoever comes next describes the training jobs that should exist and goes on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from jobs.cycle import states
from jobs.cycle.records import JobRecord, JobState, Submission
from jobs.cycle.states import Leaf, leaves_of, new_record, parent_record
from jobs.cycle.store import CycleStore
from jobs.plan.dag import Plan
from jobs.targets.batch.blocked import explain
from jobs.targets.batch.client import LogsClient
from jobs.targets.placement import sagemaker_placement_of
from jobs.targets.sagemaker.client import QUOTA
from jobs.targets.sagemaker.controller import ACTIVE, Advance, Cancel, Try, advance, observed
from jobs.targets.sagemaker.describe import Seen
from jobs.targets.sagemaker.limits import check_plan
from jobs.targets.sagemaker.requests import Cycle
from jobs.targets.sagemaker.routes import Route
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io.storage import KeyNotFound

LOG_GROUP = "/aws/sagemaker/TrainingJobs"
PATIENCE_S = 900.0
"""How long neither AWS nor the workspace may answer before a process gives up looking after its jobs."""
_CANCELS = TypeAdapter(dict[str, Cancel])


@dataclass(frozen=True)
class _Known:
    """Of every leaf that was ever submitted the newest record and its round, in the order of the plan."""

    cycle: Cycle
    leaves: Sequence[Leaf]
    records: Mapping[str, JobRecord]
    rounds: Mapping[str, int]


@dataclass(frozen=True)
class SageMakerTarget:
    """Implements `Target`. `stop`: this process is to end; the training jobs go on.

    Each job takes the route of its plan, whatever the settings of the process that follows it.
    """

    direct: Route
    queue: Route
    logs_client: LogsClient
    store: CycleStore
    say: Callable[[str], object]
    stop: StopSignal
    poll_s: float = 30.0

    @property
    def name(self) -> str:
        return "sagemaker"

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
                one = Submission(job=job.name, id=cycle.job_id(job.name, round_), submitted_at=self.store.clock())
                self.store.save_submission(round_, one)

    def advance(self, plan: Plan) -> tuple[JobRecord, ...]:
        """Make what may start now and end what is to end; the records after it, which are saved."""
        known = self._known(plan)
        step = self._look(known)
        made = dict(step.records)
        for leaf in step.starts:
            made[leaf.name] = self._start(known, leaf, made[leaf.name])
        again = self._look(_Known(known.cycle, known.leaves, made, known.rounds)) if step.starts else step
        self._say_changes(known.records, again.records)
        # A reason to cancel that came meanwhile is read by that second look: what was made before it is ended.
        cancelled = self._cancelled()
        for leaf in again.stops:
            record = again.records[leaf.name]
            reason = cancelled[_job_id(record)].reason
            self._route(known, leaf).stop(known.cycle, leaf, known.rounds[leaf.name], len(record.attempts), reason)
        records = self._shown(plan, known, again.records)
        self.store.save_records(records)
        return records

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        known = self._known(plan)
        return self._shown(plan, known, self._look(known).records)

    def check(self, plan: Plan) -> None:
        check_plan(plan)
        self.direct.check(plan)
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
            elif leaf.state in ACTIVE and leaf.status_reason:
                lines.append(f"{leaf.name} waits for machines of SageMaker: {leaf.status_reason}")
        return tuple(lines)

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        """Lines of one try (from 1) on one node; where SageMaker started it again in place, of all its starts."""
        tries = record.attempts
        prefixes = tries[attempt - 1].log_streams if 0 < attempt <= len(tries) else ()
        prefix = prefixes[node] if 0 <= node < len(prefixes) else ""
        streams = self.logs_client.streams(LOG_GROUP, prefix) if prefix else []
        if not streams:
            raise ConfigError(
                f"{record.name} ({record.state}): no log of attempt {attempt} on node {node}",
                expected=f"one of {len(tries)} attempts, on one of {max(1, record.num_nodes)} nodes, once it has begun",
                next_command="trnjobs status",
            )
        for stream in streams:
            yield from self.logs_client.lines(LOG_GROUP, stream)

    def cancel(self, plan: Plan, reason: str) -> None:
        """Ask every training job to end, from the sinks backwards. What has not been made never will be."""
        ids = [record.id for record in self.records(plan) if not record.state.is_final]
        if ids:
            asked = dict.fromkeys(ids, Cancel(reason=reason, at=self.store.clock())) | self._cancelled()
            self.store.storage.write_bytes(self._cancel_key, _CANCELS.dump_json(asked))
            self.advance(plan)

    def _start(self, known: _Known, leaf: Leaf, record: JobRecord) -> JobRecord:
        attempt = len(record.attempts) + (record.state is JobState.RUNNABLE)
        one = self._route(known, leaf).start(known.cycle, leaf, known.rounds[leaf.name], attempt)
        return observed(leaf, record, one, None, self.store.clock())

    def _look(self, known: _Known) -> Advance:
        """Ask for every try that may exist, until nothing new comes of it."""
        seen = dict[Try, Seen | None]()
        asked = self._cancelled()
        cancelled = {name: asked[_job_id(one)] for name, one in known.records.items() if _job_id(one) in asked}
        leaves = {leaf.name: leaf for leaf in known.leaves}
        while True:
            step = advance(
                known.leaves,
                known.records,
                seen,
                cancelled=cancelled,
                at=self.store.clock(),
            )
            if not step.looks:
                return step
            for name, attempt in step.looks:
                leaf = leaves[name]
                seen[name, attempt] = self._route(known, leaf).look(known.cycle, leaf, known.rounds[name], attempt)

    def _route(self, known: _Known, leaf: Leaf) -> Route:
        return self.queue if sagemaker_placement_of(known.cycle.plan, leaf.spec).queue else self.direct

    def _known(self, plan: Plan) -> _Known:
        saved = {leaf.id: leaf for record in self.store.records() for leaf in record.leaves()}
        newest = dict[str, tuple[int, Submission]]()
        for round_ in self.store.rounds():
            newest |= {name: (round_, one) for name, one in self.store.submitted(round_).items()}
        leaves = [leaf for job in plan.jobs if job.name in newest for leaf in leaves_of(job)]
        records, rounds = dict[str, JobRecord](), dict[str, int]()
        for leaf in leaves:
            rounds[leaf.name], one = newest[leaf.spec.name]
            fresh = new_record(leaf, one.id, one.submitted_at)
            records[leaf.name] = saved.get(fresh.id, fresh)
        return _Known(self._cycle(plan), leaves, records, rounds)

    def _shown(self, plan: Plan, known: _Known, records: Mapping[str, JobRecord]) -> tuple[JobRecord, ...]:
        shown = []
        for job in plan.jobs:
            if mine := [records[leaf.name] for leaf in known.leaves if leaf.spec.name == job.name]:
                shown.append(parent_record(job, _job_id(mine[0]), mine) if job.array_size else mine[0])
        return tuple(shown)

    def _say_changes(self, before: Mapping[str, JobRecord], after: Mapping[str, JobRecord]) -> None:
        for name, record in after.items():
            if record.state is not before[name].state:
                self.say(states.change_line(record))

    def _cycle(self, plan: Plan) -> Cycle:
        claim = self.store.claim()
        return Cycle(plan, claim.claimed_at if claim else 0.0)

    @property
    def _cancel_key(self) -> str:
        return self.store.key("cancel.json")

    def _cancelled(self) -> dict[str, Cancel]:
        """By id of job."""
        try:
            return _CANCELS.validate_json(self.store.storage.read_bytes(self._cancel_key))
        except KeyNotFound:
            return {}


def _job_id(record: JobRecord) -> str:
    """Of the whole job, for a child of an array too."""
    return record.id.partition(":")[0]
