"""What each role of a deployment may do, and what it may not."""

import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache

import botocore.session
import pytest

from jobs.plan.cycle import AFTER
from jobs.plan.script import STAGE
from tests.infra.iam import Decision, Policy, Request, Statement, decide, texts
from tests.infra.policies import FOLDER, JOB_ROLES, STAGES, Fleet, Input

OURS = Fleet(
    data=(
        Input("shop", "esci/2026", "arn:aws:kms:us-east-1:123456789012:key/shop"),
        Input("catalogue", ""),
    )
)
ROLES = (*JOB_ROLES, "scheduler")
C = "cycles/2026-11-20"
SHARE = {"batch:ShareIdentifier": "production"}
TAGGED = {"aws:RequestTag/pipeline": "relevance"}
TASKS, BATCH = ({"iam:PassedToService": f"{service}.amazonaws.com"} for service in ("ecs-tasks", "batch"))
MAX_CHARACTERS = 10_240  # of all inline policies of a role, white space not counted (IAM quotas)

# Keys of the workspace: who may write them, and who may delete them. Whatever is not named here nobody may.
E = f"{C}/evaluate"
CACHED = "compile-cache/neuronxcc-2.24/MODULE_1+2"
KEYS: dict[str, tuple[str, str]] = {
    "tokens/esci/abc/part-0.npy": ("train", ""),
    "tokens/esci/abc/MANIFEST.json": ("train", "train"),
    "tokens/esci/tokenizers/abc/MANIFEST.json": ("train", "train"),
    "tokens/esci/refused/abc.jsonl": ("train", ""),
    "tokens/esci/share/abc/00000-00000.safetensors": ("train", "train"),
    "tokens/esci/share/abc.json": ("train", "train"),
    "tokens/esci/share/survey-abc/texts/00000.arrow": ("train", "train"),
    f"{C}/prepare/result.json": ("train", ""),
    f"{C}/prepare/digest.json": ("train", ""),
    f"{C}/health/nodes/job-1/node-0.json": ("train", ""),
    f"{C}/health/probe-0-123-abc": ("train", "train"),
    f"{C}/health/result.json": ("train", ""),
    f"{C}/compile/nodes/job-1/done/node-0.yes": ("train", ""),
    f"{C}/mine/result.json": ("embed", ""),
    f"{C}/mine/abc-65536-4096/vectors/00000/part.npy": ("embed", "embed"),
    f"{C}/mine/abc-65536-4096/negatives/00000/MANIFEST.json": ("embed", "embed"),
    "negatives/esci/abc/product.npy": ("embed", ""),
    "negatives/esci/abc/MANIFEST.json": ("embed", "embed"),
    f"{C}/train/parent.json": ("train embed", ""),
    f"{C}/train/result.json": ("train", ""),
    f"{C}/parity/cpu.fp32-xla.fp32/parity.json": ("train", "train"),
    f"{C}/parity/sides/abc/xla.fp32/scores/MANIFEST.json": ("train", "train"),
    f"{C}/parity/sides/abc/xla.fp32/work/checkpoints/parity/step-2/model.safetensors": ("train", "train"),
    "checkpoints/2026-11-20/step-200/model.safetensors": ("train", "train"),
    "checkpoints/2026-11-20/step-200/MANIFEST.json": ("train", "train"),
    "compile-cache/graphs/abc.json": ("train", ""),
    f"{CACHED}/model.neff": ("train promote embed", "train"),
    f"{CACHED}/model.hlo_module.pb.lock": ("train promote embed", "train promote embed"),
    f"{E}/verdict.json": ("promote", ""),
    f"{E}/report.json": ("promote", ""),
    f"{E}/digest.json": ("promote", ""),
    f"{E}/scores/abc/scores.safetensors": ("promote", ""),
    f"{E}/scores/abc/MANIFEST.json": ("promote", "promote"),
    f"{E}/parts/abc/000000000000/part.safetensors": ("promote", "promote"),
    f"{E}/retrieval/abc/MANIFEST.json": ("promote", "promote"),
    "registry/relevance/production.json": ("promote", ""),
    "registry/relevance/history.jsonl": ("promote", ""),
    "registry/relevance/serving.json": ("promote embed", ""),
    "registry/relevance/serving-challenger.json": ("promote embed", ""),
    "registry/relevance/pairs/00000001.json": ("promote embed", ""),
    f"{C}/verify/result.json": ("embed", ""),
    f"{C}/verify/digest.json": ("embed", ""),
    "catalogues/abc/part-00000.parquet": ("embed", ""),
    "embeddings/2026-11-20/part-00000.parquet": ("embed", "embed"),
    "embeddings/2026-11-20/MANIFEST.json": ("embed", ""),
    f"{C}/embed/plan.json": ("embed", ""),
    f"{C}/embed/parts-abc/00000.json": ("embed", ""),
    "reports/2026-11-20.html": ("report driver", ""),
    "reports/2026-11-20.json": ("report driver", ""),
    "reports/index.html": ("report driver", ""),
    "reports/index.json": ("report driver", ""),
    f"{C}/events/20261120T020000.000000Z-train-1-0a1b2c3d-00000.jsonl": ("train promote embed", ""),
    f"{C}/jobs/post-mortem/job-1-node0.json": ("train promote embed report driver", ""),
    f"{C}/jobs/claim.json": ("driver", "driver"),
    f"{C}/jobs/plan.json": ("driver", "driver"),
    f"{C}/jobs/settings.json": ("driver", "driver"),
    f"{C}/jobs/closed.json": ("driver", "driver"),
    f"{C}/jobs/records.json": ("driver", ""),
    f"{C}/jobs/records/round-1.json": ("driver", ""),
    f"{C}/jobs/blocked.json": ("driver", ""),
    f"{C}/jobs/submitted/round-1/train.json": ("driver", ""),
    f"{C}/jobs/told/failed-1": ("driver", ""),
    "notify/2026-11-20/failed-1.json": ("driver", "driver"),
    "MANIFEST.json": ("", ""),
    "trnpipe.toml": ("", ""),
}


