"""Starting the cycles that are due, one at a time, through whatever starts cycles."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from jobs.config import ScheduleConfig
from jobs.schedule import cycle_name, due_cycles
from pipeline.core.errors import EXIT_OK, ConfigError, TransientError


class Cycles(Protocol):
    """What a driver needs to know and do."""

    def claimed(self) -> Sequence[str]:
        """Cycles that were started, by name."""

    def has_ended(self, cycle: str) -> bool:
        """Whether a cycle that was started is over, by the records of its target."""

    def submit(self, cycle: str) -> int:
        """Start a cycle, or go on with one that was started half; its exit code, 0 while it is under way."""


def drive(
    config: ScheduleConfig, scheduled: datetime, now: datetime, cycles: Cycles, say: Callable[[str], object]
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
        newest = next(config.schedule().times.before(now), None)
        if newest is None:
            raise ConfigError(
                f"no time of {config.expression} has passed", expected="--scheduled-time", next_command="wait for it"
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
