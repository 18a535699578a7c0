"""Global batches: complete, of one bucket, independent of who asks and when."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import (
    EMPTY,
    BatchPlan,
    Bucket,
    Groups,
    assign_buckets,
    check_buckets,
    deal_groups,
    fit_buckets,
    rank_among_equals,
    rank_slice,
    row_lengths,
)
from pipeline.core.errors import ConfigError, DataError


@pytest.mark.parametrize(
    ("text", "expected"), [("16x32", Bucket(16, 32)), ("24", Bucket(24, 24)), ("8X9", Bucket(8, 9))]
)
def test_parse(text: str, expected: Bucket) -> None:
    assert Bucket.parse(text) == expected
    assert Bucket.parse(expected.name) == expected


@pytest.mark.parametrize("text", ["", "x", "16x", "x16", "16x32x64", "-4x8", "4.5x8", "²x16", "a"])
def test_anything_else_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match="bucket"):
        Bucket.parse(text)


def test_buckets_are_ordered_unique_and_nested() -> None:
    assert [b.name for b in check_buckets([Bucket(16, 32), Bucket(8, 8), Bucket(16, 32)])] == ["8x8", "16x32"]
    with pytest.raises(ConfigError, match="8x32 and 16x16 are not nested"):
        check_buckets([Bucket(16, 16), Bucket(8, 32)])
    for bad in ([], [Bucket(2, 8)], [Bucket(8, 2)]):
        with pytest.raises(ConfigError, match="at least one bucket"):
            check_buckets(bad)


TEXT_LENGTHS = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=20)
SHAPES = st.lists(st.tuples(st.integers(3, 40), st.integers(3, 40)), min_size=1, max_size=4)


@given(TEXT_LENGTHS, SHAPES)
def test_assigned_is_the_first_that_fits(lengths: list[tuple[int, int]], steps: list[tuple[int, int]]) -> None:
    sides = np.cumsum(np.array(steps), axis=0)  # nested by construction
    buckets = check_buckets([Bucket(int(q), int(p)) for q, p in sides])
    query, product = np.array(lengths).T
    for q, p, chosen in zip(query, product, assign_buckets(query, product, buckets), strict=True):
        fitting = [i for i, b in enumerate(buckets) if q <= b.query_tokens and p <= b.product_tokens]
        assert chosen == (fitting[0] if fitting else len(buckets) - 1)


TEXTS = st.lists(st.tuples(st.integers(2, 400), st.integers(2, 400)), min_size=1, max_size=60)


def padded(query: Int64s, product: Int64s, buckets: list[Bucket], products: int) -> float:
    """Tokens with padding: of pairs, and ten times those of training rows, per product."""
    sizes = np.array([one.query_tokens + one.product_tokens for one in buckets])
    lengths = row_lengths(buckets, products)
    rows = [int(query[i]) + sum(int(product[i - shift]) for shift in range(products)) for i in range(len(query))]
    trained = sum(next((length for length in lengths if length >= row), lengths[-1]) for row in rows)
    return float(sizes[assign_buckets(query, product, buckets)].sum() + 10 * trained / products)


@given(TEXTS, st.integers(8, 300))
def test_fitted_buckets_are_few_nested_round_and_hold_the_texts(pairs: list[tuple[int, int]], longest: int) -> None:
    query, product = np.array(pairs).T
    found = fit_buckets(query, product, longest)
    limit = longest // 8 * 8
    assert 1 <= len(found) <= 3 and found == check_buckets(found)
    assert all(side % 8 == 0 and side <= limit for one in found for side in (one.query_tokens, one.product_tokens))
    assert len(row_lengths(found, 4)) <= 4
    for lengths, side in ((query, found[-1].query_tokens), (product, found[-1].product_tokens)):
        assert side == min(limit, -(-int(np.quantile(lengths, 0.995, method="higher")) // 8) * 8)
    if max(query.max(), product.max()) <= limit:
        assert np.mean((query > found[-1].query_tokens) | (product > found[-1].product_tokens)) <= 0.01


@pytest.mark.parametrize("kind", ["short queries", "titles", "two kinds"])
@pytest.mark.parametrize(("seed", "products"), [(1, 1), (2, 2), (3, 4)])
def test_fitted_buckets_are_as_good_as_any_others(kind: str, seed: int, products: int) -> None:
    draw = np.random.default_rng(seed)
    title = 3 + draw.poisson(9 if kind == "two kinds" else 16, 800)
    query = title[draw.permutation(800)] if kind == "titles" else 3 + draw.poisson(5, 800)
    product = np.where(draw.random(800) < 0.3, title + 20, title) if kind == "two kinds" else title
    found = list(fit_buckets(query, product, products=products))
    sides = [(8 * q, 8 * p) for q in range(1, 8) for p in range(1, 8)]
    inner = [Bucket(*one) for one in sides if one[0] <= found[-1].query_tokens and one[1] <= found[-1].product_tokens]
    pairs = [(a, b) for a in inner for b in inner if a <= b and a.product_tokens <= b.product_tokens]
    best = min(padded(query, product, [*check_buckets([a, b, found[-1]])], products) for a, b in pairs)
    assert padded(query, product, found, products) <= 1.08 * best
    assert padded(query, product, found, products) < 0.97 * padded(query, product, found[-1:], products)


def test_fitted_buckets_of_usual_texts() -> None:
    """Queries of 6 tokens with titles of 20, a twentieth of which have 40, and one in a thousand 100."""
    product = np.array(([20] * 19 + [40]) * 50)
    product[17] = 100
    assert [one.name for one in fit_buckets(np.full(1000, 6), product)] == ["8x32", "8x40"]
    assert [one.name for one in fit_buckets(product, product, 32)] == ["32x32"]
    assert [one.name for one in fit_buckets(np.full(9, 500), np.full(9, 500))] == ["128x128"], "the longest allowed"


def test_row_lengths_end_with_one_that_holds_all() -> None:
    buckets = (Bucket(16, 24), Bucket(32, 64))
    assert row_lengths(buckets, 4) == (72, 184, 288)
    assert row_lengths((Bucket(3, 3),), 1) == (6,)


ROWS = st.lists(st.tuples(st.integers(0, 6), st.booleans(), st.integers(1, 9)), max_size=60)
LENGTHS = (4, 12, 54)


def deal(rows: list[tuple[int, bool]], slots: int, seed: int = 1) -> list[list[int]]:
    query = np.array([query for query, _ in rows], dtype=np.int64)
    positive = np.array([good for _, good in rows], dtype=np.bool_)
    found: list[list[int]] = deal_groups(query, positive, slots=slots, seed=seed).tolist()
    return found


@settings(deadline=None, max_examples=200)
@given(ROWS, st.integers(1, 6))
def test_every_row_once_and_no_group_more_than_needed(rows: list[tuple[int, bool, int]], slots: int) -> None:
    groups = deal([row[:2] for row in rows], slots)
    seen: list[int] = []
    for member in groups:
        real = [row for row in member if row != EMPTY]
        assert len(member) == slots and real == member[: len(real)] and real
        assert len({rows[row][0] for row in real}) == 1
        seen += real
    assert sorted(seen) == list(range(len(rows)))
    sizes = [sum(row[0] == wanted for row in rows) for wanted in {row[0] for row in rows}]
    assert len(groups) == sum(-(-size // slots) for size in sizes)


@given(ROWS, st.integers(1, 6))
def test_a_group_lies_in_the_shortest_row_that_holds_it(rows: list[tuple[int, bool, int]], slots: int) -> None:
    members = deal_groups(*(np.array([row[i] for row in rows], dtype=kind) for i, kind in ((0, np.int64), (1, bool))),
                          slots=slots, seed=1)  # fmt: skip
    tokens = np.array([sum(rows[row][2] for row in member if row != EMPTY) for member in members.tolist()], np.int64)
    groups = Groups.from_members(members, tokens, LENGTHS)
    assert sum(groups.sizes) == len(members)
    for number, found in enumerate(groups.members):
        for member in found.tolist():
            size = sum(rows[row][2] for row in member if row != EMPTY)
            assert size <= LENGTHS[number] and (not number or size > LENGTHS[number - 1])


def test_a_group_that_no_row_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="55 tokens, but rows hold at most 54"):
        Groups.from_members(np.zeros((1, 2), dtype=np.int64), np.array([55]), LENGTHS)


@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 8), st.integers(0, 5))
def test_positives_are_spread_evenly(others: int, positives: int, slots: int, seed: int) -> None:
    members = np.array(deal([(3, False)] * others + [(3, True)] * positives, slots, seed))
    found, sizes = (members >= others).sum(axis=1), (members != EMPTY).sum(axis=1)
    assert np.abs(found - sizes * positives / (others + positives)).max() <= 1.001, found.tolist()
    assert {int((member != EMPTY).sum()) for member in members} <= {
        (others + positives) // len(members),
        -(-(others + positives) // len(members)),
    }


def test_the_seed_decides_who_stands_together() -> None:
    one, same, other = (deal([(1, False)] * 30, 4, seed) for seed in (1, 1, 2))
    assert one == same != other


@given(st.lists(st.integers(-3, 3), max_size=30))
def test_place_among_equals(keys: list[int]) -> None:
    place, count = rank_among_equals(np.array(keys, dtype=np.int64))
    assert place.tolist() == [keys[:index].count(key) for index, key in enumerate(keys)]
    assert count.tolist() == [keys.count(key) for key in keys]


def test_nothing_to_deal() -> None:
    none = np.zeros(0, dtype=np.int64)
    members = deal_groups(none, none.astype(np.bool_), slots=3, seed=1)
    groups = Groups.from_members(members, none, LENGTHS)
    assert members.shape == (0, 3) and groups.sizes == (0, 0, 0) and groups.fill == 1.0


POOLS = st.lists(st.integers(0, 60), min_size=1, max_size=4)
SEEDS = st.integers(0, 2**31)


def plan_of(pools: list[int], batch_size: int, seed: int, run: int = 1) -> BatchPlan | None:
    return BatchPlan(tuple(pools), batch_size, seed, run) if sum(pools) >= batch_size else None


@given(POOLS, st.integers(1, 17), SEEDS, st.integers(0, 3), st.integers(1, 9))
def test_an_epoch_uses_each_sample_at_most_once_and_leaves_out_less_than_a_batch(
    pools: list[int], batch_size: int, seed: int, epoch: int, run: int
) -> None:
    plan = plan_of(pools, batch_size, seed, run)
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


@given(st.lists(st.tuples(st.integers(0, 30), st.booleans()), min_size=40, max_size=200), st.integers(1, 3))
def test_an_epoch_is_a_pass_over_the_positives(rows: list[tuple[int, bool]], epoch: int) -> None:
    query, positive = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
    members = deal_groups(query, positive, slots=4, seed=1)
    plan = BatchPlan((len(members),), batch_size=4, seed=2)
    positions = range(epoch * plan.batches_per_epoch, (epoch + 1) * plan.batches_per_epoch)
    visited = members[np.concatenate([plan.batch(position).rows for position in positions])]
    rows_of = visited[visited != EMPTY]
    seen = rows_of[positive[rows_of]]
    assert len(seen) == len(np.unique(seen)), "each positive at most once"
    left_out = np.setdiff1d(np.flatnonzero(positive), seen)
    assert len(np.unique(np.flatnonzero(np.isin(members, left_out).any(axis=1)))) < 4, "but for less than a batch"


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


def test_neighbours_ride_together_and_other_ones_in_the_next_epoch() -> None:
    plan = BatchPlan((96,), 8, seed=2, run=4)
    epochs = []
    for epoch in range(2):
        batches = [plan.batch(epoch * 12 + number).rows.reshape(2, 4) for number in range(12)]
        assert all(((part - part[:, :1]) % 96 == np.arange(4)).all() for part in batches)
        epochs.append({int(first) % 4 for part in batches for first in part[:, 0]})
    assert [len(starts) for starts in epochs] == [1, 1] and epochs[0] != epochs[1]


def test_too_few_samples_for_one_batch_are_refused() -> None:
    with pytest.raises(DataError, match=r"7 groups do not fill a global batch of 8"):
        BatchPlan((3, 4), 8, seed=0)
    assert BatchPlan((3, 5), 8, seed=0).batches_by_bucket == (0, 1)


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
