"""What becomes of each kind of row."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.rows import FILTER
from pipeline.data.tokenizer import TextTokenizer, Tokens
from pipeline.embed.catalogue import (
    DUPLICATE_ID,
    EMPTY_TEXT,
    NO_ID,
    RawWindow,
    TextRules,
    chunk_tokens,
    make_window,
    validate_rows,
)
from pipeline.embed.config import max_text_tokens
from tests.embed.catalogues import Case, products, rows_of, tokenizer_json, write_catalogue

RULES = TextRules(b"", 8, "string")


def raw(**columns: list[Any]) -> RawWindow:
    arrays = {
        name: pa.array(values, pa.int64() if name == "id" and isinstance(values[0], int) else pa.large_binary())
        for name, values in columns.items()
    }
    batch = pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return RawWindow("a.parquet", 100, sink.getvalue().to_pybytes())


@pytest.mark.parametrize(
    ("name", "title", "text", "reason"),
    [
        (b"a", b"phone", None, ""),
        (b"a", None, b"only a text", ""),
        (b"a", b"  phone\n", b"", ""),
        (None, b"phone", None, NO_ID),
        (b"", b"phone", None, NO_ID),
        (b"a", None, None, EMPTY_TEXT),
        (b"a", b" \t ", b"\n", EMPTY_TEXT),
        (b"\xff", b"phone", None, "id is not UTF-8"),
        (b"a", b"caf\xe9", None, "title is not UTF-8"),
        (b"a", b"phone", b"\xf0\x28", "text is not UTF-8"),
    ],
)
def test_a_row_is_usable_or_has_one_reason(
    name: bytes | None, title: bytes | None, text: bytes | None, reason: str
) -> None:
    rows = validate_rows(RULES, raw(id=[b"good", name], title=[b"laptop", title], text=[None, text]))
    assert rows.num_read == 2
    if reason:
        (bad,) = rows.bad
        assert (bad.file, bad.row, bad.reason) == ("a.parquet", 101, reason)
        assert rows.table["id"].to_pylist() == ["good"]
    else:
        assert not rows.bad
        assert rows.texts[1] == " ".join((b" ".join(part for part in (title, text) if part)).decode().split())


def test_a_prefix_is_for_the_tokenizer_alone() -> None:
    rows = raw(id=[b"a", b"b"], title=[b"phone", b"laptop"])
    plain, prefixed = (
        make_window(TextRules(tokenizer_json(), 16, "string", prefix=text), rows) for text in ("", "red ")
    )
    expected = TextTokenizer(tokenizer_json()).encode(["red phone", "red laptop"])
    assert prefixed.tokens.ids.tolist() == expected.ids.tolist() != plain.tokens.ids.tolist()
    assert np.array_equal(prefixed.rows.table["text_hash"], plain.rows.table["text_hash"])


def test_ids_keep_their_type() -> None:
    rows = validate_rows(TextRules(b"", 8, "int64"), raw(id=[7, 0, -3], title=[b"a", b"b", b"c"]))
    assert rows.table["id"].type == pa.int64() and rows.table["id"].to_pylist() == [7, 0, -3]
    text = validate_rows(RULES, raw(id=[b"7", b"0", b"-3"], title=[b"a", b"b", b"c"]))
    assert rows.table["id_hash"] == text.table["id_hash"]


def test_the_hash_is_of_the_text_that_is_read() -> None:
    limit = 16 * 8
    rows = validate_rows(
        RULES,
        raw(id=[b"a", b"b", b"c"], title=[b"x" * limit, b"x" * limit + b"tail", b" " + b"x" * limit], text=[b"y"] * 3),
    )
    assert len({*rows.table["text_hash"].to_pylist()}) == 1 and {*rows.texts} == {"x" * limit}


def test_rows_outside_the_filter_are_not_counted() -> None:
    window = raw(id=[b"a", b"b", None], title=[b"x", b"y", b"z"], **{FILTER + "shop": [b"1", b"2", b"2"]})
    rows = validate_rows(TextRules(b"", 8, "string", (("shop", "1|3"),)), window)
    assert (rows.table["id"].to_pylist(), rows.table["row"].to_pylist(), rows.num_read, rows.bad) == (
        ["a"],
        [100],
        1,
        (),
    )


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12), limit=st.integers(3, 70))
@settings(max_examples=60, deadline=None)
def test_chunks_hold_every_token_of_a_text_once(lengths: list[int], limit: int) -> None:
    """Between a [CLS] and a [SEP] of their own; what fits stays as it is."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = Tokens(np.arange(100, 100 + offsets[-1], dtype=np.int32), offsets)
    chunks, first = chunk_tokens(tokens, limit, 99)
    assert chunks.lengths.max() <= limit and len(first) == len(lengths)
    parts = np.split(chunks.ids, chunks.offsets[1:-1])
    for text, (start, end) in enumerate(zip(first, [*first[1:], len(parts)], strict=True)):
        whole = tokens.ids[offsets[text] : offsets[text + 1]]
        if len(whole) <= limit:
            assert end == start + 1 and np.array_equal(parts[start], whole)
            continue
        assert all(part[0] == whole[0] and part[-1] == 99 and len(part) > 2 for part in parts[start:end])
        assert np.array_equal(np.concatenate([part[1:-1] for part in parts[start:end]]), whole[1:-1])
        assert all(len(part) == limit for part in parts[start : end - 1])


