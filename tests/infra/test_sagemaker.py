"""SageMaker in infra/: rights, trust, alarms and the queue of service jobs, against the code that needs them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from jobs.config import JobsConfig, SageMakerConfig
from jobs.cycle.job_records import JobState
from jobs.cycle.job_states import Leaf, has_succeeded, is_tried_again
from jobs.plan.retry import Retry
from jobs.settings import CycleSettings
from jobs.targets.batch.client import LogsClient
from jobs.targets.sagemaker.client import SageMakerClient, ServiceJobClient
from jobs.targets.sagemaker.describe import RECEIVED, end_of
from jobs.targets.sagemaker.requests import Cycle, direct_request, retry_rules, service_job_request
from jobs.targets.sagemaker.routes import DirectRoute, QueueRoute
from jobs.targets.sagemaker.target import LOG_GROUP, SageMakerTarget
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.settings import resolve
from tests.infra.events import job_event, matches
from tests.infra.iam import Decision, Policy, Request, Statement, decide, texts
from tests.infra.policies import JOB_ROLES, SAGEMAKER, TRAINING_ROLES, Fleet, render
from tests.infra.test_policies import C, on_object
from tests.jobs.cycle.cases import job
from tests.jobs.targets.batch.fake_batch import client_error
from tests.jobs.targets.batch.setting import FAST
from tests.jobs.targets.sagemaker.setting import QUEUE, Setting, ml_plan

OFF, DIRECT, QUEUED = Fleet(), Fleet(sagemaker=True), Fleet(sagemaker=True, instances=16)
IN_OREGON = Fleet(sagemaker=True, instances=16, region="us-west-2")
PLACE = "us-east-1:123456789012"
TRAINING_JOB = f"arn:aws:sagemaker:{PLACE}:training-job"
LOGS = f"arn:aws:logs:{PLACE}:log-group:{LOG_GROUP}"
TAGGED = {"aws:RequestTag/pipeline": "relevance"}
TO_SAGEMAKER = {"iam:PassedToService": "sagemaker.amazonaws.com"}
SHARE = {"batch:ShareIdentifier": "production"}
HOLDERS = ("driver", "train", "report")
"""Of all policies of the module between them."""
MAX_MANAGED = 6144  # characters of a managed policy, white space not counted (IAM quotas)


def allows(fleet: Fleet, role: str, request: Request) -> bool:
    return decide(fleet.policies(role), request) == Decision.ALLOWED


def who(fleet: Fleet, request: Request) -> list[str]:
    return [role for role in (*JOB_ROLES, "scheduler") if allows(fleet, role, request)]


def request_of(action: str, resource: str, *contexts: dict[str, str]) -> Request:
    return Request(action, resource, {key: value for one in contexts for key, value in one.items()})


def directly() -> Iterator[Request]:
    """What the driver asks for, by the names that the code makes."""
    plan = ml_plan(job("train"))
    made = direct_request(Cycle(plan, 0.0), Leaf(plan.jobs[0]), 1, 1)
    tags = {f"aws:RequestTag/{one['Key']}": one["Value"] for one in made["Tags"]}
    arn = f"{TRAINING_JOB}/{made['TrainingJobName']}"
    yield request_of("sagemaker:CreateTrainingJob", arn, tags)
    yield request_of("sagemaker:AddTags", arn, tags)
    yield request_of("sagemaker:StopTrainingJob", arn)
    yield request_of("logs:GetLogEvents", f"{LOGS}:log-stream:{made['TrainingJobName']}/algo-1-1")
    for role in TRAINING_ROLES:
        yield request_of("iam:PassRole", OFF.role_arn(role), TO_SAGEMAKER)


def through_the_queue() -> Iterator[Request]:
    plan = ml_plan(job("train"), sagemaker=QUEUE)
    made = service_job_request(Cycle(plan, 0.0), Leaf(plan.jobs[0]), 1)
    context = {f"aws:RequestTag/{name}": value for name, value in made["tags"].items()}
    share = {"batch:ShareIdentifier": made["shareIdentifier"]}
    service_job = OFF.batch_arn("service-job/1")
    training = "AWSBatch" + json.loads(made["serviceRequestPayload"])["TrainingJobName"] + "0" * 32
    yield request_of("batch:SubmitServiceJob", OFF.batch_arn("job-queue/relevance-training"), context, share)
    yield request_of("batch:SubmitServiceJob", service_job, context, share)
    yield request_of("batch:TagResource", service_job, context)
    yield request_of("batch:TerminateServiceJob", service_job, {"aws:ResourceTag/pipeline": "relevance"})
    yield request_of("batch:DescribeServiceEnvironments", "*")
    yield request_of("logs:GetLogEvents", f"{LOGS}:log-stream:{training}/algo-1-1")


def by_sagemaker() -> Iterator[Request]:
    """With the role of a training job."""
    for action in ("BatchGetImage", "GetDownloadUrlForLayer", "BatchCheckLayerAvailability"):
        yield request_of(f"ecr:{action}", f"arn:aws:ecr:{PLACE}:repository/relevance")
    yield request_of("ecr:GetAuthorizationToken", "*")
    for action in ("CreateLogStream", "PutLogEvents"):
        yield request_of(f"logs:{action}", f"{LOGS}:log-stream:relevance-train/algo-1-1")
    yield request_of("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": LOG_GROUP})
    for resource in ("network-interface/eni-1", "subnet/subnet-1", "security-group/sg-1"):
        yield request_of("ec2:CreateNetworkInterface", f"arn:aws:ec2:{PLACE}:{resource}")
    yield request_of("ec2:DescribeSubnets", "*")
    yield on_object("PutObject", "sagemaker/relevance-train/output/output.tar.gz")


@pytest.mark.parametrize("request_", [*directly()], ids=str)
def test_the_driver_alone_makes_training_jobs_and_only_where_sagemaker_is_on(request_: Request) -> None:
    assert who(OFF, request_) == []
    assert who(DIRECT, request_) == who(QUEUED, request_) == ["driver"]


@pytest.mark.parametrize("request_", [*through_the_queue()], ids=str)
def test_the_driver_alone_submits_service_jobs_and_only_where_there_is_a_queue(request_: Request) -> None:
    assert who(OFF, request_) == who(DIRECT, request_) == []
    assert who(QUEUED, request_) == ["driver"]


DESCRIBE, LIST_SERVICE_JOBS = "sagemaker:DescribeTrainingJob", "batch:ListServiceJobs"
DESCRIBE_SERVICE_JOB = "batch:DescribeServiceJob"


@dataclass
class ClientOf:
    """boto3's client in the hands of a role: what its policies do not allow is refused. `asked`: of IAM, in order."""

    raw: Any
    fleet: Fleet
    role: str
    asked: list[Request]

    def describe_training_job(self, **request: Any) -> Any:
        self._check(DESCRIBE, f"{TRAINING_JOB}/{request['TrainingJobName']}")
        return self.raw.describe_training_job(**request)

    def list_service_jobs(self, **request: Any) -> Any:
        self._check(LIST_SERVICE_JOBS)
        return self.raw.list_service_jobs(**request)

    def describe_service_job(self, **request: Any) -> Any:
        self._check(DESCRIBE_SERVICE_JOB)
        return self.raw.describe_service_job(**request)

    def _check(self, action: str, resource: str = "*") -> None:
        self.asked.append(Request(action, resource))
        if not allows(self.fleet, self.role, self.asked[-1]):
            raise client_error("AccessDeniedException", str(self.asked[-1]), operation=action.partition(":")[2])


