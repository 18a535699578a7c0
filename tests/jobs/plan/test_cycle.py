"""Settings -> jobs: the shape of a cycle, commands, sizes, prices; what is refused before anything is sent.

Plans that the revision before has stored are read and keep their ids.
"""

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.plan.cycle import AFTER, CHECKPOINT_URI, MINE, TEACH, plan_cycle, plan_script, script_of
from jobs.plan.resources import Prices, job_usd, node_usd_per_hour, prices_of
from jobs.plan.spec import JobPlan, JobSpec, Resources, Retry
from jobs.settings import JobsConfig, Step
from jobs.targets.base import placement_of, with_placements
from jobs.targets.batch.requests import check_plan
from pipeline.core.errors import ConfigError
from pipeline.core.machines import NODES
from tests.jobs.cycle.cases import TRN1, job, plan

TRAINIUM: dict[str, Any] = {
    "name": "relevance",
    "image": "1234.dkr.ecr.us-west-2.amazonaws.com/trnpipe@sha256:" + "0" * 64,
    "queue": "trainium",
    "share_identifier": "production",
    "prepare": {"queue": "cpu", "vcpus": 16, "memory_mib": 60_000},
    "health": {"nodes": 4, "instance": "trn1.32xlarge"},
    "compile": {"instance": "trn1.32xlarge", "processes": 32},
    "train": {"nodes": 4, "processes": 32, "instance": "trn1.32xlarge", "timeout_s": 7200, "attempts": 5},
    "mine": {"workers": 4, "instance": "trn1.2xlarge"},
    "embed": {"workers": 8, "processes": 2, "instance": "trn1.2xlarge"},
}


def planned(cycle: str = "2026-11-20", mines: bool = False, teaches: bool = False, **fields: Any) -> JobPlan:
    config = JobsConfig.model_validate(fields)
    made = plan_cycle(
        config, cycle=cycle, workspace="s3://bucket/relevance", settings="abc", mines=mines, teaches=teaches
    )
    return with_placements(made, config)


def trainium(*, mines: bool = False, **fields: Any) -> JobPlan:
    return planned(mines=mines, **{**TRAINIUM, **fields})


def before(jobs: JobPlan, name: str) -> set[str]:
    """Everything that must have succeeded before."""
    direct = {one.job for one in jobs.job(name).depends_on}
    return direct.union(*(before(jobs, one) for one in direct))


@pytest.mark.parametrize("mines", [False, True])
@pytest.mark.parametrize("teaches", [False, True])
def test_the_order_of_a_cycle(mines: bool, teaches: bool) -> None:
    made = planned(mines=mines, teaches=teaches)
    names = [one.name for one in made.jobs]
    optional = [name for name, included in ((MINE, mines), (TEACH, teaches)) if included]
    assert sorted(names) == sorted(AFTER.keys() - {MINE, TEACH} | {*optional})
    assert before(made, "prepare") == before(made, "health") == set()
    chain = ["compile", *optional, "train", "evaluate", "embed", "verify", "report"]
    for earlier, later in combinations(chain, 2):
        assert earlier in before(made, later)
    assert before(made, "compile") == {"prepare", "health"}
    for index, name in enumerate(names):
        assert before(made, name) <= {*names[:index]}


def test_commands() -> None:
    stages = ("prepare", "health", "compile", "train", "evaluate", "embed")
    assert {one.name: " ".join(one.command) for one in planned().jobs} == {
        **{name: f"trnjobs-entry -- trnpipe {name}" for name in stages},
        "verify": "trnjobs-entry -- trnpipe embed verify",
        "report": "trnjobs-entry -- trnjobs report",
    }
    made = trainium()
    assert made.job("train").command[2:] == ("trnpipe", "train", "--launch.processes", "32")
    assert made.job("embed").command[2:] == ("trnpipe", "embed", "--launch.processes", "2", "--embed.workers", "8")
    mines = trainium(mines=True)
    assert mines.job("mine").command[2:] == ("trnpipe", "mine", "--mine.workers", "4")
    assert (mines.job("mine").array_size, mines.job("mine").timeout_s) == (4, 12 * 3600)


