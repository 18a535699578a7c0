"""Host-side collectives, which use gloo to exchange stop flags, CPU tensors and Python objects between ranks.

They never use the process group of the device, which may not support CPU tensors (Neuron's doesn't).
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends import Backend, open_backend, process_group
from pipeline.core.errors import ConfigError, TransientError, first_line
from pipeline.core.layout import Layout
from pipeline.parallel.world import World, check_world, is_lost_rank


class ProcessGroup:
    """The group of all ranks in a run. If there is only one rank, every method returns immediately."""

    def __init__(
        self, world: World, *, timeout_s: float, device_backend: str | None = None, layout: Layout | None = None
    ) -> None:
        """Join the other ranks. For `device_backend`, see `open_world_group`.

        `layout`: the position of this rank in the device mesh. Defaults to pure data parallelism.
        """
        self.world, self.layout = world, layout or Layout(world.rank, world.world_size)
        self._pending: tuple[Tensor, Any] | None = None
        if world.world_size > 1:
            open_world_group(device_backend, timeout_s)

    def agree(self, flag: bool) -> bool:
        """Return, on every rank, whether any rank had set the flag in the previous call.

        Each call starts an asynchronous all-reduce and returns the result of the previous one, so that communication
        overlaps with the training step.
        """
        if self.world.world_size == 1:
            return flag
        with collective_errors("agreeing to stop"):
            result = self._finish()
            flags = torch.tensor([int(flag)], dtype=torch.int32)
            self._pending = (flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=host_group(), async_op=True))
        return result

    def agree_now(self, flag: bool) -> bool:
        """Return, on every rank, whether any rank has set the flag, without affecting a pending call to `agree`."""
        return any(all_gather_objects(flag, "agreeing to stop")) if self.world.world_size > 1 else flag

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Average CPU tensors over all ranks in place."""
        if self.world.world_size > 1:
            with collective_errors("reducing gradients"):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=host_group())
                    tensor /= self.world.world_size
        return tensors

    def gather_rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """Gather CPU tensors from all ranks and concatenate them along the first dimension in rank order.

        The tensors must have the same shapes on all ranks.
        """
        if self.world.world_size == 1:
            return tensors
        result = []
        with collective_errors("gathering embeddings"):
            for tensor in tensors:
                gathered = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
                dist.all_gather(gathered, tensor.contiguous(), group=host_group())
                result.append(torch.cat(gathered))
        return result

    def gather(self, value: Any) -> list[Any]:
        """Gather a picklable value from every rank and return the list, in rank order, on all ranks."""
        return all_gather_objects(value, "gathering results") if self.world.world_size > 1 else [value]

    def barrier(self) -> None:
        if self.world.world_size > 1:
            with collective_errors("waiting for the other ranks"):
                dist.barrier(group=host_group())

    def close(self) -> None:
        """Leave the group, waiting for the pending all-reduce first so that no other rank is left hanging."""
        if self.world.world_size > 1:
            with collective_errors("leaving"):
                self._finish()
            dist.destroy_process_group()

    def _finish(self) -> bool:
        if self._pending is None:
            return False
        tensor, work = self._pending
        self._pending = None
        work.wait()
        return bool(tensor.item())


@contextmanager
def collective_errors(doing: str, *, mixed: bool = False) -> Iterator[None]:
    """Convert a RuntimeError raised by a collective to a TransientError.

    `doing`: description of the operation for the error message. `mixed`: set this if the block also does rank-local
    work, in which case only errors that indicate a lost rank are converted.
    """
    try:
        yield
    except RuntimeError as error:
        if mixed and not is_lost_rank(error):
            raise
        raise TransientError(
            f"another rank failed while {doing}: {first_line(error)}",
            expected="all ranks alive",
            next_command="check the logs of the other ranks, then rerun the command to resume from the last checkpoint",
        ) from error


def open_world_group(device_backend: str | None, timeout_s: float) -> None:
    """Initialize the default process group from torchrun's environment variables, and the gloo group for the host.

    `device_backend`: backend of the default process group, see `backends.process_group`. None means gloo.
    Raises ConfigError if one of the environment variables is missing.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"cannot join the other ranks because {', '.join(missing)} is not set",
            expected="the environment variables set by a launcher",
            next_command="trnpipe launch -- script.py, or torchrun",
        )
    with collective_errors("joining the other ranks"):
        dist.init_process_group(device_backend or "gloo", timeout=timedelta(seconds=timeout_s))
        host_group(timeout_s)


_host_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()
"""The gloo group for each default process group, since that one may be destroyed and initialized again."""


def host_group(timeout_s: float | None = None) -> dist.ProcessGroup:
    """Return the gloo group over all ranks, which is used for CPU tensors and Python objects.

    If the default process group uses gloo, it is returned. Otherwise, the first call creates a new group with the
    timeout `timeout_s`, so it must be made on all ranks.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("no process group is initialized")
    if dist.get_backend() == dist.Backend.GLOO:
        return world
    if world not in _host_groups:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        _host_groups[world] = dist.new_group(backend=dist.Backend.GLOO, timeout=timeout)
    return _host_groups[world]


def all_gather_objects(value: Any, doing: str) -> list[Any]:
    """Gather a value from every rank in rank order. Returns [value] if no process group is initialized."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = [None] * dist.get_world_size()
        with collective_errors(doing):
            dist.all_gather_object(values, value, group=host_group())
    return values


# Setting up a rank. All devices require the process group to be initialized before the device is opened.


def join_ranks(
    name: str, world: World, *, timeout_s: float, layout: Layout | None = None
) -> AbstractContextManager[ProcessGroup]:
    """Join the other ranks of a run that uses backend `name`, and leave them on exit.

    Raises TransientError if a rank fails.
    """
    return closing(ProcessGroup(world, timeout_s=timeout_s, device_backend=process_group(name), layout=layout))


@contextmanager
def open_ranks(
    name: str, world: World, *, timeout_s: float, layout: Layout | None = None
) -> Iterator[tuple[ProcessGroup, Backend]]:
    """Join the other ranks and open backend `name` (see `open_backend`). The process group is destroyed on exit.

    Raises ConfigError if torchrun and the device runtime disagree about the number of ranks, and TransientError if a
    rank fails.
    """
    with join_ranks(name, world, timeout_s=timeout_s, layout=layout) as process_group:
        yield process_group, open_device(name, world)


def open_device(name: str, world: World) -> Backend:
    """Open backend `name` and verify that torchrun and the device runtime agree about the number of ranks.

    With multiple ranks, the process group must be initialized first. Raises ConfigError, as `open_ranks` does.
    """
    if world.world_size > 1 and not dist.is_initialized():
        raise RuntimeError("the device must be opened after this rank has joined the process group")
    backend = open_backend(
        name,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        world_size=world.world_size,
    )
    check_world(
        world,
        runtime_world_size=backend.runtime_world_size(),
        reduces_in_graph=backend.reduces_in_graph,
        device=backend.name,
    )
    return backend
