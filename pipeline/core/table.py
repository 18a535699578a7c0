"""Rows of words as columns, for people."""

from collections.abc import Collection, Sequence


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


def usd(amount: float | None) -> str:
    """`$12.30`; four digits below a dollar; `-` when unknown."""
    if amount is None:
        return "-"
    return f"${amount:,.2f}" if amount >= 1 or amount == 0 else f"${amount:.4f}"
