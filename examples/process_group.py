"""A process group of your own: all-gather and reduce-scatter of whole tensors (FSDP's) in two stages.

The first stage runs between nodes, the second within them, so the number of hops between nodes grows with the number
of nodes, not of ranks. Importing this module registers the name "two_stage". Use it in a plan for the groups that hold
shards, {"process_group": "examples.process_group:two_stage"}; in a script, `init_process_group("two_stage")`; in
Lightning, `DDPStrategy(process_group_backend="two_stage")`. Everything else goes to gloo and NCCL.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, _create_work_from_future  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllreduceOptions, PrefixStore, ReduceScatterOptions, Store, Work

NAME = "two_stage"
# Their names since torch 2.14, and before.
_Group: Any = dist.ProcessGroup
_gather: Callable[..., Work] = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
_scatter: Callable[..., Work] = getattr(_Group, "reduce_scatter_single", None) or _Group._reduce_scatter_base


def nodes_of(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, int] | None:
    """Return (nodes, ranks on each) of these ranks of the world.

    None where two stages gain nothing (one node, or one rank on each) or do not fit (uneven, or not node by node).
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    sizes = Counter(nodes)
    if len(sizes) in (1, len(ranks)) or len(set(sizes.values())) > 1 or nodes != sorted(nodes):
        return None
    return len(sizes), len(ranks) // len(sizes)


class TwoStageGroup(dist.ProcessGroup):
    """What init_process_group, new_group and init_device_mesh make for the name "two_stage"."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Store, timeout: timedelta, name: str) -> None:
        # The constructor that the stubs know, with a store, makes no subclasses (torch 2.9, PyProcessGroup.hpp).
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.flat = _with_libraries(dist.ProcessGroup(store, rank, len(ranks)), store, timeout, name)
        _with_libraries(self, PrefixStore("own", store), timeout, name)
        self.stages: list[dist.ProcessGroup] = []
        """Between nodes, and within them."""
        self.nodes = nodes_of(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if self.nodes is not None:
            num_nodes, local = self.nodes
            node, place = divmod(rank, local)
            for stage, index, size in ((f"lane-{place}", node, num_nodes), (f"node-{node}", place, local)):
                stage_store = PrefixStore(stage, store)
                group = dist.ProcessGroup(stage_store, index, size)
                self.stages.append(_with_libraries(group, stage_store, timeout, f"{name}-{stage}"))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Between nodes first, where each rank moves its own part alone; then whole lanes within the node."""
        if self.nodes is None:
            return _gather(self.flat, output, input, opts or AllgatherOptions())
        between, within = self.stages
        num_nodes, local = self.nodes
        lane = input.new_empty(num_nodes, input.numel())
        _gather(between, lane.view(-1), input.contiguous().view(-1)).wait()
        lanes = input.new_empty(local, *lane.shape)
        _gather(within, lanes.view(-1), lane.view(-1)).wait()
        output.view(num_nodes, local, -1).copy_(lanes.transpose(0, 1))
        return _done(output)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        """Within the node first, so that between nodes each rank moves its lane alone."""
        opts = opts or ReduceScatterOptions()
        # Other operations, such as a sum with a factor, are not the same when done twice; `in` finds neither.
        is_sum = opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG
        if self.nodes is None or not is_sum:
            return _scatter(self.flat, outputTensor, inputTensor, opts)
        between, within = self.stages
        stage = ReduceScatterOptions()  # without what the caller chose for the whole, such as not to wait
        stage.reduceOp = opts.reduceOp
        lanes = inputTensor.view(*self.nodes, -1).transpose(0, 1).contiguous()
        lane = torch.empty_like(lanes[0])
        _scatter(within, lane.view(-1), lanes.view(-1), stage).wait()
        _scatter(between, outputTensor.view(-1), lane.view(-1), stage).wait()
        return _done(outputTensor)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def allreduce(self, *args: Any, **options: Any) -> Work:
        """Means of whole numbers too, rounded to zero, as nccl has them and Lightning asks for; gloo raises there."""
        [tensors, opts] = args if len(args) == 2 else (args[0], None)
        is_mean = getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG
        if not is_mean or any(tensor.is_floating_point() for tensor in tensors):
            return self.flat.allreduce(*args, **options)
        self.flat.allreduce(tensors, AllreduceOptions()).wait()
        for tensor in tensors:
            tensor.div_(self.size(), rounding_mode="trunc")
        return _done(tensors[0])


def _forwarded(name: str) -> Callable[..., Any]:
    return lambda self, *args, **options: getattr(self.flat, name)(*args, **options)


# Methods that torch lets a subclass override. Inherited, they run with the interpreter's lock (PyProcessGroup.hpp),
# and wait with it for gloo's own, while gloo's thread holds that one and waits for the interpreter's to free a tensor.
FORWARDED = """
    all_gather_single_coalesced all_to_all_single allgather allgather_into_tensor_coalesced allreduce_coalesced alltoall
    alltoall_base barrier broadcast gather recv recv_anysource reduce reduce_scatter reduce_scatter_single_coalesced
    reduce_scatter_tensor_coalesced scatter send
"""
for _name in FORWARDED.split():
    setattr(TwoStageGroup, _name, _forwarded(_name))
TwoStageGroup.recvAnysource = _forwarded("recv_anysource")  # type: ignore[attr-defined]


def _with_libraries(group: dist.ProcessGroup, store: Store, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Give a group gloo for tensors of the host, and NCCL for those of a GPU."""
    kinds, rank, size = dist.ProcessGroup.BackendType, group.rank(), group.size()
    host = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout)
    group._register_backend(torch.device("cpu"), kinds.GLOO, host)
    group._set_default_backend(kinds.GLOO)
    if torch.cuda.is_available():
        gpus = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, dist.ProcessGroupNCCL.Options())
        group._register_backend(torch.device("cuda"), kinds.NCCL, gpus)
        group._set_default_backend(kinds.NCCL)
    group._set_group_name(name)
    return group


def _done(result: Tensor) -> Work:
    """Return what a caller may wait for: on a GPU what is queued on the current stream, on the host nothing."""
    future: Any = torch.futures.Future(devices=[] if result.device.index is None else [result.device])
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work


def _create(given: Any, _options: Any) -> TwoStageGroup:
    """Make this rank's member of a new group; torch.distributed calls it."""
    ranks = given.global_ranks_in_group or range(given.group_size)
    return TwoStageGroup(given.group_rank, ranks, given.store, given.timeout, given.group_id)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
