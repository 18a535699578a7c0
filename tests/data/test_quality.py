"""What in the data costs quality: said by prepare, with counts, for each thing alone."""

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
LATER = range(1000, 1010)

pytestmark = pytest.mark.stage


def row(query: int, label: str, split: str = "train", title: str = "a thing", gain: float | None = None) -> Row:
    gain = GAINS[label] if gain is None else gain
    return {"query": f"query {query}", "title": title, "label": label, "gain": gain, "split": split}


def good(queries: range = range(100), labels: tuple[str, ...] = LABELS) -> Iterator[Row]:
    """Each query with a row of each label; one in five is for valid."""
    for query in queries:
        yield from (row(query, label, "valid" if query % 5 == 0 else "train") for label in labels)


def said(workplace: Callable[[str], Any], days: dict[str, list[Row]], positive_gain: float = 0.99) -> list[str]:
    place = workplace("one")
    for day, rows in days.items():
        (place.folder / "input" / day).mkdir(parents=True)
        (place.folder / "input" / day / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    config = DataConfig(
        path=str(place.folder / "input"),
        labels=LABELS,
        buckets=("8x8", "16x24"),
        num_workers=1,
        rows_per_chunk=100,
    )
    data = place.prepare(config, TOKENIZER)
    assert data.infos == place.prepare(config, TOKENIZER).infos, "what was committed says the same"
    return prepared_warnings(data.infos, positive_gain, contrastive=True)


def day(rows: list[Row], number: int = 1) -> dict[str, list[Row]]:
    return {f"dt=2026-01-0{number}": rows}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], []),
        (
            [row(query, "yes", title=LONG, gain=0.5) for query in range(100, 140)],
            [
                "40 of 340 rows (12%) have a text longer than the largest bucket 16x24",
                "rows without a gain of train.loss.positive_gain 0.99 or more among them: 40 in bucket 16x24",
            ],
        ),
        (
            [row(query, "some") for query in range(100, 190)],
            ["90 of 170 queries have no row with a gain of train.loss.positive_gain 0.99 or more"],
        ),
        ([row(query, "yes") for query in range(100, 190)], ["90 of 170 queries have no judged negative"]),
        (
            [row(query, "yes", "valid") for query in range(100, 160)],
            ["shares of labels in train (240 rows) and valid (120 rows) differ: yes 33.3% and 66.7%; valid names"],
        ),
        ([row(query, "yes", "valid") for query in range(100, 104)], []),  # by chance
        (
            [row(query, label, "valid") for query in (1, 2) for label in LABELS],
            ["2 of 22 queries (9%) of split valid are in split train too: figures on them are better"],
        ),
        ([row(1, label, "valid") for label in LABELS], []),  # few
        ([row(7, "no", gain=1.0) for _ in range(60)], ["mean gains: no 0.429, some 0.1, yes 1; put data.labels in"]),
    ],
)
def test_each_thing_that_costs_quality_is_said_with_counts(
    workplace: Callable[[str], Any], rows: list[Row], words: list[str]
) -> None:
    found = said(workplace, day([*good(), *rows]))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True)), found


@pytest.mark.parametrize(("one", "num_said"), [("some", 0), ("no", 1)])
def test_labels_that_hardly_occur(workplace: Callable[[str], Any], one: str, num_said: int) -> None:
    found = said(workplace, day([*good(labels=("no", "yes")), row(7, one)]))
    assert len(found) == num_said
    assert all("labels with hardly any of the 161 training rows: some 0;" in text for text in found)


def test_no_positives_at_all(workplace: Callable[[str], Any]) -> None:
    (text,) = said(workplace, day([dict(one, gain=0.5 * float(str(one["gain"]))) for one in good()]))
    assert text.startswith("no row has a gain of train.loss.positive_gain 0.99 or more")


def test_the_newest_day_is_looked_at_alone_too(workplace: Callable[[str], Any]) -> None:
    found = said(workplace, {**day([*good()]), **day([row(query, "yes") for query in LATER], 2)})
    assert len(found) == 2
    assert found[0].startswith("dt=2026-01-02: 10 of 10 queries have no judged negative")
    assert found[1].startswith("dt=2026-01-02: labels with hardly any of the 10 training rows: no 0, some 0")
