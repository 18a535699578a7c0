"""What a teacher computed reaches the slots of a batch: numbering over partitions, mined products, nothing missing."""

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.batch_order import RankSlice
from pipeline.data.loader import training_batches
from pipeline.data.taught import TAUGHT, TaughtPartition, TaughtRows
from pipeline.data.training_groups import NONE, GroupedRows, MinedProducts, TrainingPools
from tests.train.rows import PAD, every_row, make_rows, mined_from, plan_of

WIDTH = 3


def vector(side: str, sample_id: int) -> list[float]:
    return [sample_id + (0.5 if side == "query" else 0.0), 1.0, 0.0]


def taught_by_id(rows_of: list[tuple[int, ...]], ids: list[list[int]], width: int = WIDTH) -> TaughtRows:
    """Scores or vectors say which row they belong to. `ids` are the sample ids of each partition, in its order."""
    parts = []
    for sizes, own in zip(rows_of, ids, strict=True):
        vectors = [vector(side, one) for side in ("query", "product") for one in own]
        index = np.arange(len(own), dtype=np.int32)
        scored = TaughtPartition(sizes, np.array(own, dtype=np.float32))
        with_vectors = TaughtPartition(sizes, None, index, index + len(own), np.array(vectors, dtype=np.float16))
        parts.append(with_vectors if width else scored)
    return TaughtRows(parts, width)


@pytest.fixture(params=[0, WIDTH])
def taught(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[GroupedRows, TaughtRows]:
    """Two partitions of two buckets each, read as one source."""
    rows = make_rows(tmp_path, [(5, 7), (6, 3)])
    own = [[*range(1, 13)], [*range(13, 22)]]
    both = taught_by_id([(5, 7), (6, 3)], own, request.param)
    mined = mined_from(rows, 2)
    score = np.where(mined.product == NONE, np.nan, 1000.0 + mined.product).astype(np.float32)
    mined = MinedProducts(rows, PAD, mined.query_id, mined.product, 2, 1, both, score)
    groups = GroupedRows.build(rows, slots=3, lengths=(80,), positive_gain=0.99, seed=1, mined=mined, taught=both)
    return groups, both


def test_rows_are_numbered_over_partitions_like_those_of_the_shards(tmp_path: Path) -> None:
    rows = make_rows(tmp_path, [(5, 7), (6, 3)])
    own = [[*range(1, 13)], [*range(13, 22)]]
    both, scored = (taught_by_id([(5, 7), (6, 3)], own, width) for width in (WIDTH, 0))
    numbers = np.arange(21)[::-1].copy()
    ids = every_row(rows)["sample_id"][numbers]
    assert scored.scores(numbers).tolist() == ids.tolist()
    for side in ("query", "product"):
        assert both.vectors(side, numbers).tolist() == [vector(side, int(one)) for one in ids]


def test_every_slot_has_what_belongs_to_its_row(taught: tuple[GroupedRows, TaughtRows]) -> None:
    groups, both = taught
    size = groups.sizes[0]
    arrays = groups.read(np.zeros(size, dtype=np.int64), np.arange(size), 0, epoch=2)
    rows = every_row(groups.source)  # type: ignore[arg-type]
    is_row, is_mined = arrays["is_row"], arrays["is_mined"]
    by_slot = np.repeat(arrays["query_key"], len(is_row) // size)
    assert is_mined.any() and not is_row.all()
    if not both.width:
        score, mask = arrays["teacher_score"], arrays["teacher_mask"]
        assert (score[is_row] == arrays["sample_id"][is_row]).all()
        assert (mask == (is_row | is_mined)).all() and not score[mask == 0].any()
        numbers = (score[is_mined] - 1000).astype(int)  # the rows of the mined products
        assert not (rows["query_id"][numbers] == by_slot[is_mined]).any()
        return
    query, product = arrays["teacher_query"], arrays["teacher_product"]
    assert (product[is_row, 0] == arrays["sample_id"][is_row]).all() and not product[~is_row & ~is_mined].any()
    mined_query = dict(zip(rows["sample_id"].tolist(), rows["query_id"].tolist(), strict=True))
    asked = by_slot[is_mined].tolist()
    assert all(mined_query[int(one)] != of for one, of in zip(product[is_mined, 0], asked, strict=True))
    own_query = (query[:, 0] - 0.5).astype(int) // 4  # as the rows are made
    assert (own_query == arrays["query_key"]).all() and both.width == query.shape[1]


def test_a_batch_has_no_nan_and_its_arrays_have_a_row_per_slot(taught: tuple[GroupedRows, TaughtRows]) -> None:
    groups, both = taught
    for batch in training_batches(groups, plan_of(groups), RankSlice(0, 1, 1), 0, 1):
        slots, queries = len(batch.tensors["label"]), len(batch.tensors["query_key"])
        shapes = {name: tuple(batch.tensors[name].shape) for name in TAUGHT if name in batch.tensors}
        vectors, scores = {"teacher_query": (queries, WIDTH), "teacher_product": (slots, WIDTH)}, (slots,)
        assert shapes == (vectors if both.width else {"teacher_score": scores, "teacher_mask": scores})
        assert all(bool(batch.tensors[name].isfinite().all()) for name in shapes)


def test_replayed_groups_have_what_belongs_to_the_old_rows(tmp_path: Path) -> None:
    new, old = make_rows(tmp_path, [(8, 0)]), make_rows(tmp_path, [(8, 8)], first_id=101)
    sides = taught_by_id([(8, 0)], [[*range(1, 9)]]), taught_by_id([(8, 8)], [[*range(101, 117)]])
    pools = TrainingPools.build(new, old, 0.5, 1, slots=4, lengths=(80,), positive_gain=0.99, taught=sides)
    size = pools.sizes[0]
    arrays = pools.read(np.zeros(size, dtype=np.int64), np.arange(size), 0)
    is_row = arrays["is_row"]
    assert {*(arrays["sample_id"][is_row] > 100)} == {True, False}
    assert (arrays["teacher_product"][is_row, 0] == arrays["sample_id"][is_row]).all()
