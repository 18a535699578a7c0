"""One pass over a few columns before the work: which labels there are, and a sample of texts for the tokenizer.

Labels are configured, defined by the layout, or found in the data.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.rows import FILTER, text_characters
from pipeline.data.sources import ESCI_GAINS, Source, reading_progress
from pipeline.data.tokenizer import SAMPLE_ROWS
from pipeline.data.validate import filter_mask, numbers

MAX_LABELS = 1000
SAMPLE_BYTES = 128 * 2**20
"""Text held for the tokenizer at most. As Python objects and with the trainer's copy it takes five times that."""
_TEXT_FIELDS = ("query", "title", "text")


@dataclass
class TextSample:
    """Every `stride`-th row. The stride doubles whenever the sample outgrows its limits: an even spread in one pass.

    If several files are sampled, the n-th begins at row n: which rows are taken of a file does not depend on the files
    before it, and small files do not all give their first row.
    """

    limit: int = SAMPLE_ROWS
    stride: int = 1
    seen: int = 0
    held: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    held_bytes: int = 0

    def add(self, batch: pa.RecordBatch, max_bytes: int) -> None:
        """Take the texts of some rows, each cut to `max_bytes`."""
        chosen = np.flatnonzero((self.seen + np.arange(batch.num_rows)) % self.stride == 0)
        part = batch.take(pa.array(chosen))
        names = [name for name in _TEXT_FIELDS if name in part.schema.names]
        columns = [pc.binary_slice(part[name], 0, max_bytes).to_pylist() for name in names]
        rows = [tuple(value or b"" for value in row) for row in zip(*columns, strict=True)]
        self.held += [(self.seen + int(place), row) for place, row in zip(chosen, rows, strict=True)]
        self.held_bytes += sum(len(value) for row in rows for value in row)
        self.seen += batch.num_rows
        while len(self.held) > max(1, self.limit) or (self.held_bytes > SAMPLE_BYTES and len(self.held) > 1):
            self.stride *= 2
            self.held = [item for item in self.held if item[0] % self.stride == 0]
            self.held_bytes = sum(len(value) for _, row in self.held for value in row)

    def texts(self) -> Iterator[str]:
        """Yield the texts of the sampled rows without bytes that are not UTF-8."""
        return (value.decode("utf-8", "ignore") for _, row in self.held for value in row if value)


@dataclass
class LabelCount:
    """Rows of one label, and the sum of their gains (of those that have one)."""

    rows: int = 0
    gains: int = 0
    gain_sum: float = 0.0


@dataclass
class Survey:
    """`has_rows`: some can be read and the filter keeps them. `without_gain`: a file with rows and no gains."""

    sample: TextSample = field(default_factory=TextSample)
    labels: dict[str, LabelCount] = field(default_factory=dict)
    has_labels: bool = False
    has_rows: bool = False
    without_gain: str = ""


def survey(source: Source, config: DataConfig, *, want_labels: bool, want_sample: bool, stop: StopSignal) -> Survey:
    """Read only the columns that are wanted. Raises DataError for missing columns and for far too many labels."""
    fields = (["label", "gain"] if want_labels else []) + (list(_TEXT_FIELDS) if want_sample else [])
    fields += [FILTER + column for column in config.filter]
    max_bytes = 4 * text_characters(config.bucket_shapes)
    found = Survey()
    with reading_progress("looking at labels and texts", source.files) as tell:
        for number, file in enumerate(source.files):
            found.sample.seen = number
            for raw in source.read(file, fields):
                stop.raise_if_set(f"reading {file.key}")
                tell(raw)
                batch = raw.columns
                if config.filter:
                    batch = batch.filter(pa.array(filter_mask(batch, config.filter)))
                found.has_rows |= batch.num_rows > 0
                if want_labels and "label" in batch.schema.names:
                    found.has_labels = True
                    _count_labels(found.labels, batch, config.columns.label)
                    if batch.num_rows and "gain" not in batch.schema.names:
                        found.without_gain = found.without_gain or file.key
                if want_sample:
                    found.sample.add(batch, max_bytes)
    return found