@pytest.mark.parametrize("chunks", [1, 3])
def test_what_is_chunked_and_what_is_cut_is_counted(chunks: int) -> None:
    """A text of 100 kB among them."""
    limit, tokenizer = max_text_tokens(12, chunks), TextTokenizer(tokenizer_json())
    titles = [b"phone model " * 8500, b"phone " * 6, b"phone"]
    window = make_window(
        TextRules(tokenizer_json(), limit, "string", chunks=chunks), raw(id=[b"a", b"b", b"c"], title=titles)
    )
    found = window.rows.table.select(["truncated", "chunked"]).to_pydict()
    some = chunks > 1
    assert found == {"truncated": [True, not some, False], "chunked": [some, some, False]}
    first = window.tokens.ids[: window.tokens.lengths[0]]
    assert len(first) == limit and (first[0], first[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
    assert np.array_equal(first[:-1], tokenizer.encode(["phone model " * 20]).ids[: limit - 1])
    kept = window.keep(np.array([False, True, True]))
    assert kept.rows.table["chunked"].to_pylist() == [some, False] and len(kept.tokens.lengths) == 2


ID_ARRAYS = {
    "int32": pa.array(range(60), pa.int32()),
    "uint64": pa.array([2**63 + n for n in range(60)], pa.uint64()),
    "string": pa.array([f"p{n}" for n in range(60)], pa.string()),
    "large_string": pa.array([f"p{n}" for n in range(60)], pa.large_string()),
    "string_view": pa.array([f"p{n}" for n in range(60)], pa.string_view()),
    "binary": pa.array([f"p{n}".encode() for n in range(60)], pa.binary()),
    "dictionary": pa.array([f"p{n}" for n in range(60)]).dictionary_encode(),
    "dictionary of numbers": pa.array(range(60)).dictionary_encode(),
}


@pytest.mark.parametrize("kind", ID_ARRAYS)
def test_any_type_of_id(tmp_path: Path, kind: str) -> None:
    table = products(range(60)).set_column(0, "product_id", ID_ARRAYS[kind])
    case = Case(tmp_path)
    vectors = case.embed(write_catalogue(tmp_path / "in", [table]))
    expected = [value.decode() if isinstance(value, bytes) else value for value in ID_ARRAYS[kind].to_pylist()]
    assert list(rows_of(vectors)) == expected
    wanted = {"int32": "int64", "uint64": "uint64", "dictionary of numbers": "int64"}.get(kind, "string")
    assert str(vectors.schema(0).field("id").type) == wanted


def test_bad_rows_are_counted_and_kept_with_their_reasons(tmp_path: Path) -> None:
    titles: list[Any] = [f"phone {n}".encode() for n in range(100)]
    ids: list[Any] = [f"p{n}".encode() for n in range(100)]
    titles[3], titles[40], titles[41], ids[50], ids[60] = None, b"\xff\xfe", b"  ", None, b"p59"
    table = pa.table({"product_id": pa.array(ids, pa.binary()), "title": pa.array(titles, pa.binary())})
    case = Case(tmp_path, rows_per_part=200)
    vectors = case.embed(write_catalogue(tmp_path / "in", [table]), max_bad_fraction=0.05)
    assert vectors.info.counts.read == 100 and vectors.info.counts.bad == 5 and vectors.info.rows == 95
    assert vectors.info.reasons == {EMPTY_TEXT: 2, "title is not UTF-8": 1, NO_ID: 1, DUPLICATE_ID: 1}
    lines = case.files()["quarantine.jsonl"].decode().splitlines()
    assert len(lines) == 5 and all("file-0.parquet" in line for line in lines)
    assert '"row":60' in next(line for line in lines if DUPLICATE_ID in line)
