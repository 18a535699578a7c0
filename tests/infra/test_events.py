"""What starts the driver and what raises an alarm: the files of infra/ against the code that they speak of."""

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import botocore.session
import pytest

from jobs.commands.driver import TIME_VARIABLE, scheduled_time
from jobs.cycle.ledger import ledger_of
from jobs.cycle.tables import summary
from jobs.plan.cost import Prices
from jobs.schedule import ScheduleConfig
from jobs.targets.batch.requests import definition_request
from tests.infra.events import job_event, matches
from tests.infra.policies import MODULES, render
from tests.jobs.cycle.cases import cycle
from tests.jobs.cycle.record_cases import good, tried

QUEUES = [f"arn:aws:batch:us-west-2:123456789012:job-queue/relevance-{name}" for name in ("trainium", "cpu")]
OURS = "relevance-trainium"
BLOCKED = "Batch Job Queue Blocked"


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
    else:
        assert isinstance(found, str)


def test_driver_and_watch_are_tried_again_as_every_job_is() -> None:
    plan = cycle()
    rules: Sequence[Any] = definition_request(plan, plan.jobs[0])["retryStrategy"]["evaluateOnExit"]
    assert json.loads((MODULES / "schedule" / "retry.json").read_text()) == rules
