"""How a step scales over nodes, what memory a plan takes, and which degrees to choose. Pure.

T(N) = micro-steps * (compute + exposed gathers) + fixed + exposed reductions, times 1 + jitter beyond one node.
An upper bound of what can be reached: stragglers and input are in the jitter alone, which is to be measured. Overlap as
FSDP and DDP have it: collectives run behind the compute of other layers, the first gather and the last reduction are
exposed (torchtitan's arrangement). The flat program and ZeRO-1 reduce when backward has ended: nothing overlaps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from bench.scaling.fabrics import Fabric, Group, all_reduce_s, half_s
from pipeline.core.errors import ConfigError
from pipeline.core.layout import Layout, layout_of

NODES = (1, 2, 4, 8, 16, 32, 64, 128)
RESERVE = 0.2
"""Of a rank's memory, kept free for the allocator, the compiler's scratch and the collectives; as `trnpipe doctor`."""

ALIKE = 1.05
"""Times that differ by less are the same: the anchors of the model are met within 3 to 10 %."""


@dataclass(frozen=True)
class Work:
    """What one model replica (a tensor group) does in one optimizer step."""

    parameters: int
    layers: int
    """Units that overlap with one another."""
    micro_s: float
    """Forward and backward of one micro-step on one rank, without tensor parallelism or recomputation."""
    micro_steps: int = 1
    fixed_s: float = 0.0
    """Of a step, whatever the nodes: update, host."""
    exchange_bytes: int = 0
    """What a layer's activations between its matrices take, B T D elements: one all-reduce of tensor parallelism."""
    gather_bytes: int = 4
    """Of a parameter, as it is gathered: 2 in bf16."""
    reduce_bytes: int = 4
    """Of a gradient, as it is reduced."""


@dataclass(frozen=True)
class Spread:
    """How a model stands on the ranks of `layout`; the fields as in a Plan."""

    layout: Layout
    shard: Literal["all", "state"] = "all"
    recompute: bool = False
    overlaps: bool = True
    """False: the flat program."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, modelled."""

    compute_s: float
    exposed_s: float
    """Collectives that nothing hides."""
    fixed_s: float
    jitter_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.fixed_s + self.jitter_s


def step_time(work: Work, spread: Spread, fabric: Fabric, *, jitter: float = 0.0) -> StepTime:
    """`jitter`: share by which steps over many nodes are longer than the model says; measured, else 0."""
    place = spread.layout
    tensor, shard = place.tensor_size, place.shard_size
    across = Group.of(place.replicate_size, shard * tensor, fabric.ranks)
    within = Group.of(shard, tensor, fabric.ranks)
    forward = work.micro_s / 3 / tensor  # backward is twice the forward pass
    backward = forward * (3 if spread.recompute else 2)
    elements = work.parameters / tensor
    gather = half_s(fabric, within, elements * work.gather_bytes)
    reduction = half_s(fabric, within, elements * work.reduce_bytes)
    reduction += all_reduce_s(fabric, across, elements / shard * work.reduce_bytes)
    if spread.shard == "all" and shard > 1:
        every = _exposed(gather, forward, work.layers) + _behind(gather, backward, work.layers)
        last = _behind(gather + reduction, backward, work.layers) - _behind(gather, backward, work.layers)
        exposed = work.micro_steps * every + last + reduction / work.layers
    elif spread.shard == "state" and shard > 1:
        exposed = reduction + gather
    else:
        exposed = _exposed(reduction, backward, work.layers) if spread.overlaps else reduction
    exchanges = (6 if spread.recompute else 4) * work.layers * work.micro_steps
    exposed += exchanges * all_reduce_s(fabric, Group.of(tensor, 1, fabric.ranks), work.exchange_bytes)
    compute = work.micro_steps * (forward + backward)
    beyond_one_node = place.world_size > fabric.ranks
    return StepTime(
        compute, exposed, work.fixed_s, jitter * (compute + exposed + work.fixed_s) if beyond_one_node else 0.0
    )


def _behind(collective_s: float, compute_s: float, layers: int) -> float:
    """What of a collective for each layer but one does not hide behind the compute of the others."""
    return max(0.0, collective_s * (1 - 1 / layers) - compute_s)


def _exposed(collective_s: float, compute_s: float, layers: int) -> float:
    """The same, and the one of the layer that has nothing to hide behind."""
    return _behind(collective_s, compute_s, layers) + collective_s / layers


# A table over nodes.


@dataclass(frozen=True)
class Scaled:
    """One number of nodes. Weak: every rank has its work, the global batch grows; strong: one batch is shared."""

    nodes: int
    layout: Layout
    step: StepTime
    weak_efficiency: float
    """Samples a second, over `nodes` times those of the fewest nodes that hold the plan."""
    strong_speedup: float


def scaled(
    work: Work, spread: Spread, fabric: Fabric, *, shard_degree: int, nodes: Sequence[int] = NODES, jitter: float = 0.0
) -> list[Scaled]:
    """`spread` on each number of nodes that its degrees divide. `shard_degree` as in a Plan: 0 grows with the nodes."""
    rows: list[Scaled] = []
    first: tuple[int, float] | None = None
    for count in nodes:
        try:
            layout = layout_of(
                0, count * fabric.ranks, shard_degree=shard_degree, tensor_degree=spread.layout.tensor_size
            )
        except ConfigError:  # these nodes cannot be cut so
            continue
        on_these = replace(spread, layout=layout)
        weak = step_time(work, on_these, fabric, jitter=jitter)
        first = first or (count, weak.step_s)
        strong = step_time(_shared(work, count / first[0]), on_these, fabric, jitter=jitter)
        rows.append(Scaled(count, layout, weak, first[1] / weak.step_s, first[1] / strong.step_s))
    return rows


