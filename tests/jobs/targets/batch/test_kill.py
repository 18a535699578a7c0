"""A driver that is really killed: SubmitJob arrives at the server, and nobody is left to read the answer."""

import signal
import urllib.request
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from jobs.cycle.cycle_store import LEASE_S, CycleStore
from jobs.plan.dag import Plan
from jobs.targets.batch.client import BatchClient, LogsClient, connect
from jobs.targets.batch.target import BatchTarget
from pipeline.io.s3_client import new_client
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import cycle
from tests.jobs.targets.batch.moto_account import make_account
from tests.jobs.targets.batch.setting import Clock
from tests.killing import FORK
from tests.s3 import MotoServer, lead_to

pytestmark = pytest.mark.fault


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MotoServer]:
    with MotoServer("workspace") as made:
        lead_to(made.url, monkeypatch)
        config = urllib.request.Request(
            f"{made.url}/moto-api/config", b'{"batch": {"use_docker": false}}', method="POST"
        )
        urllib.request.urlopen(config).close()
        make_account()
        yield made


def drive(of: Plan, clock: Clock, owner: str) -> CycleStore:
    store = CycleStore(open_storage("s3://workspace/relevance"), of.cycle, clock)
    with store.submitting(of, "batch", owner) as renew:
        target = BatchTarget(BatchClient(connect("batch")), LogsClient(connect("logs")), store, renew)
        target.submit(of, 1, [job.name for job in of.jobs])
    return store


def test_killed_at_each_submission_the_next_driver_makes_one_dag(server: MotoServer) -> None:
    for number in (1, 2, 3):
        of = cycle().model_copy(update={"cycle": f"2026-11-2{number}"})
        seen, victim = 0, list[BaseProcess]()

        def watch(method: str, path: str, number: int = number, victim: list[BaseProcess] = victim) -> None:
            nonlocal seen
            if path == "/v1/submitjob":
                seen += 1
                if seen == number:
                    victim[0].kill()

        server.watcher = watch
        clock = Clock()
        child = FORK.Process(target=drive, args=(of, clock, "first"))
        victim.append(child)
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        server.settle()
        server.watcher = None
        clock.now += LEASE_S + 1
        recorded = {name: one.id for name, one in drive(of, clock, "second").submitted(1).items()}
        assert {f"relevance-{of.cycle}-{name}": job_id for name, job_id in recorded.items()} == whole_jobs(of)


def whole_jobs(of: Plan) -> dict[str, str]:
    """Id by name; fails when there are two of one name."""
    listed: list[dict[str, Any]] = new_client("batch").list_jobs(jobQueue="relevance")["jobSummaryList"]
    ours = [one for one in listed if of.cycle in one["jobName"] and ":" not in one["jobId"]]
    found = {one["jobName"]: one["jobId"] for one in ours}
    assert len(found) == len(ours) == len(of.jobs)
    return found
