"""Formatting of numbers and tables for people. Pure. NaN and infinity are shown as unknown."""

import math
import re
from collections.abc import Collection, Sequence

UNKNOWN = "-"
DECIMAL_PREFIXES = ("", "k", "M", "B", "T")
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_duration(seconds: float | None) -> str:
    """Format as `0.4s`, `45s`, `3m12s`, `2h05m` or `3d04h`, with a sign if negative, and `-` for None, NaN or inf."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 0:
        return f"-{format_duration(-seconds)}"
    if round(seconds, 1) < 10 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    total = round(seconds)
    if total < 60:
        return f"{total}s"
    minutes, rest_s = divmod(total, 60)
    if minutes < 60:
        return f"{minutes}m{rest_s:02d}s"
    # Round again at the next unit, so that 3599.6 s is 1h00m and 86399 s is 1d00h.
    hours, rest_min = divmod(round(total / 60), 60)
    if hours < 24:
        return f"{hours}h{rest_min:02d}m"
    days, rest_h = divmod(round(total / 3600), 24)
    return f"{days}d{rest_h:02d}h"


def format_count(value: float | None) -> str:
    """Format with three digits and a decimal prefix: `812`, `26.1k`, `1.20M`, `3.40B`, or `-` if unknown."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 0:
        return f"-{format_count(-value)}"
    suffixes = iter(DECIMAL_PREFIXES)
    scaled, suffix = float(value), next(suffixes)
    while round(scaled, _decimals(scaled)) >= 1000 and (larger := next(suffixes, None)):
        scaled, suffix = scaled / 1000, larger
    if not suffix and value == int(value):
        return f"{value:.0f}"
    return f"{scaled:.{_decimals(scaled)}f}{suffix}"


def format_bytes(size_bytes: float | None) -> str:
    """Format with binary units: `512 B`, `8.0 MiB`, `1.3 GiB`, or `-` if unknown."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return UNKNOWN
    scaled = float(size_bytes)
    units = iter(BYTE_UNITS)
    unit = next(units)
    while round(abs(scaled), 1) >= 1024 and (larger := next(units, None)):
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.0f} B" if unit == "B" else f"{scaled:.1f} {unit}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction as `0.3%` or `97%`, or `-` if unknown."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    percent = 100 * fraction
    return f"{percent:.1f}%" if round(abs(percent), 1) < 10 else f"{percent:.0f}%"


def _decimals(scaled: float) -> int:
    return 2 if round(scaled, 2) < 10 else 1 if round(scaled, 1) < 100 else 0


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Format rows as lines with aligned columns. `left`: indices of left-aligned columns, others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, max_length: int) -> str:
    """Cut a text to `max_length` characters, with `…` at the end if it was cut."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def usd(amount: float | None) -> str:
    """Format as `$12.30`, `$0.45` or `$0.0012`, with at least two significant digits, or `-` if unknown."""
    if amount is None:
        return UNKNOWN
    decimals = 2 if amount >= 0.1 or amount <= 0 else 1 - math.floor(math.log10(amount))
    return f"${amount:,.{decimals}f}"


_QUOTABLE = str.maketrans({'"': "'", "\\": "/"} | dict.fromkeys(map(chr, range(32)), ""))


def quotable(text: str) -> str:
    """Return a text that needs no escapes in JSON: `"` becomes `'`, a backslash `/`, control characters are removed.

    EventBridge inserts the reasons of failed jobs into alarm messages without escaping them (EventBridge user guide,
    "Common issues with transforming input").
    """
    return text.translate(_QUOTABLE)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that compares digits in a name as numbers: cycle-9 before cycle-10."""
    parts = re.split(r"([0-9]+)", name)  # alternates text and digits
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name
