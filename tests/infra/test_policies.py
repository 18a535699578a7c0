"""What each role of a deployment may do: a table of its actions, and one of the workspace's keys."""

import json

import botocore.session
import pytest

from jobs.cycle.job_states import Task
from jobs.plan.cycle import AFTER, STAGE
from jobs.targets.sagemaker.requests import CycleRun, direct_request, service_job_request
from tests.infra.policies import (
    FOLDER,
    JOB_ROLES,
    READERS,
    ROLES,
    STAGES,
    TRAINING_ROLES,
    Fleet,
    Input,
    Statement,
    characters,
    covers,
    listed,
)
from tests.jobs.cycle.cases import job
from tests.jobs.targets.sagemaker.setting import QUEUE, ml_plan

KEY = "arn:aws:kms:us-east-1:123456789012:key/shop"
OURS = Fleet(data=(Input("shop", "esci/2026", KEY), Input("catalogue", "")))
DIRECT, QUEUED = Fleet(sagemaker=True), Fleet(sagemaker=True, instances=16)
PLACE = "us-east-1:123456789012"
C = "cycles/2026-11-20"
MAX_CHARACTERS = 10_240  # of all inline policies of a role (IAM quotas)
MAX_MANAGED = 6144  # of a managed policy

LOOK = {
    "batch:DescribeComputeEnvironments",
    "batch:DescribeJobDefinitions",
    "batch:DescribeJobQueues",
    "batch:DescribeJobs",
    "batch:DescribeSchedulingPolicies",
    "batch:ListJobs",
}
DATA = {"kms:Decrypt", "kms:GenerateDataKey", "s3:GetObject", "s3:ListBucket", "s3:PutObject"}
WRITES = DATA | {"s3:AbortMultipartUpload", "s3:DeleteObject"}
SUBMIT = {"batch:RegisterJobDefinition", "batch:SubmitJob", "batch:TagResource", "batch:TerminateJob", "iam:PassRole"}
ACTIONS = {
    "driver": DATA | LOOK | SUBMIT | {"s3:DeleteObject", "logs:GetLogEvents"},
    **dict.fromkeys(("train", "promote", "embed"), WRITES),
    "report": DATA | {"batch:DescribeJobs"},
    "scheduler": {"batch:SubmitJob", "kms:Decrypt", "kms:GenerateDataKey", "sqs:SendMessage"},
}
NETWORK = {"ec2:DescribeDhcpOptions", "ec2:DescribeNetworkInterfaces", "ec2:DescribeSecurityGroups"}
NETWORK |= {"ec2:DescribeSubnets", "ec2:DescribeVpcs"}
BY_SAGEMAKER = {
    "cloudwatch:PutMetricData",
    *(f"ec2:{verb}NetworkInterface{of}" for verb in ("Create", "Delete") for of in ("", "Permission")),
    *NETWORK,
    "ecr:BatchCheckLayerAvailability",
    "ecr:BatchGetImage",
    "ecr:GetAuthorizationToken",
    "ecr:GetDownloadUrlForLayer",
    *(f"logs:{action}" for action in ("CreateLogStream", "DescribeLogStreams", "PutLogEvents")),
}
"""With the role of a training job."""
TRAINING_JOB = {f"sagemaker:{verb}TrainingJob" for verb in ("Create", "Describe", "Stop")}
ACTIONS_OF_SAGEMAKER = {
    "driver": TRAINING_JOB | {"sagemaker:AddTags", "logs:DescribeLogStreams"},
    **dict.fromkeys(("train", "promote", "embed"), BY_SAGEMAKER),
    "report": BY_SAGEMAKER | {"sagemaker:DescribeTrainingJob"},
    "scheduler": set(),
}
SERVICE_LOOK = {"batch:DescribeServiceJob", "batch:ListServiceJobs"}
ACTIONS_OF_THE_QUEUE = {
    "driver": SERVICE_LOOK | {"batch:SubmitServiceJob", "batch:TerminateServiceJob"},
    "report": SERVICE_LOOK,
}
# Service Authorization Reference: these have no resource types.
NO_RESOURCE_LEVEL = LOOK | NETWORK | SERVICE_LOOK
NO_RESOURCE_LEVEL |= {"cloudwatch:PutMetricData", "ecr:GetAuthorizationToken"}
# What narrows an action further, in each statement that allows it.
CONDITIONS = {
    "s3:ListBucket": "s3:prefix",
    "kms:Decrypt": "kms:ViaService",
    "kms:GenerateDataKey": "kms:ViaService",
    "batch:SubmitJob": "batch:ShareIdentifier",
    "batch:SubmitServiceJob": "aws:RequestTag/pipeline",
    "batch:TagResource": "aws:RequestTag/pipeline",
    "batch:TerminateJob": "aws:ResourceTag/pipeline",
    "batch:TerminateServiceJob": "aws:ResourceTag/pipeline",
    "sagemaker:AddTags": "aws:RequestTag/pipeline",
    "iam:PassRole": "iam:PassedToService",
    "cloudwatch:PutMetricData": "cloudwatch:namespace",
}

