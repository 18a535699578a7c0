"""What the arrays of prepare and mine will take, by what was measured on the planned machine."""

import re

from jobs.cycle.forecast import VCPU, Amount, EmbedRun, array_lines
from jobs.plan.cost import Prices
from tests.jobs.cycle.cases import job, plan

PRICES = Prices({}, vcpu=0.036)
BILLION = Amount(1_000_000_000, 50_000, "rows of the input")


def test_rows_parts_hours_and_dollars() -> None:
    prepare, mine = job("prepare", array_size=100), job("mine", array_size=4)
    assert prepare.resources.vcpus == 2
    runs = {"prepare": [EmbedRun("c1", VCPU, 1_000_000, 50.0), EmbedRun("c2", VCPU, 1_000_000, 50.0)]}
    runs["mine"] = [EmbedRun("c1", "trn1.32xlarge", 5, 1.0)]
    amounts = {"prepare": BILLION, "mine": Amount(9000, 4096, "queries, as in cycle c1")}
    measured = "20,000/s of 1 vCPU, measured in 2 cycles, last c2"
    lines = [re.split("  +", line) for line in array_lines(plan(prepare, mine), amounts, runs, PRICES)]
    assert lines == [
        ["array", "work", "parts", "workers", "each takes", "cost", "rate"],
        # 20,000 rows a second of a vCPU, of which there are 200: 250 s, and 50,000 vCPU seconds in all.
        ["prepare", "1,000,000,000 rows of the input", "20,000", "100", "4m10s", "$0.5000", measured],
        ["mine", "9,000 queries, as in cycle c1", "3", "4", "-", "-", "none measured on this machine"],
    ]


def test_no_array() -> None:
    assert array_lines(plan(job("prepare"), job("mine")), {}, {}, PRICES) == []
