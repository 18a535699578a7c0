"""What a bench leaves: figures with unit and spread, the target, pass or fail, versions, machine, date."""

import operator
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from bench.machine import Machine, this_machine, versions

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
QUICK_RESULTS = ROOT / "build" / "bench"
"""Where --quick writes: such numbers prove that a script works, nothing else."""
_COMPARE = {"<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt}


Centre = Callable[[Sequence[float]], float]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Figure(_Record):
    """One measured number: the median of its repeats (of seeds the mean), with the smallest and the largest."""

    name: str
    value: float
    unit: str
    low: float
    high: float
    repeats: int = Field(ge=1)
    text: str = Field(description="What was measured, in a few words")


class Target(_Record):
    """The claim: a bound on one figure."""

    figure: str
    comparison: Literal["<=", "<", ">=", ">"]
    value: float

    def holds(self, measured: float) -> bool:
        return bool(_COMPARE[self.comparison](measured, self.value))


class Result(_Record):
    """One bench, as in results/<bench>.json. `passed` says that every target holds; null for a bench without one."""

    schema_version: int = 1
    bench: str
    title: str
    method: str
    quick: bool
    date: str = Field(description="UTC, ISO 8601")
    figures: tuple[Figure, ...]
    target: Target | None
    further: tuple[Target, ...] = Field((), description="Targets beside the first")
    passed: bool | None
    settings: dict[str, str | int | float]
    versions: dict[str, str]
    machine: Machine

    @model_validator(mode="after")
    def _passed_as_measured(self) -> "Result":
        if self.further and self.target is None:
            raise ValueError(f"{self.bench}: further targets without a first one")
        expected = all(self.holds(target) for target in self.targets) if self.target else None
        if self.passed is not expected:
            raise ValueError(f"{self.bench}: passed is {self.passed}, the figures say {expected}")
        return self

    @property
    def targets(self) -> tuple[Target, ...]:
        """All of them, the first first."""
        return () if self.target is None else (self.target, *self.further)

    def holds(self, target: Target) -> bool:
        """Whether what was measured meets one of the targets."""
        return target.holds(self.figure(target.figure).value)

    @property
    def hardware(self) -> str:
        """The GPU if one was used, otherwise cores and CPU."""
        return str(self.settings.get("gpu") or f"{self.machine.cores}-core {self.machine.cpu}")

    @property
    def revision(self) -> str:
        """The commit that was measured; one of them if parts were measured at several."""
        return str(self.settings.get("run_with") or self.versions["trnpipe"]).rpartition("+")[2].removesuffix("-dirty")

    def figure(self, name: str) -> Figure:
        """One figure by name. Raises ValueError for a name that was not measured."""
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise ValueError(f"{self.bench} has no figure {name!r}; it has {[f.name for f in self.figures]}")


def figure(
    name: str, values: Sequence[float] | float, unit: str, text: str, *, centre: Centre = statistics.median
) -> Figure:
    """The median of repeated measurements, or another `centre` of them."""
    repeats = [values] if isinstance(values, int | float) else list(values)
    return Figure(
        name=name,
        value=_digits(centre(repeats)),
        unit=unit,
        low=_digits(min(repeats)),
        high=_digits(max(repeats)),
        repeats=len(repeats),
        text=text,
    )


def finish(
    bench: str,
    title: str,
    method: str,
    figures: Sequence[Figure],
    *,
    quick: bool,
    target: Target | None = None,
    further: Sequence[Target] = (),
    settings: dict[str, str | int | float] | None = None,
) -> Result:
    """Judge, write the JSON file, print the figures."""
    measured = {f.name: f.value for f in figures}
    targets = () if target is None else (target, *further)
    result = Result(
        bench=bench,
        title=title,
        method=" ".join(method.split()),
        quick=quick,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        figures=tuple(figures),
        target=target,
        further=tuple(further),
        passed=all(one.holds(measured[one.figure]) for one in targets) if targets else None,
        settings=settings or {},
        versions=versions(),
        machine=this_machine(),
    )
    folder = QUICK_RESULTS if quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{bench}.json").write_text(result.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print(text_of(result), flush=True)
    return result


def text_of(result: Result) -> str:
    """A few lines for a terminal."""
    lines = [f"{result.bench}: {result.title}{' (quick: not a measurement)' if result.quick else ''}"]
    for f in result.figures:
        spread = f"  [{f.low:g} to {f.high:g}, {f.repeats} repeats]" if f.repeats > 1 else ""
        lines.append(f"  {f.name:<28} {f.value:>10g} {f.unit:<10}{spread}  {f.text}")
    for target in result.targets:
        verdict = "pass" if result.holds(target) else "FAIL"
        lines.append(f"  {verdict}: {target.figure} {target.comparison} {target.value:g}")
    return "\n".join(lines)


def load_results(folder: Path = RESULTS) -> list[Result]:
    """Every committed result, by name. Raises pydantic.ValidationError for a file that is not one."""
    return [Result.model_validate_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _digits(value: float) -> float:
    """Four significant digits: more would be noise."""
    return float(f"{value:.4g}")
