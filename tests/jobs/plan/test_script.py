"""Scripts as jobs: what the plan makes of them."""

from typing import Any

import pytest
from pydantic import ValidationError

from jobs.plan.cycle import plan_cycle
from jobs.plan.script import CHECKPOINT_URI, plan_script, script_of
from jobs.plan.spec import Plan
from jobs.settings import JobsConfig, Step
from jobs.targets.base import with_placements
from jobs.targets.batch.requests import check_plan
from pipeline.core.errors import ConfigError

ARGV = ("python", "train.py", "--lr", "1e-3")
BATCH = {"image": "image", "queue": "queue", "share_identifier": "share", "role": "arn:role"}


def step(name: str = "train-mine", *command: str, **more: Any) -> Step:
    return Step(name=name, command=command or ARGV, **more)


def run(one: Step, **jobs: Any) -> Plan:
    settings = JobsConfig(steps=(one,), **jobs)
    return with_placements(plan_script(settings, one, cycle="run-x", workspace="s3://b/w"), settings)


def cycle(*steps: Step, **more: Any) -> Plan:
    jobs = JobsConfig(steps=steps, **more)
    return with_placements(plan_cycle(jobs, cycle="c", workspace="s3://b/w"), jobs)


def test_a_script_under_torchrun() -> None:
    (job,) = run(step(nodes=2, processes=4, attempts=5, timeout_s=600)).jobs
    launched = ("trnjobs-entry", "--", "trnpipe", "launch", "--launch.processes", "4", "--", *ARGV)
    assert (job.command, job.num_nodes, job.retry.attempts, job.timeout_s) == (launched, 2, 5, 600)
    assert job.environment[CHECKPOINT_URI] == "s3://b/w/checkpoints/run-x/train-mine"
    assert set(job.retry.exit_codes) == {75, 143}  # those of the table; any other code is an error
    other = run(step("x", "./notify.sh", "", "--name")).jobs[0].command
    assert other == ("trnjobs-entry", "--", "./notify.sh", "", "--name"), "as it is, with its empty arguments"


@pytest.mark.parametrize(
    ("command", "script"),
    [
        (("python3.11", "a/b.py"), "a/b.py"),
        (("/usr/bin/python3", "-u", "a/b.py"), "a/b.py"),
        (("b.py", "--x"), "b.py"),
        (("-m", "package.module"), ""),
        (("python", "-m", "package.module"), ""),
        (("./notify.sh", "done"), "./notify.sh"),
        (("aws", "s3", "ls"), ""),
    ],
)
def test_what_file_a_job_runs(command: tuple[str, ...], script: str) -> None:
    assert script_of(run(step("x", *command)).jobs[0]) == script


def test_steps_among_the_stages() -> None:
    features = step("features", "python", "features.py", before=("prepare",))
    notify = step("notify", "./notify.sh", after=("verify",))
    plan = cycle(features, notify)
    names = [job.name for job in plan.jobs]
    assert [one.job for one in plan.job("prepare").depends_on] == ["features"]
    assert [one.job for one in plan.job("notify").depends_on] == ["verify"]
    assert all(names.index(one.job) < names.index(job.name) for job in plan.jobs for one in job.depends_on)
    check_plan(cycle(features, notify, **BATCH))
    without = [job for job in cycle().jobs if job.name != "prepare"]
    assert [job for job in plan.jobs if job.stage != "run" and job.name != "prepare"] == without


@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        ((step("a", after=("b",)), step("b", after=("a",))), "a, b wait for each other"),
        ((step("a", after=("nothing",)),), "after or before nothing, which is no job"),
        ((step("train"),), "train is the name of two jobs"),
        ((step("a", environment={"RANK": "1"}),), "sets RANK"),
        ((step("a", instance="m9.huge"),), "unknown instance"),
        ((step("a", "python"),), "python without a script"),
        ((step("a", "python", "--version"),), "python with option --version"),
        ((step("a", "./notify.sh", nodes=2),), "2 nodes of 1 processes"),
        ((step("a", "train.py", "a\0b"),), "zero byte"),
        ((step("a", environment={"A": "a\0b"}),), "'environment A' holds a zero byte"),
    ],
)
def test_what_cannot_be_planned(steps: tuple[Step, ...], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        cycle(*steps)


@pytest.mark.parametrize(
    "fields", [{"workers": 2}, {"name": "a b"}, {"command": ()}, {"command": ("",)}, {"environment": {"a-b": "1"}}]
)
def test_what_is_no_step(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Step(**{"name": "x", "command": ARGV} | fields)
