"""Golden queries, for which the user lists products that search must or must not return at the top."""

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
from pipeline.io.storage import KeyNotFound, open_parent
from pipeline.settings import Settings

_SHOWN = 5  # missed products that a verdict lists


class GoldenQuery(Record):
    """A query with products, given by id or title, that must or must not be among the `top` first results."""

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
    """Read the file that `evaluate.golden` points to, if it is set. Raises DataError if the file is invalid."""
    path = settings.evaluate.golden
    if path is None:
        return ()
    depth = max(settings.gate.with_ranks(settings.evaluate.metrics).retrieval_at)
    storage, name = open_parent(path, retry=settings.storage, stop=stop)
    try:
        queries = _File.model_validate(tomllib.loads(storage.read_bytes(name).decode())).golden
        if deep := [query for query in queries if query.top > depth]:
            raise ValueError(f"top is {deep[0].top} for {deep[0].query!r}, but only {depth} results are retrieved")
        return queries
    except KeyNotFound as error:
        raise DataError(
            error.seen,
            expected="an existing file with golden queries (evaluate.golden)",
            next_command="correct --evaluate.golden",
        ) from error
    except ValueError as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else first_line(error)
        raise DataError(
            f"cannot read the golden queries {path}: {reason}",
            expected="tables [[golden]] with query, must, must_not and top",
            next_command=f"correct {path}",
        ) from None


def items_named(
    names: Iterable[str], rows: Iterable[tuple[str, str, str]], item_of: Callable[[int, str], int]
) -> dict[str, list[int]]:
    """Look up items by name, which is an id or a title.

    Ids take precedence. If no item has a name as its id, the name is compared with titles, ignoring case and spacing.
    `rows` are the id, title and text of each source row, and `item_of` maps the number and the text of a source row to
    its item, or to -1 if the row is not among the items.
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
    queries: Sequence[GoldenQuery], items: Mapping[str, Sequence[int]], candidate: Int64s, production: Int64s | None
) -> GoldenReport:
    """Determine how high each golden product ranks in the search results [G, k] of both models."""

    def rank(results: Int64s, name: str) -> int:
        positions = np.flatnonzero(np.isin(results, items[name]))
        return int(positions[0]) + 1 if len(positions) else 0

    outcomes = [
        GoldenOutcome(
            query=query.query,
            product=name,
            must=name in query.must,
            top=query.top,
            candidate=rank(candidate[row], name),
            incumbent=None if production is None else rank(production[row], name),
        )
        for row, query in enumerate(queries)
        for name in query.names
        if items[name]
    ]
    return GoldenReport(outcomes=tuple(outcomes), unknown=tuple(name for name in items if not items[name]))


def golden_check(report: GoldenReport, action: OnGolden) -> GateCheck:
    """Check the candidate on the golden queries.

    If `action` is fail, the check fails on queries that the production model gets right, or on any query if there is no
    production model yet. If both models get a query wrong, the check only warns. Otherwise, a goal that no model meets
    would block every promotion.
    """
    missed, total = report.missed, len(report.outcomes)
    lost = [outcome for outcome in missed if outcome.incumbent is None or outcome.holds(outcome.incumbent)]
    outcome: Outcome = "pass" if total and not missed else "warn"
    if action == "fail" and (lost or not total):
        outcome = "fail"
    if not total:
        reason = f"golden queries were not judged: {report.missing or 'none of the listed products exist'}"
    else:
        reason = f"golden queries: {len(missed):,} of {total:,} missed"
        if any(miss.incumbent is not None for miss in missed):
            reason += f", {len(lost):,} of which production gets right"
        reason = "; ".join([reason, *map(str, (lost or missed)[:_SHOWN])])
    return GateCheck(name="golden", kind="golden", outcome=outcome, reason=reason)
