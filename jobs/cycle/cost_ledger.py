"""What a cycle cost: the seconds of every try by what they went into, goodput, dollars.

Goodput here: machine seconds of productive work that was kept (training steps, prepared rows, vectors), over all
machine seconds of the cycle. A machine second is one second of one node. Waiting in a queue costs nothing and is not in
it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from jobs.config import JobsConfig
from jobs.cycle.attempt_time import SPENT, Category, Moment, Try, moment_of, spent_in, with_kept_until
from jobs.cycle.cycle_store import CycleStore, Replaced
from jobs.cycle.job_records import AttemptRecord, Closed, JobRecord, JobState, Outcome
from jobs.cycle.job_states import outcome_of
from jobs.plan.cost import Prices, node_usd_per_hour, prices_of
from jobs.plan.dag import Plan
from jobs.plan.script import RUN_PREFIX
from jobs.plan.spec import JobSpec
from jobs.schedule import ScheduleConfig, cycle_name
from pipeline.core.errors import EXIT_OK, GateRefused
from pipeline.core.record import Record
from pipeline.io.storage import Storage
from pipeline.telemetry.events import read_events

SKEW_MS = 5000  # clocks of a machine and of whoever runs the jobs differ
MS_PER_HOUR = 3_600_000

Deadline = Literal["met", "missed", "open", "none"]


class Entry(Record):
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
    def try_name(self) -> str:
        """Its number, and of which submission it is where there was more than the first."""
        return f"{self.attempt} (submission {self.submission})" if self.submission > 1 else f"{self.attempt}"


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
    entries: tuple[Entry, ...]
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
        return tuple(total(name, [entry for entry in self.entries if entry.stage == name]) for name in names)

    @property
    def total(self) -> Total:
        return total(self.cycle, self.entries)


class Success(Record):
    cycles: int = Field(description="Of those that have ended")
    cycles_done: int = Field(description="Succeeded, or refused by the gate, which is an answer too")
    jobs: int = Field(description="Final ones; not those that a refusal by the gate has left out")
    jobs_done: int
    deadlines: int
    deadlines_met: int


def ledger_of(
    plan: Plan,
    records: Sequence[JobRecord],
    moments: Sequence[Moment],
    prices: Prices,
    *,
    now: float,
    outcome: Outcome | None,
    deadline_at: float | None,
    earlier: Sequence[JobRecord] = (),
    replaced: Sequence[tuple[Replaced, Prices]] = (),
    rounds_before: int = 0,
) -> CycleLedger:
    """The ledger of a cycle as it is at `now` (seconds since 1970). A try that still runs counts until then.

    `earlier`: of jobs that were submitted again since, in the order of rounds; their tries count, their states do not.
    `replaced`: submissions with other settings, the oldest first, each with its prices; likewise. `rounds_before`: of
    all of them.
    """
    entries, old = list[Entry](), [record for one, _ in replaced for record in one.records]
    begins = [min((record.created_at for record in one.records), default=0.0) for one, _ in replaced]
    begins.append(min((record.created_at for record in (*earlier, *records)), default=now))
    for index, (one, its_prices) in enumerate(replaced):
        until = begins[index + 1]
        own = [moment for moment in moments if begins[index] <= moment.at_ms / 1000 < until]
        entries += _plan_entries(one.plan, one.records, own, its_prices, until, one.rounds_before, is_over=True)
    if replaced:
        moments = [moment for moment in moments if moment.at_ms / 1000 >= begins[-1]]
    entries += _plan_entries(plan, (*earlier, *records), moments, prices, now, rounds_before)
    leaves = [leaf for record in records for leaf in record.leaves()]
    every = (*old, *earlier, *records)
    stops = [a.stopped_at for record in every for a in record.tries() if a.stopped_at is not None]
    ended_at = max(stops, default=None) if outcome else None
    if outcome == "cancelled" and deadline_at is not None:
        last = max([*stops, *(record.stopped_at or 0.0 for record in every)], default=0.0)  # a job may have had no try
        if 0.0 < last <= deadline_at:
            deadline_at = None  # nobody waits for it any more
    return CycleLedger(
        cycle=plan.cycle,
        outcome=outcome or "open",
        entries=tuple(entries),
        jobs=len(leaves),
        succeeded=sum(leaf.state is JobState.SUCCEEDED for leaf in leaves),
        failed=sum(leaf.state.is_failure for leaf in leaves),
        began_at=min((record.created_at for record in every), default=None),
        ended_at=ended_at,
        deadline=deadline_of(deadline_at, ended_at, now, done=outcome in ("succeeded", "refused")),
        deadline_at=deadline_at,
    )


def deadline_of(deadline_at: float | None, ended_at: float | None, now: float, *, done: bool) -> Deadline:
    """Whether a cycle was ready in time. One that failed never is."""
    if deadline_at is None:
        return "none"
    if ended_at is None:
        return "open" if now <= deadline_at else "missed"
    return "met" if done and ended_at <= deadline_at else "missed"


def total(name: str, entries: Sequence[Entry]) -> Total:
    wasted = [
        None if entry.usd is None else entry.usd * entry.spent_ms[Category.WASTED] / entry.length_ms
        for entry in entries
        if entry.usd is None or entry.length_ms
    ]
    return Total(
        name=name,
        tries=len(entries),
        machine_ms={kind: sum(entry.nodes * entry.spent_ms[kind] for entry in entries) for kind in SPENT},
        waiting_ms=sum(entry.waiting_ms for entry in entries),
        usd=sum_if_known([entry.usd for entry in entries]),
        wasted_usd=sum_if_known(wasted),
    )


def sum_if_known(amounts: Sequence[float | None]) -> float | None:
    """None when one of them is."""
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None


def success_of(ledgers: Iterable[CycleLedger]) -> Success:
    ended = [ledger for ledger in ledgers if ledger.outcome != "open"]
    due = [ledger for ledger in ended if ledger.deadline in ("met", "missed")]
    return Success(
        cycles=len(ended),
        cycles_done=sum(ledger.outcome in ("succeeded", "refused") for ledger in ended),
        jobs=sum(ledger.succeeded + (0 if ledger.outcome == "refused" else ledger.failed) for ledger in ended),
        jobs_done=sum(ledger.succeeded for ledger in ended),
        deadlines=len(due),
        deadlines_met=sum(ledger.deadline == "met" for ledger in due),
    )


def _plan_entries(
    plan: Plan,
    records: Sequence[JobRecord],
    moments: Sequence[Moment],
    prices: Prices,
    now: float,
    rounds_before: int,
    *,
    is_over: bool = False,
) -> Iterator[Entry]:
    """`records`: in the order of rounds, the newest of each job last. `is_over`: nothing of it runs at `now`."""
    found = {record.name: record for record in records}
    ends = {  # a try that still runs counts 0
        record.name: max((attempt.stopped_at or 0.0 for attempt in record.tries()), default=record.stopped_at or 0.0)
        for record in found.values()
    }
    for job in plan.jobs:
        runnable_at = max((ends[one.job] for one in job.depends_on if one.job in ends), default=0.0)
        rounds = dict[str, list[JobRecord]]()
        for leaf in (leaf for one in records if one.name == job.name for leaf in one.leaves()):
            rounds.setdefault(leaf.name, []).append(leaf)
        for same in rounds.values():
            yield from _entries(job, same, runnable_at, moments, prices, now, rounds_before, is_over)


def _entries(
    job: JobSpec,
    rounds: Sequence[JobRecord],
    runnable_at: float,
    moments: Sequence[Moment],
    prices: Prices,
    now: float,
    rounds_before: int,
    is_over: bool,
) -> list[Entry]:
    """`rounds`: one leaf, as it was submitted in each."""
    nodes, price, name = max(1, job.num_nodes), node_usd_per_hour(job, prices), rounds[0].name
    ran: list[tuple[float, int, int, AttemptRecord]] = []
    for submission, leaf in enumerate(rounds, 1):
        again_at = rounds[submission].created_at if submission < len(rounds) else now if is_over else None
        for number, attempt in enumerate(leaf.attempts, 1):
            if attempt.started_at is None:
                continue
            if attempt.stopped_at is None and again_at is not None:  # when it was submitted again, at the latest
                attempt = attempt.model_copy(update={"stopped_at": max(attempt.started_at, again_at)})
            ran.append((leaf.created_at, rounds_before + submission, number, attempt))
    logs = ":" not in name or name.endswith(":0")  # of an array only the first child writes events
    tries = with_kept_until(_tries(job.stage, [attempt for *_, attempt in ran], moments if logs else (), now))
    ready_ms, made = 0, []
    for (submitted_at, submission, number, attempt), one in zip(ran, tries, strict=True):
        ready_ms = max(ready_ms, round(1000 * max(runnable_at, submitted_at)))
        paid_ms = one.stop_ms - one.start_ms if attempt.billable_s is None else 1000 * attempt.billable_s
        hours = nodes * paid_ms / MS_PER_HOUR
        if attempt.stopped_at is None:
            ending = "running"
        elif attempt.exit_code is None:
            ending = attempt.status_reason or attempt.reason or "no exit code"
        else:
            failure = ", ".join(word for word in (f"exit {attempt.exit_code}", attempt.reason) if word)
            ending = "succeeded" if attempt.exit_code == EXIT_OK else failure
        made.append(
            Entry(
                job=name,
                stage=job.stage,
                submission=submission,
                attempt=number,
                nodes=nodes,
                start_ms=one.start_ms,
                waiting_ms=max(0, one.start_ms - ready_ms),
                spent_ms=spent_in(one),
                usd=None if price is None else price * hours,
                ending=ending,
            )
        )
        ready_ms = one.stop_ms
    return made


def _tries(stage: str, attempts: Sequence[AttemptRecord], moments: Sequence[Moment], now: float) -> list[Try]:
    """Each with the events that fall into it: an event belongs to the last try that had started by then."""
    made: list[Try] = []
    starts = [round(1000 * attempt.started_at) for attempt in attempts if attempt.started_at is not None]
    for index, attempt in enumerate(attempts):
        start_ms = starts[index]
        stop_ms = max(start_ms, round(1000 * (now if attempt.stopped_at is None else attempt.stopped_at)))
        until_ms = min([stop_ms + SKEW_MS, *starts[index + 1 : index + 2]])
        from_ms = start_ms - SKEW_MS * (not index)
        own = [m for m in moments if from_ms <= m.at_ms <= until_ms and m.fields.get("stage", stage) == stage]
        kept = attempt.stopped_at is None or attempt.exit_code in (EXIT_OK, GateRefused.exit_code)
        made.append(Try(stage, start_ms, stop_ms, kept, tuple(sorted(own, key=lambda moment: moment.at_ms))))
    return made


# The ledger of a cycle, from what its workspace holds.


def read_moments(storage: Storage, cycle: str, *, last_bytes: int | None = None) -> tuple[Moment, ...]:
    """All events of a cycle, or about as much of the newest; none when there is no log.

    Lines that are no events are left out.
    """
    found = map(moment_of, read_events(storage, f"cycles/{cycle}/events.jsonl", last_bytes=last_bytes))
    return tuple(moment for moment in found if moment is not None)


def read_ledger(
    store: CycleStore,
    plan: Plan,
    records: Sequence[JobRecord],
    config: JobsConfig,
    *,
    closed: Closed | None = None,
    without_report: bool = False,
    moments: Sequence[Moment] | None = None,
) -> CycleLedger:
    """The ledger of a cycle as it is now, or as it was at its end: of a closed cycle always the same.

    `closed`: an end that is not on record yet. `without_report`: the outcome is that of the other jobs, as it is while
    the report is written. `moments`: in place of all events of the cycle; what was spent on what is of those alone,
    what it cost is not. The deadline counts from the scheduled time of the cycle; without one, from when it was
    claimed.
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
    is_first = claim is None or claim.first_round == 1
    replaced = [] if is_first else [(one, prices_of(config, one.claim.target)) for one in store.replaced()]
    old = {record.id for one, _ in replaced for record in one.records}
    return ledger_of(
        plan,
        records,
        read_moments(store.storage, store.cycle) if moments is None else moments,
        prices_of(config, claim.target if claim else ""),
        now=now,
        outcome=closed.outcome if closed else None,
        deadline_at=deadline_at,
        earlier=[record for record in store.earlier_records(records) if record.id not in old],
        replaced=replaced,
        rounds_before=0 if claim is None else claim.first_round - 1,
    )


def scheduled_at(config: ScheduleConfig, cycle: str, claimed_at: float) -> float:
    """The time on the schedule that the cycle is named by, else when it was claimed; seconds since 1970."""
    if not config.is_set:
        return claimed_at
    schedule = config.schedule()
    for one in schedule.before(datetime.fromtimestamp(claimed_at + 1, UTC)):
        name = cycle_name(schedule, one)
        if name <= cycle:  # names sort as their times do
            return one.timestamp() if name == cycle else claimed_at
    return claimed_at
