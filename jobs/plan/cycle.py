"""Settings and a cycle -> the jobs of it. Pure: the same on every machine, whoever plans.

    prepare ──┐
    health  ──┴─> compile [-> mine] -> train -> evaluate -> embed -> verify -> report

Nothing here but the shape is ours to choose: sizes come from `[jobs]`, retry rules from the table of exit codes.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from jobs.config import JobsConfig, StageJob
from jobs.plan.dag import Plan
from jobs.plan.spec import Dependency, JobSpec, Resources, Retry, Ulimit
from pipeline.core.errors import ConfigError
from pipeline.core.machines import NODES, Node

AFTER: dict[str, tuple[str, ...]] = {
    "prepare": (),
    "health": (),
    "compile": ("prepare", "health"),
    "mine": ("compile",),  # on devices it embeds with compiled graphs
    "train": ("mine",),
    "evaluate": ("train",),
    "embed": ("evaluate",),
    "verify": ("embed",),
    "report": ("verify",),
}
MINE = "mine"
"""The one stage that a cycle may be without."""
_WORDS = {"verify": ("trnpipe", "embed", "verify"), "report": ("trnjobs", "report")}
_RANKS = frozenset({"health", "compile", "mine", "train", "evaluate", "embed"})  # that start ranks of their own
_GANGS = frozenset({"health", "compile", "train", "evaluate"})
_ARRAYS = frozenset({"mine", "embed"})
USUAL_TIMEOUT_S = {  # others: 3600
    "health": 5400,
    "compile": 12 * 3600,
    "mine": 12 * 3600,
    "train": 24 * 3600,
    "embed": 12 * 3600,
}
START_S = 900  # for nodes to gather (jobs/node/environment.py), and for what a stage does before its own clock runs
ENTRY = ("trnjobs-entry", "--")
SHARED_MEMORY_SHARE = 8  # an eighth of the memory: ranks exchange through it; Docker's own 64 MiB end in SIGBUS
OPEN_FILES = Ulimit(name="nofile", soft=65_536, hard=65_536)  # the main node of a gang holds a connection to each other
LOCKED_MEMORY = Ulimit(name="memlock", soft=-1, hard=-1)  # what Neuron devices and EFA read and write stays in memory


def plan_cycle(
    jobs: JobsConfig,
    *,
    cycle: str,
    workspace: str,
    settings: str = "",
    mines: bool = False,
    stage_limits_s: Mapping[str, float] = MappingProxyType({}),
) -> Plan:
    """The plan of a cycle. `mines`: whether it mines hard negatives. `stage_limits_s`: how long stages allow themselves
    at most, where they have such a limit.

    Raises ConfigError for a shape that no stage has, an unknown instance, or a job that would end its stage too early.
    """
    specs = tuple(_job(jobs, name, after, stage_limits_s.get(name, 0.0)) for name, after in stages(mines).items())
    return Plan(pipeline=jobs.name, cycle=cycle, workspace=workspace, settings=settings, jobs=specs)


def stages(mines: bool) -> dict[str, tuple[str, ...]]:
    """Which stages a cycle has, each after which others; what would follow a stage left out follows those before it."""
    if mines or MINE not in AFTER:
        return AFTER
    before = AFTER[MINE]
    return {name: before if after == (MINE,) else after for name, after in AFTER.items() if name != MINE}


def _job(jobs: JobsConfig, name: str, after: tuple[str, ...], stage_limit_s: float) -> JobSpec:
    wanted = jobs.stage(name)
    _check_shape(name, wanted)
    _check_instance(name, wanted)
    return JobSpec(
        name=name,
        stage=name,
        command=_command(name, wanted),
        resources=_resources(wanted),
        image=wanted.image or jobs.image,
        num_nodes=wanted.nodes if wanted.nodes > 1 else 0,
        array_size=wanted.workers if wanted.workers > 1 else 0,
        environment=jobs.environment,
        retry=Retry.of(wanted.attempts),
        timeout_s=_timeout_s(name, wanted, stage_limit_s),
        depends_on=tuple(Dependency(job=one) for one in after),
    )


def _command(name: str, wanted: StageJob) -> tuple[str, ...]:
    words = _WORDS.get(name, ("trnpipe", name))
    if name in _RANKS and wanted.processes > 1:
        words += ("--launch.processes", str(wanted.processes))
    if wanted.workers > 1:
        words += (f"--{name}.workers", str(wanted.workers))
    return ENTRY + words


def _timeout_s(name: str, wanted: StageJob, stage_limit_s: float) -> int:
    """Of one try. A stage that reaches its own limit says why, and may be tried again; a job that does is lost."""
    if wanted.timeout_s is None:
        return max(USUAL_TIMEOUT_S.get(name, 3600), math.ceil(stage_limit_s + START_S))
    if wanted.timeout_s < stage_limit_s:
        raise ConfigError(
            f"jobs.{name}.timeout_s is {wanted.timeout_s:,}; the stage itself may take {math.ceil(stage_limit_s):,} s",
            expected="more than that, or no timeout_s: the plan then takes enough",
            next_command=f"remove jobs.{name}.timeout_s, or lower the limits under [{name}]; then trnjobs plan",
        )
    return wanted.timeout_s


def _check_shape(name: str, wanted: StageJob) -> None:
    for setting, value, stages in (
        ("nodes", wanted.nodes, _GANGS),
        ("processes", wanted.processes, _RANKS),
        ("workers", wanted.workers, _ARRAYS),
    ):
        if value > 1 and name not in stages:
            raise ConfigError(
                f"jobs.{name}.{setting} is {value}",
                expected=f"1: only {', '.join(sorted(stages))} can have more",
                next_command="correct it under [jobs], then trnjobs plan",
            )


def _check_instance(name: str, wanted: StageJob) -> None:
    if wanted.instance and wanted.instance not in NODES and None in (wanted.vcpus, wanted.memory_mib):
        raise ConfigError(
            f"jobs.{name}.instance is {wanted.instance}, an unknown instance type",
            expected=f"one of {', '.join(NODES)}; or vcpus and memory_mib beside it",
            next_command=f"set jobs.{name}.vcpus and jobs.{name}.memory_mib, then trnjobs plan",
        )


def _resources(wanted: StageJob) -> Resources:
    known = NODES.get(wanted.instance, Node(vcpus=1, memory_mib=2048, num_devices=0, num_efa=0))
    memory_mib = wanted.memory_mib or known.memory_mib
    devices = [f"/dev/neuron{index}" for index in range(known.num_devices)]
    if wanted.nodes > 1:
        devices += [f"/dev/infiniband/uverbs{index}" for index in range(known.num_efa)]
    return Resources(
        vcpus=wanted.vcpus or known.vcpus,
        memory_mib=memory_mib,
        shared_memory_mib=max(64, memory_mib // SHARED_MEMORY_SHARE),
        devices=tuple(devices),
        ulimits=(OPEN_FILES, LOCKED_MEMORY) if known.num_devices else (OPEN_FILES,),
        instance_type=wanted.instance,
        processes_per_node=wanted.processes,
    )
