"""One pass over a few columns, before the work: a sample of texts for the tokenizer, and which classes there are.

Classes are configured, defined by the layout, or found in the data.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.core.errors import DataError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.input_files import InputFile
from pipeline.data.rows import FILTER, BadRow, RawBatch, text_characters
from pipeline.data.sources import Source, reading_progress
from pipeline.data.validate import filter_mask, numbers

MAX_LABELS = 1000
SAMPLE_BYTES = 128 * 2**20
"""Text held for the tokenizer at most; in Python objects and with the copy for the trainer about five times that."""
_TEXT_FIELDS = ("query", "title", "text")


@dataclass
class LabelCount:
    """Rows of one label, and the sum of their gains (of those that have one)."""

    rows: int = 0
    gains: int = 0
    gain_sum: float = 0.0


def fits(rows: int, size_bytes: int, limit: int, share: float = 1.0) -> bool:
    """Whether a sample of so many rows may be held."""
    return rows <= max(1, limit) and (size_bytes <= share * SAMPLE_BYTES or rows <= 1)


@dataclass
class TextSample:
    """Every `stride`-th row; the stride doubles whenever the sample outgrows its limits: an even spread in one pass.

    At most `limit` rows and this `share` of SAMPLE_BYTES are held. Where several files are sampled, the n-th begins at
    row n: which rows are taken of a file does not depend on those before it, and of small files not all are.
    """

    limit: int
    share: float = 1.0
    stride: int = 1
    seen: int = 0
    held_bytes: int = 0
    held: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch, max_bytes: int) -> None:
        chosen = np.flatnonzero((self.seen + np.arange(batch.num_rows)) % self.stride == 0)
        part = batch.take(pa.array(chosen))
        columns = [pc.binary_slice(part[name], 0, max_bytes).to_pylist() for name in self.columns(part)]
        rows = ((value or b"" for value in row) for row in zip(*columns, strict=True))
        self.held += [(self.seen + int(place), tuple(row)) for place, row in zip(chosen, rows, strict=True)]
        self.seen += batch.num_rows
        fresh = self.held[len(self.held) - len(chosen) :]
        self.held_bytes += sum(len(value) for _, row in fresh for value in row)
        while not fits(len(self.held), self.held_bytes, self.limit, self.share):
            self.stride *= 2
            self.held = [item for item in self.held if item[0] % self.stride == 0]
            self.held_bytes = sum(len(value) for _, row in self.held for value in row)

    @staticmethod
    def columns(batch: pa.RecordBatch) -> list[str]:
        """Those of texts, in their order."""
        return [name for name in _TEXT_FIELDS if name in batch.schema.names]

    def texts(self) -> Iterator[str]:
        """All texts of the sampled rows; bytes that are not UTF-8 are left out."""
        for _, row in self.held:
            for value in row:
                if value:
                    yield value.decode("utf-8", "ignore")


@dataclass(frozen=True)
class Survey:
    labels: dict[str, LabelCount]
    sample: TextSample
    has_labels: bool
    without_gain: str = ""
    has_rows: bool = True
    """Whether the filter keeps any; not looked at by several workers."""
    malformed: BadRow | None = None
    """The first row that could not be read."""


def survey(source: Source, config: DataConfig, *, want_labels: bool, want_sample: bool, stop: StopSignal) -> Survey:
    """Read what is wanted and nothing else. Raises DataError (missing columns, far too many labels)."""
    labels = FileLabels()
    sample = TextSample(config.tokenizer.train_rows)
    files = [file for partition in source.partitions for file in partition.files]
    with reading_progress("looking at labels and texts", source, files) as tell:
        for number, file in enumerate(files):
            sample.seen = number
            found = survey_file(source, config, file, sample if want_sample else None, want_labels, tell, stop)
            labels.add(found, config.columns.label)
    return Survey(labels.counts, sample, labels.there, labels.without_gain, labels.has_rows, labels.malformed)


@dataclass
class FileLabels:
    """The labels of a file, or of several.

    `there`: whether one has a column of them. `without_gain`: key of a file that has rows and no column of gains.
    """

    counts: dict[str, LabelCount] = field(default_factory=dict)
    there: bool = False
    without_gain: str = ""
    has_rows: bool = False
    malformed: BadRow | None = None

    def add(self, other: "FileLabels", column: str) -> None:
        """Raises DataError for far too many labels."""
        self.there = self.there or other.there
        self.has_rows = self.has_rows or other.has_rows
        self.without_gain = self.without_gain or other.without_gain
        self.malformed = self.malformed or other.malformed
        for name, count in other.counts.items():
            mine = self.counts.setdefault(name, LabelCount())
            mine.rows += count.rows
            mine.gains += count.gains
            mine.gain_sum += count.gain_sum
        _check_number(self.counts, column)


def survey_file(
    source: Source,
    config: DataConfig,
    file: InputFile,
    sample: TextSample | None,
    want_labels: bool,
    tell: Callable[[RawBatch], None],
    stop: StopSignal,
) -> FileLabels:
    """Read what is wanted of one file; texts go into `sample`. Raises DataError."""
    fields = (["label", "gain"] if want_labels else []) + (list(_TEXT_FIELDS) if sample is not None else [])
    max_bytes = 4 * text_characters(config.bucket_shapes)
    found = FileLabels()
    for raw in source.read(file, [*fields, *(FILTER + column for column in config.filter)]):
        stop.raise_if_set(f"reading {file.key}")
        tell(raw)
        batch = raw.columns
        found.malformed = found.malformed or next(iter(raw.bad), None)
        if config.filter:
            batch = batch.filter(pa.array(filter_mask(batch, config.filter)))
        found.has_rows = found.has_rows or batch.num_rows > 0
        if want_labels and "label" in batch.schema.names:
            found.there = True
            _count_labels(found.counts, batch, config.columns.label)
            if batch.num_rows and "gain" not in batch.schema.names:
                found.without_gain = file.key
        if sample is not None:
            sample.add(batch, max_bytes)
    return found


def _count_labels(labels: dict[str, LabelCount], batch: pa.RecordBatch, column: str) -> None:
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
            count = labels.setdefault(name, LabelCount())
            count.rows += int(rows[number])
            count.gains += int(gains[number])
            count.gain_sum += float(sums[number])
    _check_number(labels, column)


def _check_number(labels: Mapping[str, LabelCount], column: str) -> None:
    if len(labels) > MAX_LABELS:
        raise DataError(
            f"column {column!r} has over {MAX_LABELS} different values, such as {next(iter(labels))!r}",
            expected="a few relevance classes",
            next_command="set --data.columns.label to the column of the classes, or list them in --data.labels",
        )


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
    ordered = _by_value(labels)
    if not all(0 <= float(label) <= _MAX_GRADE and float(label).is_integer() for label in ordered):
        return {}
    return {label: int(float(label)) for label in ordered}


def _by_value(labels: Sequence[str]) -> list[str]:
    """Numbers, each once, in order; nothing for other labels."""
    try:
        values = {float(label): label for label in labels}
    except ValueError:
        return []
    return [values[value] for value in sorted(values)] if len(values) == len(labels) else []


def _plain(label: str) -> str:
    return re.sub(r"[-_\s]+", "", label).casefold()


_MAX_SHOWN = 20
_RARE = 0.001
"""Labels with at most this share of the rows are typing errors where the others are a known vocabulary: bad rows."""


@dataclass(frozen=True)
class LabelSet:
    """`gains`: class -> gain, least relevant first (mean gain when found in the data).

    `row_gains`: the gain of a row that has none of its own, per class. `vocabulary`: the known one that gave the order,
    and the labels that are not in it.
    """

    gains: dict[str, float]
    row_gains: tuple[float, ...]
    vocabulary: str = ""


def nothing_kept(config: DataConfig) -> DataError:
    """The error for a filter, or a locale of ESCI, that no row passes."""
    asked = {**config.filter, **({"esci_locale": config.esci_locale} if config.esci_locale else {})}
    wanted = " and ".join(f"{column}={value}" for column, value in asked.items())
    return DataError(
        f"no row of {config.path or 'the synthetic catalogue'} has {wanted}",
        expected="values that occur in these columns, as they are written there",
        next_command="correct --data.filter" + (" or --data.esci-locale" if config.esci_locale else ""),
    )


def decide_labels(config: DataConfig, source: Source, seen: Survey | None) -> LabelSet:
    """Configured classes first, then those of the layout, then those in the data, by mean gain or as their names tell.

    Configured classes without known gains are spaced evenly from 0 to 1. Raises DataError for an empty label column,
    for labels whose order nothing tells, and where gains tell it and a file has none.
    """
    known = source.fixed_labels
    if seen is not None and not seen.has_rows and (bad := seen.malformed):
        raise DataError(
            f"no row of {config.path} can be read; the first that cannot is in {bad.file}, "
            + (f"line {bad.line}: {bad.reason}" if bad.line else f"row {bad.row}: {bad.reason}"),
            expected="rows with as many fields as the header, and quotes that are closed",
            next_command=f"look at that place of {bad.file}, and write the file again",
        )
    if seen is not None and not seen.has_rows and config.filter:
        raise nothing_kept(config)
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
    by_rows = sorted(seen.labels, key=lambda name: (-seen.labels[name].rows, name))
    total = sum(count.rows for count in seen.labels.values())
    common = [name for name in by_rows if seen.labels[name].rows > _RARE * total]
    for names in (by_rows, common):
        if (ordered := known_order(names)) and (len(names) > 1 or names == by_rows):
            rare = "" if names == by_rows else ", without " + ", ".join(by_rows[len(names) :][:_MAX_SHOWN])
            return LabelSet(ordered[0], tuple(ordered[0].values()), ordered[1] + rare)
    raise _unknown_order(config.columns.label, by_rows, seen.labels)


def _unknown_order(column: str, by_rows: Sequence[str], counts: Mapping[str, LabelCount]) -> DataError:
    """Return the error for labels, the most frequent first, that neither gains nor a known vocabulary order.

    The next command has the most frequent labels that a vocabulary orders, if there are some, else all to be ordered.
    """
    shown = by_rows[:_MAX_SHOWN]
    more = f" and {len(by_rows) - len(shown)} more" if len(by_rows) > len(shown) else ""
    orders = (known_order(by_rows[:size]) for size in range(len(by_rows) - 1, 1, -1))
    if len(labels := _by_value(shown)) == len(by_rows):
        advice = ", if the least of these numbers is the least relevant"
    elif ordered := next(filter(None, orders), None):
        labels = [*ordered[0]]
        others = sum(counts[name].rows for name in by_rows if name not in ordered[0])
        advice = f"; the {others:,} rows with another label are bad rows then"
    else:
        labels, advice = [*shown], ", put in order: the least relevant first"
    value = ",".join(labels) if not any("," in name or name[:1] in "[{" for name in labels) else json.dumps(labels)
    return DataError(
        f"column {column!r} has labels whose order neither gains nor their names tell: "
        + ", ".join(f"{name} ({counts[name].rows:,} rows)" for name in shown)
        + more,
        expected="data.labels, a column of gains that differ, grades from 0, or one of "
        + ", ".join(vocabulary.name for vocabulary in VOCABULARIES),
        next_command=f"--data.labels{'=' if value.startswith('-') else ' '}{shlex.quote(value)}{advice}",
    )