def on_object(action: str, key: str, **context: str) -> Request:
    names = {"if_match": "s3:if-match", "if_none_match": "s3:if-none-match"}
    return Request(f"s3:{action}", OURS.object_arn(key), {names[name]: value for name, value in context.items()})


def listing(prefix: str, bucket: str = OURS.bucket_arn) -> Request:
    return Request("s3:ListBucket", bucket, {"s3:prefix": prefix})


def key_use(action: str, key: str, service: str) -> Request:
    return Request(f"kms:{action}", key, {"kms:ViaService": f"{service}.us-east-1.amazonaws.com"})


def batch(action: str, resource: str, **context: str) -> Request:
    names = {"share": "batch:ShareIdentifier", "privileged": "batch:Privileged"}
    return Request(f"batch:{action}", OURS.batch_arn(resource), {names[key]: value for key, value in context.items()})


@cache
def policies_of(role: str) -> list[Policy]:
    return OURS.policies(role)


def of_role(role: str, request: Request) -> Decision:
    return decide(policies_of(role), request)


def statements(role: str, effect: str) -> Iterator[Statement]:
    yield from (one for policy in policies_of(role) for one in policy.statements if one["Effect"] == effect)


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_written_and_deleted_by_those_whose_jobs_do(key: str) -> None:
    writers, deleters = KEYS[key]
    for action, allowed in (("PutObject", writers), ("DeleteObject", deleters)):
        request = on_object(action, key, if_none_match="*")
        found = [role for role in ROLES if of_role(role, request) == Decision.ALLOWED]
        assert found == [role for role in ROLES if role in allowed.split()], action


@pytest.mark.parametrize("key", KEYS)
def test_uploads_in_parts_are_given_up_by_those_who_make_them(key: str) -> None:
    """Files that a folder is committed of, or a compiler writes; all else is one request, whatever its size."""
    of_cycle = (f"{E}/", f"{C}/parity/", f"{C}/mine/abc-")
    folders = ("tokens/", "negatives/", "checkpoints/", "compile-cache/neuronxcc-", *of_cycle)
    in_parts = key.startswith(folders)
    found = [role for role in ROLES if of_role(role, on_object("AbortMultipartUpload", key)) == Decision.ALLOWED]
    assert found == [role for role in ROLES if in_parts and role in KEYS[key][0].split()]


