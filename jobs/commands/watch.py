"""`trnjobs status --watch`: a cycle while it runs, wherever it runs, from its records and events."""

import time
from collections.abc import Callable, Mapping, Sequence

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.cycle.job_states import JobRecord, JobState, exit_code_of_cycle, outcome_of
from jobs.cycle.ledger import SKEW_MS, CycleLedger, Moment, read_ledger, read_moments
from jobs.cycle.tables import STATUS, status_rows
from jobs.plan.spec import Plan
from jobs.setup import OpenCycle
from pipeline.core.errors import EXIT_OK, Preempted, TransientError
from pipeline.core.format import format_count, format_duration, usd
from pipeline.telemetry.events import EventName

NEWEST_BYTES = 256 * 1024
"""Of the event log: enough for the figures of now, however long the cycle has run."""
_STYLES = {JobState.SUCCEEDED: "green", JobState.RUNNING: "cyan", JobState.FAILED: "red", JobState.CANCELLED: "red"}
Row = tuple[str, ...]


def live_rows(plan: Plan, records: Sequence[JobRecord], moments: Sequence[Moment], now: float) -> list[Row]:
    """Return cells in the order of STATUS, a row a job. `moments`: at least the newest, in order of time."""
    rows = list[Row]()
    for record in records:
        *cells, ran, code, why = status_rows([record])[0]
        running = [leaf for leaf in record.leaves() if leaf.state is JobState.RUNNING and leaf.attempts]
        if running:
            started = min(leaf.attempts[-1].started_at or now for leaf in running)
            ran = format_duration(max(0.0, now - started))
            since = [one for one in moments if one.at_ms >= 1000 * started - SKEW_MS]
            why = doing_text(plan.job(record.name).stage, since)
        rows.append((*cells, ran, code, why))
    return rows


def doing_text(stage: str, moments: Sequence[Moment]) -> str:
    """Return what a running job is at, from the events since its start: `step 120/2000 | loss 0.6931 | ...`."""
    newest: Mapping[str, Moment] = {moment.name: moment for moment in moments}
    if stage == "train" and (steps := newest.get(EventName.TRAIN_STEPS)):
        started, losses = newest.get(EventName.TRAIN_STARTED), steps.fields.get("losses")
        numbers = [loss for loss in losses if isinstance(loss, int | float)] if isinstance(losses, list) else []
        words = [
            f"step {steps.number('step'):.0f}" + (f"/{started.number('max_steps'):.0f}" if started else ""),
            f"loss {sum(numbers) / len(numbers):.4f}" if numbers else "loss -",
            f"{format_count(steps.number('samples_per_s'))} samples/s",
        ]
        if steps.fields.get("eta_s") is not None:
            words.append(f"eta {format_duration(steps.number('eta_s'))}")
        return " | ".join(words)
    if stage == "embed" and (begun := newest.get(EventName.EMBED_STARTED)):
        parts = sum(one.name == EventName.PART_EMBEDDED and one.at_ms >= begun.at_ms for one in moments)
        return f"part {begun.number('done') + parts:.0f}/{begun.number('parts'):.0f}"
    return ""


def head_text(plan: Plan, ledger: CycleLedger, target: str, state: str, end: float) -> str:
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
    """Show the cycle until it has ended; return its exit code, or 143 if nobody runs it any more.

    On a terminal one picture that is drawn anew, elsewhere a line for each change. Ctrl-C ends the watching alone.
    Raises ConfigError when the cycle has no jobs.
    """
    plan, target, store = cycle.plan(), cycle.target(), cycle.store
    console = console or rich.console.Console()
    known, looks_interrupted = set[Row](), 0
    records, closed = tuple[JobRecord, ...](), None
    try:
        with Live(console=console, auto_refresh=False) as live:
            while closed is None and looks_interrupted < 2:  # whoever goes on with a cycle takes a moment to begin
                if known:
                    sleep(every_s)
                try:
                    records = target.records(plan)
                    closed = store.closed() or outcome_of(plan, records)
                    moments = read_moments(store.storage, store.cycle, last_bytes=NEWEST_BYTES)
                    ledger = read_ledger(store, plan, records, cycle.settings.jobs, closed=closed, moments=moments)
                    is_interrupted = closed is None and cycle.interrupted_s() is not None
                except TransientError as error:  # a throttled call; the cycle does not care who looks at it
                    console.print(f"not read: {error.seen}", markup=False)
                    sleep(every_s)
                    continue
                looks_interrupted = looks_interrupted + 1 if is_interrupted else 0
                now, state = store.clock(), "interrupted" if is_interrupted else "under way"
                rows = live_rows(plan, records, moments, now)
                if closed is not None:
                    now, state = closed.at, closed.outcome
                head = head_text(plan, ledger, target.name, state, now)
                if console.is_terminal:
                    live.update(_picture(head, rows), refresh=True)
                else:
                    changed = [row for row in rows if (*row[:3], row[5]) not in known]
                    for line in ([head] if not known else []) + ["  ".join(filter(None, row)) for row in changed]:
                        cycle.say(line)
                known = {(*row[:3], row[5]) for row in rows}
    except KeyboardInterrupt:
        return EXIT_OK
    for line in cycle.failure_lines(cycle.with_errors(records)):
        cycle.say(line)
    cycle.say(f"cycle {store.cycle}: {closed.text if closed else cycle.standing()}")
    return exit_code_of_cycle(closed, records) if closed else Preempted.exit_code


def _picture(head: str, rows: Sequence[Row]) -> Table:
    table = Table(title=Text(head, style="bold"), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in STATUS:
        table.add_column(column, no_wrap=column != "why", overflow="fold")
    for row in rows:
        style = next((style for state, style in _STYLES.items() if row[1].startswith(state)), "")
        table.add_row(*map(Text, row), style=style)
    return table
