"""The relevance classes: configured, defined by the layout, or found in the data."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.data.config import DataConfig
from pipeline.data.partitions import Source
from pipeline.data.survey import LabelCount, Survey
from pipeline.data.vocabularies import VOCABULARIES, known_order

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
