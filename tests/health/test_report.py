"""Verdicts of nodes: as JSON, for people, and what the nodes of a job make of each other's reports."""

import io
import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError, DataError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import (
    CheckResult,
    HealthVerdict,
    NodeReport,
    exchange_reports,
    from_json,
    job_error,
    print_report,
    report_key,
    store_report,
    to_json,
)
from pipeline.io.storage import LocalStorage
from pipeline.parallel import world
from pipeline.parallel.world import Nodes

REPORT = NodeReport(
    1,
    "i-0abc",
    (
        CheckResult("memory", HealthVerdict.PASS, figures={"gib": 31.25, "type": "trn1"}, seconds=0.25),
        CheckResult("disk: scratch", HealthVerdict.RETRY, "1 GiB [bold]free[/bold]", "10 GiB", "du -x /", seconds=2.0),
    ),
)


results = st.builds(
    CheckResult,
    st.text(),
    st.sampled_from(HealthVerdict),
    st.text(),
    st.text(),
    st.text(),
    st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers(-(2**63), 2**63) | st.text()),
    st.floats(0, 1e6),
)


@given(st.builds(NodeReport, st.integers(0, 1000), st.text(), st.lists(results, max_size=3).map(tuple)))
def test_json_gives_back_the_report(report: NodeReport) -> None:
    back = from_json(to_json(report))
    assert back == report
    figures = [[type(value) for value in one.figures.values()] for one in report.results]
    assert [[type(value) for value in one.figures.values()] for one in back.results] == figures


def test_json_is_for_other_readers_too(tmp_path: Path) -> None:
    workspace = LocalStorage(tmp_path, stop=StopSignal())
    store_report(workspace, "c1", REPORT)
    fields = json.loads(workspace.read_bytes("cycles/c1/health/1-i-0abc.json"))
    assert (fields["verdict"], fields["results"][0]["verdict"], fields["schema_version"]) == ("retry", "pass", 1)
    odd = NodeReport(0, "a/b _ü", (CheckResult("x", HealthVerdict.PASS, figures={"rate": math.nan}),))
    assert math.isnan(float(from_json(to_json(odd)).results[0].figures["rate"]))
    assert report_key("c1", odd) == "cycles/c1/health/0-a-b---.json"


@pytest.mark.parametrize("text", ["", "{}", "[1]", to_json(REPORT).replace("retry", "doomed"), "\x00", "[" * 100_000])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="the report of node 7"):
        from_json(text, "the report of node 7")


def test_plain_lines() -> None:
    out = io.StringIO()
    print_report(REPORT, out)
    assert out.getvalue().splitlines() == [
        "node 1 (i-0abc): retry",
        "  pass   memory         gib 31.25, type trn1 (0.2s)",
        "  retry  disk: scratch  1 GiB [bold]free[/bold] (2s)",
        "         expected: 10 GiB",
        "         next: du -x /",
    ]


# The error of a job.


def node(rank: int, *verdicts: HealthVerdict) -> NodeReport:
    checks = (CheckResult(f"check-{n}", verdict, f"seen-{rank}-{n}") for n, verdict in enumerate(verdicts))
    return NodeReport(rank, f"host-{rank}", tuple(checks))


P, W, R, F = HealthVerdict


@pytest.mark.parametrize(
    ("verdicts", "kind", "seen"),
    [
        ([(P,), (W, P)], None, ""),
        ([(P,), (P, R), (W,)], TransientError, "node 1 (host-1), check check-1: seen-1-1"),
        ([(R,), (R, F)], ConfigError, "node 1 (host-1), check check-1: seen-1-1 (and 2 more failed checks)"),
    ],
)
def test_one_unfit_node_sends_all_back_and_a_configuration_problem_goes_first(
    verdicts: list[tuple[HealthVerdict, ...]], kind: type[Exception] | None, seen: str
) -> None:
    error = job_error(node(rank, *each) for rank, each in enumerate(verdicts))
    assert (type(error) if error else None) is kind
    if error:
        assert error.seen == seen and "trnpipe health" in error.next_command
    advised = job_error([REPORT])
    assert advised is not None and (advised.expected, advised.next_command) == ("10 GiB", "du -x /")