@pytest.mark.parametrize("role", ROLES)
def test_nobody_deletes_models_or_versions_or_changes_the_bucket(role: str) -> None:
    for key in ("registry/relevance/production.json", "registry/relevance/history.jsonl"):
        decision = of_role(role, on_object("DeleteObject", key))
        assert decision == (Decision.NOT_ALLOWED if role == "scheduler" else Decision.DENIED)
    for action in ("DeleteObjectVersion", "BypassGovernanceRetention"):
        assert of_role(role, on_object(action, "checkpoints/c/step-1/model.safetensors")) != Decision.ALLOWED
    for action in (
        "DeleteBucket",
        "PutBucketPolicy",
        "PutBucketVersioning",
        "PutLifecycleConfiguration",
        "PutBucketAcl",
    ):
        assert of_role(role, Request(f"s3:{action}", OURS.bucket_arn)) != Decision.ALLOWED


@pytest.mark.parametrize("role", ROLES)
def test_only_evaluate_promotes_whatever_else_is_attached_to_a_role(role: str) -> None:
    admin = Policy(({"Effect": "Allow", "Action": "*", "Resource": "*"},))
    request = on_object("PutObject", "registry/relevance/production.json", if_match="abc")
    decision = decide([*policies_of(role), admin], request)
    assert decision == (Decision.ALLOWED if role in ("promote", "scheduler") else Decision.DENIED)


def test_a_model_is_replaced_only_by_who_says_which_one_it_replaces() -> None:
    key = "registry/relevance/production.json"
    for context in ({"if_match": "abc"}, {"if_none_match": "*"}):
        assert of_role("promote", on_object("PutObject", key, **context)) == Decision.ALLOWED
    assert of_role("promote", on_object("PutObject", key)) == Decision.DENIED


@pytest.mark.parametrize("role", ROLES)
def test_who_reads_what(role: str) -> None:
    reads_all = role in ("train", "promote", "embed")
    for key in ("checkpoints/c/step-1/model.safetensors", "registry/relevance/production.json", "tokens/esci/a"):
        assert (of_role(role, on_object("GetObject", key)) == Decision.ALLOWED) == reads_all
        assert (of_role(role, listing(f"relevance/{key}")) == Decision.ALLOWED) == reads_all
    is_job = role in JOB_ROLES
    for key in (f"{C}/events.jsonl", f"{C}/jobs/settings.json"):
        assert (of_role(role, on_object("GetObject", key)) == Decision.ALLOWED) == is_job
    assert (of_role(role, listing("relevance/cycles/")) == Decision.ALLOWED) == is_job
    for action in ("Decrypt", "GenerateDataKey"):
        assert (of_role(role, key_use(action, OURS.key_arn, "s3")) == Decision.ALLOWED) == is_job


@pytest.mark.parametrize("role", ROLES)
def test_nothing_beyond_the_workspace(role: str) -> None:
    """Another team's prefix and bucket, a prefix that begins alike, and the whole bucket."""
    for action in ("GetObject", "PutObject", "DeleteObject"):
        for arn in ("bucket/other/cycles/c/jobs/claim.json", "bucket/relevance2/registry/a", "other/relevance/a"):
            assert of_role(role, Request(f"s3:{action}", f"arn:aws:s3:::{arn}")) == Decision.NOT_ALLOWED
    for prefix in ("", "other/", "relevance", "relevance2/", "relevance-old/cycles/"):
        assert of_role(role, listing(prefix)) == Decision.NOT_ALLOWED
    assert of_role(role, Request("s3:ListBucket", OURS.bucket_arn)) == Decision.NOT_ALLOWED, "without a prefix"
    assert of_role(role, listing("relevance/", "arn:aws:s3:::other")) == Decision.NOT_ALLOWED
    assert of_role(role, Request("kms:Decrypt", OURS.key_arn)) == Decision.NOT_ALLOWED, "not through S3"
    other_key = "arn:aws:kms:us-east-1:123456789012:key/other"
    assert of_role(role, key_use("Decrypt", other_key, "s3")) == Decision.NOT_ALLOWED


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "request_",
    [
        Request("sts:AssumeRole", OURS.role_arn("promote")),
        Request("iam:CreateRole", OURS.role_arn("mine")),
        Request("iam:PutRolePolicy", OURS.role_arn("train")),
        Request("ec2:RunInstances", "*"),
        Request("batch:DeleteJobQueue", OURS.batch_arn("job-queue/relevance-cpu")),
        Request("batch:DeregisterJobDefinition", OURS.batch_arn("job-definition/relevance-train:1")),
        Request("batch:UpdateComputeEnvironment", OURS.batch_arn("compute-environment/relevance-cpu")),
        Request("scheduler:UpdateSchedule", "*"),
        Request("kms:ScheduleKeyDeletion", OURS.key_arn),
        Request("logs:DeleteLogGroup", OURS.log_group_arn),
        Request("secretsmanager:GetSecretValue", "*"),
    ],
    ids=lambda one: one.action,
)
def test_nobody_may_do_what_no_job_does(role: str, request_: Request) -> None:
    assert of_role(role, request_) == Decision.NOT_ALLOWED