def records_for(role: str, fleet: Fleet, at: Setting) -> tuple[dict[str, JobState], list[Request]]:
    """What `trnjobs report` and others read, as a job of that role; and what IAM is asked for it."""
    asked: list[Request] = []
    training = SageMakerClient(ClientOf(at.ml, fleet, role, asked), policy=FAST, calls_per_s=1e9)
    queue = QueueRoute(ServiceJobClient(ClientOf(at.batch, fleet, role, asked), policy=FAST), training, print)
    logs = LogsClient(None, policy=FAST)
    target = SageMakerTarget(DirectRoute(training), queue, logs, at.store(), print, StopSignal())
    return {one.name: one.state for one in target.records(at.plan)}, asked


def at_its_last_job(folder: Path, fleet: Fleet) -> Setting:
    """A cycle whose report runs."""
    placement = {"sagemaker": QUEUE} if fleet.instances else {}
    at = Setting(folder, plan=ml_plan(job("verify"), job("report", "verify"), **placement))
    for name in ("verify", "report"):
        at.tick()
        started = at.batch.dispatch(at.batch.job(f"-{name}-")) if fleet.instances else at.name(name)
        if name == "report":
            at.ml.start(started)
        else:
            at.ml.finish(started, 0)
        at.batch.settle()
    return at


