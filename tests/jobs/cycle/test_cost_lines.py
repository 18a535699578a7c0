"""Ledgers for a terminal."""

from jobs.cycle.job_records import JobState
from jobs.cycle.ledger import success_of
from jobs.cycle.tables import cost_lines, success_line, total_lines
from tests.jobs.cycle.cases import TRN1, job, plan
from tests.jobs.cycle.test_ledger import attempt, ledger, record

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
        "cycle 2026-11-20: succeeded in 13m20s, deadline met | 2 of 2 jobs in 3 tries | goodput 84% |"
        " $8.96, $1.43 of it wasted"
    )
    assert words(lines, "prepare")[1:3] == ["1", "10s"]
    assert words(lines, "train") == [
        "train",
        "2",
        "10s",
        "-",
        "-",
        "-",
        "20m00s",
        "-",
        "-",
        "4m00s",
        "24m00s",
        "83%",
        "$8.60",
    ]
    assert words(lines, "2026-11-20")[-3:] == ["25m00s", "84%", "$8.96"]


def test_an_unknown_price_is_not_zero() -> None:
    lines = cost_lines(ledger(plan(job("prepare")), [record("prepare", attempt(0, 60))]))
    assert "cost unknown" in lines[0] and words(lines, "prepare")[-1] == "-"


def test_a_cycle_under_way() -> None:
    lines = cost_lines(ledger(SHAPE, [record("prepare", state=JobState.RUNNABLE)], outcome=None, deadline_at=20_000.0))
    assert lines[0].startswith(
        "cycle 2026-11-20: under way, deadline ahead | 0 of 1 jobs in 0 tries | goodput - | $0.00"
    )


def test_several_cycles() -> None:
    bad = ledger(SHAPE, [record("prepare", attempt(0, 60, 65))], outcome="failed", deadline_at=1000.0)
    assert success_line(success_of([GOOD, bad])) == (
        "1 of 2 cycles done (50%) | 2 of 3 jobs succeeded (67%) | 1 of 2 deadlines met"
    )
    assert success_line(success_of([])) == "0 of 0 cycles done (-) | 0 of 0 jobs succeeded (-)"
    assert len(total_lines([GOOD, bad])) == 6