@pytest.mark.parametrize("role", ROLES)
def test_inputs_are_read_only_and_only_by_their_readers(role: str) -> None:
    reads = role in ("train", "promote", "embed")
    for request in (
        Request("s3:GetObject", "arn:aws:s3:::shop/esci/2026/dt=2026-11-20/part.parquet"),
        Request("s3:GetObject", "arn:aws:s3:::shop/esci/2026"),  # a path is first asked for as a file
        listing("esci/2026", "arn:aws:s3:::shop"),
        listing("esci/2026/", "arn:aws:s3:::shop"),
        Request("s3:GetObject", "arn:aws:s3:::catalogue/all.parquet"),
        listing("", "arn:aws:s3:::catalogue"),
        key_use("Decrypt", "arn:aws:kms:us-east-1:123456789012:key/shop", "s3"),
    ):
        assert (of_role(role, request) == Decision.ALLOWED) == reads, str(request)
    for request in (
        Request("s3:GetObject", "arn:aws:s3:::shop/esci/2025/part.parquet"),
        Request("s3:GetObject", "arn:aws:s3:::shop/esci/20260101"),
        listing("", "arn:aws:s3:::shop"),
        listing("esci/", "arn:aws:s3:::shop"),
        Request("s3:PutObject", "arn:aws:s3:::shop/esci/2026/part.parquet"),
        Request("s3:DeleteObject", "arn:aws:s3:::catalogue/all.parquet"),
        key_use("GenerateDataKey", "arn:aws:kms:us-east-1:123456789012:key/shop", "s3"),
    ):
        assert of_role(role, request) == Decision.NOT_ALLOWED, str(request)


@pytest.mark.parametrize("stage", AFTER)
def test_the_driver_defines_and_submits_the_stages(stage: str) -> None:
    for request in (
        batch("RegisterJobDefinition", f"job-definition/relevance-{stage}", privileged="false"),
        batch("RegisterJobDefinition", f"job-definition/relevance-{stage}"),
        batch("SubmitJob", f"job-definition/relevance-{stage}:12", share="production"),
        batch("SubmitJob", "job-queue/relevance-trainium", share="production"),
        batch("SubmitJob", "job-queue/relevance-cpu", share="production"),
        Request("batch:TagResource", OURS.batch_arn(f"job-definition/relevance-{stage}"), TAGGED),
        Request("batch:TagResource", OURS.batch_arn("job/new"), TAGGED),
    ):
        assert of_role("driver", request) == Decision.ALLOWED, str(request)


def test_the_stages_that_the_driver_may_define_are_those_of_a_plan() -> None:
    assert (*AFTER, STAGE) == STAGES