LOOKS = {DIRECT: {DESCRIBE}, QUEUED: {DESCRIBE, LIST_SERVICE_JOBS, DESCRIBE_SERVICE_JOB}}


@pytest.mark.parametrize("fleet", [DIRECT, QUEUED], ids=["direct", "queue"])
def test_the_report_of_a_cycle_may_describe_its_jobs_its_own_among_them(tmp_path: Path, fleet: Fleet) -> None:
    at = at_its_last_job(tmp_path, fleet)
    states, asked = records_for("report", fleet, at)
    assert states == {"verify": JobState.SUCCEEDED, "report": JobState.RUNNING}
    assert {one.action for one in asked} == LOOKS[fleet]
    assert records_for("driver", fleet, at) == (states, asked)
    for one in asked:
        assert who(OFF, one) == []
        assert who(fleet, one) == ["driver", "report"]
    with pytest.raises(ConfigError, match="AccessDenied"):
        records_for("embed", fleet, at)


def test_service_jobs_and_their_training_jobs_are_described_only_where_there_is_a_queue(tmp_path: Path) -> None:
    _, asked = records_for("report", QUEUED, at_its_last_job(tmp_path, QUEUED))
    assert asked and all(who(DIRECT, one) == [] for one in asked)


@pytest.mark.parametrize("request_", [*by_sagemaker()], ids=str)
def test_what_sagemaker_does_with_the_roles_of_stages(request_: Request) -> None:
    assert who(OFF, request_) == []
    assert who(DIRECT, request_) == sorted(TRAINING_ROLES, key=JOB_ROLES.index)


def test_logs_are_found_by_those_who_read_or_write_them() -> None:
    for resource in (LOGS, f"{LOGS}:log-stream:"):
        assert who(OFF, request_of("logs:DescribeLogStreams", resource)) == []
        assert who(DIRECT, request_of("logs:DescribeLogStreams", resource)) == [
            "driver",
            *who(DIRECT, next(by_sagemaker())),
        ]


def test_every_job_that_is_started_again_counts_it_and_nobody_forgets_a_start() -> None:
    key = f"{C}/jobs/starts/relevance-2026-11-20-train-r1-0badcafe/1"
    assert who(OFF, on_object("PutObject", key, if_none_match="*")) == ["driver"]
    assert who(DIRECT, on_object("PutObject", key, if_none_match="*")) == [
        "driver",
        "train",
        "promote",
        "embed",
        "report",
    ]
    assert who(QUEUED, on_object("GetObject", key)) == ["driver", "train", "promote", "embed", "report"]
    assert who(QUEUED, on_object("DeleteObject", key)) == []


