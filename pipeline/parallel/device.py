"""The ranks of a run and the device of this one, in the order that all devices need: process group, then device."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager

import torch.distributed as dist

from pipeline.backends import Backend, open_backend, process_group
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World, check_world


def join_ranks(name: str, world: World, *, timeout_s: float) -> AbstractContextManager[Gang]:
    """The ranks of a run whose devices are those of backend `name`; left at the end. Raises TransientError."""
    return closing(Gang(world, timeout_s=timeout_s, device_backend=process_group(name)))


@contextmanager
def open_ranks(name: str, world: World, *, timeout_s: float) -> Iterator[tuple[Gang, Backend]]:
    """Join the other ranks, then open backend `name` (see open_backend); at the end leave them.

    Raises ConfigError when torchrun and the device's runtime count ranks differently, TransientError without a peer.
    """
    with join_ranks(name, world, timeout_s=timeout_s) as gang:
        yield gang, open_device(name, world)


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
