"""Mining in pieces: equal to a search of everything at once, whoever does which piece, and after any stop."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import NumericError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.mine.config import MineConfig
from pipeline.mine.run import (
    COUNTS,
    NONE,
    ArrayParts,
    Candidates,
    JudgedItems,
    choose_negatives,
    mine_worker_slice,
    open_parts,
    read_negatives,
    vector_search,
    word_search,
)
from pipeline.retrieval.search import exact_scores

QUERIES, ITEMS, WIDTH = 23, 130, 8
PER_PART = 6
CONFIG = MineConfig(negatives_per_query=4, depth=20, relative_margin=0.1)


def unit(values: npt.NDArray[np.float64]) -> Float32s:
    return np.asarray(values / np.linalg.norm(values, axis=1, keepdims=True), dtype=np.float32)


NOISE = np.random.default_rng(1)
ITEM_VECTORS = unit(NOISE.normal(size=(ITEMS, WIDTH)))
QUERY_VECTORS = unit(ITEM_VECTORS[50 : 50 + QUERIES] + 0.3 * NOISE.normal(size=(QUERIES, WIDTH)))
"""Near their positives."""


@dataclass
class Vectors:
    """Made-up vectors; what was asked for, and something to do when it is."""

    asked: list[tuple[str, int]] = field(default_factory=list)
    told: Callable[[str, int], None] = lambda kind, start: None
    of_items: Float32s = field(default_factory=lambda: ITEM_VECTORS)

    def items(self, start: int, stop: int) -> Float32s:
        return self._part("items", self.of_items, start, stop)

    def queries(self, start: int, stop: int) -> Float32s:
        return self._part("queries", QUERY_VECTORS, start, stop)

    def _part(self, kind: str, vectors: Float32s, start: int, stop: int) -> Float32s:
        self.asked.append((kind, start))
        self.told(kind, start)
        return vectors[start:stop]


def judged() -> JudgedItems:
    """Query q has judged items q, 2 q, 3 q and 50 + q, of which 2 q and 50 + q are positives."""
    items = [sorted({q, 2 * q, 3 * q, 50 + q}) for q in range(QUERIES)]
    flat = np.array([item for row in items for item in row])
    positive = np.array([item in (2 * q, 50 + q) for q, row in enumerate(items) for item in row])
    return JudgedItems(np.concatenate([[0], np.cumsum([len(row) for row in items])]), flat, positive)


def all_at_once() -> tuple[Int64s, dict[str, int]]:
    """By a sort of all scores."""
    known = judged()
    pairs = np.repeat(QUERY_VECTORS, ITEMS, axis=0), np.tile(ITEM_VECTORS, (QUERIES, 1))
    scores = exact_scores(*pairs).reshape(QUERIES, ITEMS)
    order = np.argsort(-scores, axis=1, kind="stable")[:, : CONFIG.depth]
    best = [scores[q, known.items[(known.query == q) & known.positive]].max() for q in range(QUERIES)]
    return choose_negatives(Candidates(np.take_along_axis(scores, order, 1), order, np.array(best)), known, CONFIG)


def parts_of(folder: Path) -> tuple[ArrayParts, ArrayParts]:
    """Vectors, 50 items in a part, and negatives, 6 queries in a part."""
    storage = open_storage(str(folder / "workspace"))
    vectors, negatives = open_parts(storage, "cycles/c/mine/x", folder / "cache", (ITEMS, QUERIES), PER_PART)
    return replace(vectors, rows_per_part=50), negatives


def run(
    folder: Path, vectors: Vectors, worker: int = 0, workers: int = 1, stop: StopSignal | None = None
) -> tuple[int, tuple[ArrayParts, ArrayParts]]:
    """(missing, pieces): items are committed as ten times their number."""
    stop = stop or StopSignal()
    parts = parts_of(folder)
    known = judged()
    missing = mine_worker_slice(
        parts[1],
        lambda: vector_search(parts[0], vectors.items, vectors.queries, CONFIG.depth, stop, worker, workers),
        known,
        lambda items: np.where(items == NONE, NONE, 10 * items),
        CONFIG,
        worker=worker,
        workers=workers,
        stop=stop,
    )
    return missing, parts


def check_whole(parts: tuple[ArrayParts, ArrayParts]) -> None:
    negatives, counts = all_at_once()
    found, seen = read_negatives(parts[1], CONFIG.negatives_per_query)
    np.testing.assert_array_equal(found, np.where(negatives == NONE, NONE, 10 * negatives))
    assert seen == counts and seen["negatives"] > QUERIES


def test_one_worker_finds_what_a_sort_of_everything_finds(tmp_path: Path) -> None:
    vectors = Vectors()
    missing, parts = run(tmp_path, vectors)
    assert missing == 0
    check_whole(parts)
    assert vectors.asked == [("items", 0), ("items", 50), ("items", 100), *(("queries", q) for q in (0, 6, 12, 18))]
    again = Vectors()
    assert run(tmp_path, again)[0] == 0 and again.asked == []


def test_vectors_another_worker_makes_meanwhile_are_used(tmp_path: Path) -> None:
    other, _ = parts_of(tmp_path)

    def meanwhile(kind: str, start: int) -> None:
        if (kind, start) == ("items", 0):
            other.commit(1, ITEM_VECTORS[50:100])

    vectors = Vectors(told=meanwhile)
    run(tmp_path, vectors, 0, 3)
    assert [start for kind, start in vectors.asked if kind == "items"] == [0, 100]


@pytest.mark.parametrize("at", [("items", 50), ("queries", 0), ("queries", 12)])
def test_a_stop_anywhere_goes_on_to_the_same_negatives(tmp_path: Path, at: tuple[str, int]) -> None:
    stop = StopSignal()
    vectors = Vectors(told=lambda kind, start: stop.set("SIGTERM") if (kind, start) == at else None)
    with pytest.raises(Preempted, match="finished parts are kept"):
        run(tmp_path, vectors, stop=stop)
    rest = Vectors()
    missing, parts = run(tmp_path, rest)
    assert missing == 0
    check_whole(parts)
    assert not set(rest.asked) & set(vectors.asked[: vectors.asked.index(at)])


def test_vectors_of_a_faulty_device_are_not_kept(tmp_path: Path) -> None:
    faulty = Vectors(of_items=np.full_like(ITEM_VECTORS, np.nan))
    with pytest.raises(NumericError, match="products 0 to 49") as caught:
        run(tmp_path, faulty)
    assert caught.value.next_command.startswith("trnpipe mine")
    missing, parts = run(tmp_path, Vectors())
    assert missing == 0
    check_whole(parts)


def test_bm25_ranks_by_shared_words() -> None:
    items = ["red shoe size 9", "blue shoe", "red hat", "green scarf", "shoe"]
    queries = ["red shoe", "scarf", "nothing of it"]
    search = word_search(items, lambda start, stop: queries[start:stop], 3, StopSignal())
    known = JudgedItems(np.array([0, 2, 3, 4]), np.array([2, 4, 1, 0]), np.array([True, True, True, False]))
    found = search(0, 3, known)
    assert found.items[0, 0] == 0 and set(found.items[0].tolist()) < {0, 1, 2, 4}
    assert found.items[1:].tolist() == [[3, NONE, NONE], [NONE] * 3]
    of_items = dict(zip(found.items[0].tolist(), found.scores[0], strict=True))
    assert found.best_positive[0] == max(of_items.get(2, 0.0), of_items.get(4, 0.0)) > 0
    assert (found.best_positive[1:] > 1e300).all()
    assert choose_negatives(found, known, CONFIG)[0][1].tolist()[0] == 3, "no positive shares a word with 'scarf'"
    assert search(1, 2, known.part(1, 2)).items.tolist() == [[3, NONE, NONE]]


# The negatives of a query, against loops over its best products.


@given(st.integers(0, 2**32 - 1), st.sampled_from([None, 0.1, 0.25]))
def test_against_loops(seed: int, margin: float | None) -> None:
    rng = np.random.default_rng(seed)
    queries, depth = int(rng.integers(0, 6)), int(rng.integers(1, 13))
    items = np.array([rng.permutation(12)[:depth] for _ in range(queries)], dtype=np.int64).reshape(queries, depth)
    items[np.arange(depth) >= rng.integers(0, depth + 1, (queries, 1))] = NONE
    scores, best = -np.sort(-rng.integers(-8, 9, (queries, depth)) / 4), rng.integers(-8, 9, queries) / 4
    known = [sorted(rng.permutation(12)[: rng.integers(0, 6)].tolist()) for _ in range(queries)]
    flat = np.array([item for row in known for item in row], dtype=np.int64)
    judged = JudgedItems(np.cumsum([0, *map(len, known)]), flat, np.zeros(len(flat), dtype=bool))
    config = MineConfig(depth=depth, negatives_per_query=int(rng.integers(1, depth + 1)), relative_margin=margin)
    expected, counts = [], dict.fromkeys(COUNTS, 0)
    for query in range(queries):
        ceiling = np.inf if margin is None else best[query] - margin * abs(best[query])
        real = [pair for pair in zip(scores[query], items[query].tolist(), strict=True) if pair[1] != NONE]
        unjudged = [pair for pair in real if pair[1] not in known[query]]
        kept = [item for score, item in unjudged if score <= ceiling]
        counts["judged"] += len(real) - len(unjudged)
        counts["above_margin"] += len(unjudged) - len(kept)
        kept = kept[: config.negatives_per_query]
        for name, more in (("queries", 1), ("negatives", len(kept)), ("nothing_found", int(not real))):
            counts[name] += more
        expected.append(kept + [NONE] * (config.negatives_per_query - len(kept)))
    negatives, seen = choose_negatives(Candidates(scores, items, best), judged, config)
    assert negatives.tolist() == expected
    assert seen == counts


def test_there_must_be_room_for_the_negatives() -> None:
    with pytest.raises(ValidationError, match="depth 7: expected at least negatives_per_query 8"):
        MineConfig(depth=7)
