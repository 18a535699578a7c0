"""Tables of plans and of jobs: columns, arrays, what failed."""

import re

import pytest

from jobs.cycle.job_states import EXITED, HOST_TERMINATED, PAGE_ANYWAY, JobRecord, JobState
from jobs.cycle.tables import cost_lines, plan_lines, ran_seconds, shape_text, status_lines, success_line, total_lines
from jobs.plan.resources import Prices
from jobs.plan.spec import JobSpec
from tests.jobs.cycle.cases import TRN1, cycle, job, plan
from tests.jobs.cycle.record_cases import array, bad, good, tried, under_way
from tests.jobs.cycle.test_costs import attempt, ledger, record

PRICES = Prices({"trn1.32xlarge": 20.0}, vcpu=0.05)


def cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


def test_a_plan_of_which_nobody_knows_how_long_it_takes() -> None:
    head, columns, *rows, last = plan_lines(cycle(), {}, PRICES, 3600)
    assert head == f"cycle 2026-11-20 in s3://bucket/relevance, plan {cycle().plan_id[:12]}"
    assert cells(columns) == ["job", "after", "shape", "vCPU", "MiB", "attempts", "limit", "expected", "cost"]
    assert [cells(row) for row in rows] == [
        ["train", "-", "2 nodes x 32 ranks", "128", "480,000", "3", "1h00m", "-", "-"],
        ["embed", "train", "array of 8", "2", "4,096", "3", "1h00m", "-", "-"],
        ["verify", "embed", "1 node", "2", "4,096", "3", "1h00m", "-", "-"],
    ]
    assert last == "no earlier cycle to estimate the duration from"


def test_a_plan_with_its_time_and_dollars_held_against_the_deadline() -> None:
    seconds = {"train": 1800.0, "embed": 360.0, "verify": 36.0}
    *_, train, embed, _, expected, deadline = plan_lines(cycle(), seconds, PRICES, 3600)
    assert cells(train)[-2:] == ["30m00s", "$20.00"]
    assert cells(embed)[-2:] == ["6m00s", "$0.080"]
    assert expected == "expected 36m36s from start to end without waiting for machines, $20.08"
    assert deadline == "within the 1h00m of jobs.sla_s"
    assert plan_lines(cycle(), seconds, PRICES, 600)[-1] == "LATE for the 10m00s of jobs.sla_s"
    assert plan_lines(cycle(), seconds, PRICES, None)[-1] == expected
    known = plan_lines(cycle(), {"train": 60.0}, PRICES, 3600)[-1]
    assert known.startswith("expected - from start to end")
    assert known.endswith("unknown cost (no earlier run of embed, verify)")
    without_prices = plan_lines(cycle(), seconds, Prices({}), None)[-1]
    assert without_prices.endswith("unknown cost (jobs.prices, jobs.vcpu_usd_per_hour)")


@pytest.mark.parametrize(
    ("made", "shape"),
    [
        (job("a", num_nodes=2), "2 nodes"),
        (job("a", resources=TRN1), "1 node x 32 ranks"),
        (job("a", array_size=8, resources=TRN1), "array of 8 x 32 ranks"),
    ],
)
def test_shapes(made: JobSpec, shape: str) -> None:
    assert shape_text(made) == shape


def rows(*records: JobRecord) -> list[list[str]]:
    columns, *lines = status_lines(records)
    assert cells(columns) == ["job", "state", "attempts", "ran", "exit", "why"]
    return [cells(line) for line in lines]


def test_what_is_well_has_no_reason() -> None:
    assert rows(
        good("a", tried(at=(0, 65))), under_way("b", "RUNNING", tried(None, at=None)), under_way("c", "PENDING")
    ) == [
        ["a", "SUCCEEDED", "1", "1m05s", "0"],
        ["b", "RUNNING", "1", "-", "-"],
        ["c", "PENDING", "0", "-", "-"],
    ]


