"""Schedule expressions against brute force over minutes."""

import re
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.schedule import Schedule, parse_schedule

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia")
# Around changes of the clocks in those zones, a leap day, the end of a year, and the day that Apia skipped.
DAYS = (
    date(2026, 3, 29),
    date(2026, 10, 25),
    date(2026, 3, 8),
    date(2026, 11, 1),
    date(2026, 4, 5),
    date(2026, 10, 4),
    date(2028, 2, 29),
    date(2026, 12, 31),
    date(2011, 12, 30),
)
MINUTE, DAY = timedelta(minutes=1), timedelta(days=1)


def times(expression: str, zone: str = "UTC", since: str = "2026-01-01", days: int = 366) -> list[str]:
    start = datetime.fromisoformat(since).replace(tzinfo=UTC)
    found = parse_schedule(expression, zone).between(start, start + timedelta(days=days))
    return [f"{one:%Y-%m-%dT%H:%M}" for one in found]


def previous(schedule: Schedule, instant: datetime) -> datetime | None:
    return next(schedule.before(instant), None)


def numbers(low: int, high: int) -> st.SearchStrategy[set[int]]:
    return st.sets(st.integers(low, high), min_size=1, max_size=3)


@given(
    minutes=numbers(0, 59),
    hours=st.one_of(numbers(0, 23), numbers(0, 4), st.just(set(range(24)))),
    weekdays=st.one_of(st.none(), numbers(1, 7)),
    zone=st.sampled_from(ZONES),
    day=st.sampled_from(DAYS),
)
def test_as_brute_force_over_every_minute(
    minutes: set[int],
    hours: set[int],
    weekdays: set[int] | None,
    zone: str,
    day: date,
) -> None:
    """A minute is due when the clocks of the zone show it for the first time that day."""
    days = f"? * {','.join(map(str, weekdays))}" if weekdays else "* * ?"
    lists = ",".join(map(str, minutes)), ",".join(map(str, hours))
    schedule = parse_schedule(f"cron({lists[0]} {lists[1]} {days} *)", zone)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC) - DAY

    def is_due(instant: datetime) -> bool:
        wall = instant.astimezone(ZoneInfo(zone))
        on = not weekdays or wall.isoweekday() % 7 + 1 in weekdays
        return on and wall.minute in minutes and wall.hour in hours and wall.fold == 0

    expected = [one for i in range(3 * 24 * 60) if is_due(one := start + i * MINUTE)]
    end = start + 3 * DAY
    assert [*schedule.between(start, end)] == expected
    if expected:
        middle = expected[len(expected) // 2]
        before = [one for one in expected if one < middle]
        after = [one for one in expected if one > middle]
        assert [previous(schedule, middle)] == before[-1:] or not before
        assert [schedule.next(middle)] == after[:1] or not after


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        ("cron(0 2 * * ? *)", ["2026-01-01T02:00", "2026-01-02T02:00"]),
        ("cron(30 1 ? * MON *)", ["2026-01-05T01:30", "2026-01-12T01:30"]),
        ("cron(30 1 ? * 2 *)", ["2026-01-05T01:30", "2026-01-12T01:30"]),
        ("cron(0 8 ? * mon-fri *)", ["2026-01-01T08:00", "2026-01-02T08:00", "2026-01-05T08:00"]),
        ("cron(1/20 5 * * ? *)", ["2026-01-01T05:01", "2026-01-01T05:21", "2026-01-01T05:41", "2026-01-02T05:01"]),
        ("cron(*/30 0-4/4 * * ? *)", ["2026-01-01T00:00", "2026-01-01T00:30", "2026-01-01T04:00"]),
        ("cron(0 0 L * ? *)", []),
        ("cron(0 0 ? * 3#2 *)", []),
        ("cron(0 0 29 2 ? *)", []),
        ("at(2026-11-20T02:00:00)", []),
    ],
)
def test_fields(expression: str, first: list[str]) -> None:
    assert times(expression)[: max(1, len(first))] == first


def test_a_time_that_the_clocks_skip_is_not_run_and_one_they_repeat_is_run_once() -> None:
    berlin = "cron(30 2 * * ? *)", "Europe/Berlin"
    assert times(*berlin, since="2026-03-28", days=3) == ["2026-03-28T01:30", "2026-03-30T00:30"]
    assert times(*berlin, since="2026-10-24", days=3) == ["2026-10-24T00:30", "2026-10-25T00:30", "2026-10-26T01:30"]


def test_rates_count_from_their_start_whatever_the_clocks_do() -> None:
    start = datetime(2026, 3, 28, 2, tzinfo=UTC)
    daily = parse_schedule("rate(1 day)", "Europe/Berlin", start=start)
    assert [*daily.between(start - DAY, start + 3 * DAY)] == [start, start + DAY, start + 2 * DAY]
    assert (previous(daily, start), daily.next(start)) == (None, start + DAY)
    assert previous(daily, start + DAY + MINUTE) == start + DAY
    assert parse_schedule("rate(90 minutes)", start=start).next(start) == start + 90 * MINUTE


@given(
    interval=st.integers(1, 5000),
    offset=st.integers(-10_000, 10_000),
)
def test_rates_as_brute_force(interval: int, offset: int) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    schedule = parse_schedule(f"rate({interval} minutes)", start=start)
    instant = start + offset * MINUTE
    due = [start + i * interval * MINUTE for i in range(20_100 // interval + 2)]
    assert schedule.next(instant) == next(one for one in due if one > instant)
    assert previous(schedule, instant) == next((one for one in reversed(due) if one < instant), None)


@pytest.mark.parametrize(
    ("expression", "seen"),
    [
        ("0 2 * * *", "no such expression"),
        ("cron(0 2 * * ?)", "5 fields"),
        ("cron(0 2 * * * *)", "exactly one of"),
        ("cron(0 2 ? * ? *)", "exactly one of"),
        ("cron(60 2 * * ? *)", "'60' in 60; expected 0-59"),
        ("cron(0 24 * * ? *)", "expected 0-23"),
        ("cron(0 2 ? * 8 *)", "expected 1-7"),
        ("cron(0 5-2 * * ? *)", "'5-2'"),
        ("cron(0/0 2 * * ? *)", "'0/0'"),
        ("cron(,1 2 * * ? *)", "'' in ,1"),
        ("rate(0 days)", "no rate"),
        ("rate(1 week)", "no rate"),
    ],
)
def test_refused_with_what_was_seen(expression: str, seen: str) -> None:
    with pytest.raises(ValueError, match=re.escape(seen)):
        parse_schedule(expression, "Europe/Berlin", start=datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize("zone", ["Mars/Base", "", "../etc/passwd", "Europe", "UTC+1"])
def test_a_zone_that_is_not_known(zone: str) -> None:
    with pytest.raises(ValueError, match="time zone"):
        parse_schedule("cron(0 2 * * ? *)", zone)


def test_whether_a_date_names_a_cycle() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    daily = ("cron(0 2 * * ? *)", "cron(0 2 ? * MON *)", "rate(24 hours)", "rate(3 days)", "at(2026-01-01T00:00:00)")
    assert all(parse_schedule(one, start=start).is_at_most_daily for one in daily)
    oftener = ("cron(0 2,14 * * ? *)", "cron(*/30 2 * * ? *)", "rate(12 hours)")
    assert not any(parse_schedule(one, start=start).is_at_most_daily for one in oftener)
