"""`trnjobs driver`: what the scheduler starts. It starts the cycle that is due, and exits.

Run twice for one time, it starts nothing twice.
"""

import argparse
import os
from datetime import UTC, datetime

from jobs.commands.submit import finish, submit_plan
from jobs.cycle.cycle_store import claimed_cycles, unclosed_cycles
from jobs.schedule import ScheduleConfig, due_cycle
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
        asked = open_cycle(settings, say, stop)
        return drive(config, scheduled, now, asked, arguments.target or settings.jobs.target)


def drive(config: ScheduleConfig, scheduled: datetime, now: datetime, asked: OpenCycle, target: str) -> int:
    """Start the cycle of a scheduled time, if it is due and no other one is under way; its exit code."""
    claimed = claimed_cycles(asked.store)
    name, reason = due_cycle(config, scheduled=scheduled, now=now, claimed=claimed)
    if reason:
        asked.say(f"cycle {name} is not started: {reason}")
        return EXIT_OK
    others = unclosed_cycles(asked.store, [other for other in claimed if other != name])
    running = next((other for other in reversed(others) if not has_ended(asked.other(other))), "")
    if running:
        raise TransientError(
            f"cycle {running} is under way: cycle {name} would overlap it",
            expected="one cycle at a time",
            next_command=f"wait; or trnjobs submit --cycle {running}, if it was submitted half; or trnjobs cancel",
        )
    cycle = asked.other(name)
    if name in claimed and has_ended(cycle):
        cycle.say(f"cycle {name} has ended already")
        return EXIT_OK
    return submit_plan(cycle, make_plan(cycle.settings), target)


def has_ended(cycle: OpenCycle) -> bool:
    """Return whether a cycle has ended, after its records were brought up to date."""
    if cycle.store.closed() is not None:
        return True
    cycle = cycle.with_stored()
    plan = cycle.store.plan()
    if plan is None:  # claimed, and nothing submitted
        return False
    finish(cycle, plan, cycle.target().records(plan))
    return cycle.store.closed() is not None


def scheduled_time(text: str, config: ScheduleConfig, now: datetime) -> datetime:
    """Return the time to start a cycle for; without a text the newest that has passed. Raises ConfigError."""
    if not text:
        return next(config.schedule().before(now))
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
