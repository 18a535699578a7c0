"""What the report of a cycle shows, gathered from the workspace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.config import ScheduleConfig
from jobs.cycle.attempt_time import Moment, moment_of
from jobs.cycle.ledger import CycleLedger, ledger_of
from jobs.cycle.records import Closed, JobRecord
from jobs.cycle.states import outcome_of
from jobs.cycle.store import CycleStore
from jobs.plan.cost import Prices
from jobs.plan.dag import Plan
from jobs.schedule import cycle_name
from pipeline.context import Figure, load_result
from pipeline.core.errors import DataError
from pipeline.evaluate.report import EvaluationReport, load_report
from pipeline.io.storage import Storage
from pipeline.telemetry.events import EventName, read_events

# The ledger of a cycle, from what its workspace holds.

REPORT = "report"
"""The stage that writes the report: it still runs while it does."""


def events_key(cycle: str) -> str:
    return f"cycles/{cycle}/events.jsonl"


def read_moments(storage: Storage, cycle: str) -> tuple[Moment, ...]:
    """All events of a cycle; none when there is no log. Lines that are no events are left out."""
    found = map(moment_of, read_events(storage, events_key(cycle)))
    return tuple(moment for moment in found if moment is not None)


def read_ledger(
    store: CycleStore,
    plan: Plan,
    records: Sequence[JobRecord],
    prices: Prices,
    *,
    sla_s: int | None,
    schedule: ScheduleConfig | None = None,
    closed: Closed | None = None,
    without_report: bool = False,
) -> CycleLedger:
    """The ledger of a cycle as it is now, or as it was at its end: of a closed cycle always the same.

    `closed`: an end that is not on record yet. `without_report`: the outcome is that of the other jobs. The deadline
    counts from the scheduled time of the cycle; without one, from when it was claimed.
    """
    claim, closed = store.claim(), closed or store.closed()
    now = closed.at if closed else store.clock()
    judged = [job for job in plan.jobs if not (without_report and job.stage == REPORT)]
    names = {job.name for job in judged}
    if closed is None:
        shape = plan.model_copy(update={"jobs": tuple(judged)})
        closed = outcome_of(shape, [record for record in records if record.name in names])
    return ledger_of(
        plan,
        records,
        read_moments(store.storage, store.cycle),
        prices,
        now=now,
        outcome=closed.outcome if closed else None,
        deadline_at=None
        if sla_s is None or claim is None
        else scheduled_at(schedule, store.cycle, claim.claimed_at) + sla_s,
    )


def scheduled_at(config: ScheduleConfig | None, cycle: str, claimed_at: float) -> float:
    """The time on the schedule that the cycle is named by, else when it was claimed; seconds since 1970."""
    if config is None or not config.expression:
        return claimed_at
    schedule = config.schedule()
    for one in schedule.times.before(datetime.fromtimestamp(claimed_at + 1, UTC)):
        name = cycle_name(schedule, one)
        if name <= cycle:  # names sort as their times do
            return one.timestamp() if name == cycle else claimed_at
    return claimed_at


def records_of(store: CycleStore, live: Callable[[], tuple[JobRecord, ...]]) -> tuple[JobRecord, ...]:
    """Of a cycle that has ended what is on record, else what `live` tells."""
    return (store.records() if store.closed() else ()) or live()


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
