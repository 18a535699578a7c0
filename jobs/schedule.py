"""When cycles are due, and whether to start one now, given the clock and the cycles that were already started. Pure.

EventBridge Scheduler starts the driver with the same expression. A missed cycle is not started later, because the next
cycle also processes its partitions.
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
    """The schedule of cycles, which must equal that of EventBridge Scheduler, which starts the driver."""

    retired: ClassVar[Mapping[str, Any]] = {"every": "", "at": ..., "start": None, "policy": ...}
    expression: str = Field(
        "",
        description="cron(minutes hours day-of-month month day-of-week *), the syntax of EventBridge Scheduler"
        " (empty: no schedule)",
    )
    timezone: str = Field("UTC", max_length=50, description="IANA time zone of the expression")
    max_late_s: int = Field(
        6 * 3600, ge=60, description="Seconds after its scheduled time until which a cycle may still start"
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
        """Return the parsed schedule. Raises ConfigError if the expression is empty."""
        if not self.is_set:
            raise ConfigError(
                "jobs.schedule.expression is empty",
                expected=EXPECTED,
                next_command="set it, then run the same command again",
            )
        return parse_schedule(self.expression, self.timezone)


@dataclass(frozen=True)
class Schedule:
    """The times at which cycles are due. Arguments are aware datetimes, results are in UTC."""

    expression: str
    zone: ZoneInfo
    cron: str
    """The expression in five fields, with Sunday as day 0 of the week."""

    @property
    def is_at_most_daily(self) -> bool:
        """Return whether no day has two times, so that a date is enough to name a cycle."""
        return re.match(r"\d+ \d+ ", self.cron) is not None

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Yield the times after `instant`, oldest first."""
        return (time for time in self._times(instant, -_DAY, reverse=False) if time > instant)

    def before(self, instant: datetime) -> Iterator[datetime]:
        """Yield the times before `instant`, newest first."""
        return (time for time in self._times(instant, _DAY, reverse=True) if time < instant)

    def _times(self, instant: datetime, offset: timedelta, *, reverse: bool) -> Iterator[datetime]:
        from cronsim import CronSim

        wall = instant.astimezone(self.zone).replace(tzinfo=None) + offset
        for due in CronSim(self.cron, wall, reverse=reverse):
            time = due.replace(tzinfo=self.zone).astimezone(UTC)
            # A time that the clocks skip in spring does not survive the round trip through UTC, and is not run. A time
            # that they repeat in autumn is run once.
            if time.astimezone(self.zone).replace(tzinfo=None) == due:
                yield time


def parse_schedule(expression: str, timezone: str = "UTC") -> Schedule:
    """Parse a schedule expression. Raises ValueError with the reason if it is invalid."""
    from cronsim import CronSim, CronSimError  # most workspaces have no schedule

    def invalid(reason: object) -> ValueError:
        return ValueError(f"{expression!r} with timezone {timezone!r}: {reason}; expected {EXPECTED}")

    try:
        zone = ZoneInfo(timezone)
    except (KeyError, ValueError, OSError) as error:  # not found, malformed, a folder of zones
        raise invalid("the time zone is unknown to the tz database (package tzdata)") from error
    form = re.fullmatch(r"cron\((.*)\)", expression.strip())
    fields = form[1].split() if form else []
    if len(fields) != 6:
        raise invalid(f"{len(fields)} fields in cron(...), not six")
    minutes, hours, day, month, weekday, year = fields
    if (day == "?") == (weekday == "?"):
        raise invalid("exactly one of day-of-month and day-of-week must be ?")
    if year != "*" or "W" in day.upper():
        raise invalid("years and W are not supported")
    if re.search(r"(?<![#/\d])(0|[89]|\d\d+)", weekday):
        raise invalid(f"day-of-week {weekday} is not 1 to 7")
    # EventBridge numbers days of the week from 1, cron from 0.
    weekday = "7" if weekday.upper() == "L" else weekday
    weekday = re.sub(r"(?<![#/\d])\d", lambda match: str(int(match[0]) - 1), weekday)
    cron = " ".join((minutes, hours, day, month, weekday)).replace("?", "*")
    try:
        CronSim(cron, datetime(2026, 1, 1))
    except CronSimError as error:
        raise invalid(error) from error
    return Schedule(expression, zone, cron)


def cycle_name(schedule: Schedule, when: datetime) -> str:
    """Return `2026-11-20`, or `2026-11-20-0200` if a day may have several cycles. Names sort like their times.

    The name is the local time in the zone of the schedule, where no scheduled time occurs twice.
    """
    wall = when.astimezone(schedule.zone)
    return f"{wall:%Y-%m-%d}" if schedule.is_at_most_daily else f"{wall:%Y-%m-%d-%H%M}"


def due_cycle(
    config: ScheduleConfig, *, scheduled: datetime, now: datetime, claimed: Collection[str]
) -> tuple[str, str]:
    """Return the name of the cycle for a scheduled time, and the reason not to start it (empty: start it).

    Events may be late, duplicated and out of order. So no cycle is started after a newer one, or later than
    `max_late_s`. `claimed`: names of all started cycles. Raises ConfigError if the schedule has no such time.
    """
    schedule, minute = config.schedule(), scheduled.astimezone(UTC).replace(second=0, microsecond=0)
    if next(schedule.after(minute - timedelta(minutes=1)), None) != minute:  # events contain seconds
        near = next(schedule.before(minute)), next(schedule.after(minute))
        raise ConfigError(
            f"{scheduled.isoformat()} is not a time of {schedule.expression} ({schedule.zone.key})",
            expected=" or ".join(f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in near),
            next_command="make jobs.schedule equal to the schedule of EventBridge",
        )
    name, last = cycle_name(schedule, minute), cycle_name(schedule, now)
    if name in claimed:
        return name, ""
    form = re.compile(r"\d{4}-\d\d-\d\d" if schedule.is_at_most_daily else r"\d{4}-\d\d-\d\d-\d{4}")
    newer = max((other for other in claimed if form.fullmatch(other) and name < other <= last), default="")
    if newer:
        return name, f"the newer cycle {newer} was already started"
    return name, "too late (jobs.schedule.max_late_s)" if now - minute > timedelta(seconds=config.max_late_s) else ""
