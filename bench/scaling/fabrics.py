"""How ranks of a machine are connected, and how long a collective takes over them: two levels, alpha and beta. Pure.

A collective costs a call, then for each level a latency a hop and its bytes over the bandwidth of the level (the
alpha-beta model: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
Nothing here was measured by us; tests/bench/test_scaling.py holds it against published figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from pipeline.core.machines import GIB, MACHINES

Algorithm = Literal["flat", "hierarchical"]
"""flat: one ring over all ranks; hierarchical: within nodes, then between them."""

EFFECTIVE = 0.8
"""Of a line rate: NCCL's protocol takes about 20 % (NVIDIA/nccl-tests issue 212, a maintainer: 370 of 450 GB/s)."""


@dataclass(frozen=True)
class Fabric:
    """A machine as its ranks see it. Bandwidths in bytes a second and one direction."""

    name: str
    ranks: int
    """Devices of a node, one rank each."""
    memory_bytes: int
    """Of a rank."""
    tflops_bf16: float
    """Dense peak of a rank."""
    tflops_fp32: float
    link_bytes_s: float
    """A rank to its neighbours in the node."""
    network_bytes_s: float
    """A node to the others, all ranks together."""
    link_hop_s: float
    network_hop_s: float
    call_s: float
    """Start of one collective."""
    shards: tuple[Literal["all", "state"], ...] = ("all", "state")
    """Of what a plan may cut there. Not "all": the flat program, whose collectives nothing hides."""
    max_tensor: int = 8
    """Largest tensor_degree: ranks whose links are the fastest."""


@dataclass(frozen=True)
class Group:
    """The ranks of one collective: `local` on each of `nodes` nodes. The node's other ranks are in groups alike."""

    nodes: int
    local: int

    @staticmethod
    def of(size: int, stride: int, ranks: int) -> "Group":
        """`size` ranks, each `stride` after the one before, on nodes of `ranks` ranks."""
        local = max(1, min(size, ranks // stride))
        return Group(ceil(size / local), local)

    @property
    def size(self) -> int:
        return self.nodes * self.local


def half_s(fabric: Fabric, group: Group, num_bytes: float, algorithm: Algorithm = "hierarchical") -> float:
    """Seconds of an all-gather to `num_bytes`, or a reduce-scatter of as many.

    Groups that share a node share its network; each gets its part by its ranks there.
    """
    nodes, local, size = group.nodes, group.local, group.size
    if size == 1:
        return 0.0
    network = fabric.network_bytes_s * local / fabric.ranks if nodes > 1 else fabric.link_bytes_s
    if algorithm == "flat":
        hops = (size - nodes) * fabric.link_hop_s + nodes * fabric.network_hop_s * (nodes > 1)
        return fabric.call_s + num_bytes * (size - 1) / size / min(fabric.link_bytes_s, network) + hops
    within = num_bytes * (local - 1) / local / fabric.link_bytes_s + (local - 1) * fabric.link_hop_s
    between = num_bytes * (nodes - 1) / nodes / network + ceil(log2(nodes)) * fabric.network_hop_s
    return fabric.call_s + within + between


def all_reduce_s(fabric: Fabric, group: Group, num_bytes: float, algorithm: Algorithm = "hierarchical") -> float:
    """A reduce-scatter, then an all-gather, started once."""
    return max(0.0, 2 * half_s(fabric, group, num_bytes, algorithm) - fabric.call_s) if group.size > 1 else 0.0


_EFA_HOP_S = 15e-6  # between nodes, and 1 to 2 us within: Neuron runtime documentation, internode collectives
_NCCL_CALL_S = 30e-6  # assumed: the order of the smallest all-reduce of nccl-tests; twice it moves no step by 1 %


def _gigabits(per_second: float) -> float:
    return per_second * 1e9 / 8


def _trainium(name: str, *, link_bytes_s: float, network_gbit_s: float, is_native: bool) -> Fabric:
    """`is_native`: there is a device that runs modules (Neuron SDK 2.33 and later, Trn2); else XLA's line alone."""
    machine = MACHINES[name]
    return Fabric(
        name,
        machine.rank_counts[-1],
        machine.core_memory_bytes,
        machine.core_tflops_bf16,
        machine.core_tflops_fp32,
        link_bytes_s=link_bytes_s,
        network_bytes_s=_gigabits(network_gbit_s) * EFFECTIVE,
        link_hop_s=1.5e-6,
        network_hop_s=_EFA_HOP_S,
        call_s=1.1e-3,  # over the five sizes of the nccom-test table below, 1 MiB to 1 GiB, no error is above 7 %
        shards=("all", "state") if is_native else ("state",),
        max_tensor=4 if is_native else 1,  # the cores of one chip
    )


# Bus bandwidth of an all-reduce of 1 GiB fp32 over 64 cores of two trn1.32xlarge: 2 * 63/64 GiB in 41.806 ms (Neuron
# nccom-test user guide).
_TRN1_LINK = 2 * 63 / 64 * GIB / 41.806e-3
# No such table is published for trn2: trn1's by NeuronLink's bandwidth a core, 384 GB/s for two and 1,024 for four.
_TRN2_LINK = _TRN1_LINK * (1024 / 4) / (384 / 2)

# EFA: trn1 800 Gb/s, trn1n 1,600, trn2 3,200 (Neuron documentation); p4d 400, p5 3,200, p3 25 Gb/s without EFA (AWS's
# instance pages). NVLink: 600, 900 and 300 GB/s a GPU both ways; memory and peak: NVIDIA's data sheets of A100 40 GB,
# H100 SXM and V100 16 GB (its 16-bit format is fp16; fp32 of A100 and H100 as TF32).
FABRICS: Mapping[str, Fabric] = {
    fabric.name: fabric
    for fabric in (
        _trainium("trn1.32xlarge", link_bytes_s=_TRN1_LINK, network_gbit_s=800, is_native=False),
        _trainium("trn1n.32xlarge", link_bytes_s=_TRN1_LINK, network_gbit_s=1600, is_native=False),
        _trainium("trn2.48xlarge", link_bytes_s=_TRN2_LINK, network_gbit_s=3200, is_native=True),
        *(
            Fabric(
                name,
                8,
                memory_gib * GIB,
                tflops_bf16,
                tflops_fp32,
                link_bytes_s=nvlink_gb_s / 2 * 1e9 * EFFECTIVE,
                network_bytes_s=_gigabits(network_gbit_s) * EFFECTIVE,
                link_hop_s=2e-6,
                network_hop_s=hop_s,
                call_s=_NCCL_CALL_S,
            )
            for name, memory_gib, tflops_bf16, tflops_fp32, nvlink_gb_s, network_gbit_s, hop_s in (
                ("p3.16xlarge", 16, 125.0, 15.7, 300, 25, 30e-6),  # TCP: twice EFA's latency, assumed
                ("p4d.24xlarge", 40, 312.0, 156.0, 600, 400, _EFA_HOP_S),
                ("p5.48xlarge", 80, 989.0, 494.0, 900, 3200, _EFA_HOP_S),
                ("h100-infiniband", 80, 989.0, 494.0, 900, 3200, 5e-6),  # 8 x 400 Gb/s; torchtitan's figures
            )
        ),
    )
}
