"""Requests, names and retry rules of training and service jobs; what is refused before anything is sent."""

import json
from typing import Any

import pytest

from jobs.cycle.job_states import HOST_TERMINATED, Task, should_retry
from jobs.plan.cycle import plan_script
from jobs.plan.spec import Retry
from jobs.settings import JobsConfig, Step
from jobs.targets.base import SPOT_WAIT_S, with_placements
from jobs.targets.batch.requests import definition_request, submit_request
from jobs.targets.sagemaker.requests import (
    MAX_NAME,
    RECEIVED,
    CycleRun,
    check_plan,
    direct_request,
    request_problems,
    retry_rules,
    sagemaker_requests,
    service_job_request,
    training_job_request,
)
from jobs.targets.sagemaker.routes import end_of
from pipeline.core.errors import EXIT_TABLE, ConfigError
from tests.jobs.cycle.cases import TRN1, job, plan
from tests.jobs.targets.sagemaker.fake_sagemaker import FakeServiceJobs
from tests.jobs.targets.sagemaker.setting import QUEUE, ROLE, ml_plan

IMAGE = "1234.dkr.ecr.us-west-2.amazonaws.com/trnpipe@sha256:" + "0" * 64
GROUP = job("train", num_nodes=2, resources=TRN1)


def test_the_request_of_a_node_group() -> None:
    words = ("trnpipe", "launch", "--", "examples/ddp_script.py", "--steps", "40")
    train = GROUP.model_copy(update={"environment": {"A": "b"}, "command": ("trnjobs-entry", "--", *words)})
    of = ml_plan(train, sagemaker={"subnets": ["subnet-1"], "security_groups": ["sg-1"], "keep_alive_s": 600})
    cycle = CycleRun(of, 0.0)
    name = cycle.training_job(Task(train), 1, 2)
    request = training_job_request(cycle, Task(train), name=name, attempt=2)
    assert [*request_problems("sagemaker", "CreateTrainingJob", request)] == []
    assert name.startswith("relevance-2026-11-20-train-r1a2-")
    assert request == {
        "TrainingJobName": name,
        "RoleArn": ROLE,
        "AlgorithmSpecification": {
            "TrainingImage": train.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["trnjobs-entry", "--"],
            "ContainerArguments": [*words],
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


def test_the_request_of_a_service_job() -> None:
    cycle = CycleRun(ml_plan(GROUP, sagemaker=QUEUE, priority=7), 0.0)
    request = service_job_request(cycle, Task(GROUP), 1)
    name = cycle.task_id(Task(GROUP), 1)
    payload, strategy = json.loads(request.pop("serviceRequestPayload")), request.pop("retryStrategy")
    assert name.startswith("relevance-2026-11-20-train-r1-")
    assert request == {
        "jobName": name,
        "jobQueue": "ml",
        "serviceJobType": "SAGEMAKER_TRAINING",
        "shareIdentifier": "production",
        "schedulingPriority": 7,
        "tags": {"pipeline": "relevance", "cycle": "2026-11-20", "job": "train"},
        "clientToken": name,
    }
    assert strategy["attempts"] == 10
    assert [(one["action"], one["onStatusReason"]) for one in strategy["evaluateOnExit"]] == [
        ("RETRY", "Received status from SageMaker: AlgorithmError: exit 75 *"),
        ("RETRY", "Received status from SageMaker: AlgorithmError: exit 143 *"),
        ("RETRY", "Received status from SageMaker: InternalServerError*"),
        ("RETRY", "Received status from SageMaker: CapacityError*"),
        ("EXIT", "*"),
    ]
    assert len(payload["TrainingJobName"]) <= 23
    assert payload["ResourceConfig"]["InstanceCount"] == 2
    assert payload["Environment"]["TRNJOBS_STARTS"] == name
    assert "TRNJOBS_ATTEMPT" not in payload["Environment"]  # Batch sends the same payload for every try
    assert [*request_problems("sagemaker", "CreateTrainingJob", payload)] == []


def test_a_quota_share_takes_the_place_of_the_share_and_bounds_preemptions() -> None:
    group = GROUP.model_copy(update={"retry": Retry.of(3, 20)})
    made = ml_plan(group, sagemaker=QUEUE | {"quota_share": "search"})
    check_plan(made)
    request = service_job_request(CycleRun(made, 0.0), Task(group), 1)
    assert (request["quotaShareName"], "shareIdentifier" in request) == ("search", False)
    assert request["preemptionConfiguration"] == {"preemptionRetriesBeforeTermination": 20}
    assert request["retryStrategy"]["attempts"] == 10
    assert json.loads(request["serviceRequestPayload"])["Environment"]["TRNJOBS_ATTEMPTS"] == "3"


def test_spot_capacity_is_asked_for_with_a_limit_to_wait_and_a_place_to_count_starts() -> None:
    spot = {"spot": True, "keep_alive_s": 600}
    settings = JobsConfig.model_validate({"role": ROLE, "sagemaker": spot})
    of = with_placements(ml_plan(GROUP, job("evaluate", "train", num_nodes=2, resources=TRN1)), settings)
    cycle, task = CycleRun(of, 0.0), Task(of.job("train"))
    first, second = (direct_request(cycle, task, 1, attempt) for attempt in (1, 2))
    assert [*request_problems("sagemaker", "CreateTrainingJob", first)] == []
    assert first["EnableManagedSpotTraining"] is True
    assert first["StoppingCondition"] == {"MaxRuntimeInSeconds": 3600, "MaxWaitTimeInSeconds": 3600 + SPOT_WAIT_S}
    assert "KeepAlivePeriodInSeconds" not in first["ResourceConfig"]
    starts = [one["Environment"]["TRNJOBS_STARTS"] for one in (first, second)]
    assert starts == [cycle.task_id(task, 1)] * 2
    assert second["Environment"]["TRNJOBS_ATTEMPT"] == "2"
    on_demand = direct_request(CycleRun(ml_plan(GROUP), 0.0), Task(GROUP), 1, 1)
    assert "TRNJOBS_STARTS" not in on_demand["Environment"] and "EnableManagedSpotTraining" not in on_demand


@pytest.mark.parametrize("pipeline", ["p_" * 30, "relevance-of-the-whole-catalogu"])  # 31, as infra/ allows
def test_names_are_short_and_differ_for_every_try_round_child_and_life(pipeline: str) -> None:
    long = plan(job("e" * 40, array_size=2)).model_copy(update={"pipeline": pipeline})
    names = [
        CycleRun(long, claimed_at).training_job(Task(long.jobs[0], index), submission, attempt)
        for claimed_at in (1.0, 2.0)
        for index in (0, 1)
        for submission in (1, 12)
        for attempt in (1, 10)
    ]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) <= MAX_NAME
    assert all(name.startswith(pipeline[:31].replace("_", "-").rstrip("-")) for name in names)
    assert "r12a10" in names[-1]


@pytest.mark.parametrize(
    ("fields", "placement", "problem"),
    [
        ({}, {"job_role": ""}, "no role"),
        ({}, {"workspace": "/tmp/here"}, "is not on S3"),
        ({"command": ("aws", "x" * 257)}, {}, "of up to 257 characters"),
        ({"command": ("aws", *["x"] * 102)}, {}, "command has 103 arguments"),
        ({"environment": {"LONG": "x" * 513}}, {}, "environment variable LONG has 513 characters"),
        (
            {"resources": {"vcpus": 4, "memory_mib": 99, "instance_type": "inf2.xlarge"}},
            {},
            "ml.inf2.xlarge does not exist on SageMaker",
        ),
        ({}, {"sagemaker": {"subnets": ["subnet-1"]}}, "SecurityGroupIds"),
        ({}, {"sagemaker": QUEUE, "share_identifier": ""}, "share identifier '', expected 1 to 255"),
        (
            {"environment": {f"VARIABLE_{number}": "x" * 500 for number in range(30)}},
            {"sagemaker": QUEUE},
            r"payload has 1\d,\d{3} bytes, expected at most 10,240",
        ),
    ],
)
def test_what_is_refused_before_anything_is_sent(
    fields: dict[str, Any], placement: dict[str, Any], problem: str
) -> None:
    workspace = placement.get("workspace", "s3://bucket/relevance")
    where = {"job_role": ROLE} | {name: value for name, value in placement.items() if name != "workspace"}
    of = plan(job("train", **fields), **where).model_copy(update={"workspace": workspace})
    with pytest.raises(ConfigError, match=problem):
        check_plan(of)


@pytest.mark.parametrize(
    ("reason", "code", "again"),
    [
        *((f"AlgorithmError: exit {one.exit_code} {one.name}: words, exit code: {one.exit_code}", one.exit_code,
           one.retry) for one in EXIT_TABLE if one.exit_code),
        *((f"AlgorithmError: exit 75 TransientError: {'é' * 1000}, exit code: 75".encode()[: 1024 - cut].decode(
            errors="replace"), 75, True) for cut in range(2)),
        ("AlgorithmError: exit 7 error, exit code: 7", 7, False),
        ("AlgorithmError: exit 1 error: no exit 75 here, exit code: 1", 1, False),
        ("AlgorithmError: , exit code: 1", 1, False),
        ("AlgorithmError: ", 1, False),
        ("InternalServerError: We encountered an internal error. Please try again.", None, True),
        ("CapacityError: Unable to provision requested ML compute capacity.", None, True),
        ("ClientError: Artifact upload failed: access denied", None, False),
        ("ClientError: InternalServerError", None, False),
        ("", None, False),
    ],
)  # fmt: skip
def test_every_kind_of_failure_is_tried_again_alike_by_us_and_by_the_rules_of_the_queue(
    reason: str, code: int | None, again: bool
) -> None:
    """Though its reason is cut."""
    retry = Retry.of(3)
    end, strategy = end_of("Failed", "Failed", reason), {"attempts": 3, "evaluateOnExit": retry_rules(retry)}
    assert (end.exit_code, should_retry(retry, 1, end)) == (code, again)
    assert end.status_reason != HOST_TERMINATED
    assert FakeServiceJobs.tries_again({"retryStrategy": strategy, "attempts": []}, RECEIVED + reason) == again


def test_the_same_script_on_aws_batch_and_on_sagemaker() -> None:
    """The argv of examples/ddp_script.py, as `trnjobs run --nodes 2 --processes 2` plans it."""
    words = ("python", "examples/ddp_script.py", "--steps", "40")
    step = Step(name="ddp", command=words, nodes=2, processes=2, instance="trn1.32xlarge", attempts=2)
    jobs = JobsConfig(image=IMAGE, role=ROLE, queue="relevance", share_identifier="production", steps=(step,))
    of = with_placements(plan_script(jobs, step, cycle="run-ddp", workspace="s3://bucket/relevance"), jobs)
    argv = ["trnpipe", "launch", "--launch.processes", "2", "--", *words]
    uri = "s3://bucket/relevance/checkpoints/run-ddp/ddp"
    batch = submit_request(of, of.jobs[0], definition="trnpipe-run:1", ids={})
    (nodes,) = batch["nodeOverrides"]["nodePropertyOverrides"]
    assert batch["nodeOverrides"]["numNodes"] == 2
    assert nodes["containerOverrides"]["command"] == ["trnjobs-entry", "--", *argv]
    definition = definition_request(of, of.jobs[0])["nodeProperties"]["nodeRangeProperties"][0]["container"]
    assert {"name": "TRNJOBS_CHECKPOINT_URI", "value": uri} in definition["environment"]
    (ml,) = [one["CreateTrainingJob"] for one in sagemaker_requests(of)]
    assert [*request_problems("sagemaker", "CreateTrainingJob", ml)] == []
    started = ml["AlgorithmSpecification"]
    assert (started["ContainerEntrypoint"], started["ContainerArguments"]) == (["trnjobs-entry", "--"], argv)
    assert (ml["ResourceConfig"]["InstanceCount"], ml["Environment"]["TRNJOBS_CHECKPOINT_URI"]) == (2, uri)
