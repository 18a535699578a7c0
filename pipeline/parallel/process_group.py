"""What ranks agree on through the host: stop flags, gathered values, barriers. Gloo over CPU tensors everywhere.

A device's own process group may refuse CPU tensors, as that of Neuron does. So none of these exchanges uses it.
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
from pipeline.parallel.world import World, check_world, is_lost_peer


class ProcessGroup:
    """The ranks of one run. Alone, every call returns at once."""

    def __init__(
        self, world: World, *, timeout_s: float, device_backend: str | None = None, layout: Layout | None = None
    ) -> None:
        """Join the others. `device_backend`: see open_world_group.

        `layout`: this rank's place in a plan; without one every rank has rows of its own.
        """
        self.world, self.layout = world, layout or Layout(world.rank, world.world_size)
        self._pending: tuple[Tensor, Any] | None = None
        if world.world_size > 1:
            open_world_group(device_backend, timeout_s)

    def agree(self, flag: bool) -> bool:
        """Return, on every rank, whether the flag of any rank was up one call earlier.

        The exchange runs behind the step: each call starts one and returns the result of the one before.
        """
        if self.world.world_size == 1:
            return flag
        with collective_errors("agreeing to stop"):
            result = self._finish()
            flags = torch.tensor([int(flag)], dtype=torch.int32)
            self._pending = (flags, dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=host_group(), async_op=True))
        return result

    def agree_now(self, flag: bool) -> bool:
        """Return, on every rank, whether the flag of any rank is up. Waits for all.

        The exchange that `agree` has under way is about something else and stays pending.
        """
        return any(all_gather_objects(flag, "agreeing to stop")) if self.world.world_size > 1 else flag

    def mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Take the element-wise mean over ranks of CPU tensors, in place."""
        if self.world.world_size > 1:
            with collective_errors("reducing gradients"):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=host_group())
                    tensor /= self.world.world_size
        return tensors

    def gather_rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """Concatenate CPU tensors, of the same shapes on all ranks, in rank order along their first dimension."""
        if self.world.world_size == 1:
            return tensors
        result = []
        with collective_errors("gathering embeddings"):
            for tensor in tensors:
                parts = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
                dist.all_gather(parts, tensor.contiguous(), group=host_group())
                result.append(torch.cat(parts))
        return result

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value (plain Python or numpy), in rank order, on every rank."""
        return all_gather_objects(value, "gathering results") if self.world.world_size > 1 else [value]

    def barrier(self) -> None:
        if self.world.world_size > 1:
            with collective_errors("waiting for the other ranks"):
                dist.barrier(group=host_group())

    def close(self) -> None:
        """Leave. Pending exchanges are finished first, so that no peer is left waiting."""
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
    """Turn the collective library's RuntimeError into a TransientError that says what was going on.

    `mixed`: there is work of this rank alone within, whose errors pass as they are.
    """
    try:
        yield
    except RuntimeError as error:
        if mixed and not is_lost_peer(error):
            raise
        raise TransientError(
            f"a peer failed while {doing}: {first_line(error)}",
            expected="all ranks alive",
            next_command="see the other ranks' last lines; the same command continues from the last checkpoint",
        ) from error


def open_world_group(device_backend: str | None, timeout_s: float) -> None:
    """Open the process group of all ranks, by torchrun's variables, and that of their hosts.

    `device_backend`: as backends.process_group names it; None: gloo.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not set: the other ranks cannot be found",
            expected="the environment of a launcher",
            next_command="trnpipe launch -- script.py, or torchrun",
        )
    with collective_errors("joining the other ranks"):
        dist.init_process_group(device_backend or "gloo", timeout=timedelta(seconds=timeout_s))
        host_group(timeout_s)


_host_groups: "WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = WeakKeyDictionary()
"""By the process group of all ranks, which may end and be made again."""


def host_group(timeout_s: float | None = None) -> dist.ProcessGroup:
    """Return the group of all ranks for CPU tensors and objects: gloo.

    The process group of all ranks where that is gloo. Otherwise one beside it, made at the first call, which all ranks
    make together; `timeout_s`: of its collectives.
    """
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("no process group is open")
    if dist.get_backend() == dist.Backend.GLOO:
        return world
    if world not in _host_groups:
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        _host_groups[world] = dist.new_group(backend=dist.Backend.GLOO, timeout=timeout)
    return _host_groups[world]


def all_gather_objects(value: Any, doing: str) -> list[Any]:
    """Return plain values of all ranks, in rank order, on every rank; of this process where there is no group."""
    values = [value]
    if dist.is_initialized() and dist.get_world_size() > 1:
        values = [None] * dist.get_world_size()
        with collective_errors(doing):
            dist.all_gather_object(values, value, group=host_group())
    return values


# The ranks of a run and the device of this one, in the order that all devices need: process group, then device.


def join_ranks(
    name: str, world: World, *, timeout_s: float, layout: Layout | None = None
) -> AbstractContextManager[ProcessGroup]:
    """Join the ranks of a run on devices of backend `name`, and leave them at the end. Raises TransientError."""
    return closing(ProcessGroup(world, timeout_s=timeout_s, device_backend=process_group(name), layout=layout))


@contextmanager
def open_ranks(
    name: str, world: World, *, timeout_s: float, layout: Layout | None = None
) -> Iterator[tuple[ProcessGroup, Backend]]:
    """Join the other ranks, then open backend `name` (see open_backend); at the end leave them.

    Raises ConfigError when torchrun and the device's runtime count ranks differently, TransientError without a peer.
    """
    with join_ranks(name, world, timeout_s=timeout_s, layout=layout) as process_group:
        yield process_group, open_device(name, world)


def open_device(name: str, world: World) -> Backend:
    """Open backend `name` where this process is alone or its process group is up. Raises ConfigError as open_ranks."""
    if world.world_size > 1 and not dist.is_initialized():
        raise RuntimeError("a device was to be opened before this rank had joined the others")
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