@given(st.lists(st.lists(st.sampled_from(HealthVerdict)), max_size=5), st.randoms())
def test_all_nodes_come_to_the_same_verdict(verdicts: list[list[HealthVerdict]], random: Random) -> None:
    """In whatever order a node has read the reports."""
    reports = [node(rank, *each) for rank, each in enumerate(verdicts)]
    first, second = job_error(reports), job_error(random.sample(reports, len(reports)))
    assert (type(first), str(first)) == (type(second), str(second))
    worst = max((verdict for each in verdicts for verdict in each), default=HealthVerdict.PASS)
    assert type(first) is {R: TransientError, F: ConfigError}.get(worst, type(None))


# Nodes read each other's reports.


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Nodes]:
    monkeypatch.setattr(world, "FIRST_POLL_S", 0.01)
    monkeypatch.setattr(world, "MAX_POLL_S", 0.02)
    storage = LocalStorage(tmp_path, stop=StopSignal())
    return lambda rank, num_nodes: Nodes(storage, "nodes", rank, num_nodes, 120.0, StopSignal())


def come(me: Nodes, report: bytes) -> None:
    """Leave a node's report before it waits itself."""
    me.storage.write_bytes(f"nodes/reports/node-{me.rank}.json", report)
    me.storage.write_bytes(f"nodes/reports/node-{me.rank}.no", b"")


def test_all_read_all(nodes: Callable[[int, int], Nodes], tmp_path: Path) -> None:
    assert exchange_reports(nodes(0, 1), "reports", node(0, P), 1.0) == (node(0, P),)
    assert list(tmp_path.iterdir()) == [], "alone nothing is written"
    outcomes: dict[int, object] = {}

    def one(rank: int) -> None:
        outcomes[rank] = exchange_reports(nodes(rank, 3), "reports", node(rank, W), 120.0)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert outcomes == dict.fromkeys(range(3), tuple(node(rank, W) for rank in range(3)))


def test_a_node_that_never_comes_is_named_by_all(nodes: Callable[[int, int], Nodes]) -> None:
    """The first that has waited in vain tells the others."""
    come(nodes(1, 3), to_json(node(1, P)).encode())
    for rank, wait_s in ((0, 0.2), (1, 120.0)):
        first, second, absent = exchange_reports(nodes(rank, 3), "reports", node(rank, P), wait_s)
        assert (first, second) == (node(0, P), node(1, P))
        (result,) = absent.results
        assert (absent.host, result.verdict) == ("unknown host", R)
        assert "node 2 of 3 not ready after 0.2s" in result.seen


@pytest.mark.parametrize("reported", [False, True])
def test_a_node_that_fails_on_the_way_is_named(nodes: Callable[[int, int], Nodes], reported: bool) -> None:
    """Before its report, or in a later part; then the report it gave is fine."""
    if reported:
        come(nodes(1, 2), to_json(node(1, P)).encode())
    with pytest.raises(RuntimeError), nodes(1, 2).report_failure():
        raise RuntimeError("gone")
    _, other = exchange_reports(nodes(0, 2), "reports", node(0, P), 120.0)
    expected = "seen-1-0" if reported else "no report, it failed: RuntimeError: gone"
    assert [one.seen for one in other.results] == [expected]


def test_a_stop_ends_the_wait(nodes: Callable[[int, int], Nodes]) -> None:
    me = nodes(0, 2)
    me.stop.set("SIGTERM")
    with pytest.raises(Preempted, match="SIGTERM"), me.report_failure():
        exchange_reports(me, "reports", node(0, P), 120.0)
    first, _ = exchange_reports(nodes(1, 2), "ranks", node(1, P), 120.0)
    assert first.results[0].seen.startswith("no report, it failed: stopped by SIGTERM while waiting for node 1")


def test_a_report_of_another_version_is_a_fault_of_the_image(nodes: Callable[[int, int], Nodes]) -> None:
    come(nodes(0, 2), b'{"schema_version": 1, "node')
    first, _ = exchange_reports(nodes(1, 2), "reports", node(1, P), 120.0)
    assert first.verdict is F and "the report of node 0 cannot be read" in first.results[0].seen
