"""Relevance classes: counted in the data, and put in order. They are configured, defined by the layout, or found."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.data.config import DataConfig
from pipeline.data.sources import Source
from pipeline.data.validate import numbers

MAX_LABELS = 1000


class LabelCount(NamedTuple):
    """Rows of one label, and the sum of their gains (of those that have one)."""

    rows: int = 0
    gains: int = 0
    gain_sum: float = 0.0


class Labels(Record):
    """The labels of a file, or of several.

    `there`: whether one has a column of them. `without_gain`: key of a file that has rows and no column of gains.
    """

    there: bool
    labels: dict[str, LabelCount]
    without_gain: str


def add_counts(labels: dict[str, LabelCount], more: Mapping[str, LabelCount], column: str) -> None:
    """Raises DataError for far too many labels."""
    for name, count in more.items():
        rows, gains, gain_sum = labels.get(name, LabelCount())
        labels[name] = LabelCount(rows + count.rows, gains + count.gains, gain_sum + count.gain_sum)
    if len(labels) > MAX_LABELS:
        raise DataError(
            f"column {column!r} has over {MAX_LABELS} different values, such as {next(iter(labels))!r}",
            expected="a few relevance classes",
            next_command="set --data.columns.label to the column of the classes, or list them in --data.labels",
        )


def count_labels(labels: dict[str, LabelCount], batch: pa.RecordBatch, column: str) -> None:
    """Add those of a batch that has labels. Raises DataError for far too many."""
    encoded = batch["label"].dictionary_encode()
    place = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    size = len(encoded.dictionary) + 1
    rows = np.bincount(place, minlength=size)
    gain = numbers(batch["gain"]) if "gain" in batch.schema.names else np.full(batch.num_rows, np.nan)
    known = (gain >= 0) & (gain <= 1)  # a row with another gain will be bad
    gains = np.bincount(place[known], minlength=size)
    sums = np.bincount(place[known], weights=gain[known], minlength=size)
    for number, value in enumerate(encoded.dictionary.to_pylist()):
        try:
            name = value.decode().strip()
        except UnicodeDecodeError:  # a bad row, counted when rows are judged
            continue
        if name:
            count = LabelCount(int(rows[number]), int(gains[number]), float(sums[number]))
            add_counts(labels, {name: count}, column)


# Relevance classes whose order their names tell.

_MAX_GRADE = 10
"""Numbers above are no grades but something else: intents, categories, ids."""


@dataclass(frozen=True)
class Vocabulary:
    """A known set of classes: names of each (the first one is shown), least relevant first."""

    classes: tuple[tuple[str, ...], ...]
    gains: tuple[float, ...] = ()
    """Of each class where they are published; else those that occur are spaced evenly from 0 to 1."""

    @property
    def name(self) -> str:
        """Most relevant first, as people say it: `match/non_match`."""
        return "/".join(names[0] for names in reversed(self.classes))


_ESCI_GAINS = (0.0, 0.01, 0.1, 1.0)
"""Reddy et al., Shopping Queries Dataset, arXiv:2206.06588."""
_IRRELEVANT = ("irrelevant", "not_relevant", "non_relevant")
VOCABULARIES = (
    Vocabulary((("I",), ("C",), ("S",), ("E",)), _ESCI_GAINS),
    Vocabulary((("irrelevant",), ("complement",), ("substitute",), ("exact",)), _ESCI_GAINS),
    Vocabulary((("no", "n"), ("yes", "y"))),
    Vocabulary((("false", "f"), ("true", "t"))),
    Vocabulary((("non_match", "no_match", "not_match", "mismatch"), ("match",))),
    Vocabulary((_IRRELEVANT, ("partially_relevant", "somewhat_relevant"), ("relevant",), ("highly_relevant",))),
    Vocabulary((("bad",), ("fair",), ("good",), ("excellent",), ("perfect",))),
    Vocabulary((("negative", "neg"), ("positive", "pos"))),
    Vocabulary((("low",), ("medium",), ("high",))),
)


def known_order(labels: Sequence[str]) -> tuple[dict[str, float], str] | None:
    """Label -> gain, least relevant first, and the name of the vocabulary; None when no vocabulary has all labels."""
    if grades := _grades(labels):
        low, high = min(grades.values()), max(grades.values())
        gains = {
            label: (grade - low) / (high - low) if high > low else float(grade > 0) for label, grade in grades.items()
        }
        return gains, f"{low} to {high}"
    for vocabulary in VOCABULARIES:
        place_of = {_plain(name): place for place, names in enumerate(vocabulary.classes) for name in names}
        places = {label: place_of[_plain(label)] for label in labels if _plain(label) in place_of}
        if not len(places) == len(labels) == len(set(places.values())):
            continue
        ordered = sorted(places, key=lambda label: places[label])
        if vocabulary.gains:
            gains = {label: vocabulary.gains[places[label]] for label in ordered}
        elif len(ordered) == 1:
            gains = {label: places[label] / (len(vocabulary.classes) - 1) for label in ordered}
        else:
            gains = {label: number / (len(ordered) - 1) for number, label in enumerate(ordered)}
        return gains, vocabulary.name
    return None


def _grades(labels: Sequence[str]) -> dict[str, int]:
    """Whole numbers from 0 to 10, each once, in order; nothing for other labels."""
    try:
        values = {label: float(label) for label in labels}
    except ValueError:
        return {}
    if not all(0 <= value <= _MAX_GRADE and value == int(value) for value in values.values()):
        return {}
    grades = {label: int(value) for label, value in sorted(values.items(), key=lambda item: item[1])}
    return grades if len(set(grades.values())) == len(grades) else {}


def _plain(label: str) -> str:
    return re.sub(r"[-_\s]+", "", label).casefold()


_MAX_SHOWN = 20


@dataclass(frozen=True)
class LabelSet:
    """`gains`: class -> gain, least relevant first (mean gain when found in the data).

    `row_gains`: the gain of a row that has none of its own, per class. `vocabulary`: the known one that gave the order.
    """

    gains: dict[str, float]
    row_gains: tuple[float, ...]
    vocabulary: str = ""


def decide_labels(config: DataConfig, source: Source, seen: Labels | None) -> LabelSet:
    """Configured classes first, then those of the layout, then those in the data, by mean gain or as their names tell.

    Configured classes without known gains are spaced evenly from 0 to 1. Raises DataError for an empty label column,
    for labels whose order nothing tells, and where gains tell it and a file has none.
    """
    known = source.fixed_labels
    if config.labels:
        last = max(1, len(config.labels) - 1)
        gains = {label: known.get(label, place / last) for place, label in enumerate(config.labels)}
        return LabelSet(gains, tuple(gains.values()))
    if known:
        return LabelSet(dict(known), tuple(known.values()))
    if seen is None or not seen.there:
        return LabelSet({}, ())
    if not seen.labels:
        raise DataError(
            f"column {config.columns.label!r} is empty in all rows" + (" the filter keeps" if config.filter else ""),
            expected="a relevance class in every row",
            next_command="set --data.columns.label, or check --data.path"
            + (" and --data.filter" if config.filter else ""),
        )
    means = {name: round(count.gain_sum / max(1, count.gains), 6) for name, count in seen.labels.items()}
    gains = dict(sorted(means.items(), key=lambda item: (item[1], item[0])))
    if len(set(gains.values())) > 1 or (len(gains) == 1 and sum(gains.values()) > 0):
        if seen.without_gain:
            raise DataError(
                f"{seen.without_gain} has no column {config.columns.gain!r}, and others have one",
                expected="a gain for the rows of every file, or of none",
                next_command="add the column, or set --data.labels: rows without a gain then get that of their label",
            )
        return LabelSet(gains, (0.0,) * len(gains))
    if known_labels := known_order(list(gains)):
        gains, vocabulary = known_labels
        return LabelSet(gains, tuple(gains.values()), vocabulary)
    shown = sorted(seen.labels, key=lambda name: (-seen.labels[name].rows, name))[:_MAX_SHOWN]
    more = f" and {len(gains) - len(shown)} more" if len(gains) > len(shown) else ""
    value = ",".join(shown) if not any("," in name or name[:1] in "[{" for name in shown) else json.dumps(shown)
    raise DataError(
        f"column {config.columns.label!r} has labels whose order neither gains nor their names tell: "
        + ", ".join(f"{name} ({seen.labels[name].rows:,} rows)" for name in shown)
        + more,
        expected="data.labels, a column of gains that differ, grades from 0, or one of "
        + ", ".join(vocabulary.name for vocabulary in VOCABULARIES),
        next_command=f"--data.labels {shlex.quote(value)}, put in order: the least relevant first",
    )
