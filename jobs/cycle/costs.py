"""The cost of a cycle: the seconds of every try by category, goodput and dollars. And an estimate for the next one.

Goodput here: machine seconds of productive work that was kept (training steps, prepared rows, vectors), over all
machine seconds of the cycle. A machine second is one second of one node. Waiting in a queue costs nothing and is not in
it.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from typing import Any, Literal

from pydantic import Field

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import AttemptRecord, Closed, JobRecord, JobState, Outcome, outcome_of
from jobs.plan.cycle import RUN_PREFIX
from jobs.plan.resources import Prices, node_usd_per_hour, prices_of
from jobs.plan.spec import JobPlan
from jobs.schedule import ScheduleConfig, cycle_name
from jobs.settings import JobsConfig
from pipeline.core.errors import EXIT_OK, GateRefused
from pipeline.core.record import Record
from pipeline.io.storage import Storage
from pipeline.telemetry.events import EventName, read_events

SKEW_MS = 5000  # clocks of a machine and of whoever runs the jobs differ
MS_PER_HOUR = 3_600_000
NEVER = float("inf")
Deadline = Literal["met", "missed", "open", "none"]


class Category(StrEnum):
    """What a machine did with its time. `waiting` is of the job: no machine waits with it."""

    START_UP = "start-up"
    """Until the work begins, and after it is done; checking the machine."""
    COMPILE = "compile"
    DATA_WAIT = "data wait"
    PRODUCTIVE = "productive"
    """Steps, rows and vectors that were kept."""
    CHECKPOINT = "checkpoint"
    """Training that stands still to save or to load."""
    EVALUATION = "evaluation"
    WASTED = "wasted"
    """Lost by a failure: what was done again, and all of a try that left nothing."""
    WAITING = "waiting"
    """Ready to run, in the queue."""


SPENT: tuple[Category, ...] = tuple(category for category in Category if category is not Category.WAITING)
_WORK: Mapping[str, Category] = {
    "health": Category.START_UP,
    "compile": Category.COMPILE,
    "evaluate": Category.EVALUATION,
    "verify": Category.EVALUATION,
    "report": Category.EVALUATION,
}
"""What the time of a stage is, if it is not productive and its events do not say more."""
_ENDS = frozenset({EventName.STAGE_FINISHED, EventName.STAGE_FAILED, EventName.STAGE_SKIPPED})
_LEFT = frozenset({EventName.PARTITION_PREPARED, EventName.PART_EMBEDDED})
"""What a failed try has left for the next one counts as work."""


# Where the time of one try went. Pure, and exact: whole milliseconds that add up.


@dataclass(frozen=True)
class CycleEvent:
    """One line of the event log. `at_ms`: since 1970."""

    at_ms: int
    name: str
    fields: Mapping[str, Any]

    def number(self, name: str) -> float:
        """Return a field that is a number and not negative; 0 for anything else."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) and 0 <= value < NEVER else 0.0


def read_cycle_events(storage: Storage, cycle: str, *, last_bytes: int | None = None) -> tuple[CycleEvent, ...]:
    """Return all events of a cycle, or about as much of the newest; none when there is no log."""
    found = list[CycleEvent]()
    for line in read_events(storage, f"cycles/{cycle}/events.jsonl", last_bytes=last_bytes):
        name, fields = line.get("event"), {key: value for key, value in line.items() if key not in ("time", "event")}
        try:
            at = datetime.fromisoformat(line.get("time"))  # type: ignore[arg-type]
        except (TypeError, ValueError):  # no event
            continue
        if isinstance(name, str):
            found.append(CycleEvent(round(1000 * at.replace(tzinfo=at.tzinfo or UTC).timestamp()), name, fields))
    return tuple(found)


@dataclass(frozen=True)
class AttemptSpan:
    """One try of one job, on the clock of whoever runs the jobs. `kept`: it ended well, or has not ended yet."""

    stage: str
    start_ms: int
    stop_ms: int
    kept: bool
    events: tuple[CycleEvent, ...] = ()
    """Its own, in order of time."""
    kept_until: float = NEVER
    """Training steps after this one were done again, or are lost."""


