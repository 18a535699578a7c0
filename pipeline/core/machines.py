"""Table of Neuron instance types: sizes, speed, network, ranks and prices. Pure.

Sources: AWS Neuron documentation, Trn1 and Trn2 architecture pages, unless a row or field names another source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Node:
    """Resources that a job can request on one node."""

    vcpus: int
    memory_mib: int
    num_devices: int
    num_efa: int


@dataclass(frozen=True)
class Machine:
    """A Trainium instance type. A core is one logical NeuronCore (trn2: LNC=2)."""

    name: str
    vcpus: int
    memory_gib: int
    job_memory_mib: int
    """Memory that a machine offers AWS Batch, without that of the kernel and the ECS agent. Jobs that request more wait
    forever."""
    num_devices: int
    num_cores: int
    core_memory_bytes: int
    """Memory errors on trn2 report 25.8 GB (according to users), which are the 24 GiB below."""
    core_tflops_bf16: float
    """Dense peak of one core."""
    core_tflops_fp32: float
    num_efa: int
    """EFA interfaces to attach. Without one, jobs are limited to one node."""
    rank_counts: tuple[int, ...]
    """Allowed numbers of ranks. On several nodes only the last one, the number of cores, is allowed."""
    bus_gib_s: float | None
    """Bus bandwidth of an all-reduce of 128 MiB over all cores, in 2^30 bytes a second."""
    usd_per_hour: float | None
    """None if no price is published."""

    @property
    def node(self) -> Node:
        return Node(self.vcpus, self.job_memory_mib, self.num_devices, self.num_efa)


# TFLOPS of a chip, bf16 and fp32: 190 and 47.5 for the two cores of trn1, 667 and 181 for the four of trn2.
# trn2.3xlarge: vCPUs and memory from EC2's "Specifications for accelerated computing instances"
# (docs.aws.amazon.com/ec2/latest/instancetypes/ac.html), as quoted by others. Users see 124 of the 128 GiB and report
# machines without an EFA device. It is unconfirmed whether one can be attached. Jobs on one machine do not need it.
# EFA of trn2.48xlarge: github.com/aws-neuron/aws-neuron-eks-samples, pull request 10.
# trn2u.48xlarge: same column as trn2.48xlarge on the Trn2 architecture page, 16 network cards with EFA on EC2's page
# above, unknown list price. Four of them are one UltraServer. Trn3 has no row: AWS describes only UltraServers (64 or
# 144 chips, Trn3 architecture page), and EC2's page lists no Trn3 instance type.
# Ranks: docs/neuron.md for trn1. No documentation for trn2. Users run trn2.3xlarge with 1, 2 and 4.
# Bandwidth: examples of the nccom-test user guide. For large machines it is that of two instances, a lower bound.
# Prices: on-demand list prices in us-east-1 in USD per hour, from third-party tables of November 2026. Other regions,
# spot and reserved machines differ by a factor of two to three, so `estimate.price_usd_per_hour` overrides them.
# trn2.3xlarge: the price of a capacity block. trn2.48xlarge: 16 times the chip of trn2.3xlarge.
_TRN1 = Machine(
    "trn1.32xlarge",
    vcpus=128,
    memory_gib=512,
    job_memory_mib=490_000,
    num_devices=16,
    num_cores=32,
    core_memory_bytes=16 * GIB,
    core_tflops_bf16=95.0,
    core_tflops_fp32=23.75,
    num_efa=8,
    rank_counts=(1, 2, 8, 32),
    bus_gib_s=39.0,
    usd_per_hour=21.50,
)
_TRN2 = Machine(
    "trn2.48xlarge",
    vcpus=192,
    memory_gib=2048,
    job_memory_mib=1_960_000,
    num_devices=16,
    num_cores=64,
    core_memory_bytes=24 * GIB,
    core_tflops_bf16=166.75,
    core_tflops_fp32=45.25,
    num_efa=16,
    rank_counts=(1, 4, 16, 64),
    bus_gib_s=None,
    usd_per_hour=35.76,
)
MACHINES: Mapping[str, Machine] = {
    machine.name: machine
    for machine in (
        replace(
            _TRN1,
            name="trn1.2xlarge",
            vcpus=8,
            memory_gib=32,
            job_memory_mib=28_000,
            num_devices=1,
            num_cores=2,
            num_efa=0,
            rank_counts=(1, 2),
            bus_gib_s=52.0,
            usd_per_hour=1.34375,
        ),
        _TRN1,
        replace(_TRN1, name="trn1n.32xlarge", num_efa=16, usd_per_hour=24.78),
        replace(
            _TRN2,
            name="trn2.3xlarge",
            vcpus=12,
            memory_gib=128,
            job_memory_mib=116_000,
            num_devices=1,
            num_cores=4,
            num_efa=0,
            rank_counts=(1, 2, 4),
            usd_per_hour=2.235,
        ),
        _TRN2,
        replace(_TRN2, name="trn2u.48xlarge", usd_per_hour=None),
    )
}
NODES: Mapping[str, Node] = {name: machine.node for name, machine in MACHINES.items()}
"""Resources that a job can request on one node of each instance type."""
PRICES_USD_PER_HOUR: dict[str, float] = {
    name: machine.usd_per_hour for name, machine in MACHINES.items() if machine.usd_per_hour is not None
}


def price_usd_per_hour(instance: str, configured: float | None) -> float | None:
    """Return the price in the settings, else the one in the table, None if unknown."""
    return PRICES_USD_PER_HOUR.get(instance) if configured is None else configured
