"""Counts of judgements, and what in the data costs quality: one warning of prepare for each, with counts."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeline.core.fingerprint import hash63
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.judgements import (
    JudgementCounts,
    count_judgements,
    hundredths,
    prepared_warnings,
    shared_products,
    sum_judgements,
)
from pipeline.data.shards import ShardFile, TokenRows
from pipeline.data.token_sets import Split, TokenSetInfo
from pipeline.data.tokenizer import train_tokenizer
from tests.train.rows import BUCKETS, PAD, token_set_info, write_shard

GAINS = np.array([0.0, 0.01, 0.1, 0.29, 0.333, 0.99, 1.0], dtype=np.float32)
SIZES = ((70, 0), (50, 40), (0, 90))


def write(folder: Path) -> tuple[tuple[ShardFile, ...], list[tuple[int, int, float]]]:
    """Shards with random judgements; and their rows as (query id, label, gain)."""
    rng, shards, rows = np.random.default_rng(5), list[ShardFile](), list[tuple[int, int, float]]()
    ids = np.array([hash63(f"query {number}") for number in range(40)], dtype=np.int64)
    for number, sizes in enumerate(SIZES):
        file = write_shard(folder / f"train-{number}.safetensors", sizes, 1 + 1000 * number)
        arrays: dict[str, Any] = load_file(file.path)
        for bucket, count in enumerate(sizes):
            query, gain = rng.choice(ids, count), rng.choice(GAINS, count)
            label = (gain > 0.2).astype(np.int16)
            rows += zip(query.tolist(), label.tolist(), gain.tolist(), strict=True)
            if count:
                names = {"query_id": query, "label": label, "gain": gain}
                arrays |= {f"b{bucket}.{name}": values for name, values in names.items()}
        save_file(arrays, file.path)
        shards.append(file)
    return tuple(shards), rows


@pytest.mark.parametrize("positive_gain", [0.0, 0.01, 0.1, 0.29, 0.3, 0.99, 1.0])
def test_counts_are_those_of_a_plain_loop(tmp_path: Path, positive_gain: float) -> None:
    shards, rows = write(tmp_path)
    judged = count_judgements({"train": TokenRows(shards, BUCKETS, PAD)}, 2, StopSignal())
    info = token_set_info("flat").model_copy(update={"judged": judged})
    before = token_set_info("flat")  # of an earlier version
    one, two = (sum_judgements(infos, "train", positive_gain) for infos in ([info, before], [info, info]))
    assert one is not None and two is not None
    by_query: dict[int, list[bool]] = defaultdict(list)
    for query, _, gain in rows:
        by_query[query].append(bool(np.float32(gain) >= np.float32(positive_gain)))
    assert one == JudgementCounts(
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
    assert sum_judgements([info], "valid", positive_gain) is sum_judgements([before], "train", positive_gain) is None


def test_queries_of_a_holdout_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    shards, rows = write(tmp_path)
    parts: dict[Split, tuple[ShardFile, ...]] = {"train": shards[:1], "valid": shards[1:], "test": shards[2:]}
    splits = {split: TokenRows(part, BUCKETS, PAD) for split, part in parts.items()}
    counts = count_judgements(splits, 2, StopSignal())
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


Row = dict[str, object]
LABELS = ("no", "some", "yes")
GAIN_OF = {"no": 0.0, "some": 0.1, "yes": 1.0}
LONG = "a word of many words that do not fit " * 4
WORDS = ["a thing of many words that do not fit", *(f"query {number}" for number in range(400))]
TOKENIZER = train_tokenizer(WORDS, TokenizerConfig(vocab_size=256))


def row(query: int, label: str, split: str = "train", title: str = "", gain: float | None = None) -> Row:
    gain = GAIN_OF[label] if gain is None else gain
    title = title or f"a thing of {query}"
    return {"query": f"query {query}", "title": title, "label": label, "gain": gain, "split": split}


def good(queries: range = range(100), labels: tuple[str, ...] = LABELS) -> Iterator[Row]:
    """Each query with a row of each label; one in five is for valid."""
    for query in queries:
        yield from (row(query, label, "valid" if query % 5 == 0 else "train") for label in labels)


def warnings(workplace: Callable[[str], Any], rows: list[Row]) -> list[str]:
    return prepared_warnings(prepared(workplace, rows), 0.99, contrastive=True)


def prepared(workplace: Callable[[str], Any], rows: list[Row]) -> tuple[TokenSetInfo, ...]:
    place = workplace("one")
    path = place.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = DataConfig(path=str(path), labels=LABELS, buckets=("8x8", "16x24"), num_workers=1, rows_per_chunk=100)
    data = place.prepare(config, TOKENIZER)
    assert data.infos == place.prepare(config, TOKENIZER).infos, "what was committed says the same"
    infos: tuple[TokenSetInfo, ...] = data.infos
    return infos


@pytest.mark.stage
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], None),
        (
            [row(query, "yes", title=LONG) for query in range(100, 140)],
            "40 of 340 rows (12%) have a text that is truncated",
        ),
        ([row(query, "some") for query in range(100, 190)], "90 of 170 queries have no row with a gain"),
        ([row(query, "yes") for query in range(100, 190)], "90 of 170 queries have no judged negative"),
        ([row(query, label, "valid") for query in (1, 2) for label in LABELS], "2 of 22 queries (9%) of split valid"),
        ([row(1, label, "valid") for label in LABELS], None),  # few
        ([row(7, "no", gain=1.0) for _ in range(60)], "mean gains are no 0.429, some 0.1, yes 1"),
    ],
)
def test_each_thing_that_costs_quality_is_a_warning_with_counts(
    workplace: Callable[[str], Any], rows: list[Row], words: str | None
) -> None:
    found = warnings(workplace, [*good(), *rows])
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.stage
@pytest.mark.parametrize(
    ("old", "words"),
    [
        (0, []),
        (1, []),  # few
        (4, ["4 of 20 products (20%) of split valid are also in split train", "Only the 80% of its rows"]),
        (20, ["20 of 20 products (100%) of split valid", "Only the 0% of its rows"]),
    ],
)
@pytest.mark.parametrize("ids", [False, True])
def test_products_of_a_holdout_that_are_trained_on(
    workplace: Callable[[str], Any], old: int, words: list[str], ids: bool
) -> None:
    """By id if there is one, though the titles differ."""
    shared = [row(200 + query, label, title=f"a thing of {5 * query}") for query in range(old) for label in LABELS]
    rows = [*good(), *shared]
    if ids:
        rows = [row | {"product_id": row["title"], "title": f"{row['title']} {row['split']}"} for row in rows]
    (info,) = prepared(workplace, rows)
    judged = info.judged["valid"]
    assert (judged.products, judged.products_in_train, judged.rows_new_product) == (20, old, 60 - 3 * old)
    assert info.judged["train"].products == info.judged["train"].rows_new_product == 0
    found = list(shared_products([info]))
    assert [text for text, _ in found if not all(each in text for each in words)] == []
    assert [loud for _, loud in found] == ([old == 20] if words else [])
    assert prepared_warnings([info], 0.99, contrastive=True) == [text for text, loud in found if loud]
    # Splits that were made by product share the other side on purpose.
    assert not list(shared_products([info.model_copy(update={"split_by": "both"})]))


@pytest.mark.stage
def test_no_positives_at_all(workplace: Callable[[str], Any]) -> None:
    (text,) = warnings(workplace, [dict(one, gain=0.5 * float(str(one["gain"]))) for one in good()])
    assert text.startswith("no row has a gain of at least 0.99 (train.loss.positive_gain)")
