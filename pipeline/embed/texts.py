"""What a worker does with a window of the catalogue: judge each row, hash it, tokenise what has no vector yet."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from pipeline.core.arrays import Bools, Int64s, UInt64s
from pipeline.data.rows import CHARACTERS_PER_TOKEN, BadRow, product_text, row_content
from pipeline.data.tokenizer import TextTokenizer, Tokens, take
from pipeline.data.validate import filter_mask
from pipeline.embed.carry_over import RowIndex
from pipeline.embed.catalogue import ID_TYPES, IdType, RawWindow
from pipeline.embed.config import FRAME, chunk_of

NO_ID, EMPTY_TEXT, DUPLICATE_ID = "no id", "empty text", "duplicate id"


@dataclass(frozen=True)
class TextRules:
    """How rows become texts and tokens, the same for all windows.

    `index`: folder of the row index of an earlier cycle whose vectors are to be taken over, empty for none.
    """

    tokenizer: bytes
    max_tokens: int
    """Of a text that are read."""
    id_type: IdType
    filter: tuple[tuple[str, str], ...] = ()
    index: str = ""
    prefix: str = ""
    """Stands before every text, for the tokenizer alone."""
    chunks: int = 1
    """Of a text of `max_tokens`."""


@dataclass(frozen=True)
class TextRows:
    """The usable rows of a window in catalogue order, and what was wrong with the others."""

    file: str
    is_last: bool
    """The window is the last of its shard."""
    table: pa.Table
    """Columns id, id_hash, text_hash and row, the number of the row in its file."""
    texts: list[str]
    num_rows: int
    """All rows of the window."""
    num_read: int
    """Rows that passed the filter, bad ones included."""
    bad: tuple[BadRow, ...]


@dataclass(frozen=True)
class Window:
    """A window ready for the device.

    `rows.table` has four more columns here: `place`, the row of the earlier cycle to take the vector from, -1 for a
    text to embed; `known`, whether that cycle had the id; `truncated`, `chunked`, whether a text to embed was cut, or
    takes several chunks. `tokens` are those of texts to embed alone, in order.
    """

    rows: TextRows
    """Without their texts."""
    tokens: Tokens

    def keep(self, rows: Bools) -> "Window":
        table = self.rows.table
        fresh = rows[table["place"].to_numpy() < 0]
        kept = replace(self.rows, table=table.filter(pa.array(rows)))
        return Window(kept, take(self.tokens, np.flatnonzero(fresh)))


def make_window(rules: TextRules, raw: RawWindow) -> Window:
    """Judge, hash and tokenise a window in a worker process."""
    rows = judge_rows(rules, raw)
    count = len(rows.texts)
    place, known = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.bool_)
    if rules.index:
        place, known = _row_index(Path(rules.index)).look_up(
            rows.table["id_hash"].to_numpy(), rows.table["text_hash"].to_numpy()
        )
    tokenizer, fresh = _tokenizer(rules.tokenizer), np.flatnonzero(place < 0)
    tokens = tokenizer.encode([rules.prefix + rows.texts[row] for row in fresh.tolist()])
    truncated, chunked = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
    truncated[fresh] = tokens.lengths > rules.max_tokens
    if truncated.any():
        tokens = cut_tokens(tokens, rules.max_tokens, tokenizer.sep_id)
    chunked[fresh] = tokens.lengths > chunk_of(rules.max_tokens, rules.chunks)
    table = rows.table
    for name, column in (("place", place), ("known", known), ("truncated", truncated), ("chunked", chunked)):
        table = table.append_column(name, pa.array(column))
    return Window(replace(rows, table=table, texts=[]), tokens)


def judge_rows(rules: TextRules, raw: RawWindow) -> TextRows:
    """Apply the filter, then find for each row its id and text, or the reason why it has none."""
    batch = raw.batch()
    num_rows = len(batch)
    rows = np.arange(raw.first_row, raw.first_row + num_rows, dtype=np.int64)
    if rules.filter:
        keep = filter_mask(batch, dict(rules.filter))
        batch, rows = batch.filter(pa.array(keep)), rows[keep]
    limit = CHARACTERS_PER_TOKEN * rules.max_tokens
    columns = {name: batch[name].to_pylist() for name in ("id", "title", "text") if name in batch.schema.names}
    longer = columns.get("text") or [None] * len(rows)
    ids, kept, texts, bad = list[Any](), list[int](), list[str](), list[BadRow]()
    for row, values in enumerate(zip(columns["id"], columns["title"], longer, strict=True)):
        value, text, reason = _judge(*values, limit)
        if reason:
            bad.append(BadRow(raw.file, int(rows[row]), reason, row_content(batch, row)))
            continue
        ids.append(value)
        kept.append(row)
        texts.append(text)
    table = pa.table(
        {
            "id": pa.array(ids, ID_TYPES[rules.id_type]),
            "id_hash": id_hashes(ids),
            "text_hash": _hashes([text.encode() for text in texts]),
            "row": rows[np.array(kept, dtype=np.int64)],
        }
    )
    return TextRows(raw.file, raw.is_last, table, texts, num_rows, num_read=len(rows), bad=tuple(bad))


def judge_again(context: tuple[TextRules, int], raw: RawWindow) -> TextRows:
    """Judge rows in a worker process of verify. Return the texts of ids whose hash is a multiple of the step."""
    rules, step = context
    rows = judge_rows(rules, raw)
    chosen = np.flatnonzero(rows.table["id_hash"].to_numpy() % np.uint64(step) == 0).tolist()
    return replace(rows, texts=[rows.texts[row] for row in chosen])


def _judge(name: bytes | int | None, title: bytes | None, text: bytes | None, limit: int) -> tuple[Any, str, str]:
    """(id, text, "") of a usable row, or (_, _, reason). A row is usable when one of title and text says something."""
    try:
        field = "id"
        value = name.decode() if isinstance(name, bytes) else name
        field = "title"
        first = title.decode().strip() if title else ""
        field = "text"
        second = text.decode().strip() if text else ""
    except UnicodeDecodeError:
        return None, "", f"{field} is not UTF-8"
    if value is None or value == "":
        return None, "", NO_ID
    joined = product_text(first, second, limit)
    return value, joined, "" if joined else EMPTY_TEXT


def id_hashes(ids: Sequence[Any]) -> UInt64s:
    """Hash the ids as text, so that 7 and "7" are one id."""
    return _hashes([str(value).encode() for value in ids])


def _hashes(values: Sequence[bytes]) -> UInt64s:
    return np.fromiter(map(xxhash.xxh3_64_intdigest, values), dtype=np.uint64, count=len(values))


def cut_tokens(tokens: Tokens, limit: int, sep_id: int) -> Tokens:
    """Cut texts to `limit` tokens, of which the last is then [SEP]."""
    lengths = np.minimum(tokens.lengths, limit)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = tokens.ids[np.arange(offsets[-1]) + np.repeat(tokens.offsets[:-1] - offsets[:-1], lengths)]
    ids[offsets[1:][tokens.lengths > limit] - 1] = sep_id
    return Tokens(ids, offsets)


def chunk_tokens(tokens: Tokens, limit: int, sep_id: int) -> tuple[Tokens, Int64s]:
    """Split texts into chunks of at most `limit` tokens. Return these, and the number of each text's first chunk [N].

    A chunk begins with the first token of its text, [CLS], and ends with [SEP]; all between them is there once.
    """
    lengths, inner = tokens.lengths, limit - FRAME
    counts = np.where(lengths > limit, -(-(lengths - FRAME) // inner), 1)
    first = np.cumsum(counts) - counts
    text = np.repeat(np.arange(len(lengths)), counts)
    before = (np.arange(len(text)) - first[text]) * inner  # tokens of the text in earlier chunks
    sizes = np.where(counts[text] > 1, np.minimum(lengths[text] - before, limit), lengths[text])
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    ids = tokens.ids[np.arange(offsets[-1]) + np.repeat(tokens.offsets[text] + before - offsets[:-1], sizes)]
    ids[offsets[:-1]] = tokens.ids[tokens.offsets[text]]
    ids[offsets[1:][counts[text] > 1] - 1] = sep_id
    return Tokens(ids, offsets), first


_tokenizer = lru_cache(maxsize=1)(TextTokenizer)
_row_index = lru_cache(maxsize=1)(RowIndex)
