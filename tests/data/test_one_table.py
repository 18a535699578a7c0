"""One table gives the same rows, or the same refusal, whichever format it is written in."""

import csv
import json
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.data.config import CategoricalFeature, DataConfig
from pipeline.data.input_files import FLAT
from pipeline.data.readers import read_file
from pipeline.data.rows import canonical_text, cut_chunks, plan_columns
from pipeline.data.survey import _count_labels
from pipeline.data.validate import RowRules, validate_chunk
from pipeline.io.storage import open_storage

FORMATS = ("csv", "jsonl", "parquet")
COLUMNS = ("query", "title", "text", "label", "query_id", "split", "price", "brand", "market")
_BIG = 2**53
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8) | st.sampled_from(
    ["7.0", "7", "007", "1e3", "1_000", "nan", "NA", " x ", 'a "b', '"a"', "a\tb", "a\nb", "\\", '\\"', "true", "[]"]
)
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "text": (pa.string(), TEXTS),
    "large text": (pa.large_string(), TEXTS),
    "categories": (pa.dictionary(pa.int32(), pa.string()), TEXTS),
    "bytes": (pa.binary(), TEXTS),
    "int8": (pa.int8(), st.integers(-(2**7), 2**7 - 1)),
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "double": (pa.float64(), st.floats(allow_nan=False) | st.integers(-_BIG, _BIG).map(float)),
    "float": (pa.float32(), st.floats(width=32, allow_nan=False) | st.integers(-100, 100).map(float)),
    "decimal": (pa.decimal128(20, 0), st.integers(-(10**18), 10**18)),
    "bool": (pa.bool_(), st.booleans()),
    "nothing": (pa.null(), st.none()),
}


@dataclass
class Table:
    types: dict[str, pa.DataType]
    rows: list[dict[str, Any]]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    kinds = {name: draw(st.sampled_from([*KINDS])) for name in COLUMNS}
    kinds["split"] = draw(st.sampled_from(["nothing", "text"]))
    values = {name: st.none() | KINDS[kind][1] for name, kind in kinds.items()}
    values["split"] = st.just(draw(st.sampled_from(["train", "Test", "validation"])))
    rows = draw(st.lists(st.fixed_dictionaries(values), min_size=1, max_size=6))
    if kinds["split"] == "nothing":
        rows = [{**row, "split": None} for row in rows]
    return Table({name: KINDS[kind][0] for name, kind in kinds.items()}, rows)


def as_text(value: Any) -> str:
    """As Python's csv and pandas write it."""
    return "" if value is None else str(value)


def write(table: Table, path: Path) -> None:
    names = list(table.types)
    if path.name == "parquet":
        arrays = [
            pa.array([value.encode() if kind == pa.binary() and value is not None else value for value in column], kind)
            for kind, column in ((kind, [row[name] for row in table.rows]) for name, kind in table.types.items())
        ]
        pq.write_table(pa.table(dict(zip(names, arrays, strict=True))), path)
    elif path.name == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = [[as_text(_narrow(row[name], table.types[name])) for name in names] for row in table.rows]
            csv.writer(file).writerows([names, *rows])
    else:
        rows_of_json = [{name: _narrow(row[name], table.types[name]) for name in names} for row in table.rows]
        lines = [json.dumps(row, ensure_ascii=number % 2 == 0) + "\n" for number, row in enumerate(rows_of_json)]
        path.write_text("".join(lines), encoding="utf-8", newline="")


def _narrow(value: Any, kind: pa.DataType) -> Any:
    """A float of four bytes has the digits that tell it from the others, in every format."""
    return float(str(np.float32(value))) if kind == pa.float32() and value is not None else value


CONFIG = DataConfig(
    numeric=("price",),
    categorical=(CategoricalFeature(column="brand"),),
    slices=("market",),
    valid_fraction=0.3,
    test_fraction=0.3,
)


def outcome(folder: Path, format_name: str, wanted: dict[str, str], labels: tuple[str, ...]) -> Any:
    """All that prepare makes of a file: the columns of its good rows, the bad ones, and its labels; or the refusal."""
    config, storage = CONFIG.model_copy(update={"filter": wanted}), open_storage(str(folder))
    gains = tuple(place / 2 for place in range(len(labels)))
    rules = RowRules(config, FLAT, labels, gains, carve_valid=False)
    found: list[Any] = []
    counts: dict[str, Any] = {}
    try:
        batches = list(
            read_file(storage, format_name, format_name, lambda names: plan_columns(config, names, "table"), 3)
        )
    except DataError as error:
        return DataError, error.seen.rpartition("column ")[2].split(" is ")[0]
    for batch in batches:
        _count_labels(counts, batch.columns, "label")
    for chunk in cut_chunks("table", batches, 100):
        rows, bad, judged = validate_chunk(chunk, rules)
        numbers = rows.numeric.astype(object)
        numbers[np.isnan(rows.numeric)] = None  # because NaN is not equal to itself
        arrays = (rows.label, rows.gain, numbers, rows.categorical, rows.sample_id, rows.query_id, rows.split)
        values = [rows.query, rows.title, rows.text, *(array.tolist() for array in arrays)]
        found.append((judged, values, rows.slices.values.tolist(), [(row.row, row.reason, row.count) for row in bad]))
    return found, counts


