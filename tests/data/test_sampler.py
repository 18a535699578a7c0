"""What a run trains on: all new rows, and a chosen share of old ones."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.data.sampler import TrainingPools
from tests.train.rows import make_rows


def ids_of(pools: TrainingPools) -> list[list[int]]:
    """Sample ids of every bucket, in pool order."""
    return [
        pools.read(np.full(size, pool), np.arange(size), 1)["sample_id"].tolist() if size else []
        for pool, size in enumerate(pools.sizes)
    ]


def test_new_rows_first_then_a_share_of_the_old(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(30, 10), (6, 14)]), make_rows(tmp_path, [(100, 200)], first_id=1001)
    pools = TrainingPools.build(new, old, replay_share=0.25, seed=1)
    assert pools.replay_sizes == (7, 13)  # 60 new are three quarters of 80
    assert sum(pools.replay_sizes) / sum(pools.sizes) == pytest.approx(0.25)
    ids = ids_of(pools)
    assert [len(set(bucket)) for bucket in ids] == [43, 37]
    for bucket, own in zip(ids, (36, 24), strict=True):
        assert all(i < 1000 for i in bucket[:own]) and all(i > 1000 for i in bucket[own:])


def test_order_asked_for_is_kept_across_new_and_old(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(5, 5)]), make_rows(tmp_path, [(9, 9)], first_id=1001)
    pools = TrainingPools.build(new, old, replay_share=0.4, seed=1)
    asked = [(1, 6), (0, 0), (0, 7), (1, 1), (0, 5), (1, 7)]
    kinds, rows = (np.array(values) for values in zip(*asked, strict=True))
    together = pools.read(kinds, rows, 1)
    for place, (pool, row) in enumerate(asked):
        alone = pools.read(np.array([pool]), np.array([row]), 1)
        for name, values in together.items():
            np.testing.assert_array_equal(values[place], alone[name][0])


def test_the_choice_is_a_function_of_the_seed(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(20, 20)]), make_rows(tmp_path, [(90, 90)], first_id=1001)
    one, same, other = (ids_of(TrainingPools.build(new, old, 0.3, seed)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_fewer_old_rows_than_wanted_are_all_taken(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(40, 40)]), make_rows(tmp_path, [(3, 2)], first_id=1001)
    pools = TrainingPools.build(new, old, replay_share=0.9, seed=1)
    assert pools.replay_sizes == (3, 2)
    assert sorted(i for bucket in ids_of(pools) for i in bucket if i > 1000) == [1001, 1002, 1003, 1004, 1005]


def test_no_replay(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(4, 4)]), make_rows(tmp_path, [(3, 2)], first_id=1001)
    for pools in (TrainingPools.build(new, old, 0.0, 1), TrainingPools.build(new, None, 0.5, 1)):
        assert pools.sizes == (4, 4)
        assert ids_of(pools) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    nothing_old = TrainingPools.build(new, make_rows(tmp_path, [(0, 0)], first_id=9), 0.5, 1)
    assert nothing_old.sizes == (4, 4)
