"""The whole of infra/ made in moto, and used by `trnjobs` and by what the schedules start.

Making it takes a minute, nearly all of it waiting of Terraform's provider. What moto cannot do is left
out by the variable `emulator` and by a budget of 0 (it has no subscribers of budgets).
"""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
import pytest

from jobs import cli
from tests.infra.moto_account import moto_account
from tests.infra.terraform import Terraform
from tests.kit.s3 import lead_to

ROOT = Path(__file__).parents[2]
ACCOUNT, REGION, NAME = "123456789012", "us-east-1", "relevance"
REPOSITORY = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/{NAME}"
NEURON_IMAGE, CPU_IMAGE = (f"{REPOSITORY}@sha256:{digit * 64}" for digit in "01")
BUCKET = f"{NAME}-{ACCOUNT}-{REGION}"
ON_CPU = {"prepare", "embed", "verify", "report"}
STAGES = ON_CPU | {"health", "compile", "train", "evaluate"}
LATE = timedelta(minutes=10)

# What moto takes and does not tell again, by type of resource; Terraform would set it once more.
FORGOTTEN = {
    "aws_batch_compute_environment": {"compute_resources", "update_policy"},  # the version of the template beside it
    "aws_batch_job_definition": {"scheduling_priority"},
    "aws_batch_job_queue": {"job_state_time_limit_action"},
    "aws_launch_template": {"latest_version", "tag_specifications"},
    "aws_vpc_security_group_ingress_rule": {"description"},
}


@dataclass(frozen=True)
class Stack:
    """What `make deploy` does, in a folder with a state of its own."""

    terraform: Terraform
    settings: Path
    due: datetime

    @property
    def cycle(self) -> str:
        """Of the schedule's last time."""
        return self.due.date().isoformat()

    def plan(self) -> Any:
        self.terraform.must("plan", "-input=false", "-no-color", "-out=plan", "-var-file=moto.tfvars.json")
        return json.loads(self.terraform.must("show", "-json", "plan"))

    def apply(self) -> None:
        self.terraform.must("apply", "-input=false", "-no-color", "-parallelism=30", "plan")
        self.settings.write_text(self.terraform.must("output", "-json", "settings"))


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An empty account; everything in this process and its children is led to it."""
    with moto_account(tmp_path / "moto.log") as url:
        lead_to(url, monkeypatch)
        yield boto3


@pytest.fixture
def stack(infra: Terraform, account: Any, tmp_path: Path) -> Stack:
    """Nothing made yet. The schedule's last time was ten minutes ago."""
    folder = tmp_path / "infra"
    shutil.copytree(infra.folder, folder, ignore=shutil.ignore_patterns(".terraform"))
    due = (datetime.now(UTC) - LATE).replace(second=0, microsecond=0)
    variables = {
        "emulator": True,
        "force_destroy": True,
        "name": NAME,
        "region": REGION,
        "availability_zone": f"{REGION}a",
        "image": NEURON_IMAGE,
        "cpu_image": CPU_IMAGE,
        "ami_id": "ami-0123456789abcdef0",
        "quota_vcpus": 512,
        "schedule_expression": f"cron({due.minute} {due.hour} * * ? *)",
        "budget_usd": 0,
        "notify_emails": ["search-platform@example.com"],
    }
    (folder / "moto.tfvars.json").write_text(json.dumps(variables))
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environment = {**infra.environment, **aws, "TF_DATA_DIR": str(infra.folder / ".terraform")}
    return Stack(Terraform(folder, environment), tmp_path / "settings.json", due)


@pytest.mark.slow
def test_a_stack_is_made_and_used(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(stack.plan()))
    assert "8 jobs fit the planned queues" in trnjobs(stack, capsys, "fit", str(plan))
    stack.apply()

    schedules_and_alarms_are_there(stack)
    nothing_is_left_to_change_but_what_moto_forgets(stack.plan())

    a_cycle_can_be_submitted_by_hand(stack, capsys)
    the_watch_looks_at_open_cycles(stack, capsys)
    the_driver_submits_the_cycle_that_is_due_once(stack, capsys)


def schedules_and_alarms_are_there(stack: Stack) -> None:
    scheduler = boto3.client("scheduler")
    expressions = {
        one["Name"]: scheduler.get_schedule(GroupName=NAME, Name=one["Name"])["ScheduleExpression"]
        for one in scheduler.list_schedules(GroupName=NAME)["Schedules"]
    }
    assert expressions == {
        "relevance-driver": f"cron({stack.due.minute} {stack.due.hour} * * ? *)",
        "relevance-watch": "rate(1 hour)",
    }
    alarms = boto3.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert {one["AlarmName"] for one in alarms} == {
        "relevance-deadline-missed",
        "relevance-not-started",
        "relevance-silent",
    }
    assert {one["Name"] for one in boto3.client("events").list_rules()["Rules"]} == {
        "relevance-failed",
        "relevance-blocked",
    }