@given(table=tables(), data=st.data())
def test_every_format_gives_the_same_rows(
    table: Table, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    labels = {as_text(row["label"]).strip() for row in table.rows}
    filters = [as_text(row["market"]) for row in table.rows]
    value = data.draw(st.sampled_from(filters))
    is_plain = value == value.strip() and "|" not in value
    wanted = {"market": value} if is_plain and data.draw(st.booleans()) else {}
    for name in FORMATS:
        write(table, folder / name)
    chosen = tuple(sorted({canonical_text(label) for label in labels if label}))
    results = [outcome(folder, name, wanted, chosen) for name in FORMATS]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("field", ["query", "title", "text", "label", "query_id", "price", "brand"])
@pytest.mark.parametrize(
    ("values", "kind", "is_text"),
    [
        ([["a", "b"], ["c"]], pa.list_(pa.string()), True),
        ([["a", None], []], pa.list_(pa.string()), True),
        ([[], []], pa.list_(pa.null()), True),
        ([["a"], None], pa.large_list(pa.large_string()), True),
        ([[1, 2], []], pa.list_(pa.int64()), False),
        ([{"en": "a"}, None], pa.struct({"en": pa.string()}), False),
        ([[{"en": "a"}], None], pa.list_(pa.struct({"en": pa.string()})), False),
    ],
)
def test_lists_are_joined_in_texts_or_refused(
    tmp_path: Path, field: str, values: list[Any], kind: pa.DataType, is_text: bool
) -> None:
    plain: dict[str, Any] = {**dict.fromkeys(COLUMNS, "x"), "split": "train", "price": 1.0}
    types = {**dict.fromkeys(COLUMNS, pa.string()), "price": pa.float64(), field: kind}
    table = Table(types, [{**plain, field: value} for value in values])
    for name in FORMATS[1:]:
        write(table, tmp_path / name)
    json_lines, parquet = (outcome(tmp_path, name, {}, ("x", "y")) for name in FORMATS[1:])
    assert json_lines == parquet
    is_read = is_text and field in ("query", "title", "text")
    assert (json_lines == (DataError, repr(field))) is not is_read
    if is_read and field == "text":
        ((_, read, _, _),), _ = json_lines
        assert read[2] == [" ".join(filter(None, value or ())) for value in values]


@pytest.mark.parametrize("name", FORMATS)
def test_seven_is_one_id_and_one_label(tmp_path: Path, name: str) -> None:
    """However it is stored: as a whole number, as a float, as text of either; also beyond 10^10."""
    results = []
    for number in (7, 4006381333007):
        for kind, value in (
            (pa.int64(), number),
            (pa.uint64(), number),
            (pa.float64(), float(number)),
            (pa.decimal128(20, 2), Decimal(f"{number}.00")),
            (pa.string(), str(number)),
            (pa.string(), f"{number}.0"),
            (pa.binary(), f"{number}.0"),
        ):
            types = {**dict.fromkeys(COLUMNS, kind), "title": pa.string(), "split": pa.string()}
            given = float(value) if isinstance(value, Decimal) and name == "jsonl" else value
            write(Table(types, [{**dict.fromkeys(COLUMNS, given), "title": "x", "split": "train"}]), tmp_path / name)
            results.append(outcome(tmp_path, name, {"market": f"{number}.0"}, (f"{number}.0", "x")))
        ((judged, values, _, bad),), counts = results[-1]
        assert (judged, values[0], values[3], bad, list(counts)) == (1, [str(number)], [0], [], [str(number)])
        assert all(result == results[-1] for result in results[-7:])


SAME = ("7", "007", "007.0", "7.50", "1e3", "7.", ".0", "1.5E-7", "1.0E999", "v7.0", "٧.٠")
TEXT_OF = {"7.0": "7", "True": "true", " FALSE ": "false", "-0.0": "0", " 7.00 ": "7", "1e+22": "1" + "0" * 22}
LARGE = {"4.006381333007E12": "4006381333007", "9007199254740993.0": "9007199254740993"}


@pytest.mark.parametrize(("text", "number"), [*TEXT_OF.items(), *LARGE.items(), *zip(SAME, SAME, strict=True)])
def test_a_canonical_text_has_one_text(text: str, number: str) -> None:
    assert canonical_text(text) == number


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_of_features(tmp_path: Path, name: str) -> None:
    """What is no number in the data of others is none here: Python's own reads 1_000."""
    texts = ["1_000", " 7 ", "nan", "inf", "12,5", "٣", "true", "1e2", None]
    rows = [{**dict.fromkeys(COLUMNS, "x"), "split": "train", "price": text} for text in texts]
    write(Table(dict.fromkeys(COLUMNS, pa.string()), rows), tmp_path / name)
    ((judged, values, _, bad),), _ = outcome(tmp_path, name, {}, ("x", "y"))
    assert judged == len(texts)
    assert values[5] == [[7.0], [None], [1.0], [100.0], [None]]
    assert [(row, "price" in reason) for row, reason, _ in bad] == [(row, True) for row in (0, 3, 4, 5)]
