"""`trnjobs status --watch`: a cycle while it runs, wherever it runs, from its records and events."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import rich.console
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.cycle.attempt_time import Moment
from jobs.cycle.cost_ledger import SKEW_MS, CycleLedger, read_ledger, read_moments
from jobs.cycle.job_records import Closed, JobRecord, JobState
from jobs.cycle.job_states import exit_code_of_cycle, outcome_of
from jobs.cycle.tables import STATUS, status_rows
from jobs.plan.dag import Plan
from jobs.setup import OpenCycle
from pipeline.core.errors import EXIT_OK, Preempted, TransientError
from pipeline.core.format import format_count, format_duration, usd
from pipeline.telemetry.events import EventName

NEWEST_BYTES = 256 * 1024
"""Of the event log: enough for the figures of now, however long the cycle has run."""
_STYLES = {"✓": "green", "✗": "red bold", "●": "cyan"}
_SIGNS = {
    JobState.SUCCEEDED: "✓",
    JobState.FAILED: "✗",
    JobState.CANCELLED: "✗",
    JobState.RUNNING: "●",
    JobState.STARTING: "●",
}


@dataclass(frozen=True)
class LiveJob:
    name: str
    depth: int
    """Jobs in the longest chain before it."""
    sign: str
    state: str
    tries: str
    """`2/3`: the try it is at, and how many it has."""
    ran: str
    doing: str
    """What its newest events tell; of a job that has failed or waits, why."""


@dataclass(frozen=True)
class LiveCycle:
    head: str
    jobs: tuple[LiveJob, ...]
    last: str
    """The newest event."""


def live_cycle(
    plan: Plan,
    records: Sequence[JobRecord],
    moments: Sequence[Moment],
    ledger: CycleLedger,
    *,
    target: str,
    closed: Closed | None,
    now: float,
    interrupted: bool = False,
) -> LiveCycle:
    """The cycle as it is at `now`, in seconds since 1970. `moments`: at least the newest, in order of time."""
    found = {record.name: record for record in records}
    jobs, depths = list[LiveJob](), dict[str, int]()
    for spec in plan.jobs:  # each after those it depends on
        depths[spec.name] = max((1 + depths[one.job] for one in spec.depends_on), default=0)
        record = found.get(spec.name)
        if record is None:
            jobs.append(LiveJob(spec.name, depths[spec.name], "○", "not submitted", "", "", ""))
            continue
        row = dict(zip(STATUS, status_rows([record])[0], strict=True))
        ran, doing = row["ran"], row["why"]
        running = [leaf for leaf in record.leaves() if leaf.state is JobState.RUNNING and leaf.attempts]
        if running:
            started = min(leaf.attempts[-1].started_at or now for leaf in running)
            ran = format_duration(max(0.0, now - started))
            doing = doing_text(spec.stage, [one for one in moments if one.at_ms >= 1000 * started - SKEW_MS])
        sign = "●" if running else _SIGNS.get(record.state, "○")
        tries = f"{row['tries']}/{spec.retry.attempts}" if record.tries() and not record.children else row["tries"]
        jobs.append(LiveJob(spec.name, depths[spec.name], sign, row["state"], tries, ran, doing))
    last = ""
    if moments:
        newest = moments[-1]
        stage = newest.fields.get("stage")
        name = newest.name.replace("_", " ") + (f" ({stage})" if isinstance(stage, str) else "")
        last = f"last event: {name}, {format_duration(max(0.0, now - newest.at_ms / 1000))} ago"
    state = closed.outcome if closed else "interrupted" if interrupted else "under way"
    return LiveCycle(_head(plan, ledger, target, state, closed.at if closed else now), tuple(jobs), last)


def doing_text(stage: str, moments: Sequence[Moment]) -> str:
    """What a job that runs is at, from the events since its start: `step 120/2000 | loss 0.6931 | ...`."""
    newest: Mapping[str, Moment] = {moment.name: moment for moment in moments}
    if stage == "train" and (steps := newest.get(EventName.TRAIN_STEPS)):
        started = newest.get(EventName.TRAIN_STARTED)
        of = f"/{started.number('max_steps'):.0f}" if started else ""
        losses = steps.fields.get("losses")
        numbers = [loss for loss in losses if isinstance(loss, int | float)] if isinstance(losses, list) else []
        loss = f"{sum(numbers) / len(numbers):.4f}" if numbers else "-"
        return " | ".join(
            (
                f"step {steps.number('step'):.0f}{of}",
                f"loss {loss}",
                f"{format_count(steps.number('samples_per_s'))} samples/s",
                *((f"eta {format_duration(steps.number('eta_s'))}",) if steps.fields.get("eta_s") is not None else ()),
            )
        )
    if stage == "embed" and (begun := newest.get(EventName.EMBED_STARTED)):
        parts = sum(one.name == EventName.PART_EMBEDDED and one.at_ms >= begun.at_ms for one in moments)
        return f"part {begun.number('done') + parts:.0f}/{begun.number('parts'):.0f}"
    return ""


def plain_lines(view: LiveCycle, before: LiveCycle | None) -> list[str]:
    """What is new since `before`, one line each; everything where there is none."""
    known = {(job.name, job.state, job.tries, job.doing) for job in (before.jobs if before else ())}
    lines = [view.head] if before is None else []
    for job in view.jobs:
        if (job.name, job.state, job.tries, job.doing) not in known:
            lines.append("  ".join(word for word in (job.sign, job.name, job.state, job.tries, job.doing) if word))
    return lines


def _head(plan: Plan, ledger: CycleLedger, target: str, state: str, end: float) -> str:
    all_jobs = sum(max(1, job.array_size) for job in plan.jobs)
    words = [f"cycle {ledger.cycle} on {target}: {state}", f"{ledger.succeeded} of {all_jobs} jobs done"]
    if ledger.began_at is not None:
        words.append(f"for {format_duration(max(0.0, end - ledger.began_at))}")
    if ledger.deadline_at is not None:
        left = ledger.deadline_at - end
        words.append(f"deadline in {format_duration(left)}" if left >= 0 else f"{format_duration(-left)} LATE")
    cost = ledger.total.usd
    return " | ".join([*words, f"{usd(cost)} so far" if cost is not None else "cost unknown"])


def watch(
    cycle: OpenCycle,
    every_s: float,
    *,
    console: rich.console.Console | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Show the cycle until it has ended; the exit code is then that of the cycle. Ctrl-C ends the watching alone.

    143 for a cycle that nobody runs any more.

    On a terminal one picture that is drawn anew, elsewhere a line for what has changed. Raises ConfigError when the
    cycle has no jobs.
    """
    plan, target, store = cycle.plan(), cycle.target(), cycle.store
    console = console or rich.console.Console()
    before: LiveCycle | None = None
    is_interrupted = False

    def look() -> tuple[LiveCycle, Closed | None, tuple[JobRecord, ...], bool]:
        records = target.records(plan)
        closed = store.closed() or outcome_of(plan, records)
        moments = read_moments(store.storage, store.cycle, last_bytes=NEWEST_BYTES)
        ledger = read_ledger(store, plan, records, cycle.settings.jobs, closed=closed, moments=moments)
        interrupted = closed is None and cycle.interrupted_s() is not None
        view = live_cycle(
            plan,
            records,
            moments,
            ledger,
            target=target.name,
            closed=closed,
            now=store.clock(),
            interrupted=interrupted,
        )
        return view, closed, records, interrupted

    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                try:
                    was_interrupted = is_interrupted
                    view, closed, records, is_interrupted = look()
                except TransientError as error:  # a throttled call; the cycle does not care who looks at it
                    console.print(f"not read: {error.seen}", markup=False)
                    sleep(every_s)
                    continue
                if console.is_terminal:
                    live.update(picture(view), refresh=True)
                else:
                    for line in plain_lines(view, before):
                        cycle.say(line)
                before = view
                # Seen twice: whoever goes on with the cycle takes a moment to begin.
                if closed is not None or (was_interrupted and is_interrupted):
                    break
                sleep(every_s)
    except KeyboardInterrupt:
        return EXIT_OK
    for line in cycle.failure_lines(cycle.with_errors(records)):
        cycle.say(line)
    cycle.say(f"cycle {store.cycle}: {closed.text if closed else cycle.standing()}")
    if closed is None:
        return Preempted.exit_code
    return exit_code_of_cycle(closed, records)


def picture(view: LiveCycle) -> Group:
    """The jobs in the order of the plan, each further to the right than those it waits for."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("job", "state", "try", "ran", "doing"):
        table.add_column(column, no_wrap=column != "doing", overflow="fold")
    for job in view.jobs:
        drawn = Text("  " * job.depth).append(f"{job.sign} ", _STYLES.get(job.sign, "dim")).append(job.name)
        table.add_row(drawn, *map(Text, (job.state, job.tries, job.ran, job.doing)))
    return Group(Text(view.head, style="bold"), table, Text(view.last, style="dim"))
