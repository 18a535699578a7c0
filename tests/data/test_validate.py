"""Each row is usable or has one reason why not; slices are stored by hash with their names beside."""

import json
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import hash63
from pipeline.data.config import CategoricalFeature, ColumnMapping, DataConfig, SplitBy
from pipeline.data.rows import (
    RawBatch,
    RowChunk,
    cut_chunks,
    plan_columns,
    quarantine_lines,
    to_fields,
)
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.validate import (
    MAX_NAMES,
    NO_VALUE,
    CleanRows,
    RowRules,
    category_id,
    merge_names,
    slice_rows,
    to_codes,
    validate_chunk,
)

CONFIG = DataConfig(
    numeric=("price",),
    categorical=(CategoricalFeature(column="brand", num_ids=16),),
    filter={"market": "uk"},
    valid_fraction=0,
    test_fraction=0,
)
RULES = RowRules(CONFIG, "flat", ("no", "yes"), (0.0, 1.0), carve_valid=False)
PLAIN = replace(RULES, config=CONFIG.model_copy(update={"filter": {}, "categorical": ()}))
GOOD: dict[str, Any] = {
    "query": b"q",
    "title": b"t",
    "label": b"yes",
    "gain": 0.5,
    "price": 1.0,
    "brand": b"acme",
    "split": b"train",
    "market": b"uk",
}


def chunk_of(*rows: dict[str, Any]) -> RowChunk:
    table = pa.Table.from_pylist([{**GOOD, **row} for row in rows])
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    fields = to_fields(columns, plan_columns(CONFIG, table.column_names, "f"))
    return next(cut_chunks("f", [RawBatch(fields, np.arange(len(rows), dtype=np.int64))], 1000))


def judged(*rows: dict[str, Any]) -> tuple[CleanRows, list[QuarantinedRow], int]:
    return validate_chunk(chunk_of(*rows), RULES)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": b"  "}, "empty query"),
        ({"query": None}, "empty query"),
        ({"title": b""}, "empty title"),
        ({"label": b"maybe"}, "unknown label"),
        ({"label": None}, "no label"),
        ({"title": b"\xff"}, "title is not UTF-8"),
        ({"query": b"\xc3"}, "query is not UTF-8"),
        ({"gain": float("nan")}, "gain is not a number from 0 to 1"),
        ({"gain": 1.5}, "gain is not a number from 0 to 1"),
        ({"price": float("inf")}, "feature price is not a finite number"),
        ({"price": -1e38}, "feature price is not a finite number"),
        ({"price": 1e300}, "feature price is not a finite number"),
        ({"split": b"holdout"}, "unknown split"),
    ],
)
def test_each_defect_has_its_reason(change: dict[str, Any], reason: str) -> None:
    rows, bad, rows_read = judged({}, change, {})
    assert [(row.row, row.reason) for row in bad] == [(1, reason)]
    assert len(rows.query) == 2
    assert rows_read == 3


@pytest.mark.parametrize(("cell", "is_good"), [
    (b"", True), (b"  ", True), (None, True), (b"nan", True), (b" NaN ", True), (b"-nan", True), (b"7", True),
    (b"n/a", False), (b"inf", False), (b"-Infinity", False), (b"1e39", False), (b"1_000", False), (b"1,5", False),
])  # fmt: skip
def test_an_empty_number_is_missing_and_other_text_is_bad(cell: bytes | None, is_good: bool) -> None:
    rows, bad, _ = judged({"price": b"1"}, {"price": cell})
    assert [row.reason for row in bad] == ([] if is_good else ["feature price is not a finite number"])
    assert len(rows.query) == 1 + is_good
    assert not is_good or rows.numeric[1, 0] == 7 or np.isnan(rows.numeric[1, 0])
    assert np.isnan(rows.numeric).sum() == (is_good and cell != b"7")


def test_numbers_that_are_null_or_nan_are_missing() -> None:
    rows, bad, _ = judged({"price": float("nan")}, {"price": 2.5}, {"price": None})
    assert not bad and str(rows.numeric.tolist()) == "[[nan], [2.5], [nan]]"


def test_good_rows_keep_their_values() -> None:
    rows, bad, _ = judged({"split": b"Validation"}, {"label": b"no", "brand": None, "query": " ü ".encode()})
    assert not bad
    assert rows.query == ["q", "ü"]
    assert rows.label.tolist() == [1, 0]
    assert rows.gain.tolist() == [0.5, 0.5]
    assert rows.numeric.tolist() == [[1.0], [1.0]]
    assert rows.categorical.tolist() == [[category_id(b"acme", 16)], [0]]
    assert rows.split.tolist() == [1, 0]
    assert len(set(rows.sample_id.tolist())) == 2


