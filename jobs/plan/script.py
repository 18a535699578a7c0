"""Scripts as jobs: the steps of `[[jobs.steps]]` beside the stages of a cycle, and the one of `trnjobs run`. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from jobs.plan.resources import job_of
from jobs.plan.spec import JobSpec, Plan
from jobs.settings import JobsConfig, Step
from pipeline.core.errors import ConfigError
from pipeline.core.interpreter import without_interpreter

STAGE = "run"
"""The kind of every script: they share a definition of AWS Batch and a line of the ledger."""
RUN_PREFIX = "run-"
"""Begins the cycle that a `trnjobs run` is on record as; no cycle of a schedule is named so."""
ENTRY = ("trnjobs-entry", "--")
CHECKPOINT_URI = "TRNJOBS_CHECKPOINT_URI"
USUAL_TIMEOUT_S = 24 * 3600
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
        command=_words(step),
        environment={
            **jobs.environment,
            **step.environment,
            CHECKPOINT_URI: f"{workspace.rstrip('/')}/checkpoints/{cycle}/{step.name}",
        },
        timeout_s=step.timeout_s or USUAL_TIMEOUT_S,
        after=after,
    )


def plan_script(jobs: JobsConfig, step: Step, *, cycle: str, workspace: str) -> Plan:
    job = script_job(jobs, step, (), workspace=workspace, cycle=cycle)
    return Plan(pipeline=jobs.name, cycle=cycle, workspace=workspace, jobs=(job,))


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
        words = without_interpreter(words[words.index("--") + 1 :])
        return "" if words[:1] == ["-m"] else words[0] if words else ""
    return words[0] if "/" in words[0] else ""


def _words(step: Step) -> tuple[str, ...]:
    """Run Python under torchrun, any other command as it is."""
    first = step.command[0]
    script = without_interpreter(step.command)
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