@pytest.mark.parametrize(
    "request_",
    [
        request_of("sagemaker:CreateTrainingJob", f"{TRAINING_JOB}/other-train-r1a1-0badcafe"),
        request_of("sagemaker:StopTrainingJob", f"{TRAINING_JOB}/AWSBatchtrain-0badcafe"),
        request_of("sagemaker:DescribeTrainingJob", f"{TRAINING_JOB}/other-train-r1a1-0badcafe"),
        request_of("sagemaker:AddTags", f"{TRAINING_JOB}/relevance-train", {"aws:RequestTag/pipeline": "other"}),
        request_of("sagemaker:DeleteTrainingJob", f"{TRAINING_JOB}/relevance-train"),
        request_of("iam:PassRole", OFF.role_arn("driver"), TO_SAGEMAKER),
        request_of("iam:PassRole", OFF.role_arn("train"), {"iam:PassedToService": "lambda.amazonaws.com"}),
        request_of("batch:SubmitServiceJob", OFF.batch_arn("job-queue/other"), TAGGED, SHARE),
        request_of("batch:SubmitServiceJob", OFF.batch_arn("service-job/1"), TAGGED, {"batch:ShareIdentifier": "x"}),
        request_of("batch:SubmitServiceJob", OFF.batch_arn("service-job/1"), SHARE),
        request_of("batch:TerminateServiceJob", OFF.batch_arn("service-job/1"), {"aws:ResourceTag/pipeline": "other"}),
        request_of("batch:UpdateServiceJob", OFF.batch_arn("service-job/1"), {"aws:ResourceTag/pipeline": "relevance"}),
        request_of("batch:DeleteServiceEnvironment", OFF.batch_arn("service-environment/relevance-training")),
        request_of("logs:GetLogEvents", f"{LOGS}:log-stream:other-train/algo-1-1"),
        request_of("ec2:CreateNetworkInterface", f"arn:aws:ec2:{PLACE}:subnet/subnet-2"),
        request_of("ecr:BatchGetImage", f"arn:aws:ecr:{PLACE}:repository/other"),
        request_of("ecr:PutImage", f"arn:aws:ecr:{PLACE}:repository/relevance"),
        request_of("cloudwatch:PutMetricData", "*", {"cloudwatch:namespace": "trnpipe/relevance"}),
        on_object("DeleteObject", "sagemaker/relevance-train/output/output.tar.gz"),
    ],
    ids=str,
)
def test_nobody_may(request_: Request) -> None:
    assert who(QUEUED, request_) == []


@pytest.mark.parametrize("role", JOB_ROLES)
def test_training_jobs_of_this_account_and_region_take_on_the_roles_of_stages(role: str) -> None:
    def assume(fleet: Fleet, service: str, account: str, arn: str) -> bool:
        context = {"aws:SourceAccount": account, "aws:SourceArn": arn}
        request = Request("sts:AssumeRole", context=context, principal=f"{service}.amazonaws.com")
        return decide([fleet.trust(role)], request) == Decision.ALLOWED

    account, arn = "123456789012", f"{TRAINING_JOB}/relevance-train"
    assert assume(DIRECT, "sagemaker", account, arn) == (role in TRAINING_ROLES)
    assert not assume(OFF, "sagemaker", account, arn)
    assert assume(DIRECT, "ecs-tasks", account, f"arn:aws:ecs:{PLACE}:task/cluster/1")
    assert not assume(DIRECT, "sagemaker", "210987654321", arn)
    assert not assume(DIRECT, "sagemaker", account, arn.replace("us-east-1", "eu-west-1"))
    assert not assume(DIRECT, "ec2", account, arn)


def statements() -> Iterator[Statement]:
    for role in HOLDERS:
        for text in QUEUED.sagemaker_texts(role):
            yield from Policy.parse(text).statements


NO_RESOURCE_LEVEL = {
    # Service Authorization Reference: no resource types.
    "batch:DescribeServiceEnvironments",
    "batch:DescribeServiceJob",
    "batch:ListServiceJobs",
    "cloudwatch:PutMetricData",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVpcs",
    "ecr:GetAuthorizationToken",
}


def test_a_wildcard_for_all_resources_only_where_aws_has_no_resource_level() -> None:
    wide = [action for one in statements() if "*" in texts(one["Resource"]) for action in texts(one["Action"])]
    assert set(wide) == NO_RESOURCE_LEVEL


def test_every_action_is_named_in_full_and_exists() -> None:
    session = botocore.session.get_session()
    for action in (name for one in statements() for name in texts(one["Action"])):
        service, _, name = action.partition(":")
        operations = session.get_service_model(service).operation_names if service != "iam" else ["PassRole"]
        assert any(fnmatchcase(one, name) for one in operations), action


def test_policies_have_room_in_a_managed_policy() -> None:
    large = Fleet(name="n" * 31, region="us-gov-west-1", bucket="b" * 63, share_identifier="s" * 64, sagemaker=True)
    for fleet in (large, Fleet(**{**vars(large), "instances": 16})):
        for role in HOLDERS:
            for text in fleet.sagemaker_texts(role):
                assert len(json.dumps(json.loads(text), separators=(",", ":"))) <= MAX_MANAGED


