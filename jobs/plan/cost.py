"""What jobs cost. Pure.

A container costs the share of its machine that its vCPUs are, as AWS Batch places it; a node of a group has a machine
of its own. Machines without a price in the table cost by the vCPU, when the settings say how much.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jobs.config import JobsConfig
from jobs.plan.resources import ml_machine, ml_name, ml_vcpus
from jobs.plan.spec import JobSpec
from pipeline.core.machines import NODES

SAGEMAKER_PRICE_FACTOR = 1.15
"""Price of a machine over that of EC2 if jobs.prices has no ml.* of it (read for ml.p5.48xlarge, ml.p4d.24xlarge)."""


@dataclass(frozen=True)
class Prices:
    """USD an hour: by instance type, and of a vCPU of any other machine (None: nobody knows)."""

    by_instance: Mapping[str, float]
    vcpu: float | None = None
    ml_factor: float | None = None
    """On SageMaker: what a machine costs over EC2, where it has no price of its own. None: not on SageMaker."""

    def of_machine(self, instance_type: str) -> float | None:
        if self.ml_factor is not None and (own := self.by_instance.get(ml_name(instance_type))) is not None:
            return own
        return self._there(self.by_instance.get(instance_type))

    def of_vcpu(self) -> float | None:
        return self._there(self.vcpu)

    def _there(self, price: float | None) -> float | None:
        return price if price is None or self.ml_factor is None else price * self.ml_factor


def prices_of(jobs: JobsConfig, target: str = "") -> Prices:
    factor = SAGEMAKER_PRICE_FACTOR if target == "sagemaker" else None
    return Prices(jobs.usd_per_hour, jobs.vcpu_usd_per_hour, factor)


def machine_share(job: JobSpec) -> float:
    """Return the share of its machine that one node takes; all of a machine that is not in the table.

    AWS Batch puts no other job on the nodes of a group (user guide, multi-node parallel jobs: single-tenant).
    """
    known = NODES.get(job.resources.instance_type)
    return min(1.0, job.resources.vcpus / known.vcpus) if known and not job.num_nodes else 1.0


def node_usd_per_hour(job: JobSpec, prices: Prices) -> float | None:
    """Return the price of one node or child of an array; None if unknown. SageMaker lends whole machines."""
    needs, whole = job.resources, prices.ml_factor is not None
    chosen = whole and not needs.instance_type  # by SageMaker's target, for the size of the job
    price = prices.of_machine(ml_machine(needs) if chosen else needs.instance_type)
    if price is not None:
        return price if whole else price * machine_share(job)
    vcpu = prices.of_vcpu()
    return None if vcpu is None else vcpu * (ml_vcpus(needs) if chosen else needs.vcpus)


def job_usd(job: JobSpec, seconds: float, prices: Prices) -> float | None:
    """Return the price of a job whose nodes, or children, run for `seconds` each; None if unknown."""
    price = node_usd_per_hour(job, prices)
    return None if price is None else price * seconds / 3600 * max(1, job.num_nodes, job.array_size)
