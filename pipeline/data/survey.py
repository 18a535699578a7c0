"""Read a few columns of the whole input once, to count labels, survey attributes, and sample texts for the tokenizer.

The pass is only needed if the labels are neither configured nor defined by the dataset, if the columns or kinds of
attributes are not configured, or if a tokenizer has to be trained.
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
from pipeline.data.attributes import ATTRIBUTES, SIDES, AttributeSurvey, field_of
from pipeline.data.config import DataConfig
from pipeline.data.rows import FILTER, text_characters
from pipeline.data.sources import ESCI_GAINS, Source, reading_progress
from pipeline.data.tokenizer import SAMPLE_ROWS
from pipeline.data.validate import filter_mask, to_floats

MAX_LABELS = 1000
SAMPLE_BYTES = 128 * 2**20  # maximum size of the sampled text, which takes 5x as much memory during training
_TEXT_FIELDS, _UNKNOWN = ("query", "title", "text"), f"{ATTRIBUTES}unknown."


@dataclass
class TextSample:
    """A sample of every `stride`-th row, taken in a single pass.

    Whenever the sample exceeds its limits, the stride is doubled. Row numbers start at n in the n-th file, instead of
    continuing from the previous file. As a result, the rows sampled from a file do not depend on the sizes of other
    files, and small files do not all contribute their first row.
    """

    limit: int = SAMPLE_ROWS
    stride: int = 1
    next_row: int = 0
    rows: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    num_bytes: int = 0

    def add(self, batch: pa.RecordBatch, max_bytes: int) -> None:
        """Add rows from the next batch of a file. Texts are truncated to `max_bytes`."""
        chosen = np.flatnonzero((self.next_row + np.arange(batch.num_rows)) % self.stride == 0)
        sampled = batch.take(pa.array(chosen))
        names = [name for name in sampled.schema.names if name in _TEXT_FIELDS or name.startswith(_UNKNOWN)]
        columns = [pc.binary_slice(sampled[name], 0, max_bytes).to_pylist() for name in names]
        rows = [tuple(value or b"" for value in row) for row in zip(*columns, strict=True)]
        self.rows += [(self.next_row + int(index), row) for index, row in zip(chosen, rows, strict=True)]
        self.num_bytes += sum(len(value) for row in rows for value in row)
        self.next_row += batch.num_rows
        while len(self.rows) > max(1, self.limit) or (self.num_bytes > SAMPLE_BYTES and len(self.rows) > 1):
            self.stride *= 2
            self.rows = [item for item in self.rows if item[0] % self.stride == 0]
            self.num_bytes = sum(len(value) for _, row in self.rows for value in row)

    def texts(self) -> Iterator[str]:
        """Yield the texts of the sampled rows. Bytes that are not valid UTF-8 are dropped."""
        return (value.decode("utf-8", "ignore") for _, row in self.rows for value in row if value)


@dataclass
class LabelCount:
    """Statistics of a label: its number of rows, how many of them have a gain, and the sum of these gains."""

    rows: int = 0
    gains: int = 0
    gain_sum: float = 0.0


@dataclass
class Survey:
    """The labels and sampled texts of an input. `without_gain` is a file with rows but no gain column, if any."""

    sample: TextSample = field(default_factory=TextSample)
    labels: dict[str, LabelCount] = field(default_factory=dict)
    attributes: AttributeSurvey = field(default_factory=AttributeSurvey)
    has_labels: bool = False
    has_rows: bool = False
    without_gain: str = ""


def survey(source: Source, config: DataConfig, *, want_labels: bool, want_sample: bool, stop: StopSignal) -> Survey:
    """Read the input to count labels, to sample texts, or both, and to survey the attributes.

    Raises DataError if a required column is missing, or if there are more than MAX_LABELS labels.
    """
    fields = (["label", "gain"] if want_labels else []) + (list(_TEXT_FIELDS) if want_sample else [])
    fields += [field_of(each, side) for each in config.attributes for side in SIDES]
    fields += [FILTER + column for column in config.filter]
    max_bytes = 4 * text_characters(config.bucket_shapes)
    result = Survey()
    with reading_progress("reading labels and texts", source.files) as advance:
        for number, file in enumerate(source.files):
            result.sample.next_row = number
            for raw in source.read(file, fields):
                stop.raise_if_set(f"reading {file.key}")
                advance(raw)
                batch = raw.columns
                if config.filter:
                    batch = batch.filter(pa.array(filter_mask(batch, config.filter)))
                result.has_rows |= batch.num_rows > 0
                result.attributes.add(batch)
                if want_labels and "label" in batch.schema.names:
                    result.has_labels = True
                    _count_labels(result.labels, batch, config.columns.label)
                    if batch.num_rows and "gain" not in batch.schema.names:
                        result.without_gain = result.without_gain or file.key
                if want_sample:
                    result.sample.add(batch, max_bytes)
    return result


def _count_labels(labels: dict[str, LabelCount], batch: pa.RecordBatch, column: str) -> None:
    gain = to_floats(batch["gain"]) if "gain" in batch.schema.names else np.full(batch.num_rows, np.nan)
    is_bad = ~((gain >= 0) & (gain <= 1))
    table = pa.table({"label": batch["label"], "gain": pa.array(gain, mask=is_bad)})
    aggregations = [("gain", "count", pc.CountOptions(mode="all")), ("gain", "count"), ("gain", "sum")]
    grouped = table.group_by("label", use_threads=False).aggregate(aggregations)
    values = grouped["label"].to_pylist()
    for value, rows, gains, total in zip(values, *(column.to_pylist() for column in grouped.columns[1:]), strict=True):
        try:
            name = (value or b"").decode().strip()
        except UnicodeDecodeError:  # ignore the row here because validation reports it
            continue
        if name:
            count = labels.setdefault(name, LabelCount())
            count.rows += rows
            count.gains += gains
            count.gain_sum += total or 0.0
    if len(labels) > MAX_LABELS:
        raise DataError(
            f"label column {column!r} has more than {MAX_LABELS} different values, such as {next(iter(labels))!r}",
            expected="a few relevance classes",
            next_command="set --data.columns.label to the column of the classes, or list them in --data.labels",
        )


# Labels and their gains.

_MAX_GRADE = 10  # larger numbers are probably not grades but intents, categories or ids
_ORDERS = (
    {name.lower(): gain for name, gain in ESCI_GAINS.items()},
    {"irrelevant": 0.0, "complement": 0.01, "substitute": 0.1, "exact": 1.0},
    {"no": 0.0, "yes": 1.0},
    {"false": 0.0, "true": 1.0},
    {"non_match": 0.0, "match": 1.0},
)
"""Common sets of labels (in lower case) and their gains, least relevant first."""
_MAX_SHOWN = 20
_RARE = 0.005  # labels of a smaller fraction of the rows are likely mistakes if they do not fit the other labels


@dataclass(frozen=True)
class LabelSet:
    """The labels and their gains, least relevant first. `row_gains` contains the default gain of a row, by label."""

    gains: dict[str, float]
    row_gains: tuple[float, ...]


def infer_gains(labels: Sequence[str]) -> dict[str, float] | None:
    """Infer the gains of labels that belong to a common set, or that are grades from 0 to 10.

    Returns the gains by label, least relevant first, or None for all other labels.
    """
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
    """Return the labels without the rare ones, which are likely mistakes.

    If the order of the remaining labels cannot be inferred, all labels are returned.
    """
    common = [name for name, rows in counts.items() if rows >= _RARE * sum(counts.values())]
    return common if infer_gains(common) else [*counts]


def names_text(names: Sequence[str]) -> str:
    """Return a list of names as the value of a flag."""
    is_plain = not any("," in name or name[:1] in "[{" for name in names)
    return ",".join(names) if is_plain else json.dumps(names)


def decide_labels(config: DataConfig, fixed: Mapping[str, float], surveyed: Survey | None) -> LabelSet:
    """Determine the labels, their order, and their gains.

    Labels that are configured take precedence over labels that are `fixed` by the dataset, which take precedence over
    those that were observed in the data. Observed labels are ordered by their mean gain, or by their names if the names
    are known. The gains of configured labels are spaced evenly between 0 and 1 unless the dataset defines them. Raises
    DataError if the label column is empty, if the order of the labels is unknown, or if only some files have gains.
    """
    if config.labels:
        last = len(config.labels) - 1
        gains = {label: fixed.get(label, index / last) for index, label in enumerate(config.labels)}
        return LabelSet(gains, tuple(gains.values()))
    if fixed or surveyed is None or not surveyed.has_labels or not surveyed.has_rows:
        return LabelSet(dict(fixed), tuple(fixed.values()))
    column, labels = config.columns.label, surveyed.labels
    if not labels:
        raise DataError(
            f"label column {column!r} is empty in every row{' that data.filter keeps' if config.filter else ''}",
            expected="a relevance class in every row",
            next_command="set --data.columns.label, or check --data.path and --data.filter",
        )
    means = {name: round(count.gain_sum / max(1, count.gains), 6) for name, count in labels.items()}
    gains = dict(sorted(means.items(), key=lambda item: (item[1], item[0])))
    if len(set(gains.values())) > 1 or (len(gains) == 1 and sum(gains.values()) > 0):
        if surveyed.without_gain:
            raise DataError(
                f"{surveyed.without_gain} has no column {config.columns.gain!r}, but other files have one",
                expected="a gain column in every file, or in none",
                next_command="add the column, or set --data.labels so that such rows get the gain of their label",
            )
        return LabelSet(gains, (0.0,) * len(gains))
    if (inferred := infer_gains([*labels])) is not None:
        return LabelSet(inferred, tuple(inferred.values()))
    by_rows = sorted(labels, key=lambda name: (-labels[name].rows, name))[:_MAX_SHOWN]
    counts = ", ".join(f"{name} ({labels[name].rows:,} rows)" for name in by_rows)
    inferred = infer_gains(common_labels({name: count.rows for name, count in labels.items()}))
    names = list(inferred or by_rows)
    value = names_text(names)
    command = f"--data.labels={shlex.quote(value)} (rows with other labels become bad rows)"
    if not inferred:  # must not be used as it is, because it would be accepted
        command = f"--data.labels LEAST,...,MOST with these labels in order of relevance: {value}"
    raise DataError(
        f"cannot infer the order of the {len(labels)} labels in column {column!r}: {counts}",
        expected="data.labels, a gain column with different values, or grades from 0",
        next_command=command,
    )
