"""Settings of `trnjobs`: the pipeline settings, plus `[jobs]` for the jobs of a cycle, their target and schedule."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from jobs.schedule import ScheduleConfig
from pipeline.core.record import Record
from pipeline.settings import Settings, flatten, leaves, resolve

PREEMPTIONS = 20


class StageJob(Record):
    """The number of nodes and ranks, the machine type, the resources and the retries of one job."""

    nodes: int = Field(1, ge=1, le=1000, description="Number of machines (a multi-node job if more than 1)")
    processes: int = Field(1, ge=1, le=1024, description="Ranks per machine, one per device")
    workers: int = Field(
        1, ge=1, le=10_000, description="Number of array children that divide the work (prepare, mine, teach, embed)"
    )
    instance: str = Field(
        "", description="Instance type, such as trn1.32xlarge, which determines devices, sizes and price"
    )
    vcpus: int | None = Field(
        None, ge=1, description="vCPUs per node (null: all vCPUs of the instance, or 1 if none is set)"
    )
    memory_mib: int | None = Field(
        None, ge=4, description="Memory per node in MiB (null: usable memory of the instance, or 2048 if none is set)"
    )
    image: str = Field("", description="Overrides jobs.image")
    queue: str = Field("", description="Overrides jobs.queue")
    role: str = Field("", description="ARN; overrides jobs.role")
    attempts: int = Field(3, ge=1, le=10, description="Maximum number of attempts, see also `jobs.preemptions`")
    timeout_s: int | None = Field(
        None,
        ge=60,
        description="Time limit of one attempt in seconds, after which the job fails without a retry (null: 1 h,"
        " health 1.5 h, compile, mine, teach and embed 12 h, train 24 h, or 15 min more than the limit of the stage if"
        " that is longer)",
    )

    @property
    def ranks(self) -> int:
        """Return the total number of ranks over all machines."""
        return self.nodes * self.processes


class Step(StageJob):
    """A user script that runs as a job of the cycle."""

    short: ClassVar[tuple[str, ...]] = ("name", "command")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$")
    command: tuple[str, ...] = Field(min_length=1)
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = Field({})

    @model_validator(mode="after")
    def _one_job(self) -> Self:
        if not self.command[0]:
            raise ValueError("command: the first argument is empty, expected a program or a script")
        if self.workers > 1:
            raise ValueError("workers: a script cannot be an array job, use nodes and processes")
        return self


TargetName = Literal["local", "batch", "sagemaker"]


class NotifyConfig(Record):
    """Notifications about ended cycles and missed deadlines.

    The addresses are secrets, so settings files only name the environment variable or the secret that contains them.
    """

    retired: ClassVar[Mapping[str, Any]] = {"webhooks": {}, "page_url": ..., "retried_at": ..., "budget_s": ...}
    url_variable: str = Field(
        "",
        pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$",
        description="Name of an environment variable that contains Apprise URLs, separated by spaces",
    )
    url_secret: str = Field(
        "",
        pattern=r"^(arn:[A-Za-z0-9/_+=.@:-]+|[A-Za-z0-9/_+=.@-]*)$",
        description="Name or ARN of a secret in AWS Secrets Manager that contains Apprise URLs",
    )

    @property
    def is_set(self) -> bool:
        return bool(self.url_variable or self.url_secret)

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.url_variable and self.url_secret:
            raise ValueError("url_variable and url_secret are both set, expected one of them")
        return self


class SageMakerConfig(Record):
    """Settings of the target `sagemaker`, which runs the jobs as Amazon SageMaker training jobs."""

    retired: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("via", "output", "spot_wait_s", "infra_check", "poll_s", "price_factor"), ...
    )
    queue: str = Field(
        "",
        description="Name or ARN of an AWS Batch fair-share queue (empty: call CreateTrainingJob directly)",
    )
    quota_share: str = Field(
        "",
        description="Quota share of that queue, whose jobs may be preempted by others (empty: use"
        " jobs.share_identifier of a fair-share queue)",
    )
    subnets: tuple[str, ...] = Field((), max_length=16, description="Subnets of the jobs (empty: no VPC)")
    security_groups: tuple[str, ...] = Field((), max_length=5, description="Security groups of the jobs")
    volume_gib: int = Field(100, ge=1, description="Disk size in GiB of machines without instance storage")
    keep_alive_s: int = Field(
        0, ge=0, le=3600, description="Seconds to keep machines for the next job of the same shape (requires a quota)"
    )
    spot: bool = Field(False, description="Use managed Spot training, which restarts an interrupted job in place")

    @model_validator(mode="after")
    def _share_of_queue(self) -> Self:
        if self.quota_share and not self.queue:
            raise ValueError(
                f"quota_share is {self.quota_share!r}, but queue is empty, expected the queue of the share"
            )
        return self


class JobsConfig(Record):
    """Settings of the jobs of a cycle, including their target, prices and schedule."""

    retired: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("blocked_dwell_s", "titles_per_s", "vcpu_titles_per_s", "local_memory_mib", "stop_grace_s"), ...
    )
    name: str = Field("trnpipe", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", description="Prefix of all job names")
    target: TargetName = Field("local", description="Where the jobs run: this machine, AWS Batch, or Amazon SageMaker")
    image: str = Field("", description="Container image, pinned by digest (batch, sagemaker)")
    queue: str = Field("", description="Job queue, by name or ARN (batch)")
    share_identifier: str = Field("", description="Share identifier for a fair-share queue (letters and digits only)")
    priority: int = Field(100, ge=0, le=9999, description="Priority within the share (higher runs first)")
    role: str = Field("", description="ARN of the IAM role that the jobs assume (batch, sagemaker)")
    log_group: str = Field("/aws/batch/job", min_length=1, description="CloudWatch log group of all jobs (batch)")
    environment: dict[str, str] = Field(
        {}, description="Environment variables of every job as NAME=value (not for secrets, because plans show them)"
    )
    preemptions: int = Field(
        PREEMPTIONS,
        ge=0,
        le=1000,
        description="Number of attempts of each task that may end because its machine was reclaimed, before these count"
        " towards `attempts` (on AWS Batch, at most 10 attempts in total)",
    )
    sla_s: int | None = Field(None, ge=60, description="Deadline of a cycle in seconds after its scheduled time")
    prices: dict[str, float] = Field(
        {}, description="Price in USD per hour by instance type, instead of the list price"
    )
    vcpu_usd_per_hour: float | None = Field(
        None, ge=0, description="Price in USD per vCPU hour for instance types without a price (null: cost unknown)"
    )
    local_vcpus: int = Field(
        0, ge=0, description="Total number of vCPUs that local jobs may use (0: all vCPUs of this machine)"
    )
    schedule: ScheduleConfig = ScheduleConfig()
    notify: NotifyConfig = NotifyConfig()
    sagemaker: SageMakerConfig = SageMakerConfig()
    steps: tuple[Step, ...] = Field(
        (),
        description="User scripts to run as jobs of the cycle, as tables [[jobs.steps]] with name, command, after and"
        " before (names of jobs), nodes, processes, instance, attempts, timeout_s, environment, ...",
    )
    prepare: StageJob = StageJob()
    health: StageJob = StageJob()
    compile: StageJob = StageJob()
    mine: StageJob = StageJob()
    teach: StageJob = StageJob()
    train: StageJob = StageJob()
    evaluate: StageJob = StageJob()
    embed: StageJob = StageJob()
    verify: StageJob = StageJob()
    report: StageJob = StageJob()

    def stage(self, name: str) -> StageJob:
        """Return the job settings of a stage or a step."""
        step = next((step for step in self.steps if step.name == name), None)
        job: StageJob = step or getattr(self, name)
        return job


class CycleSettings(Settings):
    """All settings of a cycle of jobs."""

    program: ClassVar[str] = "trnjobs"
    other_programs: ClassVar[frozenset[str]] = frozenset()
    jobs: JobsConfig = Field(JobsConfig())


_PER_JOB = {"cycle", "workspace", "launch", "scratch"}


def of_all_jobs(settings: CycleSettings) -> dict[str, Any]:
    """Return the settings that all jobs of a cycle share, as a nested dict for `--config`."""
    return settings.model_dump(mode="json", exclude=_PER_JOB)


def values_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings into values by dotted name."""
    known = leaves(CycleSettings)
    return {name: value for name, value in flatten(tree, known) if name in known}


def with_values(tree: Mapping[str, Any], values: Mapping[str, Any]) -> CycleSettings:
    """Return nested settings with some values (by dotted name) replaced. Raises ConfigError if a value is invalid."""
    changed = dict(tree)
    for name, value in values.items():
        table, (*sections, last) = changed, name.split(".")
        for section in sections:
            table[section] = dict(table.get(section, {}))
            table = table[section]
        table[last] = value
    return resolve((), {}, model=CycleSettings, overrides=changed).settings


def differences(before: Any, now: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences between two nested dicts, as (dotted name, before, now)."""
    if before == now:
        return
    left, right = _table(before), _table(now)
    if left is None or right is None:
        yield name, before, now
        return
    for key in dict.fromkeys((*left, *right)):
        yield from differences(left.get(key), right.get(key), f"{name}.{key}" if name else key)


def _table(value: Any) -> Mapping[str, Any] | None:
    """Return a mapping unchanged, and a list of named tables as a mapping by name. Return None for other values."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "name" in item for item in value):
        return {str(item["name"]): item for item in value}
    return value if isinstance(value, Mapping) else None