def _count_labels(labels: dict[str, LabelCount], batch: pa.RecordBatch, column: str) -> None:
    gain = numbers(batch["gain"]) if "gain" in batch.schema.names else np.full(batch.num_rows, np.nan)
    is_bad = ~((gain >= 0) & (gain <= 1))  # a row with another gain will be bad
    table = pa.table({"label": batch["label"], "gain": pa.array(gain, mask=is_bad)})
    wanted = [("gain", "count", pc.CountOptions(mode="all")), ("gain", "count"), ("gain", "sum")]
    grouped = table.group_by("label", use_threads=False).aggregate(wanted)
    values = grouped["label"].to_pylist()
    for value, rows, gains, total in zip(values, *(column.to_pylist() for column in grouped.columns[1:]), strict=True):
        try:
            name = (value or b"").decode().strip()
        except UnicodeDecodeError:  # a bad row, counted when rows are judged
            continue
        if name:
            count = labels.setdefault(name, LabelCount())
            count.rows += rows
            count.gains += gains
            count.gain_sum += total or 0.0
    if len(labels) > MAX_LABELS:
        raise DataError(
            f"column {column!r} has over {MAX_LABELS} different values, such as {next(iter(labels))!r}",
            expected="a few relevance classes",
            next_command="set --data.columns.label to the column of the classes, or list them in --data.labels",
        )


# Labels and their gains.

_MAX_GRADE = 10
"""Larger numbers are no grades but something else: intents, categories, ids."""
_ORDERS = (
    {name.lower(): gain for name, gain in ESCI_GAINS.items()},
    {"irrelevant": 0.0, "complement": 0.01, "substitute": 0.1, "exact": 1.0},
    {"no": 0.0, "yes": 1.0},
    {"false": 0.0, "true": 1.0},
    {"non_match": 0.0, "match": 1.0},
)
"""Known sets of labels in small letters with their gains, least relevant first."""
_MAX_SHOWN = 20
_RARE = 0.005
"""Share of the rows below which a label that does not fit the others is taken for a mistake."""


@dataclass(frozen=True)
class LabelSet:
    """`gains`: by label, least relevant first. `row_gains`: for a row without a gain of its own, by label."""

    gains: dict[str, float]
    row_gains: tuple[float, ...]


def known_order(labels: Sequence[str]) -> dict[str, float] | None:
    """Return label -> gain, least relevant first, for grades from 0 to 10 and for known sets; None for other labels."""
    names = {label.lower(): label for label in labels}
    for order in _ORDERS:
        if len(names) == len(labels) and order.keys() >= names.keys():
            return {names[name]: gain for name, gain in order.items() if name in names}
    try:
        grades = sorted((float(label), label) for label in labels)
    except ValueError:
        return None
    values = [value for value, _ in grades]
    if len(set(values)) < len(values) or not all(value.is_integer() and 0 <= value <= _MAX_GRADE for value in values):
        return None
    low, high = values[0], values[-1]
    return {label: (value - low) / (high - low) if high > low else float(value > 0) for value, label in grades}


def common_labels(counts: Mapping[str, int]) -> list[str]:
    """Return the labels without rare ones, which look like mistakes if the others have a known order; else all."""
    common = [name for name, rows in counts.items() if rows >= _RARE * sum(counts.values())]
    return common if known_order(common) else [*counts]


def decide_labels(config: DataConfig, fixed: Mapping[str, float], seen: Survey | None) -> LabelSet:
    """Return the configured labels, else those `fixed` by the layout, else those in the data by mean gain or name.

    Configured labels without known gains are spaced evenly from 0 to 1. Input without a usable row has no labels: it is
    refused when its rows have been judged. Raises DataError if the label column is empty, if the order of labels is
    unknown, and if only some files have gains.
    """
    if config.labels:
        last = len(config.labels) - 1
        gains = {label: fixed.get(label, place / last) for place, label in enumerate(config.labels)}
        return LabelSet(gains, tuple(gains.values()))
    if fixed or seen is None or not seen.has_labels or not seen.has_rows:
        return LabelSet(dict(fixed), tuple(fixed.values()))
    column = config.columns.label
    if not seen.labels:
        raise DataError(
            f"column {column!r} is empty in all rows" + (" the filter keeps" if config.filter else ""),
            expected="a relevance class in every row",
            next_command="set --data.columns.label, or check --data.path and --data.filter",
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
    if (ordered := known_order([*seen.labels])) is not None:
        return LabelSet(ordered, tuple(ordered.values()))
    by_rows = sorted(seen.labels, key=lambda name: (-seen.labels[name].rows, name))[:_MAX_SHOWN]
    ordered = known_order(common_labels({name: one.rows for name, one in seen.labels.items()}))
    given, what = list(ordered or by_rows), "put in order: the least relevant first"
    what = "which makes the rows of all other labels bad rows" if ordered else what
    value = json.dumps(given) if any("," in name or name[:1] in "[{" for name in given) else ",".join(given)
    raise DataError(
        f"cannot infer the order of the {len(seen.labels)} labels in column {column!r}: "
        + ", ".join(f"{name} ({seen.labels[name].rows:,} rows)" for name in by_rows),
        expected="data.labels, a column of gains that differ, or grades from 0",
        next_command=f"--data.labels={shlex.quote(value)}, {what}",
    )
