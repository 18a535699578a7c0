"""CSV and TSV as programs write them: the records of a text, or the reason why a text is no record.

Supported are RFC 4180 (quotes doubled within quotes, texts of several lines), Spark's `\\"` within quotes, and TSV as
registered (IANA text/tab-separated-values), which has no quoting: a quote in a TSV is text unless only a program that
quotes can have written it.
"""

import csv
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

WRONG_FIELDS = "malformed row: wrong number of fields"
UNCLOSED_QUOTE = "malformed row: quote never closed"
TEXT_AFTER_QUOTE = "malformed row: text after a closing quote"
_DELIMITERS = (",", "\t", ";", "|")
_LONGEST_LINES = 128 * 2**10
"""Characters of lines without a quote after which one that is still open was never meant."""
csv.field_size_limit(max(16 * 2**20, csv.field_size_limit()))
_HELD_CHARACTERS = 1000  # of what is malformed, for the quarantine
_ESCAPES = {'\\"': '""', "\\\\": "\\"}
"""Spark's within quotes, and what RFC 4180 writes."""
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*')


@dataclass(frozen=True)
class Malformed:
    """Text that is no record; `lines` of it count as rows."""

    reason: str
    text: str
    lines: int = 1


class _Lines(Iterator[str]):
    """The lines of a text. Those taken for a record can be put back and are read again."""

    def __init__(self, text: Iterable[str]) -> None:
        self._text, self._ahead = iter(text), deque[str]()
        self.taken: list[str] = []
        self.first = 1
        """Number of the line with which the record begins."""
        self._size = 0

    def __next__(self) -> str:
        """Raises csv.Error if too much was taken for the record since its last quote."""
        if self._size > _LONGEST_LINES:
            raise csv.Error("a quote is never closed")
        line = self._ahead.popleft() if self._ahead else next(self._text)
        self.taken.append(line)
        self._size = len(line) + (0 if '"' in line else self._size)
        return line

    def begin_record(self) -> None:
        self.first += len(self.taken)
        self.taken, self._size = [], 0

    def take(self, count: int) -> None:
        """Make the first `count` lines from the start of the record the ones that are taken."""
        self._ahead.extendleft(reversed(self.taken))
        self.taken = [self._ahead.popleft() for _ in range(count)]
        self._size = 0


