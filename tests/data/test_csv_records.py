"""CSV and TSV of several programs: read as they mean it, or counted as bad with reason and line."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.csv_records import TEXT_AFTER_QUOTE, UNCLOSED_QUOTE, WRONG_FIELDS, CsvRecords, Malformed

HEADER = "query,title,label"


def records(text: str, delimiter: str = ",") -> tuple[list[str], list[tuple[int, list[str] | tuple[str, int]]]]:
    """The header, then by line the fields of a record, or the reason and the number of lines of what is none."""
    found = CsvRecords(io.StringIO(text, newline=""), delimiter)
    rows = [(line, (row.reason, row.lines) if isinstance(row, Malformed) else row) for line, row in found]
    assert found.rows == sum(1 if isinstance(row, list) else row[1] for _, row in rows)
    return found.header, rows


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("line", "title"),
    [
        ('q,"say ""hi"", ok",x', 'say "hi", ok'),
        ('q,"two|lines",x', "two\nlines"),
        (r'q,"shoe 15\" v3",x', 'shoe 15" v3'),
        (r'q,"monitor 27\"",x', 'monitor 27"'),
        (r'q,"27\" monitor, black",x', '27" monitor, black'),
        (r'q,"a\",b",x', 'a",b'),
        (r'q,"\"",x', '"'),
        (r'q,"C:\\dir \"x\"",x', r'C:\dir "x"'),
        (r'q,"two|lines of \"x\"",x', 'two\nlines of "x"'),
        (r'\\q,"27\" ""wide""",x', '27" "wide"'),
        (r'q,"C:\",x', "C:\\"),
        (r"q,a\b,x", r"a\b"),
        ('q,24" screen,x', '24" screen'),
        ('q, "a, b", x', "a, b"),
    ],
)
def test_a_row_of_csv(line: str, title: str, end: str) -> None:
    """Beside a row that only Spark's rules end: by RFC 4180 the quote at its end is part of the text."""
    lines = [HEADER, "p,t,y", line.replace("|", end), 'p,"17\\"",y', "p,t,y"]
    _, found = records(end.join(lines) + end)
    extra = line.count("|")
    assert found == [
        (2, ["p", "t", "y"]),
        (3, [line.partition(",")[0], title.replace("\n", end), "x"]),
        (4 + extra, ["p", '17"', "y"]),
        (5 + extra, ["p", "t", "y"]),
    ]


@pytest.mark.parametrize(
    ("line", "reason", "lines"),
    [
        ('q,"24" screen,x', TEXT_AFTER_QUOTE, 1),
        ('q,"24"" screen" black,x', TEXT_AFTER_QUOTE, 1),
        ("q,a,b,x", WRONG_FIELDS, 1),
        ("q,x", WRONG_FIELDS, 1),
        (";", WRONG_FIELDS, 1),
        ('q,"never closed,x', UNCLOSED_QUOTE, 2),
        (r'q,"C:\" and more,x', TEXT_AFTER_QUOTE, 1),
    ],
)
def test_what_is_no_csv_has_a_reason_and_a_line(line: str, reason: str, lines: int) -> None:
    _, found = records("\n".join([HEADER, "p,t,y", "", line, "p,t,y"]) + "\n")
    assert found[:2] == [(2, ["p", "t", "y"]), (4, (reason, lines))]
    assert len(found) == (3 if lines == 1 else 2)


