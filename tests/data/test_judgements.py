"""Counts of judgements: those of a plain loop, of training, and the same however the work is cut."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data import judgements
from pipeline.data.judgements import (
    Judgements,
    count_judgements,
    count_texts_of_several_ids,
    hundredths,
    judgements_of,
)
from pipeline.data.token_sets import JudgedSplit, ShardInfo, Split
from tests.train.rows import token_set_info, write_shard

GAINS = np.array([0.0, 0.01, 0.1, 0.29, 0.333, 0.99, 1.0], dtype=np.float32)
SIZES = ((70, 0), (50, 40), (0, 90))


def write(folder: Path) -> tuple[tuple[ShardInfo, ...], list[tuple[int, int, int, float]]]:
    """Shards with random judgements; and their rows as (bucket, query id, label, gain)."""
    rng, shards, rows = np.random.default_rng(5), [], []
    ids = np.array([hash63(f"query {number}") for number in range(40)], dtype=np.int64)
    for number, sizes in enumerate(SIZES):
        file = write_shard(folder / f"train-{number}.safetensors", sizes, 1 + 1000 * number)
        arrays: dict[str, Any] = {}
        for bucket, count in enumerate(sizes):
            query, gain = rng.choice(ids, count), rng.choice(GAINS, count)
            label = (gain > 0.2).astype(np.int16)
            rows += [(bucket, *row) for row in zip(query.tolist(), label.tolist(), gain.tolist(), strict=True)]
            if count:
                names = {"query_id": query, "label": label, "gain": gain}
                arrays |= {f"b{bucket}.{name}": values for name, values in names.items()}
        save_file(arrays, file.path)
        shards.append(ShardInfo(file=file.path.name, rows=sizes))
    return tuple(shards), rows


def counted(folder: Path, shards: tuple[ShardInfo, ...]) -> dict[Split, JudgedSplit]:
    return count_judgements(folder, {"train": shards}, 2, StopSignal())


@pytest.mark.parametrize("positive_gain", [0.0, 0.01, 0.1, 0.29, 0.3, 0.99, 1.0])
def test_counts_are_those_of_a_plain_loop(tmp_path: Path, positive_gain: float) -> None:
    shards, rows = write(tmp_path)
    info = token_set_info("flat").model_copy(update={"judged": counted(tmp_path, shards)})
    found = judgements_of([info], "train", positive_gain)
    assert found is not None
    by_query: dict[int, list[bool]] = defaultdict(list)
    for _, query, _, gain in rows:
        by_query[query].append(bool(np.float32(gain) >= np.float32(positive_gain)))
    of_label = [[gain for _, _, label, gain in rows if label == place] for place in range(2)]
    assert found == Judgements(
        rows=tuple(sum(row[0] == bucket for row in rows) for bucket in range(2)),
        positives=tuple(
            sum(bucket == row[0] and bool(np.float32(row[3]) >= np.float32(positive_gain)) for row in rows)
            for bucket in range(2)
        ),
        queries=len(by_query),
        queries_without_positive=sum(not any(judged) for judged in by_query.values()),
        queries_without_negative=sum(all(judged) for judged in by_query.values()),
        labels=tuple(len(gains) for gains in of_label),
        mean_gains=found.mean_gains,
    )
    assert found.mean_gains == pytest.approx([np.mean(gains) for gains in of_label])
    assert judgements_of([info], "valid", positive_gain) is None


def test_a_query_counts_once_in_each_partition(tmp_path: Path) -> None:
    shards, _ = write(tmp_path)
    info = token_set_info("flat").model_copy(update={"judged": counted(tmp_path, shards)})
    before = token_set_info("flat")  # of an earlier version
    one, two = (judgements_of(infos, "train", 1.0) for infos in ([info, before], [info, info]))
    assert one is not None and two is not None
    assert (two.queries, two.rows) == (2 * one.queries, tuple(2 * rows for rows in one.rows))
    assert judgements_of([before], "train", 1.0) is None


def test_however_many_passes_the_counts_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards, rows = write(tmp_path)
    whole = counted(tmp_path, shards)
    held: list[int] = []
    merge = judgements._by_query

    def spy(pieces: Any) -> Any:
        found = merge(pieces := list(pieces))
        held.append(sum(len(ids) for ids, _, _ in pieces))
        return found

    monkeypatch.setattr(judgements, "_by_query", spy)
    monkeypatch.setattr(judgements, "_ROWS_AT_ONCE", 25)
    assert counted(tmp_path, shards) == whole
    assert max(held) < len(rows) / 2, "a pass holds its range of queries alone"
    assert JudgedSplit.model_validate_json(whole["train"].model_dump_json()) == whole["train"]


@pytest.mark.parametrize("at_once", [1_000, 25])
def test_queries_of_a_holdout_that_are_trained_on_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(judgements, "_ROWS_AT_ONCE", at_once)
    shards, rows = write(tmp_path)
    counts = count_judgements(tmp_path, {"train": shards[:1], "valid": shards[1:], "test": shards[2:]}, 2, StopSignal())
    ends = np.cumsum([sum(size) for size in SIZES])
    first, second, third = (
        {query for _, query, _, _ in part} for part in (rows[: ends[0]], rows[ends[0] : ends[1]], rows[ends[1] :])
    )
    assert 0 < len(first & third) < len(third)
    assert counts["train"].queries_in_train == 0
    assert counts["valid"].queries_in_train == len(first & (second | third))
    assert counts["test"].queries_in_train == len(first & third)
    alone = count_judgements(tmp_path, {"test": shards}, 2, StopSignal())
    assert alone["test"].queries_in_train == 0


def test_hundredths_are_those_of_float32() -> None:
    for step in range(101):
        exact = np.float32(step / 100)
        below = np.nextafter(exact, np.float32(-1))
        assert hundredths(exact) == step and (not step or hundredths(below) == step - 1)


def test_texts_of_several_ids_are_counted_over_buckets_and_splits(tmp_path: Path) -> None:
    """Padded to the length of its bucket, a text is the same one; one that fills the largest may have been cut."""

    def shard(name: str, rows: list[tuple[int, list[int], int]]) -> ShardInfo:
        arrays: dict[str, Any] = {}
        for bucket, length in enumerate((3, 5)):
            chosen = [(tokens, number) for place, tokens, number in rows if place == bucket]
            if chosen:
                padded = [tokens + [0] * (length - len(tokens)) for tokens, _ in chosen]
                arrays[f"b{bucket}.query"] = np.array(padded, dtype=np.uint16)
                arrays[f"b{bucket}.query_id"] = np.array([number for _, number in chosen], dtype=np.int64)
        save_file(arrays, tmp_path / name)
        return ShardInfo(file=name, rows=tuple(sum(place == bucket for place, _, _ in rows) for bucket in (0, 1)))

    train = shard("train", [(0, [5, 6], 1), (0, [5, 6], 1), (0, [6, 5], 2), (0, [5, 6, 7], 3), (1, [1, 2, 3, 4, 5], 4)])
    test = shard("test", [(1, [5, 6], 9), (0, [5, 6, 7], 8), (0, [5, 6], 7), (0, [6], 2), (1, [1, 2, 3, 4, 5], 6)])
    splits: dict[Split, tuple[ShardInfo, ...]] = {"train": (train,), "test": (test,)}
    assert count_texts_of_several_ids(tmp_path, splits, 0, StopSignal()) == 2
    assert count_texts_of_several_ids(tmp_path, {"train": (train,)}, 0, StopSignal()) == 0
