"""The fields of a cron expression of EventBridge: values, ranges, steps, and the days they choose.

Errors are ValueErrors; jobs/core/cron.py says which expression they are about.
"""

import calendar
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from itertools import dropwhile

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
