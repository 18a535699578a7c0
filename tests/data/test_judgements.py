"""Counts of judgements: those of a plain loop, and of queries that a holdout shares with train."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.judgements import Judgements, count_judgements, hundredths, judgements_of
from pipeline.data.token_sets import ShardInfo
from tests.train.rows import token_set_info, write_shard

GAINS = np.array([0.0, 0.01, 0.1, 0.29, 0.333, 0.99, 1.0], dtype=np.float32)
SIZES = ((70, 0), (50, 40), (0, 90))


def write(folder: Path) -> tuple[tuple[ShardInfo, ...], list[tuple[int, int, float]]]:
    """Shards with random judgements; and their rows as (query id, label, gain)."""
    rng, shards, rows = np.random.default_rng(5), list[ShardInfo](), list[tuple[int, int, float]]()
    ids = np.array([hash63(f"query {number}") for number in range(40)], dtype=np.int64)
    for number, sizes in enumerate(SIZES):
        file = write_shard(folder / f"train-{number}.safetensors", sizes, 1 + 1000 * number)
        arrays: dict[str, Any] = {}
        for bucket, count in enumerate(sizes):
            query, gain = rng.choice(ids, count), rng.choice(GAINS, count)
            label = (gain > 0.2).astype(np.int16)
            rows += zip(query.tolist(), label.tolist(), gain.tolist(), strict=True)
            if count:
                names = {"query_id": query, "label": label, "gain": gain}
                arrays |= {f"b{bucket}.{name}": values for name, values in names.items()}
        save_file(arrays, file.path)
        shards.append(ShardInfo(file=file.path.name, rows=sizes))
    return tuple(shards), rows


@pytest.mark.parametrize("positive_gain", [0.0, 0.01, 0.1, 0.29, 0.3, 0.99, 1.0])
def test_counts_are_those_of_a_plain_loop(tmp_path: Path, positive_gain: float) -> None:
    shards, rows = write(tmp_path)
    judged = count_judgements(tmp_path, {"train": shards}, 2, StopSignal())
    info = token_set_info("flat").model_copy(update={"judged": judged})
    before = token_set_info("flat")  # of an earlier version
    one, two = (judgements_of(infos, "train", positive_gain) for infos in ([info, before], [info, info]))
    assert one is not None and two is not None
    by_query: dict[int, list[bool]] = defaultdict(list)
    for query, _, gain in rows:
        by_query[query].append(bool(np.float32(gain) >= np.float32(positive_gain)))
    assert one == Judgements(
        rows=len(rows),
        positives=sum(map(sum, by_query.values())),
        queries=len(by_query),
        queries_without_positive=sum(not any(judged) for judged in by_query.values()),
        queries_without_negative=sum(all(judged) for judged in by_query.values()),
        mean_gains=one.mean_gains,
    )
    means = [np.mean([gain for _, label, gain in rows if label == place]) for place in range(2)]
    assert one.mean_gains == pytest.approx(means)
    assert (two.queries, two.rows) == (2 * one.queries, 2 * one.rows), "a query counts once in each partition"
    assert judgements_of([info], "valid", positive_gain) is judgements_of([before], "train", positive_gain) is None


def test_queries_of_a_holdout_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    shards, rows = write(tmp_path)
    counts = count_judgements(tmp_path, {"train": shards[:1], "valid": shards[1:], "test": shards[2:]}, 2, StopSignal())
    ends = np.cumsum([0, *(sum(size) for size in SIZES)])
    first, second, third = ({query for query, _, _ in rows[ends[i] : ends[i + 1]]} for i in range(3))
    assert 0 < len(first & third) < len(third)
    assert counts["train"].queries_in_train == 0
    assert counts["valid"].queries_in_train == len(first & (second | third))
    assert counts["test"].queries_in_train == len(first & third)


def test_hundredths_are_those_of_float32() -> None:
    for step in range(101):
        gain = np.float32(step / 100)
        assert hundredths(gain) == step
        assert hundredths(np.nextafter(gain, np.float32(2.0))) == step
        assert step == 0 or hundredths(np.nextafter(gain, np.float32(-1.0))) == step - 1