# Keys of the workspace: who may write them, and who may delete them. Whatever is not named here nobody may.
E = f"{C}/evaluate"
CACHED = "compile-cache/neuronxcc-2.24/MODULE_1+2"
KEYS: dict[str, tuple[str, str]] = {
    "tokens/esci/abc/part-0.npy": ("train", ""),
    "tokens/esci/abc/MANIFEST.json": ("train", "train"),
    f"{C}/prepare/result.json": ("train", ""),
    f"{C}/health/nodes/job-1/node-0.json": ("train", ""),
    f"{C}/health/probe-0-123-abc": ("train", "train"),
    f"{C}/health/result.json": ("train", ""),
    f"{C}/mine/abc-4096/vectors/00000.npy": ("embed", "embed"),
    "negatives/esci/abc/MANIFEST.json": ("embed", "embed"),
    f"{C}/teach/result.json": ("train", ""),
    "tokens/esci/taught/abc-16384/vectors/00000.npy": ("train", "train"),
    "tokens/esci/taught/abc/MANIFEST.json": ("train", "train"),
    f"{C}/train/parent.json": ("train embed", ""),
    f"{C}/train/result.json": ("train", ""),
    f"{C}/parity/cpu.fp32-xla.fp32/parity.json": ("train", "train"),
    "checkpoints/2026-11-20/step-200/model.safetensors": ("train", "train"),
    "checkpoints/2026-11-20/step-200/MANIFEST.json": ("train", "train"),
    "checkpoints/2026-11-20/step-200/model.sig": ("train promote", "train"),
    "compile-cache/graphs/abc.json": ("train", ""),
    f"{CACHED}/model.neff": ("train promote embed", "train"),
    "compile-cache/neff/ab/abcd.neff": ("train promote embed", ""),
    f"{CACHED}/model.hlo_module.pb.lock": ("train promote embed", "train promote embed"),
    f"{E}/verdict.json": ("promote", ""),
    f"{E}/scores/abc/scores.safetensors": ("promote", ""),
    f"{E}/parts/abc/done/000000000000.json": ("promote", "promote"),
    "registry/relevance/production.json": ("promote", ""),
    "registry/relevance/history.jsonl": ("promote", ""),
    "registry/relevance/serving.json": ("promote embed", ""),
    f"{C}/verify/result.json": ("embed", ""),
    "catalogues/abc/part-00000.parquet": ("embed", ""),
    "embeddings/2026-11-20/part-00000.parquet": ("embed", "embed"),
    "embeddings/2026-11-20/MANIFEST.json": ("embed", ""),
    f"{C}/embed/plan.json": ("embed", ""),
    f"{C}/embed/parts-abc/00000.json": ("embed", ""),
    "reports/2026-11-20.html": ("report driver", ""),
    f"{C}/events/20261120T020000.000000Z-train-1-0a1b2c3d-00000.jsonl": ("train promote embed", ""),
    f"{C}/jobs/post-mortem/job-1-node0.json": ("train promote embed report driver", ""),
    f"{C}/jobs/post-mortem-failures/embed-3/1/1": ("train promote embed report driver", ""),
    f"{C}/jobs/claim.json": ("driver", "driver"),
    f"{C}/jobs/plan.json": ("driver", "driver"),
    f"{C}/jobs/settings.json": ("driver", "driver"),
    f"{C}/jobs/closed.json": ("driver", "driver"),
    f"{C}/jobs/records.json": ("driver", ""),
    f"{C}/jobs/blocked.json": ("driver", ""),
    f"{C}/jobs/submitted/round-1/train.json": ("driver", ""),
    "notify/2026-11-20/failed-1.json": ("driver", "driver"),
    "MANIFEST.json": ("", ""),
}


