"""What torch.distributed has no public name for: classes that a process group of one's own is made of.

The only file that asks for them by their private names (torch 2.9 to 2.15); tests/test_private_names.py fails when one
of them goes.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    PrefixStore,
    ReduceScatterOptions,
    Store,
    Work,
)
from torch._C._distributed_c10d import Backend as Library
from torch._C._distributed_c10d import _create_work_from_future as work_from_future  # type: ignore[attr-defined]
from torch._C._distributed_c10d import _DistributedBackendOptions as GroupOptions

__all__ = [
    "GROUP_DEVICES",
    "AllgatherOptions",
    "AllreduceOptions",
    "GroupOptions",
    "Libraries",
    "PrefixStore",
    "ReduceScatterOptions",
    "Store",
    "Work",
    "open_groups",
    "timeout_of",
    "work_from_future",
]

GROUP_DEVICES = ("cpu", "cuda")
"""Devices whose tensors a process group of torch.distributed takes."""
Libraries = dict[str, tuple[dist.ProcessGroup.BackendType, Library]]
"""The process group of torch.distributed for each device."""


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
