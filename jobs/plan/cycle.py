"""Settings and a cycle -> the jobs of it. Pure: the same on every machine, whoever plans.

    prepare ──┐
    health  ──┴─> compile [-> mine] -> train -> evaluate -> embed -> verify -> report

Nothing here but the shape is ours to choose: sizes come from `[jobs]`, retry rules from the table of exit codes.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType

from jobs.plan.resources import job_of
from jobs.plan.script import ENTRY, ordered, script_job
from jobs.plan.spec import JobSpec, Plan
from jobs.settings import JobsConfig
from pipeline.core.errors import ConfigError

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
_ARRAYS = frozenset({"prepare", "mine", "embed"})
_SECTION = {"prepare": "data"}  # of the settings of a stage, where it is not its name
USUAL_TIMEOUT_S = {"health": 5400, "train": 24 * 3600} | dict.fromkeys(("compile", "mine", "embed"), 12 * 3600)
"""Of other stages: 3600."""
START_S = 900  # for nodes to gather (jobs/node/environment.py), and for what a stage does before its own clock runs


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
    steps = {step.name: step for step in jobs.steps}
    specs = tuple(
        script_job(jobs, steps[name], after, workspace=workspace, cycle=cycle)
        if name in steps
        else _job(jobs, name, after, stage_limits_s.get(name, 0.0))
        for name, after in ordered(stages(mines), jobs.steps).items()
    )
    return Plan(pipeline=jobs.name, cycle=cycle, workspace=workspace, settings=settings, jobs=specs)


def stages(mines: bool) -> dict[str, tuple[str, ...]]:
    """Which stages a cycle has, each after which others; what would follow a stage left out follows those before it."""
    if mines or MINE not in AFTER:
        return AFTER
    before = AFTER[MINE]
    return {name: before if after == (MINE,) else after for name, after in AFTER.items() if name != MINE}


def _job(jobs: JobsConfig, name: str, after: tuple[str, ...], stage_limit_s: float) -> JobSpec:
    wanted = jobs.stage(name)
    for setting, value, stages in (
        ("nodes", wanted.nodes, _GANGS),
        ("processes", wanted.processes, _RANKS),
        ("workers", wanted.workers, _ARRAYS),
    ):
        if value > 1 and name not in stages:
            expected = f"1: only {', '.join(sorted(stages))} can have more"
            raise ConfigError(
                f"jobs.{name}.{setting} is {value}", expected=expected, next_command="correct [jobs], then trnjobs plan"
            )
    words = _WORDS.get(name, ("trnpipe", name))
    if wanted.processes > 1:
        words += ("--launch.processes", str(wanted.processes))
    if wanted.workers > 1:
        words += (f"--{_SECTION.get(name, name)}.workers", str(wanted.workers))
    # A stage that reaches its own limit says why, and may be tried again; a job that does is lost.
    timeout_s = wanted.timeout_s
    if timeout_s is None:
        timeout_s = max(USUAL_TIMEOUT_S.get(name, 3600), math.ceil(stage_limit_s + START_S))
    elif timeout_s < stage_limit_s:
        raise ConfigError(
            f"jobs.{name}.timeout_s is {timeout_s:,}; the stage itself may take {math.ceil(stage_limit_s):,} s",
            expected="more than that, or no timeout_s: the plan then takes enough",
            next_command=f"remove jobs.{name}.timeout_s, or lower the limits under [{name}]; then trnjobs plan",
        )
    return job_of(
        jobs,
        wanted,
        name=name,
        stage=name,
        command=ENTRY + words,
        environment=jobs.environment,
        timeout_s=timeout_s,
        after=after,
    )
