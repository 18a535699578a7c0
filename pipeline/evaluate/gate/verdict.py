"""What the gate says, in records that go into results and in lines for people."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Outcome = Literal["fail", "warn", "skipped", "pass"]
CheckKind = Literal["scores", "incumbent", "floor", "delta", "slice", "baseline"]

_SLICES_SHOWN: dict[Outcome, int] = {"fail": 1000, "warn": 1000, "skipped": 5, "pass": 0}
"""In lines for people, in this order; the others are counted."""


class GateCheck(BaseModel):
    """One thing that was looked at. Figures that do not exist are null."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Kind, metric and slice in one, unique within a verdict")
    kind: CheckKind
    outcome: Outcome = Field(description="fail refuses; warn and skipped are for people to know")
    reason: str = Field(description="One plain sentence")
    metric: str = ""
    slice: str = Field("", description="column=value, or the column when all its slices are meant; empty: all rows")
    candidate: float | None = None
    incumbent: float | None = None
    baseline: str = Field("", description="The tool it was compared with")
    baseline_value: float | None = None
    bound: float | None = Field(None, description="The floor, or the allowed drop")
    low: float | None = Field(None, description="Lower end of candidate minus incumbent or baseline")
    high: float | None = Field(None, description="Upper end; each end holds alone with the one-sided confidence")
    num_queries: int | None = Field(None, description="Queries that bear on the metric")


class Verdict(BaseModel):
    """Promote or refuse, with every check."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    promote: bool
    checks: tuple[GateCheck, ...]
    num_rows: int = Field(ge=0)
    num_queries: int = Field(ge=0)
    confidence: float = Field(description="One-sided confidence of each comparison over all rows")
    slice_confidence: float = Field(description="The same of each slice, so that all of them together have the former")
    baseline_confidence: float | None = Field(None, description="The same of each comparison with a baseline")
    resamples: int
    seed: int

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it was refused; of a promotion, what was shown over all rows and what to know."""
        wanted = ("warn", "pass") if self.promote else ("fail",)
        return tuple(
            check.reason
            for check in self.checks
            if check.outcome in wanted and not (check.kind == "slice" and check.outcome == "pass")
        )

    def lines(self) -> list[str]:
        """For a terminal: the verdict, then what refuses, what to know and what passed; good slices are counted."""
        failed = sum(check.outcome == "fail" for check in self.checks)
        head = f"promote: {len(self.checks)} checks, none fails" if self.promote else f"refuse: {failed} checks fail"
        lines = [f"{head} ({self.num_queries:,} queries, {self.num_rows:,} rows)"]
        for outcome, shown in _SLICES_SHOWN.items():
            found = [check for check in self.checks if check.outcome == outcome]
            hidden = [check for check in found if check.kind == "slice"][shown:]
            lines += [f"  {outcome:<7} {check.reason}" for check in found if check not in hidden]
            lines += [f"  {outcome:<7} {len(hidden):,} comparisons of slices"] if hidden else []
        return lines
