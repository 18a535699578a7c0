"""Holdout queries in the training data: found by id and by text, in any partition, by any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import DataError, Preempted
from pipeline.core.stop import StopSignal
from pipeline.data.shards import ShardFile, TokenRows
from pipeline.evaluate.holdout import Leak, find_leak, leak_doubts, refuse_leak
from pipeline.retrieval.products import text_hashes
from tests.evaluate.gangs import alone, on_ranks
from tests.train.rows import BUCKETS, PAD


def trained(path: Path, queries: list[tuple[int, int]]) -> TokenRows:
    """Rows by (query id, the token that makes the text), alternately in both buckets."""
    tensors: dict[str, npt.NDArray[Any]] = {}
    counts = []
    for bucket, shape in enumerate(BUCKETS):
        part = queries[bucket::2]
        counts.append(len(part))
        if not part:
            continue
        text = np.full((len(part), shape.query_tokens), PAD, dtype=np.uint16)
        text[:, :3] = [[1, token, 2] for _, token in part]
        rows = len(part)
        tensors |= {
            f"b{bucket}.query": text,
            f"b{bucket}.product": np.ones((rows, shape.product_tokens), dtype=np.uint16),
            f"b{bucket}.label": np.zeros(rows, dtype=np.int16),
            f"b{bucket}.gain": np.zeros(rows, dtype=np.float32),
            f"b{bucket}.numeric": np.zeros((rows, 1), dtype=np.float32),
            f"b{bucket}.categorical": np.zeros((rows, 1), dtype=np.int32),
            f"b{bucket}.sample_id": np.arange(rows),
            f"b{bucket}.query_id": np.array([query for query, _ in part], dtype=np.int64),
        }
    save_file(tensors, path)
    return TokenRows([ShardFile(path, tuple(counts))], BUCKETS, PAD)


def holdout(queries: list[tuple[int, int]]) -> tuple[Int64s, UInt64s]:
    ids, first = np.unique([query for query, _ in queries], return_index=True)
    texts = np.array([[1, token, 2, 0] for _, token in queries], dtype=np.int32)
    return ids, text_hashes(texts, PAD)[first]


SEEN = [(1, 30), (2, 31), (3, 32), (4, 33)]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_by_id_and_by_text(tmp_path: Path, world_size: int) -> None:
    sets = [trained(tmp_path / "a", SEEN[:3]), trained(tmp_path / "b", SEEN[3:])]
    asked = holdout([(1, 30), (1, 30), (4, 39), (8, 31), (9, 38)])  # both, id alone, text alone, neither
    found = on_ranks(world_size, lambda gang: find_leak(asked, sets, gang, StopSignal(), ("dt=2026-01-01",)))
    assert set(found) == {Leak(4, 2, 1, ("dt=2026-01-01",))}
    assert found[0].share == 0.75
    assert "3 of 4 holdout queries (75%) were trained on (2 by id, 1 by text)" in found[0].text()


def test_nothing_in_common(tmp_path: Path) -> None:
    leak = find_leak(holdout([(8, 39)]), [trained(tmp_path / "a", SEEN)], alone(), StopSignal())
    assert (leak.by_id, leak.by_text, leak.share) == (0, 0, 0.0)
    refuse_leak(leak)


def test_a_stop_ends_it(tmp_path: Path) -> None:
    stop = StopSignal()
    stop.set("SIGTERM")
    with pytest.raises(Preempted, match="looking for holdout queries"):
        find_leak(holdout([(8, 39)]), [trained(tmp_path / "a", SEEN)], alone(), stop)


def test_what_is_made_of_it() -> None:
    with pytest.raises(DataError, match=r"6 of 100 holdout queries \(6\.0%\) were trained on"):
        refuse_leak(Leak(100, 3, 3))
    refuse_leak(Leak(100, 3, 2))


@pytest.mark.parametrize(
    ("leak", "said"),
    [
        (None, ["not looked for"]),
        (Leak(100, 0, 0), []),
        (Leak(100, 60, 0), ["60 of 100 holdout queries"]),
        (Leak(100, 0, 1), ["1 of 100 holdout queries"]),
        (Leak(100, 0, 0, ("dt=1", "dt=2")), ["2 partition(s) trained on were not looked at"]),
        (Leak(100, 1, 0, ("dt=1",)), ["1 of 100 holdout queries", "1 partition(s)"]),
    ],
)
def test_what_the_verdict_repeats_of_a_leak(leak: Leak | None, said: list[str]) -> None:
    doubts = leak_doubts(leak)
    assert len(doubts) == len(said) and all(words in text for words, text in zip(said, doubts, strict=True))
