"""The live display of a cycle while its jobs run, used by `trnjobs submit`, `retry`, `run` and `status --watch`.

On a terminal, this is a table that is updated in place. Otherwise, plain lines are printed: one for each state change,
and one for each running job every 15 seconds.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf

import rich.console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jobs.cycle.costs import SKEW_MS, CycleEvent, CycleLedger, read_cycle_events, read_ledger
from jobs.cycle.job_states import Change, Closed, JobRecord, JobState, change_line, exit_code_of_cycle, outcome_of
from jobs.cycle.tables import status_rows
from jobs.cycle.verdict import cost_text
from jobs.plan.cycle import RUN_PREFIX
from jobs.plan.spec import JobPlan
from jobs.setup import OpenCycle
from jobs.targets.base import Target, until_ended
from pipeline.core.errors import EXIT_OK, Preempted, TransientError, TrnpipeError
from pipeline.core.format import format_count, format_duration
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from pipeline.proc.signals import STOPPING
from pipeline.telemetry.events import EventName

NEWEST_BYTES = 256 * 1024
"""Number of bytes to read from the end of the event log, which is enough for the current figures."""
DRAW_S, REMOTE_S = 1.0, 5.0
"""Seconds between updates for a local and for a remote workspace."""
LINES_S = 15.0
"""Seconds between lines about a running job if there is no live table."""
COLUMNS = ("job", "state", "ran", "")
_STYLES = {JobState.SUCCEEDED: "green", JobState.RUNNING: "cyan", JobState.FAILED: "red", JobState.CANCELLED: "red"}
_IN_EVENTS = ("stage", "step", "partition", "part")
Row = tuple[str, ...]


def live_rows(
    plan: JobPlan,
    records: Sequence[JobRecord],
    events: Sequence[CycleEvent],
    now: float,
    newest_line: Callable[[JobRecord], str] = lambda record: "",
) -> list[Row]:
    """Return a table row for each job, with cells in the order of COLUMNS.

    Args:
        plan: the submitted plan.
        records: the current records of all jobs.
        events: the events of the cycle in chronological order. Older events may be omitted.
        now: the current time, in seconds since 1970.
        newest_line: a function that returns the last log line of a running job, or an empty string if it is unknown.
    """
    rows = list[Row]()
    for record in records:
        name, state, _, ran, _, why = status_rows([record])[0]
        running = [task for task in record.tasks() if task.state is JobState.RUNNING and task.attempts]
        if running:
            started = min(task.attempts[-1].started_at or now for task in running)
            ran = format_duration(max(0.0, now - started))
            stage, attempt = plan.job(record.name).stage, len(running[0].attempts)
            stopped = [before.stopped_at or 0.0 for before in running[0].attempts[:-1]]
            from_ms = max([1000 * started - SKEW_MS, *(1000 * at for at in stopped)])  # skip events of earlier attempts
            since = [event for event in events if event.at_ms >= from_ms]
            activity = doing_text(stage, since, newest_line(running[0]))
            why = ", ".join(filter(None, (f"attempt {attempt}" if attempt > 1 else "", activity)))
        rows.append((name, state, ran, why))
    return rows


def doing_text(stage: str, events: Sequence[CycleEvent], newest_line: str = "") -> str:
    """Describe the activity of a running job, such as `step 120/2000, loss 0.693`, or its last log line."""
    newest: Mapping[str, CycleEvent] = {event.name: event for event in events}
    if stage == "train" and (steps := newest.get(EventName.TRAIN_STEPS)):
        started, losses = newest.get(EventName.TRAIN_STARTED), steps.fields.get("losses")
        numbers = [loss for loss in losses if isinstance(loss, int | float)] if isinstance(losses, list) else []
        fields = [
            f"step {steps.number('step'):.0f}" + (f"/{started.number('max_steps'):.0f}" if started else ""),
            f"loss {sum(numbers) / len(numbers):.3f}" if numbers else "loss -",
            f"{format_count(steps.number('samples_per_s'))} samples/s",
        ]
        if steps.fields.get("eta_s") is not None:
            fields.append(f"eta {format_duration(steps.number('eta_s'))}")
        return ", ".join(fields)
    line = "".join(filter(str.isprintable, Text.from_ansi(newest_line).plain)).strip()
    if line:  # only keep the first two figures and the ETA, which is the last one
        parts = line.removeprefix(stage).removeprefix(":").split(" | ")
        fields = [part for part in parts if not part.endswith("so far")]
        return ", ".join([*fields[:2], *fields[2:][-1:]]).strip()
    if stage == "embed" and (start := newest.get(EventName.EMBED_STARTED)):
        done = sum(event.name == EventName.PART_EMBEDDED and event.at_ms >= start.at_ms for event in events)
        return f"part {start.number('done') + done:.0f}/{start.number('parts'):.0f}"
    return ""


def event_text(events: Sequence[CycleEvent], now: float) -> str:
    """Describe the newest event except for training steps, such as `3s ago: checkpoint saved, step 200`.

    Returns an empty string if there is no such event.
    """
    newest = next((event for event in reversed(events) if event.name != EventName.TRAIN_STEPS), None)
    if newest is None:
        return ""
    fields = [f"{name} {newest.fields[name]}" for name in _IN_EVENTS if name in newest.fields]
    ago = format_duration(max(0.0, round(now - newest.at_ms / 1000)))
    return f"{ago} ago: {', '.join([newest.name.replace('_', ' '), *fields])}"


def head_text(plan: JobPlan, ledger: CycleLedger, target: str, state: str, end: float) -> str:
    all_jobs = sum(max(1, job.array_size) for job in plan.jobs)
    preposition = "for" if ledger.outcome == "open" else "in"
    lasted = "" if ledger.began_at is None else f" {preposition} {format_duration(max(0.0, end - ledger.began_at))}"
    fields = [f"cycle {ledger.cycle}: {state}{lasted}", f"{ledger.succeeded} of {all_jobs} jobs done"]
    if ledger.deadline_at is not None:
        remaining = ledger.deadline_at - end
        late = f"{format_duration(-remaining)} LATE"
        fields.append(f"deadline in {format_duration(remaining)}" if remaining >= 0 else late)
    return " | ".join([*fields, cost_text(ledger, target)])


class View:
    """The live display of a cycle. Without a terminal, it prints plain lines instead.

    Set `prints_changes` to also print a line for each state change, unless other code already does so.
    """

    def __init__(
        self,
        cycle: OpenCycle,
        plan: JobPlan,
        console: rich.console.Console | None = None,
        *,
        prints_changes: bool = False,
    ) -> None:
        # Use a separate storage, because the storage of the cycle stops reading after Ctrl-C.
        store = replace(cycle.store, storage=open_storage(cycle.store.storage.root, retry=cycle.settings.storage))
        self.cycle, self.stop = replace(cycle, store=store, stop=StopSignal()), cycle.stop
        self.plan, self.prints_changes = plan, prints_changes
        # Never write control characters to a pipe, even if FORCE_COLOR is set.
        self.console = console or rich.console.Console(force_terminal=sys.stdout.isatty())
        has_screen = self.console.is_terminal and not self.console.is_dumb_terminal
        self.live = Live(console=self.console, auto_refresh=False) if has_screen else None
        self._lock = threading.Lock()
        self._last_states: dict[str, tuple[JobState, int]] | None = None
        self._began_at = self._printed_at = cycle.store.clock()
        self._followed = dict[tuple[int, int], threading.Thread]()
        self._over = set[int]()

    def __enter__(self) -> "View":
        if self.live is not None:
            self.live.start()
            self.console.show_cursor(True)  # otherwise, it would remain hidden if this process is killed
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:  # stopping replaces sys.stdout, which may crash a print() in another thread
            live, self.live = self.live, None
            if live is not None:
                live.stop()

    def say(self, line: str) -> None:
        """Print a line, above the live table if there is one. State changes are skipped if the table will show them."""
        with self._lock:
            if self.live is None:
                self.cycle.say(line)
            elif not isinstance(line, Change) or self.stop.is_set():  # after Ctrl-C, the table is drawn only once more
                self.console.print(Text.from_ansi(line), soft_wrap=True)

    @contextmanager
    def while_running(self) -> Iterator[None]:
        """Show the jobs while the calling thread runs them. For `trnjobs run`, also show the output of the script."""
        done = threading.Event()
        thread = threading.Thread(target=self._keep_drawing, args=(self.cycle.target(), done), name="view", daemon=True)
        with self:
            self.stop.has_live_display = self.live is not None
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join()
                for follower in list(self._followed.values()):
                    follower.join()
                self.stop.has_live_display = False

    def _keep_drawing(self, target: Target, done: threading.Event) -> None:
        store = self.cycle.store
        every_s = DRAW_S if store.storage.local_path("") is not None else REMOTE_S
        is_last = False
        while not is_last:
            until = time.monotonic() + every_s
            while not done.wait(0.1) and time.monotonic() < until and not (self.live and self.stop.is_set()):
                continue
            is_last, is_stopping = done.is_set(), self.stop.is_set()  # the records are then newer than both
            with suppress(TrnpipeError):  # errors in the display must not affect the jobs
                records = target.records(self.plan) if target.name == "local" else store.records()
                if self.cycle.name.startswith(RUN_PREFIX):
                    self._follow_logs(target, records, done, every_s)
                if records:
                    self.draw(target, records, is_stopping=is_stopping)

    def _follow_logs(self, target: Target, records: Sequence[JobRecord], done: threading.Event, every_s: float) -> None:
        """Print the output of each attempt on each node until it has ended, using a thread for each of them."""

        def follow(job: JobRecord, attempt: int, node: int, earlier: threading.Thread | None) -> None:
            if earlier is not None:
                earlier.join()
            more = until_ended(lambda: done.is_set() or attempt in self._over, lambda: done.wait(every_s / 5))
            try:
                for line in target.logs(job, attempt=attempt, node=node, more=more):
                    self.say(line)
            except TrnpipeError:  # there is no log yet
                self._followed.pop((attempt, node))

        for job in records:
            for number, attempt in enumerate(job.attempts, 1):
                if attempt.stopped_at is not None:
                    self._over.add(number)
                if attempt.started_at is None or (attempt.stopped_at or inf) < self._began_at:
                    continue
                for node in range(max(1, job.num_nodes)):
                    if (number, node) not in self._followed:
                        earlier = self._followed.get((number - 1, node))
                        thread = threading.Thread(target=follow, args=(job, number, node, earlier), daemon=True)
                        self._followed[number, node] = thread
                        thread.start()

    def draw(
        self,
        target: Target,
        records: Sequence[JobRecord],
        *,
        is_stopping: bool = False,
        is_interrupted: bool = False,
    ) -> Closed | None:
        """Update the display with the current records. Returns how the cycle has ended, or None if it is running.

        With `is_stopping`, which must have been known before the records were read, plain lines follow.
        """
        store = self.cycle.store
        closed = store.closed() or outcome_of(self.plan, records)
        events = read_cycle_events(store.storage, store.cycle, last_bytes=NEWEST_BYTES)
        ledger = read_ledger(store, self.plan, records, self.cycle.settings.jobs, closed=closed, events=events)
        now, state = store.clock(), "interrupted" if is_interrupted else "under way"
        newest_line = (lambda record: "") if self._followed else target.newest_line  # followed logs are already printed
        rows = live_rows(self.plan, records, events, now, newest_line)
        end, state = (closed.at, closed.outcome) if closed else (now, state)
        head = head_text(self.plan, ledger, target.name, state, end)
        if self.live is None:
            self._print_lines(head, records, rows, now)
            return closed
        lines = [event_text(events, now)] if closed is None else []
        self.live.update(_picture(head, rows, [*lines, STOPPING] if is_stopping else lines), refresh=True)
        self._printed_at = now
        if is_stopping:  # continue with plain lines
            self.__exit__()
        return closed

    def _print_lines(self, head: str, records: Sequence[JobRecord], rows: Sequence[Row], now: float) -> None:
        """Print a line for each change since the last update, and for each running job every LINES_S seconds."""
        tasks = [task for record in records for task in record.tasks()]
        if self.prints_changes:
            if self._last_states is None:
                self.say(head)
            before, self._last_states = (
                self._last_states or {},
                {task.name: (task.state, len(task.attempts)) for task in tasks},
            )
            for task in tasks:
                if before.get(task.name, (JobState.SUBMITTED, 0)) != self._last_states[task.name]:
                    self.say(change_line(task))
        if now - self._printed_at >= LINES_S and not self._followed:
            self._printed_at = now
            running = {task.name.partition(":")[0] for task in tasks if task.state is JobState.RUNNING}
            for name, state, ran, doing in rows:
                if name in running:
                    self.say(f"{name:<12} {state:<9}  {ran}  {doing}".rstrip())


def watch(
    cycle: OpenCycle,
    every_s: float,
    *,
    console: rich.console.Console | None = None,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Show the cycle until it has ended or the user presses Ctrl-C, and return the exit code of the cycle.

    If the process that runs the jobs no longer exists, the exit code is that of Preempted.
    """
    plan, target = cycle.plan(), cycle.target()
    records, closed, looks_interrupted = tuple[JobRecord, ...](), None, 0
    try:
        with View(cycle, plan, console, prints_changes=True) as view:
            while True:
                try:
                    records = target.records(plan)
                    is_interrupted = cycle.store.closed() is None and cycle.interrupted_s() is not None
                    closed = view.draw(target, records, is_interrupted=is_interrupted)
                    looks_interrupted = looks_interrupted + 1 if is_interrupted else 0
                except TransientError as error:  # for example a throttled call, which does not affect the cycle
                    view.say(f"warning: {error.seen}")
                if (
                    closed is not None or looks_interrupted == 2
                ):  # a process that resumes the cycle takes a moment to start
                    break
                sleep(every_s)
    except KeyboardInterrupt:
        return EXIT_OK
    if closed is None:
        cycle.say(f"cycle {cycle.name}: {cycle.progress()}")
        return Preempted.exit_code
    records = cycle.with_errors(records)
    for line in cycle.end_lines(plan, records, closed):
        cycle.say(line)
    return exit_code_of_cycle(closed, records)


def _picture(head: str, rows: Sequence[Row], lines: Sequence[str]) -> rich.console.Group:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        table.add_column(column, no_wrap=column != "", overflow="fold")
    for row in rows:
        style = next((style for state, style in _STYLES.items() if row[1].startswith(state)), "")
        table.add_row(*map(Text, row), style=style)
    return rich.console.Group(Text(head, style="bold"), table, *(Text(line) for line in lines if line))