# Alarms.


def pattern(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        render(SAGEMAKER / "patterns" / f"{name}.json.tftpl", IN_OREGON.sagemaker_values())
    )
    return found


def training_event(name: str, status: str, reason: str = "", *, secondary: str = "") -> dict[str, Any]:
    """As SageMaker sends it: `detail` is like DescribeTrainingJob, with a reason where it failed."""
    detail = {"TrainingJobName": name, "TrainingJobStatus": status, "SecondaryStatus": secondary or status}
    detail |= {"FailureReason": reason} if reason else {}
    return job_event("", "", kind="SageMaker Training Job State Change", source="aws.sagemaker") | {"detail": detail}


def service_event(status: str, queue: str, kind: str = "Batch Service Job State Change") -> dict[str, Any]:
    """Without tags and payload."""
    event = job_event(status, queue, kind=kind)
    del event["detail"]["tags"], event["detail"]["jobDefinition"]
    return event


OURS = "relevance-2026-11-20-train-r1a1-0badcafe"
BLOCKED = "Batch Service Job Queue Blocked"


@pytest.mark.parametrize(
    ("event", "alarms"),
    [
        (training_event(OURS, "Failed", "AlgorithmError: exit 65 DataError: no rows, exit code: 65"), ["failed"]),
        (training_event(OURS, "Failed", "AlgorithmError: , exit code: 1"), ["failed"]),
        (training_event(OURS, "Failed", "ClientError: no image"), ["failed"]),
        (training_event(OURS, "Failed", "AlgorithmError: exit 75 TransientError, exit code: 75"), []),
        (training_event(OURS, "Failed", "AlgorithmError: exit 143 Preempted, exit code: 143"), []),
        (training_event(OURS, "Failed", "InternalServerError: try again"), []),
        (training_event(OURS, "Failed", "CapacityError: none"), []),
        (training_event(OURS, "Completed"), []),
        (training_event(OURS, "Stopped", secondary="MaxRuntimeExceeded"), ["timed-out"]),
        (training_event(OURS, "InProgress", secondary="MaxRuntimeExceeded"), []),
        (training_event(OURS, "Stopped", secondary="MaxWaitTimeExceeded"), []),
        (training_event(OURS, "Stopped"), []),
        (training_event("other-train-r1a1-0badcafe", "Stopped", secondary="MaxRuntimeExceeded"), []),
        (training_event("AWSBatchtrain-0badcafe" + "0" * 32, "Stopped", secondary="MaxRuntimeExceeded"), []),
        (training_event("other-train-r1a1-0badcafe", "Failed", "ClientError: no image"), []),
        (training_event("AWSBatchtrain-0badcafe" + "0" * 32, "Failed", "ClientError: no image"), []),
        (service_event("FAILED", "relevance-training"), ["service-failed"]),
        (service_event("FAILED", "other"), []),
        (service_event("SUCCEEDED", "relevance-training"), []),
        (service_event("RUNNABLE", "relevance-training", BLOCKED), ["service-blocked"]),
        (service_event("RUNNABLE", "other", BLOCKED), []),
    ],
)
def test_which_events_raise_an_alarm(event: dict[str, Any], alarms: list[str]) -> None:
    assert [name for name in messages() if matches(pattern(name), event)] == alarms
    for name in alarms:  # a message says what it says of fields that are there
        for path in messages()[name]:
            assert isinstance(event["detail"][path], str) and event["detail"][path]


def messages() -> dict[str, tuple[str, str]]:
    """By event of the module: the fields of its `detail` that a message has."""
    text = (SAGEMAKER / "main.tf").read_text()
    found = re.findall(
        r'([\w-]+) = {\s+description = ".*"\s+job += "\$\.detail\.(\w+)"\s+reason += "\$\.detail\.(\w+)"', text
    )
    assert {name for name, *_ in found} == {path.name.split(".")[0] for path in (SAGEMAKER / "patterns").iterdir()}
    return {name: (job, reason) for name, job, reason in found}