def conditions(statement: Statement) -> dict[str, list[str]]:
    """The values by key, whatever the operator."""
    return {key: listed(value) for one in statement.get("Condition", {}).values() for key, value in one.items()}


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_the_actions_of_its_jobs_and_no_others(role: str) -> None:
    assert OURS.actions(role) == ACTIONS[role]
    assert DIRECT.actions(role) == ACTIONS[role] | ACTIONS_OF_SAGEMAKER[role]
    assert QUEUED.actions(role) - DIRECT.actions(role) == ACTIONS_OF_THE_QUEUE.get(role, set())


@pytest.mark.parametrize("role", ROLES)
def test_actions_are_narrowed_to_resources_and_conditions(role: str) -> None:
    for fleet in (OURS, QUEUED):
        for one in fleet.statements(role):
            assert one["Sid"].isalnum() and "NotAction" not in one and "NotResource" not in one
            for resource in listed(one["Resource"]):
                if resource == "*":
                    assert set(listed(one["Action"])) <= NO_RESOURCE_LEVEL, one["Sid"]
                else:
                    assert resource.startswith("arn:aws:") and resource.split(":")[5] not in ("*", ""), resource
            for action in listed(one["Action"]):
                assert CONDITIONS.get(action) in {None, *conditions(one)}, f"{one['Sid']}: {action}"
                assert "*" not in action


def test_every_action_exists() -> None:
    session = botocore.session.get_session()
    others = {"iam:PassRole", "s3:ListBucket"}  # no operations
    for action in {action for role in ROLES for action in QUEUED.actions(role)} - others:
        service, _, name = action.partition(":")
        assert name in session.get_service_model(service).operation_names, action


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_written_and_deleted_by_those_whose_jobs_do(key: str) -> None:
    writers, deleters = KEYS[key]
    assert OURS.who("s3:PutObject", OURS.object_arn(key)) == [role for role in ROLES if role in writers.split()]
    assert OURS.who("s3:DeleteObject", OURS.object_arn(key)) == [role for role in ROLES if role in deleters.split()]
    # Uploads in parts: files that a folder is committed of, or a compiler writes; all else is one request.
    folders = ("tokens/", "negatives/", "checkpoints/", "compile-cache/neuronxcc-", "compile-cache/neff/")
    in_parts = key.startswith((*folders, f"{E}/", f"{C}/parity/", f"{C}/mine/abc-"))
    found = OURS.who("s3:AbortMultipartUpload", OURS.object_arn(key))
    assert found == [
        role for role in ROLES if in_parts and role in writers.split() and (key[-4:], role) != (".sig", "promote")
    ]


@pytest.mark.parametrize("role", JOB_ROLES)
def test_what_the_guard_denies_holds_whatever_else_is_attached(role: str) -> None:
    pointer = OURS.object_arn("registry/relevance/production.json")
    denied = [one for one in OURS.statements(role, "Deny") if "Condition" not in one]
    for action in ("s3:DeleteObjectVersion", "s3:BypassGovernanceRetention", "s3:DeleteObject"):
        assert any(covers(one, action, pointer) for one in denied), action
    for action in ("s3:DeleteBucket", "s3:PutBucketPolicy", "s3:PutBucketVersioning", "s3:PutLifecycleConfiguration"):
        assert any(covers(one, action, OURS.bucket_arn) for one in denied), action
    assert any(covers(one, "s3:PutObject", pointer) for one in denied) == (role != "promote")
    unseen = [one for one in OURS.statements(role, "Deny") if "Null" in one.get("Condition", {})]
    assert [one["Condition"]["Null"] for one in unseen] == [{"s3:if-match": "true", "s3:if-none-match": "true"}]
    assert covers(unseen[0], "s3:PutObject", pointer)


