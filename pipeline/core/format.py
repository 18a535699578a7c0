"""Numbers and tables as people read them. Pure; every output is short and has no surprises for NaN and infinity."""

import math
import re
from collections.abc import Collection, Sequence

UNKNOWN = "-"
DECIMAL_PREFIXES = ("", "k", "M", "B", "T")
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_duration(seconds: float | None) -> str:
    """`0.4s`, `45s`, `3m12s`, `2h05m`, `3d04h`; `-` when unknown (None, NaN, infinite). Negative ones get a sign."""
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
    """Three figures with a decimal prefix: `812`, `26.1k`, `1.20M`, `3.40B`; `-` when unknown."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value < 0:
        return f"-{format_count(-value)}"
    suffixes = iter(DECIMAL_PREFIXES)
    scaled, suffix = float(value), next(suffixes)
    while round(scaled, _places(scaled)) >= 1000 and (larger := next(suffixes, None)):
        scaled, suffix = scaled / 1000, larger
    if not suffix and value == int(value):
        return f"{value:.0f}"
    return f"{scaled:.{_places(scaled)}f}{suffix}"


def format_bytes(size_bytes: float | None) -> str:
    """Binary units: `512 B`, `8.0 MiB`, `1.3 GiB`; `-` when unknown."""
    if size_bytes is None or not math.isfinite(size_bytes):
        return UNKNOWN
    scaled = float(size_bytes)
    units = iter(BYTE_UNITS)
    unit = next(units)
    while round(abs(scaled), 1) >= 1024 and (larger := next(units, None)):
        scaled, unit = scaled / 1024, larger
    return f"{scaled:.0f} B" if unit == "B" else f"{scaled:.1f} {unit}"


def format_percent(share: float | None) -> str:
    """A share of one as per cent: `0.3%`, `97%`; `-` when unknown."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    percent = 100 * share
    return f"{percent:.1f}%" if round(abs(percent), 1) < 10 else f"{percent:.0f}%"


def _places(scaled: float) -> int:
    return 2 if round(scaled, 2) < 10 else 1 if round(scaled, 1) < 100 else 0


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """One line a row, each column as wide as its widest word. `left`: columns that begin at the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            word.ljust(width) if index in left else word.rjust(width)
            for index, (word, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def shortened(text: str, most: int) -> str:
    """Return at most `most` characters of a text; one that is cut ends in `…`."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def usd(amount: float | None) -> str:
    """`$12.30`, `$0.45`, `$0.0012`: at least two significant digits; `-` when unknown."""
    if amount is None:
        return "-"
    places = 2 if amount >= 0.1 or amount <= 0 else 1 - math.floor(math.log10(amount))
    return f"${amount:,.{places}f}"


_QUOTABLE = str.maketrans({'"': "'", "\\": "/"} | dict.fromkeys(map(chr, range(32)), ""))


def quotable(text: str) -> str:
    """A text for a JSON string as it is: `"` becomes `'`, a backslash `/`, control characters go.

    EventBridge puts reasons of failed jobs into messages of alarms, and does not escape them (its user guide, "Common
    issues with transforming input").
    """
    return text.translate(_QUOTABLE)


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Sort key of a name in which digits count as numbers: cycle-9 comes before cycle-10."""
    parts = re.split(r"([0-9]+)", name)  # text and digits in turn
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], name
