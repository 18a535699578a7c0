"""Settings of `trnpipe tune`: ranges of searched settings, and which trials go on (Hyperband). Pure."""

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Self

from pydantic import Field, field_validator, model_validator

from pipeline.core.record import Record

# Which trials of a search go on: Hyperband over asynchronous successive halving. Pure.
#
# Li et al., "Hyperband" (JMLR 2018); Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020).
# Brackets, their shares and the rule of promotion are those of Optuna's HyperbandPruner, and a test holds both against
# each other. Optuna's notes that a trial has passed a rung before it answers, so a trial that was killed in between and
# asks again is let through. Here the answer follows from the reported values alone: asked again, it is the same.


@dataclass(frozen=True)
class Hyperband:
    """Rungs at `min_steps` times powers of `reduction`; at each the best 1/`reduction` of a bracket go on.

    A trial belongs to one bracket. Bracket b is first asked at rung b: the later ones give slow starters time.
    """

    min_steps: int
    max_steps: int
    reduction: int

    @property
    def rungs(self) -> tuple[int, ...]:
        """Steps at which a trial is scored, rising; the last is the end of a full trial."""
        return (*(step for step in self._powers if step < self.max_steps), self.max_steps)

    @property
    def _powers(self) -> tuple[int, ...]:
        """min_steps * reduction^k up to max_steps."""
        steps = [self.min_steps]
        while steps[-1] * self.reduction <= self.max_steps:
            steps.append(steps[-1] * self.reduction)
        return tuple(steps)

    @property
    def shares(self) -> tuple[int, ...]:
        """Of each bracket, how many trials of their sum it gets."""
        brackets = len(self._powers)
        return tuple(
            math.ceil(brackets * self.reduction ** (brackets - 1 - bracket) / (brackets - bracket))
            for bracket in range(brackets)
        )

    def bracket_of(self, study: str, number: int) -> int:
        """The bracket of a trial: by a hash, so that every worker comes to the same."""
        shares = self.shares
        place = zlib.crc32(f"{study}_{number}".encode()) % sum(shares)
        return next(bracket for bracket, end in enumerate(accumulate(shares)) if place < end)

    def is_pruned(self, bracket: int, step: int, value: float, others: Sequence[float]) -> bool:
        """Whether a trial of `bracket` ends at `step` with `value` (higher is better).

        `others`: what the other trials of the bracket had at that step, of those that have come so far.
        """
        if step not in self._powers[bracket:]:
            return False
        competing = sorted([*others, value], reverse=True)
        # The first `reduction` - 1 trials of a rung cannot be a whole share: the best of them goes on.
        last_kept = max(1, len(competing) // self.reduction)
        return value < competing[last_kept - 1]


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


def _number(text: str, word: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{text!r}: expected numbers, {word!r} is none")
    return number


# Settings of `trnpipe tune`.


class TuneConfig(Record):
    """A search over training settings: what may vary, how long a trial is, when it ends early."""

    space: dict[str, str] = Field({}, description=f"Settings of train and model to search, each with {FORMS}")
    name: str = Field(
        "default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of this search; the same one continues it"
    )
    trials: int = Field(20, ge=1, le=100_000, description="Trials in all; the first has the settings as they are")
    steps: int = Field(500, ge=2, description="Optimizer steps of a full trial, in place of train.max_steps")
    min_steps: int = Field(
        50, ge=1, description="Steps after which a trial is first scored on valid and may be ended (Hyperband)"
    )
    reduction: int = Field(
        3, ge=2, le=16, description="Each time this many times as long; one of as many trials goes on"
    )
    metric: str = Field("", description="What to make high on valid, a value of train.metric; empty: train.metric")
    seed: int = Field(1, ge=0, description="Seed of what is tried; the seed of training is train.seed")
    folder: str | None = Field(
        None,
        min_length=1,
        description="Local or shared folder of searches, their checkpoints too (default: tune/ in a local workspace)",
    )

    @field_validator("space", mode="before")
    @classmethod
    def _dotted(cls, space: object) -> object:
        """In a TOML file a name without quotes is a table of tables."""
        return dict(_flat(space, "")) if isinstance(space, Mapping) else space

    @field_validator("space")
    @classmethod
    def _ranges(cls, space: dict[str, str]) -> dict[str, str]:
        for name, text in space.items():
            try:
                parse_range(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return space

    @model_validator(mode="after")
    def _has_rungs(self) -> Self:
        if self.min_steps >= self.steps:
            raise ValueError(f"min_steps {self.min_steps}: expected less than steps {self.steps}")
        return self

    @property
    def hyperband(self) -> Hyperband:
        return Hyperband(self.min_steps, self.steps, self.reduction)


def _flat(table: Mapping[str, object], parent: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = f"{parent}{key}".replace("-", "_").lower()
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