@pytest.mark.parametrize(
    "request_",
    [
        batch("SubmitJob", "job-definition/relevance-train:1", share="experiments"),
        batch("SubmitJob", "job-definition/relevance-train:1"),
        batch("SubmitJob", "job-queue/relevance-cpu", share="experiments"),
        batch("SubmitJob", "job-queue/other", share="production"),
        batch("SubmitJob", "job-definition/other-train:1", share="production"),
        batch("SubmitJob", "job-definition/relevance-driver:1", share="production"),
        batch("RegisterJobDefinition", "job-definition/relevance-driver"),
        batch("RegisterJobDefinition", "job-definition/relevance-watch"),
        batch("RegisterJobDefinition", "job-definition/relevance-train2"),
        batch("RegisterJobDefinition", "job-definition/relevance-train", privileged="true"),
        Request("batch:TerminateJob", OURS.batch_arn("job/1"), {"aws:ResourceTag/pipeline": "other"}),
        Request("batch:TerminateJob", OURS.batch_arn("job/1")),
        Request("batch:TagResource", OURS.batch_arn("job/1"), TAGGED | {"aws:ResourceTag/pipeline": "other"}),
        Request("batch:TagResource", OURS.batch_arn("job/1"), {"aws:RequestTag/pipeline": "other"}),
        Request("batch:TagResource", OURS.batch_arn("job-queue/relevance-cpu"), TAGGED),
        *(Request("iam:PassRole", OURS.role_arn(role), TASKS) for role in ("driver", "scheduler", "admin", "instance")),
        Request("iam:PassRole", "arn:aws:iam::123456789012:role/other-train", TASKS),
        Request("iam:PassRole", OURS.role_arn("train"), {"iam:PassedToService": "lambda.amazonaws.com"}),
        Request("iam:PassRole", OURS.role_arn("train")),
        Request("logs:GetLogEvents", f"{OURS.log_group_arn}-other:log-stream:a"),
    ],
    ids=str,
)
def test_the_driver_may_not(request_: Request) -> None:
    assert of_role("driver", request_) != Decision.ALLOWED


@pytest.mark.parametrize("role", ROLES)
def test_who_may_use_batch(role: str) -> None:
    is_driver = role == "driver"
    for action in ("ListJobs", "DescribeJobDefinitions", "DescribeJobQueues", "DescribeSchedulingPolicies"):
        assert (of_role(role, Request(f"batch:{action}")) == Decision.ALLOWED) == is_driver
    looks = of_role(role, Request("batch:DescribeJobs")) == Decision.ALLOWED
    assert looks == (role in ("driver", "report"))
    ours = Request("batch:TerminateJob", OURS.batch_arn("job/1"), {"aws:ResourceTag/pipeline": "relevance"})
    assert (of_role(role, ours) == Decision.ALLOWED) == is_driver
    for stage_role in ("train", "promote", "embed", "report"):
        passed = {of_role(role, Request("iam:PassRole", OURS.role_arn(stage_role), to)) for to in (BATCH, TASKS)}
        assert passed == {Decision.ALLOWED if is_driver else Decision.NOT_ALLOWED}
    logs = Request("logs:GetLogEvents", f"{OURS.log_group_arn}:log-stream:relevance-train/default/1")
    assert (of_role(role, logs) == Decision.ALLOWED) == is_driver
    stage = batch("SubmitJob", "job-definition/relevance-train:1", share="production")
    assert (of_role(role, stage) == Decision.ALLOWED) == is_driver


@pytest.mark.parametrize("name", ["driver", "watch"])
def test_the_scheduler_starts_the_driver_and_the_watch_on_their_queue(name: str) -> None:
    for request in (
        batch("SubmitJob", f"job-definition/relevance-{name}:3", share="production"),
        batch("SubmitJob", f"job-definition/relevance-{name}", share="production"),
        batch("SubmitJob", "job-queue/relevance-cpu", share="production"),
        Request("sqs:SendMessage", OURS.dead_letter_arn),
        key_use("GenerateDataKey", OURS.key_arn, "sqs"),
        key_use("Decrypt", OURS.key_arn, "sqs"),
    ):
        assert of_role("scheduler", request) == Decision.ALLOWED, str(request)
    for request in (
        batch("SubmitJob", f"job-definition/relevance-{name}:3", share="experiments"),
        batch("SubmitJob", "job-queue/relevance-trainium", share="production"),
        Request("sqs:SendMessage", OURS.dead_letter_arn.replace("relevance", "other")),
        Request("sqs:ReceiveMessage", OURS.dead_letter_arn),
        key_use("Decrypt", OURS.key_arn, "s3"),
    ):
        assert of_role("scheduler", request) == Decision.NOT_ALLOWED, str(request)


def assume(service: str, account: str, arn: str) -> Request:
    context = {"aws:SourceAccount": account, "aws:SourceArn": arn}
    return Request("sts:AssumeRole", principal=f"{service}.amazonaws.com", context=context)