def test_what_failed_says_why_and_what_is_tried_again_too() -> None:
    lost = tried(None, status_reason=HOST_TERMINATED, at=(0, 10))
    assert rows(
        bad("a", lost, tried(65, at=(100, 130))),
        bad("b"),
        bad("report"),
        under_way("c", "RUNNABLE", tried(75), why=EXITED),
        under_way("d", "RUNNABLE", why="CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"),
    ) == [
        ["a", "FAILED", "2 (1 preempted)", "2m10s", "65", "exit code 65 (DataError)"],
        ["b", "NOT RUN", "0", "-", "-", "a failed"],
        ["report", "NOT RUN", "0", "-", "-", PAGE_ANYWAY],
        ["c", "RUNNABLE", "1", "1s", "75", "exit code 75 (TransientError)"],
        ["d", "RUNNABLE", "0", "-", "-", "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY"],
    ]


def test_an_array_is_counted_and_its_failed_children_have_rows_of_their_own() -> None:
    children = good("e:0"), bad("e:1", tried(75), tried(65, at=(3, 9))), good("e:2"), under_way("e:3", "RUNNING")
    assert rows(array("e", "PENDING", *children)) == [
        ["e", "PENDING 2/4", "4", "9s", "65"],
        ["e:1", "FAILED", "2", "9s", "65", "exit code 65 (DataError)"],
    ]
    assert rows(array("e", "FAILED", *children[:2], why=EXITED))[0] == [
        *("e", "FAILED 1/2", "3", "9s", "65", "exit code 65 (DataError)")
    ]


def test_from_the_first_start_to_the_last_end() -> None:
    assert ran_seconds(under_way("a", "PENDING")) is None
    assert ran_seconds(good("a", tried(75, at=(5, 6)), tried(at=(50, 60)))) == 55
    assert ran_seconds(under_way("a", "RUNNING", tried(75, at=(5, 6)), tried(None, at=None))) == 1


# Ledgers.

SHAPE = plan(job("prepare", resources=TRN1), job("train", "prepare", resources=TRN1, num_nodes=2))
GOOD = ledger(
    SHAPE,
    [record("prepare", attempt(10, 70)), record("train", attempt(80, 200, 75), attempt(200, 800))],
    deadline_at=1000.0,
)


def words(lines: list[str], first: str) -> list[str]:
    return next(line.split() for line in lines if line.split()[:1] == [first])


def test_a_row_a_stage_and_one_for_the_cycle() -> None:
    lines = cost_lines(GOOD)
    assert lines[0] == (
        "cycle 2026-11-20: succeeded in 13m20s, deadline met | 2 of 2 jobs in 3 attempts | goodput 84% |"
        " $8.96, $1.43 of it wasted"
    )
    assert words(lines, "prepare")[1:3] == ["1", "10s"]
    assert words(lines, "train")[-3:] == ["24m00s", "83%", "$8.60"]
    assert words(lines, "2026-11-20")[-3:] == ["25m00s", "84%", "$8.96"]
    lines = cost_lines(ledger(plan(job("prepare")), [record("prepare", attempt(0, 60))]))
    assert "cost unknown" in lines[0] and words(lines, "prepare")[-1] == "-"
    begun = ledger(SHAPE, [record("prepare", state=JobState.RUNNABLE)], outcome=None, deadline_at=20_000.0)
    assert ": under way, deadline ahead | 0 of 1 jobs in 0 attempts | goodput - | $0.00" in cost_lines(begun)[0]


def test_several_cycles() -> None:
    bad = ledger(SHAPE, [record("prepare", attempt(0, 60, 65))], outcome="failed", deadline_at=1000.0)
    assert success_line([GOOD, bad]) == ("1 of 2 cycles done | 2 of 3 jobs succeeded | 1 of 2 deadlines met")
    assert success_line([]) == ""
    assert len(total_lines([GOOD, bad])) == 6