def _shared(work: Work, parts: float) -> Work:
    """One of `parts` ranks' work of the same global batch: fewer micro-steps, at last a smaller one."""
    share = work.micro_steps / parts
    if share >= 1:
        return replace(work, micro_steps=round(share))
    return replace(work, micro_steps=1, micro_s=work.micro_s * share, exchange_bytes=round(work.exchange_bytes * share))


# Memory of a plan, and the choice of degrees.


def state_bytes(parameters: int, layout: Layout) -> int:
    """fp32 weights and both moments of AdamW on one rank, where its slices are even: 12 bytes over the degrees."""
    return 12 * parameters // layout.tensor_size // layout.shard_size


def copy_bytes(work: Work, layout: Layout) -> int:
    """Whole weights to compute with beside the slices or fp32 masters, in the flat program; none where they are one."""
    return work.gather_bytes * work.parameters if layout.shard_size > 1 or work.gather_bytes < 4 else 0


@dataclass(frozen=True)
class Candidate:
    """A plan that was considered."""

    spread: Spread
    memory_bytes: int
    """States, gradients, and what a step takes beside them."""
    fits: bool
    step: StepTime

    @property
    def replica_s(self) -> float:
        """Seconds of a step of one replica, by its ranks: tensor peers share the same samples."""
        return self.step.step_s * self.spread.layout.tensor_size


def candidates(
    work: Work,
    beside_bytes: Mapping[bool, int],
    fabric: Fabric,
    nodes: int,
    *,
    jitter: float = 0.0,
) -> list[Candidate]:
    """Plans for these nodes, the best first: those that fit, the most samples a second, of rates alike the least of
    everything.

    `beside_bytes`: peak less states of a sharded rank, without and with recomputation (memory.py).
    Shard degrees are 1, then whole nodes, 1 or 2 or 4...: what is between costs as much and holds less.
    """
    found = []
    for spread in _spreads(fabric, nodes):
        memory = _memory(work, spread, beside_bytes[spread.recompute])
        fits = memory <= (1 - RESERVE) * fabric.memory_bytes
        found.append(Candidate(spread, memory, fits, step_time(work, spread, fabric, jitter=jitter)))
    fastest = min((one.replica_s for one in found if one.fits), default=0.0)

    def rank(one: Candidate) -> tuple[float, ...]:
        if not one.fits:
            return (1, one.memory_bytes)
        place = one.spread.layout
        time = max(one.replica_s, ALIKE * fastest)
        return (0, time, place.tensor_size, one.spread.recompute, place.shard_size)

    return sorted(found, key=rank)


def _spreads(fabric: Fabric, nodes: int) -> Iterator[Spread]:
    tensors = [degree for degree in (1, 2, 4, 8) if degree <= fabric.max_tensor]
    for tensor, recompute, count in product(tensors, (False, True), (0, *NODES)):
        if count <= nodes and not (count and nodes % count):
            shard = max(1, count * fabric.ranks // tensor)
            layout = layout_of(0, nodes * fabric.ranks, shard_degree=shard, tensor_degree=tensor)
            # where a device shards everything, states alone cost as much and hold less
            yield Spread(layout, fabric.shards[0], recompute, overlaps="all" in fabric.shards)


def _memory(work: Work, spread: Spread, beside_bytes: int) -> int:
    """States, the gradient of the weights that are whole or cut, and the rest, which tensor peers share."""
    place = spread.layout
    gradient = 4 * work.parameters // place.tensor_size
    weights = copy_bytes(work, place) if spread.shard == "state" else 0
    if spread.shard == "all":
        gradient //= place.shard_size
    return state_bytes(work.parameters, place) + weights + gradient + beside_bytes // place.tensor_size


@dataclass(frozen=True)
class Transformer:
    """A model by its sizes, for tables: P parameters, L layers of width D, T tokens a rank and micro-step."""

    name: str
    parameters: int
    layers: int
    width: int
    tokens: int = 8192

    def work(self, fabric: Fabric, mfu: float) -> Work:
        """In bf16, at `mfu` (0 to 1) of the peak: 6 FLOPs a parameter and token (PaLM, appendix B, less attention)."""
        micro_s = 6 * self.parameters * self.tokens / (fabric.tflops_bf16 * 1e12 * mfu)
        exchanged = 2 * self.tokens * self.width
        return Work(self.parameters, self.layers, micro_s, exchange_bytes=exchanged, gather_bytes=2)

    def beside_bytes(self) -> Mapping[bool, int]:
        """Activations in bf16, 34 T D bytes a layer (Korthikanti et al. 2022, equation 1, attention fused), or with
        recomputation 2 T D and one layer's; and one unit gathered, with its gradient and the next one."""
        layer = 34 * self.tokens * self.width
        unit = (2 + 2 + 4) * self.parameters // self.layers
        return {False: self.layers * layer + unit, True: self.layers * 2 * self.tokens * self.width + layer + unit}
