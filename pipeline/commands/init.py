"""`trnpipe init`, which guesses the columns of a file of judgements and writes trnpipe.toml."""

import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.backends import auto_uses_xla_cpu
from pipeline.commands import ToolCall
from pipeline.core.errors import EXIT_OK, ConfigError, DataError
from pipeline.core.format import aligned, shortened
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.data.attributes import COLUMNS, ValueStats, attribute_pairs, find_columns, with_columns
from pipeline.data.config import CategoricalFeature, DataConfig
from pipeline.data.input_files import open_files
from pipeline.data.readers import TO_UTF8, UnsupportedColumn
from pipeline.data.rows import CLICK_COLUMNS, LIKELY_NAMES, OPTIONAL, SLICE, ColumnPlan, by_spelling
from pipeline.data.survey import MAX_LABELS, common_labels, infer_gains
from pipeline.evaluate.gate.judge import HALF_WIDTH, fraction_for
from pipeline.io.atomic import create_atomic
from pipeline.io.storage import os_errors
from pipeline.model.config import Attribute
from pipeline.settings import PROJECT_FILE, Settings, flatten, leaves

MAX_ROWS = 200_000
"""Maximum number of rows to read for guessing."""
_SHOWN_ROWS, _SHOWN_CHARACTERS = 10, 26
_BATCH_ROWS = 4096
_SPLITS = {"train", "valid", "validation", "val", "dev", "test"}
_MAX_LABELS, _MAX_CATEGORIES = 20, 1000
_ROWS_PER_CATEGORY = 5
_DISTINCT_NUMBERS = 10
"""Columns with at most this many distinct numbers are treated as categorical."""
_BRANDS, _BRAND_WORDS = 50, 1.5
"""Columns with at most this many values or mean words are not queries or titles, but brands or categories."""
_LONG = 40
"""Texts with a longer mean length are no attributes."""
_IDS = re.compile(r"(?i)(^|_)(id|ids|uri|url|link|cluster)(_|$)")
_CODES = ("model", "model_number", "model_no", "mpn", "part_number", "sku", "ean", "gtin", "upc", "isbn")
_OUTCOMES = {*LIKELY_NAMES["label"], *LIKELY_NAMES["gain"], *CLICK_COLUMNS, "clicked"} - {"rating", "score"}
"""Names of columns that may tell the label. Ratings and scores are more often features of products."""
_BRAND_NAMES = ("brand", "manufacturer", "maker", "vendor")


@dataclass
class Column:
    """Statistics of a column, such as its number of empty cells and the count of each value."""

    name: str
    rows: int = 0
    empty: int = 0
    damaged: int = 0
    """Number of cells that are not UTF-8."""
    characters: int = 0
    words: int = 0
    values: Counter[str] = field(default_factory=Counter)

    def add(self, values: Iterable[bytes | None]) -> None:
        for value in values:
            try:
                text = (value or b"").decode().strip()
            except UnicodeDecodeError:
                text = (value or b"").decode(errors="replace").strip()
                self.damaged += 1
            self.rows += 1
            self.empty += not text
            self.characters += len(text)
            self.words += len(text.split())
            if text:
                self.values[text] += 1

    @property
    def is_number(self) -> bool:
        stats = stats_of(self)
        return stats.numbers == stats.present > 0

    @property
    def is_category(self) -> bool:
        distinct = len(self.values)
        return 2 <= distinct <= _MAX_CATEGORIES and distinct * _ROWS_PER_CATEGORY <= self.rows


def stats_of(*columns: Column) -> ValueStats:
    """Return statistics of the values of columns, from which the kind of an attribute is determined."""
    stats = ValueStats()
    for text, count in (item for column in columns for item in column.values.items()):
        stats.add(text, count)
    return stats