def nothing_is_left_to_change_but_what_moto_forgets(plan: Any) -> None:
    changes = {one["address"]: one for one in plan["resource_changes"] if one["change"]["actions"] != ["no-op"]}
    for address, one in changes.items():
        change = one["change"]
        assert change["actions"] == ["update"], f"{address}: {change['actions']}"
        differing = {key for key, value in change["before"].items() if change["after"].get(key) != value}
        assert differing <= FORGOTTEN.get(one["type"], set()), f"{address} would change in {differing}"


def a_cycle_can_be_submitted_by_hand(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--target=batch", "--cycle=2026-11-20")
    assert "relevance-train" in trnjobs(stack, capsys, "plan", "--json", *flags)
    trnjobs(stack, capsys, "submit", *flags)
    submitted = {queue: jobs_on(queue, "2026-11-20") for queue in ("relevance-trainium", "relevance-cpu")}
    assert submitted == {"relevance-trainium": STAGES - ON_CPU, "relevance-cpu": ON_CPU}
    for stage, image, role in (("embed", CPU_IMAGE, "embed"), ("evaluate", NEURON_IMAGE, "promote")):
        (made,) = boto3.client("batch").describe_job_definitions(jobDefinitionName=f"relevance-{stage}")[
            "jobDefinitions"
        ]
        held = made["containerProperties"]
        assert (held["image"], held["jobRoleArn"].rpartition("/")[2]) == (image, f"relevance-{role}")


def the_watch_looks_at_open_cycles(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    # As if the jobs had still run when submit exited; those of moto end at once.
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=f"{NAME}/cycles/2026-11-20/jobs/closed.json")
    said = run_job(started_by("relevance-watch", stack.due), capsys)
    assert "cycle 2026-11-20: succeeded" in said and "deadline MISSED" in said, said  # it was due long ago


def the_driver_submits_the_cycle_that_is_due_once(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    def submitted() -> list[set[str]]:
        return [jobs_on(queue, stack.cycle) for queue in ("relevance-trainium", "relevance-cpu")]

    for _ in range(2):  # the scheduler delivers at least once
        said = run_job(started_by("relevance-driver", stack.due), capsys)
        assert submitted() == [STAGES - ON_CPU, ON_CPU], said


def started_by(schedule: str, when: datetime) -> dict[str, Any]:
    """The request that EventBridge Scheduler makes of the input of a schedule."""
    target = boto3.client("scheduler").get_schedule(GroupName=NAME, Name=schedule)["Target"]
    assert target["Arn"] == "arn:aws:scheduler:::aws-sdk:batch:submitJob"
    given = target["Input"].replace("<aws.scheduler.scheduled-time>", when.strftime("%Y-%m-%dT%H:%M:%SZ"))
    request: dict[str, Any] = _camel_case(json.loads(given))
    return request


def run_job(request: Mapping[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Submit it, and run here, less the entry point, what AWS Batch would run in a container. What it wrote."""
    batch = boto3.client("batch")
    job_id = batch.submit_job(**request)["jobId"]  # checked against the model of the API
    (definition,) = batch.describe_job_definitions(jobDefinitions=[request["jobDefinition"]])["jobDefinitions"]
    container = definition["containerProperties"]
    given = [*container["environment"], *request["containerOverrides"]["environment"]]
    reach = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED", "HOME")
    environment = {
        **{name: os.environ[name] for name in reach if name in os.environ},
        "PATH": os.environ["PATH"],
        "AWS_BATCH_JOB_ID": job_id,
        "AWS_BATCH_JOB_ATTEMPT": "1",
        **{one["name"]: one["value"] for one in given},
    }
    assert container["command"][:3] == ["trnjobs-entry", "--", "trnjobs"]
    with patch.dict(os.environ, environment, clear=True), chdir(ROOT):
        code = cli.main(container["command"][3:])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err
    return captured.out + captured.err


def trnjobs(stack: Stack, capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    """As `make submit` calls it; before the stack is there, without its settings."""
    files = [ROOT / "configs" / "base.toml", ROOT / "configs" / "jobs" / "trn1.toml", stack.settings]
    configs = [f"--config={path}" for path in files if path.exists()]
    code = cli.main([command, *words, *configs])
    captured = capsys.readouterr()
    assert code == 0, captured.out + captured.err
    return captured.out + captured.err


def jobs_on(queue: str, cycle: str) -> set[str]:
    """Stages of a cycle, each once; children of arrays aside."""
    listed = boto3.client("batch").list_jobs(jobQueue=queue)["jobSummaryList"]
    names = [one["jobName"] for one in listed if ":" not in one["jobId"]]
    stages = [name.removeprefix(f"{NAME}-{cycle}-") for name in names if name.startswith(f"{NAME}-{cycle}-")]
    assert len(stages) == len(set(stages))
    return set(stages)


def _camel_case(tree: Any) -> Any:
    """SubmitJob's own spelling of what universal targets spell PascalCase."""
    if isinstance(tree, Mapping):
        return {key[0].lower() + key[1:]: _camel_case(value) for key, value in tree.items()}
    return [_camel_case(one) for one in tree] if isinstance(tree, list) else tree
