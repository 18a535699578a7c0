"""Where jobs run: this machine, AWS Batch, or SageMaker. All keep the same words, states and records."""

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import (
    Cancel,
    JobRecord,
    SubmittedJob,
    Task,
    failed_task,
    new_record,
    parent_record,
    tasks_of,
    with_last_attempt,
)
from jobs.node.post_mortem import PostMortem
from jobs.plan.spec import JobPlan, JobSpec
from jobs.settings import JobsConfig
from pipeline.core.errors import ConfigError, Preempted, error_in_log
from pipeline.core.record import Record
from pipeline.core.secrets import secret_values, without_secrets
from pipeline.io.storage import KeyNotFound

PATIENCE_S = 900.0
"""How long neither AWS nor the workspace may answer before whoever follows a cycle gives up."""


More = Callable[[], bool]


def until_ended(has_ended: Callable[[], bool], pause: Callable[[], object]) -> More:
    """Return a `more` that waits for newer lines until `has_ended()`, and then looks once more."""

    def looks() -> Iterator[bool]:
        while not has_ended():
            pause()
            yield True
        yield True

    found = looks()
    return lambda: next(found, False)


class Target(Protocol):
    """One place that runs the jobs of a cycle."""

    name: ClassVar[str]
    """`local`, `batch` or `sagemaker`."""

    def submit(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Submit these jobs of a claimed plan in its order; those of this round that were submitted stay as they are.

        `local` and `sagemaker` also follow them, and return when the last has ended. Dependencies on jobs that are
        not among `jobs` are those of earlier rounds, which have succeeded.
        """

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Return what is known of every submitted job now, in the order of the plan."""

    def advance(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Do what is due now and return the records; `local` needs nobody for that."""
        return self.records(plan)

    def busy_reason(self, records: Sequence[JobRecord]) -> str:
        """Return why another submission cannot replace that of these records now; empty if nothing of it runs."""
        left = [record.name for record in records if not record.state.is_final]
        return f"{', '.join(left)} {'has' if len(left) == 1 else 'have'} not ended" if left else ""

    def check(self, plan: JobPlan) -> None:
        """Raises ConfigError with everything for which the plan could not run there; changes nothing."""

    def check_blocked(self, records: Sequence[JobRecord]) -> tuple[str, ...]:
        """Return why jobs cannot start. End those that never will, once the reason has stood for a while."""
        return ()

    def interrupted_at(self) -> float | None:
        """Return when the process that the jobs need was last alive, in seconds since 1970; None while it is, and
        where the jobs go on without one."""
        return None

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the lines of one attempt (from 1) on one node. Raises ConfigError when there is no such log.

        At the end of the log `more()` says whether to look for newer lines; it may take its time.
        """

    def newest_line(self, record: JobRecord) -> str:
        """Return the last line of the log of a job or child that runs; empty where that would take long."""
        return ""

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """End everything that is not final, from the sinks backwards; what runs gets SIGTERM, and 30 s."""


@dataclass(frozen=True)
class LatestRecords:
    """The newest record and its round of every leaf that was ever submitted, in the order of the plan."""

    tasks: Sequence[Task]
    records: dict[str, JobRecord]
    submissions: Mapping[str, int]

    def by_job(self, plan: JobPlan, records: Mapping[str, JobRecord]) -> tuple[JobRecord, ...]:
        """Return one record per job, from `records` of its leaves."""
        shown = []
        for job in plan.jobs:
            if mine := [records[task.name] for task in self.tasks if task.spec.name == job.name]:
                shown.append(parent_record(job, job_id_of(mine[0]), mine) if job.array_size else mine[0])
        return tuple(shown)


def latest_records(plan: JobPlan, store: CycleStore, saved: Iterable[JobRecord]) -> LatestRecords:
    """Return the latest. `saved`: what is on record of leaves, of any round."""
    by_id = {record.id: record for record in saved}
    newest = dict[str, tuple[int, SubmittedJob]]()
    for submission in store.submissions():
        newest |= {name: (submission, one) for name, one in store.submitted(submission).items()}
    tasks = [task for job in plan.jobs if job.name in newest for task in tasks_of(job)]
    records, submissions = dict[str, JobRecord](), dict[str, int]()
    for task in tasks:
        submissions[task.name], one = newest[task.spec.name]
        fresh = new_record(task, one.id, one.submitted_at)
        records[task.name] = by_id.get(fresh.id, fresh)
    return LatestRecords(tasks, records, submissions)


def job_id_of(record: JobRecord) -> str:
    """Return the id of the whole job, for a child of an array too."""
    return record.id.partition(":")[0]


def log_stream(record: JobRecord, attempt: int, node: int) -> str:
    """Return the name of the log of one attempt (from 1) on one node; empty if there is none (yet)."""
    streams = record.attempts[attempt - 1].log_streams if 1 <= attempt <= len(record.attempts) else ()
    return streams[node] if 0 <= node < len(streams) else ""


def no_log_error(record: JobRecord, attempt: int, node: int) -> ConfigError:
    tries, nodes = len(record.attempts), max(1, record.num_nodes)
    return ConfigError(
        f"{record.name}: no log of attempt {attempt}, node {node} ({record.state})",
        expected=f"one of {tries} attempts, on one of {nodes} nodes, once it has started (of an array: a child)",
        next_command="trnjobs status",
    )


CANCELS = "cancel.json"
_CANCELS = TypeAdapter(dict[str, Cancel])


def read_cancels(store: CycleStore) -> dict[str, Cancel]:
    """Return which jobs are to end before their time, by id."""
    try:
        return _CANCELS.validate_json(store.storage.read_bytes(store.key(CANCELS)))
    except KeyNotFound:
        return {}


def save_cancels(store: CycleStore, cancels: Mapping[str, Cancel]) -> None:
    """Put on record which jobs are to end, by id. The first reason stays."""
    known = read_cancels(store)
    if not cancels.keys() <= known.keys():
        store.storage.write_bytes(store.key(CANCELS), _CANCELS.dump_json({**cancels, **known}))


def seconds_of(milliseconds: float | None) -> float | None:
    """Return a time of AWS Batch as records have it."""
    return milliseconds / 1000 if milliseconds else None


# The errors of failed jobs: from the post-mortem of the node that failed, which lies in the workspace whatever the
# target; if there is none (the entry was killed, the gate refused the model), from the end of the log itself.

TAIL_LINES = 400
MAX_NODES = 32
NO_OUTPUT = "(it printed nothing)"
Logs = Callable[[JobRecord, int, int], Iterable[str]]
"""Lines of one attempt (from 1) on one node. Raises TrnpipeError where there are none."""


def with_errors(
    store: CycleStore, records: Sequence[JobRecord], logs: Logs, env: Mapping[str, str] = os.environ
) -> tuple[JobRecord, ...]:
    """Return the records, with the error of the last attempt of each job that failed by itself.

    What cannot be read is left out. `env`: whose secrets must not be shown.
    """
    failed = [task for record in records if (task := failed_task(record)) and not task.attempts[-1].error]
    if not failed:
        return tuple(records)
    known = {task.id: task for record in store.records() for task in record.tasks()}
    found = dict[str, JobRecord]()
    for task in failed:
        last = known[task.id].attempts[-1:] if task.id in known else ()
        if last and last[0].error and len(known[task.id].attempts) == len(task.attempts):
            lines, node = [last[0].error], last[0].error_node
        else:
            lines, node = _from_post_mortem(store, task) or (_from_log(logs, task), 0)
        error = str(without_secrets("\n".join(lines), secret_values(env)))
        found[task.id] = with_last_attempt(task, error=error, error_node=node)

    def updated(record: JobRecord) -> JobRecord:
        children = tuple(found.get(child.id, child) for child in record.children)
        return record.model_copy(update={"children": children}) if children else found.get(record.id, record)

    return tuple(map(updated, records))


def _from_post_mortem(store: CycleStore, task: JobRecord) -> tuple[list[str], int] | None:
    """Return the lines, and the node: of several the one whose own command ended the job."""
    job, attempt, bundles = task.name.partition(":")[0], task.attempts[-1], list[PostMortem]()
    submissions = [
        one for one in store.submissions() if (made := store.submitted(one).get(job)) and made.id == job_id_of(task)
    ]
    end = f"-round-{submissions[-1]}" if submissions and submissions[-1] > 1 else ""
    name = f"{task.name.replace(':', '-')}-{len(task.attempts)}-node"
    wanted = re.compile(rf".*/{re.escape(name)}\d+{end}\.json")
    keys = [stat.key for stat in store.storage.list(store.key("post-mortem")) if wanted.fullmatch(stat.key)]
    for key in keys[:MAX_NODES]:
        with suppress(KeyNotFound, ValidationError):
            bundles.append(PostMortem.model_validate_json(store.storage.read_bytes(key)))
    if not bundles:
        return None
    first = min(
        bundles, key=lambda one: (one.own_exit_code != attempt.exit_code, bool(one.reason and one.log), one.node)
    )
    lines = list(error_in_log(first.log, first.own_exit_code))
    if first.returncode is None:  # its command never ran
        lines = list(error_in_log(f"trnjobs-entry: {first.reason}".splitlines()))
    elif first.returncode < 0:
        name = signal.Signals(-first.returncode).name
        lines.append(f"(ended by {name}{', for want of memory' if first.out_of_memory_kills else ''})")
    return lines or [NO_OUTPUT], first.node


def _from_log(logs: Logs, task: JobRecord) -> list[str]:
    """Return the error in the log of the main node; empty if it cannot be read."""
    try:
        lines = deque(logs(task, len(task.attempts), 0), maxlen=TAIL_LINES)
    except Preempted:
        raise
    except Exception:  # also of a bug: the cycle ends as it ends, whatever its logs say
        return []
    return list(error_in_log(lines, task.attempts[-1].exit_code)) or [NO_OUTPUT]


# Queue, share, role and log of AWS Batch; network and capacity of SageMaker. A plan holds the placement of every job,
# whatever target it is given to, so that its id is the same on all of them. Pure.

SAGEMAKER = "sagemaker"
"""Key of its placement within that of a job; plans of settings without `[jobs.sagemaker]` have none."""
SPOT_WAIT_S = 6 * 3600
"""Seconds that a job may wait for Spot capacity beyond its timeout."""


class BatchPlacement(Record):
    """As SubmitJob and RegisterJobDefinition need it."""

    queue: str = Field("", description="Name or ARN")
    share_identifier: str = ""
    priority: int = Field(0, description="Among the jobs of the same share")
    job_role: str = Field("", description="ARN of the credentials that the code sees; empty: none")
    log_group: str = "/aws/batch/job"


class SageMakerPlacement(Record):
    """As CreateTrainingJob needs it; the role is that of the placement in AWS Batch."""

    retired: ClassVar[Mapping[str, Any]] = {"output": "", "infra_check": True}
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    volume_gib: int = 100
    spot_wait_s: int = Field(0, description="Seconds that a job may wait for Spot capacity; 0: on demand")
    keep_alive_s: int = 0
    queue: str = Field("", description="Of service jobs of AWS Batch; empty: SageMaker's own calls")


def with_placements(plan: JobPlan, jobs: JobsConfig) -> JobPlan:
    """Return the plan with where each job runs, on AWS Batch and, if `[jobs.sagemaker]` is set, on SageMaker."""
    wanted = jobs.sagemaker
    fields = SageMakerPlacement.model_fields.keys()
    where = SageMakerPlacement.model_validate({k: v for k, v in wanted.model_dump().items() if k in fields})
    pools = {}
    for job in plan.jobs:
        needs = job.resources
        machine = (needs.instance_type,) if needs.instance_type else (needs.vcpus, needs.memory_mib)
        pools[job.name] = jobs.stage(job.name).role or jobs.role, machine, max(1, job.num_nodes), job.array_size
    # A job takes over the machines of the one before it: same role, machines and number of them. A warm pool without
    # such a job is paid for nothing. Source: SageMaker developer guide, managed warm pools.
    is_followed = {one.job for job in plan.jobs for one in job.depends_on if pools[one.job] == pools[job.name]}
    placements = {}
    for job in plan.jobs:
        stage = jobs.stage(job.name)
        placements[job.name] = BatchPlacement(
            queue=stage.queue or jobs.queue,
            share_identifier=jobs.share_identifier,
            priority=jobs.priority,
            job_role=stage.role or jobs.role,
            log_group=jobs.log_group,
        ).model_dump()
        said = where.model_copy(
            update={  # warm pools know no Spot capacity
                "spot_wait_s": SPOT_WAIT_S if wanted.spot else 0,
                "keep_alive_s": wanted.keep_alive_s if not wanted.spot and job.name in is_followed else 0,
            }
        ).model_dump(mode="json", exclude_defaults=True)
        if said:
            placements[job.name][SAGEMAKER] = said
    return plan.model_copy(update={"placements": placements})


def sagemaker_placement_of(plan: JobPlan, job: JobSpec) -> SageMakerPlacement:
    return SageMakerPlacement.model_validate(plan.placements.get(job.name, {}).get(SAGEMAKER, {}))


def placement_of(plan: JobPlan, job: JobSpec) -> BatchPlacement:
    where = plan.placements.get(job.name, {})  # another target may have its words beside ours
    return BatchPlacement.model_validate({name: where[name] for name in BatchPlacement.model_fields if name in where})
