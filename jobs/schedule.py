"""When cycles are due, and which to start now: from the schedule, the clock and the cycles started already. Pure.

EventBridge Scheduler starts the driver. Its expression is made from `every` and `at`, or given as it takes it, and then
AWS checks most of it. Times are worked out here for what repeats by minutes, hours and days of the week, and for rates:
of other expressions (days of the month, L, W, #, at) the only time known is the one that the scheduler delivers.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from enum import StrEnum
from itertools import count
from typing import Self
from zoneinfo import ZoneInfo

from pydantic import AwareDatetime, Field, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record

_WEEK = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")  # 1 to 7
_UNITS = {"minute": timedelta(minutes=1), "hour": timedelta(hours=1), "day": timedelta(days=1)}
_GRAMMAR = "cron(minutes hours day-of-month month day-of-week year), rate(n unit) or at(yyyy-mm-ddThh:mm:ss)"
_INSTANT, _DAY = timedelta(microseconds=1), timedelta(days=1)
_LOOKED_BACK_DAYS = 400


class MissedPolicy(StrEnum):
    """What to do about times at which no cycle was started: the driver was down, or an earlier cycle still ran."""

    SKIP = "skip"
    """Nothing: only the cycle of the scheduled time is started."""
    CATCH_UP = "catch_up"
    """Every missed cycle is started, the oldest first, each when the one before has ended."""
    COALESCE = "coalesce"
    """One cycle, named by the newest time that has passed, stands for all that were missed."""


class ScheduleConfig(Record):
    """The schedule of cycles; the same as that of EventBridge Scheduler, which starts the driver."""

    every: str = Field(
        "", description="day, days of the week (mon-fri or mon,thu), N hours or N minutes; or expression"
    )
    at: str = Field(
        "02:00", pattern=r"^([01]\d|2[0-3]):[0-5]\d$", description="Time of every, by the clocks of timezone"
    )
    expression: str = Field(
        "",
        description="cron(...), rate(...) or at(...) as EventBridge Scheduler takes it; empty: no schedule, or every",
    )
    timezone: str = Field("UTC", max_length=50, description="IANA name of the zone that cron(...) is read in")
    start: AwareDatetime | None = Field(None, description="First time of a rate(...), with its offset")
    policy: MissedPolicy = Field(
        MissedPolicy.COALESCE, description="Missed cycles: skip, catch_up (each, oldest first) or coalesce (the newest)"
    )
    max_late_s: int = Field(
        6 * 3600, ge=60, description="Seconds after its scheduled time at which a cycle is not started any more"
    )

    @property
    def is_set(self) -> bool:
        return bool(self.every or self.expression)

    @model_validator(mode="after")
    def _check_expression(self) -> Self:
        if self.every and self.expression:
            raise ValueError("both every and expression; expected one of them")
        if self.is_set:
            try:
                self.schedule()
            except ConfigError as error:
                raise ValueError(f"{error.seen}; expected {error.expected}") from error
        return self

    def schedule(self) -> "Schedule":
        """Raises ConfigError without one, or for one that cannot be."""
        if not self.is_set:
            raise ConfigError(
                "jobs.schedule.expression is empty",
                expected="when cycles are due, such as cron(0 2 * * ? *)",
                next_command="set it to the expression of the schedule that starts the driver",
            )
        try:
            expression = self.expression or expression_of(self.every, self.at)
            return parse_schedule(expression, self.timezone, start=self.start)
        except ValueError as error:
            seen, _, expected = str(error).partition("; expected ")
            raise ConfigError(
                f"schedule {self.expression or f'every {self.every}'!r}: {seen}",
                expected=expected,
                next_command="correct jobs.schedule",
            ) from error


def expression_of(every: str, at: str) -> str:
    """The expression for EventBridge Scheduler. Raises ValueError."""
    hour, minute = map(int, at.split(":"))
    if every == "day":
        return f"cron({minute} {hour} * * ? *)"
    if form := re.fullmatch(r"(\d+) (hour|minute)s?", every):
        step, whole = int(form[1]), 24 if form[2] == "hour" else 60
        if not step or whole % step:
            raise ValueError(f"{every!r} does not divide a day or an hour; expected a divisor of {whole}")
        return (
            f"cron({minute} {hour % step}/{step} * * ? *)" if whole == 24 else f"cron({minute % step}/{step} * * * ? *)"
        )
    _values(every.upper(), 1, 7, _WEEK)
    return f"cron({minute} {hour} ? * {every.upper()} *)"


@dataclass(frozen=True)
class Schedule:
    """When cycles are due. All instants are aware; those given back are in UTC."""

    expression: str
    zone: ZoneInfo
    walls: tuple[time, ...] = ()
    """By the clocks of the zone, on each of `weekdays` (Sunday is 1)."""
    weekdays: frozenset[int] = frozenset()
    interval: timedelta | None = None
    """Of a rate, from `start`; it does not follow the clocks."""
    start: datetime = datetime(1970, 1, 1, tzinfo=UTC)

    @property
    def is_known(self) -> bool:
        """Whether its times can be worked out."""
        return bool(self.walls) or self.interval is not None

    @property
    def is_at_most_daily(self) -> bool:
        """Whether no two times fall on one day, so that a date names a cycle."""
        if self.interval is not None:
            return self.interval >= _DAY
        return len(self.walls) == 1 or re.match(r"cron\(\d+ \d+ |at\(", self.expression) is not None

    def between(self, start: datetime, end: datetime) -> Iterator[datetime]:
        """Times from `start` to before `end`, oldest first."""
        if self.interval is not None:
            first = max(0, -((self.start - start) // self.interval))
            times = (self.start + number * self.interval for number in count(max(0, first - 1)))
        else:
            # a local day may begin up to a day before or after that of UTC
            days = (start.astimezone(UTC).date() + (number - 1) * _DAY for number in range((end - start).days + 4))
            times = (one for day in days for one in self._of_day(datetime.combine(day, time())))
        for one in times:
            if one >= end:
                return
            if one >= start:
                yield one

    def before(self, instant: datetime) -> Iterator[datetime]:
        """Times before `instant` of about the last year, newest first."""
        for number in range(_LOOKED_BACK_DAYS):
            end = instant - number * _DAY
            yield from reversed(list(self.between(end - _DAY, end)))

    def next(self, instant: datetime) -> datetime | None:
        """The first time after `instant`; None when it is not known."""
        end = max(instant, self.start) + (self.interval or _LOOKED_BACK_DAYS * _DAY) + _DAY
        return next(self.between(instant + _INSTANT, end), None)

    def _of_day(self, day: datetime) -> list[datetime]:
        if day.isoweekday() % 7 + 1 not in self.weekdays:
            return []
        walls = [datetime.combine(day, wall) for wall in self.walls]
        instants = [(wall, wall.replace(tzinfo=self.zone).astimezone(UTC)) for wall in walls]
        # What the clocks skip in spring is not run: it does not come back from UTC as itself. What they repeat is
        # run once.
        return [one for wall, one in instants if one.astimezone(self.zone).replace(tzinfo=None) == wall]


def parse_schedule(expression: str, timezone: str = "UTC", *, start: datetime | None = None) -> Schedule:
    """The schedule of an expression. Raises ValueError for what has not the form of one."""
    try:
        zone = ZoneInfo(timezone)
    except (KeyError, ValueError, OSError) as error:  # not found, no such form, a folder of zones
        raise ValueError(
            f"time zone {timezone!r} is not known; expected an IANA name such as UTC or Europe/Berlin,"
            " and the tz database (package tzdata)"
        ) from error
    form = re.fullmatch(r"(cron|rate|at)\((.*)\)", expression.strip())
    if form is None:
        raise ValueError(f"no such expression; expected {_GRAMMAR}")
    if form[1] == "at":
        return Schedule(expression, zone)
    if form[1] == "rate":
        rate = re.fullmatch(r"([1-9]\d*)\s+(minute|hour|day)s?", form[2].strip())
        if rate is None:
            raise ValueError("no rate; expected rate(n unit), n from 1, unit minutes, hours or days")
        if start is None or start.tzinfo is None:
            raise ValueError("a rate without a start; expected jobs.schedule.start, such as 2026-11-20T02:00:00Z")
        interval = int(rate[1]) * _UNITS[rate[2]]
        return Schedule(expression, zone, interval=interval, start=start.astimezone(UTC))
    fields = form[2].split()
    if len(fields) != 6:
        raise ValueError(f"{len(fields)} fields; expected six: {_GRAMMAR}")
    minutes, hours, day, month, weekdays, year = fields
    if (day == "?") == (weekdays == "?"):
        raise ValueError("? in both days or in none; expected it in exactly one of day-of-month and day-of-week")
    if day not in "?*" or (month, year) != ("*", "*") or re.search("[L#]", weekdays.upper()):
        return Schedule(expression, zone)
    walls = [time(hour, minute) for hour in _values(hours, 0, 23) for minute in _values(minutes, 0, 59)]
    week = range(1, 8) if weekdays == "?" else _values(weekdays.upper(), 1, 7, _WEEK)
    return Schedule(expression, zone, tuple(walls), frozenset(week))


def _values(field: str, low: int, high: int, words: tuple[str, ...] = ()) -> list[int]:
    """All values of a field: a, a-b, * or a list of them, each with /n. Raises ValueError."""
    found = set[int]()
    for part in field.split(","):
        form = re.fullmatch(r"(\*|\w+)(?:-(\w+))?(?:/([1-9]\d*))?", part)
        texts = [one for one in form.groups()[:2] if one and one != "*"] if form else []
        try:
            ends = [words.index(one) + low if one in words else int(one) for one in texts]
        except ValueError:
            ends = [-1]
        if form is None or not all(low <= one <= high for one in ends) or ends != sorted(ends):
            raise ValueError(f"{part!r} in {field}; expected {low}-{high}, a, a-b, * or one of them with /n")
        first = ends[0] if ends else low
        last = ends[-1] if ends and (len(ends) == 2 or form[3] is None) else high
        found.update(range(first, last + 1, int(form[3] or 1)))
    return sorted(found)


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
    wall = when.astimezone(UTC if schedule.interval is not None else schedule.zone)
    return f"{wall:%Y-%m-%d}" if schedule.is_at_most_daily else f"{wall:%Y-%m-%d-%H%M}"


def due_cycles(config: ScheduleConfig, *, scheduled: datetime, now: datetime, claimed: Collection[str]) -> Due:
    """What a delivery for `scheduled` should start. `claimed`: names of all cycles that were started before.

    Deliveries come late, twice and out of order: no cycle is started after a newer one, none later than `max_late_s`.
    Raises ConfigError when the schedule has no such time.
    """
    schedule = config.schedule()
    when = _on_schedule(schedule, scheduled)
    name = cycle_name(schedule, when)
    if name in claimed:
        return Due((when,))
    newer = [one for one in schedule.between(when, now + _INSTANT) if one > when]
    names = [cycle_name(schedule, one) for one in newer]
    if not schedule.is_known:  # those that were started under a name of this schedule
        form = re.compile(r"\d{4}-\d\d-\d\d" if schedule.is_at_most_daily else r"\d{4}-\d\d-\d\d-\d{4}")
        last = cycle_name(schedule, now)
        names = sorted(one for one in claimed if form.fullmatch(one) and name < one <= last)
    if started := [one for one in names if one in claimed]:
        return Due((), (Passed(when, f"cycle {started[-1]} is newer and was started before"),))
    oldest = now - timedelta(seconds=config.max_late_s)
    missed = list[datetime]()  # oldest first, since the last cycle that was started; none before the first cycle ever
    if any(one < name for one in claimed):
        for one in schedule.before(when):
            if one < oldest or cycle_name(schedule, one) in claimed:
                break
            missed.insert(0, one)
    start, passed = [when], [Passed(one, "missed, and the policy is skip") for one in missed]
    if config.policy is MissedPolicy.COALESCE:
        times = [*missed, when, *newer]
        reason = f"coalesced into {cycle_name(schedule, times[-1])}"
        start, passed = times[-1:], [Passed(one, reason) for one in times[:-1]]
    elif config.policy is MissedPolicy.CATCH_UP:
        start, passed = [*missed, when], []
    late = [Passed(one, "too late (jobs.schedule.max_late_s)") for one in start if one < oldest]
    return Due(tuple(one for one in start if one >= oldest), (*passed, *late))


def _on_schedule(schedule: Schedule, scheduled: datetime) -> datetime:
    """The exact time meant. The scheduler gives the second, the schedule means the minute."""
    minute = scheduled.astimezone(UTC).replace(second=0, microsecond=0)
    if not schedule.is_known:
        return minute
    found = next(schedule.between(minute, minute + timedelta(minutes=1)), None)
    if found is None:
        before, after = next(schedule.before(minute), None), schedule.next(minute)
        raise ConfigError(
            f"{scheduled.isoformat()} is no time of {schedule.expression} ({schedule.zone.key})",
            expected=" or ".join(f"{one:%Y-%m-%dT%H:%M:%SZ}" for one in (before, after) if one),
            next_command="make jobs.schedule and the schedule of EventBridge the same",
        )
    return found
