"""How ranks are cut into groups: the same weights on `replicate`, slices of them on `shard`, of operators on `tensor`.

Tensor peers are neighbours, since they exchange most; then shards, so that a shard group is one node where its degree
is the number of devices of one; replicas last.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import ConfigError

Axis = Literal["replicate", "shard", "tensor"]


@dataclass(frozen=True)
class Layout:
    """One rank's place. rank = (replicate_rank * shard_size + shard_rank) * tensor_size + tensor_rank."""

    rank: int = 0
    replicate_size: int = 1
    shard_size: int = 1
    tensor_size: int = 1

    @property
    def world_size(self) -> int:
        return self.data_size * self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_size

    @property
    def shard_rank(self) -> int:
        return self.data_rank % self.shard_size

    @property
    def replicate_rank(self) -> int:
        return self.data_rank // self.shard_size

    @property
    def data_rank(self) -> int:
        """Which part of a global batch is this rank's; tensor peers read the same rows and draw the same dropout."""
        return self.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        """In how many parts a global batch is cut: what a sampler takes for the world size."""
        return self.replicate_size * self.shard_size

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Ranks of every group along an axis, each in its order."""
        strides = {"tensor": 1, "shard": self.tensor_size, "replicate": self.tensor_size * self.shard_size}
        sizes = {"tensor": self.tensor_size, "shard": self.shard_size, "replicate": self.replicate_size}
        stride, size = strides[axis], sizes[axis]
        first_ones = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return tuple(tuple(range(first, first + size * stride, stride)) for first in first_ones)


def layout_of(rank: int, world_size: int, *, shard_degree: int, tensor_degree: int) -> Layout:
    """Of these degrees over the whole world. `shard_degree` 0: all data-parallel ranks.

    Raises ConfigError for degrees that do not divide it.
    """
    data, rest = divmod(world_size, tensor_degree)
    if rest:
        raise ConfigError(
            f"tensor_degree {tensor_degree} over {world_size} ranks",
            expected="a degree that divides their number",
            next_command=f"tensor_degree {_largest_divisor(world_size, tensor_degree)}, or another number of ranks",
        )
    shard = shard_degree or data
    if data % shard:
        each = "" if tensor_degree == 1 else f" ({world_size} ranks by tensor_degree {tensor_degree})"
        raise ConfigError(
            f"shard_degree {shard} over {data} data-parallel ranks{each}",
            expected="a degree that divides their number, or 0 for all of them",
            next_command=f"shard_degree {_largest_divisor(data, shard)}, or another number of ranks",
        )
    return Layout(rank, data // shard, shard, tensor_degree)


def _largest_divisor(number: int, most: int) -> int:
    return next(degree for degree in range(min(number, most), 0, -1) if number % degree == 0)
