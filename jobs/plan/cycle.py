"""Settings -> the jobs of a cycle, or the one of a script. Pure: the same on every machine, whoever plans.

    prepare ──┐
    health  ──┴─> compile [-> mine] -> train -> evaluate -> embed -> verify -> report

Nothing here but the shape is ours to choose: sizes come from `[jobs]`, retry rules from the table of exit codes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from jobs.plan.resources import job_of
from jobs.plan.spec import JobPlan, JobSpec
from jobs.settings import JobsConfig, Step
from pipeline.core.errors import ConfigError
from pipeline.core.interpreter import strip_interpreter

ENTRY = ("trnjobs-entry", "--")
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
) -> JobPlan:
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
    return JobPlan(pipeline=jobs.name, cycle=cycle, workspace=workspace, settings=settings, jobs=specs)


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


# Scripts as jobs: the steps of `[[jobs.steps]]` beside the stages of a cycle, and the one of `trnjobs run`.

STAGE = "run"
"""The kind of every script: they share a definition of AWS Batch and a line of the ledger."""
RUN_PREFIX = "run-"
"""Begins the cycle that a `trnjobs run` is on record as; no cycle of a schedule is named so."""
CHECKPOINT_URI = "TRNJOBS_CHECKPOINT_URI"
SCRIPT_TIMEOUT_S = 24 * 3600
_OURS = ("AWS_BATCH", "TRNJOBS_")
_TORCHRUN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def script_job(jobs: JobsConfig, step: Step, after: Iterable[str], *, workspace: str, cycle: str) -> JobSpec:
    """The job of a step. Raises ConfigError for ranks of a command that torchrun cannot start, and taken variables."""
    for variable in step.environment:
        if variable.startswith(_OURS) or variable in _TORCHRUN:
            expected = "a variable that is not set for the job: not AWS_BATCH*, TRNJOBS_*, or one of torchrun"
            raise ConfigError(
                f"jobs.steps: {step.name} sets {variable}", expected=expected, next_command="choose another name"
            )
    return job_of(
        jobs,
        step,
        name=step.name,
        stage=STAGE,
        command=_script_words(step),
        environment={
            **jobs.environment,
            **step.environment,
            CHECKPOINT_URI: f"{workspace.rstrip('/')}/checkpoints/{cycle}/{step.name}",
        },
        timeout_s=step.timeout_s or SCRIPT_TIMEOUT_S,
        after=after,
    )


def plan_script(jobs: JobsConfig, step: Step, *, cycle: str, workspace: str) -> JobPlan:
    job = script_job(jobs, step, (), workspace=workspace, cycle=cycle)
    return JobPlan(pipeline=jobs.name, cycle=cycle, workspace=workspace, jobs=(job,))


def ordered(stages: Mapping[str, Sequence[str]], steps: Sequence[Step]) -> dict[str, tuple[str, ...]]:
    """Stages and steps, each after those it waits for; without steps the stages as they are.

    Raises ConfigError for a name that is taken or unknown, and for a circle.
    """
    after = {name: list(names) for name, names in stages.items()}
    for step in steps:
        if step.name in after:
            raise ConfigError(f"jobs.steps: {step.name} is the name of two jobs", expected="a name of its own")
        after[step.name] = list(step.after)
    for step in steps:
        if unknown := [name for name in (*step.after, *step.before) if name not in after]:
            raise ConfigError(
                f"jobs.steps: {step.name} stands after or before {unknown[0]}, which is no job",
                expected=f"one of {', '.join(name for name in after if name != step.name)}",
            )
        for name in step.before:
            after[name].append(step.name)
    order: dict[str, tuple[str, ...]] = {}
    while len(order) < len(after):
        ready = next((name for name in after if name not in order and all(one in order for one in after[name])), None)
        if ready is None:
            circle = ", ".join(name for name in after if name not in order)
            expected = "an order (after and before under [[jobs.steps]])"
            raise ConfigError(
                f"jobs.steps: {circle} wait for each other",
                expected=expected,
                next_command="correct [jobs], then trnjobs plan",
            )
        order[ready] = tuple(dict.fromkeys(after[ready]))
    return order


def script_of(job: JobSpec) -> str:
    """The file that the job runs, as it was typed; empty for a module, a command on the path, or a stage."""
    if job.stage != STAGE:
        return ""
    words = list(job.command[len(ENTRY) :])
    if words[:2] == ["trnpipe", "launch"]:
        words = strip_interpreter(words[words.index("--") + 1 :])
        return "" if words[:1] == ["-m"] else words[0] if words else ""
    return words[0] if "/" in words[0] else ""


def _script_words(step: Step) -> tuple[str, ...]:
    """Run Python under torchrun, any other command as it is."""
    first = step.command[0]
    script = strip_interpreter(step.command)
    if len(script) < len(step.command) or first == "-m" or first.endswith(".py"):
        if not script or (script[0].startswith("-") and script[0] != "-m"):
            seen = f"{step.name}: {first} " + (f"with option {script[0]}" if script else "without a script")
            raise ConfigError(seen, expected="-- python SCRIPT.py [ARGUMENT ...], or -m MODULE")
        ranks = ("--launch.processes", str(step.processes))
        return (*ENTRY, "trnpipe", "launch", *ranks, "--", *step.command)
    if step.nodes > 1 or step.processes > 1:
        raise ConfigError(
            f"{step.name}: {step.nodes} nodes of {step.processes} processes run {first}",
            expected="a script of Python, whose ranks are started as torchrun does; other commands run once",
            next_command="-- python SCRIPT.py, or 1 node of 1 process",
        )
    return (*ENTRY, *step.command)
