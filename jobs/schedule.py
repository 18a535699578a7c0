"""When cycles are due, and whether to start one now: from the schedule, the clock and the cycles started already. Pure.

EventBridge Scheduler starts the driver, by the same expression. A cycle is started for its own time only: what was
missed is not made up, as its partitions wait for the next cycle.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Self
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record

EXPECTED = "cron(minutes hours day-of-month month day-of-week *) and an IANA zone, such as cron(0 2 * * ? *) and UTC"
_DAY = timedelta(days=1)


class ScheduleConfig(Record):
    """The schedule of cycles; the same as that of EventBridge Scheduler, which starts the driver."""

    retired: ClassVar[Mapping[str, Any]] = {"every": "", "at": ..., "start": None, "policy": ...}
    expression: str = Field(
        "",
        description="cron(minutes hours day-of-month month day-of-week *), as EventBridge Scheduler takes it; empty: no"
        " schedule",
    )
    timezone: str = Field("UTC", max_length=50, description="IANA name of the zone that the expression is read in")
    max_late_s: int = Field(
        6 * 3600, ge=60, description="Seconds after its scheduled time at which a cycle is not started any more"
    )

    @property
    def is_set(self) -> bool:
        return bool(self.expression)

    @model_validator(mode="after")
    def _check_expression(self) -> Self:
        if self.is_set:
            parse_schedule(self.expression, self.timezone)
        return self

    def schedule(self) -> "Schedule":
        """Return the schedule of the expression. Raises ConfigError if there is none."""
        if not self.is_set:
            raise ConfigError(
                "jobs.schedule.expression is empty", expected=EXPECTED, next_command="set it, then the same command"
            )
        return parse_schedule(self.expression, self.timezone)


@dataclass(frozen=True)
class Schedule:
    """When cycles are due. Instants that go in are aware; those that come out are in UTC."""

    expression: str
    zone: ZoneInfo
    cron: str
    """The expression in five fields, with Sunday as day 0 of the week."""

    @property
    def is_at_most_daily(self) -> bool:
        """Whether no two times fall on one day, so that a date names a cycle."""
        return re.match(r"\d+ \d+ ", self.cron) is not None

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Yield the times after `instant`, oldest first."""
        return (one for one in self._times(instant, -_DAY, reverse=False) if one > instant)

    def before(self, instant: datetime) -> Iterator[datetime]:
        """Yield the times before `instant`, newest first."""
        return (one for one in self._times(instant, _DAY, reverse=True) if one < instant)

    def _times(self, instant: datetime, offset: timedelta, *, reverse: bool) -> Iterator[datetime]:
        from cronsim import CronSim

        wall = instant.astimezone(self.zone).replace(tzinfo=None) + offset
        for due in CronSim(self.cron, wall, reverse=reverse):
            found = due.replace(tzinfo=self.zone).astimezone(UTC)
            # A time that the clocks skip in spring is not run: it does not come back from UTC as itself. One that they
            # repeat is run once.
            if found.astimezone(self.zone).replace(tzinfo=None) == due:
                yield found


def parse_schedule(expression: str, timezone: str = "UTC") -> Schedule:
    """Return the schedule of an expression. Raises ValueError with what is wrong."""
    from cronsim import CronSim, CronSimError  # most workspaces have no schedule

    def wrong(why: object) -> ValueError:
        return ValueError(f"{expression!r} with timezone {timezone!r}: {why}; expected {EXPECTED}")

    try:
        zone = ZoneInfo(timezone)
    except (KeyError, ValueError, OSError) as error:  # not found, no such form, a folder of zones
        raise wrong("the time zone is unknown to the tz database (package tzdata)") from error
    form = re.fullmatch(r"cron\((.*)\)", expression.strip())
    fields = form[1].split() if form else []
    if len(fields) != 6:
        raise wrong(f"{len(fields)} fields in cron(...), not six")
    minutes, hours, day, month, weekday, year = fields
    if (day == "?") == (weekday == "?"):
        raise wrong("? must stand in exactly one of day-of-month and day-of-week")
    if year != "*" or "W" in day.upper():
        raise wrong("years and W are not supported")
    if re.search(r"(?<![#/\d])(0|[89]|\d\d+)", weekday):
        raise wrong(f"day-of-week {weekday} is not 1 to 7")
    # EventBridge counts days of the week from 1, cron from 0.
    weekday = "7" if weekday.upper() == "L" else weekday
    weekday = re.sub(r"(?<![#/\d])\d", lambda one: str(int(one[0]) - 1), weekday)
    cron = " ".join((minutes, hours, day, month, weekday)).replace("?", "*")
    try:
        CronSim(cron, datetime(2026, 1, 1))
    except CronSimError as error:
        raise wrong(error) from error
    return Schedule(expression, zone, cron)


def cycle_name(schedule: Schedule, when: datetime) -> str:
    """Return `2026-11-20`, or `2026-11-20-0200` if a day has more than one. Names sort as their times do.

    By the clocks of the schedule's zone, on which no time of it occurs twice.
    """
    wall = when.astimezone(schedule.zone)
    return f"{wall:%Y-%m-%d}" if schedule.is_at_most_daily else f"{wall:%Y-%m-%d-%H%M}"


def due_cycle(
    config: ScheduleConfig, *, scheduled: datetime, now: datetime, claimed: Collection[str]
) -> tuple[str, str]:
    """Return the name of the cycle that a delivery for `scheduled` is about, and why not to start it (empty: start it).

    Deliveries come late, twice and out of order: no cycle is started after a newer one, or later than `max_late_s`.
    `claimed`: names of all cycles that were started before. Raises ConfigError if the schedule has no such time.
    """
    schedule, minute = config.schedule(), scheduled.astimezone(UTC).replace(second=0, microsecond=0)
    if next(schedule.after(minute - timedelta(minutes=1)), None) != minute:  # the scheduler delivers the second
        near = next(schedule.before(minute)), next(schedule.after(minute))
        raise ConfigError(
            f"{scheduled.isoformat()} is not a time of {schedule.expression} ({schedule.zone.key})",
            expected=" or ".join(f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in near),
            next_command="make jobs.schedule and the schedule of EventBridge the same",
        )
    name, last = cycle_name(schedule, minute), cycle_name(schedule, now)
    if name in claimed:
        return name, ""
    form = re.compile(r"\d{4}-\d\d-\d\d" if schedule.is_at_most_daily else r"\d{4}-\d\d-\d\d-\d{4}")
    newer = max((one for one in claimed if form.fullmatch(one) and name < one <= last), default="")
    if newer:
        return name, f"cycle {newer} is newer and was started before"
    return name, "too late (jobs.schedule.max_late_s)" if now - minute > timedelta(seconds=config.max_late_s) else ""
