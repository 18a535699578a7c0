"""Specifications and prices of the Neuron instance types.

Unless stated otherwise, values are from the Trn1 and Trn2 architecture pages of the AWS Neuron documentation.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True)
class Node:
    """The resources that a job can request on one node."""

    vcpus: int
    memory_mib: int
    num_devices: int
    num_efa: int


@dataclass(frozen=True)
class Machine:
    """A Trainium instance type. Note that a core is a logical NeuronCore, as with LNC=2 on trn2."""

    name: str
    vcpus: int
    job_memory_mib: int
    """Memory available to AWS Batch jobs, which excludes the memory that the kernel and the ECS agent need. A job that
    requests more is never scheduled."""
    num_devices: int
    core_memory_bytes: int
    """On trn2 this is 24 GiB. According to users, out-of-memory errors report it as 25.8 GB."""
    core_tflops_bf16: float
    """Peak throughput of one core without sparsity."""
    core_tflops_fp32: float
    num_efa: int
    """Number of EFA interfaces. Multi-node jobs require at least one."""
    rank_counts: tuple[int, ...]
    """Supported numbers of ranks per node. Multi-node jobs must use the last one, which is one rank per core."""
    bus_gib_s: float | None
    """Bus bandwidth of a 128 MiB all-reduce over all cores, in GiB per second."""
    usd_per_hour: float | None
    """None if AWS publishes no price."""

    @property
    def node(self) -> Node:
        return Node(self.vcpus, self.job_memory_mib, self.num_devices, self.num_efa)


# Throughput: A trn1 chip has two cores and reaches 190 TFLOPS in bf16 and 47.5 in fp32. A trn2 chip has four logical
# cores and reaches 667 and 181.
#
# trn2.3xlarge: The vCPUs and the memory are from EC2's "Specifications for accelerated computing instances"
# (docs.aws.amazon.com/ec2/latest/instancetypes/ac.html), which we only know from quotes. Users see 124 of the 128 GiB
# and report that the instance has no EFA device. We could not confirm whether one can be attached, but single-node jobs
# don't need it.
#
# trn2.48xlarge: The EFA interfaces are from github.com/aws-neuron/aws-neuron-eks-samples, pull request 10.
#
# trn2u.48xlarge: The Trn2 architecture page lists it in the same column as trn2.48xlarge, and the EC2 page above lists
# 16 network cards with EFA. Its price is unknown. Four of these instances form an UltraServer.
#
# Trn3 is missing, because AWS only describes UltraServers with 64 or 144 chips and EC2 lists no Trn3 instance type.
#
# Ranks: docs/neuron.md has the source for trn1. For trn2 we found no documentation, but users run trn2.3xlarge with 1,
# 2 and 4 ranks.
#
# Bandwidth: The values are examples from the nccom-test user guide. For large instances the example uses two of them,
# so the value is a lower bound.
#
# Prices: These are on-demand prices in us-east-1 from third-party tables as of November 2026. For trn2.3xlarge this is
# the price of a capacity block, and for trn2.48xlarge it is 16 times that. Prices in other regions and for spot or
# reserved instances differ by a factor of two to three, so `jobs.prices` overrides the table.
_TRN1 = Machine(
    "trn1.32xlarge",
    vcpus=128,
    job_memory_mib=490_000,
    num_devices=16,
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
    job_memory_mib=1_960_000,
    num_devices=16,
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
            job_memory_mib=28_000,
            num_devices=1,
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
            job_memory_mib=116_000,
            num_devices=1,
            num_efa=0,
            rank_counts=(1, 2, 4),
            usd_per_hour=2.235,
        ),
        _TRN2,
        replace(_TRN2, name="trn2u.48xlarge", usd_per_hour=None),
    )
}
NODES: Mapping[str, Node] = {name: machine.node for name, machine in MACHINES.items()}
"""The resources that a job can request on one node, by instance type."""
PRICES_USD_PER_HOUR: dict[str, float] = {
    name: machine.usd_per_hour for name, machine in MACHINES.items() if machine.usd_per_hour is not None
}
