"""Which cycles are due: late, double, missed and out-of-order deliveries, under every policy."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.schedule import Due, MissedPolicy, ScheduleConfig, cycle_name, due_cycles, parse_schedule
from pipeline.core.errors import ConfigError

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
AT_TWO = datetime(2026, 11, 20, 2, tzinfo=UTC)


def config(policy: str, max_late: timedelta = 6 * HOUR, expression: str = "cron(0 2 * * ? *)") -> ScheduleConfig:
    return ScheduleConfig(expression=expression, policy=MissedPolicy(policy), max_late_s=int(max_late.total_seconds()))


def days(due: Due) -> tuple[list[int], list[int]]:
    """(started, passed) by day of the month."""
    return [one.day for one in due.start], [one.when.day for one in due.passed]


@pytest.mark.parametrize(
    ("policy", "claimed", "now", "started", "passed"),
    [
        ("skip", [], AT_TWO, [20], []),
        ("catch_up", [], AT_TWO, [20], []),
        ("coalesce", [], AT_TWO, [20], []),
        # A second delivery: go on with the cycle, whatever the time.
        ("skip", ["2026-11-20"], AT_TWO + 3 * DAY, [20], []),
        ("coalesce", ["2026-11-20"], AT_TWO + 3 * DAY, [20], []),
        # Two missed days.
        ("skip", ["2026-11-17"], AT_TWO, [20], [18, 19]),
        ("catch_up", ["2026-11-17"], AT_TWO, [18, 19, 20], []),
        ("coalesce", ["2026-11-17"], AT_TWO, [20], [18, 19]),
        # Cycles with other names are not of the schedule, but tell that it is not the first.
        ("catch_up", ["2026-01-01-test"], AT_TWO + HOUR, [14, 15, 16, 17, 18, 19, 20], []),
        # Late by a day and a half: the 21st has passed too.
        ("skip", ["2026-11-19"], AT_TWO + 36 * HOUR, [20], []),
        ("catch_up", ["2026-11-19"], AT_TWO + 36 * HOUR, [20], []),
        ("coalesce", ["2026-11-19"], AT_TWO + 36 * HOUR, [21], [20]),
        # Out of order: the 21st was started before the delivery for the 20th came.
        ("skip", ["2026-11-19", "2026-11-21"], AT_TWO + 36 * HOUR, [], [20]),
        ("catch_up", ["2026-11-19", "2026-11-21"], AT_TWO + 36 * HOUR, [], [20]),
        ("coalesce", ["2026-11-19", "2026-11-21"], AT_TWO + 36 * HOUR, [], [20]),
    ],
)
def test_policies(policy: str, claimed: list[str], now: datetime, started: list[int], passed: list[int]) -> None:
    due = due_cycles(config(policy, 7 * DAY), scheduled=AT_TWO, now=now, claimed=claimed)
    assert days(due) == (started, passed)


@pytest.mark.parametrize(
    ("policy", "started", "passed"), [("skip", [], [19, 20]), ("catch_up", [], [20]), ("coalesce", [], [19, 20])]
)
def test_too_late_is_not_started(policy: str, started: list[int], passed: list[int]) -> None:
    """The retry of a scheduler that was down starts no cycle of yesterday."""
    late = AT_TWO + 6 * HOUR + timedelta(seconds=1)
    due = due_cycles(config(policy), scheduled=AT_TWO, now=late, claimed=["2026-11-18"])
    assert days(due)[0] == started
    assert due.passed[-1].reason.startswith("too late")
    assert days(due_cycles(config(policy), scheduled=AT_TWO, now=AT_TWO + 6 * HOUR, claimed=[]))[0] == [20]


@given(
    policy=st.sampled_from([*MissedPolicy]),
    claimed=st.sets(st.integers(1, 28)),
    scheduled=st.integers(1, 28),
    late_h=st.integers(0, 100),
    max_late_h=st.integers(1, 200),
)
@settings(max_examples=150, deadline=None)
def test_what_holds_for_every_policy(
    policy: MissedPolicy, claimed: set[int], scheduled: int, late_h: int, max_late_h: int
) -> None:
    when = datetime(2026, 5, scheduled, 2, tzinfo=UTC)
    now, names = when + late_h * HOUR, [f"2026-05-{one:02d}" for one in claimed]
    due = due_cycles(config(policy, max_late_h * HOUR), scheduled=when, now=now, claimed=names)
    assert list(due.start) == sorted(set(due.start))
    new = [one for one in due.start if f"{one:%Y-%m-%d}" not in names]
    assert all(now - one <= max_late_h * HOUR for one in new), "late"
    assert all(one <= now for one in new), "before its time"
    newest = max((day for day in claimed if datetime(2026, 5, day, 2, tzinfo=UTC) <= now), default=0)
    assert all(one >= datetime(2026, 5, max(1, newest), tzinfo=UTC) for one in new), "after a newer one"
    if policy is not MissedPolicy.CATCH_UP:
        assert len(due.start) <= 1
    again = [*names, *(f"{one:%Y-%m-%d}" for one in due.start)]
    second = due_cycles(config(policy, max_late_h * HOUR), scheduled=when, now=now, claimed=again)
    assert set(second.start) <= set(due.start), "a second delivery starts nothing new"


def test_names() -> None:
    def name(expression: str, when: datetime, zone: str = "UTC") -> str:
        return cycle_name(parse_schedule(expression, zone, start=AT_TWO), when)

    assert name("cron(0 2 * * ? *)", AT_TWO) == "2026-11-20"
    assert name("cron(0 18 * * ? *)", AT_TWO, "America/Los_Angeles") == "2026-11-19"
    assert name("cron(0 2,14 * * ? *)", AT_TWO + 12 * HOUR) == "2026-11-20-1400"
    assert name("rate(1 day)", AT_TWO, "America/Los_Angeles") == "2026-11-20"
    assert name("rate(12 hours)", AT_TWO + 12 * HOUR) == "2026-11-20-1400"


@pytest.mark.parametrize("zone", ["Europe/London", "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("expression", ["cron(30 0 * * ? *)", "cron(0/30 * * * ? *)", "rate(1 hour)", "rate(1 day)"])
def test_names_are_unique_and_sort_as_their_times(expression: str, zone: str) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    schedule = parse_schedule(expression, zone, start=start)
    names = [cycle_name(schedule, one) for one in schedule.between(start, start + 366 * DAY)]
    assert names == sorted(set(names))


def test_a_time_that_is_not_on_the_schedule() -> None:
    with pytest.raises(ConfigError, match=r"2026-11-20T02:00:00Z or 2026-11-21T02:00:00Z"):
        due_cycles(config("skip"), scheduled=AT_TWO + HOUR, now=AT_TWO + HOUR, claimed=[])
    within = due_cycles(config("skip"), scheduled=AT_TWO + timedelta(seconds=43), now=AT_TWO + HOUR, claimed=[])
    assert within.start == (AT_TWO,)


def test_settings_refuse_what_is_no_schedule() -> None:
    for wrong in (
        {"expression": "cron(60 2 * * ? *)"},
        {"every": "day", "expression": "cron(0 2 * * ? *)"},
        {"every": "7 hours"},
        {"every": "someday"},
        {"every": "day", "at": "24:00"},
        {"expression": "daily"},
        {"expression": "rate(1 day)"},
        {"expression": "cron(0 2 * * ? *)", "timezone": "Mars/Base"},
        {"policy": "never"},
        {"max_late_s": 1},
        {"start": "2026-11-20T02:00:00"},
    ):
        with pytest.raises(ValidationError):
            ScheduleConfig.model_validate(wrong)
    with pytest.raises(ConfigError, match="is empty"):
        ScheduleConfig().schedule()
    for every, expression in (("7 hours", ""), ("", "daily")):
        with pytest.raises(ConfigError, match=every or expression):
            ScheduleConfig.model_construct(every=every, expression=expression).schedule()


@pytest.mark.parametrize(
    ("every", "at", "expression", "times"),
    [
        ("day", "02:30", "cron(30 2 * * ? *)", ["2026-11-20T02:30", "2026-11-21T02:30"]),
        ("mon-fri", "18:00", "cron(0 18 ? * MON-FRI *)", ["2026-11-20T18:00", "2026-11-23T18:00"]),
        ("mon,thu", "02:00", "cron(0 2 ? * MON,THU *)", ["2026-11-23T02:00", "2026-11-26T02:00"]),
        ("6 hours", "08:15", "cron(15 2/6 * * ? *)", ["2026-11-20T02:15", "2026-11-20T08:15"]),
        ("20 minutes", "00:05", "cron(5/20 * * * ? *)", ["2026-11-20T00:05", "2026-11-20T00:25"]),
    ],
)
def test_every_and_at_make_the_expression(every: str, at: str, expression: str, times: list[str]) -> None:
    schedule = ScheduleConfig(every=every, at=at).schedule()
    assert schedule.expression == expression
    start = AT_TWO.replace(hour=0)
    assert [f"{one:%Y-%m-%dT%H:%M}" for one in schedule.between(start, start + 8 * DAY)][:2] == times


@pytest.mark.parametrize("expression", ["cron(0 2 L * ? *)", "cron(0 2 ? * 3#2 *)", "cron(0 2 1 * ? *)"])
def test_of_times_that_only_the_scheduler_knows_the_delivered_one_is_started(expression: str) -> None:
    given = config("catch_up", expression=expression)
    delivered = AT_TWO + timedelta(seconds=20)
    assert due_cycles(given, scheduled=delivered, now=delivered, claimed=["2026-10-20"]) == Due((AT_TWO,))
    passed = due_cycles(given, scheduled=delivered, now=AT_TWO + 2 * DAY, claimed=["2026-11-21"])
    assert days(passed) == ([], [20])
    late = due_cycles(given, scheduled=delivered, now=AT_TWO + 7 * HOUR, claimed=[])
    assert days(late) == ([], [20])
