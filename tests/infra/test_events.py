"""What starts the driver and what raises an alarm: the files of infra/ against the code that they speak of."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest
from moto.events.models import EventPattern

from jobs.commands.submit import TIME_VARIABLE, scheduled_time
from jobs.cycle.costs import ledger_of
from jobs.cycle.job_states import has_succeeded, should_retry
from jobs.cycle.tables import summary
from jobs.plan.resources import Prices
from jobs.plan.spec import Retry
from jobs.schedule import ScheduleConfig
from jobs.settings import JobsConfig, SageMakerConfig
from jobs.targets.batch.requests import definition_request
from jobs.targets.sagemaker.requests import RECEIVED, retry_rules
from jobs.targets.sagemaker.routes import end_of
from tests.infra.policies import MODULES, SAGEMAKER, Fleet, render
from tests.jobs.cycle.cases import cycle
from tests.jobs.cycle.record_cases import good, tried

FLEET = Fleet(sagemaker=True, instances=16)
OURS, CPU, SERVICE = "relevance-trainium", "relevance-cpu", "relevance-training"
BLOCKED = "Batch Job Queue Blocked"
SERVICE_JOB, SERVICE_BLOCKED = "Batch Service Job State Change", "Batch Service Job Queue Blocked"
TRAINING_JOB = "relevance-2026-11-20-train-r1a1-0badcafe"
OF_QUEUE = "AWSBatchtrain-0badcafe" + "0" * 32
BATCH = botocore.session.get_session().get_service_model("batch")


def job_event(status: str, queue: str, *, kind: str = "Batch Job State Change", **detail: Any) -> dict[str, Any]:
    """As AWS Batch sends it (its user guide, "Job state change events"): `detail` is like DescribeJobs."""
    held: dict[str, Any] = {
        "jobName": "relevance-2026-11-20-train",
        "jobQueue": FLEET.batch_arn(f"job-queue/{queue}"),
        "status": status,
    }
    held |= {"statusReason": "Essential container in task exited"}
    held |= {"tags": {"pipeline": "relevance", "cycle": "2026-11-20", "job": "train"}}
    return {"detail-type": kind, "source": "aws.batch", "detail": held | detail}


def training_event(name: str, status: str, reason: str = "", *, secondary: str = "") -> dict[str, Any]:
    """As SageMaker sends it: `detail` is like DescribeTrainingJob, with a reason where it failed."""
    detail = {"TrainingJobName": name, "TrainingJobStatus": status, "SecondaryStatus": secondary or status}
    detail |= {"FailureReason": reason} if reason else {}
    return {"detail-type": "SageMaker Training Job State Change", "source": "aws.sagemaker", "detail": detail}


def alarms_of(event: dict[str, Any]) -> list[str]:
    values = FLEET.sagemaker_values() | {"queue_arns": FLEET.values()["queue_arns"]}
    files = [*MODULES.glob("alarms/patterns/*.tftpl"), *SAGEMAKER.glob("patterns/*.tftpl")]
    patterns = {f"{file.parts[-3]} {file.name.partition('.')[0]}": json.loads(render(file, values)) for file in files}
    return [name for name, one in patterns.items() if EventPattern(None, one).matches_event(event)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "alarms"),
    [
        (job_event("FAILED", OURS), ["alarms failed"]),
        (job_event("FAILED", CPU, arrayProperties={"size": 8, "statusSummary": {}}), ["alarms failed"]),
        (job_event("FAILED", CPU, arrayProperties={"index": 3}), []),
        (job_event("FAILED", OURS, nodeProperties={"nodeIndex": 1}), []),
        (job_event("FAILED", "other"), []),
        (job_event("SUCCEEDED", OURS), []),
        (job_event("FAILED", OURS) | {"source": "aws.ecs"}, []),
        (job_event("RUNNABLE", OURS, kind=BLOCKED), ["alarms blocked"]),
        (job_event("RUNNABLE", "other", kind=BLOCKED), []),
        (training_event("other-train-r1a1-0badcafe", "Stopped", secondary="MaxRuntimeExceeded"), []),
        (training_event(OF_QUEUE, "Failed", "ClientError: no image"), []),
        (job_event("FAILED", SERVICE, kind=SERVICE_JOB), ["sagemaker service-failed"]),
        (job_event("FAILED", "other", kind=SERVICE_JOB), []),
        (job_event("RUNNABLE", SERVICE, kind=SERVICE_BLOCKED), ["sagemaker service-blocked"]),
        (job_event("RUNNABLE", "other", kind=SERVICE_BLOCKED), []),
    ],
)
def test_which_events_raise_an_alarm(event: dict[str, Any], alarms: list[str]) -> None:
    assert alarms_of(event) == alarms


@pytest.mark.parametrize(
    ("status", "secondary", "failure"),
    [
        ("Stopped", "MaxRuntimeExceeded", ""),
        ("Stopped", "MaxWaitTimeExceeded", ""),
        ("Stopped", "Stopped", ""),
        ("Failed", "Failed", "AlgorithmError: exit 75 TransientError, exit code: 75"),
        ("Failed", "Failed", "AlgorithmError: exit 65 DataError, exit code: 65"),
        ("Failed", "Failed", "InternalServerError: try again"),
        ("Failed", "Failed", "CapacityError: none"),
        ("Failed", "Failed", "ClientError: no image"),
        ("Completed", "Completed", ""),
    ],
)
def test_an_end_raises_an_alarm_where_our_rules_take_it_for_a_final_failure(
    status: str, secondary: str, failure: str
) -> None:
    end = end_of(status, secondary, failure)
    is_final = not has_succeeded(end) and not should_retry(Retry.of(3), 1, end)
    assert bool(alarms_of(training_event(TRAINING_JOB, status, failure, secondary=secondary))) == is_final


def test_rules_of_terraform_are_those_of_the_code() -> None:
    """Driver and watch are tried again as every job is; causes that raise no alarm are those that are tried again."""
    plan = cycle()
    rules = definition_request(plan, plan.jobs[0])["retryStrategy"]["evaluateOnExit"]
    assert json.loads((MODULES / "schedule" / "retry.json").read_text()) == rules
    again = [one["onStatusReason"] for one in retry_rules(Retry.of(3)) if one["action"] == "RETRY"]
    causes = [rule.removeprefix(RECEIVED).removesuffix("*") for rule in again]
    assert json.loads((SAGEMAKER / "retry.json").read_text()) == causes


def test_messages_name_what_an_event_holds() -> None:
    def read(event: Any, path: str) -> str:
        for part in path.split("."):
            event = event[part]
        return str(event)

    text = (MODULES / "alarms" / "main.tf").read_text()
    paths = dict(re.findall(r"^\s+(\w+)\s+= \"\$\.([\w.]+)\"", text, re.MULTILINE))
    assert set(paths) == set(re.findall(r"<(\w+)>", text)) == {"job", "cycle", "reason"}
    assert all(read(job_event("FAILED", OURS), path) for path in paths.values())
    found = re.findall(
        r'([\w-]+) = {\s+description = ".*"\s+job += "\$\.(detail\.\w+)"\s+reason += "\$\.(detail\.\w+)"',
        (SAGEMAKER / "main.tf").read_text(),
    )
    assert {name for name, *_ in found} == {path.name.split(".")[0] for path in (SAGEMAKER / "patterns").iterdir()}
    for name, *held in found:
        is_service = name.startswith("service")
        event = job_event("FAILED", SERVICE) if is_service else training_event("a", "Failed", "b")
        assert all(read(event, path) for path in held)


def test_the_deadline_filter_fits_the_line_that_is_printed() -> None:
    def line(stopped_at: float, deadline_at: float) -> str:
        """What the report and the watch print of a cycle that ended then."""
        plan, more = cycle(), {"now": 300.0, "outcome": "succeeded", "deadline_at": deadline_at}
        records = [good(job.name, tried(at=(0.0, stopped_at))) for job in plan.jobs]
        return summary(ledger_of(plan, records, (), Prices({}, None), **more))  # type: ignore[arg-type]

    # In quotation marks: the very words, not any line with both.
    term = json.loads((MODULES / "alarms" / "patterns" / "deadline.txt").read_text())
    assert term in line(stopped_at=200.0, deadline_at=100.0)
    assert term not in line(stopped_at=50.0, deadline_at=100.0)


def _check_members(found: Any, shape: Any) -> None:
    """A request in the spelling of universal targets and of CloudFormation: members have a capital letter."""
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


def test_the_schedule_calls_submit_job_with_the_time_that_the_driver_reads() -> None:
    values = FLEET.values() | {
        "job_name": "relevance-driver",
        "queue_arn": FLEET.batch_arn(f"job-queue/{CPU}"),
        "definition_arn": FLEET.batch_arn("job-definition/relevance-driver:3"),
    }
    text = render(MODULES / "schedule" / "input.json.tftpl", values)
    request = json.loads(text.replace("<aws.scheduler.scheduled-time>", "2026-11-20T02:00:00Z"))
    assert "<" not in json.dumps(request), "a keyword that the scheduler does not know"
    _check_members(request, BATCH.operation_model("SubmitJob").input_shape)
    [variable] = request["ContainerOverrides"]["Environment"]
    assert variable["Name"] == TIME_VARIABLE
    config = ScheduleConfig(expression="cron(0 2 * * ? *)")
    when = scheduled_time(variable["Value"], config, datetime(2026, 11, 20, 2, 1, tzinfo=UTC))
    assert when.isoformat() == "2026-11-20T02:00:00+00:00"


def test_the_stack_makes_what_the_preflight_asks_for_and_tells_settings() -> None:
    """A service environment and a fair-share queue of it."""
    made = json.loads(render(SAGEMAKER / "queue.json.tftpl", FLEET.sagemaker_values()))["Resources"]
    queue, environment = made["Queue"]["Properties"], made["Environment"]["Properties"]
    _check_members(environment, BATCH.operation_model("CreateServiceEnvironment").input_shape)
    _check_members(queue, BATCH.operation_model("CreateJobQueue").input_shape)
    assert queue["JobQueueName"] == environment["ServiceEnvironmentName"] == "relevance-training"
    assert (queue["JobQueueType"], queue["State"]) == ("SAGEMAKER_TRAINING", "ENABLED")
    assert queue["SchedulingPolicyArn"] == FLEET.batch_arn("scheduling-policy/relevance")
    assert environment["CapacityLimits"] == [{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 16}]
    told = {"subnets": ["subnet-1"], "security_groups": ["sg-1"], "queue": "relevance-training"}
    assert JobsConfig.model_validate({"sagemaker": told}).sagemaker == SageMakerConfig.model_validate(told)
    assert all(name in (SAGEMAKER / "outputs.tf").read_text() for name in told)
