"""Global batches: complete, of one bucket, independent of who asks and when."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.batching import BatchPlan, rank_slice
from pipeline.core.errors import DataError

POOLS = st.lists(st.integers(0, 60), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**31)


def plan_of(pools: list[int], batch_size: int, seed: int) -> BatchPlan | None:
    return BatchPlan(tuple(pools), batch_size, seed) if sum(pools) >= batch_size else None


@settings(deadline=None, max_examples=60)
@given(POOLS, st.integers(1, 17), SEEDS, st.integers(0, 3))
def test_an_epoch_uses_each_sample_at_most_once_and_leaves_out_less_than_a_batch(
    pools: list[int], batch_size: int, seed: int, epoch: int
) -> None:
    plan = plan_of(pools, batch_size, seed)
    if plan is None:
        return
    first = epoch * plan.batches_per_epoch
    seen: Counter[tuple[int, int]] = Counter()
    buckets: Counter[int] = Counter()
    for position in range(first, first + plan.batches_per_epoch):
        batch = plan.batch(position)
        assert batch.pools.shape == batch.rows.shape == (batch_size,)
        assert (batch.pools <= batch.bucket).all()  # a sample fits a larger bucket, never a smaller one
        assert (batch.rows >= 0).all() and (batch.rows < np.array(pools)[batch.pools]).all()
        seen.update(zip(batch.pools.tolist(), batch.rows.tolist(), strict=True))
        buckets[batch.bucket] += 1
    assert max(seen.values()) == 1
    assert sum(pools) - len(seen) < batch_size
    assert [buckets[i] for i in range(len(pools))] == list(plan.batches_by_bucket)


@settings(deadline=None, max_examples=60)
@given(POOLS, st.integers(1, 17), SEEDS)
def test_rows_leave_their_bucket_only_when_left_over(pools: list[int], batch_size: int, seed: int) -> None:
    plan = plan_of(pools, batch_size, seed)
    if plan is None:
        return
    batches = [plan.batch(position) for position in range(plan.batches_per_epoch)]
    for bucket in range(len(pools)):
        borrowed = sum(int((b.pools < bucket).sum()) for b in batches if b.bucket == bucket)
        assert borrowed < batch_size


def test_epochs_differ_in_samples_and_in_order() -> None:
    plan = BatchPlan((50, 50), 10, seed=1)
    epochs = [[plan.batch(epoch * 10 + i) for i in range(10)] for epoch in range(2)]
    assert [b.bucket for b in epochs[0]] != [b.bucket for b in epochs[1]]
    assert epochs[0][0].rows.tolist() != epochs[1][0].rows.tolist()
    other_seed = BatchPlan((50, 50), 10, seed=2)
    assert any(other_seed.batch(i).rows.tolist() != plan.batch(i).rows.tolist() for i in range(10))


def test_the_plan_never_changes() -> None:
    plan = BatchPlan((10, 7, 5), 4, seed=3)
    seen = [(b.bucket, b.pools.tolist(), b.rows.tolist()) for b in map(plan.batch, (0, 1, 3, 7))]
    assert seen == [
        (1, [0, 1, 0, 1], [2, 5, 1, 3]),
        (0, [0, 0, 0, 0], [6, 5, 3, 9]),
        (2, [2, 2, 2, 2], [2, 1, 4, 0]),
        (1, [1, 0, 1, 1], [5, 6, 0, 4]),
    ]


def test_a_position_far_out_in_a_huge_data_set_needs_no_walk() -> None:
    plan = BatchPlan((700_000_000, 300_000_000), 1024, seed=1)
    batch = plan.batch(50 * plan.batches_per_epoch - 1)
    assert len({*zip(batch.pools.tolist(), batch.rows.tolist(), strict=True)}) == 1024


def test_too_few_samples_for_one_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"7 training samples for a global batch of 8"):
        BatchPlan((3, 4), 8, seed=0)
    assert BatchPlan((3, 5), 8, seed=0).batches_by_bucket == (0, 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_slices_of_ranks_and_micro_steps_tile_the_batch(world_size: int, accumulation: int, micro: int) -> None:
    batch_size = world_size * accumulation * micro
    places = [
        index
        for rank in range(world_size)
        for micro_step in range(accumulation)
        for index in range(batch_size)[rank_slice(batch_size, world_size, rank, accumulation, micro_step)]
    ]
    assert places == list(range(batch_size))
