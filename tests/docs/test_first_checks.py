"""What docs/operate.md tells to type on AWS goes through, as far as moto can follow: it succeeds every job at once."""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import boto3
import pytest

import jobs.cli
import pipeline.cli
from jobs.plan.script import ENTRY
from pipeline.core.machines import PRICES_USD_PER_HOUR
from tests.docs.markdown import ROOT
from tests.docs.programs import problem_of
from tests.docs.shell import NEEDS_AWS, runs, simple_commands
from tests.docs.test_prose import rows
from tests.jobs.targets.batch.moto_account import make_environments, make_policy, make_queue
from tests.s3 import empty_account

OPERATE = ROOT / "docs" / "operate.md"
REGION = "us-west-2"
IMAGE = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:" + "0" * 64
ON_CPU = {"queue": "relevance-cpu", "image": IMAGE}
SETTINGS = {
    "workspace": "s3://your-bucket/relevance",
    "jobs": {
        "name": "relevance",
        "target": "batch",
        "image": IMAGE,
        "queue": "relevance-trainium",
        "share_identifier": "production",
        "log_group": "/relevance/jobs",
        "role": "arn:aws:iam::123456789012:role/relevance-train",
        "sla_s": 28800,
        "schedule": {"expression": "cron(0 2 * * ? *)", "timezone": "UTC"},
        **dict.fromkeys(("prepare", "embed", "verify", "report"), ON_CPU),
    },
}
"""What `terraform output -json settings` says, with one role for all."""
FOLLOWED = (
    ("trnjobs", "plan"),
    ("trnjobs", "submit"),
    ("trnjobs", "status"),
    ("trnjobs", "history"),
    ("trnjobs", "cost"),
    ("trnjobs", "reconcile"),
    ("trnjobs", "cancel"),
    ("trnpipe", "cache"),
)
"""Not: logs (moto writes none), retry (nothing fails there), what needs a model."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to type in, and an account with both queues and the bucket."""
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "infra.json").write_text(json.dumps(SETTINGS))
    with empty_account():
        _make_account()
        yield tmp_path


def _make_account() -> None:
    arn = make_policy("relevance")
    machines = {"relevance-trainium": ["trn1.2xlarge", "trn1.32xlarge"], "relevance-cpu": ["m6i.4xlarge"]}
    make_environments(machines, max_vcpus=512)
    for name in machines:
        make_queue(name, name, schedulingPolicyArn=arn)
    boto3.client("s3").create_bucket(
        Bucket="your-bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )


@pytest.mark.stage
@pytest.mark.slow
def test_the_commands_for_aws_go_through(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trn1 = ["--config=configs/base.toml", "--config=configs/jobs/trn1.toml", "--config=build/infra.json"]
    assert jobs.cli.main(["submit", *trn1, "--cycle=2026-11-20"]) == 0  # what make submit does
    typed, failed, by_hand = list[str](), list[str](), dict[str, Any]()
    for run in runs(OPERATE):
        for command in run.commands if run.block.info == NEEDS_AWS else ():
            if command.here_document:
                Path(command.first_line.split(">")[1].split("<")[0].strip()).write_text(command.here_document)
            for words in simple_commands(command):
                given = [word.replace("YOUR-BUCKET", "your-bucket") for word in words[1:]]
                if given[:2] == ["batch", "submit-job"]:
                    by_hand[command.place] = submit_by_hand(given[2:])
                if tuple(words[:2]) not in FOLLOWED:
                    continue
                capsys.readouterr()
                code = (jobs.cli if words[0] == "trnjobs" else pipeline.cli).main(given)
                typed.append(" ".join(words))
                if code:
                    failed.append(f"{command.place}: exit {code}: {typed[-1]}\n{capsys.readouterr()}")
    assert failed == []
    assert {tuple(line.split()[:2]) for line in typed} == set(FOLLOWED)
    submitted = {one["jobName"] for one in boto3.client("batch").list_jobs(jobQueue="relevance-cpu")["jobSummaryList"]}
    for cycle in ("check-cpu", "check-trn", "check-large", "check-base", "check-gang", "check-fault", "2026-11-20"):
        assert f"relevance-{cycle}-prepare" in submitted
    assert "relevance-check-cpu-train" in submitted
    assert "relevance-check-trn-train" not in submitted  # on the Trainium queue
    devices = [[one["hostPath"] for one in container["linuxParameters"]["devices"]] for container in by_hand.values()]
    assert devices == [["/dev/neuron0"]] * 2, "parity and a look at a machine, after check-trn and before the next"


def submit_by_hand(words: Sequence[str]) -> Any:
    """`aws batch submit-job`: the container of the definition that it names. A command of ours must exist."""
    given = {name: value for name, value in pairwise(words) if name.startswith("--")}
    text = given["--container-overrides"]
    override = json.loads(Path(text.removeprefix("file://")).read_text() if text.startswith("file://") else text)
    batch = boto3.client("batch")
    job = batch.submit_job(
        jobName=given["--job-name"],
        jobQueue=given["--job-queue"],
        jobDefinition=given["--job-definition"],
        shareIdentifier=given["--share-identifier"],
        containerOverrides=override,
    )
    command = override["command"]
    if tuple(command[: len(ENTRY)]) == ENTRY:
        assert problem_of(command[len(ENTRY) :]) == ""
    (described,) = batch.describe_jobs(jobs=[job["jobId"]])["jobs"]
    (definition,) = batch.describe_job_definitions(jobDefinitions=[described["jobDefinition"]])["jobDefinitions"]
    return definition["containerProperties"]


@pytest.mark.unit
def test_what_a_check_costs_is_its_hours_at_the_list_prices() -> None:
    """Machines of a row: `16 vCPU + 1 trn1.2xlarge`. The cheapest first, two machines after one."""
    prices = {**PRICES_USD_PER_HOUR, "vCPU": 0.048}
    table = [row for row in rows(OPERATE, "## First checks on real hardware") if re.fullmatch(r"[\d.]+", row[3])]
    assert [re.sub(r"\[(\w+)\].*", r"\1", row[0]) for row in table] == ["1", "2a", "2b", "3", "4a", "4b", "4c", "5"]
    for check, machines, hours, dollars in table:
        priced = [float(number) * prices[kind] for number, kind in re.findall(r"(\d+) (\S+)", machines)]
        assert float(dollars) == pytest.approx(float(hours) * sum(priced), abs=0.005), check
    costs = [float(row[3]) for row in table[:7]]
    assert costs == sorted(costs)


def test_no_check_needs_a_device_outside_of_the_jobs() -> None:
    """Nobody can log in to a machine of the private subnet."""
    every = [words for run in runs(OPERATE) for command in run.commands for words in simple_commands(command)]
    assert [words for words in every if words[0] in ("ssh", "scp") or "--device" in words] == []
    order = [tuple(words[:2]) for words in every if words[0] == "docker" and words[1] in ("login", "run")]
    assert order[0] == ("docker", "login"), "an image of ECR is pulled after a login only"
