"""Every Neuron machine we know, in one table: sizes, speed, network, ranks and price. Pure.

Sources: AWS Neuron documentation, Trn1 and Trn2 architecture pages, where a row or a field names no other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Node:
    """What one node of a job can ask for on a machine."""

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
    """A machine registers with AWS Batch what its kernel has left, less what the ECS agent keeps; a job that asks for
    more waits for ever, and memory is a limit only: nothing needs the rest."""
    num_devices: int
    num_cores: int
    core_memory_bytes: int
    """The 25.8 GB that memory errors on trn2 name (reported by users) are the 24 GiB below."""
    core_tflops_bf16: float
    """Dense peak of one core."""
    core_tflops_fp32: float
    num_efa: int
    """EFA interfaces that we attach; without one a job is on one node."""
    rank_counts: tuple[int, ...]
    """How many ranks may run on it; over many nodes only as many as there are cores, the last."""
    bus_gib_s: float | None
    """Bus bandwidth of an all-reduce of 128 MiB over all cores, in 2^30 bytes a second."""
    usd_per_hour: float | None
    """None: no price is published."""

    @property
    def node(self) -> Node:
        return Node(self.vcpus, self.job_memory_mib, self.num_devices, self.num_efa)


# TFLOPS of a chip, bf16 and fp32: 190 and 47.5 for the two cores of trn1, 667 and 181 for the four of trn2.
# trn2.3xlarge: vCPUs and memory from EC2's "Specifications for accelerated computing instances"
# (docs.aws.amazon.com/ec2/latest/instancetypes/ac.html), as others quote it; users see 124 of the 128 GiB, and report
# machines without an EFA device. Whether one can be attached is not confirmed, and a job on one machine needs none.
# EFA of trn2.48xlarge: github.com/aws-neuron/aws-neuron-eks-samples, pull request 10.
# trn2u.48xlarge: one column with trn2.48xlarge on the Trn2 architecture page; 16 network cards with EFA on EC2's page
# above; no list price is known. Four of them are one UltraServer. Trn3 has no row: AWS states whole UltraServers (64 or
# 144 chips, Trn3 architecture page), and EC2's page names no type of it.
# Ranks: docs/neuron.md for trn1; no page found for trn2, users run trn2.3xlarge with 1, 2 and 4.
# Bandwidth: examples of the nccom-test user guide; for large machines that of two instances, which one alone exceeds.
# Prices: on-demand list prices of us-east-1 in USD an hour, from third-party tables as of November 2026; other regions,
# spot and reserved machines differ by a factor of two to three, so `estimate.price_usd_per_hour` goes before them.
# trn2.3xlarge: a capacity block; trn2.48xlarge: 16 times the chip of trn2.3xlarge.
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
"""What a node of a job can ask for on each of them."""
PRICES_USD_PER_HOUR: dict[str, float] = {
    name: machine.usd_per_hour for name, machine in MACHINES.items() if machine.usd_per_hour is not None
}


def price_usd_per_hour(instance: str, given: float | None) -> float | None:
    """Return the price in the settings, else that of the table; None for an instance that nobody has priced."""
    return PRICES_USD_PER_HOUR.get(instance) if given is None else given
