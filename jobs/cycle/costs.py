"""Compute the cost of a cycle: how each attempt spent its time, the goodput, and the price.

Goodput is the fraction of all machine seconds of a cycle that went into productive work whose results were kept
(training steps, prepared rows and vectors). A machine second is one second of one node. The time that jobs wait in a
queue is not included, because it costs nothing. This module also estimates the duration of the next cycle.
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

SKEW_MS = 5000  # tolerated difference between the clock of a machine and that of the process that runs the jobs
MS_PER_HOUR = 3_600_000
NEVER = float("inf")
Deadline = Literal["met", "missed", "open", "none"]


class Category(StrEnum):
    """The categories of time of a job. It has a machine in all of them except for `waiting`."""

    START_UP = "start-up"
    """The time before and after the work of an attempt, and health checks."""
    COMPILE = "compile"
    DATA_WAIT = "data wait"
    PRODUCTIVE = "productive"
    """Work on training steps, rows and vectors that were kept."""
    CHECKPOINT = "checkpoint"
    """The time in which saving or loading a checkpoint blocks training."""
    EVALUATION = "evaluation"
    WASTED = "wasted"
    """Work that was lost because of a failure and had to be repeated, and attempts without any result."""
    WAITING = "waiting"
    """The time in which a runnable job waits in the queue."""


SPENT: tuple[Category, ...] = tuple(category for category in Category if category is not Category.WAITING)
_WORK: Mapping[str, Category] = {
    "health": Category.START_UP,
    "compile": Category.COMPILE,
    "evaluate": Category.EVALUATION,
    "verify": Category.EVALUATION,
    "report": Category.EVALUATION,
}
"""The category of stages that do not count as productive, unless their events are more specific."""
_ENDS = frozenset({EventName.STAGE_FINISHED, EventName.STAGE_FAILED, EventName.STAGE_SKIPPED})
_KEPT = frozenset({EventName.PARTITION_PREPARED, EventName.PART_EMBEDDED})
"""Results that are not lost if the attempt fails, because the next attempt reuses them."""


# The time of one attempt by category. Times are whole milliseconds, which add up exactly to the length of the attempt.


@dataclass(frozen=True)
class CycleEvent:
    """One line of the event log. `at_ms` is in milliseconds since 1970."""

    at_ms: int
    name: str
    fields: Mapping[str, Any]

    def number(self, name: str) -> float:
        """Return the value of a field if it is a non-negative number, otherwise 0."""
        value = self.fields.get(name)
        return float(value) if isinstance(value, int | float) and 0 <= value < NEVER else 0.0


def read_cycle_events(storage: Storage, cycle: str, *, last_bytes: int | None = None) -> tuple[CycleEvent, ...]:
    """Return the events of a cycle, or an empty tuple if it has no event log.

    If `last_bytes` is set, only about this many bytes at the end of the log are read.
    """
    events = list[CycleEvent]()
    for line in read_events(storage, f"cycles/{cycle}/events.jsonl", last_bytes=last_bytes):
        name, fields = line.get("event"), {key: value for key, value in line.items() if key not in ("time", "event")}
        try:
            at = datetime.fromisoformat(line.get("time"))  # type: ignore[arg-type]
        except (TypeError, ValueError):  # skip lines that are not events
            continue
        if isinstance(name, str):
            events.append(CycleEvent(round(1000 * at.replace(tzinfo=at.tzinfo or UTC).timestamp()), name, fields))
    return tuple(events)


@dataclass(frozen=True)
class AttemptSpan:
    """The time span of one attempt, by the clock of the process that runs the jobs.

    `kept` is whether the attempt has succeeded or is still running.
    """

    stage: str
    start_ms: int
    stop_ms: int
    kept: bool
    events: tuple[CycleEvent, ...] = ()
    """The events of the attempt in chronological order."""
    kept_until: float = NEVER
    """The last training step that was kept. Later steps were repeated or lost."""


def time_by_category(attempt: AttemptSpan) -> dict[Category, int]:
    """Divide the time of an attempt into categories. The result is in milliseconds and adds up to its length.

    Events determine when the work started and ended, and how long training steps and evaluations took. The remaining
    time is counted as checkpoint in training and as the work of the stage in other stages. In a failed attempt, the
    remaining time is wasted.
    """
    spent, remaining = dict.fromkeys(SPENT, 0), attempt.stop_ms - attempt.start_ms
    work = _WORK.get(attempt.stage, Category.PRODUCTIVE)
    rest = work if attempt.kept else Category.WASTED

    def add(category: Category, ms: float) -> None:
        nonlocal remaining
        part = min(remaining, max(0, round(ms)))
        spent[category], remaining = spent[category] + part, remaining - part

    def times(*names: EventName) -> list[int]:
        return [event.at_ms for event in attempt.events if event.name in names]

    ended = times(*_ENDS)
    if attempt.kept and ended:
        add(Category.START_UP, attempt.stop_ms - ended[-1])
    trained = times(EventName.TRAIN_STARTED)
    if trained:
        add(Category.START_UP, trained[0] - attempt.start_ms)
        if attempt.kept and not ended:  # steps that were not reported yet
            add(work, attempt.stop_ms - attempt.events[-1].at_ms)
        _add_steps(attempt, add)
        rest = Category.CHECKPOINT if attempt.kept else Category.WASTED
    else:
        began_ms = max(
            [attempt.start_ms, *times(EventName.STAGE_STARTED, *([EventName.STAGE_SKIPPED] if attempt.kept else []))]
        )
        add(Category.START_UP, began_ms - attempt.start_ms)
        if not attempt.kept:
            add(work, max([began_ms, *times(*_KEPT)]) - began_ms)
    spent[rest] += remaining
    if attempt.kept or spent[Category.PRODUCTIVE]:
        return spent
    return dict.fromkeys(SPENT, 0) | {Category.WASTED: attempt.stop_ms - attempt.start_ms}


def _add_steps(attempt: AttemptSpan, add: Callable[[Category, float], None]) -> None:
    """Add the time of training steps and evaluations. Those that were repeated or lost are counted as wasted."""
    compiled_ms = Counter[float]()  # by the step in the event
    for event in attempt.events:
        if event.name == EventName.GRAPH_COMPILED:
            compiled_ms[event.number("step")] += round(1000 * event.number("compile_s"))
    for event in attempt.events:
        step, length_ms = event.number("step"), 1000 * event.number("seconds")
        if event.name == EventName.TRAIN_STEPS:
            losses = event.fields.get("losses")
            count = max(1, len(losses)) if isinstance(losses, list) else 1
            kept_ms = length_ms * min(1.0, max(0.0, (attempt.kept_until - (step - count)) / count))
            waiting_ms = kept_ms * min(1.0, event.number("data_wait_share"))
            compiling_ms = min(kept_ms - waiting_ms, compiled_ms[step])
            add(Category.WASTED, length_ms - kept_ms)
            add(Category.DATA_WAIT, waiting_ms)
            add(Category.COMPILE, compiling_ms)
            add(Category.PRODUCTIVE, kept_ms - waiting_ms - compiling_ms)
        elif event.name == EventName.HOLDOUT_EVALUATED:
            add(Category.EVALUATION if step <= attempt.kept_until else Category.WASTED, length_ms)


def with_kept_until(attempts: Iterable[AttemptSpan]) -> list[AttemptSpan]:
    """Set `kept_until` of each attempt.

    If a later attempt continued from one of its steps, this is the last step that was kept. Otherwise, it is the last
    step in a checkpoint, unless the attempt itself was kept.
    """
    spans, saved, result = list(attempts), 0.0, []
    starts = [[e.number("step") for e in span.events if e.name == EventName.TRAIN_STARTED][:1] for span in spans]
    for index, span in enumerate(spans):
        saved = max([saved, *(e.number("step") for e in span.events if e.name == EventName.CHECKPOINT_SAVED)])
        later = [step for steps in starts[index + 1 :] for step in steps]
        result.append(replace(span, kept_until=min(later, default=NEVER if span.kept else saved)))
    return result


# The attempts of a whole cycle.


class AttemptCost(Record):
    """The time and cost of one attempt of one task."""

    job: str
    stage: str
    submission: int = Field(1, description="From 1 (`trnjobs retry` begins a new one, in which attempts start from 1)")
    attempt: int = Field(description="From 1")
    nodes: int
    start_ms: int = Field(description="Start of the attempt, in milliseconds since 1970")
    waiting_ms: int = Field(description="Time from when the job was runnable until it started")
    spent_ms: Mapping[Category, int] = Field(
        description="Time of one node by category, which adds up to the length of the attempt"
    )
    usd: float | None = Field(description="Cost of all nodes (none: the price is unknown)")
    ending: str = Field(description="succeeded, running, or the reason for the failure")
    is_preempted: bool = False

    @property
    def length_ms(self) -> int:
        return sum(self.spent_ms.values())

    @property
    def has_failed(self) -> bool:
        return self.ending not in ("succeeded", "running")

    @property
    def attempt_name(self) -> str:
        """Return the number of the attempt, followed by its submission unless that is the first."""
        return f"{self.attempt} (submission {self.submission})" if self.submission > 1 else f"{self.attempt}"

    @property
    def wasted_usd(self) -> float | None:
        if self.usd is None:
            return None
        return self.usd * self.spent_ms[Category.WASTED] / self.length_ms if self.length_ms else 0.0


class Total(Record):
    """The total time and cost of a stage or a cycle."""

    name: str
    tries: int
    preempted: int = Field(description="Number of attempts that were ended by a preemption")
    machine_ms: Mapping[Category, int] = Field(description="Machine time by category, summed over all nodes")
    waiting_ms: int = Field(description="Waiting time, summed over all attempts")
    usd: float | None = Field(description="Cost (none: the price of a machine is unknown)")
    wasted_usd: float | None

    @property
    def all_ms(self) -> int:
        return sum(self.machine_ms.values())

    @property
    def goodput(self) -> float | None:
        """Return the fraction of the machine time that was productive, or None if no machine has run."""
        return self.machine_ms[Category.PRODUCTIVE] / self.all_ms if self.all_ms else None


class CycleLedger(Record):
    """The time and cost of a cycle."""

    cycle: str
    outcome: Outcome | Literal["open"]
    entries: tuple[AttemptCost, ...]
    jobs: int = Field(description="Number of submitted tasks, including every child of an array")
    succeeded: int
    failed: int
    began_at: float | None = Field(description="Seconds since 1970")
    ended_at: float | None
    deadline: Deadline
    deadline_at: float | None

    @property
    def took_s(self) -> float | None:
        """Return the duration of the cycle in seconds, or None while it is running."""
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
        preempted=sum(entry.is_preempted for entry in entries),
        machine_ms={kind: sum(entry.nodes * entry.spent_ms[kind] for entry in entries) for kind in SPENT},
        waiting_ms=sum(entry.waiting_ms for entry in entries),
        usd=sum_if_known([entry.usd for entry in entries]),
        wasted_usd=sum_if_known([entry.wasted_usd for entry in entries]),
    )


def sum_if_known(amounts: Sequence[float | None]) -> float | None:
    """Return the sum, or None if any of the amounts is unknown."""
    numbers = [amount for amount in amounts if amount is not None]
    return sum(numbers) if len(numbers) == len(amounts) else None


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
    """Return the ledger of a cycle at `now` (in seconds since 1970), including running attempts up to that time.

    `earlier` contains the records of jobs that were submitted again since, in order of submission. Their attempts are
    included in the costs, but their states are not counted.
    """
    entries = list(_entries(plan, (*earlier, *records), events, prices, now))
    tasks = [task for record in records for task in record.tasks()]
    every = (*earlier, *records)
    stops = [a.stopped_at for record in every for a in record.all_attempts() if a.stopped_at is not None]
    ended_at = max(stops, default=now) if outcome else None
    if outcome == "cancelled" and deadline_at is not None:
        stops += [record.stopped_at or 0.0 for record in every]  # include jobs without an attempt
        if 0.0 < max(stops, default=0.0) <= deadline_at:
            deadline_at = None  # the cycle was cancelled before its deadline
    deadline: Deadline = "none"
    if deadline_at is not None and ended_at is None:
        deadline = "open" if now <= deadline_at else "missed"
    elif deadline_at is not None and ended_at is not None:  # a failed cycle always misses its deadline
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
    """Yield the attempts of all jobs of a plan. `records` are in order of submission, the newest of a job last."""
    ends = {  # 0 while an attempt runs
        record.name: max(
            (attempt.stopped_at or 0.0 for attempt in record.all_attempts()), default=record.stopped_at or 0.0
        )
        for record in records
    }
    for job in plan.jobs:
        runnable_at = max((ends[needed.job] for needed in job.depends_on if needed.job in ends), default=0.0)
        nodes, price = max(1, job.num_nodes), node_usd_per_hour(job, prices)
        own = [event for event in events if event.fields.get("stage", job.stage) == job.stage]
        history = dict[str, list[JobRecord]]()
        for task in (task for record in records if record.name == job.name for task in record.tasks()):
            history.setdefault(task.name, []).append(task)
        for name, same in history.items():  # the records of one task, one per submission
            ran: list[tuple[int, int, JobRecord, AttemptRecord]] = []
            for submission, task in enumerate(same, 1):
                for number, attempt in enumerate(task.attempts, 1):
                    if attempt.stopped_at is None and submission < len(same):  # it ended before the next submission
                        stopped_at = max(attempt.started_at or 0.0, same[submission].created_at)
                        attempt = attempt.model_copy(update={"stopped_at": stopped_at})
                    if attempt.started_at is not None:
                        ran.append((submission, number, task, attempt))
            logs = ":" not in name or name.endswith(":0")  # of an array, only the first child writes events
            spans = with_kept_until(_spans(job.stage, [attempt for *_, attempt in ran], own if logs else (), now))
            ready_ms = 0
            for (submission, number, task, attempt), span in zip(ran, spans, strict=True):
                ready_ms = max(ready_ms, round(1000 * max(runnable_at, task.created_at)))
                paid_ms = span.stop_ms - span.start_ms if attempt.billable_s is None else 1000 * attempt.billable_s
                yield AttemptCost(
                    job=name,
                    stage=job.stage,
                    submission=submission,
                    attempt=number,
                    nodes=nodes,
                    start_ms=span.start_ms,
                    waiting_ms=max(0, span.start_ms - ready_ms),
                    spent_ms=time_by_category(span),
                    usd=None if price is None else price * nodes * paid_ms / MS_PER_HOUR,
                    ending=_ending(attempt),
                    is_preempted=attempt.is_preempted,
                )
                ready_ms = span.stop_ms


def _ending(attempt: AttemptRecord) -> str:
    if attempt.stopped_at is None:
        return "running"
    if attempt.exit_code is None:
        return attempt.status_reason or attempt.reason or "no exit code"
    if attempt.exit_code == EXIT_OK:
        return attempt.status_reason if attempt.is_stopped else "succeeded"
    code = f"exit {attempt.exit_code}{' (preempted)' if attempt.is_preempted else ''}"
    return ", ".join(text for text in (code, attempt.reason) if text)


def _spans(
    stage: str, attempts: Sequence[AttemptRecord], events: Sequence[CycleEvent], now: float
) -> Iterator[AttemptSpan]:
    """Yield each attempt with its events. An event belongs to the last attempt that had started by then."""
    starts = [round(1000 * (attempt.started_at or 0.0)) for attempt in attempts]
    for index, (start_ms, attempt) in enumerate(zip(starts, attempts, strict=True)):
        stop_ms = max(start_ms, round(1000 * (now if attempt.stopped_at is None else attempt.stopped_at)))
        from_ms = start_ms - SKEW_MS * (not index)
        until_ms = min([stop_ms + SKEW_MS, *starts[index + 1 : index + 2]])
        own = sorted((e for e in events if from_ms <= e.at_ms <= until_ms), key=lambda event: event.at_ms)
        has_ended_well = attempt.exit_code in (EXIT_OK, GateRefused.exit_code) and not attempt.is_stopped
        kept = attempt.stopped_at is None or has_ended_well
        yield AttemptSpan(stage, start_ms, stop_ms, kept, tuple(own))


# The ledger of a cycle, read from its workspace.


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
    """Return the ledger of a cycle. Once the cycle is closed, its ledger does not change any more.

    The deadline is measured from the scheduled time of the cycle, or from the time of the claim if it has none.

    Args:
        closed: The end of the cycle, if it is not on record yet.
        without_report: Ignore the job `report`, because it is still running while the report is written.
        events: Used instead of the events in the log of the cycle. They only affect the categories.
    """
    claim, closed = store.claim(), closed or store.closed()
    now = closed.at if closed else store.clock()
    if closed is None:
        jobs = tuple(job for job in plan.jobs if not (without_report and job.stage == "report"))
        names = {job.name for job in jobs}
        relevant = [record for record in records if record.name in names]
        closed = outcome_of(plan.model_copy(update={"jobs": jobs}), relevant)
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
    """Return the scheduled time of a cycle by its name, or the time of the claim if its name is not in the schedule."""
    if not config.is_set:
        return claimed_at
    schedule = config.schedule()
    for due in islice(schedule.before(datetime.fromtimestamp(claimed_at + 1, UTC)), 1000):
        name = cycle_name(schedule, due)
        if name <= cycle:  # names sort in chronological order
            return due.timestamp() if name == cycle else claimed_at
    return claimed_at


# The expected duration of a cycle, estimated from earlier cycles.


def expected_seconds(history: Iterable[Iterable[JobRecord]]) -> dict[str, float]:
    """Return the median duration in seconds of each job over earlier cycles.

    The duration of a job is that of its successful attempt. For an array, it is that of the slowest child.
    """
    durations: dict[str, list[float]] = {}
    for record in (record for records in history for record in records):
        last = [task.attempts[-1].seconds for task in record.tasks() if task.attempts and task.state == "SUCCEEDED"]
        completed = [seconds for seconds in last if seconds is not None]
        if len(completed) == len(record.tasks()):
            durations.setdefault(record.name, []).append(max(completed))
    return {name: statistics.median(values) for name, values in durations.items()}


def critical_seconds(plan: JobPlan, seconds: Mapping[str, float]) -> float | None:
    """Return the length of the critical path in seconds, or None if the duration of a job is unknown.

    This is the time from the first start to the last end if no job has to wait for a machine.
    """
    ends: dict[str, float] = {}
    for job in plan.jobs:  # in topological order
        if job.name not in seconds:
            return None
        ends[job.name] = seconds[job.name] + max((ends[needed.job] for needed in job.depends_on), default=0.0)
    return max(ends.values(), default=0.0)
