"""`trnjobs status --watch`: a cycle while it runs, wherever it runs, from its records and events."""

import time
from collections.abc import Callable

import rich.console
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.cycle.attempt_time import moment_of
from jobs.cycle.ledger import read_ledger
from jobs.cycle.live import LiveCycle, live_cycle, plain_lines
from jobs.cycle.records import Closed, JobRecord
from jobs.cycle.states import exit_code_of_cycle, outcome_of
from jobs.setup import OpenCycle
from pipeline.core.errors import EXIT_OK, TransientError
from pipeline.telemetry.events import read_events

NEWEST_BYTES = 256 * 1024
"""Of the event log: enough for the figures of now, however long the cycle has run."""
_STYLES = {"✓": "green", "✗": "red bold", "●": "cyan"}


def watch(
    cycle: OpenCycle,
    every_s: float,
    *,
    console: rich.console.Console | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Show the cycle until it has ended; the exit code is then that of the cycle. Ctrl-C ends the watching alone.

    On a terminal one picture that is drawn anew, elsewhere a line for what has changed. Raises ConfigError when the
    cycle has no jobs.
    """
    plan, target, store = cycle.plan(), cycle.target(), cycle.store
    console = console or rich.console.Console()
    before: LiveCycle | None = None

    def look() -> tuple[LiveCycle, Closed | None, tuple[JobRecord, ...]]:
        records = target.records(plan)
        closed = store.closed() or outcome_of(plan, records)
        events = read_events(store.storage, f"cycles/{store.cycle}/events.jsonl", last_bytes=NEWEST_BYTES)
        moments = tuple(one for one in map(moment_of, events) if one is not None)
        ledger = read_ledger(store, plan, records, cycle.settings.jobs, closed=closed, moments=moments)
        view = live_cycle(plan, records, moments, ledger, target=target.name, closed=closed, now=store.clock())
        return view, closed, records

    try:
        with Live(console=console, auto_refresh=False, transient=False) as live:
            while True:
                try:
                    view, closed, records = look()
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
                if closed is not None:
                    break
                sleep(every_s)
    except KeyboardInterrupt:
        return EXIT_OK
    cycle.say(f"cycle {store.cycle}: {closed.text}")
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
