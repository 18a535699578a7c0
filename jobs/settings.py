"""The settings of `trnjobs`: those of the pipeline and `[jobs]`, how a cycle becomes jobs, where they run, and when."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from jobs.schedule import ScheduleConfig
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.settings import Settings, leaves, resolve


class StageJob(Record):
    """What one job of the cycle gets."""

    nodes: int = Field(1, ge=1, le=1000, description="Machines that run it at once; more than 1: a multi-node job")
    processes: int = Field(1, ge=1, le=1024, description="Ranks on each machine, one a device")
    workers: int = Field(
        1, ge=1, le=10_000, description="Children of an array that share the work (prepare, mine, embed)"
    )
    instance: str = Field("", description="Machine it is meant for, such as trn1.32xlarge: devices, sizes and price")
    vcpus: int | None = Field(None, ge=1, description="vCPUs of a node; null: all of the instance, 1 without one")
    memory_mib: int | None = Field(
        None, ge=4, description="MiB of a node; null: what the instance can give, 2048 without one"
    )
    image: str = Field("", description="Another image than jobs.image")
    queue: str = Field("", description="Another queue than jobs.queue")
    role: str = Field("", description="ARN of another role than jobs.role")
    attempts: int = Field(3, ge=1, le=10, description="Tries in all")
    timeout_s: int | None = Field(
        None,
        ge=60,
        description="Seconds after which one try is ended, never tried again; null: 1 h (health 1.5 h, compile,"
        " mine and embed 12 h, train 24 h), more where the stage allows itself more",
    )

    @property
    def ranks(self) -> int:
        """On all machines together."""
        return self.nodes * self.processes


class Step(StageJob):
    """A script of the team's own, beside the stages of a cycle."""

    short: ClassVar[tuple[str, ...]] = ("name", "command")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
    command: tuple[str, ...] = Field(min_length=1)
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field({})

    @model_validator(mode="after")
    def _one_job(self) -> Self:
        if not self.command[0]:
            raise ValueError("command: its first word is empty; expected a program or a script")
        if self.workers > 1:
            raise ValueError("workers: a script is no array; expected nodes and processes")
        return self


TargetName = Literal["local", "batch", "sagemaker"]


class NotifyConfig(Record):
    """Who is told of the ends of cycles and of missed deadlines. The addresses are secrets, and in no settings file."""

    retired: ClassVar[Mapping[str, Any]] = {"webhooks": {}, "page_url": ..., "retried_at": ..., "budget_s": ...}
    url_variable: str = Field(
        "",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="Environment variable that holds Apprise URLs, with spaces between them",
    )
    url_secret: str = Field(
        "",
        pattern=r"^(arn:[A-Za-z0-9/_+=.@:-]+|[A-Za-z0-9/_+=.@-]*)$",
        description="Secret of AWS Secrets Manager that does, by name or ARN",
    )

    @property
    def is_set(self) -> bool:
        return bool(self.url_variable or self.url_secret)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.url_variable and self.url_secret:
            raise ValueError("both url_variable and url_secret; expected one of them")
        return self


class SageMakerConfig(Record):
    """How training jobs of Amazon SageMaker run the jobs of a cycle (sagemaker)."""

    retired: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("via", "output", "spot_wait_s", "infra_check", "poll_s", "price_factor"), ...
    )
    queue: str = Field(
        "",
        description="Fair-share queue of service jobs of AWS Batch, by name or ARN; empty: training jobs are created by"
        " SageMaker's own calls",
    )
    subnets: tuple[str, ...] = Field((), max_length=16, description="Of the VPC of the jobs; none: no VPC")
    security_groups: tuple[str, ...] = Field((), max_length=5, description="Of the VPC of the jobs")
    volume_gib: int = Field(100, ge=1, description="Disk of a machine, where it has none of its own")
    keep_alive_s: int = Field(
        0, ge=0, le=3600, description="Seconds that machines wait for a next job of the same shape; needs a quota"
    )
    spot: bool = Field(False, description="Managed Spot capacity; taken away, a job starts again in place")


