"""The driver that the scheduler starts: once, twice, late, beside a cycle that still runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from jobs.commands.driver import WorkspaceCycles, drive, scheduled_time
from jobs.schedule import MissedPolicy, ScheduleConfig
from pipeline.core.errors import ConfigError, TransientError

DAY = timedelta(days=1)
AT_TWO = datetime(2026, 11, 20, 2, tzinfo=UTC)
DAILY = ScheduleConfig(expression="cron(0 2 * * ? *)", max_late_s=7 * 86_400, policy=MissedPolicy.CATCH_UP)


@dataclass
class Cycles:
    """Those of a workspace. `ends`: a submitted cycle is over at once, as on this machine; `codes`: how it ended."""

    states: dict[str, str] = field(default_factory=dict)
    ends: bool = False
    codes: dict[str, int] = field(default_factory=dict)
    submissions: list[str] = field(default_factory=list)
    looks: int = 0

    def claimed(self) -> Sequence[str]:
        self.looks += 1
        return sorted(self.states)

    def newest_under_way(self, names: Sequence[str]) -> str:
        return next((name for name in reversed(names) if not self.has_ended(name)), "")

    def has_ended(self, cycle: str) -> bool:
        if self.states[cycle] == "ending":  # known once its records are looked at
            self.states[cycle] = "ended"
        return self.states[cycle] == "ended"

    def submit(self, cycle: str) -> int:
        self.submissions.append(cycle)
        self.states[cycle] = "ended" if self.ends else "running"
        return self.codes.get(cycle, 0)


def deliver(
    cycles: Cycles, when: datetime = AT_TWO, config: ScheduleConfig = DAILY, now: datetime | None = None
) -> tuple[int, list[str]]:
    said: list[str] = []
    return drive(config, when, now or when, cast(WorkspaceCycles, cycles), said.append), said


def test_it_starts_the_cycle_of_its_time() -> None:
    cycles = Cycles()
    assert deliver(cycles) == (0, [])
    assert (cycles.submissions, cycles.looks) == (["2026-11-20"], 1)


def test_a_second_delivery_goes_on_with_the_cycle_and_starts_no_other() -> None:
    cycles = Cycles()
    for _ in range(3):
        assert deliver(cycles)[0] == 0
    assert cycles.states == {"2026-11-20": "running"}
    cycles.states["2026-11-20"] = "ending"
    assert deliver(cycles) == (0, ["cycle 2026-11-20 has ended already"])
    assert cycles.submissions == ["2026-11-20"] * 3


def test_an_overlap_is_refused_until_the_earlier_cycle_has_ended() -> None:
    cycles = Cycles({"2026-11-19": "running"})
    with pytest.raises(TransientError, match="2026-11-19 is under way: cycle 2026-11-20 would overlap"):
        deliver(cycles)
    assert cycles.submissions == []
    cycles.states["2026-11-19"] = "ending"
    assert deliver(cycles)[0] == 0
    assert cycles.states == {"2026-11-19": "ended", "2026-11-20": "running"}


def test_a_cycle_of_another_name_in_the_workspace_counts_as_well() -> None:
    with pytest.raises(TransientError, match="experiment is under way"):
        deliver(Cycles({"experiment": "running"}))


def test_catching_up_on_batch_one_cycle_at_a_time() -> None:
    cycles = Cycles({"2026-11-17": "ended"})
    started = []
    for _ in range(5):
        code, said = deliver(cycles)
        assert code == 0
        started.append((cycles.submissions[-1], len(said)))
        cycles.states = dict.fromkeys(cycles.states, "ending")
    assert started == [("2026-11-18", 1), ("2026-11-19", 1), ("2026-11-20", 0), ("2026-11-20", 1), ("2026-11-20", 1)]
    assert cycles.submissions == ["2026-11-18", "2026-11-19", "2026-11-20"]


def test_catching_up_on_this_machine_one_after_the_other() -> None:
    cycles = Cycles({"2026-11-17": "ended"}, ends=True, codes={"2026-11-18": 80, "2026-11-20": 75})
    assert deliver(cycles)[0] == 75
    assert cycles.submissions == ["2026-11-18", "2026-11-19", "2026-11-20"]


def test_what_is_not_started_is_said() -> None:
    cycles = Cycles({"2026-11-17": "ended"})
    skip = DAILY.model_copy(update={"policy": MissedPolicy.SKIP})
    assert deliver(cycles, config=skip)[1] == [
        "cycle 2026-11-18 is not started: missed, and the policy is skip",
        "cycle 2026-11-19 is not started: missed, and the policy is skip",
    ]
    late = Cycles()
    assert deliver(late, now=AT_TWO + 30 * DAY)[1] == [
        "cycle 2026-11-20 is not started: too late (jobs.schedule.max_late_s)"
    ]
    assert late.submissions == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-20T02:00:00Z", AT_TWO),
        ("2022-03-22T18:59:43Z", datetime(2022, 3, 22, 18, 59, 43, tzinfo=UTC)),
        ("2026-11-20T03:00:00+01:00", AT_TWO),
        ("", AT_TWO),
    ],
)
def test_the_scheduled_time(text: str, expected: datetime) -> None:
    assert scheduled_time(text, DAILY, AT_TWO + DAY / 2) == expected


@pytest.mark.parametrize(
    "text", ["<aws.scheduler.scheduled-time>", "today", "2026-11-20T02:00:00", "2026-13-01T00:00:00Z"]
)
def test_a_scheduled_time_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="scheduled time"):
        scheduled_time(text, DAILY, AT_TWO)


def test_no_time_has_passed_yet() -> None:
    future = ScheduleConfig(expression="at(2030-01-01T00:00:00)")
    with pytest.raises(ConfigError, match="no time of"):
        scheduled_time("", future, AT_TWO)
