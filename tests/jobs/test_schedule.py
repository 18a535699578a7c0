"""When cycles are due, against brute force over minutes; late, double and out-of-order deliveries."""

import itertools
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.schedule import ScheduleConfig, cycle_name, due_cycle, parse_schedule
from pipeline.core.errors import ConfigError

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
AT_TWO = datetime(2026, 11, 20, 2, tzinfo=UTC)
DAILY = ScheduleConfig(expression="cron(0 2 * * ? *)")
ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Pacific/Apia")
# Around changes of the clocks in those zones, a leap day, the end of a year, and the day that Apia skipped.
DAYS = (
    *(date(2026, month, day) for month, day in ((3, 29), (10, 25), (3, 8), (11, 1), (4, 5), (10, 4), (12, 31))),
    date(2028, 2, 29),
    date(2011, 12, 30),
)


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
    minutes: set[int], hours: set[int], weekdays: set[int] | None, zone: str, day: date
) -> None:
    """A minute is due when the clocks of the zone show it for the first time that day."""
    days = f"? * {','.join(map(str, weekdays))}" if weekdays else "* * ?"
    schedule = parse_schedule(f"cron({','.join(map(str, minutes))} {','.join(map(str, hours))} {days} *)", zone)
    start = datetime(day.year, day.month, day.day, tzinfo=UTC) - DAY

    def is_due(instant: datetime) -> bool:
        wall = instant.astimezone(ZoneInfo(zone))
        on = not weekdays or wall.isoweekday() % 7 + 1 in weekdays
        return on and wall.minute in minutes and wall.hour in hours and wall.fold == 0

    expected = [one for i in range(3 * 24 * 60) if is_due(one := start + i * MINUTE)]
    end = start + 3 * DAY
    assert [*itertools.takewhile(lambda one: one < end, schedule.after(start - MINUTE))] == expected
    assert [*itertools.takewhile(lambda one: one >= start, schedule.before(end))] == expected[::-1]


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        ("cron(0 2 * * ? *)", ["01-01T02:00", "01-02T02:00"]),
        ("cron(30 1 ? * MON *)", ["01-05T01:30", "01-12T01:30"]),
        ("cron(30 1 ? * 2 *)", ["01-05T01:30", "01-12T01:30"]),
        ("cron(0 8 ? * mon-fri *)", ["01-01T08:00", "01-02T08:00", "01-05T08:00"]),
        ("cron(1/20 5 * * ? *)", ["01-01T05:01", "01-01T05:21", "01-01T05:41", "01-02T05:01"]),
        ("cron(*/30 0-4/4 * * ? *)", ["01-01T00:00", "01-01T00:30", "01-01T04:00"]),
        ("cron(0 0 L * ? *)", ["01-31T00:00", "02-28T00:00"]),
        ("cron(0 0 ? * 3#2 *)", ["01-13T00:00", "02-10T00:00"]),
        ("cron(0 0 ? * 6L *)", ["01-30T00:00", "02-27T00:00"]),
    ],
)
def test_fields(expression: str, first: list[str]) -> None:
    times = parse_schedule(expression).after(datetime(2025, 12, 31, 23, 59, tzinfo=UTC))
    assert [f"{one:%m-%dT%H:%M}" for one in itertools.islice(times, len(first))] == first


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"expression": f"cron({fields})"}
            for fields in (
                *("0 2 * * ?", "0 2 * * * *", "0 2 ? * ? *", "60 2 * * ? *", "0 2 ? * 8 *", "0 2 ? * 0 *"),
                *("0 5-2 * * ? *", "0/0 2 * * ? *", ",1 2 * * ? *", "0 2 31 2 ? *", "0 2 15W * ? *", "0 2 * * ? 2027"),
            )
        ),
        *({"expression": one} for one in ("0 2 * * *", "daily", "rate(1 day)", "at(2026-11-20T02:00:00)")),
        *({"expression": DAILY.expression, "timezone": one} for one in ("Mars/Base", "", "../etc/passwd", "UTC+1")),
        {"max_late_s": 1},
        {"every": "day"},  # of an earlier version
    ],
)
def test_settings_refuse_what_is_no_schedule(given: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ScheduleConfig.model_validate(given)


def test_no_schedule_and_settings_of_earlier_versions() -> None:
    with pytest.raises(ConfigError):
        ScheduleConfig().schedule()
    old = {"every": "", "at": "02:00", "expression": DAILY.expression, "start": None, "policy": "skip"}
    assert ScheduleConfig.model_validate(old) == DAILY


@pytest.mark.parametrize("zone", ["Europe/London", "Australia/Lord_Howe"])
@pytest.mark.parametrize("expression", ["cron(30 0 * * ? *)", "cron(0/30 * * * ? *)"])
def test_names_are_unique_and_sort_as_their_times(expression: str, zone: str) -> None:
    start, schedule = datetime(2026, 1, 1, tzinfo=UTC), parse_schedule(expression, zone)
    times = itertools.takewhile(lambda one: one < start + 366 * DAY, schedule.after(start))
    names = [cycle_name(schedule, one) for one in times]
    assert names == sorted(set(names)) and len(names) > 360


@pytest.mark.parametrize(
    ("expression", "zone", "name"),
    [
        ("cron(0 2 * * ? *)", "UTC", "2026-11-20"),
        ("cron(0 18 * * ? *)", "America/Los_Angeles", "2026-11-19"),
        ("cron(0 2,14 * * ? *)", "UTC", "2026-11-20-0200"),
    ],
)
def test_names(expression: str, zone: str, name: str) -> None:
    assert cycle_name(parse_schedule(expression, zone), AT_TWO) == name


@pytest.mark.parametrize(
    ("late", "claimed", "started"),
    [
        (0 * HOUR, [], True),
        (6 * HOUR, [], True),
        (6 * HOUR + MINUTE, [], False),
        (72 * HOUR, ["2026-11-20"], True),  # a second delivery: go on with the cycle, whatever the time
        (0 * HOUR, ["2026-11-17", "2026-11-18-test"], True),  # what was missed is not made up
        (0 * HOUR, ["2026-11-25"], True),  # started by hand, before its time
        (5 * HOUR, ["experiment", "2026-11-21"], True),
        (30 * HOUR, ["2026-11-21"], False),  # out of order
    ],
)
def test_deliveries(late: timedelta, claimed: list[str], started: bool) -> None:
    delivered = AT_TWO + timedelta(seconds=43)  # the scheduler gives the second
    name, reason = due_cycle(DAILY, scheduled=delivered, now=AT_TWO + late, claimed=claimed)
    assert (name, not reason) == ("2026-11-20", started)
    again = due_cycle(DAILY, scheduled=delivered, now=AT_TWO + late, claimed=[*claimed, name])
    assert again == (name, "")


def test_a_time_that_is_not_on_the_schedule() -> None:
    with pytest.raises(ConfigError, match=r"2026-11-20T02:00:00Z or 2026-11-21T02:00:00Z"):
        due_cycle(DAILY, scheduled=AT_TWO + HOUR, now=AT_TWO + HOUR, claimed=[])
