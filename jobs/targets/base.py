"""The interface of targets (this machine, AWS Batch and SageMaker), which all use the same job states and records."""

import os
import re
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from pydantic import Field, ValidationError

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import (
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
from pipeline.core.errors import ConfigError, Preempted, cause_code, error_in_log
from pipeline.core.record import Record
from pipeline.core.secrets import secret_values, without_secrets
from pipeline.io.storage import KeyNotFound

PATIENCE_S = 900.0
"""Seconds that AWS or the workspace may be unreachable before a process that follows a cycle gives up."""


More = Callable[[], bool]


def until_ended(has_ended: Callable[[], bool], pause: Callable[[], object]) -> More:
    """Return a callback that allows further reads of a log until `has_ended()`, and then one final read.

    `pause` is called before each read, except for the final one.
    """

    def reads() -> Iterator[bool]:
        while not has_ended():
            pause()
            yield True
        yield True

    remaining = reads()
    return lambda: next(remaining, False)


class Target(Protocol):
    """A platform that runs the jobs of a cycle."""

    name: ClassVar[str]
    """`local`, `batch` or `sagemaker`."""

    def submit(self, plan: JobPlan, submission: int, jobs: Sequence[str]) -> None:
        """Submit these jobs of a claimed plan, in the order of the plan.

        Jobs that this submission already contains are skipped. A dependency that is not among `jobs` is assumed to
        have succeeded in an earlier submission. `local` and `sagemaker` also follow the jobs, and only return when the
        last one has ended.
        """

    def records(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Return the current record of every submitted job, in the order of the plan."""

    def advance(self, plan: JobPlan) -> tuple[JobRecord, ...]:
        """Start and end jobs as required, and return their records. The engine of `local` does this automatically."""
        return self.records(plan)

    def busy_reason(self, records: Sequence[JobRecord]) -> str:
        """Return why these jobs cannot be replaced by a new submission yet, or an empty string if they can."""
        unfinished = [record.name for record in records if not record.state.is_final]
        return f"{', '.join(unfinished)} {'has' if len(unfinished) == 1 else 'have'} not ended" if unfinished else ""

    def check(self, plan: JobPlan) -> None:
        """Check that the plan can run on this platform, without changing anything. Raises ConfigError if it cannot."""

    def check_blocked(self, records: Sequence[JobRecord]) -> tuple[str, ...]:
        """Return a line for each job that cannot start. Jobs that can never start are ended after a grace period."""
        return ()

    def interrupted_at(self) -> float | None:
        """Return when the process that ran the jobs was last alive (seconds since 1970), or None if it has not died."""
        return None

    def logs(self, record: JobRecord, *, attempt: int, node: int, more: More = lambda: False) -> Iterator[str]:
        """Yield the log lines of one attempt (from 1) on one node.

        At the end of the log, `more()` is called to decide whether to check for newer lines. It may block.

        Raises ConfigError if there is no such log.
        """

    def newest_line(self, record: JobRecord) -> str:
        """Return the last log line of a running task, or an empty string if reading it would be slow."""
        return ""

    def cancel(self, plan: JobPlan, reason: str) -> None:
        """End every unfinished job, starting with the last one of the plan.

        Running jobs receive SIGTERM, followed by SIGKILL after 30 s.
        """


@dataclass(frozen=True)
class LatestRecords:
    """The newest record of every task that was submitted, with the number of its submission, in plan order."""

    tasks: Sequence[Task]
    records: dict[str, JobRecord]
    submissions: Mapping[str, int]

    def by_job(self, plan: JobPlan, records: Mapping[str, JobRecord]) -> tuple[JobRecord, ...]:
        """Merge the records of tasks into one record per job."""
        merged = []
        for job in plan.jobs:
            if parts := [records[task.name] for task in self.tasks if task.spec.name == job.name]:
                merged.append(parent_record(job, job_id_of(parts[0]), parts) if job.array_size else parts[0])
        return tuple(merged)


def latest_records(plan: JobPlan, store: CycleStore, saved: Iterable[JobRecord]) -> LatestRecords:
    """Return the newest record of each submitted task. `saved` may contain stored task records of any submission."""
    by_id = {record.id: record for record in saved}
    newest = dict[str, tuple[int, SubmittedJob]]()
    for submission in store.submissions():
        newest |= {name: (submission, job) for name, job in store.submitted(submission).items()}
    tasks = [task for job in plan.jobs if job.name in newest for task in tasks_of(job)]
    records, submissions = dict[str, JobRecord](), dict[str, int]()
    for task in tasks:
        submissions[task.name], submitted_job = newest[task.spec.name]
        fresh = new_record(task, submitted_job.id, submitted_job.submitted_at)
        records[task.name] = by_id.get(fresh.id, fresh)
    return LatestRecords(tasks, records, submissions)


def job_id_of(record: JobRecord) -> str:
    """Return the id of a job, or that of the parent for a child of an array."""
    return record.id.partition(":")[0]


def log_stream(record: JobRecord, attempt: int, node: int) -> str:
    """Return the name of the log of one attempt (from 1) on one node, or an empty string if it has no log yet."""
    streams = record.attempts[attempt - 1].log_streams if 1 <= attempt <= len(record.attempts) else ()
    return streams[node] if 0 <= node < len(streams) else ""


def no_log(record: JobRecord, attempt: int, node: int) -> ConfigError:
    attempts, nodes = len(record.attempts), max(1, record.num_nodes)
    return ConfigError(
        f"{record.name}: no log of attempt {attempt}, node {node} ({record.state})",
        expected=f"one of its {attempts} attempts on one of {nodes} nodes (for an array, of a child such as name:0)",
        next_command="trnjobs status",
    )


def seconds_of(milliseconds: float | None) -> float | None:
    """Convert an AWS Batch timestamp from milliseconds to seconds."""
    return milliseconds / 1000 if milliseconds else None


# Errors of failed jobs. They are read from the post-mortem of the failed node, which every target stores in the
# workspace. If there is none, because the entry point was killed or the gate refused the model, the error is taken from
# the end of the log instead.

TAIL_LINES = 400
MAX_NODES = 32
NO_OUTPUT = "(it printed nothing)"
Logs = Callable[[JobRecord, int, int], Iterable[str]]
"""A function that returns the log lines of one attempt (from 1) on one node. Raises TrnpipeError if there are none."""


def with_errors(
    store: CycleStore, records: Sequence[JobRecord], logs: Logs, env: Mapping[str, str] = os.environ
) -> tuple[JobRecord, ...]:
    """Add to each failed job the error from the log of its last attempt, if the log can be read.

    Secrets that are set in `env` are masked.
    """
    failed = [task for record in records if (task := failed_task(record)) and not task.attempts[-1].error]
    if not failed:
        return tuple(records)
    stored = {task.id: task for record in store.records() for task in record.tasks()}
    explained = dict[str, JobRecord]()
    for task in failed:
        last = stored[task.id].attempts[-1:] if task.id in stored else ()
        if last and last[0].error and len(stored[task.id].attempts) == len(task.attempts):
            lines, node = [last[0].error], last[0].error_node
        else:
            lines, node = _from_post_mortem(store, task) or (_from_log(logs, task), 0)
        error = str(without_secrets("\n".join(lines), secret_values(env)))
        explained[task.id] = with_last_attempt(task, error=error, error_node=node)

    def updated(record: JobRecord) -> JobRecord:
        children = tuple(explained.get(child.id, child) for child in record.children)
        return record.model_copy(update={"children": children}) if children else explained.get(record.id, record)

    return tuple(map(updated, records))


def _from_post_mortem(store: CycleStore, task: JobRecord) -> tuple[list[str], int] | None:
    """Return the lines of the error and the node they are from.

    If several nodes left a post-mortem, the node whose command ended the job is preferred.
    """
    job, attempt, bundles = task.name.partition(":")[0], task.attempts[-1], list[PostMortem]()
    job_id = job_id_of(task)
    submissions = [
        number for number in store.submissions() if (own := store.submitted(number).get(job)) and own.id == job_id
    ]
    end = f"-round-{submissions[-1]}" if submissions and submissions[-1] > 1 else ""
    name = f"{task.name.replace(':', '-')}-{len(task.attempts)}-node"
    pattern = re.compile(rf".*/{re.escape(name)}\d+{end}\.json")
    keys = [stat.key for stat in store.storage.list(store.key("post-mortem")) if pattern.fullmatch(stat.key)]
    for key in keys[:MAX_NODES]:
        with suppress(KeyNotFound, ValidationError):
            bundles.append(PostMortem.model_validate_json(store.storage.read_bytes(key)))
    if not bundles:
        return None
    code = cause_code(attempt.exit_code)
    first = min(bundles, key=lambda pm: (pm.own_exit_code != code, bool(pm.reason and pm.log), pm.node))
    lines = list(error_in_log(first.log, first.own_exit_code))
    if first.returncode is None:  # the command never ran
        lines = list(error_in_log(f"trnjobs-entry: {first.reason}".splitlines()))
    elif first.returncode < 0:
        name = signal.Signals(-first.returncode).name
        lines.append(f"(killed by {name}{', out of memory' if first.out_of_memory_kills else ''})")
    return lines or [NO_OUTPUT], first.node


def _from_log(logs: Logs, task: JobRecord) -> list[str]:
    """Return the error from the log of the main node, or an empty list if the log cannot be read."""
    try:
        lines = deque(logs(task, len(task.attempts), 0), maxlen=TAIL_LINES)
    except Preempted:
        raise
    except Exception:  # even a bug here must not change the outcome of the cycle
        return []
    return list(error_in_log(lines, task.attempts[-1].exit_code)) or [NO_OUTPUT]


# A placement determines where a job runs: queue, share, role and log group on AWS Batch, network and capacity on
# SageMaker. A plan contains the placements of every job for all targets, so that its id does not depend on the target.

SAGEMAKER = "sagemaker"
"""Key of the SageMaker placement in the placement of a job. It is absent if `[jobs.sagemaker]` is not set."""
SPOT_WAIT_S = 6 * 3600
"""Seconds that a job may wait for Spot capacity in addition to its timeout."""


class BatchPlacement(Record):
    """The placement of a job on AWS Batch, from which the requests are built."""

    queue: str = Field("", description="Name or ARN")
    share_identifier: str = ""
    priority: int = Field(0, description="Priority among the jobs of the same share")
    job_role: str = Field("", description="ARN of the role that the job assumes (empty: none)")
    log_group: str = "/aws/batch/job"


class SageMakerPlacement(Record):
    """The placement of a job on SageMaker. Its role is the one in BatchPlacement."""

    retired: ClassVar[Mapping[str, Any]] = {"output": "", "infra_check": True}
    subnets: tuple[str, ...] = ()
    security_groups: tuple[str, ...] = ()
    volume_gib: int = 100
    spot_wait_s: int = Field(0, description="Seconds that a job may wait for Spot capacity (0: on demand)")
    keep_alive_s: int = 0
    queue: str = Field("", description="AWS Batch queue for service jobs (empty: call SageMaker directly)")
    quota_share: str = Field("", description="Quota share of that queue (empty: it is a fair-share queue)")


def with_placements(plan: JobPlan, jobs: JobsConfig) -> JobPlan:
    """Add the placement of each job: on AWS Batch and, if `[jobs.sagemaker]` is set, on SageMaker."""
    sagemaker = jobs.sagemaker
    fields = SageMakerPlacement.model_fields.keys()
    defaults = SageMakerPlacement.model_validate({k: v for k, v in sagemaker.model_dump().items() if k in fields})
    pools = {}
    for job in plan.jobs:
        needs = job.resources
        machine = (needs.instance_type,) if needs.instance_type else (needs.vcpus, needs.memory_mib)
        pools[job.name] = jobs.stage(job.name).role or jobs.role, machine, max(1, job.num_nodes), job.array_size
    # Machines are only kept warm if a later job can reuse them, because an unused warm pool still costs money. Reuse
    # requires the same role, machine type and number of machines (SageMaker developer guide, managed warm pools).
    is_followed = {edge.job for job in plan.jobs for edge in job.depends_on if pools[edge.job] == pools[job.name]}
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
        placement = defaults.model_copy(
            update={  # warm pools cannot be combined with Spot capacity
                "spot_wait_s": SPOT_WAIT_S if sagemaker.spot else 0,
                "keep_alive_s": sagemaker.keep_alive_s if not sagemaker.spot and job.name in is_followed else 0,
            }
        ).model_dump(mode="json", exclude_defaults=True)
        if placement:
            placements[job.name][SAGEMAKER] = placement
    return plan.model_copy(update={"placements": placements})


def sagemaker_placement_of(plan: JobPlan, job: JobSpec) -> SageMakerPlacement:
    return SageMakerPlacement.model_validate(plan.placements.get(job.name, {}).get(SAGEMAKER, {}))


def placement_of(plan: JobPlan, job: JobSpec) -> BatchPlacement:
    stored = plan.placements.get(job.name, {})  # may also contain the placement on SageMaker
    return BatchPlacement.model_validate({name: stored[name] for name in BatchPlacement.model_fields if name in stored})
