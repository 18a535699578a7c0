r"""A CSV and TSV parser that reports malformed records instead of failing on them.

The parser supports RFC 4180 (doubled quotes, fields that span lines) as well as the `\"` escapes that Spark writes.
The registered TSV format (IANA text/tab-separated-values) does not support quoting, but many programs quote TSV fields
anyway. Quotes in a TSV file are therefore treated as text unless the record can only have been written by such a
program.
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
_MAX_OPEN_CHARACTERS = 128 * 2**10  # a quote that is not closed within this many characters is considered text
csv.field_size_limit(max(16 * 2**20, csv.field_size_limit()))
_MAX_CONTENT_CHARACTERS = 1000  # maximum length of a malformed record in the quarantine file
_ESCAPES = {'\\"': '""', "\\\\": "\\"}  # maps Spark's escapes within quotes to their RFC 4180 equivalents
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*')


@dataclass(frozen=True)
class Malformed:
    """Text that could not be parsed as a record. It is counted as `lines` bad rows."""

    reason: str
    text: str
    lines: int = 1


class _Lines(Iterator[str]):
    """An iterator over lines that can rewind to the start of the current record."""

    def __init__(self, text: Iterable[str]) -> None:
        self._text, self._pushed_back = iter(text), deque[str]()
        self.taken: list[str] = []
        self.first = 1  # line number at which the record starts
        self._size = 0

    def __next__(self) -> str:
        """Return the next line. Raises csv.Error if too much text has been read since the last quote of the record."""
        if self._size > _MAX_OPEN_CHARACTERS:
            raise csv.Error("a quote is never closed")
        line = self._pushed_back.popleft() if self._pushed_back else next(self._text)
        self.taken.append(line)
        self._size = len(line) + (0 if '"' in line else self._size)
        return line

    def begin_record(self) -> None:
        self.first += len(self.taken)
        self.taken, self._size = [], 0

    def take(self, count: int) -> None:
        """Rewind to the start of the record and consume its first `count` lines again."""
        self._pushed_back.extendleft(reversed(self.taken))
        self.taken = [self._pushed_back.popleft() for _ in range(count)]
        self._size = 0


class CsvRecords:
    """An iterator over the records of a CSV or TSV text, which also exposes its header.

    If `delimiter` does not split the header, the delimiter is detected instead. The attributes `rows` and `blank` count
    the rows and blank lines read so far. Raises csv.Error if a quote in the header is never closed.
    """

    def __init__(self, text: Iterable[str], delimiter: str) -> None:
        self._lines = _Lines(text)
        self.rows = self.blank = 0
        line = self._first_line()
        if separator := _SEPARATOR_LINE.fullmatch(line):  # Excel writes it before the header
            self._lines.begin_record()
            delimiter, line = separator[1], self._first_line()
        self._delimiter = delimiter = _delimiter_of(line, delimiter)
        is_tabbed = delimiter == "\t"
        self._parser = self._parser_of(self._lines)
        # Commas within text are usually followed by a space, whereas commas between columns are not.
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
        """Skip blank lines and return the next line, or an empty string at the end of the text."""
        for line in self._lines:
            if line.strip("\r\n"):
                return line
            self.blank += 1
            self._lines.begin_record()
        return ""

    def __iter__(self) -> Iterator[tuple[int, list[str] | Malformed]]:
        """Yield each record as the number of its first line and either its fields or the malformed text."""
        read = self._read_quoted if self._has_quotes else self._read_tabbed
        while True:
            self._lines.begin_record()
            record = read()
            if not self._lines.taken:
                return
            if not record:
                self.blank += 1
                continue
            self.rows += record.lines if isinstance(record, Malformed) else 1
            yield self._lines.first, record

    def _read_quoted(self) -> list[str] | Malformed:
        """Return the fields of the next CSV record, or an empty list for a blank line or at the end of the text."""
        row, reason = self._parse(self._parser)
        if row is not None:
            return row
        num_lines = len(self._lines.taken)
        if (row := self._parse_escaped()) is not None:
            return row
        self._lines.take(num_lines)
        return self._malformed(reason)

    def _read_tabbed(self) -> list[str] | Malformed:
        """Return the fields of the next TSV record, or an empty list for a blank line or at the end of the text.

        Most records are a single line. Quoted fields that span several lines are only considered if the first line
        has the wrong number of fields or leaves a quote open.
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
        # Programs that quote only when necessary quote empty fields and fields that contain a quote, so these are the
        # only fields to unquote.
        return [
            text if text is not None and (not text or '"' in text) else field
            for text, field in zip(plain, fields, strict=True)
        ]

    def _parse(self, parser: Iterator[list[str]]) -> tuple[list[str] | None, str]:
        """Return the next row (empty for a blank line), or None and the reason why the lines could not be parsed.

        An unclosed quote makes the parser read several rows as one. This is detected if the next quote is followed by
        text, or if the lines within a field look like rows.
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
        """Parse the lines of the current record again, with Spark's escapes. Return None if that fails too."""
        if not any('\\"' in line for line in self._lines.taken):
            return None
        self._lines.take(0)
        return self._parse(self._parser_of(_as_rfc(self._lines, self._delimiter)))[0]

    def _malformed(self, reason: str) -> Malformed:
        text = "".join(self._lines.taken).rstrip("\r\n")
        return Malformed(reason, text[:_MAX_CONTENT_CHARACTERS], len(self._lines.taken))

    def _swallowed_rows(self, record: list[str]) -> bool:
        """Return whether a field extends from a quote in one row to a quote in the same column of a later row.

        Such a field contains the end of the first row and the start of the last row. To avoid false positives, most of
        the lines in between must also look like rows, unless the delimiter is a tab. In a TSV file without quoting, a
        single row (or the start of a row up to this column) within the field is sufficient evidence.
        """
        num_columns = len(record)
        for column, value in enumerate(record if num_columns > 1 else ()):
            first, *between = (len(self._column_end.split(line)) for line in re.split(r"\r\n?|\n", value))
            if not between:
                continue
            is_end = between.pop() == column + 1
            if not self._has_quotes and (num_columns in between or (is_end and column > 0)):
                return True
            contains_rows = self._delimiter == "\t" or 2 * between.count(num_columns) > len(between)
            if is_end and first == num_columns - column and contains_rows:
                return True
        return False


