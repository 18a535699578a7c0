"""What the report of a cycle shows, gathered from the workspace."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.core.attempt_time import Moment
from jobs.core.ledger import CycleLedger
from jobs.core.records import JobRecord
from jobs.ledger.read import read_moments
from jobs.store.cycle import CycleStore
from pipeline.context import Figure, load_result
from pipeline.core.errors import DataError
from pipeline.core.events import EventName
from pipeline.evaluate.report import EvaluationReport, load_report
from pipeline.io.storage import Storage

STAGES = ("prepare", "health", "compile", "mine", "train", "evaluate", "embed")


@dataclass(frozen=True)
class CycleReport:
    """All of one page."""

    ledger: CycleLedger
    records: tuple[JobRecord, ...]
    evaluation: EvaluationReport | None
    figures: Mapping[str, Mapping[str, Figure]]
    """By stage, of those that have finished."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss) of the steps that were kept."""
    post_mortems: tuple[str, ...]
    """URIs."""
    workspace: str
    reason: str = ""
    """Why the cycle ended as it did, in one line."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why."""


def report_key(cycle: str) -> str:
    return f"reports/{cycle}.html"


def gather(store: CycleStore, ledger: CycleLedger, records: Sequence[JobRecord], *, reason: str = "") -> CycleReport:
    """Read what the stages have left. A result that is damaged is told of, and does not hide the others."""
    storage, cycle, unread = store.storage, store.cycle, list[str]()
    evaluation = None
    try:
        evaluation = load_report(storage, cycle)
    except DataError as error:
        unread.append(error.seen)
    return CycleReport(
        ledger=ledger,
        records=tuple(records),
        evaluation=evaluation,
        figures=_figures(storage, cycle, unread),
        losses=losses_of(read_moments(storage, cycle)),
        post_mortems=tuple(storage.uri(stat.key) for stat in storage.list(store.key("post-mortem"))),
        workspace=storage.root,
        reason=reason,
        unread=tuple(unread),
    )


def losses_of(moments: Sequence[Moment]) -> tuple[tuple[int, float], ...]:
    """(step, mean loss) of each report of steps; what was done again replaces what it repeats."""
    kept: list[tuple[int, float]] = []
    for moment in sorted(moments, key=lambda one: one.at_ms):
        if moment.name == EventName.TRAIN_STARTED:
            kept = [point for point in kept if point[0] <= moment.number("step")]
        losses = moment.fields.get("losses")
        if moment.name == EventName.TRAIN_STEPS and isinstance(losses, list):
            numbers = [float(loss) for loss in losses if isinstance(loss, int | float)]
            if numbers:
                kept.append((int(moment.number("step")), sum(numbers) / len(numbers)))
    return tuple(kept)


def _figures(storage: Storage, cycle: str, unread: list[str]) -> dict[str, Mapping[str, Figure]]:
    found: dict[str, Mapping[str, Figure]] = {}
    for stage in STAGES:
        try:
            result = load_result(storage, cycle, stage)
        except DataError as error:
            unread.append(error.seen)
            continue
        if result is not None:
            found[stage] = result.figures
    return found
