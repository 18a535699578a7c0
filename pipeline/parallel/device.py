"""The device of this rank, once torchrun and the device's runtime agree on how many take part."""

from pipeline.backends import Backend, open_backend
from pipeline.parallel.world import World, check_world


def open_device(name: str, world: World) -> Backend:
    """Open backend `name` (see open_backend). Raises ConfigError when the worlds differ."""
    backend = open_backend(name, world.local_rank)
    check_world(
        world,
        runtime_world_size=backend.runtime_world_size(),
        reduces_in_graph=backend.reduces_in_graph,
        device=backend.name,
    )
    return backend
