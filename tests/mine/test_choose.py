"""Negatives of a query, against loops over its best products."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.mine.config import MineConfig
from pipeline.mine.run import COUNTS, NONE, Candidates, JudgedItems, choose_negatives

ITEMS = 12


@st.composite
def cases(draw: st.DrawFn) -> tuple[Candidates, JudgedItems, MineConfig]:
    """Some queries with their best items, of which some are judged."""
    depth, queries = draw(st.integers(1, ITEMS)), draw(st.integers(0, 5))
    scores, items, offsets, judged, positive, best = [], [], [0], list[int](), list[bool](), []
    for _ in range(queries):
        found = draw(st.permutations(range(ITEMS)))[: draw(st.integers(0, depth))]
        items.append([*found, *[NONE] * (depth - len(found))])
        scores.append(sorted(draw(st.lists(st.integers(-8, 8), min_size=depth, max_size=depth)), reverse=True))
        mine = sorted(draw(st.sets(st.integers(0, ITEMS - 1), max_size=5)))
        judged += mine
        positive += [False] * len(mine)
        offsets.append(len(judged))
        best.append(draw(st.integers(-8, 8)))
    kept = draw(st.integers(1, depth))
    config = MineConfig(
        depth=depth,
        negatives_per_query=kept,
        relative_margin=draw(st.sampled_from([None, 0.1, 0.25])),
    )
    shape = (queries, depth)
    found_all = Candidates(
        np.array(scores, dtype=np.float64).reshape(shape) / 4,
        np.array(items, dtype=np.int64).reshape(shape),
        np.array(best, dtype=np.float64) / 4,
    )
    return (
        found_all,
        JudgedItems(np.array(offsets), np.array(judged, dtype=np.int64), np.array(positive, dtype=bool)),
        config,
    )


@given(cases())
def test_against_loops(case: tuple[Candidates, JudgedItems, MineConfig]) -> None:
    found, judged, config = case
    expected, counts = [], dict.fromkeys(COUNTS, 0)
    for query in range(len(found.items)):
        best = found.best_positive[query]
        ceiling = np.inf if config.relative_margin is None else best - config.relative_margin * abs(best)
        known = judged.items[judged.offsets[query] : judged.offsets[query + 1]].tolist()
        kept: list[int] = []
        for score, item in zip(found.scores[query], found.items[query].tolist(), strict=True):
            if item == NONE:
                continue
            if item in known:
                counts["judged"] += 1
                continue
            if score > ceiling:
                counts["above_margin"] += 1
            elif len(kept) < config.negatives_per_query:
                kept.append(item)
        nothing = all(item == NONE for item in found.items[query])
        for name, more in (("queries", 1), ("negatives", len(kept)), ("nothing_found", int(nothing))):
            counts[name] += more
        expected.append(kept + [NONE] * (config.negatives_per_query - len(kept)))
    negatives, seen = choose_negatives(found, judged, config)
    assert negatives.tolist() == expected
    assert seen == counts


def test_there_must_be_room_for_the_negatives() -> None:
    with pytest.raises(ValidationError, match="depth 7: expected at least negatives_per_query 8"):
        MineConfig(depth=7)
