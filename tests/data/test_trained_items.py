"""Which side of a row was trained on: by id, by text, and by a text that stood on the other side."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.data.shards import NO_ID, Arrays, TokenRows
from pipeline.data.trained_items import FIELDS, PARTS, Keys, TrainedItems
from tests.train.rows import BUCKETS, PAD, write_shard

Row = tuple[int, int, int, int]
"""The query id, the token of the query, the product id, and the token of the product."""


def block(rows: list[Row], width: int = 5) -> Arrays:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    texts = [np.pad(tokens[:, None] * [0, 1, 0] + [1, 0, 2], ((0, 0), (0, width - 3))) for tokens in columns[1::2]]
    return {
        "query_id": columns[0],
        "query": texts[0].astype(np.int32),
        "product_id": columns[2],
        "product": texts[1].astype(np.int32),
        "sample_id": np.arange(len(rows)),
    }


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ((1, 30, 501, 50), "both"),
        ((9, 30, 599, 50), "both"),  # by text
        ((1, 39, 501, 59), "both"),  # by id
        ((1, 39, 599, 59), "query"),
        ((9, 39, 501, 59), "product"),
        ((9, 39, 599, 59), "neither"),
        ((9, 50, 599, 59), "query"),  # a text that was a product
        ((9, 39, 599, 31), "product"),  # a text that was a query
        ((501, 39, 1, 59), "neither"),  # ids of the other side say nothing
        ((9, 39, NO_ID, 50), "product"),
        ((9, 39, NO_ID, 59), "neither"),  # though rows without an id were trained on
    ],
)
def test_the_part_of_a_row(row: Row, part: str) -> None:
    items = TrainedItems([block([row, (8, 38, 598, 58)]), block([row])], PAD)
    assert [PARTS[code] for code in items.parts] == ["neither"] * 3
    items.mark(block([(1, 30, 501, 50), (2, 31, 502, 51)], width=9), PAD)  # padded to another length
    items.mark(block([(3, 33, NO_ID, 53), (4, 34, 504, 54)]), PAD)
    assert [PARTS[code] for code in items.parts] == [part, "neither", part]


def test_other_texts_can_be_looked_for() -> None:
    row, other = block([(9, 39, 599, 59)]), TrainedItems([block([(0, 50, 0, 57)])], PAD).rows
    texts = np.array([*other["query"], *other["product"]])
    items = TrainedItems([row], PAD, texts)
    items.mark(block([(1, 30, 501, 50)]), PAD)
    assert items.texts.look_up(texts).tolist() == [True, False]
    assert [PARTS[code] for code in items.parts] == ["neither"]


def test_keys_before_between_and_after_those_that_are_there_are_ignored() -> None:
    keys = Keys(np.array([30, 10, 20, 10], dtype=np.uint64))
    keys.mark(np.array([5, 15, 35], dtype=np.uint64))
    assert not keys.trained.any()
    keys.mark(np.array([30, 2**64 - 1], dtype=np.uint64))
    assert keys.look_up(np.array([10, 30, 20], dtype=np.uint64)).tolist() == [False, True, False]


def test_rows_of_a_run_and_rows_without_product_ids(tmp_path: Path) -> None:
    """Every row of a plain loop over both shards, one of which is of an earlier version."""
    shards = [write_shard(tmp_path / "a", (7, 5), first_id=1), write_shard(tmp_path / "b", (0, 9), first_id=20)]
    rows = TokenRows(shards, BUCKETS, PAD)
    new = write_shard(tmp_path / "new", (4, 3), first_id=50)
    arrays: dict[str, Any] = load_file(new.path)
    for bucket, count in enumerate(new.rows):
        arrays[f"b{bucket}.product_id"] = np.arange(100 * bucket, 100 * bucket + count)
    save_file(arrays, new.path)
    mixed = TokenRows([new, *shards], BUCKETS, PAD)
    ids = np.concatenate([part["product_id"] for part in mixed.read_blocks(("product_id",))])
    assert ids.tolist() == [0, 1, 2, 3, *[NO_ID] * 7, 100, 101, 102, *[NO_ID] * 14]
    items = TrainedItems(mixed.read_blocks(FIELDS), PAD)
    for part in rows.read_blocks(FIELDS):
        items.mark(part, PAD)
    is_old = ids == NO_ID
    assert (items.parts[is_old] == 0).all() and len(is_old) == 28
    texts = {
        tuple(row[row != PAD])
        for part in rows.read_blocks(("query", "product"))
        for side in part.values()
        for row in side
    }
    own = [tuple(row[row != PAD]) for part in mixed.read_blocks(("product",)) for row in part["product"]]
    assert items.product_is_trained.tolist() == [text in texts for text in own]
