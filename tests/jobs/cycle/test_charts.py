"""Charts: round ticks, thinning that keeps the extremes, and marks where the numbers are."""

import re

from hypothesis import given
from hypothesis import strategies as st

from jobs.cycle.page.charts import (
    Series,
    escaped,
    forest,
    heat,
    line_chart,
    number,
    short_number,
    spark,
    ticks,
    time_label,
    time_ticks,
)
from jobs.cycle.page.data import thin
from pipeline.evaluate.gate.compare import GateCheck

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@given(VALUES, st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low: float, size: float) -> None:
    high = low + size
    found = ticks(low, high)
    assert len(found) <= 7 and found == sorted(found)
    slack = 1e-6 * max(abs(low), abs(high), 1)
    assert all(low - slack <= value <= high + slack for value in found)


def test_ticks_of_nothing() -> None:
    assert (ticks(3, 3), ticks(float("nan"), 1), ticks(0, 1)) == ([3], [], [0, 0.2, 0.4, 0.6, 0.8, 1.0])


@given(st.lists(VALUES, min_size=1, max_size=3000))
def test_thinned_lines_keep_ends_and_extremes(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thin(points, 100)
    assert len(kept) <= 100 and kept == sorted(kept) and set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    for choose in (min, max):
        assert choose(value for _, value in kept) == choose(values)


def test_a_line_lies_where_its_frame_says() -> None:
    """The script reads values back from pixels."""
    points = [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)]
    text = line_chart([Series("loss", points)], "loss")
    frame = re.search(r'data-frame="([^"]+)"', text)
    path = re.search(r' d="(M[^"]+)"><title>loss', text)
    assert frame and path
    x0, x1, left, right, y0, y1, bottom, top = map(float, frame[1].split())
    numbers = [int(word) / 10 for word in re.findall(r"-?\d+", path[1])]
    x, y, found = 0.0, 0.0, []
    for dx, dy in zip(numbers[::2], numbers[1::2], strict=True):
        x, y = x + dx, y + dy
        found.append((x0 + (x - left) / (right - left) * (x1 - x0), y0 + (bottom - y) / (bottom - top) * (y1 - y0)))
    for (a, b), (c, d) in zip(found, points, strict=True):
        assert abs(a - c) < 0.01 and abs(b - d) < 0.01
    assert line_chart([Series("loss", [(0, float("nan"))])], "") == ""


def check(outcome: str, low: float, high: float, bound: float | None) -> GateCheck:
    given = {"name": "x", "kind": "delta", "outcome": outcome, "reason": "why", "metric": "ndcg@10", "candidate": 0.7}
    return GateCheck.model_validate(given | {"incumbent": 0.7, "low": low, "high": high, "bound": bound})


def test_what_does_not_fit_ends_in_an_arrow() -> None:
    checks = [check("pass", -0.01, 0.01, 0.005) for _ in range(40)]
    text = forest([*checks, check("fail", -0.9, 0.9, None)], "differences")
    assert text.count('class="arrow"') == 2 and text.count('class="bound"') == 40 and "dot fail" in text


def test_small_words() -> None:
    assert [number(v) for v in (None, float("nan"), 12345, 0.8125, 1e-9, 1234.5, 3.0)] == [
        "-",
        "-",
        "12,345",
        "0.8125",
        "1e-09",
        "1,234",
        "3",
    ]
    assert [short_number(v) for v in (200_000, 1500, 0.05, 1.2e10)] == ["200k", "1500", "0.05", "12G"]
    assert [time_label(v) for v in (30, 120, 5400, 3600, 172_800)] == ["30s", "2m", "1h30", "1h", "2d"]
    assert time_ticks(432) == [0, 60, 120, 180, 240, 300, 360, 420]
    assert escaped("a<\x00\u202e\ud800>") == "a&lt;\ufffd\ufffd\ufffd&gt;"


def test_cells_and_gaps() -> None:
    text = heat([("node 0", [("pass", ""), ("warn", "slow <disk>"), ("none", "")])], ["a", "b", "c"], "one node")
    assert text.count("<rect") == 2 and ">W<" in text and "slow &lt;disk&gt;" in text
    dots = spark([(1.0, True, "a"), (None, True, "b"), (2.0, False, "c")], "cost")
    assert (dots.count("<circle"), dots.count("hollow"), spark([(None, True, "")], "x")) == (2, 1, "")
    values = [(1.0, True, "a"), (2.0, True, "b"), (3.0, True, "c")]
    whiskers = spark(values, "nDCG", [(0.0, 2.0), (None, None), (1.0, 4.0)])
    assert whiskers.count('class="whisker"') == 2
    assert 'd="M5 23V14"' in whiskers and 'cy="18.5"' in whiskers, "the scale holds the intervals"
