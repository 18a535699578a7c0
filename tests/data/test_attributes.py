"""Attributes of both sides: their columns and kinds, the texts they are appended to, and what a pair of them gives."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.data.attributes import ValueStats, attribute_pairs, find_columns, like_parent
from pipeline.data.config import DataConfig, TokenizerConfig
from pipeline.data.input_files import open_files
from pipeline.data.lexical import LEXICAL_NAMES, code_features, numeric_names
from pipeline.data.rows import ColumnPlan, RawBatch, cut_chunks, plan_columns, to_fields
from pipeline.data.sources import open_source, read_products
from pipeline.data.token_sets import SPLITS, open_rows, read_token_sets, spec_of
from pipeline.data.tokenizer import TextTokenizer
from pipeline.data.validate import CleanRows, RowRules, validate_chunk
from pipeline.model.config import Attribute

BRAND = Attribute(name="brand", query="query_brand", product="brand", kind="text")
MODEL = Attribute(name="model", query="query_model", product="model", kind="text")
PRICE = Attribute(name="price", query="query_price", product="price", kind="number")
NAN = float("nan")


@pytest.mark.parametrize(
    ("columns", "query", "product"),
    [
        (["query_brand", "brand"], "query_brand", "brand"),
        (["brand_left", "brand_right"], "brand_left", "brand_right"),
        (["left_brand", "right_brand"], "left_brand", "right_brand"),
        (["query_brand", "product_brand"], "query_brand", "product_brand"),
        (["title_brand"], None, "title_brand"),
        (["brand_left"], "brand_left", None),
        (["Brand", "brands"], None, None),
    ],
)
def test_columns_are_found_by_their_names(columns: list[str], query: str | None, product: str | None) -> None:
    expected = {side: name for side, name in (("query", query), ("product", product)) if name}
    assert find_columns(Attribute(name="brand"), columns) == expected
    given = Attribute(name="brand", query="maker", product="")
    assert find_columns(given, [*columns, "maker"]) == {"query": "maker"}, "configured columns take precedence"


def test_an_attribute_without_columns_is_an_error_that_lists_the_names() -> None:
    with pytest.raises(DataError, match="no column of attribute 'brand'") as error:
        list(attribute_pairs([Attribute(name="brand")], ["title"], "f"))
    expected = "query_brand, brand_left, left_brand for queries, or brand, product_brand, title_brand"
    assert str(error.value.expected).startswith(expected)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (["9.99", "12", "1e3", "-4"], "number"),
        (["9.99"] * 19 + ["cheap"], "number"),
        (["9.99"] * 9 + ["cheap"], "text"),
        (["9.99", "NaN", " -nan", ""], "number"),
        (["910001898", "4006381333007"], "text"),
        (["007", "012", "5"], "text"),
        (["12345", "54321", "99999"], "text"),
        (["12345", "999", "7"], "number"),
        (["2019", "2020"], "number"),
        (["1200000", "85000", "199000"], "number"),
        (["inf", "nan"], "text"),
        (["1_000"], "text"),
        (["Canon", "Sony"], "text"),
        (["", " "], "text"),
    ],
)
def test_codes_are_texts_although_they_are_numbers(values: list[str], kind: str) -> None:
    stats = ValueStats()
    for value in values:
        stats.add(value, 3)
    assert stats.kind == kind


@pytest.mark.parametrize(
    ("query", "product", "equal", "near"),
    [
        ("910001898", "910-001898", 1.0, 1.0),
        ("TP 1724", "tp1724", 1.0, 1.0),
        ("a.b,c", "A_B C", 1.0, 1.0),
        ("EOS 5D", "EOS 5D Mark II", 0.0, 5 / 11),
        ("B", "A", 0.0, 0.0),
        ("-", "abc", NAN, NAN),
        ("", "abc", NAN, NAN),
    ],
)
def test_codes_are_compared_without_case_spaces_and_punctuation(
    query: str, product: str, equal: float, near: float
) -> None:
    for left, right in ((query, product), (product, query)):
        np.testing.assert_allclose(code_features([left], [right]), [[equal, near]], atol=0.15)
    assert code_features([], []).shape == (0, 2)


def test_one_digit_apart_is_nearer_than_another_code() -> None:
    (_, sibling), (_, other) = code_features(["DSC-W830", "DSC-W830"], ["DSC-W810", "EOS 700"])
    assert 0.5 < sibling < 1 and other < 0.3


CONFIG = DataConfig(attributes=(BRAND, MODEL, PRICE), valid_fraction=0, test_fraction=0)
GOOD: dict[str, Any] = {
    "query": "lens 50mm",
    "title": "50mm lens",
    "label": "yes",
    "query_brand": "Canon",
    "brand": "CANON",
    "query_model": "910001898",
    "model": "910-001898",
    "query_price": "10",
    "price": "20",
}


def judged(*rows: dict[str, Any], config: DataConfig = CONFIG) -> tuple[CleanRows, list[str]]:
    table = pa.Table.from_pylist([{**GOOD, **row} for row in rows])
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    fields = to_fields(columns, plan_columns(config, table.column_names, "f"))
    chunk = next(cut_chunks("f", [RawBatch(fields, np.arange(len(rows), dtype=np.int64))], 1000))
    usable, bad, _ = validate_chunk(chunk, RowRules(config, "flat", ("yes",), (1.0,), carve_valid=False))
    return usable, [row.reason for row in bad]


def test_texts_are_appended_in_order_and_features_compare_both_sides() -> None:
    rows, bad = judged({}, {"brand": None, "query_model": " ", "price": ""}, {"price": "0.0", "query_price": "-3"})
    assert not bad
    assert rows.query == ["lens 50mm Canon 910001898", "lens 50mm Canon", "lens 50mm Canon 910001898"]
    assert rows.title == ["50mm lens CANON 910-001898", "50mm lens 910-001898", "50mm lens CANON 910-001898"]
    assert numeric_names(CONFIG)[: -len(LEXICAL_NAMES)] == (
        "brand_equal", "brand_near", "model_equal", "model_near", "price_difference", "price_log_ratio"
    )  # fmt: skip
    same = [1.0, 1.0, 1.0, 1.0]
    expected = [[*same, 10.0, math.log(2)], [NAN] * 6, [*same, 3.0, NAN]]
    np.testing.assert_allclose(rows.numeric, expected, rtol=1e-6)


def test_queries_with_other_attributes_are_other_queries() -> None:
    rows, _ = judged({}, {"query_brand": "Sony"}, {})
    first, other, again = rows.query_id.tolist()
    assert first == again != other


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"title": " "}, "empty title"),
        ({"query": None}, "empty query"),
        ({"price": "cheap"}, "feature price is not a finite number"),
        ({"query_price": "inf"}, "feature price is not a finite number"),
        ({"brand": b"\xff"}, "title is not UTF-8"),
    ],
)
def test_bad_rows(row: dict[str, Any], reason: str) -> None:
    rows, bad = judged(row)
    assert bad == [reason] and rows.query == []


def test_attributes_of_one_side() -> None:
    one_sided = (
        Attribute(name="brand", query="", product="brand", kind="text"),
        Attribute(name="price", query="query_price", product="", kind="number"),
    )
    config = CONFIG.model_copy(update={"attributes": one_sided, "lexical": False})
    rows, _ = judged({}, {"query_price": None}, config=config)
    assert numeric_names(config) == ("price",)
    assert rows.query[0] == "lens 50mm" and rows.title[0] == "50mm lens CANON"
    assert str(rows.numeric.tolist()) == "[[10.0], [nan]]"


def test_a_blank_text_stays_blank_and_other_types_are_read() -> None:
    plan = ColumnPlan((("query", "q"), ("attributes.text.query.code", "c"), ("attributes.text.query.none", "n")))
    table = {"q": pa.array(["a", "", None, None]), "c": pa.array([1.0, 2.0, 3.0, None]), "n": pa.nulls(4)}
    assert to_fields(table, plan)["query"].to_pylist() == [b"a 1", b"", None, None]
    assert plan.only(["query"]) == plan and plan.only(["title"]) == ColumnPlan(())


def test_what_is_not_configured_is_taken_from_the_parent() -> None:
    parent = (BRAND, PRICE.model_copy(update={"kind": "text"}))
    asked = (Attribute(name="price"), Attribute(name="brand", query="q"), Attribute(name="size"))
    price, brand, size = like_parent(asked, parent)
    assert price == parent[1] and brand == BRAND.model_copy(update={"query": "q"})
    assert size == asked[2]


def test_attributes_as_settings() -> None:
    config = DataConfig.model_validate({"attributes": [{"name": "brand"}, {"name": "price", "kind": "number"}]})
    assert [each.features for each in config.attributes] == [
        ("brand_equal", "brand_near"),
        ("price_difference", "price_log_ratio"),
    ]
    with pytest.raises(ValueError, match="duplicate names 'brand'"):
        DataConfig(attributes=(BRAND, Attribute(name="brand")))


# Real small runs of prepare.

Make = Callable[[str], Any]


def write_pairs(folder: Path, **missing: int) -> Path:
    """200 pairs with attributes, where every n-th value of a column is missing."""
    rows = []
    for i in range(200):
        sides = {
            "query_brand": f"Canon {i % 50}",
            "brand": f"b{i % 9}",
            "query_code": 910001898 + i % 7,
            "code": 910001898,
        }
        row = {"query": f"lens {i % 50}", "title": f"red {i}", "label": "ab"[i % 2], **sides}
        row |= {"query_price": i / 4, "price": 10}
        rows.append(row | {name: None for name, every in missing.items() if i % every == 0})
    folder.mkdir(exist_ok=True)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def config_of(folder: Path, *names: str, **settings: Any) -> DataConfig:
    attributes = tuple(Attribute(name=name) for name in names)
    small: dict[str, Any] = {"num_workers": 1, "tokenizer": TokenizerConfig(vocab_size=600), "labels": ("a", "b")}
    return DataConfig(path=str(folder), attributes=attributes, **(small | settings))


@pytest.mark.stage
def test_columns_and_kinds_are_read_from_the_whole_input(workplace: Make, tmp_path: Path) -> None:
    place = workplace("one")
    folder = write_pairs(tmp_path / "in", query_price=4, brand=10)
    config = config_of(folder, "brand", "code", "price", lexical=False)
    done = place.prepare(config)
    (one,) = read_token_sets(place.storage, done.token_set_prefixes)
    assert [(each.kind, each.query, each.product) for each in one.info.attributes] == [
        ("text", "query_brand", "brand"), ("text", "query_code", "code"), ("number", "query_price", "price")
    ]  # fmt: skip
    spec = spec_of(one.info)
    assert spec.numeric == spec.missing == numeric_names(DataConfig(attributes=spec.attributes, lexical=False))
    counts = {"brand_equal": 20, "code_equal": 0, "price_difference": 50}
    assert {name: one.info.without_number[name] for name in counts} == counts
    tokenizer = TextTokenizer(place.storage.read_bytes(f"{done.tokenizer_prefix}/tokenizer.json"))
    tokens = tokenizer.encode(["canon"]).ids[1:-1].tolist()
    assert len(tokens) == 1, "attributes are part of the texts that the tokenizer is trained on"
    queries = [
        found.read(np.full(len(rows), bucket), rows, bucket, ("query",))["query"]
        for found in (open_rows(place.storage, [one], split, tmp_path) for split in SPLITS)
        for bucket, rows in found.blocks()
    ]
    assert sum(map(len, queries)) == 200 and all((block == tokens[0]).any(axis=1).all() for block in queries)
    explicit = config.model_copy(update={"attributes": one.info.attributes})
    again = place.prepare(explicit)
    assert (again.prepared, again.reused) == (0, 1), "the same token set"


@pytest.mark.stage
def test_inputs_that_do_not_fit(workplace: Make, tmp_path: Path) -> None:
    place, folder = workplace("one"), write_pairs(tmp_path / "in")
    with pytest.raises(DataError, match="no column of attribute 'size'"):
        place.prepare(config_of(folder, "size"))
    duplicate = DataConfig(attributes=(PRICE.model_copy(update={"query": ""}),), numeric=("price",), labels=("a", "b"))
    with pytest.raises(ConfigError, match="two features 'price'"):
        place.prepare(duplicate.model_copy(update={"path": str(folder), "num_workers": 1}))
    (folder / "sooner.csv").write_text("query,title,label,brand\nq,t,a,b\n")
    with pytest.raises(DataError, match="'query_brand'"):
        place.prepare(config_of(folder, "brand"))


@pytest.mark.stage
def test_a_continued_model_keeps_its_kinds(workplace: Make, tmp_path: Path) -> None:
    place, folder = workplace("one"), write_pairs(tmp_path / "in")
    parent = (Attribute(name="price", query="query_price", product="price", kind="text"),)
    done = place.prepare(config_of(folder, "price"), attributes=parent)
    assert read_token_sets(place.storage, done.token_set_prefixes)[0].info.attributes == parent


def test_products_are_read_with_their_attributes(tmp_path: Path) -> None:
    folder = write_pairs(tmp_path / "in")
    config = config_of(folder).model_copy(update={"attributes": (BRAND, PRICE)})
    source = open_source(config, scratch=tmp_path, stop=StopSignal())
    (batch,) = read_products(source, StopSignal())
    assert batch.columns.schema.names == ["title", "attributes.text.product.brand"]
    assert batch.columns["title"].to_pylist()[:2] == [b"red 0 b0", b"red 1 b1"]


@pytest.mark.parametrize("suffix", ["csv", "parquet", "jsonl"])
def test_a_catalogue_without_a_column_goes_on_without_it(tmp_path: Path, suffix: str) -> None:
    table, path = pa.table({"title": ["a"], "brand": ["b"]}), tmp_path / f"items.{suffix}"
    if suffix == "parquet":
        pq.write_table(table, path)
    else:
        path.write_text("title,brand\na,b\n" if suffix == "csv" else '{"title": "a", "brand": "b"}\n')
    files, told = open_files(str(path), "auto", StopSignal()), list[str]()
    found = files.text_attributes((BRAND, MODEL, PRICE), told.append)
    assert found == (BRAND.model_copy(update={"query": ""}),)
    assert len(told) == 1 and "no column 'model'" in told[0]
    assert files.text_attributes((PRICE,), told.append) == () and len(told) == 1
