"""Charts: round ticks, thinning that keeps the extremes, and marks where the numbers are."""

import re

from hypothesis import given
from hypothesis import strategies as st

from jobs.cycle.page.charts import columns, forest, line_chart, number, short_number, spark, thin, ticks
from pipeline.evaluate.gate.compare import GateCheck

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


@given(VALUES, st.floats(1e-6, 1e6))
def test_ticks_are_round_few_and_inside(low: float, size: float) -> None:
    high = low + size
    found = ticks(low, high)
    assert len(found) <= 7 and found == sorted(found)
    slack = 1e-6 * max(abs(low), abs(high), 1)
    assert all(low - slack <= value <= high + slack for value in found)
    assert (ticks(3, 3), ticks(0, 1)) == ([3], [0, 0.2, 0.4, 0.6, 0.8, 1.0])


@given(st.lists(VALUES, min_size=1, max_size=3000))
def test_thinned_lines_keep_ends_and_extremes(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thin(points, 100)
    assert len(kept) <= 100 and kept == sorted(kept) and set(kept) <= set(points)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    for choose in (min, max):
        assert choose(value for _, value in kept) == choose(values)


def test_a_line_lies_where_its_ticks_say() -> None:
    text = line_chart([("loss", [(0.0, 1.0), (5.0, 3.0), (10.0, 2.0)], "now")], "loss", marks=[(5, "went on <here>")])
    [path] = re.findall(r' d="(M[^"]+)"/><title>loss', text)
    x0, y0, dx, dy, *_ = (int(word) / 10 for word in re.findall(r"-?\d+", path))
    levels = {
        label: float(y) - 3.5 for y, label in re.findall(r'y="([\d.]+)" text-anchor="end" class="">([^<]+)<', text)
    }
    assert abs(y0 - levels["1"]) < 0.1 and abs(y0 + dy - levels["3"]) < 0.1
    assert (x0, x0 + dx) == (58, 524) and "went on &lt;here&gt;" in text
    assert line_chart([("loss", [(0, float("nan"))], "now")], "") == columns([], ["now"], "", "x") == ""


def test_what_does_not_fit_ends_in_an_arrow() -> None:
    given = {"name": "x", "kind": "delta", "reason": "why", "metric": "ndcg@10", "candidate": 0.7, "incumbent": 0.7}
    small = GateCheck.model_validate(given | {"outcome": "pass", "low": -0.01, "high": 0.01, "bound": 0.005})
    wide = small.model_copy(update={"outcome": "fail", "low": -0.9, "high": 0.9, "bound": None})
    text = forest([*[small] * 40, wide], "differences")
    assert text.count('class="arrow"') == 2 and text.count('class="bound"') == 40 and "dot fail" in text


def test_numbers() -> None:
    shown = {None: "-", float("nan"): "-", 12345: "12,345", 0.8125: "0.8125", 1e-9: "1e-09", 1234.5: "1,234", 3.0: "3"}
    assert [number(value) for value in shown] == [*shown.values()]
    assert [short_number(v) for v in (200_000, 1500, 0.05, 1.2e10)] == ["200k", "1500", "0.05", "12.0B"]


def test_a_spark_has_gaps_and_whiskers() -> None:
    dots = spark([(1.0, True, "a"), (None, True, "b"), (2.0, False, "c")], "cost")
    assert (dots.count("<circle"), dots.count("hollow"), spark([(None, True, "")], "x")) == (2, 1, "")
    values = [(1.0, True, "a"), (2.0, True, "b"), (3.0, True, "c")]
    whiskers = spark(values, "nDCG", [(0.0, 2.0), (None, None), (1.0, 4.0)])
    assert whiskers.count('class="whisker"') == 2
    assert 'd="M5 23V14"' in whiskers and 'cy="18.5"' in whiskers, "the scale holds the intervals"
