"""Holdout queries in the training data: found by id and by text, in any partition, by any number of ranks."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.errors import DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.config import SplitBy
from pipeline.data.shards import NO_ID, Arrays, TokenRows
from pipeline.data.trained_items import TrainedItems
from pipeline.evaluate.trained import Leak, find_leak, leak_warnings, mark_trained, refuse_leak
from pipeline.parallel.process_group import ProcessGroup
from tests.evaluate.process_groups import alone, on_ranks
from tests.train.rows import BUCKETS, PAD, write_shard


def trained(path: Path, queries: list[tuple[int, int]]) -> TokenRows:
    """Rows by (query id, the token that makes the text), alternately in both buckets."""
    shard = write_shard(path, [len(queries[bucket::2]) for bucket in (0, 1)], first_id=1)
    tensors = load_file(path)
    for bucket in (0, 1):
        for row, (query, token) in enumerate(queries[bucket::2]):
            tensors[f"b{bucket}.query_id"][row] = query
            tensors[f"b{bucket}.query"][row] = [1, token, 2] + [PAD] * (BUCKETS[bucket].query_tokens - 3)
    save_file(tensors, path)
    return TokenRows([shard], BUCKETS, PAD)


def holdout(queries: list[tuple[int, int]]) -> TrainedItems:
    """Rows by (query id, the token that makes the text), with products that no training row has."""
    texts = np.array([[1, token, 2, 0] for _, token in queries], dtype=np.int32)
    ids = np.array([query for query, _ in queries], dtype=np.int64)
    arrays: Arrays = {"query": texts, "product": texts + 1000, "query_id": ids, "sample_id": np.arange(len(ids))}
    return TrainedItems([arrays | {"product_id": np.full(len(ids), NO_ID)}], PAD)


SEEN = [(1, 30), (2, 31), (3, 32), (4, 33)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_by_id_and_by_text(tmp_path: Path, world_size: int) -> None:
    sets = [trained(tmp_path / "a", SEEN[:3]), trained(tmp_path / "b", SEEN[3:])]

    def leak(process_group: ProcessGroup) -> Leak:
        asked = holdout([(1, 30), (1, 30), (4, 39), (8, 31), (9, 38)])  # both, id alone, text alone, neither
        mark_trained(asked, sets, process_group, StopSignal())
        return find_leak(asked, unchecked=("dt=2026-01-01",))

    found = on_ranks(world_size, leak)
    assert set(found) == {Leak(4, 2, 1, ("dt=2026-01-01",))}
    assert found[0].fraction == 0.75
    assert "3 of 4 test queries (75%) were trained on (2 by id, 1 by text)" in found[0].text()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("split_by", "expected", "words"),
    [
        ("query", Leak(4, 2, 1), "3 of 4 test queries (75%) were trained on (2 by id, 1 by text)"),
        ("product", Leak(4, 1, 0, split_by="product"), "1 of 4 test products (25%) were trained on"),
        ("both", Leak(4, 0, 2, split_by="both"), "2 of 4 test pairs (50%) were trained on (0 by id, 2 by text)"),
    ],
)
def test_the_items_by_which_rows_were_split_may_not_be_shared(
    tmp_path: Path, world_size: int, split_by: SplitBy, expected: Leak, words: str
) -> None:
    """A product with another id is another product, though its text is known; of pairs, both texts must be known."""
    path = tmp_path / "a"
    train = trained(path, SEEN)
    tensors = load_file(path)
    for bucket in (0, 1):
        tensors[f"b{bucket}.product_id"] = tensors[f"b{bucket}.query_id"] + 500  # 501 and 503, 502 and 504
        tensors[f"b{bucket}.product"][:] = [1, 20 + bucket, 2] + [PAD] * (BUCKETS[bucket].product_tokens - 3)
    save_file(tensors, path)

    def leak(process_group: ProcessGroup) -> tuple[Leak, list[int]]:
        rows = [(1, 30, 501, 29), (4, 39, 599, 20), (8, 31, 598, 21), (9, 20, 597, 30)]
        query, product = ([[1, row[side], 2, 0] for row in rows] for side in (1, 3))
        arrays = {"query": np.array(query), "product": np.array(product), "sample_id": np.arange(4)}
        ids = {name: np.array([row[side] for row in rows]) for name, side in (("query_id", 0), ("product_id", 2))}
        items = TrainedItems([arrays | ids], PAD)
        mark_trained(items, [train], process_group, StopSignal())
        return find_leak(items, split_by), items.parts.tolist()

    for found, parts in on_ranks(world_size, leak):
        assert (found, parts) == (expected, [0, 0, 0, 0])
        assert words in found.text()


def test_a_stop_ends_it(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="checking for leaked queries"):
        mark_trained(holdout([(8, 39)]), [trained(tmp_path / "a", SEEN)], alone(), stop)


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (None, ["not checked"]),
        (Leak(100, 0, 0), []),
        (Leak(100, 3, 2), ["5 of 100 test queries"]),
        (Leak(100, 3, 3), ["6 of 100 test queries (6.0%) were trained on"]),
        (Leak(100, 0, 1), ["1 of 100 test queries"]),
        (Leak(100, 0, 0, ("dt=1", "dt=2")), ["2 training partition(s) could not be checked"]),
        (Leak(100, 1, 0, ("dt=1",)), ["1 of 100 test queries", "1 training partition(s)"]),
    ],
)
def test_what_the_verdict_repeats_of_a_leak(leak: Leak | None, said: list[str]) -> None:
    doubts = leak_warnings(leak)
    assert len(doubts) == len(said) and all(words in text for words, text in zip(said, doubts, strict=True))
    with nullcontext() if leak is None or leak.fraction <= 0.05 else pytest.raises(DataError):
        refuse_leak(leak or Leak(100, 0, 0))
