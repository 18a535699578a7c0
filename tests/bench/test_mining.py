"""Made-up vectors of the mining bench, and what its figures are made of."""

from pathlib import Path

import numpy as np
import pytest

from bench.mining import JUDGED, MadeUpVectors, MemoryPeak, Passed, figures_of, mine_here, recall

pytestmark = pytest.mark.unit


def passed(digest: str, found: int, peak: int = 2**30) -> Passed:
    return Passed(
        seconds=2.0,
        anonymous_bytes=peak,
        resident_bytes=2 * peak,
        start_bytes=peak // 2,
        parts_found=found,
        negatives=7,
        digest=digest,
    )


def test_vectors_are_the_same_whatever_part_is_asked_for() -> None:
    made = MadeUpVectors(30_000, 3_000)
    items, queries = made.items(0, 30_000), made.queries(0, 3_000)
    np.testing.assert_array_equal(made.items(8_000, 17_001), items[8_000:17_001])
    np.testing.assert_array_equal(made.queries(500, 2_700), queries[500:2_700])
    assert np.linalg.norm(items, axis=1) == pytest.approx(1, abs=1e-5)
    judged = made.judged()
    positives = judged.items[judged.positive]
    assert len(judged.items) == JUDGED * 3_000 and len(positives) == 3_000
    near = (queries * items[positives]).sum(axis=1)
    assert near.mean() == pytest.approx(0.64, abs=0.02) and (near > 0.3).all()


def test_figures_are_refused_where_the_second_try_ended_elsewhere() -> None:
    found = {one.name: one.value for one in figures_of(passed("a", 0), 3.0, passed("a", 4, 3 * 2**30), 1.0, 5)}
    assert (found["memory"], found["resident"], found["recall"], found["parts_found"]) == (3.0, 6.0, 1.0, 4)
    with pytest.raises(RuntimeError, match="negatives a of a whole run, b of one that was killed"):
        figures_of(passed("a", 0), 3.0, passed("b", 4), 1.0, 5)
    with pytest.raises(RuntimeError, match="found nothing"):
        figures_of(passed("a", 0), 3.0, passed("a", 0), 1.0, 5)


def test_a_small_mining_finds_everything(tmp_path: Path) -> None:
    first = mine_here(tmp_path, 3_000, 60)
    assert first.parts_found == 0 and first.negatives > 400
    again = mine_here(tmp_path, 3_000, 60)
    assert (again.digest, again.parts_found) == (first.digest, 1)
    assert recall(tmp_path, 3_000, 60, 10) == 1.0


def test_memory_is_that_of_the_process() -> None:
    with MemoryPeak() as peak:
        before = peak.anonymous_bytes
        held = np.ones(256 * 2**20, dtype=np.uint8)
        peak._look()
    assert peak.resident_bytes > peak.anonymous_bytes >= before + 0.7 * len(held) > 0
