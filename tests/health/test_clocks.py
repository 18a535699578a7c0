"""Clocks of nodes, by what must have happened before what."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.health.ranks import clock_faults, judge_clock, skew
from pipeline.health.verdict import Verdict


def rounds(ahead_s: dict[int, float], num: int = 5, length_s: float = 0.001) -> list[dict[int, float]]:
    """Rounds of equal length in which all note their time at once."""
    return [{node: 1e9 + number * length_s + ahead for node, ahead in ahead_s.items()} for number in range(num)]


def test_a_clock_that_is_wrong_is_named_against_the_majority() -> None:
    stamps = rounds({0: 0.0, 1: -60.0, 2: 10.0})
    assert [*clock_faults(stamps, 30.0)] == [1]
    fault = judge_clock(stamps, 1, 30.0)
    assert fault is not None and fault.verdict is Verdict.RETRY
    assert fault.seen == "60 s behind node 0, give or take 0.001 s"
    assert fault.expected and fault.next_command
    assert clock_faults(stamps, 80.0) == {}


def test_a_right_clock_says_how_far_it_is_off() -> None:
    stamps = rounds({0: 0.0, 2: 4.0})
    result = judge_clock(stamps, 2, 30.0)
    assert result is not None and result.verdict is Verdict.PASS
    assert result.figures == {
        "clock_ahead_s": pytest.approx(4.0, abs=1e-5),
        "uncertainty_s": pytest.approx(1e-3, abs=1e-5),
    }
    assert judge_clock(stamps, 0, 30.0) is None, "the others are measured by it"
    assert clock_faults(stamps, 3.9), "far below what polling an object store would see"


def test_the_shortest_round_decides() -> None:
    """Nodes that come minutes apart still see half a minute."""
    stamps = [{0: 0.0, 1: 340.0}, {0: 330.0, 1: 371.0}, {0: 332.0, 1: 372.0}]
    assert skew(stamps, 0, 1).certain_s == pytest.approx(39.0)
    assert skew(stamps, 1, 0).certain_s == pytest.approx(-39.0)
    assert [*clock_faults(stamps, 30.0)] == [1]


@given(
    st.lists(st.lists(st.floats(0, 1000), min_size=3, max_size=3), min_size=2, max_size=4),
    st.lists(st.floats(-100, 100), min_size=3, max_size=3),
)
def test_no_right_clock_is_accused(waits: Sequence[Sequence[float]], offsets: Sequence[float]) -> None:
    """However long nodes take between rounds, the true skew is within what is told."""
    now, stamps = 0.0, []
    for round_waits in waits:  # nobody begins a round before all have written in the one before
        times = [now + wait for wait in round_waits]
        now = max(times)
        stamps.append({rank: time + offsets[rank] for rank, time in enumerate(times)})
    for one in range(3):
        for other in range(3):
            true, found = offsets[other] - offsets[one], skew(stamps, one, other)
            assert found.low_s - 1e-6 <= true <= found.high_s + 1e-6
            assert abs(found.ahead_s - true) <= found.uncertainty_s + 1e-6
            assert (0 <= found.certain_s <= true + 1e-6) or (0 >= found.certain_s >= true - 1e-6)
    spread = max(offsets) - min(offsets)
    assert clock_faults(stamps, spread + 1e-6) == {}
