"""Verdicts of nodes, and what a gang does about them."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import ConfigError, TransientError
from pipeline.health.report import CheckResult, NodeReport, Verdict, gang_error


def node(rank: int, *verdicts: Verdict) -> NodeReport:
    results = (CheckResult(f"check-{n}", verdict, f"seen-{rank}-{n}") for n, verdict in enumerate(verdicts))
    return NodeReport(rank, f"host-{rank}", tuple(results))


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ((), Verdict.PASS),
        ((Verdict.PASS, Verdict.WARN), Verdict.WARN),
        ((Verdict.RETRY, Verdict.PASS), Verdict.RETRY),
        ((Verdict.FIX, Verdict.RETRY), Verdict.FIX),
    ],
)
def test_the_gravest_verdict_is_the_nodes(verdicts: tuple[Verdict, ...], expected: Verdict) -> None:
    assert node(0, *verdicts).verdict is expected


def test_warnings_keep_nobody_from_work() -> None:
    assert gang_error([]) is None
    assert gang_error([node(0, Verdict.PASS), node(1, Verdict.WARN, Verdict.PASS)]) is None


def test_one_unfit_node_sends_all_back() -> None:
    error = gang_error([node(0, Verdict.PASS), node(1, Verdict.PASS, Verdict.RETRY), node(2, Verdict.WARN)])
    assert type(error) is TransientError
    assert error.seen == "node 1 (host-1), check check-1: seen-1-1"
    assert "trnpipe health" in error.next_command


def test_a_configuration_problem_goes_before_unfit_nodes() -> None:
    error = gang_error([node(0, Verdict.RETRY), node(1, Verdict.RETRY, Verdict.FIX)])
    assert type(error) is ConfigError
    assert error.seen == "node 1 (host-1), check check-1: seen-1-1 (and 2 more failed checks)"


def test_what_the_check_advises_is_told() -> None:
    report = NodeReport(0, "host", (CheckResult("disk", Verdict.RETRY, "1 GiB", "10 GiB", "du -x /"),))
    error = gang_error([report])
    assert error is not None
    assert (error.expected, error.next_command) == ("10 GiB", "du -x /")


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
