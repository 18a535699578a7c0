"""`trnjobs driver`: what the scheduler starts. It starts the cycle that is due, and exits.

Run twice for one time, it starts nothing twice.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.commands.submit import finish, submit_plan
from jobs.cycle.cycle_store import claimed_cycles, unclosed_cycles
from jobs.schedule import ScheduleConfig, cycle_name, due_cycles
from jobs.setup import OpenCycle, make_plan, open_cycle, stopping_jobs
from pipeline.core.errors import EXIT_OK, ConfigError, TransientError
from pipeline.core.progress import Say

TIME_VARIABLE = "TRNJOBS_SCHEDULED_TIME"


def run_driver(arguments: argparse.Namespace, say: Say) -> int:
    """Start what is due. Raises ConfigError for a time that is not on the schedule, TransientError for an overlap."""
    settings, now = arguments.settings, datetime.now(UTC)
    config = settings.jobs.schedule
    scheduled = scheduled_time(arguments.scheduled_time or os.environ.get(TIME_VARIABLE, ""), config, now)
    with stopping_jobs(settings) as stop:
        cycles = WorkspaceCycles(open_cycle(settings, say, stop), arguments.target or settings.jobs.target)
        return drive(config, scheduled, now, cycles, say)


@dataclass(frozen=True)
class WorkspaceCycles:
    """Cycles of a workspace; `any`: one of them."""

    any: OpenCycle
    target_name: str

    def claimed(self) -> Sequence[str]:
        return claimed_cycles(self.any.store)

    def newest_under_way(self, names: Sequence[str]) -> str:
        """Empty: all of these cycles have ended."""
        unclosed = unclosed_cycles(self.any.store, names)
        return next((name for name in reversed(unclosed) if not self.has_ended(name)), "")

    def has_ended(self, name: str) -> bool:
        cycle = self.any.other(name)
        if cycle.store.closed() is not None:
            return True
        cycle = cycle.with_stored()
        plan = cycle.store.plan()
        if plan is None:  # claimed, and nothing submitted
            return False
        records = cycle.target().records(plan)
        finish(cycle, plan, records)
        return cycle.store.closed() is not None

    def submit(self, name: str) -> int:
        cycle = self.any.other(name)
        return submit_plan(cycle, make_plan(cycle.settings), self.target_name)


def drive(
    config: ScheduleConfig, scheduled: datetime, now: datetime, cycles: WorkspaceCycles, say: Callable[[str], object]
) -> int:
    """Start the cycles that are due, each when nothing else is under way; the exit code of the last."""
    schedule = config.schedule()
    claimed = cycles.claimed()
    due = due_cycles(config, scheduled=scheduled, now=now, claimed=claimed)
    for one in due.passed:
        say(f"cycle {cycle_name(schedule, one.when)} is not started: {one.reason}")
    names = [cycle_name(schedule, when) for when in due.start]
    code = EXIT_OK
    for index, name in enumerate(names):
        if index:  # the cycle before may have taken hours
            claimed = cycles.claimed()
        running = cycles.newest_under_way([other for other in claimed if other != name])
        if running and not index:
            raise TransientError(
                f"cycle {running} is under way: cycle {name} would overlap it",
                expected="one cycle at a time",
                next_command=f"wait; or trnjobs submit --cycle {running}, if it was submitted half; or trnjobs cancel",
            )
        if running:
            say(f"{len(names) - index} cycles wait for it, from {name} on; next: the same command once it has ended")
            return EXIT_OK
        if name in claimed and cycles.has_ended(name):
            say(f"cycle {name} has ended already")
        else:
            code = cycles.submit(name)
    return code


def scheduled_time(text: str, config: ScheduleConfig, now: datetime) -> datetime:
    """The time to start a cycle for; without a text the newest that has passed. Raises ConfigError."""
    if not text:
        newest = next(config.schedule().before(now), None)
        if newest is None:
            raise ConfigError(
                f"no time of {config.schedule().expression} is known that has passed",
                expected="--scheduled-time",
                next_command="give the time, or wait for it",
            )
        return newest
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"scheduled time {text!r}",
            expected="a time such as 2026-11-20T02:00:00Z, as the scheduler fills in <aws.scheduler.scheduled-time>",
            next_command="correct the command of the schedule's target",
        ) from error
    if found.tzinfo is None:
        raise ConfigError(f"scheduled time {text!r} has no offset", expected=f"{text}Z for UTC")
    return found.astimezone(UTC)
