"""The order of scoring: every row once, whatever the start, the batch and the number of ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evaluate.holdout import HoldoutOrder, Span, choose_rows, some_rows

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=4)


def order_of(sizes: list[int]) -> HoldoutOrder:
    return HoldoutOrder(tuple(np.arange(size, dtype=np.int64) * 3 for size in sizes))


def places(spans: list[Span]) -> list[tuple[int, int]]:
    return [(span.bucket, int(row)) for span in spans for row in span.rows]


@given(SIZES, st.integers(0, 200), st.integers(1, 50))
def test_going_on_anywhere_gives_the_rest(sizes: list[int], start: int, batch_rows: int) -> None:
    order = order_of(sizes)
    every = places(list(order.spans(0, 1)))
    assert len(every) == len(set(every)) == order.total
    spans = list(order.spans(start, batch_rows))
    assert places(spans) == every[start:]
    assert all(0 < len(span.rows) <= batch_rows for span in spans)


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 8))
def test_ranks_share_a_span(rows: int, world_size: int, batch_size: int) -> None:
    span = Span(0, np.arange(min(rows, world_size * batch_size), dtype=np.int64))
    shares = [span.rank_batch(rank, batch_size) for rank in range(world_size)]
    assert all(len(numbers) == batch_size for numbers, _ in shares)
    real = np.concatenate([numbers[:count] for numbers, count in shares])
    assert real.tolist() == span.rows.tolist()


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=3), st.integers(1, 60))
def test_a_limit_keeps_whole_queries(ids: list[list[int]], max_rows: int) -> None:
    buckets = [np.array(part, dtype=np.int64) for part in ids]
    order = choose_rows(buckets, max_rows)
    kept = [part[rows] for part, rows in zip(buckets, order.rows, strict=True)]
    every, chosen = np.concatenate(buckets), np.concatenate(kept)
    assert order.total <= max_rows or order.total == len(every) <= max_rows
    for query in np.unique(chosen):
        assert (chosen == query).sum() == (every == query).sum()
    if len(every) <= max_rows:
        assert order.total == len(every)


@given(SIZES, st.integers(1, 100))
def test_a_limit_takes_rows_evenly(sizes: list[int], limit: int) -> None:
    found = some_rows(sizes, limit)
    every = np.concatenate([rows + sum(sizes[:bucket]) for bucket, rows in enumerate(found.rows)])
    assert found.total <= limit and (found.total > 0) == (sum(sizes) > 0)
    assert len(np.unique(np.diff(every))) <= 1, "one stride over all buckets"
    if limit >= sum(sizes):
        assert every.tolist() == list(range(sum(sizes)))
