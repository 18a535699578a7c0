"""A custom process group: all-gather and reduce-scatter of whole tensors (those of FSDP) in two stages.

One stage runs between nodes, the other within them, so the number of hops between nodes grows with the number of nodes,
not of ranks. Importing this module registers the name "two_stage". Use it in a plan for the groups that hold shards,
{"process_group": "examples.process_group:two_stage"}, in a script with `init_process_group("two_stage")`, or in
Lightning with `DDPStrategy(process_group_backend="two_stage")`. All other operations use gloo and NCCL.
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
# The first name exists since torch 2.14, the second before.
_Group: Any = dist.ProcessGroup
_gather: Callable[..., Work] = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
_scatter: Callable[..., Work] = getattr(_Group, "reduce_scatter_single", None) or _Group._reduce_scatter_base


def nodes_of(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, int] | None:
    """Return (number of nodes, ranks per node) of these global ranks.

    None if two stages have no benefit (one node, or one rank per node) or are impossible (uneven, or not in the order
    of nodes).
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    sizes = Counter(nodes)
    if len(sizes) in (1, len(ranks)) or len(set(sizes.values())) > 1 or nodes != sorted(nodes):
        return None
    return len(sizes), len(ranks) // len(sizes)


class TwoStageGroup(dist.ProcessGroup):
    """The process group that init_process_group, new_group and init_device_mesh create for "two_stage"."""

    def __init__(self, rank: int, ranks: Sequence[int], store: Store, timeout: timedelta, name: str) -> None:
        # The constructor with a store, which the stubs declare, cannot be subclassed (torch 2.9, PyProcessGroup.hpp).
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self.flat = _with_libraries(dist.ProcessGroup(store, rank, len(ranks)), store, timeout, name)
        _with_libraries(self, PrefixStore("own", store), timeout, name)
        self.stages: list[dist.ProcessGroup] = []
        """The group between nodes and the group within the node."""
        self.nodes = nodes_of(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if self.nodes is not None:
            num_nodes, local = self.nodes
            node, local_rank = divmod(rank, local)
            for stage, index, size in ((f"lane-{local_rank}", node, num_nodes), (f"node-{node}", local_rank, local)):
                stage_store = PrefixStore(stage, store)
                group = dist.ProcessGroup(stage_store, index, size)
                self.stages.append(_with_libraries(group, stage_store, timeout, f"{name}-{stage}"))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gather the shard of each rank between nodes, then whole lanes within the node."""
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
        """Reduce within the node first, so that each rank only sends its lane between nodes."""
        opts = opts or ReduceScatterOptions()
        # Other operations, such as a sum with a factor, cannot be applied twice. The operator `in` does not work here.
        is_sum = opts.reduceOp == dist.ReduceOp.SUM or opts.reduceOp == dist.ReduceOp.AVG
        if self.nodes is None or not is_sum:
            return _scatter(self.flat, outputTensor, inputTensor, opts)
        between, within = self.stages
        stage = ReduceScatterOptions()  # without the options for the whole operation, such as asyncOp
        stage.reduceOp = opts.reduceOp
        lanes = inputTensor.view(*self.nodes, -1).transpose(0, 1).contiguous()
        lane = torch.empty_like(lanes[0])
        _scatter(within, lane.view(-1), lanes.view(-1), stage).wait()
        _scatter(between, outputTensor.view(-1), lane.view(-1), stage).wait()
        return _done(outputTensor)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def allreduce(self, *args: Any, **options: Any) -> Work:
        """Also support means of integers, rounded to zero like NCCL. Lightning needs them, and gloo raises."""
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


# The methods that a subclass may override. The inherited ones hold the GIL (PyProcessGroup.hpp) while they wait for the
# lock of gloo, whose thread holds that lock and waits for the GIL to free a tensor: a deadlock.
FORWARDED = """
    all_gather_single_coalesced all_to_all_single allgather allgather_into_tensor_coalesced allreduce_coalesced alltoall
    alltoall_base barrier broadcast gather recv recv_anysource reduce reduce_scatter reduce_scatter_single_coalesced
    reduce_scatter_tensor_coalesced scatter send
"""
for _name in FORWARDED.split():
    setattr(TwoStageGroup, _name, _forwarded(_name))
TwoStageGroup.recvAnysource = _forwarded("recv_anysource")  # type: ignore[attr-defined]


def _with_libraries(group: dist.ProcessGroup, store: Store, timeout: timedelta, name: str) -> dist.ProcessGroup:
    """Register gloo for tensors on the host, and NCCL for tensors on a GPU."""
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
    """Return completed work. On a GPU, waiting for it waits for the current stream."""
    future: Any = torch.futures.Future(devices=[] if result.device.index is None else [result.device])
    future.set_result(result)
    work: Work = _create_work_from_future(future)
    return work


def _create(options: Any, _backend_options: Any) -> TwoStageGroup:
    """Create the group of this rank. Called by torch.distributed."""
    ranks = options.global_ranks_in_group or range(options.group_size)
    return TwoStageGroup(options.group_rank, ranks, options.store, options.timeout, options.group_id)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