@dataclass
class Guess:
    """The guessed meaning of the columns of a file."""

    columns: dict[str, str] = field(default_factory=dict)
    """Maps fields, such as query and title, to columns."""
    without: list[str] = field(default_factory=list)
    """Optional fields whose column has the default name, but the wrong content, so that it must not be read."""
    labels: tuple[str, ...] = ()
    """Labels in order, starting with the least relevant."""
    unordered: tuple[str, ...] = ()
    """Labels whose order could not be guessed."""
    numeric: list[str] = field(default_factory=list)
    categorical: list[CategoricalFeature] = field(default_factory=list)
    attributes: list[Attribute] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Messages about guesses that the user should check."""


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Write trnpipe.toml to the current folder.

    Raises ConfigError if it already exists, and DataError if the file of judgements is not usable.
    """
    path, target = call.arguments[0], Path(PROJECT_FILE)
    if target.exists():
        raise ConfigError(
            f"{target.absolute()} already exists",
            expected=f"a folder without {PROJECT_FILE}, so that no file is overwritten",
            next_command=f"edit the file, or rename it with mv {PROJECT_FILE} {PROJECT_FILE}.old",
        )
    unsupported = list[str]()
    while True:
        try:
            columns, rows = read_columns(path, settings.data, stop, unsupported)
            break
        except UnsupportedColumn as error:
            unsupported.append(error.column)
    guess = guess_columns(columns, settings.data, path)
    for line in _preview(guess, rows):
        say(line)
    queries = len(columns[guess.columns.get("query_id", guess.columns["query"])].values)
    fraction, split_lines = _split(guess, columns, queries, settings)
    text = project_text(path, guess, fraction, settings)
    notes = [f"column {name!r} is not used, because it has nested values" for name in unsupported]
    for line in (*split_lines, *notes, *guess.notes, _machine(settings)):
        say(f"- {line}")
    with os_errors("writing", target.absolute().as_uri()):
        create_atomic(target, text.encode())
    first = "put data.labels in order" if guess.unordered else "check it"
    say(
        f"wrote {PROJECT_FILE}. Next, {first}, then run trnpipe prepare, or a whole cycle: trnjobs submit --cycle first"
    )
    return EXIT_OK


def read_columns(
    path: str, config: DataConfig, stop: StopSignal, without: Collection[str] = ()
) -> tuple[dict[str, Column], list[dict[str, str]]]:
    """Read up to MAX_ROWS rows, and return column statistics and the first rows.

    Raises UnsupportedColumn if a column that is not in `without` has nested values, and DataError if no row can be
    read.
    """
    file_format = "auto" if config.format == "esci" else config.format
    files = open_files(path, file_format, stop, "FILE")
    columns, first, num_rows = dict[str, Column](), list[dict[str, str]](), 0

    def everything(names: Sequence[str]) -> ColumnPlan:
        return ColumnPlan(tuple((SLICE + name, name) for name in dict.fromkeys(names) if name not in without))

    for batch in files.read(lambda uri: everything, _BATCH_ROWS, "reading rows"):
        table = batch.columns
        names = [name.removeprefix(SLICE) for name in table.schema.names]
        for name, values in zip(names, table.columns, strict=True):
            columns.setdefault(name, Column(name)).add(values.to_pylist())
        for row in islice(range(table.num_rows), _SHOWN_ROWS - len(first)):
            cells = [(values[row].as_py() or b"").decode(errors="replace") for values in table.columns]
            first.append(dict(zip(names, cells, strict=True)))
        num_rows += table.num_rows
        if num_rows >= MAX_ROWS:
            break
    if not num_rows:
        raise DataError(
            f"{path} has no readable rows",
            expected="rows with a query, a title and a label",
            next_command="correct FILE",
        )
    damaged = max(columns.values(), key=lambda column: column.damaged)
    if damaged.damaged > config.max_bad_fraction * damaged.rows:
        raise DataError(
            f"{path}: {damaged.damaged:,} of {damaged.rows:,} values in column {damaged.name!r} are not UTF-8",
            expected="files in UTF-8",
            next_command=TO_UTF8,
        )
    return columns, first


