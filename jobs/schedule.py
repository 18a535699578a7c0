"""Which cycles to start now, from the schedule, the clock and the cycles that were started already. Pure."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from jobs.config import MissedPolicy, ScheduleConfig
from jobs.cron import Rate, Schedule
from pipeline.core.errors import ConfigError

_INSTANT = timedelta(microseconds=1)


@dataclass(frozen=True)
class Passed:
    """A time at which no cycle will be started, and why."""

    when: datetime
    reason: str


@dataclass(frozen=True)
class Due:
    """What to start, oldest first, each when the one before has ended; and what not."""

    start: tuple[datetime, ...]
    passed: tuple[Passed, ...] = ()


def cycle_name(schedule: Schedule, when: datetime) -> str:
    """`2026-11-20`, or `2026-11-20-0200` when a day has more than one. Names sort as their times do.

    By the clocks of the schedule's zone, which show no time of it twice. A rate does not follow the clocks: by UTC.
    """
    wall = when.astimezone(UTC if isinstance(schedule.times, Rate) else schedule.zone)
    return f"{wall:%Y-%m-%d}" if schedule.is_at_most_daily else f"{wall:%Y-%m-%d-%H%M}"


def due_cycles(config: ScheduleConfig, *, scheduled: datetime, now: datetime, claimed: Collection[str]) -> Due:
    """What a delivery for `scheduled` should start. `claimed`: names of all cycles that were started before.

    Deliveries come late, twice and out of order: no cycle is started after a newer one, none later than `max_late_s`.
    Raises ConfigError when the schedule has no such time.
    """
    schedule = config.schedule()
    when = _on_schedule(schedule, scheduled)
    if cycle_name(schedule, when) in claimed:
        return Due((when,))
    newer = [one for one in schedule.between(when, now + _INSTANT) if one > when]
    if started := [one for one in newer if cycle_name(schedule, one) in claimed]:
        return Due((), (Passed(when, f"cycle {cycle_name(schedule, started[-1])} is newer and was started before"),))
    oldest = now - timedelta(seconds=config.max_late_s)
    missed = list(_missed(schedule, when, oldest, claimed))
    if config.policy is MissedPolicy.COALESCE:
        times = [*missed, when, *newer]
        reason = f"coalesced into {cycle_name(schedule, times[-1])}"
        return _not_late(times[-1:], oldest, [Passed(one, reason) for one in times[:-1]])
    if config.policy is MissedPolicy.CATCH_UP:
        return _not_late([*missed, when], oldest, [])
    return _not_late([when], oldest, [Passed(one, "missed, and the policy is skip") for one in missed])


def _on_schedule(schedule: Schedule, scheduled: datetime) -> datetime:
    """The exact time meant. The scheduler gives the second, the schedule means the minute."""
    minute = scheduled.astimezone(UTC).replace(second=0, microsecond=0)
    found = next(schedule.between(minute, minute + timedelta(minutes=1)), None)
    if found is None:
        before, after = schedule.previous(minute), schedule.next(minute)
        raise ConfigError(
            f"{scheduled.isoformat()} is no time of {schedule.expression} ({schedule.zone.key})",
            expected=" or ".join(f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in (before, after) if one) or "one of its times",
            next_command="make jobs.schedule and the schedule of EventBridge the same",
        )
    return found


def _missed(schedule: Schedule, when: datetime, oldest: datetime, claimed: Collection[str]) -> Iterator[datetime]:
    """Times before `when`, not before `oldest`, since the last cycle that was started; oldest first.

    Nothing was missed before the first cycle ever.
    """
    name = cycle_name(schedule, when)
    if not any(one < name for one in claimed):
        return
    found = []
    for one in schedule.times.before(when):
        if one < oldest or cycle_name(schedule, one) in claimed:
            break
        found.append(one)
    yield from reversed(found)


def _not_late(start: list[datetime], oldest: datetime, passed: list[Passed]) -> Due:
    late = [Passed(one, "too late (jobs.schedule.max_late_s)") for one in start if one < oldest]
    return Due(tuple(one for one in start if one >= oldest), (*passed, *late))
