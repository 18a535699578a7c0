"""The relevance classes: configured, defined by the layout, or found in the data."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.data.config import DataConfig
from pipeline.data.sources import Source
from pipeline.data.survey import LabelCount, Survey

# Relevance classes whose order their names tell.

_MAX_GRADE = 10
"""Numbers above are no grades but something else: intents, categories, ids."""
_SEPARATORS = re.compile(r"[-_\s]+")


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

    def place(self, label: str) -> int | None:
        plain = _plain(label)
        return next((place for place, names in enumerate(self.classes) if plain in map(_plain, names)), None)


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
        places = {label: place for label in labels if (place := vocabulary.place(label)) is not None}
        if len(places) == len(labels) == len(set(places.values())):
            return _spaced(dict(sorted(places.items(), key=lambda item: item[1])), vocabulary), vocabulary.name
    return None


def _spaced(places: dict[str, int], vocabulary: Vocabulary) -> dict[str, float]:
    if vocabulary.gains:
        return {label: vocabulary.gains[place] for label, place in places.items()}
    if len(places) == 1:
        return {label: place / (len(vocabulary.classes) - 1) for label, place in places.items()}
    return {label: number / (len(places) - 1) for number, label in enumerate(places)}


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
    return _SEPARATORS.sub("", label).casefold()


_MAX_SHOWN = 20


@dataclass(frozen=True)
class LabelSet:
    """`gains`: class -> gain, least relevant first (mean gain when found in the data).

    `row_gains`: the gain of a row that has none of its own, per class. `vocabulary`: the known one that gave the order.
    """

    gains: dict[str, float]
    row_gains: tuple[float, ...]
    vocabulary: str = ""


def decide_labels(config: DataConfig, source: Source, seen: Survey | None) -> LabelSet:
    """Configured classes first, then those of the layout, then those in the data, by mean gain or as their names tell.

    Configured classes without known gains are spaced evenly from 0 to 1. Raises DataError for an empty label column
    and for labels whose order nothing tells.
    """
    known = source.fixed_labels
    if config.labels:
        last = max(1, len(config.labels) - 1)
        gains = {label: known.get(label, place / last) for place, label in enumerate(config.labels)}
        return LabelSet(gains, tuple(gains.values()))
    if known:
        return LabelSet(dict(known), tuple(known.values()))
    if seen is None or not seen.has_labels:
        return LabelSet({}, ())
    if not seen.labels:
        raise DataError(
            f"column {config.columns.label!r} is empty in all rows" + (" the filter keeps" if config.filter else ""),
            expected="a relevance class in every row",
            next_command="set --data.columns.label, or check --data.path"
            + (" and --data.filter" if config.filter else ""),
        )
    gains = seen.ordered_labels()
    if len(set(gains.values())) > 1 or (len(gains) == 1 and sum(gains.values()) > 0):
        return LabelSet(gains, (0.0,) * len(gains))
    if known_labels := known_order(list(gains)):
        gains, vocabulary = known_labels
        return LabelSet(gains, tuple(gains.values()), vocabulary)
    raise _no_order(config, seen.labels)


def _no_order(config: DataConfig, labels: Mapping[str, LabelCount]) -> DataError:
    by_rows = sorted(labels, key=lambda name: (-labels[name].rows, name))
    shown = by_rows[:_MAX_SHOWN]
    more = f" and {len(labels) - len(shown)} more" if len(labels) > len(shown) else ""
    value = ",".join(shown) if not any("," in name or name[:1] in "[{" for name in shown) else json.dumps(shown)
    return DataError(
        f"column {config.columns.label!r} has labels whose order neither gains nor their names tell: "
        + ", ".join(f"{name} ({labels[name].rows:,} rows)" for name in shown)
        + more,
        expected="data.labels, a column of gains that differ, grades from 0, or one of "
        + ", ".join(vocabulary.name for vocabulary in VOCABULARIES),
        next_command=f"--data.labels {shlex.quote(value)}, put in order: the least relevant first",
    )
