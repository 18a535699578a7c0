"""Input files made from a seed, with the truth of what is in them: ids of whole rows, bad rows, blank lines."""

import csv
import gzip
import io
import json
import random
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.readers import _BATCH_BYTES, _PEEK_LINES
from pipeline.data.rows import _BATCH_ROWS

ROWS_PER_CHUNK = (100, 1000, 5000)
LIMITS = (1, 7, 7, 64, 64, *(100,) * 6, _PEEK_LINES, _PEEK_LINES, _BATCH_ROWS)
"""Sizes at which a reader, a chunk or a page ends; files have about as many rows, or a few times as many."""
TITLES = ("desk lamp", 'lamp "E27", black', "zwei\nZeilen", "a\r\nb", "ü" * 40, " spaced ", "comma, here", "tab\there")
TEXT_FORMATS = ("csv", "tsv", "jsonl")


@dataclass
class Made:
    """A file's bytes, and what a reader must find in it."""

    name: str
    data: bytes
    ids: list[str] = field(default_factory=list)
    """Of whole rows, in order."""
    malformed: int = 0
    """Rows that no reader can make out."""
    blank: int = 0

    @property
    def rows(self) -> int:
        return len(self.ids) + self.malformed


def make_file(seed: int, *, whole: bool = False) -> Made:
    """`whole`: without malformed rows."""
    return _Maker(random.Random(seed), whole).make()


@dataclass
class _Maker:
    random: random.Random
    whole: bool

    def make(self) -> Made:
        kind = self.random.choice(("parquet", *TEXT_FORMATS))
        return self._parquet() if kind == "parquet" else self._text(kind)

    @cached_property
    def num_rows(self) -> int:
        times = self.random.choice((1, 1, 1, 2, 3))
        limit = self.random.choice(LIMITS)
        return max(0, (limit if limit >= _PEEK_LINES else limit * times) + self.random.choice((-1, 0, 1, 2)))

    def _title(self) -> str:
        if self.num_rows < 100 and self.random.random() < 0.001:
            return "long " * (_BATCH_BYTES // 400)
        return self.random.choice(TITLES)

    def _parquet(self) -> Made:
        ids = [f"p{number}" for number in range(self.num_rows)]
        titles = [self._title() for _ in ids]
        columns = {"product_id": ids, "query": ["lamp"] * len(ids), "title": titles, "label": ["yes"] * len(ids)}
        table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
        sink = io.BytesIO()
        with pq.ParquetWriter(
            sink,
            table.schema,
            data_page_size=self.random.choice((64, 4096, 2**20)),
            compression=self.random.choice(("none", "snappy", "zstd")),
            use_dictionary=self.random.random() < 0.5,
        ) as writer:
            start = 0
            while start < len(ids) or (start == 0 and not ids):
                size = max(self.random.choice((1, 7, 99, 100, 101, 1000, 5000)), len(ids) // 10)
                groups = max(self.random.choice((3, 50, 10_000)), size // 10)
                writer.write_table(table.slice(start, size), row_group_size=groups)
                start += size
        return Made("a.parquet", sink.getvalue(), ids)

    def _text(self, kind: str) -> Made:
        made = Made(f"a.{kind}", b"")
        newline = self.random.choice((b"\n", b"\r\n"))
        lines = [] if kind == "jsonl" else [self._blanks(made, newline) + self._csv(kind, HEADER)]
        share_bad, share_blank = self.random.choice((0.0, 0.05)), self.random.choice((0.0, 0.1))
        for number in range(self.num_rows):
            if self.random.random() < share_blank:
                made.blank += 1
                lines.append(b"")
            if number and not self.whole and self.random.random() < share_bad:
                made.malformed += 1
                lines.append(self._malformed(kind))
                continue
            made.ids.append(f"p{number}")
            values = [f"p{number}", "lamp", self._title(), "yes"]
            lines.append(self._json(values) if kind == "jsonl" else self._csv(kind, values))
        if lines[1:] and not self.whole and kind == "csv" and self.random.random() < 0.2:
            swallowed = self.random.choice((2, 3, 40))
            lines += [b'p,lamp,"never closed,yes', *[b"p,lamp,swallowed,yes"] * (swallowed - 1)]
            made.malformed += swallowed
        data = newline.join(lines) + (newline if lines and self.random.random() < 0.7 else b"")
        if data and not data.endswith(newline) and not lines[-1]:
            made.blank -= 1  # what nothing follows is no line
        made.data = (b"\xef\xbb\xbf" if self.random.random() < 0.3 else b"") + data
        self._compress(made)
        return made

    def _blanks(self, made: Made, newline: bytes) -> bytes:
        count = self.random.choice((0, 0, 0, 2))
        made.blank += count
        return newline * count

    def _compress(self, made: Made) -> None:
        how = self.random.choice(("plain", "plain", "gz", "members", "unnamed"))
        if how == "plain":
            return
        cut = self.random.randrange(len(made.data) + 1) if how == "members" else 0
        made.data = gzip.compress(made.data[:cut], 1) * bool(cut) + gzip.compress(made.data[cut:], 1)
        made.name += "" if how == "unnamed" else ".gz"

    def _json(self, values: list[str]) -> bytes:
        record = dict(zip(HEADER, values, strict=True))
        return json.dumps(record, ensure_ascii=self.random.random() < 0.5).encode()

    def _csv(self, kind: str, values: list[str]) -> bytes:
        sink = io.StringIO()
        dialect = self.random.choice((csv.excel, csv.unix_dialect))  # quotes where they must be, and everywhere
        csv.writer(sink, dialect, delimiter="\t" if kind == "tsv" else ",", lineterminator="\r\n").writerow(values)
        return sink.getvalue().removesuffix("\r\n").encode()

    def _malformed(self, kind: str) -> bytes:
        if kind == "jsonl":
            return self.random.choice((b'{"product_id": "x', b"[1]", b"null", b"\xff\xfe\xff", b'{"a": 1} {"b": 2}'))
        return self.random.choice((b"one field", b"1\t2\t3\t4\t5\t6".replace(b"\t", b"\t" if kind == "tsv" else b",")))


HEADER = ["product_id", "query", "title", "label"]
