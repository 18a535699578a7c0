"""What jobs cost. Pure.

A node costs the share of its machine that its vCPUs are; AWS Batch places jobs by vCPU, and an accelerator machine is
asked for whole. Machines without a price in the table cost by the vCPU, when the settings say how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.config import JobsConfig
from jobs.plan.resources import ml_machine, ml_vcpus
from jobs.plan.spec import JobSpec, Resources
from pipeline.core.machines import NODES


@dataclass(frozen=True)
class Prices:
    """USD an hour: by instance type, and of a vCPU of any other machine (None: nobody knows)."""

    by_instance: Mapping[str, float]
    vcpu: float | None = None
    ml_factor: float | None = None
    """On SageMaker: what a machine costs over EC2, where it has no price of its own. None: not on SageMaker."""


def prices_of(jobs: JobsConfig, target: str = "") -> Prices:
    factor = jobs.sagemaker.price_factor if target == "sagemaker" else None
    return Prices(jobs.usd_per_hour, jobs.vcpu_usd_per_hour, factor)


def machine_share(needs: Resources) -> float:
    """Of its machine that one node takes; all of one that is not in the table."""
    known = NODES.get(needs.instance_type)
    return min(1.0, needs.vcpus / known.vcpus) if known else 1.0


def node_usd_per_hour(job: JobSpec, prices: Prices) -> float | None:
    """Of one node, or one child of an array; None where nobody knows."""
    needs = job.resources
    if prices.ml_factor is not None:
        return _ml_usd_per_hour(needs, prices, prices.ml_factor)
    price = prices.by_instance.get(needs.instance_type)
    if price is None:
        return None if prices.vcpu is None else prices.vcpu * needs.vcpus
    return price * machine_share(needs)


def _ml_usd_per_hour(needs: Resources, prices: Prices, factor: float) -> float | None:
    """SageMaker lends whole machines."""
    if (own := prices.by_instance.get(ml_machine(needs))) is not None:
        return own
    price = prices.by_instance.get(needs.instance_type)
    if price is None and prices.vcpu is not None:
        price = prices.vcpu * (needs.vcpus if needs.instance_type else ml_vcpus(needs))
    return None if price is None else price * factor


def job_usd(job: JobSpec, seconds: float, prices: Prices) -> float | None:
    """Of a job whose nodes, or each of whose children, run for `seconds`; None where nobody knows."""
    price = node_usd_per_hour(job, prices)
    return None if price is None else price * seconds / 3600 * max(1, job.num_nodes, job.array_size)