def test_who_signs() -> None:
    signing = Fleet(signing_key_arn=f"arn:aws:kms:{PLACE}:key/sign")
    more = {role: signing.actions(role) - OURS.actions(role) for role in ROLES}
    assert more == {role: set() for role in ROLES} | {
        "promote": {"kms:GetPublicKey", "kms:Sign"},
        "embed": {"kms:GetPublicKey"},
    }
    assert signing.who("kms:Sign", signing.signing_key_arn) == ["promote"]
    assert signing.who("kms:Sign", f"arn:aws:kms:{PLACE}:key/workspace") == []


def test_who_reads_what() -> None:
    for key in ("checkpoints/c/step-1/model.safetensors", "registry/relevance/production.json", "tokens/esci/a"):
        assert OURS.who("s3:GetObject", OURS.object_arn(key)) == [*READERS]
    for key in (f"{C}/events.jsonl", f"{C}/jobs/settings.json"):
        assert OURS.who("s3:GetObject", OURS.object_arn(key)) == [*JOB_ROLES]
    for arn in ("bucket/other/cycles/c/jobs/claim.json", "bucket/relevance2/registry/a", "other/relevance/a"):
        for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject"):
            assert OURS.who(action, f"arn:aws:s3:::{arn}") == []
    inputs = ("shop/esci/2026", "shop/esci/2026/dt=2026-11-20/part.parquet", "catalogue/all.parquet")
    for arn in inputs:  # a path is first asked for as a file
        s3 = [OURS.who(f"s3:{verb}Object", f"arn:aws:s3:::{arn}") for verb in ("Get", "Put")]
        assert s3 == [[*READERS], []]
    for arn in ("shop/esci/2025/part.parquet", "shop/esci/20260101"):
        assert OURS.who("s3:GetObject", f"arn:aws:s3:::{arn}") == []
    assert (OURS.who("kms:Decrypt", KEY), OURS.who("kms:GenerateDataKey", KEY)) == ([*READERS], [])
    for role in ROLES:
        listings = [conditions(one)["s3:prefix"] for one in OURS.statements(role) if "s3:ListBucket" in one["Action"]]
        ours, *others = listings or [[]]
        assert all(prefix.startswith("relevance/") for prefix in ours)
        assert others == ([["esci/2026", "esci/2026/*"], ["*"]] if role in READERS else [])


def test_the_driver_defines_and_submits_the_stages_in_its_share_with_their_roles() -> None:
    assert (*AFTER, STAGE) == STAGES
    definitions, queues = OURS.batch_arn("job-definition/relevance"), OURS.batch_arn("job-queue")
    for stage in STAGES:
        assert OURS.who("batch:RegisterJobDefinition", f"{definitions}-{stage}") == ["driver"]
        assert OURS.who("batch:SubmitJob", f"{definitions}-{stage}:12") == ["driver"]
    for other in (f"{definitions}-driver:1", f"{definitions}2-train:1", f"{queues}/other"):
        assert "driver" not in OURS.who("batch:SubmitJob", other)
    for other in ("driver", "watch", "train2"):
        assert OURS.who("batch:RegisterJobDefinition", f"{definitions}-{other}") == []
    assert OURS.who("batch:SubmitJob", f"{definitions}-driver:1") == ["scheduler"]
    assert OURS.who("batch:SubmitJob", f"{queues}/relevance-trainium") == ["driver"]
    assert OURS.who("batch:SubmitJob", f"{queues}/relevance-cpu") == ["driver", "scheduler"]
    for role in ("train", "promote", "embed", "report", "driver", "scheduler", "instance"):
        assert OURS.who("iam:PassRole", OURS.role_arn(role)) == (["driver"] if role in TRAINING_ROLES else [])
    for role in ("driver", "scheduler"):
        shares = [conditions(one) for one in OURS.statements(role) if "batch:SubmitJob" in one["Action"]]
        assert all(one["batch:ShareIdentifier"] == ["production"] for one in shares)
    privileged = [one for one in OURS.statements("driver", "Deny") if "Bool" in one.get("Condition", {})]
    assert [one["Condition"]["Bool"] for one in privileged] == [{"batch:Privileged": "true"}]