@pytest.mark.parametrize("role", JOB_ROLES)
def test_job_roles_trust_tasks_of_this_account_and_region(role: str) -> None:
    arn = "arn:aws:ecs:us-east-1:123456789012:task/cluster/1"
    assert decide([OURS.trust(role)], assume("ecs-tasks", "123456789012", arn)) == Decision.ALLOWED
    for request in (
        assume("ec2", "123456789012", arn),
        assume("ecs-tasks", "210987654321", arn),
        assume("ecs-tasks", "123456789012", arn.replace("123456789012", "210987654321")),
        assume("ecs-tasks", "123456789012", arn.replace("us-east-1", "eu-west-1")),
        Request("sts:AssumeRole", principal="ecs-tasks.amazonaws.com"),
    ):
        assert decide([OURS.trust(role)], request) == Decision.NOT_ALLOWED


def test_the_scheduler_role_trusts_schedules_of_its_own_group() -> None:
    arn = "arn:aws:scheduler:us-east-1:123456789012:schedule-group/relevance"
    assert decide([OURS.trust("scheduler")], assume("scheduler", "123456789012", arn)) == Decision.ALLOWED
    for request in (
        assume("scheduler", "123456789012", f"{arn}2"),
        assume("scheduler", "210987654321", arn),
        assume("events", "123456789012", arn),
    ):
        assert decide([OURS.trust("scheduler")], request) == Decision.NOT_ALLOWED


# --- of all policies

NO_RESOURCE_LEVEL = {
    # Service Authorization Reference, "Actions, resources, and condition keys for AWS Batch": no resource types.
    "batch:DescribeComputeEnvironments",
    "batch:DescribeJobDefinitions",
    "batch:DescribeJobQueues",
    "batch:DescribeJobs",
    "batch:DescribeSchedulingPolicies",
    "batch:ListJobs",
}
NOT_OPERATIONS = {
    "iam:PassRole": "asked for by RegisterJobDefinition",
    "s3:ListBucket": "ListObjectsV2 and HeadBucket",
    "s3:DeleteObjectVersion": "DeleteObject with a version",
    "s3:DeleteObjectVersionTagging": "DeleteObjectTagging with a version",
    "s3:PutObjectVersionAcl": "PutObjectAcl with a version",
    "s3:BypassGovernanceRetention": "DeleteObject with the header of that name",
    "s3:PutEncryptionConfiguration": "PutBucketEncryption",
    "s3:PutLifecycleConfiguration": "PutBucketLifecycleConfiguration",
    "s3:PutReplicationConfiguration": "PutBucketReplication",
}


@pytest.mark.parametrize("role", ROLES)
def test_a_wildcard_for_all_resources_only_where_aws_has_no_resource_level(role: str) -> None:
    for one in statements(role, "Allow"):
        for resource in texts(one["Resource"]):
            if resource == "*":
                assert set(texts(one["Action"])) <= NO_RESOURCE_LEVEL, one["Sid"]
            else:
                assert resource.startswith("arn:aws:") and resource.split(":")[5] not in ("*", ""), resource


@pytest.mark.parametrize("role", ROLES)
def test_every_action_is_named_in_full_and_exists(role: str) -> None:
    session = botocore.session.get_session()
    for effect in ("Allow", "Deny"):
        for action in (name for one in statements(role, effect) for name in texts(one["Action"])):
            service, _, name = action.partition(":")
            if "*" in action:
                assert effect == "Deny" and name != "*", action
            operations = session.get_service_model(service).operation_names
            assert action in NOT_OPERATIONS or any(fnmatchcase(one, name) for one in operations), action


def test_no_allowance_by_exclusion_and_every_statement_has_a_name() -> None:
    for role in ROLES:
        for effect in ("Allow", "Deny"):
            for one in statements(role, effect):
                assert "NotAction" not in one and one["Sid"].isalnum()


def test_every_policy_is_used() -> None:
    names = {file.name.removesuffix(".json.tftpl") for file in FOLDER.iterdir()}
    assert names == {*ROLES, "guard", "data", "data-key", "trust-tasks", "trust-training", "trust-scheduler"}


@pytest.mark.parametrize("role", ROLES)
def test_the_longest_policies_fit_a_role(role: str) -> None:
    one = Input("b" * 63, "p" * 150, "arn:aws:kms:us-gov-west-1:123456789012:key/" + "0" * 36)
    large = Fleet(name="n" * 31, region="us-gov-west-1", bucket="b" * 63, share_identifier="s" * 64, data=(one,) * 4)
    size = sum(len(json.dumps(json.loads(text), separators=(",", ":"))) for text in large.texts(role))
    assert size <= MAX_CHARACTERS, f"{size} characters"