def guess_columns(columns: Mapping[str, Column], config: DataConfig | None = None, path: str = "FILE") -> Guess:
    """Guess which columns hold which fields. Configured columns take precedence, then names, then content.

    Raises DataError if a configured column does not exist, or if no column looks like the query, title or label.
    """
    config, guess, rest = config or DataConfig(), Guess(), dict(columns)
    command = f"trnpipe init {shlex.quote(path)}"
    set_columns = config.columns.model_dump(exclude_unset=True)
    guess.columns.update((name, column) for name, column in set_columns.items() if column)
    list(attribute_pairs(config.attributes, list(columns), path))  # raises DataError if one has no column
    guess.attributes = [_resolved(attribute, columns) for attribute in config.attributes]
    configured = [*guess.columns.values(), *config.numeric, *(feature.column for feature in config.categorical)]
    configured += filter(None, (column for each in guess.attributes for column in (each.query, each.product)))
    if absent := [column for column in configured if columns and column not in columns]:
        raise DataError(
            f"{path} has no column {', '.join(map(repr, absent))}",
            expected=f"one of the columns {', '.join(columns)}",
            next_command=f"{command} with a different --data.columns.*, .numeric, .categorical or .attributes",
        )
    if not_numbers := [name for name in config.numeric if columns and not columns[name].is_number]:
        raise DataError(
            f"column {not_numbers[0]!r} of {path} has values that are not numbers",
            expected="only numbers and empty cells in --data.numeric",
            next_command=f"{command} with --data.categorical or --data.attributes for it",
        )
    if headers := [name for name in columns if re.fullmatch(r"[+-]?\d+([.,]\d+)?", name)]:
        guess.notes.append(
            f"the name of column {headers[0]!r} is a number. IF THE FILE HAS NO HEADER, add one, because the first row"
            " is read as one"
        )
    for name in configured:
        rest.pop(name, None)
    spelled = by_spelling(list(columns))
    for field_name, names in LIKELY_NAMES.items():
        match = next((spelled[name] for name in names if spelled.get(name) in rest), None)
        if match is None or field_name in set_columns:
            continue
        if _fits(field_name, rest[match]):
            guess.columns[field_name] = rest.pop(match).name
        elif field_name in OPTIONAL and match == field_name:
            guess.without.append(field_name)
            expected = {"gain": "numbers from 0 to 1", "split": f"only {', '.join(sorted(_SPLITS))}"}[field_name]
            guess.notes.append(f"column {rest.pop(match).name!r} is not used, because its values are not {expected}")
    texts = [column for column in rest.values() if not column.is_number and column.characters > 3 * column.rows]
    wanted = [name for name in ("query", "title") if name not in guess.columns]
    phrases = [column for column in texts if column.words > _BRAND_WORDS * column.rows and len(column.values) > _BRANDS]
    texts = phrases if len(phrases) >= len(wanted) else texts
    for field_name in wanted:
        if texts:
            most = max(len(column.values) for column in texts)
            chosen = min(texts, key=lambda column: len(column.values))  # there are fewer queries than titles
            if field_name == "title":  # which are shorter than other texts
                likely = (column for column in texts if len(column.values) >= most / 2)
                chosen = min(likely, key=lambda column: column.characters)
            texts.remove(chosen)
            guess.columns[field_name] = rest.pop(chosen.name).name
            guess.notes.append(
                f"column {guess.columns[field_name]!r} looks like the {field_name}, judging by its content"
            )
    if not guess.columns.keys() & {"label", "gain"}:
        grades = [
            column
            for column in rest.values()
            if 2 <= len(column.values) <= _MAX_LABELS and infer_gains([*column.values])
        ]
        if grades:
            guess.columns["label"] = rest.pop(grades[0].name).name
            guess.notes.append(f"column {grades[0].name!r} looks like the label, judging by its content")
    missing = [name for name in ("query", "title") if name not in guess.columns]
    missing += [] if guess.columns.keys() & {"label", "gain"} else ["label"]
    if missing:
        raise DataError(
            f"no column looks like the {' or the '.join(missing)} (columns: {', '.join(columns)})",
            expected="a query, a product title and a relevance label or gain in each row",
            next_command=" ".join([command, *(f"--data.columns.{name} COLUMN" for name in missing)]),
        )
    guess.labels, guess.numeric, guess.categorical = config.labels, [*config.numeric], [*config.categorical]
    if "label" in guess.columns and not guess.labels:
        _guess_labels(guess, columns[guess.columns["label"]])
    for pattern in COLUMNS["query"]:
        for name in [name for name in rest if re.fullmatch(pattern.format("(.+)"), name)]:
            before, after = pattern.split("{}")
            _guess_pair(guess, Attribute(name=name.removeprefix(before).removesuffix(after), query=name), rest)
    for column in rest.values():
        _guess_feature(guess, column)
    return guess


def _fits(field_name: str, column: Column) -> bool:
    if field_name == "split":
        return {value.lower() for value in column.values} <= _SPLITS
    if field_name == "gain":
        return column.is_number and all(0 <= float(value) <= 1 for value in column.values)
    return len(column.values) <= _MAX_LABELS if field_name == "label" else True


