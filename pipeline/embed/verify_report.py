"""What a verification found."""

from collections.abc import Callable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipeline.core.errors import DataError

MAX_NAMED = 3
"""Problems of one check that are told one by one."""


class Check(BaseModel):
    """One question and its answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    outcome: Literal["pass", "fail", "skipped"]
    seen: str
    figures: dict[str, float] = {}

    def line(self) -> str:
        """`pass     files      5 files, 1.2 MiB`"""
        return f"{self.outcome:<8} {self.name:<10} {self.seen}"


class VerifyReport(BaseModel):
    """All checks of one cycle's vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cycle: str
    rows: int
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome == "fail")


def judge(name: str, problems: list[str], seen: str, figures: dict[str, float] | None = None) -> Check:
    """A failure that names the first problems, else a pass that says what was looked at."""
    if not problems:
        return Check(name=name, outcome="pass", seen=seen, figures=figures or {})
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return Check(name=name, outcome="fail", seen="; ".join(problems[:MAX_NAMED]) + more, figures=figures or {})


def skipped(name: str, reason: str) -> Check:
    return Check(name=name, outcome="skipped", seen=reason)


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """A part that cannot be read fails the check that needed it, not all the others."""
    try:
        return check()
    except DataError as error:
        return Check(name=name, outcome="fail", seen=error.seen)
