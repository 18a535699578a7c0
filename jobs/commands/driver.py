"""`trnjobs driver`: what the scheduler starts. It starts the cycle that is due, and exits.

Run twice for one time, it starts nothing twice.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.commands.submit import finish, submit_plan
from jobs.cycle.store import claimed_cycles
from jobs.schedule import ScheduleConfig, cycle_name, due_cycles
from jobs.settings import CycleSettings
from jobs.setup import make_plan, open_cycle, open_target_of
from pipeline.core.errors import EXIT_OK, ConfigError, TransientError
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.proc.children import ENGINE_MARGIN_S
from pipeline.proc.signals import stop_on_signals

TIME_VARIABLE = "TRNJOBS_SCHEDULED_TIME"


def run_driver(arguments: argparse.Namespace, say: Say) -> int:
    """Start what is due. Raises ConfigError for a time that is not on the schedule, TransientError for an overlap."""
    settings, stop, now = arguments.settings, StopSignal(), datetime.now(UTC)
    config = settings.jobs.schedule
    scheduled = scheduled_time(arguments.scheduled_time or os.environ.get(TIME_VARIABLE, ""), config, now)
    cycles = WorkspaceCycles(settings, arguments.target or settings.jobs.target, say, stop)
    with stop_on_signals(stop, grace_s=settings.jobs.stop_grace_s + ENGINE_MARGIN_S):
        return drive(config, scheduled, now, cycles, say)


@dataclass(frozen=True)
class WorkspaceCycles:
    """Cycles of the workspace of the settings."""

    settings: CycleSettings
    target_name: str
    say: Say
    stop: StopSignal

    def claimed(self) -> Sequence[str]:
        return claimed_cycles(open_cycle(self.settings, self.stop).storage)

    def has_ended(self, cycle: str) -> bool:
        settings = self._of(cycle)
        store = open_cycle(settings, self.stop)
        if store.closed() is not None:
            return True
        plan = store.plan()
        if plan is None:  # claimed, and nothing submitted
            return False
        records = open_target_of(settings, store, self.say, self.stop).records(plan)
        store.save_records(records)
        finish(settings, store, plan, records, self.say)
        return store.closed() is not None

    def submit(self, cycle: str) -> int:
        settings = self._of(cycle)
        return submit_plan(settings, make_plan(settings), self.target_name, self.say, self.stop)

    def _of(self, cycle: str) -> CycleSettings:
        return self.settings.model_copy(update={"cycle": cycle})


def drive(
    config: ScheduleConfig, scheduled: datetime, now: datetime, cycles: WorkspaceCycles, say: Callable[[str], object]
) -> int:
    """Start the cycles that are due, each when nothing else is under way; the exit code of the last."""
    schedule = config.schedule()
    due = due_cycles(config, scheduled=scheduled, now=now, claimed=cycles.claimed())
    for one in due.passed:
        say(f"cycle {cycle_name(schedule, one.when)} is not started: {one.reason}")
    names = [cycle_name(schedule, when) for when in due.start]
    code = EXIT_OK
    for index, name in enumerate(names):
        others = [other for other in reversed(cycles.claimed()) if other != name]
        running = next((other for other in others if not cycles.has_ended(other)), "")
        if running and not index:
            raise TransientError(
                f"cycle {running} is under way: cycle {name} would overlap it",
                expected="one cycle at a time",
                next_command=f"wait; or trnjobs submit --cycle {running}, if it was submitted half; or trnjobs cancel",
            )
        if running:
            say(f"{len(names) - index} more wait for it, from cycle {name}; next: the same command when it has ended")
            return EXIT_OK
        if name in cycles.claimed() and cycles.has_ended(name):
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
            expected="a time such as 2026-11-20T02:00:00Z, which the scheduler puts for <aws.scheduler.scheduled-time>",
            next_command="correct the command of the schedule's target",
        ) from error
    if found.tzinfo is None:
        raise ConfigError(f"scheduled time {text!r} has no offset", expected=f"{text}Z for UTC")
    return found.astimezone(UTC)
