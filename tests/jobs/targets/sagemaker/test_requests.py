"""Requests and names; what is refused before anything is sent; what it costs."""

from typing import Any

import pytest

from jobs.cycle.job_states import Leaf
from jobs.plan.script import plan_script
from jobs.settings import JobsConfig, Step
from jobs.targets.batch.requests import definition_request, submit_request
from jobs.targets.placement import SPOT_WAIT_S, with_placements
from jobs.targets.sagemaker.requests import (
    MAX_NAME,
    Cycle,
    check_plan,
    direct_request,
    request_problems,
    sagemaker_requests,
    training_job_request,
)
from pipeline.core.errors import ConfigError
from tests.jobs.cycle.cases import TRN1, job, plan
from tests.jobs.targets.sagemaker.setting import QUEUE, ROLE, ml_plan

IMAGE = "1234.dkr.ecr.us-west-2.amazonaws.com/trnpipe@sha256:" + "0" * 64


def test_the_request_of_a_gang() -> None:
    train = job(
        "train",
        num_nodes=2,
        resources=TRN1,
        environment={"A": "b"},
        command=("trnjobs-entry", "--", "trnpipe", "launch", "--", "examples/ddp_script.py", "--steps", "40"),
    )
    of = ml_plan(train, sagemaker={"subnets": ["subnet-1"], "security_groups": ["sg-1"], "keep_alive_s": 600})
    cycle = Cycle(of, 0.0)
    name = cycle.training_job(Leaf(train), 1, 2)
    request = training_job_request(cycle, Leaf(train), name=name, attempt=2)
    assert [*request_problems("sagemaker", "CreateTrainingJob", request)] == []
    assert name.startswith("relevance-2026-11-20-train-r1a2-")
    assert request == {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": train.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["trnjobs-entry", "--"],
            "ContainerArguments": ["trnpipe", "launch", "--", "examples/ddp_script.py", "--steps", "40"],
        },
        "OutputDataConfig": {"S3OutputPath": "s3://bucket/relevance/sagemaker"},
        "ResourceConfig": {
            "InstanceType": "ml.trn1.32xlarge",
            "InstanceCount": 2,
            "VolumeSizeInGB": 100,
            "KeepAlivePeriodInSeconds": 600,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 3600},
        "Environment": {
            "A": "b",
            "TRNJOBS_ATTEMPT": "2",
            "TRNJOBS_JOB": "train",
            "TRNJOBS_PLAN": of.plan_id,
            "TRNPIPE_CYCLE": "2026-11-20",
            "TRNPIPE_WORKSPACE": "s3://bucket/relevance",
        },
        "Tags": [
            {"Key": "pipeline", "Value": "relevance"},
            {"Key": "cycle", "Value": "2026-11-20"},
            {"Key": "job", "Value": "train"},
        ],
        "VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]},
        "InfraCheckConfig": {"EnableInfraCheck": True},
    }