def test_training_and_service_jobs_go_by_the_names_that_the_code_makes() -> None:
    jobs, logs = (
        f"arn:aws:sagemaker:{PLACE}:training-job",
        f"arn:aws:logs:{PLACE}:log-group:/aws/sagemaker/TrainingJobs",
    )
    plan = ml_plan(job("train"), sagemaker=QUEUE)
    ours = direct_request(CycleRun(plan, 0.0), Task(plan.jobs[0]), 1, 1)["TrainingJobName"]
    payload = json.loads(service_job_request(CycleRun(plan, 0.0), Task(plan.jobs[0]), 1)["serviceRequestPayload"])
    of_queue = f"AWSBatch{payload['TrainingJobName']}{'0' * 32}"
    for action in ("Create", "Stop"):
        assert DIRECT.who(f"sagemaker:{action}TrainingJob", f"{jobs}/{ours}") == ["driver"]
        for other in (of_queue, "other-train-r1a1-0badcafe"):
            assert QUEUED.who(f"sagemaker:{action}TrainingJob", f"{jobs}/{other}") == []
    assert DIRECT.who("sagemaker:DescribeTrainingJob", f"{jobs}/{ours}") == ["driver", "report"]
    assert DIRECT.who("sagemaker:DescribeTrainingJob", f"{jobs}/{of_queue}") == []
    assert QUEUED.who("sagemaker:DescribeTrainingJob", f"{jobs}/{of_queue}") == ["driver", "report"]
    for name in (ours, of_queue):
        assert QUEUED.who("logs:GetLogEvents", f"{logs}:log-stream:{name}/algo-1-1") == ["driver"]
    for resource, who in (("job-queue/relevance-training", ["driver"]), ("job-queue/other", [])):
        assert QUEUED.who("batch:SubmitServiceJob", QUEUED.batch_arn(resource)) == who
    key = DIRECT.object_arn(f"{C}/jobs/starts/relevance-train-r1-0badcafe/1")  # each start counts itself
    assert (OURS.who("s3:PutObject", key), DIRECT.who("s3:PutObject", key)) == (["driver"], [*JOB_ROLES])
    assert DIRECT.who("s3:DeleteObject", key) == []
    assert DIRECT.who("ecr:BatchGetImage", f"arn:aws:ecr:{PLACE}:repository/relevance") == [*TRAINING_ROLES]


@pytest.mark.parametrize("role", ROLES)
def test_roles_trust_one_service_of_this_account_and_region(role: str) -> None:
    def trusted(fleet: Fleet) -> list[tuple[str, str]]:
        found = []
        for one in fleet.trust(role):
            assert (one["Effect"], one["Action"]) == ("Allow", "sts:AssumeRole")
            assert conditions(one)["aws:SourceAccount"] == ["123456789012"]
            found.append((one["Principal"]["Service"], *conditions(one)["aws:SourceArn"]))
        return found

    tasks = [("ecs-tasks.amazonaws.com", f"arn:aws:ecs:{PLACE}:*")]
    if role == "scheduler":
        tasks = [("scheduler.amazonaws.com", f"arn:aws:scheduler:{PLACE}:schedule-group/relevance")]
    training = [("sagemaker.amazonaws.com", f"arn:aws:sagemaker:{PLACE}:*")] if role in TRAINING_ROLES else []
    assert (trusted(OURS), trusted(DIRECT)) == (tasks, tasks + training)


@pytest.mark.parametrize("role", ROLES)
def test_the_longest_policies_fit_a_role(role: str) -> None:
    one = Input("b" * 63, "p" * 150, "arn:aws:kms:us-gov-west-1:123456789012:key/" + "0" * 36)
    names = {"name": "n" * 31, "region": "us-gov-west-1", "bucket": "b" * 63, "share_identifier": "s" * 64}
    large = Fleet(**names, data=(one,) * 4, sagemaker=True, instances=16)  # type: ignore[arg-type]
    assert sum(map(characters, large.texts(role))) <= MAX_CHARACTERS
    assert all(characters(text) <= MAX_MANAGED for text in large.sagemaker_texts(role))


def test_every_policy_is_used() -> None:
    names = {file.name.removesuffix(".json.tftpl") for file in FOLDER.iterdir()}
    assert names == {
        *ROLES,
        "guard",
        "data",
        "data-key",
        "sign",
        "verify",
        "trust-tasks",
        "trust-training",
        "trust-scheduler",
    }