@pytest.mark.parametrize(
    ("title", "read"),
    [
        ('"Deluxe Edition', '"Deluxe Edition'),
        ('"Deluxe" Acme', '"Deluxe" Acme'),
        ('"Deluxe Edition"', '"Deluxe Edition"'),
        ('"a" and "b"', '"a" and "b"'),
        ('Monitor 27"', 'Monitor 27"'),
        ('"24"" monitor"', '24" monitor'),
        (r'"24\" monitor"', '24" monitor'),
        ('""', ""),
        ('"two|lines"', "two\nlines"),
        ('"a tab, a|line, ""x"""', 'a tab, a\nline, "x"'),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_quote_in_a_tsv_is_text_unless_a_program_put_it_there(title: str, read: str, place: int) -> None:
    row, wanted = ["q", "t", "x"], ["q", "t", "x"]
    row[place], wanted[place] = title.replace("|", "\n"), read
    _, found = records("\n".join([HEADER.replace(",", "\t"), "p\tt\ty", "\t".join(row), "p\tt\ty", 'p\t27"\ty']), "\t")
    extra = title.count("|")
    assert found == [
        (2, ["p", "t", "y"]),
        (3, wanted),
        (4 + extra, ["p", "t", "y"]),
        (5 + extra, ["p", '27"', "y"]),
    ]


@pytest.mark.parametrize("quoting", [csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
@pytest.mark.parametrize("delimiter", [",", "\t", ";", "|"])
@pytest.mark.parametrize("usual", [",", "\t"])
def test_what_python_and_pandas_write(quoting: int, delimiter: str, usual: str) -> None:
    """Whatever the suffix says: what parts the header parts the rows."""
    lines = ["two\nlines", "two\r\nlines", 'x"\n"y']
    texts = ["plain", 'say "hi"', '"', "a,b", "a\tb", "a;b", "a|b", *lines, "", " ", "12,5"]
    table = [["q", text, str(place)] for place, text in enumerate(texts)] + [[text, "t", "x"] for text in texts]
    table += [["q", "t", text] for text in texts if quoting == csv.QUOTE_ALL or "\n" not in text or delimiter != "\t"]
    sink = io.StringIO(newline="")
    csv.writer(sink, delimiter=delimiter, quoting=quoting).writerows([HEADER.split(","), *table])  # type: ignore[arg-type]
    header, found = records(sink.getvalue(), usual)
    assert header == HEADER.split(",")
    strip = str.strip if delimiter != "\t" else str
    assert [[strip(value) for value in row] for _, row in found if isinstance(row, list)] == [
        [strip(value) for value in row] for row in table
    ]


def test_a_torn_line_of_a_tsv_costs_itself_alone() -> None:
    _, found = records('query\ttitle\tlabel\nq\t"t\nq\tt\tx\n\nq\tt"\tx\n', "\t")
    assert found == [(2, (WRONG_FIELDS, 1)), (3, ["q", "t", "x"]), (5, ["q", 't"', "x"])]
    assert records("sep=;\nquery;title;label\nq;t;x\n") == (["query", "title", "label"], [(3, ["q", "t", "x"])])


def test_a_long_text_of_one_line_is_read_and_an_unclosed_quote_is_not_read_on_for_ever() -> None:
    long, lines = "x" * 200_000, "several\nlines " * 5000
    several = [lines, lines, "x"]
    rows = f'q,"{long}",x\nq,{long},x\n"{lines}","{lines}",x\nq,"open,x\n' + "q,t,x\n" * 40_000
    _, found = records(f"{HEADER}\n{rows}")
    assert [row for _, row in found[:3]] == [["q", long, "x"], ["q", long, "x"], several]
    assert found[3][1][0] == UNCLOSED_QUOTE and len(found) > 10_000


@pytest.mark.parametrize("text", ['query,"title\nq,t\n', 'query,"title" x,label\nq,t,x\n'])
def test_a_header_that_is_none_names_its_line(text: str) -> None:
    with pytest.raises(csv.Error, match="line 2, the header"):
        records("\n" + text)


def spark(value: str) -> str:
    """As Spark writes a field."""
    quoted = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return quoted if '"' in value or "," in value else value


WORDS = st.lists(st.sampled_from(["lamp", '15"', '"', ",", "'", ";", "ü", " x", "7"]), min_size=1, max_size=5)
FIELDS = WORDS.map(lambda words: "".join(words).lstrip(","))
"""Without commas at the start: behind Spark's `15\\"` such a field is a row by RFC 4180, too."""


@given(st.lists(st.tuples(FIELDS, FIELDS, FIELDS), max_size=6), st.sampled_from(["excel", "spark", "iana"]))
def test_what_is_written_is_read(rows: list[tuple[str, str, str]], writer: str) -> None:
    """Quotes anywhere in texts of one line, by the rules of three writers; blanks around a field aside."""
    if writer == "excel":
        sink = io.StringIO(newline="")
        csv.writer(sink).writerows([HEADER.split(","), *rows])
        text = sink.getvalue()
    elif writer == "spark":
        text = "".join(",".join(map(spark, row)) + "\n" for row in [HEADER.split(","), *rows])
    else:  # which cannot tell a program's quotes around and within a text from those of the text
        rows = [tuple("x" + value + "x" for value in row) for row in rows]  # type: ignore[misc]
        text = "".join("\t".join(row) + "\n" for row in [HEADER.split(","), *rows])
    _, found = records(text, "\t" if writer == "iana" else ",")
    read = [[value.strip() for value in row] if isinstance(row, list) else row for _, row in found]
    assert read == [[value.strip() for value in row] for row in rows]
