"""Golden queries: products that search must, or must not, find first, judged for every candidate (docs/quality.md)."""

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from pydantic import Field, ValidationError

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError, first_line
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.evaluate.config import OnGolden
from pipeline.evaluate.gate.compare import GateCheck, Outcome
from pipeline.evaluate.report import GoldenOutcome, GoldenReport
from pipeline.io.storage import open_parent
from pipeline.settings import Settings

_SHOWN = 5
"""Missed products that a verdict names."""


class GoldenQuery(Record):
    """A query with products, by id or title, of which one must, or must not, be among the first `top`."""

    query: str = Field(pattern=r"\S")
    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    top: int = Field(10, ge=1)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.must, *self.must_not)


class _File(Record):
    golden: tuple[GoldenQuery, ...] = Field(min_length=1)


def read_golden(settings: Settings, stop: StopSignal) -> tuple[GoldenQuery, ...]:
    """Read the file evaluate.golden; nothing without one. Raises DataError if it cannot be used."""
    path = settings.evaluate.golden
    if path is None:
        return ()
    depth = max(settings.gate.with_ranks(settings.evaluate.metrics).retrieval_at)
    storage, name = open_parent(path, retry=settings.storage, stop=stop)
    try:
        found = _File.model_validate(tomllib.loads(storage.read_bytes(name).decode())).golden
        if deep := [one for one in found if one.top > depth]:
            raise ValueError(f"top = {deep[0].top} for {deep[0].query!r}: evaluate.metrics.retrieval_at lists {depth}")
        return found
    except ValueError as error:
        wrong = error.errors()[0] if isinstance(error, ValidationError) else None
        seen = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}" if wrong else first_line(error)
        raise DataError(
            f"the golden queries {path} cannot be read: {seen}",
            expected="tables [[golden]] with query, must, must_not and top",
            next_command=f"correct {path}",
        ) from None


def items_named(
    names: Iterable[str], rows: Iterable[tuple[str, str, str]], item_of: Callable[[int, str], int]
) -> dict[str, list[int]]:
    """Return the items that names mean: those with such an id, else those with such a title in upper or lower case.

    `rows`: id, title and text. `item_of`: of a row and its text, -1 for none.
    """
    by_id = {name: set[int]() for name in names}
    by_title = {_plain(name): set[int]() for name in by_id}
    for row, (name, title, text) in enumerate(rows):
        for items in (by_id.get(name), by_title.get(_plain(title))):
            if items is not None:
                items.add(item_of(row, text))
    return {name: sorted((items or by_title[_plain(name)]) - {-1}) for name, items in by_id.items()}


def _plain(title: str) -> str:
    return " ".join(title.lower().split())


def judge_golden(
    queries: Sequence[GoldenQuery], items: Mapping[str, Sequence[int]], ours: Int64s, theirs: Int64s | None
) -> GoldenReport:
    """Look for the items of each name in the lists [G, k] of both models. Pure."""

    def rank(found: Int64s, name: str) -> int:
        places = np.flatnonzero(np.isin(found, items[name]))
        return int(places[0]) + 1 if len(places) else 0

    outcomes = [
        GoldenOutcome(
            query=one.query,
            product=name,
            must=name in one.must,
            top=one.top,
            candidate=rank(ours[row], name),
            incumbent=None if theirs is None else rank(theirs[row], name),
        )
        for row, one in enumerate(queries)
        for name in one.names
        if items[name]
    ]
    return GoldenReport(outcomes=tuple(outcomes), unknown=tuple(name for name in items if not items[name]))


def golden_check(report: GoldenReport, action: OnGolden) -> GateCheck:
    """Hold the candidate against what production gets right, or, without production, against all of the file.

    What production misses as well only warns: a wish that no model has met yet must not refuse every new one.
    """
    missed, known = report.missed, len(report.outcomes)
    lost = [one for one in missed if one.incumbent is None or one.holds(one.incumbent)]
    outcome: Outcome = "pass" if known and not missed else "warn"
    if action == "fail" and (lost or not known):
        outcome = "fail"
    beside = f", {len(lost):,} of them right in production" if any(one.incumbent is not None for one in missed) else ""
    words = [f"golden queries: {len(missed):,} of {known:,} missed{beside}", *map(str, (lost or missed)[:_SHOWN])]
    if not known:
        words = [f"golden queries: not judged, {report.missing or 'they name no product that is searched'}"]
    return GateCheck(name="golden", kind="golden", outcome=outcome, reason="; ".join(words))
