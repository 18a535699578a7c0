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
_LONGEST_FIELD = 16 * 2**20
_HELD_CHARACTERS = 1000  # of what is malformed, for the quarantine
_SEPARATOR_LINE = re.compile(r'"?sep=(.)"?\s*')


@dataclass(frozen=True)
class Malformed:
    """Text that is no record; `lines` of it count as rows."""

    reason: str
    text: str
    lines: int = 1


class _Lines:
    """The lines of a text. Those taken for a record can be put back and are read again."""

    def __init__(self, text: Iterable[str]) -> None:
        self._text, self._ahead = iter(text), deque[str]()
        self.taken: list[str] = []
        self.first = 1
        """Number of the line with which the record begins."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._ahead.popleft() if self._ahead else next(self._text)
        self.taken.append(line)
        return line

    def begin_record(self) -> None:
        self.first += len(self.taken)
        self.taken = []

    def put_back(self, kept: int) -> None:
        self._ahead.extendleft(reversed(self.taken[kept:]))
        del self.taken[kept:]


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
        self._delimiter = _delimiter_of(line, delimiter)
        self._parser = csv.reader(
            self._lines, delimiter=self._delimiter, strict=True, skipinitialspace=self._delimiter != "\t"
        )
        end = re.escape(self._delimiter)
        self._escaped_field = re.compile(rf'"((?:[^"\\]|\\.)*)"|[^"{end}\r\n][^{end}\r\n]*|', re.DOTALL)
        self.header: list[str] = []
        self._has_quotes = True
        if not line:
            return
        fields = _split(line)
        if self._delimiter == "\t" and not all(_unquoted(field) for field in fields):
            self._has_quotes, self.header = False, fields
        else:
            self._lines.put_back(0)
            header, _ = self._parse()
            if header is None:
                raise csv.Error(f"a quote in line {self._lines.first}, the header, is never closed")
            self.header = header
        # In texts a comma is followed by a space, between columns it is not.
        self._column_end = re.compile(re.escape(self._delimiter) + ("" if self._delimiter == "\t" else "(?! )"))

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
            if (found := read()) is None:
                return
            if not found:
                self.blank += 1
                continue
            self.rows += found.lines if isinstance(found, Malformed) else 1
            yield self._lines.first, found

    def _quoted(self) -> list[str] | Malformed | None:
        """Return the fields of the next record by the rules of CSV, none for a blank line, None at the end.

        Text after a closing quote means that an earlier quote was never closed and that the rows between became one.
        So does a field of which the lines look like rows.
        """
        record, reason = self._parse()
        if record is None and not reason:
            return None
        if record is not None and (not record or self._is_row(record)):
            return record
        lines, is_whole = len(self._lines.taken), record is not None and len(record) == len(self.header)
        if (escaped := self._parse_escaped()) is not None:
            return escaped
        self._lines.put_back(0)
        for _ in range(lines):
            next(self._lines)
        return self._malformed(reason or (UNCLOSED_QUOTE if is_whole else WRONG_FIELDS))

    def _tabbed(self) -> list[str] | Malformed | None:
        """Return the fields of the next line of a TSV, none for a blank one, None at the end.

        A record has several lines only if the first line alone is no row, or leaves a quote open.
        """
        line = next(self._lines, None)
        if line is None or not line.strip("\r\n"):
            return None if line is None else []
        fields = _split(line)
        is_row = len(fields) == len(self.header)
        if '"' not in line:
            return fields if is_row else self._malformed(WRONG_FIELDS)
        if not is_row or any(field.startswith('"') and _unquoted(field) is None for field in fields):
            self._lines.put_back(0)
            record, _ = self._parse()
            if record is None or not self._is_row(record):
                record = self._parse_escaped()
            if record is not None and len(self._lines.taken) > int(is_row):
                return record
            self._lines.put_back(1)
        if not is_row:
            return self._malformed(WRONG_FIELDS)
        plain = [_unquoted(field) for field in fields]
        is_written_so = all(value is not None for value in plain)
        return [
            field if value is None or not (is_written_so or _needs_quotes(value)) else value
            for field, value in zip(fields, plain, strict=True)
        ]

    def _parse(self) -> tuple[list[str] | None, str]:
        """Return the record at the next line by RFC 4180, or None and the reason; no reason at the end of the text."""
        try:
            try:
                return next(self._parser, None), ""
            except csv.Error:
                taken = self._lines.taken
                if len(taken) != 1 or len(taken[0]) <= csv.field_size_limit():
                    raise
                self._lines.put_back(0)
                limit = csv.field_size_limit(_LONGEST_FIELD)
                try:
                    return next(self._parser, None), ""
                finally:
                    csv.field_size_limit(limit)
        except csv.Error as error:
            is_closed = len(self._lines.taken) == 1 and "expected after" in str(error)
            return None, TEXT_AFTER_QUOTE if is_closed else UNCLOSED_QUOTE

    def _parse_escaped(self) -> list[str] | None:
        """Return the row at the first of the lines taken by the rules of Spark, None if it is no row.

        Within quotes a backslash escapes a quote or a backslash; elsewhere it is text.
        """
        if not any('\\"' in line for line in self._lines.taken):
            return None
        self._lines.put_back(0)
        text, is_open = "", False
        for line in self._lines:
            text += line
            is_open ^= re.sub(r"\\.", "", line, flags=re.DOTALL).count('"') % 2 == 1
            if not is_open or len(text) > csv.field_size_limit():
                break
        text, place, record = text.removesuffix("\n").removesuffix("\r"), 0, list[str]()
        while found := self._escaped_field.match(text, place):
            record.append(found[0] if found[1] is None else re.sub(r'\\(["\\])', r"\1", found[1]))
            place = found.end() + 1
            if found.end() == len(text):
                return record if self._is_row(record) else None
            if text[found.end()] != self._delimiter:
                return None
        return None

    def _is_row(self, record: list[str]) -> bool:
        is_one_line = len(self._lines.taken) == 1
        return len(record) == len(self.header) and (is_one_line or not self._swallowed_rows(record))

    def _malformed(self, reason: str) -> Malformed:
        text = "".join(self._lines.taken).rstrip("\r\n")
        return Malformed(reason, text[:_HELD_CHARACTERS], len(self._lines.taken))

    def _swallowed_rows(self, record: list[str]) -> bool:
        """Return whether a field reaches from a quote in one row to a quote in the same column of a later row.

        Such a field has the end of one row and the start of the other, and with commas, which texts have too, rows
        between. In a TSV a line within it that is a row, or a row up to this column, is enough.
        """
        num_columns = len(record)
        for place, value in enumerate(record):
            first, *rest = (len(self._column_end.split(line)) for line in re.split(r"\r\n?|\n", value))
            if not rest or num_columns == 1:
                continue
            between, is_end = rest[:-1], rest[-1] == place + 1
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


def _needs_quotes(value: str) -> bool:
    """Return whether a program that quotes what it must would quote a text of one line."""
    return not value or '"' in value