def test_spot_capacity_is_asked_for_with_a_limit_to_wait_and_a_place_to_count_starts() -> None:
    train = job("train", num_nodes=2, resources=TRN1)
    spot = {"spot": True, "keep_alive_s": 600}
    settings = JobsConfig.model_validate({"role": ROLE, "sagemaker": spot})
    of = with_placements(ml_plan(train, job("evaluate", "train", num_nodes=2, resources=TRN1)), settings)
    cycle = Cycle(of, 0.0)
    first, second = (direct_request(cycle, Leaf(of.job("train")), 1, attempt) for attempt in (1, 2))
    assert [*request_problems("sagemaker", "CreateTrainingJob", first)] == []
    assert first["EnableManagedSpotTraining"] is True
    assert first["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 3600 + SPOT_WAIT_S}
    assert "KeepAlivePeriodInSeconds" not in first["ResourceConfig"]
    starts = [one["Environment"]["TRNJOBS_STARTS"] for one in (first, second)]
    assert starts == [cycle.leaf_id(Leaf(of.job("train")), 1)] * 2
    assert second["Environment"]["TRNJOBS_ATTEMPT"] == "2"
    on_demand = direct_request(Cycle(ml_plan(train), 0.0), Leaf(train), 1, 1)
    assert "TRNJOBS_STARTS" not in on_demand["Environment"] and "EnableManagedSpotTraining" not in on_demand


def test_names_are_short_and_differ_for_every_try_round_child_and_life() -> None:
    long = plan(job("e" * 40, array_size=2)).model_copy(update={"pipeline": "p_" * 30})
    leaves = [Leaf(long.jobs[0], index) for index in (0, 1)]
    names = [
        Cycle(long, life).training_job(leaf, round_, attempt)
        for life in (1.0, 2.0)
        for leaf in leaves
        for round_ in (1, 2)
        for attempt in (1, 2)
    ]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= MAX_NAME
    of_infra = long.model_copy(update={"pipeline": "relevance-of-the-whole-catalogu"})  # 31, as infra/ allows
    longest = [Cycle(of_infra, 0.0).training_job(leaf, 12, 10) for leaf in leaves]
    assert all(name.startswith("relevance-of-the-whole-catalogu-") and "r12a10" in name for name in longest)
    assert max(map(len, longest)) <= MAX_NAME


@pytest.mark.parametrize(
    ("fields", "placement", "problem"),
    [
        ({}, {"job_role": ""}, "no role"),
        ({}, {"workspace": "/tmp/here"}, "expected one on S3"),
        ({"command": ("aws", "x" * 257)}, {}, "the longest of 257 characters"),
        ({"command": ("aws", *["x"] * 102)}, {}, "a command of 103 words"),
        ({"environment": {"LONG": "x" * 513}}, {}, "environment variable LONG of 513 characters"),
        ({"resources": {"vcpus": 4, "memory_mib": 99, "instance_type": "inf2.xlarge"}}, {}, "ml.inf2.xlarge, which"),
        ({}, {"sagemaker": QUEUE, "share_identifier": ""}, "share identifier ''; expected letters"),
    ],
)
def test_what_is_refused_before_anything_is_sent(
    fields: dict[str, Any], placement: dict[str, Any], problem: str
) -> None:
    workspace = placement.pop("workspace", "s3://bucket/relevance")
    of = plan(job("train", **fields), **{"job_role": ROLE, **placement}).model_copy(update={"workspace": workspace})
    with pytest.raises(ConfigError, match=problem):
        check_plan(of)


def test_the_same_script_on_aws_batch_and_on_sagemaker() -> None:
    """The argv of examples/ddp_script.py, as `trnjobs run --nodes 2 --processes 2` plans it."""
    words = ("python", "examples/ddp_script.py", "--steps", "40")
    step = Step(name="ddp", command=words, nodes=2, processes=2, instance="trn1.32xlarge", attempts=2)
    jobs = JobsConfig(image=IMAGE, role=ROLE, queue="relevance", share_identifier="production", steps=(step,))
    of = with_placements(plan_script(jobs, step, cycle="run-ddp", workspace="s3://bucket/relevance"), jobs)
    argv = ["trnpipe", "launch", "--launch.processes", "2", "--", *words]
    uri = "s3://bucket/relevance/checkpoints/run-ddp/ddp"
    batch = submit_request(of, of.jobs[0], definition="trnpipe-run:1", ids={})
    assert batch["nodeOverrides"]["numNodes"] == 2
    (nodes,) = batch["nodeOverrides"]["nodePropertyOverrides"]
    assert nodes["containerOverrides"]["command"] == ["trnjobs-entry", "--", *argv]
    definition = definition_request(of, of.jobs[0])["nodeProperties"]["nodeRangeProperties"][0]["container"]
    assert {"name": "TRNJOBS_CHECKPOINT_URI", "value": uri} in definition["environment"]
    (ml,) = [one["CreateTrainingJob"] for one in sagemaker_requests(of)]
    assert [*request_problems("sagemaker", "CreateTrainingJob", ml)] == []
    assert ml["AlgorithmSpecification"] == {
        "TrainingImage": IMAGE,
        "TrainingInputMode": "File",
        "ContainerEntrypoint": ["trnjobs-entry", "--"],
        "ContainerArguments": argv,
    }
    assert ml["ResourceConfig"]["InstanceCount"] == 2
    assert ml["Environment"]["TRNJOBS_CHECKPOINT_URI"] == uri