class CsvRecords:
    """The header and the records of a text. The delimiter is the given one, or another one that splits the header.

    `rows` and `blank` count what was taken from the text so far. Raises csv.Error for an unclosed quote in the header.
    """

    def __init__(self, text: Iterable[str], delimiter: str) -> None:
        self._lines = _Lines(text)
        self.rows = self.blank = 0
        line = self._first_line()
        if chosen := _SEPARATOR_LINE.fullmatch(line):  # Excel's, before the header
            self._lines.begin_record()
            delimiter, line = chosen[1], self._first_line()
        self._delimiter = delimiter = _delimiter_of(line, delimiter)
        is_tabbed = delimiter == "\t"
        self._parser = self._parser_of(self._lines)
        # In texts a comma is followed by a space, between columns it is not.
        self._column_end = re.compile(re.escape(delimiter) + ("" if is_tabbed else "(?! )"))
        self.header = _split(line) if line else []
        self._has_quotes = not is_tabbed or all(_unquoted(field) for field in self.header)
        if line and self._has_quotes:
            self._lines.take(0)
            try:
                self.header = next(self._parser)
            except csv.Error as error:
                raise csv.Error(f"a quote in line {self._lines.first}, the header, is never closed") from error

    def _parser_of(self, lines: Iterator[str]) -> Iterator[list[str]]:
        return csv.reader(lines, delimiter=self._delimiter, strict=True, skipinitialspace=self._delimiter != "\t")

    def _first_line(self) -> str:
        """Take the first line that is not blank; empty at the end."""
        for line in self._lines:
            if line.strip("\r\n"):
                return line
            self.blank += 1
            self._lines.begin_record()
        return ""

    def __iter__(self) -> Iterator[tuple[int, list[str] | Malformed]]:
        """Yield the number of its first line and the fields of a record, or what is malformed."""
        read = self._quoted if self._has_quotes else self._tabbed
        while True:
            self._lines.begin_record()
            found = read()
            if not self._lines.taken:
                return
            if not found:
                self.blank += 1
                continue
            self.rows += found.lines if isinstance(found, Malformed) else 1
            yield self._lines.first, found

    def _quoted(self) -> list[str] | Malformed:
        """Return the fields of the next record by the rules of CSV; none for a blank line and at the end."""
        row, reason = self._parse(self._parser)
        if row is not None:
            return row
        num_lines = len(self._lines.taken)
        if (row := self._parse_escaped()) is not None:
            return row
        self._lines.take(num_lines)
        return self._malformed(reason)

    def _tabbed(self) -> list[str] | Malformed:
        """Return the fields of the next line of a TSV; none for a blank one and at the end.

        A record has several lines only if the first line alone is no row, or leaves a quote open.
        """
        line = next(self._lines, "")
        if not line.strip("\r\n"):
            return []
        fields = _split(line)
        is_row = len(fields) == len(self.header)
        plain = [_unquoted(field) for field in fields]
        is_open = any(text is None and field.startswith('"') for text, field in zip(plain, fields, strict=True))
        if '"' in line and (is_open or not is_row):
            self._lines.take(0)
            row, _ = self._parse(self._parser)
            row = self._parse_escaped() if row is None else row
            if row is not None and len(self._lines.taken) > int(is_row):
                return row
            self._lines.take(1)
        if not is_row:
            return self._malformed(WRONG_FIELDS)
        if None not in plain:
            return [text or "" for text in plain]
        # A program that quotes what it must would quote an empty text, and one with a quote.
        return [
            text if text is not None and (not text or '"' in text) else field
            for text, field in zip(plain, fields, strict=True)
        ]

    def _parse(self, parser: Iterator[list[str]]) -> tuple[list[str] | None, str]:
        """Return the next row, or None and the reason why the lines taken are none; no fields for a blank line.

        Text after a closing quote means that an earlier quote was never closed and that the rows between became one.
        So does a field of which the lines look like rows.
        """
        try:
            record = next(parser, [])
        except csv.Error as error:
            is_closed = len(self._lines.taken) == 1 and "expected after" in str(error)
            return None, TEXT_AFTER_QUOTE if is_closed else UNCLOSED_QUOTE
        if record and len(record) != len(self.header):
            return None, WRONG_FIELDS
        if len(self._lines.taken) > 1 and self._swallowed_rows(record):
            return None, UNCLOSED_QUOTE
        return record, ""

    def _parse_escaped(self) -> list[str] | None:
        """Return the row at the first of the lines taken by the rules of Spark, None if it is no row."""
        if not any('\\"' in line for line in self._lines.taken):
            return None
        self._lines.take(0)
        return self._parse(self._parser_of(_as_rfc(self._lines, self._delimiter)))[0]

    def _malformed(self, reason: str) -> Malformed:
        text = "".join(self._lines.taken).rstrip("\r\n")
        return Malformed(reason, text[:_HELD_CHARACTERS], len(self._lines.taken))

    def _swallowed_rows(self, record: list[str]) -> bool:
        """Return whether a field reaches from a quote in one row to a quote in the same column of a later row.

        Such a field has the end of one row and the start of the other, and with commas, which texts have too, rows
        between. In a TSV a line within it that is a row, or a row up to this column, is enough.
        """
        num_columns = len(record)
        for place, value in enumerate(record if num_columns > 1 else ()):
            first, *between = (len(self._column_end.split(line)) for line in re.split(r"\r\n?|\n", value))
            if not between:
                continue
            is_end = between.pop() == place + 1
            if not self._has_quotes and (num_columns in between or (is_end and place > 0)):
                return True
            holds_rows = self._delimiter == "\t" or 2 * between.count(num_columns) > len(between)
            if is_end and first == num_columns - place and holds_rows:
                return True
        return False


def _delimiter_of(header: str, usual: str) -> str:
    """Return the usual delimiter if it splits the header, else the one that splits it into most fields."""

    def num_fields(delimiter: str) -> int:
        return len(next(csv.reader([header], delimiter=delimiter), ()))

    return usual if num_fields(usual) > 1 else max((usual, *_DELIMITERS), key=num_fields)


def _split(line: str) -> list[str]:
    return line.removesuffix("\n").removesuffix("\r").split("\t")


def _as_rfc(lines: Iterable[str], delimiter: str) -> Iterator[str]:
    """Write what Spark escapes within quotes as RFC 4180 does. Elsewhere a backslash is text."""
    is_open = False
    for line in lines:
        done = ""
        for part in re.split(r'(\\["\\]|")', line):
            if part == '"':
                is_open = not is_open and done.rstrip(" ")[-1:] in ("", delimiter, '"')
            done += _ESCAPES.get(part, part) if is_open else part
        yield done


def _unquoted(field: str) -> str | None:
    """Return the text of a quoted field (quotes within doubled or after backslashes); None for any other field."""
    if len(field) < 2 or not (field[0] == field[-1] == '"'):
        return None
    inner = field[1:-1]
    if '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    if '"' not in inner.replace('\\"', ""):
        return inner.replace("\\\\", "\\").replace('\\"', '"')
    return None
