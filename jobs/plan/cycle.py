"""Plan the jobs of a cycle or the single job of a script. Equal settings always result in equal plans.

    prepare ──┐
    health  ──┴─> compile [-> mine] [-> teach] -> train -> evaluate -> embed -> verify -> report

This module only defines how the stages depend on each other. The size of each job is configured in `[jobs]`, and which
failures are retried is defined by the table of exit codes.
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
    "mine": ("compile",),  # mining needs compiled graphs to embed texts
    "teach": ("mine",),
    "train": ("teach",),
    "evaluate": ("train",),
    "embed": ("evaluate",),
    "verify": ("embed",),
    "report": ("verify",),
}
MINE, TEACH = "mine", "teach"  # the optional stages
_COMMANDS = {"verify": ("trnpipe", "embed", "verify"), "report": ("trnjobs", "report")}
_RANKS = frozenset({"health", "compile", "mine", "teach", "train", "evaluate", "embed"})
"""Stages that can start several ranks on a machine."""
_NODE_GROUPS = frozenset({"health", "compile", "train", "evaluate"})
_ARRAYS = frozenset({"prepare", "mine", "teach", "embed"})
_SECTION = {"prepare": "data"}  # settings sections that are not named after their stage
USUAL_TIMEOUT_S = {"health": 5400, "train": 24 * 3600} | dict.fromkeys(("compile", "mine", "teach", "embed"), 12 * 3600)
"""Default time limits in seconds. All other stages have 3600 s."""
START_S = 900  # extra time for nodes to connect (jobs/node/environment.py) and start, before a stage starts its clock


def plan_cycle(
    jobs: JobsConfig,
    *,
    cycle: str,
    workspace: str,
    settings: str = "",
    mines: bool = False,
    teaches: bool = False,
    stage_limits_s: Mapping[str, float] = MappingProxyType({}),
) -> JobPlan:
    """Plan the jobs of a cycle, which only include the mine and teach stages if `mines` and `teaches` are True.

    `stage_limits_s` are the time limits that stages enforce themselves. Raises ConfigError if a stage does not support
    the configured number of nodes, processes or workers, if an instance type is unknown, or if a job has a shorter time
    limit than its stage.
    """
    steps = {step.name: step for step in jobs.steps}
    specs = tuple(
        script_job(jobs, steps[name], after, workspace=workspace, cycle=cycle)
        if name in steps
        else _job(jobs, name, after, stage_limits_s.get(name, 0.0))
        for name, after in ordered(stages(mines, teaches), jobs.steps).items()
    )
    return JobPlan(pipeline=jobs.name, cycle=cycle, workspace=workspace, settings=settings, jobs=specs)


def stages(mines: bool, teaches: bool) -> dict[str, tuple[str, ...]]:
    """Return the stages of a cycle with their dependencies, with or without the optional stages.

    Stages that depend on an optional stage that is left out depend on its dependencies instead.
    """
    chosen = AFTER
    for optional in (name for name, included in ((MINE, mines), (TEACH, teaches)) if not included and name in AFTER):
        before = chosen[optional]
        chosen = {n: before if after == (optional,) else after for n, after in chosen.items() if n != optional}
    return chosen


def _job(jobs: JobsConfig, name: str, after: tuple[str, ...], stage_limit_s: float) -> JobSpec:
    config = jobs.stage(name)
    for setting, value, stages in (
        ("nodes", config.nodes, _NODE_GROUPS),
        ("processes", config.processes, _RANKS),
        ("workers", config.workers, _ARRAYS),
    ):
        if value > 1 and name not in stages:
            raise ConfigError(
                f"jobs.{name}.{setting} is {value}",
                expected=f"1, because only {', '.join(sorted(stages))} support more",
                next_command="correct [jobs], then trnjobs plan",
            )
    command = _COMMANDS.get(name, ("trnpipe", name))
    if config.processes > 1:
        command += ("--launch.processes", str(config.processes))
    if config.workers > 1:
        command += (f"--{_SECTION.get(name, name)}.workers", str(config.workers))
    # The time limit of the job should be longer than that of the stage. A stage that runs out of time can report the
    # reason and may be retried, whereas a job that runs out of time is simply killed.
    timeout_s = config.timeout_s
    if timeout_s is None:
        timeout_s = max(USUAL_TIMEOUT_S.get(name, 3600), math.ceil(stage_limit_s + START_S))
    elif timeout_s < stage_limit_s:
        raise ConfigError(
            f"jobs.{name}.timeout_s is {timeout_s:,}, but the stage may take {math.ceil(stage_limit_s):,} s",
            expected="a larger value, or no timeout_s to let the plan choose one",
            next_command=f"remove jobs.{name}.timeout_s or lower the limits under [{name}], then trnjobs plan",
        )
    return job_of(
        jobs,
        config,
        name=name,
        stage=name,
        command=ENTRY + command,
        environment=jobs.environment,
        timeout_s=timeout_s,
        after=after,
    )


# Scripts that run as jobs, which are the steps in `[[jobs.steps]]` of a cycle and the script given to `trnjobs run`.

STAGE = "run"  # the stage of all scripts, which share an AWS Batch job definition and a line of the ledger
RUN_PREFIX = "run-"  # prefix of the cycle names of `trnjobs run`, which no scheduled cycle has
CHECKPOINT_URI = "TRNJOBS_CHECKPOINT_URI"
SCRIPT_TIMEOUT_S = 24 * 3600
_RESERVED_PREFIXES = ("AWS_BATCH", "TRNJOBS_")
_TORCHRUN = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def script_job(jobs: JobsConfig, step: Step, after: Iterable[str], *, workspace: str, cycle: str) -> JobSpec:
    """Plan the job of a step.

    Raises ConfigError if the step sets a reserved variable, or if a command other than Python should run as several
    ranks.
    """
    for variable in step.environment:
        if variable.startswith(_RESERVED_PREFIXES) or variable in _TORCHRUN:
            raise ConfigError(
                f"jobs.steps: {step.name} sets the reserved variable {variable}",
                expected="no variable of torchrun, AWS_BATCH* or TRNJOBS_*",
                next_command="choose a different name",
            )
    return job_of(
        jobs,
        step,
        name=step.name,
        stage=STAGE,
        command=_script_command(step),
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
    """Return all stages and steps with their dependencies, in topological order.

    If there are no steps, the stages are returned in their original order. Raises ConfigError if a name is not unique,
    if a dependency does not exist, or if dependencies are circular.
    """
    after = {name: list(names) for name, names in stages.items()}
    for step in steps:
        if step.name in after:
            raise ConfigError(
                f"jobs.steps: two jobs are named {step.name}",
                expected="unique names",
                next_command="rename one of them",
            )
        after[step.name] = list(step.after)
    for step in steps:
        if unknown := [name for name in (*step.after, *step.before) if name not in after]:
            raise ConfigError(
                f"jobs.steps: {step.name} refers to a job {unknown[0]} that does not exist",
                expected=f"one of {', '.join(name for name in after if name != step.name)}",
                next_command=f"correct after or before of {step.name}",
            )
        for name in step.before:
            after[name].append(step.name)
    order: dict[str, tuple[str, ...]] = {}
    while len(order) < len(after):
        pending = [name for name in after if name not in order]
        ready = next((name for name in pending if all(earlier in order for earlier in after[name])), None)
        if ready is None:
            raise ConfigError(
                f"jobs.steps: {', '.join(pending)} depend on each other",
                expected="no circular dependency (after and before under [[jobs.steps]])",
                next_command="correct [jobs], then trnjobs plan",
            )
        order[ready] = tuple(dict.fromkeys(after[ready]))
    return order


def script_of(job: JobSpec) -> str:
    """Return the script of a job, as written by the user.

    Returns an empty string if the job does not run a script file, but a module, a command on the path, or a stage.
    """
    if job.stage != STAGE:
        return ""
    command = list(job.command[len(ENTRY) :])
    if command[:2] == ["trnpipe", "launch"]:
        command = strip_interpreter(command[command.index("--") + 1 :])
        return "" if command[:1] == ["-m"] else command[0] if command else ""
    return command[0] if "/" in command[0] else ""


def _script_command(step: Step) -> tuple[str, ...]:
    """Return the command to run for a step. Python scripts are launched by torchrun, other commands are unchanged."""
    first = step.command[0]
    script = strip_interpreter(step.command)
    if len(script) < len(step.command) or first == "-m" or first.endswith(".py"):
        if not script or (script[0].startswith("-") and script[0] != "-m"):
            problem = f"step {step.name} runs {first} {f'with option {script[0]}' if script else 'without a script'}"
            raise ConfigError(
                problem, expected="-- python SCRIPT.py [ARGUMENT ...], or -m MODULE", next_command="correct its command"
            )
        ranks = ("--launch.processes", str(step.processes))
        return (*ENTRY, "trnpipe", "launch", *ranks, "--", *step.command)
    if step.nodes > 1 or step.processes > 1:
        raise ConfigError(
            f"step {step.name} runs {first} on {step.nodes} nodes with {step.processes} processes",
            expected="a Python script, because other commands are only run once",
            next_command="use -- python SCRIPT.py, or 1 node with 1 process",
        )
    return (*ENTRY, *step.command)
