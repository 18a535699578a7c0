"""Nodes read each other's reports: verdicts, and who does not come."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import CheckResult, NodeReport, Verdict, gang_error, to_json
from pipeline.health.neuron import VERSIONS
from pipeline.health.nodes import exchange_reports
from pipeline.io.local import LocalStorage
from pipeline.parallel import node_barrier
from pipeline.parallel.node_barrier import Nodes

FOLDER = "cycles/c1/health/nodes/job-1"
SAME = {"torch": "2.9.1", "compiler": "2.24", "driver": "2.27"}
Outcome = tuple[NodeReport, ...] | BaseException


@pytest.fixture(autouse=True)
def _poll_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_barrier, "FIRST_POLL_S", 0.01)
    monkeypatch.setattr(node_barrier, "MAX_POLL_S", 0.02)


def report(rank: int, versions: Mapping[str, str] = SAME, *more: CheckResult) -> NodeReport:
    return NodeReport(rank, f"i-{rank}", (CheckResult(VERSIONS, Verdict.PASS, figures=dict(versions)), *more))


def nodes(
    folder: Path, rank: int, num_nodes: int, *, stop: StopSignal | None = None, timeout_s: float = 120.0
) -> Nodes:
    storage = LocalStorage(folder, stop=StopSignal())
    return Nodes(storage, FOLDER, rank, num_nodes, timeout_s, stop or StopSignal())


def gather(*work: Callable[[], tuple[NodeReport, ...]]) -> list[Outcome]:
    """What each node comes to, all at once."""
    outcomes: dict[int, Outcome] = {}

    def one(index: int) -> None:
        try:
            outcomes[index] = work[index]()
        except BaseException as error:
            outcomes[index] = error

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    return [outcomes[index] for index in range(len(work))]


def come(folder: Path, rank: int, num_nodes: int) -> None:
    """Leave a node's report before it waits itself: one that waits a moment only has to find it."""
    storage = nodes(folder, rank, num_nodes).storage
    storage.write_bytes(f"{FOLDER}/reports/node-{rank}.json", to_json(report(rank)).encode())
    storage.write_bytes(f"{FOLDER}/reports/node-{rank}.no", b"")


def judged(me: Nodes, mine: NodeReport, wait_s: float = 120.0, phase: str = "reports") -> tuple[NodeReport, ...]:
    """As the stage does it."""
    with me.telling():
        reports = exchange_reports(me, phase, mine, wait_s)
        if error := gang_error(reports):
            raise error
        return reports


def test_alone_nothing_is_written(tmp_path: Path) -> None:
    assert judged(nodes(tmp_path, 0, 1), report(0)) == (report(0),)
    assert list(tmp_path.iterdir()) == []


def test_all_read_all(tmp_path: Path) -> None:
    fine = [report(rank, SAME, CheckResult(f"check {rank}", Verdict.WARN, "odd")) for rank in range(3)]
    outcomes = gather(*(lambda r=r: judged(nodes(tmp_path, r, 3), fine[r]) for r in range(3)))
    assert outcomes == [tuple(fine)] * 3


@pytest.mark.parametrize(("verdict", "kind"), [(Verdict.RETRY, TransientError), (Verdict.FIX, ConfigError)])
def test_one_sick_node_is_told_by_all_alike(tmp_path: Path, verdict: Verdict, kind: type[Exception]) -> None:
    sick = report(1, SAME, CheckResult("disk", verdict, "1 GiB free"))
    reports = (report(0), sick, report(2))
    outcomes = gather(*(lambda r=r: judged(nodes(tmp_path, r, 3), reports[r]) for r in range(3)))
    assert {type(one) for one in outcomes} == {kind}
    assert {str(one).splitlines()[0] for one in outcomes} == {"node 1 (i-1), check disk: 1 GiB free"}


def test_a_node_that_never_comes_is_named_in_time(tmp_path: Path) -> None:
    for rank in (0, 2):
        come(tmp_path, rank, 4)
    outcomes = gather(
        lambda: judged(nodes(tmp_path, 0, 4), report(0), 0.2),
        lambda: judged(nodes(tmp_path, 2, 4), report(2), 0.2),
    )
    for outcome in outcomes:
        assert isinstance(outcome, TransientError)
        assert outcome.seen.startswith("node 1 (host not known), check report: no report, ")
        assert "node 1, 3 of 4 not ready after 0.2s" in outcome.seen


def test_who_has_waited_in_vain_tells_the_others(tmp_path: Path) -> None:
    come(tmp_path, 1, 3)
    outcomes = gather(
        lambda: exchange_reports(nodes(tmp_path, 0, 3), "reports", report(0), 0.2),
        lambda: exchange_reports(nodes(tmp_path, 1, 3), "reports", report(1), 120.0),
    )
    for outcome in outcomes:
        assert isinstance(outcome, tuple)
        assert [(one.node_rank, one.verdict) for one in outcome] == [
            (0, Verdict.PASS),
            (1, Verdict.PASS),
            (2, Verdict.RETRY),
        ]
        assert "node 2 of 3 not ready after 0.2s" in outcome[2].results[0].seen


@pytest.mark.parametrize("reported", [False, True])
def test_a_node_that_fails_on_the_way_is_named(tmp_path: Path, reported: bool) -> None:
    """Before its report, or in a later part; then the report it gave is fine."""

    def failing() -> tuple[NodeReport, ...]:
        me = nodes(tmp_path, 1, 2)
        with me.telling():
            if reported:
                exchange_reports(me, "reports", report(1), 120.0)
            raise RuntimeError("gone")

    failed, healthy = gather(failing, lambda: judged(nodes(tmp_path, 0, 2), report(0)))
    assert isinstance(failed, RuntimeError)
    if reported:
        assert isinstance(healthy, tuple)
    else:
        assert isinstance(healthy, TransientError)
        assert healthy.seen == "node 1 (host not known), check report: no report, it failed: RuntimeError: gone"


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="SIGTERM"):
        judged(nodes(tmp_path, 0, 2, stop=stop), report(0))
    judged(nodes(tmp_path, 1, 2), report(1))  # its report was there already
    with pytest.raises(TransientError, match=r"node 0 .*it failed: stopped by SIGTERM"):
        judged(nodes(tmp_path, 1, 2), report(1), phase="ranks")


@pytest.mark.parametrize("text", [b"5.0", b"", b"\xff\x00", b'{"schema_version": 1, "node', b"[" * 100_000])
def test_a_report_of_another_version_is_a_fault_of_the_image(tmp_path: Path, text: bytes) -> None:
    me = nodes(tmp_path, 1, 2)
    me.storage.write_bytes(f"{FOLDER}/reports/node-0.json", text)
    me.storage.write_bytes(f"{FOLDER}/reports/node-0.no", b"")
    with pytest.raises(ConfigError, match=r"node 0 .*the report of node 0 cannot be read"):
        judged(me, report(1))
