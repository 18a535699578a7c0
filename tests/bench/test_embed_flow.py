"""Made-up rows, how memory is read, and what the figures say."""

import os

import numpy as np
import pytest

from bench.embed_flow import check, figures_of, made_up_rows, made_up_words
from bench.embed_flow_side import MemoryPeak, Passed, pages_of

pytestmark = pytest.mark.unit


def passed(rows: int, *, seconds: float, peak: int) -> Passed:
    bad = rows // 100 + rows // 1000
    return Passed(
        rows=rows - bad,
        bad=bad,
        parts=1,
        plan_s=0.0,
        embed_s=seconds,
        finish_s=0.0,
        cpu_s=2 * seconds,
        resident_bytes=2 * peak,
        anonymous_bytes=peak,
        start_bytes=peak // 2,
    )


def test_made_up_rows_are_as_bad_as_expected() -> None:
    words = made_up_words(np.random.default_rng(3))
    table = made_up_rows(1, 4000, words)
    assert table == made_up_rows(1, 4000, words) != made_up_rows(0, 4000, words)
    assert table["title"].null_count == 40
    ids = table["product_id"].to_pylist()
    assert len(ids) - len(set(ids)) == 4 and ids[0] == ids[1] == "sku-4000"
    check(passed(4000, seconds=1, peak=1), 4000)
    with pytest.raises(RuntimeError, match="3,956 vectors and 44 bad of 5,000 rows; expected 55 bad"):
        check(passed(4000, seconds=1, peak=1), 5000)


def test_growth_is_of_peaks_and_of_seconds_a_row() -> None:
    sizes = {1_000_000: passed(1_000_000, seconds=10, peak=100), 4_000_000: passed(4_000_000, seconds=60, peak=90)}
    found = {figure.name: figure.value for figure in figures_of(sizes)}
    assert found["memory"] == pytest.approx(100 / 90, rel=1e-3)
    assert found["time"] == found["wall_time"] == 1.5
    assert (found["seconds_4m"], found["cpu_4m"]) == (15, 30)


def test_memory_is_that_of_the_process() -> None:
    resident, anonymous = pages_of(os.getpid())
    assert resident > anonymous > 0
    assert pages_of(2**22 + 1) == (0, 0), "no such process"
    with MemoryPeak() as peak:
        before = peak.anonymous_bytes
        held = np.ones(64 * 2**20, dtype=np.uint8)
        peak._look()
    assert peak.anonymous_bytes - before >= 0.9 * len(held)
