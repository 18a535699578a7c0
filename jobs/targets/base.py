"""Where jobs run: this machine, AWS Batch, or SageMaker. All keep the same words, states and records."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from pydantic import TypeAdapter

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import Cancel, JobRecord, Submission
from jobs.cycle.job_states import Leaf, leaves_of, new_record, parent_record
from jobs.plan.dag import Plan
from pipeline.core.errors import ConfigError
from pipeline.io.storage import KeyNotFound

PATIENCE_S = 900.0
"""How long neither AWS nor the workspace may answer before whoever follows a cycle gives up."""


class Target(Protocol):
    """One place that runs the jobs of a cycle."""

    name: ClassVar[str]
    """`local`, `batch` or `sagemaker`."""

    def submit(self, plan: Plan, round_: int, jobs: Sequence[str]) -> None:
        """Hand over these jobs of a claimed plan in its order; those handed over in this round before stay as they are.

        `local` and `sagemaker` also see them through, and return when the last has ended. Dependencies on jobs that are
        not among `jobs` are those of earlier rounds, which have succeeded.
        """

    def records(self, plan: Plan) -> tuple[JobRecord, ...]:
        """What is known of every submitted job now, in the order of the plan."""

    def advance(self, plan: Plan) -> tuple[JobRecord, ...]:
        """The records, after whatever is due now was done; `local` needs nobody for that."""
        return self.records(plan)

    def under_way(self, records: Sequence[JobRecord]) -> str:
        """Return why another submission cannot replace that of these records now; empty when nothing of it runs."""
        left = [record.name for record in records if not record.state.is_final]
        return f"{', '.join(left)} {'has' if len(left) == 1 else 'have'} not ended" if left else ""

    def check(self, plan: Plan) -> None:
        """Whether the plan could run there; changes nothing. Raises ConfigError with what is wrong."""

    def check_blocked(self, records: Sequence[JobRecord], *, dwell_s: float) -> tuple[str, ...]:
        """Why jobs cannot start, in words; those that never will are ended, once the reason has stood for `dwell_s`.

        Nothing is blocked where what could never run is refused.
        """
        return ()

    def interrupted_at(self) -> float | None:
        """When the process that must run for the jobs to go on was last alive, in seconds since 1970; None while it is,
        and where the jobs go on without one."""
        return None

    def logs(self, record: JobRecord, *, attempt: int, node: int) -> Iterator[str]:
        """Lines of one try (from 1) on one node. Raises ConfigError when there is no such log."""

    def cancel(self, plan: Plan, reason: str) -> None:
        """End everything that is not final, from the sinks backwards; what runs gets SIGTERM, and 30 s."""


@dataclass(frozen=True)
class LatestRecords:
    """Of every leaf that was ever submitted the newest record and its round, in the order of the plan."""

    leaves: Sequence[Leaf]
    records: dict[str, JobRecord]
    rounds: Mapping[str, int]

    def by_job(self, plan: Plan, records: Mapping[str, JobRecord]) -> tuple[JobRecord, ...]:
        """One record a job, from `records` of its leaves."""
        shown = []
        for job in plan.jobs:
            if mine := [records[leaf.name] for leaf in self.leaves if leaf.spec.name == job.name]:
                shown.append(parent_record(job, job_id_of(mine[0]), mine) if job.array_size else mine[0])
        return tuple(shown)


def latest_records(plan: Plan, store: CycleStore, saved: Iterable[JobRecord]) -> LatestRecords:
    """`saved`: what is on record of leaves, of any round."""
    by_id = {record.id: record for record in saved}
    newest = dict[str, tuple[int, Submission]]()
    for round_ in store.rounds():
        newest |= {name: (round_, one) for name, one in store.submitted(round_).items()}
    leaves = [leaf for job in plan.jobs if job.name in newest for leaf in leaves_of(job)]
    records, rounds = dict[str, JobRecord](), dict[str, int]()
    for leaf in leaves:
        rounds[leaf.name], one = newest[leaf.spec.name]
        fresh = new_record(leaf, one.id, one.submitted_at)
        records[leaf.name] = by_id.get(fresh.id, fresh)
    return LatestRecords(leaves, records, rounds)


def job_id_of(record: JobRecord) -> str:
    """Of the whole job, for a child of an array too."""
    return record.id.partition(":")[0]


def log_stream(record: JobRecord, attempt: int, node: int) -> str:
    """Name of the log of one try (from 1) on one node; empty when there is none (yet)."""
    streams = record.attempts[attempt - 1].log_streams if 1 <= attempt <= len(record.attempts) else ()
    return streams[node] if 0 <= node < len(streams) else ""


def no_log(record: JobRecord, attempt: int, node: int) -> ConfigError:
    tries, nodes = len(record.attempts), max(1, record.num_nodes)
    return ConfigError(
        f"{record.name}: no log of attempt {attempt}, node {node} ({record.state})",
        expected=f"one of {tries} attempts, on one of {nodes} nodes, once it has started (of an array: a child)",
        next_command="trnjobs status",
    )


CANCELS = "cancel.json"
_CANCELS = TypeAdapter(dict[str, Cancel])


def read_cancels(store: CycleStore) -> dict[str, Cancel]:
    """Which jobs are to end before their time, by id."""
    try:
        return _CANCELS.validate_json(store.storage.read_bytes(store.key(CANCELS)))
    except KeyNotFound:
        return {}


def keep_cancels(store: CycleStore, cancels: Mapping[str, Cancel]) -> None:
    """Put on record which jobs are to end, by id. The first reason stays."""
    known = read_cancels(store)
    if not cancels.keys() <= known.keys():
        store.storage.write_bytes(store.key(CANCELS), _CANCELS.dump_json({**cancels, **known}))


def seconds_of(milliseconds: float | None) -> float | None:
    """A time of AWS Batch, as records have it."""
    return milliseconds / 1000 if milliseconds else None