def _delimiter_of(header: str, usual: str) -> str:
    """Return the usual delimiter if it splits the header, otherwise the delimiter that yields the most fields."""

    def num_fields(delimiter: str) -> int:
        return len(next(csv.reader([header], delimiter=delimiter), ()))

    return usual if num_fields(usual) > 1 else max((usual, *_DELIMITERS), key=num_fields)


def _split(line: str) -> list[str]:
    return line.removesuffix("\n").removesuffix("\r").split("\t")


def _as_rfc(lines: Iterable[str], delimiter: str) -> Iterator[str]:
    """Convert Spark's escapes within quotes to RFC 4180. Backslashes outside quotes are left unchanged."""
    is_open = False
    for line in lines:
        converted = ""
        for part in re.split(r'(\\["\\]|")', line):
            if part == '"':
                is_open = not is_open and converted.rstrip(" ")[-1:] in ("", delimiter, '"')
            converted += _ESCAPES.get(part, part) if is_open else part
        yield converted


def _unquoted(field: str) -> str | None:
    """Return the text of a quoted field (with doubled or escaped quotes), or None if the field is not quoted."""
    if len(field) < 2 or not (field[0] == field[-1] == '"'):
        return None
    inner = field[1:-1]
    if '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    if '"' not in inner.replace('\\"', ""):
        return inner.replace("\\\\", "\\").replace('\\"', '"')
    return None