def time_by_category(one: AttemptSpan) -> dict[Category, int]:
    """Return milliseconds by category; they add up to the length of the try.

    Events tell when the work began and ended, and how long steps and evaluations took. The rest of a training went into
    checkpoints, that of another stage is its work, and that of a failed try a waste.
    """
    spent, left = dict.fromkeys(SPENT, 0), one.stop_ms - one.start_ms
    work = _WORK.get(one.stage, Category.PRODUCTIVE)
    rest = work if one.kept else Category.WASTED

    def give(category: Category, ms: float) -> None:
        nonlocal left
        part = min(left, max(0, round(ms)))
        spent[category], left = spent[category] + part, left - part

    def times(*names: EventName) -> list[int]:
        return [moment.at_ms for moment in one.events if moment.name in names]

    ended = times(*_ENDS)
    if one.kept and ended:
        give(Category.START_UP, one.stop_ms - ended[-1])
    trained = times(EventName.TRAIN_STARTED)
    if trained:
        give(Category.START_UP, trained[0] - one.start_ms)
        if one.kept and not ended:  # steps that are not reported yet
            give(work, one.stop_ms - one.events[-1].at_ms)
        _give_steps(one, give)
        rest = Category.CHECKPOINT if one.kept else Category.WASTED
    else:
        began_ms = max(
            [one.start_ms, *times(EventName.STAGE_STARTED, *([EventName.STAGE_SKIPPED] if one.kept else []))]
        )
        give(Category.START_UP, began_ms - one.start_ms)
        if not one.kept:
            give(work, max([began_ms, *times(*_LEFT)]) - began_ms)
    spent[rest] += left
    if one.kept or spent[Category.PRODUCTIVE]:
        return spent
    return dict.fromkeys(SPENT, 0) | {Category.WASTED: one.stop_ms - one.start_ms}


def _give_steps(one: AttemptSpan, give: Callable[[Category, float], None]) -> None:
    """Give out the time of steps and of evaluations on the holdout; what was done again or is lost is a waste."""
    compiled_ms = Counter[float]()  # by the step that was reported just before
    for moment in one.events:
        if moment.name == EventName.GRAPH_COMPILED:
            compiled_ms[moment.number("step")] += round(1000 * moment.number("compile_s"))
    for moment in one.events:
        step, length_ms = moment.number("step"), 1000 * moment.number("seconds")
        if moment.name == EventName.TRAIN_STEPS:
            losses = moment.fields.get("losses")
            count = max(1, len(losses)) if isinstance(losses, list) else 1
            kept_ms = length_ms * min(1.0, max(0.0, (one.kept_until - (step - count)) / count))
            waiting_ms = kept_ms * min(1.0, moment.number("data_wait_share"))
            compiling_ms = min(kept_ms - waiting_ms, compiled_ms[step])
            give(Category.WASTED, length_ms - kept_ms)
            give(Category.DATA_WAIT, waiting_ms)
            give(Category.COMPILE, compiling_ms)
            give(Category.PRODUCTIVE, kept_ms - waiting_ms - compiling_ms)
        elif moment.name == EventName.HOLDOUT_EVALUATED:
            give(Category.EVALUATION if step <= one.kept_until else Category.WASTED, length_ms)


def with_kept_until(given: Iterable[AttemptSpan]) -> list[AttemptSpan]:
    """Return the tries of one training job, with the steps of each that a later one continued from.

    A later try that began at an earlier step has done those after it again. If none came later, what was saved last is
    kept for whoever continues.
    """
    tries, saved, made = list(given), 0.0, []
    begun = [[m.number("step") for m in one.events if m.name == EventName.TRAIN_STARTED][:1] for one in tries]
    for index, one in enumerate(tries):
        saved = max([saved, *(m.number("step") for m in one.events if m.name == EventName.CHECKPOINT_SAVED)])
        later = [step for steps in begun[index + 1 :] for step in steps]
        made.append(replace(one, kept_until=min(later, default=NEVER if one.kept else saved)))
    return made


# Tries of a whole cycle.


