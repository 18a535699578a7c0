"""Schedule expressions of EventBridge Scheduler: `cron(...)`, `rate(...)` and `at(...)`, with a time zone.

Source: the user guide of EventBridge Scheduler, "Schedule types": six fields (minutes hours day-of-month month
day-of-week year), Sunday is 1, one of the two day fields is `?`; a time that the clocks skip in spring is not run, one
that they repeat in autumn is run once; rates count hours of 60 minutes and days of 24 hours from a start.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import takewhile
from zoneinfo import ZoneInfo

from jobs.core.cron_fields import CronDays, field_values
from pipeline.core.errors import ConfigError

_FORM = re.compile(r"(cron|rate|at)\((.*)\)")
_UNITS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
_FIRST = datetime(1969, 12, 30, tzinfo=UTC)
_GRAMMAR = "cron(minutes hours day-of-month month day-of-week year), rate(n unit) or at(yyyy-mm-ddThh:mm:ss)"


@dataclass(frozen=True)
class Cron:
    """Certain minutes of certain days by the clocks of a zone."""

    hours: tuple[int, ...]
    minutes: tuple[int, ...]
    days: CronDays
    zone: tzinfo

    @property
    def is_at_most_daily(self) -> bool:
        return len(self.hours) * len(self.minutes) == 1

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Times from `instant` on, in UTC, oldest first; not endless: the last year is 2199."""
        # A local day may begin up to a day before or after that of UTC.
        for day in self.days.from_day(_day(instant, -1)):
            yield from (one for one in self._times(day) if one >= instant)

    def before(self, instant: datetime) -> Iterator[datetime]:
        """Times before `instant`, in UTC, newest first."""
        for day in self.days.down_from_day(_day(instant, 1)):
            yield from (one for one in reversed(self._times(day)) if one < instant)

    def _times(self, day: date) -> list[datetime]:
        walls = [datetime.combine(day, time(hour, minute)) for hour in self.hours for minute in self.minutes]
        instants = [(wall, wall.replace(tzinfo=self.zone).astimezone(UTC)) for wall in walls]
        # A wall time that the clocks skip does not come back from UTC as itself.
        return [one for wall, one in instants if one.astimezone(self.zone).replace(tzinfo=None) == wall]


@dataclass(frozen=True)
class Rate:
    """Every `interval`, counted from `start`."""

    interval: timedelta
    start: datetime

    @property
    def is_at_most_daily(self) -> bool:
        return self.interval >= timedelta(days=1)

    def after(self, instant: datetime) -> Iterator[datetime]:
        """Times from `instant` on, oldest first; endless."""
        number = max(0, -((self.start - instant) // self.interval))
        while True:
            if (found := self.start + number * self.interval) >= instant:
                yield found
            number += 1

    def before(self, instant: datetime) -> Iterator[datetime]:
        """Times before `instant`, newest first."""
        number = (instant - self.start) // self.interval
        while number >= 0:
            if (found := self.start + number * self.interval) < instant:
                yield found
            number -= 1


@dataclass(frozen=True)
class Once:
    """One time."""

    when: datetime

    @property
    def is_at_most_daily(self) -> bool:
        return True

    def after(self, instant: datetime) -> Iterator[datetime]:
        yield from [self.when] if self.when >= instant else []

    def before(self, instant: datetime) -> Iterator[datetime]:
        yield from [self.when] if self.when < instant else []


@dataclass(frozen=True)
class Schedule:
    """When cycles are due. All instants are aware; those given back are in UTC."""

    expression: str
    zone: ZoneInfo
    times: Cron | Rate | Once

    @property
    def is_at_most_daily(self) -> bool:
        """Whether no two times fall on one day, so that a date names a cycle."""
        return self.times.is_at_most_daily

    def next(self, instant: datetime) -> datetime | None:
        """The first time after `instant`; None when there is none."""
        return next((one for one in self.times.after(instant) if one > instant), None)

    def previous(self, instant: datetime) -> datetime | None:
        """The last time before `instant`; None when there is none."""
        return next(self.times.before(instant), None)

    def between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Times from `start` to before `end`, oldest first."""
        return takewhile(lambda one: one < end, self.times.after(start))

    def is_due(self, instant: datetime) -> bool:
        """Whether this minute is one of the times: the scheduler promises no more than the minute."""
        minute = instant.replace(second=0, microsecond=0)
        return any(self.between(minute, minute + timedelta(minutes=1)))


def parse_schedule(expression: str, timezone: str = "UTC", *, start: datetime | None = None) -> Schedule:
    """A schedule. `start`: the first time of a rate. Raises ConfigError, also when it can never fire."""
    zone = _zone(timezone)
    form = _FORM.fullmatch(expression.strip())
    if form is None:
        raise _refused(expression, "no such expression", _GRAMMAR)
    kind, inner = form[1], form[2].strip()
    if kind == "cron":
        return Schedule(expression, zone, _cron(expression, inner, zone))
    return Schedule(expression, zone, _at(expression, inner, zone) if kind == "at" else _rate(expression, inner, start))


def _cron(expression: str, inner: str, zone: ZoneInfo) -> Cron:
    fields = inner.split()
    if len(fields) != 6:
        raise _refused(expression, f"{len(fields)} fields", f"six: {_GRAMMAR}")
    try:
        minutes, hours, day_of_month, month, day_of_week, year = fields
        days = CronDays.parse(day_of_month, month, day_of_week, year)
        made = Cron(field_values("hour", hours), field_values("minute", minutes), days, zone)
    except ValueError as error:
        raise _refused(expression, str(error), "what the user guide of EventBridge Scheduler describes") from error
    if next(made.after(_FIRST), None) is None:
        raise _refused(expression, "no such time in any of its years", "times that exist")
    return made


def _rate(expression: str, inner: str, start: datetime | None) -> Rate:
    form = re.fullmatch(r"(\d+)\s+(minute|hour|day)s?", inner)
    if form is None or int(form[1]) == 0:
        raise _refused(expression, "no rate", "rate(n unit), n from 1, unit minutes, hours or days")
    if start is None or start.tzinfo is None:
        seen = "a rate without a start" if start is None else f"the start {start} has no offset"
        raise _refused(expression, seen, "jobs.schedule.start, such as 2026-11-20T02:00:00Z")
    return Rate(int(form[1]) * _UNITS[form[2]], start.astimezone(UTC))


def _at(expression: str, inner: str, zone: ZoneInfo) -> Once:
    try:
        wall = datetime.strptime(inner, "%Y-%m-%dT%H:%M:%S")
    except ValueError as error:
        raise _refused(expression, "no time", "at(yyyy-mm-ddThh:mm:ss)") from error
    instant = wall.replace(tzinfo=zone).astimezone(UTC)
    if instant.astimezone(zone).replace(tzinfo=None) != wall:
        raise _refused(expression, f"the clocks of {zone.key} skip this time", "a time that exists")
    return Once(instant)


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:  # not found, no such form, a folder of zones
        raise ConfigError(
            f"time zone {name!r} is not known",
            expected="an IANA name such as UTC or Europe/Berlin, and the tz database (package tzdata)",
            next_command="correct jobs.schedule.timezone",
        ) from error


def _refused(expression: str, seen: str, expected: str) -> ConfigError:
    return ConfigError(
        f"schedule {expression!r}: {seen}", expected=expected, next_command="correct jobs.schedule.expression"
    )


def _day(instant: datetime, days: int) -> date:
    """The day of UTC, moved, within what a calendar holds."""
    ordinal = instant.astimezone(UTC).date().toordinal() + days
    return date.fromordinal(min(max(ordinal, 1), date.max.toordinal()))
