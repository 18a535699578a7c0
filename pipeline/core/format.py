"""Format numbers and tables in a human-readable way. NaN and infinity are treated as unknown."""

import math
import re
from collections.abc import Collection, Sequence

UNKNOWN = "-"
DECIMAL_PREFIXES = ("", "k", "M", "B", "T")
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_duration(seconds: float | None) -> str:
    """Format a duration as `0.4s`, `45s`, `3m12s`, `2h05m` or `3d04h`, or as `-` if it is unknown."""
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
    # Round again for each unit, so that 3599.6 s is formatted as 1h00m and 86399 s as 1d00h.
    hours, rest_min = divmod(round(total / 60), 60)
    if hours < 24:
        return f"{hours}h{rest_min:02d}m"
    days, rest_h = divmod(round(total / 3600), 24)
    return f"{days}d{rest_h:02d}h"


def format_count(value: float | None) -> str:
    """Format a number with three digits and a suffix, such as `812`, `26.1k` or `1.20M`, or as `-` if it is unknown."""
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
    """Format a size in binary units, such as `512 B` or `8.0 MiB`, or as `-` if it is unknown."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return UNKNOWN
    scaled = float(size_bytes)
    units = iter(BYTE_UNITS)
    unit = next(units)
    while round(abs(scaled), 1) >= 1024 and (larger := next(units, None)):
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.0f} B" if unit == "B" else f"{scaled:.1f} {unit}"


def format_percent(fraction: float | None) -> str:
    """Format a fraction as a percentage, such as `0.3%` or `97%`, or as `-` if it is unknown."""
    if fraction is None or not math.isfinite(fraction):
        return UNKNOWN
    percent = 100 * fraction
    return f"{percent:.1f}%" if round(abs(percent), 1) < 10 else f"{percent:.0f}%"


def _decimals(scaled: float) -> int:
    return 2 if round(scaled, 2) < 10 else 1 if round(scaled, 1) < 100 else 0


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """Format a table with aligned columns, one line per row.

    Columns are aligned to the right, except for those with an index in `left`.
    """
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
    """Truncate a text to `max_length` characters. A truncated text ends in `…`."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def usd(amount: float | None) -> str:
    """Format a price as `$12.30`, `$0.45` or `$0.0012`, or as `-` if it is unknown.

    Small amounts are formatted with two significant digits.
    """
    if amount is None:
        return UNKNOWN
    decimals = 2 if amount >= 0.1 or amount <= 0 else 1 - math.floor(math.log10(amount))
    return f"${amount:,.{decimals}f}"


_QUOTABLE = str.maketrans({'"': "'", "\\": "/"} | dict.fromkeys(map(chr, range(32)), ""))


def quotable(text: str) -> str:
    """Replace all characters that would have to be escaped in JSON.

    This is needed because EventBridge inserts the reason of a failed job into an alarm message without escaping it, see
    "Common issues with transforming input" in the EventBridge user guide. Double quotes become single quotes,
    backslashes become slashes, and control characters are removed.
    """
    return text.translate(_QUOTABLE)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Return a sort key that compares the digits in a name as numbers, so that cycle-9 is sorted before cycle-10."""
    parts = re.split(r"([0-9]+)", name)  # alternates between text and digits
    return [int(part) if index % 2 else part for index, part in enumerate(parts)], name
