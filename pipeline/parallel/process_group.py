"""Host-side collectives between ranks: stop flags, gathered values, barriers, with gloo over CPU tensors.

A device's process group may reject CPU tensors, as Neuron's does, so none of these collectives uses it.
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
    """The ranks of one run. With one rank, every call returns immediately."""

    def __init__(
        self, world: World, *, timeout_s: float, device_backend: str | None = None, layout: Layout | None = None
    ) -> None:
        """Join the other ranks. `device_backend`: see open_world_group.

        `layout`: this rank's position in a plan's mesh, by default pure data parallelism.
        """
        self.world, self.layout = world, layout or Layout(world.rank, world.world_size)
        self._pending: tuple[Tensor, Any] | None = None
        if world.world_size > 1:
            open_world_group(device_backend, timeout_s)

    def agree(self, flag: bool) -> bool:
        """Return, on every rank, whether any rank had set the flag in the previous call.

        The all-reduce is asynchronous and overlaps the step. Each call starts one and returns the previous result.
        """
        if self.world.world_size == 1:
            return flag
        with collective_errors("agreeing to stop"):
            result = self._finish()
            flags = torch.tensor([int(flag)], dtype=torch.int32)
            self._pending = (flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=host_group(), async_op=True))
        return result

    def agree_now(self, flag: bool) -> bool:
        """Return, on every rank, whether any rank has set the flag, without affecting the pending one of `agree`."""
        return any(all_gather_objects(flag, "agreeing to stop")) if self.world.world_size > 1 else flag

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Average CPU tensors over ranks, in place."""
        if self.world.world_size > 1:
            with collective_errors("reducing gradients"):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=host_group())
                    tensor /= self.world.world_size
        return tensors

    def gather_rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """Gather CPU tensors, of equal shapes on all ranks, along their first dimension in rank order."""
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
        """Return every rank's value (plain Python or numpy), in rank order, on every rank."""
        return all_gather_objects(value, "gathering results") if self.world.world_size > 1 else [value]

    def barrier(self) -> None:
        if self.world.world_size > 1:
            with collective_errors("waiting for the other ranks"):
                dist.barrier(group=host_group())

    def close(self) -> None:
        """Leave the group, after finishing the pending all-reduce so that no other rank is left waiting."""
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
    """Convert a RuntimeError of a collective into a TransientError that names the operation, `doing`.

    `mixed`: the block also does rank-local work, whose errors are not converted.
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
    """Initialize the process group of all ranks from torchrun's variables, and its gloo group for the host.

    `device_backend`: see backends.process_group, None: gloo. Raises ConfigError if a variable is missing.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: cannot find the other ranks",
            expected="the environment variables of a launcher",
            next_command="trnpipe launch -- script.py, or torchrun",
        )
    with collective_errors("joining the other ranks"):
        dist.init_process_group(device_backend or "gloo", timeout=timedelta(seconds=timeout_s))
        host_group(timeout_s)


_host_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()
"""Gloo groups by the process group of all ranks, which may be destroyed and created again."""


def host_group(timeout_s: float | None = None) -> dist.ProcessGroup:
    """Return the gloo group of all ranks for CPU tensors and objects.

    This is the default process group if that is gloo. Otherwise the first call, which all ranks must make together,
    creates a second group. `timeout_s`: the timeout of its collectives.
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
    """Return the value of each rank in rank order, on every rank, or [value] without a process group."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = [None] * dist.get_world_size()
        with collective_errors(doing):
            dist.all_gather_object(values, value, group=host_group())
    return values


# Setup of a rank, in the order that all devices require: process group, then device.


def join_ranks(
    name: str, world: World, *, timeout_s: float, layout: Layout | None = None
) -> AbstractContextManager[ProcessGroup]:
    """Join the ranks of a run on devices of backend `name`, and leave at exit. Raises TransientError if one fails."""
    return closing(ProcessGroup(world, timeout_s=timeout_s, device_backend=process_group(name), layout=layout))


@contextmanager
def open_ranks(
    name: str, world: World, *, timeout_s: float, layout: Layout | None = None
) -> Iterator[tuple[ProcessGroup, Backend]]:
    """Join the other ranks, open backend `name` (see open_backend), and leave the ranks at exit.

    Raises ConfigError if torchrun and the device runtime count ranks differently, TransientError if a rank fails.
    """
    with join_ranks(name, world, timeout_s=timeout_s, layout=layout) as process_group:
        yield process_group, open_device(name, world)


def open_device(name: str, world: World) -> Backend:
    """Open backend `name` after the process group, if any, is initialized. Raises ConfigError as open_ranks does."""
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
