"""What jobs cost."""

import pytest

from jobs.cycle.tables import target_cost_lines
from jobs.plan.cost import Prices, job_usd, node_usd_per_hour
from jobs.plan.spec import JobSpec, Resources
from tests.jobs.cycle.cases import TRN1, job, plan

LIST = Prices({"trn1.32xlarge": 20.0, "p9.huge": 7.0})


def of(vcpus: int, instance: str) -> JobSpec:
    return job("a", resources=Resources(vcpus=vcpus, memory_mib=4096, instance_type=instance))


@pytest.mark.parametrize(
    ("made", "prices", "expected"),
    [
        (of(128, "trn1.32xlarge"), LIST, 20.0),
        (of(64, "trn1.32xlarge"), LIST, 10.0),  # half a machine
        (of(256, "trn1.32xlarge"), LIST, 20.0),  # never more than one
        (of(4, "p9.huge"), LIST, 7.0),  # of a size that nobody knows: all of it
        (of(4, "m7i.large"), LIST, None),
        (of(4, "m7i.large"), Prices({}, vcpu=0.05), 0.2),
        (of(4, ""), Prices({"": 1.0}, vcpu=0.0), 1.0),
        (of(4, ""), Prices({}, vcpu=0.0), 0.0),
    ],
)
def test_the_hour_of_a_node(made: JobSpec, prices: Prices, expected: float | None) -> None:
    assert node_usd_per_hour(made, prices) == (None if expected is None else pytest.approx(expected))


def test_gangs_and_arrays_cost_by_node_and_by_child() -> None:
    assert job_usd(job("a", resources=TRN1), 1800, LIST) == pytest.approx(10)
    assert job_usd(job("a", resources=TRN1, num_nodes=4), 1800, LIST) == pytest.approx(40)
    assert job_usd(job("a", resources=TRN1, array_size=8), 1800, LIST) == pytest.approx(80)
    assert job_usd(job("a"), 1800, LIST) is None
    half = of(64, "trn1.32xlarge").model_copy(update={"num_nodes": 4})
    assert job_usd(half, 1800, LIST) == pytest.approx(40), "nodes of a gang have their machines to themselves"


def test_one_cycle_costs_on_three_targets() -> None:
    of = plan(job("train", resources=TRN1), job("verify", "train"))
    shared = {"trn1.32xlarge": 20.0}
    on = Prices(shared, 0.05)
    ml = Prices(shared | {"ml.m7i.large": 0.2}, 0.05, 1.15)
    lines = target_cost_lines(of, {"train": 3600.0, "verify": 1800.0}, {"local": on, "batch": on, "sagemaker": ml})
    assert [line.split() for line in lines] == [
        ["target", "train", "verify", "cycle"],
        ["local", "$20.00", "$0.0500", "$20.05"],
        ["batch", "$20.00", "$0.0500", "$20.05"],
        ["sagemaker", "$23.00", "$0.1000", "$23.10"],
    ]
    assert target_cost_lines(of, {"train": 1.0}, {"local": on}) == []