def test_a_gang_on_trainium_gets_the_machine_with_its_network() -> None:
    train = trainium().job("train")
    needs = train.resources
    assert (train.num_nodes, needs.vcpus, needs.memory_mib) == (4, 128, 490_000)
    assert needs.devices == (
        *(f"/dev/neuron{index}" for index in range(16)),
        *(f"/dev/infiniband/uverbs{index}" for index in range(8)),
    )
    assert [(one.name, one.hard) for one in needs.ulimits] == [("nofile", 65_536), ("memlock", -1)]
    assert (needs.shared_memory_mib, needs.instance_type) == (490_000 // 8, "trn1.32xlarge")
    assert (needs.processes_per_node, train.timeout_s, train.retry) == (32, 7200, Retry.of(5, 20))


def test_what_one_stage_asks_goes_before_what_all_get() -> None:
    made = trainium(
        role="arn:all",
        environment={"A": "1"},
        priority=7,
        evaluate={"role": "arn:one"},
        embed={"image": "cpu@sha256:1"},
    )
    where = {one.name: placement_of(made, one) for one in made.jobs}
    assert (where["prepare"].queue, where["train"].queue) == ("cpu", "trainium")
    assert (made.job("embed").image, made.job("verify").image) == ("cpu@sha256:1", made.job("train").image)
    assert (where["evaluate"].job_role, where["train"].job_role) == ("arn:one", "arn:all")
    assert {(one.priority, one.share_identifier) for one in where.values()} == {(7, "production")}
    assert {one.environment["A"] for one in made.jobs} == {"1"}
    small = trainium(train={"nodes": 2, "instance": "trn1.32xlarge", "vcpus": 96, "memory_mib": 400_000})
    needs = small.job("train").resources
    assert (needs.vcpus, needs.memory_mib, needs.shared_memory_mib) == (96, 400_000, 50_000)


@given(
    nodes=st.integers(1, 1000),
    processes=st.integers(1, 64),
    workers=st.integers(1, 10_000),
    attempts=st.integers(1, 10),
    timeout_s=st.integers(60, 10**6),
    instance=st.sampled_from(["", *NODES]),
)
def test_whatever_the_settings_allow_aws_batch_takes(
    nodes: int, processes: int, workers: int, attempts: int, timeout_s: int, instance: str
) -> None:
    shared = {"instance": instance, "processes": processes, "attempts": attempts, "timeout_s": timeout_s}
    check_plan(trainium(train={**shared, "nodes": nodes}, embed={**shared, "workers": workers}))


def test_a_job_lasts_longer_than_its_stage_allows_itself() -> None:
    config = JobsConfig.model_validate(TRAINIUM)
    limits = {"health": 5640.2, "compile": 16_200.0, "train": 100_000.0}
    made = plan_cycle(config, cycle="c", workspace="s3://bucket/relevance", stage_limits_s=limits | {"train": 7200.0})
    assert [made.job(name).timeout_s for name in ("prepare", "health", "compile", "train", "embed")] == [
        *(3600, 6541, 43_200, 7200, 43_200)  # 5640.2 s and 900 to gather and start; train as it was set
    ]
    with pytest.raises(ConfigError, match=r"jobs\.train\.timeout_s is 7,200, but the stage may take 100,000 s"):
        plan_cycle(config, cycle="c", workspace="s3://bucket/relevance", stage_limits_s=limits)


@pytest.mark.parametrize(
    ("stage", "wanted", "seen"),
    [
        ("embed", {"nodes": 2}, "jobs.embed.nodes is 2"),
        ("verify", {"processes": 2}, "jobs.verify.processes is 2"),
        ("report", {"workers": 2}, "jobs.report.workers is 2"),
        ("train", {"workers": 3}, "jobs.train.workers is 3"),
        (
            "train",
            {"instance": "trn1.32xlrage"},
            "jobs.train.instance is trn1.32xlrage, which is not a known instance type",
        ),
        ("train", {"instance": "m7i.large", "vcpus": 2}, "jobs.train.instance is m7i.large"),
    ],
)
def test_a_shape_that_no_stage_has(stage: str, wanted: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(seen)) as raised:
        trainium(mines=True, **{stage: wanted})
    assert raised.value.expected and raised.value.next_command


STORED = Path(__file__).parent / "stored_plan.json"


def test_a_plan_of_the_revision_before_is_read_and_keeps_its_id() -> None:
    found = JobPlan.model_validate_json(STORED.read_bytes())
    assert found.plan_id == "b9fff577585e38fabce2f906425f4b5c"
    assert found == trainium(
        mines=True, role="arn:all", environment={"A": "1"}, priority=7, evaluate={"role": "arn:one"}
    )
    assert JobPlan.model_validate_json(found.model_dump_json()) == found
    assert (planned().plan_id, trainium().plan_id) == (
        "a4dd49e58013b504bd4a633311605bfc",
        "21fc4d73e920a02f25de339c93074948",
    )


def test_where_a_job_runs_is_no_part_of_what_it_runs() -> None:
    one, other = plan(job("a"), queue="x"), plan(job("a"), queue="y")
    assert one.jobs == other.jobs
    assert one.plan_id != other.plan_id
    assert placement_of(one, one.job("a")).queue == "x"
    assert not {"queue", "share_identifier", "priority", "job_role", "log_group"} & JobSpec.model_fields.keys()


# Scripts as jobs.

ARGV = ("python", "train.py", "--lr", "1e-3")
BATCH = {"image": "image", "queue": "queue", "share_identifier": "share", "role": "arn:role"}


def step(name: str = "train-mine", *command: str, **more: Any) -> Step:
    return Step(name=name, command=command or ARGV, **more)


def run(one: Step, **jobs: Any) -> JobPlan:
    settings = JobsConfig(steps=(one,), **jobs)
    return with_placements(plan_script(settings, one, cycle="run-x", workspace="s3://b/w"), settings)


def cycle(*steps: Step, **more: Any) -> JobPlan:
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
    made = cycle(features, notify)
    names = [job.name for job in made.jobs]
    assert [one.job for one in made.job("prepare").depends_on] == ["features"]
    assert [one.job for one in made.job("notify").depends_on] == ["verify"]
    assert all(names.index(one.job) < names.index(job.name) for job in made.jobs for one in job.depends_on)
    check_plan(cycle(features, notify, **BATCH))
    without = [job for job in cycle().jobs if job.name != "prepare"]
    assert [job for job in made.jobs if job.stage != "run" and job.name != "prepare"] == without


@pytest.mark.parametrize(
    ("steps", "seen"),
    [
        ((step("a", after=("b",)), step("b", after=("a",))), "a, b depend on each other"),
        ((step("a", after=("nothing",)),), "refers to a job nothing that does not exist"),
        ((step("train"),), "two jobs are named train"),
        ((step("a", environment={"RANK": "1"}),), "sets the reserved variable RANK"),
        ((step("a", instance="m9.huge"),), "not a known instance"),
        ((step("a", "python"),), "python without a script"),
        ((step("a", "python", "--version"),), "python with option --version"),
        ((step("a", "./notify.sh", nodes=2),), "on 2 nodes with 1 processes"),
        ((step("a", "train.py", "a\0b"),), "zero byte"),
        ((step("a", environment={"A": "a\0b"}),), "'environment A' contains a zero byte"),
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


# What jobs cost.

LIST = Prices({"trn1.32xlarge": 20.0, "p9.huge": 7.0})


def of(vcpus: int, instance: str) -> JobSpec:
    return job("a", resources=Resources(vcpus=vcpus, memory_mib=4096, instance_type=instance))


@pytest.mark.parametrize(
    ("made", "prices", "expected"),
    [
        (of(128, "trn1.32xlarge"), LIST, 20.0),
        (of(64, "trn1.32xlarge"), LIST, 10.0),  # half a machine
        (of(256, "trn1.32xlarge"), LIST, 20.0),  # never more than one
        (of(4, "p9.huge"), LIST, 7.0),  # of a size that nobody knows: all of it
        (of(4, "m7i.large"), LIST, None),
        (of(4, "m7i.large"), Prices({}, vcpu=0.05), 0.2),
        (of(4, ""), Prices({"": 1.0}, vcpu=0.0), 1.0),
        (of(4, ""), Prices({}, vcpu=0.0), 0.0),
    ],
)
def test_the_hour_of_a_node(made: JobSpec, prices: Prices, expected: float | None) -> None:
    assert node_usd_per_hour(made, prices) == (None if expected is None else pytest.approx(expected))


SAGEMAKER = prices_of(JobsConfig(prices={"trn1.32xlarge": 20.0, "ml.m7i.large": 0.2}), "sagemaker")


@pytest.mark.parametrize(
    ("made", "prices", "expected"),
    [
        (job("a", resources=TRN1), LIST, 20.0),
        (job("a", resources=TRN1, num_nodes=4), LIST, 80.0),
        (job("a", resources=TRN1, array_size=8), LIST, 160.0),
        (job("a"), LIST, None),
        # nodes of a gang have their machines to themselves
        (of(64, "trn1.32xlarge").model_copy(update={"num_nodes": 4}), LIST, 80.0),
        # on SageMaker machines are whole and cost more
        (job("train", resources=TRN1), SAGEMAKER, 23.0),
        (job("verify"), SAGEMAKER, 0.2),
    ],
)
def test_the_hour_of_a_job(made: JobSpec, prices: Prices, expected: float | None) -> None:
    assert job_usd(made, 3600, prices) == (None if expected is None else pytest.approx(expected))