def _guess_labels(guess: Guess, column: Column) -> None:
    """Guess the labels and their order, ignoring rare ones that look like mistakes."""
    counts = column.values
    if len(counts) > MAX_LABELS:
        raise DataError(
            f"column {column.name!r} has {len(counts):,} different values",
            expected=f"at most {MAX_LABELS} labels, or a column of gains from 0 to 1",
            next_command="a different --data.columns.label, or --data.columns.gain",
        )
    names = [*counts] if infer_gains([*counts]) is not None else common_labels(counts)
    if rare := ", ".join(f"{name} ({rows})" for name, rows in counts.items() if name not in names):
        guess.notes.append(f"labels {rare} don't match the others, so these rows will be quarantined as bad rows")
    order = infer_gains(names)
    gains = [*(order or {}).values()]
    has_even_gains = gains == np.linspace(0, 1, len(gains)).tolist()
    if rare or (has_even_gains and "gain" not in guess.columns):  # listed labels get evenly spaced gains
        guess.labels = tuple(order or ())
    elif order is not None and "gain" not in guess.columns:
        shown = ", ".join(f"{label} {gain:.3g}" for label, gain in order.items())
        guess.notes.append(f"gains of the labels: {shown} (with data.labels, they would be evenly spaced)")
    if column.empty:
        guess.notes.append(f"{column.empty:,} rows have no {column.name}, so they will be quarantined as bad rows")
    if order is None and "gain" not in guess.columns:  # with gains, the order is not needed
        guess.unordered = tuple(sorted(names))
        guess.notes.append(f"PUT data.labels IN ORDER, starting with the least relevant: {', '.join(guess.unordered)}")


def _resolved(attribute: Attribute, columns: Mapping[str, Column]) -> Attribute:
    """Return an attribute with the columns that it has in a file and the kind of their values."""
    found = find_columns(attribute, list(columns))
    stats = stats_of(*(columns[name] for name in found.values() if name in columns))
    return with_columns(attribute, found, stats.kind)


def _guess_pair(guess: Guess, attribute: Attribute, rest: dict[str, Column]) -> None:
    """Add an attribute that both sides have, unless it is an id, which may tell the label, or a long text."""
    names = [*find_columns(attribute, list(rest)).values()]
    columns = [rest[name] for name in names]
    if len(columns) < len(COLUMNS) or not all(column.values for column in columns):
        return
    why = "ids and links of both sides may tell the label" if _IDS.search(attribute.name) else ""
    if sum(column.characters for column in columns) > _LONG * sum(column.rows - column.empty for column in columns):
        why = "their texts are long"
    if why:
        guess.notes.append(f"columns {' and '.join(map(repr, names))} are not used, because {why}")
    else:
        guess.attributes.append(_resolved(attribute, rest))
    for name in names:
        del rest[name]


def _guess_feature(guess: Guess, column: Column) -> None:
    distinct, spelled = len(column.values), next(iter(by_spelling([column.name])))
    if spelled in _OUTCOMES:
        guess.notes.append(f"column {column.name!r} is not used, because it may tell the label")
        return
    is_numeric = distinct > _DISTINCT_NUMBERS and column.is_number and stats_of(column).kind == "number"
    is_category = not is_numeric and column.is_category and spelled not in _CODES
    if is_numeric:
        guess.numeric.append(column.name)
    elif is_category:
        guess.categorical.append(CategoricalFeature(column=column.name))  # missing values form a category
    elif spelled in (*_CODES, *_BRAND_NAMES) and column.values:
        guess.attributes.append(Attribute(name=column.name, query="", product=column.name, kind="text"))
    else:
        why = f"has {distinct:,} different values in {column.rows:,} rows"
        guess.notes.append(f"column {column.name!r} is not used, because it {why}")


