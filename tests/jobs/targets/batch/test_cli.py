"""`trnjobs` as it is typed, with everything on AWS (moto): the workspace, the claim, the jobs."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from moto.batch.models import batch_backends
from moto.core.models import DEFAULT_ACCOUNT_ID as ACCOUNT_ID

from jobs import cli
from pipeline.io.s3_client import new_client

Trnjobs = Callable[..., tuple[int, str]]
FLAGS = (
    "--workspace=s3://bucket/relevance",
    "--jobs.target=batch",
    "--jobs.name=relevance",
    "--jobs.queue=relevance",
    "--jobs.share-identifier=production",
    "--jobs.image=1234.dkr.ecr.us-east-1.amazonaws.com/trnpipe@sha256:0",
    "--jobs.train.nodes=2",
    "--train.global-batch-size=4800",
    "--jobs.train.instance=trn1.32xlarge",
    "--jobs.embed.workers=3",
    "--jobs.schedule.expression=cron(0 2 * * ? *)",
    "--jobs.schedule.max-late-s=1000000000",
)


@pytest.fixture
def trnjobs(account: Any, capsys: pytest.CaptureFixture[str]) -> Trnjobs:
    def command(*words: str, cycle: str = "2026-11-20") -> tuple[int, str]:
        code = cli.main([words[0], *FLAGS, f"--cycle={cycle}", *words[1:]])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return command


def jobs_at(account: Any) -> list[str]:
    return sorted(one["jobName"] for one in account.list_jobs(jobQueue="relevance")["jobSummaryList"])


def test_a_cycle_from_plan_to_history(trnjobs: Trnjobs, account: Any) -> None:
    code, text = trnjobs("plan", "--diff")
    assert code == 0 and "+ relevance-train:1 (train) would be registered, the first of its name" in text
    assert jobs_at(account) == []

    assert trnjobs("submit")[0] == 0
    submitted = jobs_at(account)
    assert submitted.count("relevance-2026-11-20-train") == 1 and len(set(submitted)) == 8
    code, text = trnjobs("submit")
    assert code == 0 and "already succeeded" in text and "nothing ran" in text
    assert jobs_at(account) == submitted
    assert "= relevance-embed:1 (embed) is registered" in trnjobs("plan", "--diff")[1]

    shown = json.loads(trnjobs("status", "--json")[1])
    assert [job["name"] for job in shown["jobs"]][-1] == "report"
    assert shown["closed"]["outcome"] == "succeeded"  # moto's jobs succeed at once
    code, text = trnjobs("reconcile")
    assert code == 0 and "cycle 2026-11-20: succeeded" in text
    assert "2026-11-20  batch" in trnjobs("history")[1]
    assert trnjobs("cancel")[0] == 0
    assert trnjobs("retry")[0] == 78

    code, text = trnjobs("submit", "--jobs.train.nodes=3")
    assert code == 78 and "jobs.train.nodes: 2 -> 3\n" in text
    assert jobs_at(account) == submitted


def states(account: Any, cycle: str, status: str) -> None:
    """moto's jobs succeed at once; make those of a cycle something else."""
    for job in batch_backends[ACCOUNT_ID]["us-east-1"]._jobs.values():
        if f"-{cycle}-" in job.job_name:
            job.status = status


def test_the_watch_looks_at_every_cycle_that_is_under_way(trnjobs: Trnjobs, account: Any) -> None:
    assert trnjobs("reconcile", cycle="") == (0, "no cycle is under way in s3://bucket/relevance\n")
    for cycle in ("2026-11-19", "2026-11-20", "2026-11-21"):
        assert trnjobs("submit", "--jobs.sla-s=60", cycle=cycle)[0] == 0
    for cycle in ("2026-11-19", "2026-11-20"):  # opened again: they were not over when the watch came
        new_client("s3").delete_object(Bucket="bucket", Key=f"relevance/cycles/{cycle}/jobs/closed.json")
    states(account, "2026-11-20", "RUNNABLE")

    code, text = trnjobs("reconcile", "--jobs.sla-s=60", cycle="")
    assert code == 0 and "cycle 2026-11-19: succeeded" in text and "cycle 2026-11-20: under way" in text
    assert "cycle 2026-11-20: under way, deadline MISSED" in text and "cycle 2026-11-21" not in text
    assert "cycle 2026-11-19" not in trnjobs("reconcile", cycle="")[1]

    states(account, "2026-11-20", "SUCCEEDED")
    assert "cycle 2026-11-20: succeeded" in trnjobs("reconcile", cycle="")[1]
    assert trnjobs("reconcile", cycle="")[1].startswith("no cycle is under way")


@pytest.mark.parametrize(
    ("flag", "seen"),
    [
        ("--jobs.queue=none", "none"),
        ("--jobs.share-identifier=prod-1", "prod-1"),
        ("--jobs.train.nodes=100", "1,280"),
    ],
)
def test_what_the_account_cannot_run_is_refused_before_anything_is_sent(
    trnjobs: Trnjobs, account: Any, flag: str, seen: str
) -> None:
    code, text = trnjobs("submit", flag)
    assert code == 78 and seen in text, text
    assert jobs_at(account) == []
    assert trnjobs("submit")[0] == 0  # corrected
