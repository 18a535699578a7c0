"""The ledger of a cycle, from what its workspace holds."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from jobs.core.attempt_time import Moment, moment_of
from jobs.core.cost import Prices
from jobs.core.ledger import CycleLedger, ledger_of
from jobs.core.outcome import outcome_of
from jobs.core.records import Closed, JobRecord
from jobs.core.schedule import cycle_name
from jobs.core.schedule_config import ScheduleConfig
from jobs.core.spec import CyclePlan
from jobs.store.cycle import CycleStore
from pipeline.io.storage import Storage
from pipeline.telemetry.events import read_events

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
    plan: CyclePlan,
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
