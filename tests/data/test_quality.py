"""What in the data costs quality: one warning of prepare for each, with counts."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.judgements import prepared_warnings
from pipeline.data.tokenizer import train_tokenizer

Row = dict[str, object]
LABELS = ("no", "some", "yes")
GAINS = {"no": 0.0, "some": 0.1, "yes": 1.0}
LONG = "a word of many words that do not fit " * 4
WORDS = ["a thing of many words that do not fit", *(f"query {number}" for number in range(400))]
TOKENIZER = train_tokenizer(WORDS, TokenizerConfig(vocab_size=256))

pytestmark = pytest.mark.stage


def row(query: int, label: str, split: str = "train", title: str = "a thing", gain: float | None = None) -> Row:
    gain = GAINS[label] if gain is None else gain
    return {"query": f"query {query}", "title": title, "label": label, "gain": gain, "split": split}


def good(queries: range = range(100), labels: tuple[str, ...] = LABELS) -> Iterator[Row]:
    """Each query with a row of each label; one in five is for valid."""
    for query in queries:
        yield from (row(query, label, "valid" if query % 5 == 0 else "train") for label in labels)


def warnings(workplace: Callable[[str], Any], rows: list[Row]) -> list[str]:
    place = workplace("one")
    path = place.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = DataConfig(path=str(path), labels=LABELS, buckets=("8x8", "16x24"), num_workers=1, rows_per_chunk=100)
    data = place.prepare(config, TOKENIZER)
    assert data.infos == place.prepare(config, TOKENIZER).infos, "what was committed says the same"
    return prepared_warnings(data.infos, 0.99, contrastive=True)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], None),
        ([row(query, "yes", title=LONG) for query in range(100, 140)], "40 of 340 rows (12%) have a text longer"),
        ([row(query, "some") for query in range(100, 190)], "90 of 170 queries have no row with a gain"),
        ([row(query, "yes") for query in range(100, 190)], "90 of 170 queries have no judged negative"),
        ([row(query, label, "valid") for query in (1, 2) for label in LABELS], "2 of 22 queries (9%) of split valid"),
        ([row(1, label, "valid") for label in LABELS], None),  # few
        ([row(7, "no", gain=1.0) for _ in range(60)], "mean gains: no 0.429, some 0.1, yes 1; put data.labels in"),
    ],
)
def test_each_thing_that_costs_quality_is_a_warning_with_counts(
    workplace: Callable[[str], Any], rows: list[Row], words: str | None
) -> None:
    found = warnings(workplace, [*good(), *rows])
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_no_positives_at_all(workplace: Callable[[str], Any]) -> None:
    (text,) = warnings(workplace, [dict(one, gain=0.5 * float(str(one["gain"]))) for one in good()])
    assert text.startswith("no row has a gain of train.loss.positive_gain 0.99 or more")
