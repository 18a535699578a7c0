"""What a setting may be in a search: text such as `log 1e-5 1e-3` to a range. Pure."""

import math
from dataclasses import dataclass

FORMS = "log LOW HIGH, uniform LOW HIGH, int LOW HIGH, or one of A B ..."


@dataclass(frozen=True)
class Floats:
    """Numbers from `low` to `high`; `log`: every order of magnitude is as likely as the next."""

    low: float
    high: float
    log: bool


@dataclass(frozen=True)
class Integers:
    """Whole numbers from `low` to `high`, both included."""

    low: int
    high: int


@dataclass(frozen=True)
class Choices:
    """One of several values, each as one would type it on the command line."""

    texts: tuple[str, ...]


Range = Floats | Integers | Choices
Value = float | int | str
"""Of a range; a choice stays the text it was written as."""


def parse_range(text: str) -> Range:
    """Text to a range. Raises ValueError that says what was expected."""
    words = text.split()
    match words:
        case ["one", "of", *texts] if len(texts) > 1 and len(set(texts)) == len(texts):
            return Choices(tuple(texts))
        case ["log" | "uniform" as kind, low, high]:
            floats = Floats(_number(text, low), _number(text, high), kind == "log")
            if not floats.low < floats.high or (floats.log and floats.low <= 0):
                raise ValueError(f"{text!r}: expected LOW below HIGH" + (", both above 0" if floats.log else ""))
            return floats
        case ["int", low, high]:
            try:
                integers = Integers(int(low), int(high))
            except ValueError:
                raise ValueError(f"{text!r}: expected two whole numbers") from None
            if not integers.low < integers.high:
                raise ValueError(f"{text!r}: expected LOW below HIGH")
            return integers
        case ["one", "of", *_]:
            raise ValueError(f"{text!r}: expected two or more different values")
    raise ValueError(f"{text!r}: expected {FORMS}")


def ends_of(allowed: Range) -> tuple[Value, ...]:
    """The values that have to be valid for all of them to be: both ends, or every choice."""
    return allowed.texts if isinstance(allowed, Choices) else (allowed.low, allowed.high)


def _number(text: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r}: expected numbers, {word!r} is none")
    return number
