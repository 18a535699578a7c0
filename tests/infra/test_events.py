"""What starts the driver and what raises an alarm: the files of infra/ against the code that they speak of.

Patterns are matched by the part of EventBridge's language that ours use (its user guide, "Event patterns").
"""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest

from jobs.commands.submit import TIME_VARIABLE, scheduled_time
from jobs.cycle.job_states import has_succeeded, is_tried_again
from jobs.cycle.ledger import ledger_of
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

QUEUES = [f"arn:aws:batch:us-west-2:123456789012:job-queue/relevance-{name}" for name in ("trainium", "cpu")]
OURS = "relevance-trainium"
JOB, BLOCKED = "Batch Job State Change", "Batch Job Queue Blocked"
SERVICE_JOB, SERVICE_BLOCKED = "Batch Service Job State Change", "Batch Service Job Queue Blocked"
TRAINING_JOB = "relevance-2026-11-20-train-r1a1-0badcafe"
OF_QUEUE = "AWSBatchtrain-0badcafe" + "0" * 32
FLEET = Fleet(sagemaker=True, instances=16, region="us-west-2")


def matches(pattern: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Raises ValueError for a filter that is not understood here."""
    for name, wanted in pattern.items():
        if isinstance(wanted, Mapping):
            if not matches(wanted, event.get(name) or {}):
                return False
        elif not any(_fits(one, event.get(name), name in event) for one in wanted):
            return False
    return True


def _fits(wanted: Any, found: Any, is_there: bool) -> bool:
    if not isinstance(wanted, Mapping):
        return is_there and wanted in (found if isinstance(found, list) else [found])
    match dict(wanted):
        case {"exists": there, **rest} if not rest:
            return bool(there) == is_there
        case {"prefix": str(start), **rest} if not rest:
            return is_there and str(found).startswith(start)
        case {"anything-but": {"prefix": [*starts]}, **rest} if not rest:
            return is_there and not str(found).startswith(tuple(starts))
    raise ValueError(f"filter {dict(wanted)}")


def job_event(status: str, queue: str, *, kind: str = JOB, source: str = "aws.batch", **detail: Any) -> dict[str, Any]:
    """As AWS Batch sends it (its user guide, "Job state change events"): `detail` is like DescribeJobs."""
    return {
        "detail-type": kind,
        "source": source,
        "detail": {
            "jobName": "relevance-2026-11-20-train",
            "jobQueue": f"arn:aws:batch:us-west-2:123456789012:job-queue/{queue}",
            "status": status,
            "statusReason": "Essential container in task exited",
            "tags": {"pipeline": "relevance", "cycle": "2026-11-20", "job": "train"},
            **detail,
        },
    }


def training_event(name: str, status: str, reason: str = "", *, secondary: str = "") -> dict[str, Any]:
    """As SageMaker sends it: `detail` is like DescribeTrainingJob, with a reason where it failed."""
    detail = {"TrainingJobName": name, "TrainingJobStatus": status, "SecondaryStatus": secondary or status}
    detail |= {"FailureReason": reason} if reason else {}
    return {"detail-type": "SageMaker Training Job State Change", "source": "aws.sagemaker", "detail": detail}


def pattern(name: str) -> dict[str, Any]:
    values = {"queue_arns": json.dumps(QUEUES)}
    found: dict[str, Any] = json.loads(render(MODULES / "alarms" / "patterns" / f"{name}.json.tftpl", values))
    return found


@pytest.mark.parametrize(
    ("event", "alarms"),
    [
        (job_event("FAILED", OURS), ["failed"]),
        (job_event("FAILED", "relevance-cpu"), ["failed"]),
        (job_event("FAILED", "relevance-cpu", arrayProperties={"size": 8, "statusSummary": {}}), ["failed"]),
        (job_event("FAILED", "relevance-cpu", arrayProperties={"index": 3}), []),
        (job_event("FAILED", "other"), []),
        (job_event("SUCCEEDED", OURS), []),
        (job_event("RUNNABLE", OURS), []),
        (job_event("FAILED", OURS, source="aws.ecs"), []),
        (job_event("RUNNABLE", OURS, kind=BLOCKED), ["blocked"]),
        (job_event("RUNNABLE", "other", kind=BLOCKED), []),
        (job_event("RUNNABLE", OURS, kind="Batch Service Job Queue Blocked"), []),
    ],
)
def test_which_events_raise_an_alarm(event: dict[str, Any], alarms: list[str]) -> None:
    assert [name for name in ("failed", "blocked") if matches(pattern(name), event)] == alarms


def test_messages_name_what_an_event_holds() -> None:
    text = (MODULES / "alarms" / "main.tf").read_text()
    paths = dict(re.findall(r"^\s+(\w+)\s+= \"\$\.([\w.]+)\"", text, re.MULTILINE))
    assert set(paths) == set(re.findall(r"<(\w+)>", text)) == {"job", "cycle", "reason"}
    for path in paths.values():
        found: Any = job_event("FAILED", OURS)
        for part in path.split("."):
            found = found[part]
        assert isinstance(found, str) and found


def line(stopped_at: float, deadline_at: float) -> str:
    """What the report and the watch print of a cycle that ended then."""
    plan = cycle()
    records = [good(job.name, tried(at=(0.0, stopped_at))) for job in plan.jobs]
    return summary(
        ledger_of(plan, records, (), Prices({}, None), now=300.0, outcome="succeeded", deadline_at=deadline_at)
    )


def test_the_deadline_filter_fits_the_line_that_is_printed() -> None:
    text = (MODULES / "alarms" / "patterns" / "deadline.txt").read_text().strip()
    term = json.loads(text)  # in quotation marks: the very words, not any line with both
    assert term in line(stopped_at=200.0, deadline_at=100.0)
    assert term not in line(stopped_at=50.0, deadline_at=100.0)


def scheduled_request() -> dict[str, Any]:
    values = {
        "job_name": "relevance-driver",
        "queue_arn": QUEUES[1],
        "definition_arn": "arn:aws:batch:us-west-2:123456789012:job-definition/relevance-driver:3",
        "share_identifier": "production",
    }
    text = render(MODULES / "schedule" / "input.json.tftpl", values)
    found: dict[str, Any] = json.loads(text.replace("<aws.scheduler.scheduled-time>", "2026-11-20T02:00:00Z"))
    assert "<" not in json.dumps(found), "a keyword that the scheduler does not know"
    return found


def test_the_schedule_calls_submit_job_with_the_time_that_the_driver_reads() -> None:
    request = scheduled_request()
    [variable] = request["ContainerOverrides"]["Environment"]
    assert variable["Name"] == TIME_VARIABLE
    config = ScheduleConfig(expression="cron(0 2 * * ? *)")
    when = scheduled_time(variable["Value"], config, datetime(2026, 11, 20, 2, 1, tzinfo=UTC))
    assert when.isoformat() == "2026-11-20T02:00:00+00:00"


def test_the_input_is_a_submit_job_in_the_spelling_of_universal_targets() -> None:
    """EventBridge Scheduler wants the members of the API with a capital letter."""
    operation = botocore.session.get_session().get_service_model("batch").operation_model("SubmitJob")
    _check_members(scheduled_request(), operation.input_shape)


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


def test_driver_and_watch_are_tried_again_as_every_job_is() -> None:
    plan = cycle()
    rules: Sequence[Any] = definition_request(plan, plan.jobs[0])["retryStrategy"]["evaluateOnExit"]
    assert json.loads((MODULES / "schedule" / "retry.json").read_text()) == rules


# SageMaker.


def messages() -> dict[str, tuple[str, str]]:
    """By event of the module: the fields of its `detail` that a message has."""
    text = (SAGEMAKER / "main.tf").read_text()
    found = re.findall(
        r'([\w-]+) = {\s+description = ".*"\s+job += "\$\.detail\.(\w+)"\s+reason += "\$\.detail\.(\w+)"', text
    )
    assert {name for name, *_ in found} == {path.name.split(".")[0] for path in (SAGEMAKER / "patterns").iterdir()}
    return {name: (job, reason) for name, job, reason in found}


def alarms_of(event: dict[str, Any]) -> list[str]:
    found = {
        name: json.loads(render(SAGEMAKER / "patterns" / f"{name}.json.tftpl", FLEET.sagemaker_values()))
        for name in messages()
    }
    return [name for name, one in found.items() if matches(one, event)]


@pytest.mark.parametrize(
    ("event", "alarms"),
    [
        (training_event("other-train-r1a1-0badcafe", "Stopped", secondary="MaxRuntimeExceeded"), []),
        (training_event(OF_QUEUE, "Stopped", secondary="MaxRuntimeExceeded"), []),
        (training_event("other-train-r1a1-0badcafe", "Failed", "ClientError: no image"), []),
        (training_event(OF_QUEUE, "Failed", "ClientError: no image"), []),
        (job_event("FAILED", "relevance-training", kind=SERVICE_JOB), ["service-failed"]),
        (job_event("FAILED", "other", kind=SERVICE_JOB), []),
        (job_event("SUCCEEDED", "relevance-training", kind=SERVICE_JOB), []),
        (job_event("RUNNABLE", "relevance-training", kind=SERVICE_BLOCKED), ["service-blocked"]),
        (job_event("RUNNABLE", "other", kind=SERVICE_BLOCKED), []),
    ],
)
def test_which_events_of_sagemaker_raise_an_alarm(event: dict[str, Any], alarms: list[str]) -> None:
    assert alarms_of(event) == alarms
    for name in alarms:  # a message says what it says of fields that are there
        assert all(event["detail"][path] for path in messages()[name])


@pytest.mark.parametrize(
    ("status", "secondary", "failure"),
    [
        ("Stopped", "MaxRuntimeExceeded", ""),
        ("Stopped", "MaxWaitTimeExceeded", ""),
        ("Stopped", "Stopped", ""),
        ("Failed", "Failed", "AlgorithmError: exit 75 TransientError, exit code: 75"),
        ("Failed", "Failed", "AlgorithmError: exit 143 Preempted, exit code: 143"),
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
    is_final = not has_succeeded(end) and not is_tried_again(Retry.of(3), 1, end)
    assert bool(alarms_of(training_event(TRAINING_JOB, status, failure, secondary=secondary))) == is_final


def test_the_causes_that_raise_none_are_those_that_are_tried_again() -> None:
    rules = [one["onStatusReason"] for one in retry_rules(Retry.of(3)) if one["action"] == "RETRY"]
    again = [rule.removeprefix(RECEIVED).removesuffix("*") for rule in rules]
    assert json.loads((SAGEMAKER / "retry.json").read_text()) == again


def test_the_stack_makes_what_the_preflight_asks_for() -> None:
    """A service environment and a fair-share queue of it, in the words of AWS Batch's API with capital letters."""
    made = json.loads(render(SAGEMAKER / "queue.json.tftpl", FLEET.sagemaker_values()))["Resources"]
    batch = botocore.session.get_session().get_service_model("batch")
    for name, operation in (("Environment", "CreateServiceEnvironment"), ("Queue", "CreateJobQueue")):
        _check_members(made[name]["Properties"], batch.operation_model(operation).input_shape)
    queue, environment = made["Queue"]["Properties"], made["Environment"]["Properties"]
    assert queue["JobQueueName"] == environment["ServiceEnvironmentName"] == "relevance-training"
    assert (queue["JobQueueType"], queue["State"]) == ("SAGEMAKER_TRAINING", "ENABLED")
    assert queue["SchedulingPolicyArn"] == FLEET.batch_arn("scheduling-policy/relevance")
    assert environment["CapacityLimits"] == [{"CapacityUnit": "NUM_INSTANCES", "MaxCapacity": 16}]


def test_the_settings_that_terraform_tells_are_settings() -> None:
    told = {"subnets": ["subnet-1"], "security_groups": ["sg-1"], "via": "queue", "queue": "relevance-training"}
    assert JobsConfig.model_validate({"sagemaker": told}).sagemaker == SageMakerConfig.model_validate(told)
    text = (SAGEMAKER / "outputs.tf").read_text()
    assert all(name in text for name in told)