def test_a_bad_row_is_shown_by_the_columns_of_its_file() -> None:
    config = DataConfig(columns=ColumnMapping(query="search_term"), numeric=("price",))
    table = {
        "search_term": pa.array([b"shoe"], pa.large_binary()),
        "title": pa.array([b"x" * 600], pa.large_binary()),
        "label": pa.array([None], pa.large_binary()),
        "price": pa.array([float("inf")]),
    }
    fields = to_fields(table, plan_columns(config, [*table], "f"))
    _, bad, _ = validate_chunk(next(cut_chunks("f", [RawBatch(fields, np.arange(1, dtype=np.int64))], 10)), PLAIN)
    shown = {"search_term": "shoe", "title": "x" * 500 + "...", "label": None, "price": "inf"}
    assert [row.content for row in bad] == [shown]
    (row,) = bad
    assert json.loads(quarantine_lines([row]))["content"] == json.loads(row.text) == shown


def test_split_by_hash_keeps_queries_whole_and_shares() -> None:
    rules = RowRules(DataConfig(valid_fraction=0.2, test_fraction=0.1), "flat", (), (), carve_valid=False)
    table = pa.table(
        {"query": [f"query {i // 4}".encode() for i in range(4000)], "title": [b"t"] * 4000, "gain": [0.0] * 4000}
    )
    chunk = next(cut_chunks("f", [RawBatch(table.to_batches()[0], np.arange(4000, dtype=np.int64))], 9999))
    rows, _, _ = validate_chunk(chunk, rules)
    assert all(len(set(rows.split[i : i + 4])) == 1 for i in range(0, 4000, 4))
    shares = np.bincount(rows.split, minlength=3) / 4000
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.04)
    assert (rows.label == -1).all()


def texts(**columns: list[bytes | None]) -> RowChunk:
    """A chunk of text columns as CSV gives them; query, title and gain unless given."""
    num_rows = len(next(iter(columns.values())))
    filled = {"query": [b"q"] * num_rows, "title": [b"t"] * num_rows, "gain": [b"0.5"] * num_rows, **columns}
    batch = pa.RecordBatch.from_pydict({name: pa.array(cells, pa.large_binary()) for name, cells in filled.items()})
    return next(cut_chunks("f", [RawBatch(batch, np.arange(num_rows, dtype=np.int64))], 9999))


HALVES = RowRules(DataConfig(valid_fraction=0.25, test_fraction=0.25), "flat", (), (), carve_valid=False)


def test_a_query_id_tells_queries_apart_and_rows_without_one_go_by_their_text() -> None:
    rows, _, _ = validate_chunk(texts(query=[b"q", b"q", b"other", b"q"], query_id=[b"1", b"2", b"1", b" "]), HALVES)
    one, two, again, by_text = rows.query_id.tolist()
    assert one == again and len({one, two, by_text}) == 3
    assert rows.split[0] == rows.split[2]


PAIRS = [(a, b) for a in range(60) for b in range(a + 1, a + 9)]
"""Offers are matched with later ones, so that most are the query of some rows and the product of others."""


@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize("split_by", ["query", "product", "both"])
def test_an_item_by_which_rows_are_split_is_in_one_split_wherever_it_stands(split_by: SplitBy, ids: bool) -> None:
    """Whatever its case, and in whatever chunk. With both, it is never trained on if any row with it is held out."""
    config = DataConfig(valid_fraction=0.15, test_fraction=0.15, split_by=split_by)
    rules = RowRules(config, "flat", (), (), carve_valid=False)
    columns: dict[str, list[bytes | None]] = {
        "query": [b"Offer %d" % a for a, _ in PAIRS],
        "title": [b" OFFER %d " % b for _, b in PAIRS],
    }
    if ids:  # from separate numberings; a product has several titles
        columns |= {"query_id": [b"q%d" % (7 * a) for a, _ in PAIRS], "product_id": [b"p%d" % b for _, b in PAIRS]}
        if split_by == "product":
            columns["title"] = [b"Offer %d, %d" % (b, a % 2) for a, b in PAIRS]
    split = validate_chunk(texts(**columns), rules)[0].split
    halves = [texts(**{name: cells[start::2] for name, cells in columns.items()}) for start in (0, 1)]
    parts = [validate_chunk(half, replace(rules, partition="dt=2026-01-01"))[0].split for half in halves]
    assert parts[0].tolist() == split[::2].tolist() and parts[1].tolist() == split[1::2].tolist()
    assert len(split) == len(PAIRS)
    sides = [0] if split_by == "query" else [1] if split_by == "product" else [0, 1]
    of_item: dict[int, set[int]] = defaultdict(set)
    for pair, number in zip(PAIRS, split.tolist(), strict=True):
        for side in sides:
            of_item[pair[side]].add(number)
    if split_by != "both":
        assert all(len(splits) == 1 for splits in of_item.values())
        return
    # Each item is a test, a valid or a train item, and a row is as held out as the most held out of its two.
    rank = {item: min(splits) for item, splits in of_item.items()}
    assert split.tolist() == [max(rank[a], rank[b]) for a, b in PAIRS]
    shares = np.bincount([*rank.values()], minlength=3) / len(rank)
    assert shares == pytest.approx([0.7, 0.15, 0.15], abs=0.15)
    assert {0, 1, 2} == set(split.tolist())


