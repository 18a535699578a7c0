"""The made-up rows of a trial: groups for rows of every length, or one clear error."""

from typing import Any, cast

import pytest

from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError
from pipeline.data.training_groups import GroupedRows
from pipeline.settings import Settings
from pipeline.train.config import TrainConfig, rows_of_batch
from pipeline.train.trial import STEPS_PER_BUCKET, Trial
from tests.train.rows import SPEC

nothing = cast(Any, None)


def groups(train: TrainConfig, *buckets: str) -> GroupedRows:
    shapes = tuple(map(Bucket.parse, buckets))
    return Trial(Settings(train=train), SPEC, shapes, nothing, nothing, nothing, nothing, nothing)._groups()


@pytest.mark.parametrize("products", [(1, 0), (4, 0), (8, 2), (12, 5), (16, 7), (20, 3), (28, 3), (48, 16)])
@pytest.mark.parametrize("buckets", [("16x48", "32x96"), ("16x40",), ("16x32",), ("8x64", "16x64", "16x128")])
def test_there_are_batches_of_every_length(products: tuple[int, int], buckets: tuple[str, ...]) -> None:
    slots, mined = products
    batch = slots * 8
    train = TrainConfig(
        candidates_per_query=slots, mined_per_query=mined, global_batch_size=batch, micro_batch_size=batch
    )
    assert groups(train, *buckets).sizes == (8 * STEPS_PER_BUCKET,) * len(
        rows_of_batch(train, [Bucket.parse(one) for one in buckets])
    )


def test_lengths_that_no_group_of_equal_products_tells_apart_are_one_error() -> None:
    train = TrainConfig(candidates_per_query=64)
    with pytest.raises(ConfigError, match=r"rows of 4\d\d tokens cannot be filled by a query and 64 products"):
        groups(train, "4x10", "4x11")
