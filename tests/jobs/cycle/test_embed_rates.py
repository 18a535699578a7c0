"""Embedding on one machine and on another: measured before stated, nothing made up."""

import re

import pytest

from jobs.cycle.forecast import VCPU, EmbedRun, embed_rate_lines, embed_run
from jobs.cycle.job_records import JobRecord
from jobs.plan.cost import Prices
from jobs.plan.spec import JobSpec
from tests.jobs.cycle.cases import CPU, TRN1, job, plan
from tests.jobs.cycle.record_cases import array, bad, good, tried

PRICES = Prices({"trn1.32xlarge": 21.6}, vcpu=0.036)
ON_CPU, ON_TRN1 = job("embed", array_size=2), job("embed", resources=TRN1, array_size=2)
EMBEDDED = array("embed", "SUCCEEDED", good("embed:0", tried(75, at=(0, 40)), tried(at=(50, 60))), good("embed:1"))


def table(embed: JobSpec, *runs: EmbedRun, **stated: float) -> list[list[str]]:
    lines = embed_rate_lines(plan(job("train", resources=TRN1), embed), runs, {**stated}, PRICES)
    return [re.split(r"  +", line) for line in lines]


@pytest.mark.parametrize(
    ("made", "machine", "machine_s"),
    [
        (ON_CPU, VCPU, 2 * 51.0),  # two vCPUs a child; a try that failed is paid for too
        (ON_TRN1, "trn1.32xlarge", 51.0),
        (job("embed", resources=TRN1.model_copy(update={"vcpus": 32})), "trn1.32xlarge", 51.0 / 4),
        (job("embed", resources=CPU.model_copy(update={"instance_type": "m7i.large"})), "m7i.large", 51.0),
    ],
)
def test_a_cycle_tells_titles_and_machine_seconds(made: JobSpec, machine: str, machine_s: float) -> None:
    assert embed_run("c1", made, EMBEDDED, 1000) == EmbedRun("c1", machine, 1000, machine_s)


@pytest.mark.parametrize(
    ("record", "titles"),
    [
        (EMBEDDED, 0),  # all was carried over
        (bad("embed", tried(65)), 1000),
        (good("embed", tried(at=None)), 1000),
        (good("embed", tried(at=(5.0, 5.0))), 1000),
    ],
)
def test_a_cycle_that_tells_nothing(record: JobRecord, titles: int) -> None:
    assert embed_run("c1", ON_CPU, record, titles) is None


def test_side_by_side() -> None:
    runs = [EmbedRun("c1", VCPU, 1_000, 200.0), EmbedRun("c2", VCPU, 3_000, 200.0)]
    rows = table(ON_CPU, *runs, **{"trn1.32xlarge": 4_000.0, VCPU: 99.0, "inf2.xlarge": 500.0})
    assert rows == [
        ["embed on", "titles/s", "a million titles", "rate"],
        ["1 vCPU (this plan)", "10", "$1.00", "measured in 2 cycles, last c2"],
        ["trn1.32xlarge", "4.00k", "$1.50", "stated in jobs.titles_per_s"],
        ["inf2.xlarge", "500", "-", "stated in jobs.titles_per_s"],  # whose price nobody knows
    ]
    assert table(ON_TRN1, **{VCPU: 10.0})[1:] == [
        ["trn1.32xlarge (this plan)", "-", "-", "no rate known"],
        ["1 vCPU", "10", "$1.00", "stated in jobs.vcpu_titles_per_s"],
    ]


def test_on_sagemaker_a_machine_has_its_price_there() -> None:
    prices = Prices({"trn1.32xlarge": 21.6, "inf2.xlarge": 0.72, "ml.inf2.xlarge": 0.9}, vcpu=0.036, ml_factor=1.5)
    stated = {"trn1.32xlarge": 4_000.0, "inf2.xlarge": 500.0, VCPU: 10.0}
    lines = embed_rate_lines(plan(job("train", resources=TRN1), ON_CPU), [], stated, prices)
    found = {row[0]: row[2] for row in (re.split(r"  +", line) for line in lines[1:])}
    assert found == {"1 vCPU (this plan)": "$1.50", "trn1.32xlarge": "$2.25", "inf2.xlarge": "$0.5000"}


def test_nothing_to_compare() -> None:
    assert embed_rate_lines(plan(job("train"), ON_CPU), [], {}, PRICES) == []
    assert len(embed_rate_lines(plan(job("train"), ON_CPU), [], {VCPU: 1.0}, PRICES)) == 2, "the head, and 1 vCPU"
