"""Wiring against moto, a second implementation of the API: requests and answers, not what runs.

It neither validates limits nor enforces dependencies; it drops shares, priorities and node overrides.
"""

import time
from pathlib import Path
from typing import Any

import pytest

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_records import JobState
from jobs.targets.batch.client import BatchClient, LogsClient, connect
from jobs.targets.batch.definitions import ensure_definition, registered_definition
from jobs.targets.batch.requests import definition_request
from jobs.targets.batch.target import BatchTarget
from pipeline.core.errors import ConfigError
from pipeline.io.s3_client import new_client
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.targets.batch.setting import Clock


def _target(store: CycleStore, warnings: list[str] | None = None) -> BatchTarget:
    told = [] if warnings is None else warnings
    return BatchTarget(BatchClient(connect("batch")), LogsClient(connect("logs")), store, warn=told.append)


def _whole_jobs(account: Any) -> list[str]:
    jobs = account.list_jobs(jobQueue="relevance")["jobSummaryList"]
    return [one["jobId"] for one in jobs if ":" not in one["jobId"]]


def test_submit_claim_records_cancel_in_s3(account: Any) -> None:
    of = cycle()
    store = CycleStore(open_storage("s3://bucket/relevance"), of.cycle, Clock())
    warnings: list[str] = []
    for owner in ("one", "other"):
        with store.submitting(of, "batch", owner) as renew:
            renew()
            _target(store, warnings).submit(of, 1, [one.name for one in of.jobs])
    assert warnings == []
    assert len(_whole_jobs(account)) == 3
    train, embed, verify = _target(store).records(of)
    assert [one.state for one in (train, embed, verify)] == [JobState.SUCCEEDED] * 3
    assert (train.num_nodes, len(embed.children)) == (2, 8)
    recorded = {name: one.id for name, one in store.submitted(1).items()}
    described = account.describe_jobs(jobs=[recorded["embed"], recorded["verify"]])["jobs"]
    assert [one["dependsOn"][0]["jobId"] for one in described] == [recorded["train"], recorded["embed"]]
    assert described[0]["jobDefinition"].endswith(":job-definition/relevance-embed:1")
    _target(store).cancel(of, "by hand")
    claim = store.claim()
    assert claim is not None
    assert (claim.plan_id, claim.target, claim.owner) == (of.plan_id, "batch", "")


def test_a_job_that_is_not_on_record_is_found_by_its_name(account: Any, tmp_path: Path) -> None:
    of = cycle()
    first, again = (CycleStore(open_storage(str(tmp_path / name)), of.cycle, Clock()) for name in ("first", "again"))
    for store in (first, again):
        _target(store).submit(of, 1, [one.name for one in of.jobs])
    assert {n: s.id for n, s in first.submitted(1).items()} == {n: s.id for n, s in again.submitted(1).items()}
    assert len(_whole_jobs(account)) == 3


@pytest.mark.parametrize(
    ("queue", "message"),
    [("nobody", "does not exist"), ("off", "DISABLED, it takes no jobs"), ("fifo", "has no scheduling policy")],
)
def test_a_queue_that_would_not_take_the_cycle(account: Any, tmp_path: Path, queue: str, message: str) -> None:
    of = plan(job("train"), queue=queue)
    store = CycleStore(open_storage(str(tmp_path)), of.cycle, Clock())
    with pytest.raises(ConfigError, match=message):
        _target(store).submit(of, 1, ["train"])
    assert account.describe_job_definitions()["jobDefinitions"] == []


def test_a_share_that_the_policy_does_not_name_is_a_warning(account: Any, tmp_path: Path) -> None:
    of = plan(job("train"), share_identifier="experiments")
    warnings: list[str] = []
    _target(CycleStore(open_storage(str(tmp_path)), of.cycle, Clock()), warnings).check(of)
    assert warnings == [
        "share identifier experiments is not in the policy of queue relevance: it gets weight 1 (there: production)"
    ]


def test_terminate_and_the_lines_of_a_log(account: Any, tmp_path: Path) -> None:
    of = cycle()
    store = CycleStore(open_storage(str(tmp_path)), of.cycle, Clock())
    with store.submitting(of, "batch", "one"):
        _target(store).submit(of, 1, ["train", "embed", "verify"])
    verify = _target(store).records(of)[2]
    BatchClient(account).terminate_job(verify.id, "by hand")
    stream = verify.attempts[0].log_streams[0]
    assert stream, "moto names a stream and does not make one"
    with pytest.raises(ConfigError, match="no log stream"):
        [*_target(store).logs(verify, attempt=1, node=0)]
    logs = new_client("logs")
    logs.create_log_stream(logGroupName="/aws/batch/job", logStreamName=stream)
    events = [{"timestamp": int(time.time() * 1000) + i, "message": f"line {i}"} for i in range(3)]
    logs.put_log_events(logGroupName="/aws/batch/job", logStreamName=stream, logEvents=events)
    assert [*_target(store).logs(verify, attempt=1, node=0)] == ["line 0", "line 1", "line 2"]


def test_definitions_are_registered_once_and_described_as_they_were(account: Any) -> None:
    client = BatchClient(connect("batch"))
    request = definition_request(cycle(), cycle().job("verify"))
    assert registered_definition(client, request) is None
    assert ensure_definition(client, request) == "relevance-verify:1"
    found = registered_definition(client, request)
    assert found is not None
    assert found["containerProperties"]["image"] == request["containerProperties"]["image"]
    assert registered_definition(client, request | {"tags": {"content": "another"}}) is None
