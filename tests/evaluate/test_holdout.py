"""Figures of a holdout: right, complete, and the same however ranks share the rows."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.backends.cpu import CpuBackend
from pipeline.core.errors import DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.evaluate.score import HoldoutFigures, evaluate_holdout, figures
from pipeline.model.relevance import RelevanceOutputs
from pipeline.parallel.process_group import ProcessGroup
from tests.evaluate.process_groups import alone, on_ranks
from tests.train.rows import every_row, make_rows

GAINS = (0.0, 1.0)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> TokenRows:
    return make_rows(tmp_path_factory.mktemp("holdout"), [(13, 6), (0, 9)])


def score(batch: Mapping[str, Tensor]) -> RelevanceOutputs:
    """A pure function of the row: some right, some wrong. Embeddings are of the first two words."""
    guess = torch.sin(batch["query"][:, 1].float() * 3 + batch["product"][:, 2].float())
    query, product = (torch.cos(batch[side][:, 1:3].float()) + 0.01 for side in ("query", "product"))
    return RelevanceOutputs(torch.stack([-guess, guess], dim=1), query, product)


def evaluate(
    rows: TokenRows,
    process_group: ProcessGroup | None = None,
    *,
    batch_size: int = 4,
    stop: StopSignal | None = None,
    searching: bool = True,
) -> HoldoutFigures:
    return evaluate_holdout(
        score,
        CpuBackend(),
        rows,
        label_gains=GAINS,
        batch_size=batch_size,
        limit=1000,
        process_group=process_group or alone(),
        stop=stop or StopSignal(),
        search_pad_id=rows.pad_id if searching else None,
    )


def test_retrieval_against_a_search_written_out(rows: TokenRows) -> None:
    joined = every_row(rows)
    found = score({name: torch.from_numpy(joined[name]) for name in ("query", "product")})
    texts = [tuple(row) for row in joined["product"].tolist()]
    vectors = dict(zip(texts, torch.nn.functional.normalize(found.product).tolist(), strict=True))
    values = []
    for query_id in sorted(set(joined["query_id"].tolist())):
        own = np.flatnonzero(joined["query_id"] == query_id)
        gains: dict[tuple[int, ...], float] = {}
        for row in own:
            gains[texts[row]] = max(gains.get(texts[row], 0.0), float(joined["gain"][row]))
        if not any(gains.values()):
            continue
        asks = found.query[own[0]]
        ranked = sorted(vectors, key=lambda text: -float(torch.dot(asks, torch.tensor(vectors[text]))))[:10]
        ideal = sorted(gains.values(), reverse=True)[:10]
        dcg, best = (
            sum(gain / math.log2(rank + 2) for rank, gain in enumerate(part))
            for part in ([gains.get(text, 0.0) for text in ranked], ideal)
        )
        values.append(dcg / best)
    seen = evaluate(rows)
    assert seen.retrieval_ndcg == pytest.approx(np.mean(values))
    assert seen.combined == pytest.approx((seen.macro_f1 + np.mean(values)) / 2)
    assert evaluate(rows, searching=False).retrieval_ndcg is None


@pytest.mark.parametrize("world_size", [2, 3, 40])
def test_ranks_and_batch_sizes_do_not_change_the_figures(rows: TokenRows, world_size: int) -> None:
    assert set(on_ranks(world_size, lambda process_group: evaluate(rows, process_group, batch_size=5))) == {
        evaluate(rows)
    }


def test_an_empty_holdout_and_a_stop_end_it(rows: TokenRows, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the valid split is empty"):
        evaluate(make_rows(tmp_path, [(0, 0)]))
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="evaluating the holdout"):
        evaluate(rows, stop=stop)


def joined_of(label: list[int], gain: list[float], query: list[int]) -> dict[str, Any]:
    size = len(label)
    return {
        "logits": np.stack([np.zeros(size), np.linspace(-1, 1, size)], axis=1).astype(np.float32),
        "label": np.array(label, dtype=np.int16),
        "gain": np.array(gain, dtype=np.float32),
        "query_id": np.array(query, dtype=np.int64),
    }


def test_unlabelled_rows_count_for_ranking_only() -> None:
    seen = figures(joined_of([-1, 0, 1], [1.0, 0.0, 0.0], [1, 1, 1]), GAINS)
    assert seen.rows == 3 and seen.accuracy == 1.0
    assert seen.ndcg == pytest.approx(1 / math.log2(4))


def test_without_any_label_there_is_nothing_to_score() -> None:
    with pytest.raises(DataError, match="no labelled rows"):
        figures(joined_of([-1, -1], [1.0, 0.0], [1, 1]), GAINS)


@pytest.mark.parametrize(
    ("side", "value", "gain", "ndcg"),
    [
        ("query", 1.0, 1.0, 1.0),
        ("query", math.nan, 1.0, None),
        ("product", math.nan, 1.0, None),
        ("product", math.inf, 1.0, None),
        ("query", 1.0, 0.0, None),
    ],
)
def test_retrieval_is_unknown_without_gains_or_finite_vectors(
    side: str, value: float, gain: float, ndcg: float | None
) -> None:
    vectors = {"query": np.ones((2, 2), np.float32), "product": np.array([[-1, 0], [1, 1]], np.float32)}
    vectors[side][1, 0] = value
    joined = joined_of([0, 1], [0.0, gain], [1, 2]) | vectors | {"text": np.array([5, 6])}
    seen = figures(joined, GAINS)
    assert seen.retrieval_ndcg == ndcg
    assert seen.combined == (None if ndcg is None else (seen.macro_f1 + ndcg) / 2)
