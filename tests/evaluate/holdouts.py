"""Small holdouts for tests of metrics and the gate: anything that may occur, ties and gaps more often than not."""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from pipeline.core.arrays import Float64s
from pipeline.data.shards import TokenRows
from pipeline.data.token_sets import Split, TokenSet
from pipeline.evaluate.holdout import Holdout, HoldoutOrder
from pipeline.evaluate.metrics.scored_rows import ScoredRows
from tests.train.rows import token_set_info

GAINS = {1: (0.5,), 2: (0.0, 1.0), 3: (0.0, 0.25, 1.0), 4: (0.0, 0.01, 0.1, 1.0)}
"""By the number of labels."""
LABELS = ("irrelevant", "complement", "substitute", "exact")


def holdout(
    query: Sequence[int], label: Sequence[int], weights: Sequence[Sequence[float]], gain: Sequence[float] | None = None
) -> ScoredRows:
    """Rows from weights [N, K] that become probabilities; gains are those of the labels unless given."""
    table: Float64s = np.array(weights, dtype=np.float64).reshape(len(query), -1)
    num_labels = table.shape[1]
    gains = GAINS[num_labels]
    labels = np.array(label, dtype=np.int64)
    by_label = np.where(labels >= 0, np.array(gains)[labels], 0.0)
    return ScoredRows(
        np.array(query, dtype=np.int64),
        labels,
        by_label if gain is None else np.array(gain, dtype=np.float64),
        table / table.sum(axis=1, keepdims=True),
        LABELS[-num_labels:],
        gains,
    )


@st.composite
def holdouts(draw: st.DrawFn, num_labels: int | None = None, max_rows: int = 30) -> ScoredRows:
    """Few queries with interleaved rows, few different scores (or many), rows without a label, gains of their own."""
    classes = draw(st.integers(2, 4)) if num_labels is None else num_labels
    rows = draw(st.integers(1, max_rows))
    query = draw(st.lists(st.integers(-2, 4), min_size=rows, max_size=rows))
    least = draw(st.sampled_from([-1, 0]))
    label = draw(st.lists(st.integers(least, draw(st.integers(0, classes - 1))), min_size=rows, max_size=rows))
    coarse = st.integers(1, 3).map(float)
    weight = draw(st.sampled_from([coarse, st.floats(1e-3, 1.0), st.sampled_from([1e-12, 1.0])]))
    one = st.lists(weight, min_size=classes, max_size=classes)
    weights = draw(st.lists(one, min_size=rows, max_size=rows))
    gain = draw(st.none() | st.lists(st.sampled_from([0.0, 0.1, 0.7, 1.0]), min_size=rows, max_size=rows))
    return holdout(query, label, weights, gain)


def holdout_of(rows: TokenRows, split: Split = "test") -> Holdout:
    """All rows of one partition."""
    order = HoldoutOrder(tuple(map(np.arange, rows.sizes)))
    return Holdout(split, [TokenSet("tokens/x", token_set_info("flat"))], rows, order, 0)