class JobsConfig(Record):
    """The jobs of a cycle, where they run, and what they may cost."""

    retired: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("blocked_dwell_s", "titles_per_s", "vcpu_titles_per_s", "local_memory_mib", "stop_grace_s"), ...
    )
    name: str = Field("trnpipe", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="First word of all names of jobs")
    target: TargetName = Field("local", description="This machine, AWS Batch, or Amazon SageMaker")
    image: str = Field("", description="Container image, pinned by digest (batch, sagemaker)")
    queue: str = Field("", description="Queue of jobs (batch)")
    share_identifier: str = Field("", description="Whose share of a fair-share queue this is; letters and digits")
    priority: int = Field(100, ge=0, le=9999, description="Order among the jobs of the same share; higher goes first")
    role: str = Field("", description="ARN of the role whose rights the code has (batch, sagemaker)")
    log_group: str = Field("/aws/batch/job", min_length=1, description="CloudWatch log group of all jobs (batch)")
    environment: dict[str, str] = Field(
        {}, description="Variables of every job, as NAME=value; shown in plans, so no secrets"
    )
    sla_s: int | None = Field(None, ge=60, description="Seconds from its scheduled time within which a cycle must end")
    prices: dict[str, float] = Field({}, description="USD an hour by instance type, before the table of list prices")
    vcpu_usd_per_hour: float | None = Field(
        None, ge=0, description="USD an hour of a vCPU of machines whose type has no price; null: cost unknown"
    )
    local_vcpus: int = Field(0, ge=0, description="vCPUs that local jobs share; 0: those of this machine")
    schedule: ScheduleConfig = ScheduleConfig()
    notify: NotifyConfig = NotifyConfig()
    sagemaker: SageMakerConfig = SageMakerConfig()
    steps: tuple[Step, ...] = Field(
        (),
        description="Scripts beside the stages, as tables [[jobs.steps]]: name, command, after and before (names of"
        " jobs), nodes, processes, instance, attempts, timeout_s, environment, ...",
    )
    prepare: StageJob = StageJob()
    health: StageJob = StageJob()
    compile: StageJob = StageJob()
    mine: StageJob = StageJob()
    train: StageJob = StageJob()
    evaluate: StageJob = StageJob()
    embed: StageJob = StageJob()
    verify: StageJob = StageJob()
    report: StageJob = StageJob()

    def stage(self, name: str) -> StageJob:
        """By name of the job: a stage, or a step."""
        step = next((step for step in self.steps if step.name == name), None)
        job: StageJob = step or getattr(self, name)
        return job


class CycleSettings(Settings):
    """Everything a cycle of jobs can be told."""

    program: ClassVar[str] = "trnjobs"
    other_programs: ClassVar[frozenset[str]] = frozenset()
    jobs: JobsConfig = Field(JobsConfig())


_PER_JOB = {"cycle", "workspace", "launch", "scratch"}


def of_all_jobs(settings: CycleSettings) -> dict[str, Any]:
    """Return what all jobs of a cycle share, as a JSON file for `--config`.

    Without what differs between jobs or places: they get it by variable or flag.
    """
    return settings.model_dump(mode="json", exclude=_PER_JOB)


def pipeline_fingerprint(settings: CycleSettings) -> str:
    """Names the work; what `[jobs]` makes of it is in the plan itself."""
    return fingerprint(settings.model_dump(mode="json", exclude=_PER_JOB | {"jobs"}))


def values_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a tree holds, by dotted name."""
    found = dict[str, Any]()
    for name in leaves(CycleSettings):
        value: Any = tree
        for word in name.split("."):
            if not isinstance(value, Mapping) or word not in value:
                break
            value = value[word]
        else:
            found[name] = value
    return found


def with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> CycleSettings:
    """Return the settings of a tree as `of_all_jobs` makes it, with other values by dotted name.

    Raises ConfigError for a setting that this version does not know, or a value out of bounds.
    """
    changed = dict(tree)
    for name, value in values.items():
        table, (*sections, last) = changed, name.split(".")
        for section in sections:
            table[section] = dict(table.get(section, {}))
            table = table[section]
        table[last] = value
    return resolve((), {}, model=CycleSettings, overrides=changed).settings


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the places in which two trees differ, as (dotted name, before, now)."""
    if before == now:
        return
    left, right = _table(before), _table(now)
    if left is None or right is None:
        yield name, before, now
        return
    for key in dict.fromkeys((*left, *right)):
        yield from differences(left.get(key), right.get(key), f"{name}.{key}" if name else key)


def _table(value: Any) -> Mapping[str, Any] | None:
    """Return a mapping, or a list of named tables by their names."""
    if isinstance(value, list) and value and all(isinstance(one, Mapping) and "name" in one for one in value):
        return {str(one["name"]): one for one in value}
    return value if isinstance(value, Mapping) else None
