"""The relevance classes: configured, defined by the layout, or found in the data."""

from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.data.config import DataConfig
from pipeline.data.partitions import Source
from pipeline.data.survey import Survey


@dataclass(frozen=True)
class LabelSet:
    """`gains`: class -> gain, least relevant first (mean gain when found in the data).

    `row_gains`: the gain of a row that has none of its own, per class.
    """

    gains: dict[str, float]
    row_gains: tuple[float, ...]


def decide_labels(config: DataConfig, source: Source, seen: Survey | None) -> LabelSet:
    """Configured classes first, then those of the layout, then those in the data.

    Configured classes without known gains are spaced evenly from 0 to 1. Raises DataError for an empty label column.
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
    return LabelSet(gains, (0.0,) * len(gains))