def test_a_query_that_is_also_a_product_is_another_item_unless_both_sides_are_split() -> None:
    """Two rows with the same texts the other way round."""
    turned = texts(query=[b"a%d" % i for i in range(200)], title=[b"b%d" % i for i in range(200)])
    back = texts(query=[b"b%d" % i for i in range(200)], title=[b"a%d" % i for i in range(200)])
    for split_by, is_same in (("both", True), ("query", False), ("product", False)):
        config = HALVES.config.model_copy(update={"split_by": split_by})
        one, two = (validate_chunk(chunk, replace(HALVES, config=config))[0].split for chunk in (turned, back))
        assert (one.tolist() == two.tolist()) is is_same


def test_ids_of_products_are_kept_and_any_bytes_may_be_one() -> None:
    """As an id says, or the title: what is not UTF-8 does not spoil a row that was good without the column's use."""
    chunk = texts(title=[b"A", b"B", b"C", b"a"], product_id=[b"\xff", None, b" 7 ", b"  "])
    rows, bad, _ = validate_chunk(chunk, HALVES)
    assert bad == [] and rows.product_id.tolist() == [hash63(key) for key in (b"\xff", "b", "7", "a")]
    assert validate_chunk(texts(title=[b"A", b"a"]), HALVES)[0].product_id.tolist() == [hash63("a")] * 2


def test_a_split_column_and_another_kind_of_split_contradict_each_other() -> None:
    columns = ["query", "title", "gain", "fold"]
    given: dict[str, Any] = {"split_by": "both", "columns": ColumnMapping(split="fold")}
    with pytest.raises(DataError, match=r"f has a split column 'fold', so data\.split_by both has no effect"):
        plan_columns(DataConfig(**given), columns, "f")
    assert plan_columns(DataConfig(split_by="both"), columns, "f").inputs == ["query", "title", "gain"]
    assert "fold" in plan_columns(DataConfig(columns=ColumnMapping(split="fold")), columns, "f").inputs


@pytest.mark.parametrize("split_by", ["query", "product", "both"])
@pytest.mark.parametrize("carve", [True, False])
def test_valid_rows_are_carved_out_of_train_alone(carve: bool, split_by: SplitBy) -> None:
    queries: list[bytes | None] = [b"q%d" % number for number in range(400)]
    titles: list[bytes | None] = [b"t%d" % (number // 2 * 3) for number in range(400)]
    split: list[bytes | None] = [b"train", b"test"] * 200
    config = HALVES.config.model_copy(update={"split_by": split_by})
    rules = replace(HALVES, carve_valid=carve, config=config)
    rows, _, _ = validate_chunk(texts(query=queries, title=titles, split=split), rules)
    if split_by == "both" and carve:  # rows with an item of either side
        assert set(rows.split[1::2].tolist()) == {2}
        assert np.bincount(rows.split[::2], minlength=3) / 200 == pytest.approx([0.75**2, 1 - 0.75**2, 0], abs=0.1)
        return
    assert set(rows.split[1::2].tolist()) == {2}
    assert np.bincount(rows.split[::2], minlength=3) / 200 == pytest.approx(
        [0.75, 0.25, 0] if carve else [1, 0, 0], abs=0.1
    )


def test_the_first_defect_of_a_row_is_its_reason_and_a_gain_may_be_absent() -> None:
    chunk = texts(query=[b"\xff", b"q", b"q"], title=[b"\xff", b"", b"t"], gain=[b"2", None, b""])
    _, bad, _ = validate_chunk(chunk, HALVES)
    assert [row.reason for row in bad] == ["query is not UTF-8", "empty title", "gain is not a number from 0 to 1"]


CELLS = st.lists(st.one_of(st.none(), st.binary(max_size=3), st.sampled_from([b" a ", b"b", b"\xff"])), max_size=20)


@given(CELLS, st.integers(0, 20))
def test_codes_name_the_values_however_rows_are_cut(cells: list[bytes | None], cut: int) -> None:
    parts = [slice_rows({"kind": part}, range(len(part))) for part in (cells[:cut], cells[cut:])]
    names = merge_names(part.names for part in parts)["kind"]
    codes = to_codes(np.concatenate([part.values[:, 0] for part in parts]), names)
    texts = [(cell or b"").decode("utf-8", "backslashreplace").strip() for cell in cells]
    assert [names[code] if code >= 0 else "" for code in codes] == texts
    assert list(names) == sorted({text for text in texts if text})


def test_too_many_values_and_one_without_a_name_are_refused() -> None:
    with pytest.raises(DataError, match=f"column 'id' has more than {MAX_NAMES} different values"):
        merge_names([{"id": [str(i) for i in range(600)]}, {"id": [str(i) for i in range(600, 1100)]}])
    for value, names in ((hash63("x"), ("y",)), (5, ())):
        with pytest.raises(DataError, match="not listed in their manifest"):
            to_codes(np.array([value]), names)
    assert to_codes(np.array([NO_VALUE]), ()).tolist() == [-1]
