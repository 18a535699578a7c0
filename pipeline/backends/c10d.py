"""What torch.distributed has no public name for: classes that a process group of one's own is made of.

The only file that asks for them by their private names (torch 2.9 to 2.15); tests/test_private_names.py fails when one
of them goes.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import Backend as Library
from torch._C._distributed_c10d import _create_work_from_future, _DistributedBackendOptions  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store, Work

GroupOptions = _DistributedBackendOptions
work_from_future: Callable[..., Work] = _create_work_from_future

GROUP_DEVICES = ("cpu", "cuda")
"""Devices whose tensors a process group of torch.distributed takes."""
Libraries = dict[str, tuple[dist.ProcessGroup.BackendType, Library]]
"""The process group of torch.distributed for each device."""

# Public under these names since torch 2.14, which warns of the ones before.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_Group: Any = dist.ProcessGroup
group_all_gather: Callable[..., Work] = getattr(_Group, "all_gather_single", None) or _Group._allgather_base
"""Of a group (its first argument), of one tensor."""
group_reduce_scatter: Callable[..., Work] = (
    getattr(_Group, "reduce_scatter_single", None) or _Group._reduce_scatter_base
)


def open_groups(store: Store, rank: int, size: int, timeout: timedelta) -> Libraries:
    """The libraries that "cpu:gloo,cuda:nccl" stands for, by device, for one group of ranks; those of this machine."""
    kinds = dist.ProcessGroup.BackendType
    host = dist.ProcessGroupGloo(PrefixStore("cpu", store), rank, size, timeout)
    found: Libraries = {"cpu": (kinds.GLOO, host)}
    if torch.cuda.is_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        gpus = dist.ProcessGroupNCCL(PrefixStore("cuda", store), rank, size, options)
        found["cuda"] = (kinds.NCCL, gpus)
    return found


def timeout_of(library: Library) -> timedelta:
    """How long a collective of it may take; it may have been set after its making."""
    timeout: timedelta = library.options._timeout
    return timeout
