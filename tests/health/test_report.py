"""Verdicts of nodes, what a gang does about them, and reports as JSON and for people."""

import io
import json
import math
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.health.check import (
    CheckResult,
    NodeReport,
    Verdict,
    from_json,
    gang_error,
    report_key,
    show,
    store_report,
    to_json,
)
from pipeline.io.storage import open_storage

REPORT = NodeReport(
    1,
    "i-0abc",
    (
        CheckResult("memory", Verdict.PASS, figures={"gib": 31.25, "type": "trn1"}, seconds=0.25),
        CheckResult("disk: scratch", Verdict.RETRY, "1 GiB [bold]free[/bold]", "10 GiB", "du -x /", seconds=2.0),
    ),
)


results = st.builds(
    CheckResult,
    st.text(),
    st.sampled_from(Verdict),
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


def test_json_is_for_other_readers_too() -> None:
    fields = json.loads(to_json(REPORT))
    assert (fields["verdict"], fields["results"][0]["verdict"], fields["schema_version"]) == ("retry", "pass", 1)
    odd = NodeReport(0, "h", (CheckResult("x", Verdict.PASS, figures={"rate": math.nan}),))
    assert math.isnan(float(from_json(to_json(odd)).results[0].figures["rate"]))


@pytest.mark.parametrize("text", ["", "{}", "[1]", to_json(REPORT).replace("retry", "doomed"), "\x00"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="the report of node 7"):
        from_json(text, "the report of node 7")


def test_reports_lie_below_the_cycle(tmp_path: Path) -> None:
    workspace = open_storage(str(tmp_path), stop=StopSignal())
    key = store_report(workspace, "c1", REPORT)
    assert key == "cycles/c1/health/1-i-0abc.json"
    assert from_json(workspace.read_bytes(key)) == REPORT
    assert report_key("c1", NodeReport(0, "a/b _ü", ())) == "cycles/c1/health/0-a-b---.json"


def test_plain_lines() -> None:
    out = io.StringIO()
    show(REPORT, out)
    assert out.getvalue().splitlines() == [
        "node 1 (i-0abc): retry",
        "  pass   memory         gib 31.25, type trn1 (0.2s)",
        "  retry  disk: scratch  1 GiB [bold]free[/bold] (2s)",
        "         expected: 10 GiB",
        "         next: du -x /",
    ]


def node(rank: int, *verdicts: Verdict) -> NodeReport:
    results = (CheckResult(f"check-{n}", verdict, f"seen-{rank}-{n}") for n, verdict in enumerate(verdicts))
    return NodeReport(rank, f"host-{rank}", tuple(results))


P, W, R, F = Verdict


@pytest.mark.parametrize(
    ("verdicts", "kind", "seen"),
    [
        ([], None, ""),
        ([(P,), (W, P)], None, ""),
        ([(P,), (P, R), (W,)], TransientError, "node 1 (host-1), check check-1: seen-1-1"),
        ([(R,), (R, F)], ConfigError, "node 1 (host-1), check check-1: seen-1-1 (and 2 more failed checks)"),
    ],
)
def test_one_unfit_node_sends_all_back_and_a_configuration_problem_goes_first(
    verdicts: list[tuple[Verdict, ...]], kind: type[Exception] | None, seen: str
) -> None:
    reports = [node(rank, *each) for rank, each in enumerate(verdicts)]
    assert [one.verdict for one in reports] == [max(each) for each in verdicts]
    error = gang_error(reports)
    assert (type(error) if error else None) is kind
    if error:
        assert error.seen == seen and "trnpipe health" in error.next_command


def test_what_the_check_advises_is_told() -> None:
    error = gang_error([REPORT])
    assert error is not None and (error.expected, error.next_command) == ("10 GiB", "du -x /")


@given(st.lists(st.lists(st.sampled_from(Verdict)), max_size=5), st.randoms())
def test_all_nodes_come_to_the_same_verdict(verdicts: list[list[Verdict]], random: Random) -> None:
    """In whatever order a node has read the reports."""
    reports = [node(rank, *each) for rank, each in enumerate(verdicts)]
    shuffled = random.sample(reports, len(reports))
    first, second = gang_error(reports), gang_error(shuffled)
    assert (type(first), str(first)) == (type(second), str(second))
    worst = max((verdict for each in verdicts for verdict in each), default=Verdict.PASS)
    expected = {Verdict.RETRY: TransientError, Verdict.FIX: ConfigError}.get(worst, type(None))
    assert type(first) is expected
