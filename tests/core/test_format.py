"""Numbers as people read them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.format import (
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    natural_key,
    quotable,
    shortened,
)

NOT_NUMBERS = [None, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.44, "0.4s"),
        (9.94, "9.9s"),
        (9.97, "10s"),
        (45, "45s"),
        (59.6, "1m00s"),
        (192, "3m12s"),
        (3599.6, "1h00m"),
        (7500, "2h05m"),
        (86_399, "1d00h"),
        (86_400 * 3 + 4 * 3600, "3d04h"),
        (-192, "-3m12s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (3.14159, "3.14"),
        (812.4, "812"),
        (999.6, "1.00k"),
        (1000, "1.00k"),
        (26_100, "26.1k"),
        (999_600, "1.00M"),
        (1.2e6, "1.20M"),
        (3.4e9, "3.40B"),
        (5e15, "5000T"),
        (-26_100, "-26.1k"),
    ],
)
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (8 * 2**20, "8.0 MiB"),
        (2**20 - 1, "1.0 MiB"),
        (2**60, "1024.0 PiB"),
    ],
)
def test_bytes(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(("share", "text"), [(0.003, "0.3%"), (0.0999, "10%"), (0.97, "97%"), (1, "100%")])
def test_shares(share: float, text: str) -> None:
    assert format_percent(share) == text


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_unknown_is_a_dash(value: float | None) -> None:
    assert {f(value) for f in (format_duration, format_count, format_bytes, format_percent)} == {"-"}


@given(st.floats(min_value=0, max_value=1e14))
def test_counts_are_close(value: float) -> None:
    text = format_count(value)
    factor = {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1)
    assert float(text.rstrip("kMBT")) * factor == pytest.approx(value, rel=0.006, abs=0.006)
    assert len(text) <= 6


def test_a_quotable_text_is_a_json_string_between_quotation_marks() -> None:
    for text in ('say "no" to C:\\x', "\x1b[31mred\x1b[0m\n", "plain, naïve"):
        assert json.loads(f'"{quotable(text)}"') == quotable(text)
    assert quotable('say "no" to C:\\x') == "say 'no' to C:/x"


def test_digits_in_names_are_numbers() -> None:
    rising = ["", "2026-2", "2026-10", "a", "a1", "a1b", "a09", "a9", "a10", "b", "cycle-9", "cycle-10"]
    assert sorted(reversed(rising), key=natural_key) == rising


@pytest.mark.parametrize(("text", "expected"), [("", ""), ("shoes", "shoes"), ("sandal", "sand…")])
def test_a_long_text_is_cut_to_the_characters_allowed(text: str, expected: str) -> None:
    assert shortened(text, 5) == expected
