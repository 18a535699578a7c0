"""Determine when cycles are due, and whether the driver should start one now.

EventBridge Scheduler starts the driver with the same expression. If a cycle was missed, it is skipped instead of being
started late, because the next cycle also processes its partitions. Nothing here reads the clock or the workspace: the
current time and the cycles that were already started are passed as arguments.
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
    """The schedule of cycles. It must match the schedule in EventBridge Scheduler, which starts the driver."""

    retired: ClassVar[Mapping[str, Any]] = {"every": "", "at": ..., "start": None, "policy": ...}
    expression: str = Field(
        "",
        description="Cron expression in the syntax of EventBridge Scheduler: cron(minutes hours day-of-month month"
        " day-of-week *) (empty: no schedule)",
    )
    timezone: str = Field("UTC", max_length=50, description="IANA time zone of the expression")
    max_late_s: int = Field(
        6 * 3600, ge=60, description="Maximum delay in seconds with which a cycle may start after its scheduled time"
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
    """The times at which cycles are due. Methods take timezone-aware datetimes and return times in UTC."""

    expression: str
    zone: ZoneInfo
    cron: str
    """The schedule as a standard cron expression with five fields, in which Sunday is day 0 of the week."""

    @property
    def is_at_most_daily(self) -> bool:
        """Return whether at most one cycle is due per day, so that its date is enough to name it."""
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
            # Skip times that do not exist because the clocks are set forward: they do not survive the round trip
            # through UTC. A time that occurs twice because the clocks are set back is only yielded once.
            if time.astimezone(self.zone).replace(tzinfo=None) == due:
                yield time


def parse_schedule(expression: str, timezone: str = "UTC") -> Schedule:
    """Parse a schedule expression. Raises ValueError with the reason if it is invalid."""
    from cronsim import CronSim, CronSimError  # imported lazily, because most workspaces have no schedule

    def invalid(reason: object) -> ValueError:
        return ValueError(f"{expression!r} with timezone {timezone!r}: {reason}; expected {EXPECTED}")

    try:
        zone = ZoneInfo(timezone)
    except (KeyError, ValueError, OSError) as error:  # unknown, malformed, or a folder of zones
        raise invalid("the time zone is unknown to the tz database (package tzdata)") from error
    form = re.fullmatch(r"cron\((.*)\)", expression.strip())
    fields = form[1].split() if form else []
    if len(fields) != 6:
        raise invalid(f"cron(...) has {len(fields)} fields, not six")
    minutes, hours, day, month, weekday, year = fields
    if (day == "?") == (weekday == "?"):
        raise invalid("exactly one of day-of-month and day-of-week must be ?")
    if year != "*" or "W" in day.upper():
        raise invalid("years and W are not supported")
    if re.search(r"(?<![#/\d])(0|[89]|\d\d+)", weekday):
        raise invalid(f"day-of-week {weekday} is not 1 to 7")
    # EventBridge numbers the days of the week from 1, whereas cron numbers them from 0.
    weekday = "7" if weekday.upper() == "L" else weekday
    weekday = re.sub(r"(?<![#/\d])\d", lambda match: str(int(match[0]) - 1), weekday)
    cron = " ".join((minutes, hours, day, month, weekday)).replace("?", "*")
    try:
        CronSim(cron, datetime(2026, 1, 1))
    except CronSimError as error:
        raise invalid(error) from error
    return Schedule(expression, zone, cron)


def cycle_name(schedule: Schedule, when: datetime) -> str:
    """Return the name of the cycle that is due at `when`, such as `2026-11-20`.

    If several cycles may be due per day, the name includes the time (`2026-11-20-0200`). Dates and times are local to
    the time zone of the schedule, in which no scheduled time occurs twice. Names sort in chronological order.
    """
    wall = when.astimezone(schedule.zone)
    return f"{wall:%Y-%m-%d}" if schedule.is_at_most_daily else f"{wall:%Y-%m-%d-%H%M}"


def due_cycle(
    config: ScheduleConfig, *, scheduled: datetime, now: datetime, claimed: Collection[str]
) -> tuple[str, str]:
    """Return the name of the cycle for a scheduled time, and the reason not to start it (empty: start it).

    Events may arrive late, more than once and out of order. A cycle is therefore not started if a newer one was
    already started, or if it is more than `max_late_s` late. `claimed` contains the names of all started cycles.

    Raises ConfigError if `scheduled` is not a time of the schedule.
    """
    schedule, minute = config.schedule(), scheduled.astimezone(UTC).replace(second=0, microsecond=0)
    if next(schedule.after(minute - timedelta(minutes=1)), None) != minute:  # the times of events include seconds
        near = next(schedule.before(minute)), next(schedule.after(minute))
        raise ConfigError(
            f"{scheduled.isoformat()} is not a scheduled time of {schedule.expression} ({schedule.zone.key})",
            expected=" or ".join(f"{time:%Y-%m-%dT%H:%M:%SZ}" for time in near),
            next_command="change jobs.schedule to match the schedule in EventBridge Scheduler",
        )
    name, last = cycle_name(schedule, minute), cycle_name(schedule, now)
    if name in claimed:
        return name, ""
    form = re.compile(r"\d{4}-\d\d-\d\d" if schedule.is_at_most_daily else r"\d{4}-\d\d-\d\d-\d{4}")
    newer = max((other for other in claimed if form.fullmatch(other) and name < other <= last), default="")
    if newer:
        return name, f"the newer cycle {newer} was already started"
    is_late = now - minute > timedelta(seconds=config.max_late_s)
    return name, "too late (jobs.schedule.max_late_s), deadline MISSED" if is_late else ""