class AttemptCost(Record):
    """One try of one job, or of one child of an array."""

    job: str
    stage: str
    submission: int = Field(1, description="From 1; `trnjobs retry` submits a job again, and its tries count anew")
    attempt: int = Field(description="From 1")
    nodes: int
    start_ms: int = Field(description="Since 1970")
    waiting_ms: int = Field(description="Ready to run, and not started")
    spent_ms: Mapping[Category, int] = Field(description="Of one node; adds up to the length of the try")
    usd: float | None = Field(description="Of all nodes; none: nobody knows the price")
    ending: str = Field(description="succeeded, running, or how it failed")

    @property
    def length_ms(self) -> int:
        return sum(self.spent_ms.values())

    @property
    def has_failed(self) -> bool:
        return self.ending not in ("succeeded", "running")

    @property
    def attempt_name(self) -> str:
        """Its number, and of which submission it is where there was more than the first."""
        return f"{self.attempt} (submission {self.submission})" if self.submission > 1 else f"{self.attempt}"

    @property
    def wasted_usd(self) -> float | None:
        if self.usd is None:
            return None
        return self.usd * self.spent_ms[Category.WASTED] / self.length_ms if self.length_ms else 0.0


class Total(Record):
    name: str
    tries: int
    machine_ms: Mapping[Category, int] = Field(description="Over all nodes")
    waiting_ms: int = Field(description="Over all tries")
    usd: float | None = Field(description="None: the price of a machine is not known")
    wasted_usd: float | None

    @property
    def all_ms(self) -> int:
        return sum(self.machine_ms.values())

    @property
    def goodput(self) -> float | None:
        """None before any machine has run."""
        return self.machine_ms[Category.PRODUCTIVE] / self.all_ms if self.all_ms else None


class CycleLedger(Record):
    cycle: str
    outcome: Outcome | Literal["open"]
    entries: tuple[AttemptCost, ...]
    jobs: int = Field(description="Submitted; children of arrays count each")
    succeeded: int
    failed: int
    began_at: float | None = Field(description="Seconds since 1970")
    ended_at: float | None
    deadline: Deadline
    deadline_at: float | None

    @property
    def took_s(self) -> float | None:
        """None while it is under way."""
        return None if self.began_at is None or self.ended_at is None else self.ended_at - self.began_at

    def stages(self) -> tuple[Total, ...]:
        names = dict.fromkeys(entry.stage for entry in self.entries)
        return tuple(_total(name, [entry for entry in self.entries if entry.stage == name]) for name in names)

    @property
    def total(self) -> Total:
        return _total(self.cycle, self.entries)


def _total(name: str, entries: Sequence[AttemptCost]) -> Total:
    return Total(
        name=name,
        tries=len(entries),
        machine_ms={kind: sum(entry.nodes * entry.spent_ms[kind] for entry in entries) for kind in SPENT},
        waiting_ms=sum(entry.waiting_ms for entry in entries),
        usd=sum_if_known([entry.usd for entry in entries]),
        wasted_usd=sum_if_known([entry.wasted_usd for entry in entries]),
    )


