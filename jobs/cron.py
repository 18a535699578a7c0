"""Schedule expressions of EventBridge Scheduler: `cron(...)`, `rate(...)` and `at(...)`, with a time zone.

Source: the user guide of EventBridge Scheduler, "Schedule types": six fields (minutes hours day-of-month month
day-of-week year), Sunday is 1, one of the two day fields is `?`; a time that the clocks skip in spring is not run, one
that they repeat in autumn is run once; rates count hours of 60 minutes and days of 24 hours from a start.
"""

import calendar
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from itertools import dropwhile, takewhile
from zoneinfo import ZoneInfo

from pipeline.core.errors import ConfigError

# The fields of a cron expression of EventBridge: values, ranges, steps, and the days they choose.
#
# Errors are ValueErrors; jobs/cron.py says which expression they are about.

_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_WEEKDAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "minute": (0, 59),
    "hour": (0, 23),
    "day-of-month": (1, 31),
    "month": (1, 12),
    "day-of-week": (1, 7),
    "year": (1970, 2199),
}
_WORDS: Mapping[str, Mapping[str, int]] = {
    "month": {name: number for number, name in enumerate(_MONTHS, 1)},
    "day-of-week": {name: number for number, name in enumerate(_WEEKDAYS, 1)},
}
_PART = re.compile(r"(\*|\w+)(?:-(\w+))?(?:/(\w+))?")
DayRule = Callable[[int, int], set[int]]
"""(year, month) -> days of that month."""


def field_values(name: str, text: str) -> tuple[int, ...]:
    """All values of a field, ascending. Lists, ranges and steps; `a/n` is every n-th from a to the end."""
    found: set[int] = set()
    for part in text.split(","):
        found.update(_part(name, part))
    return tuple(sorted(found))


def _part(name: str, part: str) -> range:
    low, high = _BOUNDS[name]
    form = _PART.fullmatch(part)
    if form is None:
        raise ValueError(f"{part!r} is no {name}; expected {low}-{high}, a, a-b, * or one of them with /n")
    first, last, step = form.groups()
    if step is not None and name == "day-of-week":
        raise ValueError(f"{part!r}: the day of the week takes no /")
    if first == "*":
        if last is not None:
            raise ValueError(f"{part!r}: * is no end of a range")
        begin, end = low, high
    else:
        begin = _number(name, first)
        end = _number(name, last) if last is not None else high if step is not None else begin
    if end < begin:
        raise ValueError(f"{part!r} runs backwards; expected two ranges")
    every = _step(step)
    return range(begin, end + 1, every)


def _step(text: str | None) -> int:
    if text is None:
        return 1
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise ValueError(f"a step of {text!r}; expected a number from 1")
    return int(text)


def _number(name: str, word: str) -> int:
    low, high = _BOUNDS[name]
    named = _WORDS.get(name, {}).get(word.upper())
    number = named if named is not None else int(word) if word.isascii() and word.isdigit() else -1
    if not low <= number <= high:
        raise ValueError(f"{name} {word!r}; expected {low} to {high}")
    return number


@dataclass(frozen=True)
class CronDays:
    """The days that the last four fields choose."""

    years: tuple[int, ...]
    months: tuple[int, ...]
    rule: DayRule

    @classmethod
    def parse(cls, day_of_month: str, month: str, day_of_week: str, year: str) -> "CronDays":
        """Raises ValueError."""
        if (day_of_month == "?") == (day_of_week == "?"):
            raise ValueError("exactly one of day-of-month and day-of-week must be ?")
        rule = _month_days(day_of_month) if day_of_week == "?" else _week_days(day_of_week)
        return cls(field_values("year", year), field_values("month", month), rule)

    def from_day(self, day: date) -> Iterator[date]:
        """From this day on, oldest first."""
        years = (year for year in self.years if year >= day.year)
        return dropwhile(lambda one: one < day, self._days(years, step=1))

    def down_from_day(self, day: date) -> Iterator[date]:
        """From this day back, newest first."""
        years = (year for year in reversed(self.years) if year <= day.year)
        return dropwhile(lambda one: one > day, self._days(years, step=-1))

    def _days(self, years: Iterator[int], *, step: int) -> Iterator[date]:
        for year in years:
            for month in self.months[::step]:
                yield from (date(year, month, one) for one in sorted(self.rule(year, month))[::step])


def _month_days(text: str) -> DayRule:
    """`L`: the last of the month; `15W`: the working day nearest to the 15th, in the same month."""
    if text == "L":
        return lambda year, month: {_length(year, month)}
    if form := re.fullmatch(r"(\d+)W", text):
        day = _number("day-of-month", form[1])
        return lambda year, month: _nearest_working_day(year, month, day)
    if "L" in text or "W" in text or "?" in text:
        raise ValueError(f"day-of-month {text!r}; L and nW stand alone, others with L or W are not supported")
    values = field_values("day-of-month", text)
    return lambda year, month: {one for one in values if one <= _length(year, month)}


def _week_days(text: str) -> DayRule:
    """`L`: Saturday, the last of the week; `6L`: the last Friday of the month; `3#2`: its second Tuesday."""
    if text == "L":
        return lambda year, month: _weekdays_of(year, month, 7)
    if form := re.fullmatch(r"(\w+)L", text):
        weekday = _number("day-of-week", form[1])
        return lambda year, month: {max(_weekdays_of(year, month, weekday))}
    if form := re.fullmatch(r"(\w+)#(\d+)", text):
        weekday, number = _number("day-of-week", form[1]), int(form[2])
        if not 1 <= number <= 5:
            raise ValueError(f"day-of-week {text!r}; expected #1 to #5")
        return lambda year, month: set(sorted(_weekdays_of(year, month, weekday))[number - 1 : number])
    if "#" in text or "?" in text:
        raise ValueError(f"day-of-week {text!r}; nL and n#k stand alone")
    values = field_values("day-of-week", text)
    return lambda year, month: {one for value in values for one in _weekdays_of(year, month, value)}


def _weekdays_of(year: int, month: int, weekday: int) -> set[int]:
    """Days of a month with a weekday (Sunday is 1)."""
    first = 1 + (weekday - _weekday(date(year, month, 1))) % 7
    return set(range(first, _length(year, month) + 1, 7))


def _nearest_working_day(year: int, month: int, day: int) -> set[int]:
    length = _length(year, month)
    if day > length:
        return set()
    candidates = [
        one for one in range(max(1, day - 2), min(length, day + 2) + 1) if 2 <= _weekday(date(year, month, one)) <= 6
    ]
    return {min(candidates, key=lambda one: (abs(one - day), one))}


def _weekday(day: date) -> int:
    """1 (Sunday) to 7."""
    return day.isoweekday() % 7 + 1


def _length(year: int, month: int) -> int:
    return calendar.monthrange(year, month)[1]


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