@pytest.mark.parametrize(
    ("status", "secondary", "failure"),
    [
        ("Stopped", "MaxRuntimeExceeded", ""),
        ("Stopped", "MaxWaitTimeExceeded", ""),
        ("Stopped", "Stopped", ""),
        ("Failed", "Failed", "AlgorithmError: exit 75 TransientError, exit code: 75"),
        ("Failed", "Failed", "AlgorithmError: exit 65 DataError, exit code: 65"),
        ("Failed", "Failed", "CapacityError: none"),
        ("Failed", "Failed", "ClientError: no image"),
        ("Completed", "Completed", ""),
    ],
)
def test_an_end_raises_an_alarm_where_our_rules_take_it_for_a_final_failure(
    status: str, secondary: str, failure: str
) -> None:
    end, event = end_of(status, secondary, failure), training_event(OURS, status, failure, secondary=secondary)
    is_final = not has_succeeded(end) and not is_tried_again(Retry.of(3), 1, end)
    assert any(matches(pattern(name), event) for name in messages()) == is_final


def test_the_causes_that_raise_none_are_those_that_are_tried_again() -> None:
    rules = [one["onStatusReason"] for one in retry_rules(Retry.of(3)) if one["action"] == "RETRY"]
    assert json.loads((SAGEMAKER / "retry.json").read_text()) == [
        rule.removeprefix(RECEIVED).removesuffix("*") for rule in rules
    ]


# The queue.


def test_the_stack_makes_what_the_preflight_asks_for() -> None:
    """A service environment and a fair-share queue of it, in the words of AWS Batch's API with capital letters."""
    made = json.loads(render(SAGEMAKER / "queue.json.tftpl", QUEUED.sagemaker_values()))["Resources"]
    batch = botocore.session.get_session().get_service_model("batch")
    for name, operation in (("Environment", "CreateServiceEnvironment"), ("Queue", "CreateJobQueue")):
        shape = batch.operation_model(operation).input_shape
        _check_members(made[name]["Properties"], shape)
    queue, environment = made["Queue"]["Properties"], made["Environment"]["Properties"]
    assert queue["JobQueueName"] == environment["ServiceEnvironmentName"] == "relevance-training"
    assert (queue["JobQueueType"], queue["State"]) == ("SAGEMAKER_TRAINING", "ENABLED")
    assert queue["SchedulingPolicyArn"] == OFF.batch_arn("scheduling-policy/relevance")
    assert environment["CapacityLimits"] == [{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 16}]
    assert {one["Action"] for one in queue["JobStateTimeLimitActions"]} == {"TERMINATE"}  # the one that is allowed


def _check_members(found: Any, shape: Any) -> None:
    if shape.type_name == "structure":
        members = {name[0].upper() + name[1:]: member for name, member in shape.members.items()}
        assert set(found) <= set(members)
        for name, value in found.items():
            _check_members(value, members[name])
    elif shape.type_name == "list":
        for one in found:
            _check_members(one, shape.member)
    elif getattr(shape, "enum", ()) and isinstance(found, str):
        assert found in shape.enum


def test_the_settings_that_terraform_tells_are_settings() -> None:
    told = {"subnets": ["subnet-1"], "security_groups": ["sg-1"], "via": "queue", "queue": "relevance-training"}
    assert JobsConfig.model_validate({"sagemaker": told}).sagemaker == SageMakerConfig.model_validate(told)
    text = (SAGEMAKER / "outputs.tf").read_text()
    assert all(name in text for name in told)
    variables = {  # as the driver and the watch get them: lists as JSON
        f"TRNPIPE_JOBS__SAGEMAKER__{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in told.items()
    }
    assert resolve([], variables, model=CycleSettings).settings.jobs.sagemaker == SageMakerConfig.model_validate(told)


def test_every_file_of_the_module_is_used() -> None:
    text = (SAGEMAKER / "main.tf").read_text()
    folders = {path.parent.name: path.parent for path in SAGEMAKER.rglob("*.tftpl")}
    assert set(folders) == {"policies", "patterns", "sagemaker"}
    for path in (Path(one) for one in SAGEMAKER.rglob("*.tftpl")):
        assert path.name.split(".")[0] in text