def sum_if_known(amounts: Sequence[float | None]) -> float | None:
    """Return the sum, or None if an amount is unknown."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def ledger_of(
    plan: JobPlan,
    records: Sequence[JobRecord],
    events: Sequence[CycleEvent],
    prices: Prices,
    *,
    now: float,
    outcome: Outcome | None,
    deadline_at: float | None,
    earlier: Sequence[JobRecord] = (),
) -> CycleLedger:
    """Return the ledger of a cycle as it is at `now` (seconds since 1970). A try that still runs counts until then.

    `earlier`: of jobs that were submitted again since, in the order of rounds; their tries count, their states do not.
    """
    entries = list(_entries(plan, (*earlier, *records), events, prices, now))
    tasks = [task for record in records for task in record.tasks()]
    every = (*earlier, *records)
    stops = [a.stopped_at for record in every for a in record.all_attempts() if a.stopped_at is not None]
    ended_at = max(stops, default=None) if outcome else None
    if outcome == "cancelled" and deadline_at is not None:
        last = max([*stops, *(record.stopped_at or 0.0 for record in every)], default=0.0)  # a job may have had no try
        if 0.0 < last <= deadline_at:
            deadline_at = None  # nobody waits for it any more
    deadline: Deadline = "none"
    if deadline_at is not None and ended_at is None:
        deadline = "open" if now <= deadline_at else "missed"
    elif deadline_at is not None and ended_at is not None:  # a cycle that failed never is in time
        deadline = "met" if outcome in ("succeeded", "refused") and ended_at <= deadline_at else "missed"
    return CycleLedger(
        cycle=plan.cycle,
        outcome=outcome or "open",
        entries=tuple(entries),
        jobs=len(tasks),
        succeeded=sum(task.state is JobState.SUCCEEDED for task in tasks),
        failed=sum(task.state.is_failure for task in tasks),
        began_at=min((record.created_at for record in every), default=None),
        ended_at=ended_at,
        deadline=deadline,
        deadline_at=deadline_at,
    )


def _entries(
    plan: JobPlan, records: Sequence[JobRecord], events: Sequence[CycleEvent], prices: Prices, now: float
) -> Iterator[AttemptCost]:
    """Yield the tries of a plan. `records`: in the order of rounds, the newest of each job last."""
    ends = {  # a try that still runs counts 0
        record.name: max(
            (attempt.stopped_at or 0.0 for attempt in record.all_attempts()), default=record.stopped_at or 0.0
        )
        for record in records
    }
    for job in plan.jobs:
        runnable_at = max((ends[one.job] for one in job.depends_on if one.job in ends), default=0.0)
        nodes, price = max(1, job.num_nodes), node_usd_per_hour(job, prices)
        own = [moment for moment in events if moment.fields.get("stage", job.stage) == job.stage]
        rounds = dict[str, list[JobRecord]]()
        for task in (task for one in records if one.name == job.name for task in one.tasks()):
            rounds.setdefault(task.name, []).append(task)
        for name, same in rounds.items():  # one leaf, as it was submitted in each round
            ran: list[tuple[int, int, JobRecord, AttemptRecord]] = []
            for submission, task in enumerate(same, 1):
                for number, attempt in enumerate(task.attempts, 1):
                    if attempt.stopped_at is None and submission < len(same):  # when it was submitted again, at latest
                        again_at = max(attempt.started_at or 0.0, same[submission].created_at)
                        attempt = attempt.model_copy(update={"stopped_at": again_at})
                    if attempt.started_at is not None:
                        ran.append((submission, number, task, attempt))
            logs = ":" not in name or name.endswith(":0")  # of an array only the first child writes events
            tries = with_kept_until(_tries(job.stage, [one[-1] for one in ran], own if logs else (), now))
            ready_ms = 0
            for (submission, number, task, attempt), one in zip(ran, tries, strict=True):
                ready_ms = max(ready_ms, round(1000 * max(runnable_at, task.created_at)))
                paid_ms = one.stop_ms - one.start_ms if attempt.billable_s is None else 1000 * attempt.billable_s
                yield AttemptCost(
                    job=name,
                    stage=job.stage,
                    submission=submission,
                    attempt=number,
                    nodes=nodes,
                    start_ms=one.start_ms,
                    waiting_ms=max(0, one.start_ms - ready_ms),
                    spent_ms=time_by_category(one),
                    usd=None if price is None else price * nodes * paid_ms / MS_PER_HOUR,
                    ending=_ending(attempt),
                )
                ready_ms = one.stop_ms


def _ending(attempt: AttemptRecord) -> str:
    if attempt.stopped_at is None:
        return "running"
    if attempt.exit_code is None:
        return attempt.status_reason or attempt.reason or "no exit code"
    failure = ", ".join(word for word in (f"exit {attempt.exit_code}", attempt.reason) if word)
    return "succeeded" if attempt.exit_code == EXIT_OK else failure


def _tries(
    stage: str, attempts: Sequence[AttemptRecord], events: Sequence[CycleEvent], now: float
) -> Iterator[AttemptSpan]:
    """Yield each with the events that fall into it: an event belongs to the last try that had started by then."""
    starts = [round(1000 * (attempt.started_at or 0.0)) for attempt in attempts]
    for index, (start_ms, attempt) in enumerate(zip(starts, attempts, strict=True)):
        stop_ms = max(start_ms, round(1000 * (now if attempt.stopped_at is None else attempt.stopped_at)))
        from_ms = start_ms - SKEW_MS * (not index)
        until_ms = min([stop_ms + SKEW_MS, *starts[index + 1 : index + 2]])
        own = sorted((one for one in events if from_ms <= one.at_ms <= until_ms), key=lambda moment: moment.at_ms)
        kept = attempt.stopped_at is None or attempt.exit_code in (EXIT_OK, GateRefused.exit_code)
        yield AttemptSpan(stage, start_ms, stop_ms, kept, tuple(own))


# The ledger of a cycle, from what its workspace holds.


def read_ledger(
    store: CycleStore,
    plan: JobPlan,
    records: Sequence[JobRecord],
    config: JobsConfig,
    *,
    closed: Closed | None = None,
    without_report: bool = False,
    events: Sequence[CycleEvent] | None = None,
) -> CycleLedger:
    """Return the ledger of a cycle as it is now, or as it was at its end: of a closed cycle always the same.

    `closed`: an end that is not on record yet. `without_report`: ignore the job `report`, which is still running while
    the report is written. `moments`: replaces the events of the cycle; only the categories depend on them. The deadline
    counts from the scheduled time of the cycle, or from when it was claimed if it has none.
    """
    claim, closed = store.claim(), closed or store.closed()
    now = closed.at if closed else store.clock()
    if closed is None:
        judged = tuple(job for job in plan.jobs if not (without_report and job.stage == "report"))
        names = {job.name for job in judged}
        shape = plan.model_copy(update={"jobs": judged})
        closed = outcome_of(shape, [record for record in records if record.name in names])
    deadline_at = None
    if config.sla_s is not None and claim is not None and not store.cycle.startswith(RUN_PREFIX):
        deadline_at = scheduled_at(config.schedule, store.cycle, claim.claimed_at) + config.sla_s
    return ledger_of(
        plan,
        records,
        read_cycle_events(store.storage, store.cycle) if events is None else events,
        prices_of(config, claim.target if claim else ""),
        now=now,
        outcome=closed.outcome if closed else None,
        deadline_at=deadline_at,
        earlier=store.earlier_records(records),
    )


def scheduled_at(config: ScheduleConfig, cycle: str, claimed_at: float) -> float:
    """Return the time by which a cycle is named, else when it was claimed; seconds since 1970."""
    if not config.is_set:
        return claimed_at
    schedule = config.schedule()
    for one in islice(schedule.before(datetime.fromtimestamp(claimed_at + 1, UTC)), 1000):
        name = cycle_name(schedule, one)
        if name <= cycle:  # names sort as their times do
            return one.timestamp() if name == cycle else claimed_at
    return claimed_at


# What a cycle will take, from what earlier ones took. Pure.


def expected_seconds(history: Iterable[Iterable[JobRecord]]) -> dict[str, float]:
    """Return the median seconds by job over cycles: of the try that succeeded, of an array the longest child."""
    seen: dict[str, list[float]] = {}
    for record in (one for records in history for one in records):
        last = [task.attempts[-1].seconds for task in record.tasks() if task.attempts and task.state == "SUCCEEDED"]
        known = [seconds for seconds in last if seconds is not None]
        if len(known) == len(record.tasks()):
            seen.setdefault(record.name, []).append(max(known))
    return {name: statistics.median(values) for name, values in seen.items()}


def critical_seconds(plan: JobPlan, seconds: Mapping[str, float]) -> float | None:
    """Return the time from the first job to the end of the last, without waiting; None if a job's is unknown."""
    ends: dict[str, float] = {}
    for job in plan.jobs:  # each after those it depends on
        if job.name not in seconds:
            return None
        ends[job.name] = seconds[job.name] + max((ends[one.job] for one in job.depends_on), default=0.0)
    return max(ends.values(), default=0.0)
