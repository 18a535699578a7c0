"""Collectives by name: after `import trnpipe.collectives` there is "topo" beside gloo and nccl.

All-gather and reduce-scatter of whole tensors (FSDP's) go in two stages, between nodes and within them: hops between
nodes grow with the logarithm of their number, not with that of the ranks. Everything else, and every tensor of a group
within one node, goes to the library of the tensor's device, as under the name "cpu:gloo,cuda:nccl".
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceOptions, PrefixStore, ReduceScatterOptions, Work

from pipeline.backends.c10d import (
    GROUP_DEVICES,
    AllgatherOptions,
    GroupOptions,
    Libraries,
    group_all_gather,
    group_reduce_scatter,
    open_groups,
    timeout_of,
    work_from_future,
)
from pipeline.core.fabrics import FABRICS, Group, choose_algorithm
from pipeline.core.format import format_bytes
from pipeline.core.machines import MACHINES
from pipeline.parallel.world import world_from_env

NAME = "topo"


@dataclass(frozen=True)
class Options:
    """What `pg_options` of such a group is. Its sub-groups take those of the world."""

    algorithm: Literal["hierarchical", "auto"] = "hierarchical"
    ranks_per_node: int | None = None
    """None: LOCAL_WORLD_SIZE, as torchrun and `trnpipe launch` set it."""
    _timeout: ClassVar[None] = None
    """What DeviceMesh asks options for since torch 2.14; None: that of the library, which set_timeouts replaces."""


def group_of(ranks: Sequence[int], ranks_per_node: int) -> Group | None:
    """These ranks of the world, whose nodes hold `ranks_per_node` each, node by node.

    None where two stages gain nothing (one node, one rank on each) or do not fit (uneven nodes, or not node by node).
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    sizes = Counter(nodes)
    if len(sizes) == 1 or len(set(sizes.values())) > 1 or len(sizes) == len(ranks) or nodes != sorted(nodes):
        return None
    return Group(len(sizes), len(ranks) // len(sizes))


def largest_in_stages(group: Group | None, algorithm: str) -> float:
    """Bytes of the largest tensor, whole, that goes in two stages; 0 where none does.

    auto: where the cost model finds that faster on each machine that it knows with GPUs. A power of two.
    """
    if group is None or algorithm == "hierarchical":
        return math.inf if group else 0
    fabrics = [fabric for name, fabric in FABRICS.items() if name not in MACHINES]  # Neuron's runtime chooses itself
    largest = 0
    for size in (2**power for power in range(10, 36)):
        if any(choose_algorithm(size, group.nodes, group.local, fabric) != "hierarchical" for fabric in fabrics):
            break
        largest = size
    return largest


class HierarchicalGroup(dist.ProcessGroup):
    """What init_process_group and new_group make for the name "topo"."""

    def __init__(self, given: GroupOptions, options: Options) -> None:
        rank, ranks, store = given.group_rank, given.global_ranks_in_group or range(given.group_size), given.store
        # The constructor that the stubs know, with a store, makes no subclasses (torch 2.9, PyProcessGroup.hpp).
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        libraries = open_groups(store, rank, len(ranks), given.timeout)
        self.flat = _with(libraries, dist.ProcessGroup(store, rank, len(ranks)), given.group_id)
        _with(libraries, self, given.group_id)
        self.options = options
        self.nodes = group_of(ranks, options.ranks_per_node or world_from_env().local_world_size)
        self.largest_in_stages = largest_in_stages(self.nodes, options.algorithm)
        self._stages: list[dist.ProcessGroup] = []
        """Between nodes, within them."""
        if self.nodes is not None and self.largest_in_stages:
            node, place = divmod(rank, self.nodes.local)
            lane, local = (f"lane-{place}", node, self.nodes.nodes), (f"node-{node}", place, self.nodes.local)
            for name, number, size in (lane, local):
                own = PrefixStore(name, store)
                libraries = open_groups(own, number, size, given.timeout)
                group = dist.ProcessGroup(own, number, size)
                self._stages.append(_with(libraries, group, f"{given.group_id}-{name}"))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Between nodes first, where each rank moves its own part alone; then whole lanes within the node."""
        if self.nodes is None or not self._goes_in_stages(output):
            return group_all_gather(self.flat, output, input, opts or AllgatherOptions())
        between, within = self._stages
        lane = input.new_empty(self.nodes.nodes, input.numel())
        group_all_gather(between, lane.view(-1), input.contiguous().view(-1)).wait()
        lanes = input.new_empty(self.nodes.local, *lane.shape)
        group_all_gather(within, lanes.view(-1), lane.view(-1)).wait()
        output.view(*lanes.shape[1::-1], -1).copy_(lanes.transpose(0, 1))
        return _done(output)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        """Within the node first, so that between nodes each rank moves its lane alone."""
        opts = opts or ReduceScatterOptions()
        # Other operations, such as a sum with a factor, are not the same when done twice.
        is_sum = opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG  # `in` finds neither
        if self.nodes is None or not (is_sum and self._goes_in_stages(inputTensor)):
            return group_reduce_scatter(self.flat, outputTensor, inputTensor, opts)
        between, within = self._stages
        lanes = inputTensor.view(self.nodes.nodes, self.nodes.local, -1).transpose(0, 1).contiguous()
        lane = torch.empty_like(lanes[0])
        group_reduce_scatter(within, lane.view(-1), lanes.view(-1), _same_operation(opts)).wait()
        part = torch.empty_like(lane[0])
        group_reduce_scatter(between, part, lane.view(-1), _same_operation(opts)).wait()
        outputTensor.view(-1).copy_(part)
        return _done(outputTensor)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # their names before torch 2.14

    def allreduce(self, *args: Any, **options: Any) -> Work:
        """Means of whole numbers too, rounded to zero, as nccl has them and Lightning asks for; gloo raises there."""
        [tensors, opts] = args if len(args) == 2 else (args[0], None)
        is_mean = getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG
        if not is_mean or any(tensor.is_floating_point() or tensor.is_complex() for tensor in tensors):
            return self.flat.allreduce(*args, **options)
        self.flat.allreduce(tensors, AllreduceOptions()).wait()
        for tensor in tensors:
            tensor.div_(self.size(), rounding_mode="trunc")
        return _done(tensors[0])

    def _goes_in_stages(self, whole: Tensor) -> bool:
        """Whether it does; then both stages have the group's time-out, which may have been set after its making."""
        if not self._stages or whole.nbytes > self.largest_in_stages:
            return False
        timeout = timeout_of(self._get_backend(whole.device))
        for stage in self._stages:
            stage._get_backend(whole.device)._set_default_timeout(timeout)
        return True

    def shutdown(self) -> None:
        for stage in self._stages:
            stage.shutdown()
        super().shutdown()

    def abort(self) -> None:
        for stage in self._stages:
            stage.abort()
        super().abort()


def _forwarded(name: str) -> Callable[..., Any]:
    def forward(self: HierarchicalGroup, *args: Any, **options: Any) -> Any:
        return getattr(self.flat, name)(*args, **options)

    return forward


# Methods that torch lets a subclass override. Inherited, they run with the interpreter's lock (PyProcessGroup.hpp),
# and wait with it for gloo's own, while gloo's thread holds that one and waits for the interpreter's to free a tensor.
# Of several names torch looks for the newest first (2.14).
for _name in (
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
):
    setattr(HierarchicalGroup, _name, _forwarded(_name))
HierarchicalGroup.recvAnysource = _forwarded("recv_anysource")  # type: ignore[attr-defined]


def _with(libraries: Libraries, group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """In which each tensor goes to the library of its device."""
    for device, (kind, library) in libraries.items():
        group._register_backend(torch.device(device), kind, library)
        group._set_default_backend(kind)
    group._set_group_name(name)
    return group


def _same_operation(opts: ReduceScatterOptions) -> ReduceScatterOptions:
    """For a stage of its own, without what the caller chose for the whole (such as not to wait)."""
    stage = ReduceScatterOptions()
    stage.reduceOp = opts.reduceOp
    return stage


def _done(result: Tensor) -> Work:
    """What a caller may wait for: on a GPU what is queued so far on the current stream, on the host nothing."""
    future: Any = torch.futures.Future(devices=[] if result.device.index is None else [result.device])
    future.set_result(result)
    return work_from_future(future)


def describe(group: dist.ProcessGroup) -> str:
    """What a group chose, in one line for the console."""
    if not isinstance(group, HierarchicalGroup) or group.nodes is None:
        return f"collectives: as in the device's library; {group.size()} ranks are not several on each of several nodes"
    place = f"over {group.nodes.nodes} nodes of {group.nodes.local} ranks"
    if not group.largest_in_stages:
        return f"collectives: as in the device's library {place}"
    most = "" if math.isinf(group.largest_in_stages) else f" up to {format_bytes(group.largest_in_stages)}"
    return f"collectives: hierarchical {place}{most}"


def _create(given: GroupOptions, options: Options | None) -> HierarchicalGroup:
    """What torch.distributed calls in each member of a new group."""
    world = dist.group.WORLD
    inherited = world.options if isinstance(world, HierarchicalGroup) else Options()
    return HierarchicalGroup(given, options or inherited)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(GROUP_DEVICES))
