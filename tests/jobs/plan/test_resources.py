"""What jobs cost."""

import pytest

from jobs.plan.resources import Prices, job_usd, node_usd_per_hour, prices_of
from jobs.plan.spec import JobSpec, Resources
from jobs.settings import JobsConfig
from tests.jobs.cycle.cases import TRN1, job

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


SAGEMAKER = prices_of(JobsConfig(prices={"trn1.32xlarge": 20.0, "ml.m7i.large": 0.2}), "sagemaker")


@pytest.mark.parametrize(
    ("made", "prices", "expected"),
    [
        (job("a", resources=TRN1), LIST, 20.0),
        (job("a", resources=TRN1, num_nodes=4), LIST, 80.0),
        (job("a", resources=TRN1, array_size=8), LIST, 160.0),
        (job("a"), LIST, None),
        # nodes of a gang have their machines to themselves
        (of(64, "trn1.32xlarge").model_copy(update={"num_nodes": 4}), LIST, 80.0),
        # on SageMaker machines are whole and cost more
        (job("train", resources=TRN1), SAGEMAKER, 23.0),
        (job("verify"), SAGEMAKER, 0.2),
    ],
)
def test_the_hour_of_a_job(made: JobSpec, prices: Prices, expected: float | None) -> None:
    assert job_usd(made, 3600, prices) == (None if expected is None else pytest.approx(expected))
