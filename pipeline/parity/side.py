"""A side of a comparison: a backend with a precision, computed here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.core.errors import ConfigError
from pipeline.settings import Settings

Precision = Literal["fp32", "autocast", "bf16"]
BACKENDS: tuple[str, ...] = tuple(
    name for name in get_args(Settings.model_fields["backend"].annotation) if name != "auto"
)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Side:
    """What one side computes on, and in."""

    backend: str
    precision: Precision

    @property
    def name(self) -> str:
        """As in file names: cpu.fp32"""
        return f"{self.backend}.{self.precision}"


def parse_side(text: str, precision: Precision) -> Side | None:
    """`cpu` or `cuda:bf16`; None for anything else, which names a place. `precision`: where none is given.

    Raises ConfigError for a precision that is not known.
    """
    backend, colon, given = text.partition(":")
    if backend not in BACKENDS:
        return None
    if not colon:
        return Side(backend, precision)
    for known in PRECISIONS:
        if given == known:
            return Side(backend, known)
    choice = ", ".join(f"{backend}:{known}" for known in PRECISIONS)
    raise ConfigError(f"side {text!r}", expected=f"{backend}, or with a precision: {choice}")


def sides_text(backends: Sequence[str] = BACKENDS) -> str:
    """What may be typed, for messages."""
    return f"{', '.join(backends)}, each also as BACKEND:{'|'.join(PRECISIONS)}, or a folder or URI of a recorded side"