def _preview(guess: Guess, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Format the first rows as a table with a column for each used field and feature."""
    features = [*guess.numeric, *(feature.column for feature in guess.categorical)]
    features += filter(None, (column for each in guess.attributes for column in (each.query, each.product)))
    shown = [*guess.columns.items(), *((name, name) for name in features)]
    table = [[field for field, _ in shown]]
    for row in rows:
        cells = ["".join(c if c.isprintable() else " " for c in row.get(column, "")) for _, column in shown]
        table.append([shortened(cell, _SHOWN_CHARACTERS) for cell in cells])
    return aligned(table, left=range(len(shown)))


def _split(
    guess: Guess, columns: Mapping[str, Column], queries: int, settings: Settings
) -> tuple[float | None, list[str]]:
    """Determine data.test_fraction, or None for the default. Also returns lines about the splits and the gate."""
    needed, rows = settings.gate.min_queries, columns[guess.columns["query"]].rows
    lines = [f"{rows:,} rows, {queries:,} queries" + (f" in the first {MAX_ROWS:,} rows" if rows >= MAX_ROWS else "")]
    if "split" in guess.columns:
        counts = columns[guess.columns["split"]].values
        return None, [
            *lines,
            "splits by column: " + ", ".join(f"{name} {count:,} rows" for name, count in counts.items()),
        ]
    if settings.data.split_by != "query":
        return None, [*lines, f"rows are split by {settings.data.split_by}: trnpipe prepare prints the sizes"]
    fraction, is_set = settings.data.test_fraction, "test_fraction" in settings.data.model_fields_set
    if not is_set and fraction * queries < 1.5 * needed:  # not every query is included in the metric
        fraction = fraction_for(queries, round(1.5 * needed)) or fraction_for(queries, needed) or fraction
    sizes = {"test": fraction * queries, "valid": settings.data.valid_fraction * queries}
    sizes = {"train": queries - sum(sizes.values()), **sizes}
    lines.append("queries by split: " + ", ".join(f"{name} about {count:,.0f}" for name, count in sizes.items()))
    if sizes["test"] < needed:
        lines.append(
            f"THE GATE CANNOT JUDGE models with {sizes['test']:.0f} test queries, because it needs {needed}. Judge more"
            " queries, or promote a first model without a comparison by --gate.first-without-comparison"
        )
    else:
        drop = HALF_WIDTH / sizes["test"] ** 0.5
        lines.append(f"with {sizes['test']:.0f} test queries, the gate can detect nDCG differences of about {drop:.2g}")
    return (fraction if fraction != settings.data.test_fraction else None), lines


def _machine(settings: Settings) -> str:
    if auto_uses_xla_cpu(settings.backend, os.environ):
        return "this machine has no accelerator. The tiny model trains in minutes, but configs/small.toml takes hours"
    return "the accelerator of this machine is used. For a model of the size of MiniLM, add --config configs/small.toml"


def project_text(path: str, guess: Guess, test_fraction: float | None, settings: Settings | None = None) -> str:
    """Return the content of trnpipe.toml, including all explicitly set `settings`."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path.rstrip("/")).stem).strip("-_") or "search"
    data = {
        "path": path,
        "labels": guess.labels or guess.unordered,
        "numeric": guess.numeric,
        "categorical": [
            each.model_dump() if "num_ids" in each.model_fields_set else each.column for each in guess.categorical
        ],
        "attributes": [each.model_dump() for each in guess.attributes],
        "test_fraction": test_fraction,
    }
    sections: dict[str, dict[str, Any]] = {
        "": {"model_name": stem, "workspace": f"workspace/{stem}"},
        "data": {name: value for name, value in data.items() if value},
        "data.columns": {name: column for name, column in guess.columns.items() if name != column}
        | dict.fromkeys(guess.without, ""),
        "train": {"metric": "combined"},
        "health": {"min_free_gib": 1},
    }
    explicit = settings.model_dump(mode="json", exclude_unset=True, exclude_none=True) if settings else {}
    for dotted, value in flatten(explicit, leaves(Settings)):
        if dotted not in ("cycle", "data.path", "data.numeric", "data.categorical", "data.attributes"):
            section, _, name = dotted.rpartition(".")
            sections.setdefault(section, {})[name] = value
    comments = {
        "data.path": f"all rows count as new if the file changes, so add new days as {stem}/dt=YYYY-MM-DD/",
        "data.labels": "starting with the least relevant",
        "data.attributes": "texts are appended to queries and titles and compared, numbers subtracted and divided",
        **dict.fromkeys((f"data.columns.{name}" for name in guess.without), "do not read the column of this name"),
        "train.metric": "choose the best checkpoint by relevance scores and search",
        "health.min_free_gib": "disk space that a cycle of the tiny model needs",
    }
    if guess.unordered:
        comments["data.labels"] = (
            "PUT THEM IN ORDER, starting with the least relevant, then remove the # from this line"
        )
    if not Path(path).suffix:
        del comments["data.path"]
    lines = ["# Written by trnpipe init, read by all commands in this folder and below."]
    for section, values in sections.items():
        lines += [f"[{section}]"] if section and values else []
        for name, value in values.items():
            comment, mark = comments.get(f"{section}.{name}"), "# " if guess.unordered and name == "labels" else ""
            lines.append(f"{mark}{name} = {_toml(value)}" + (f"  # {comment}" if comment else ""))
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return "[\n" + "".join(f"    {_toml(item)},\n" for item in value) + "]"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value, ensure_ascii=False)
