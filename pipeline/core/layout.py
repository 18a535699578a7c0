"""Arrange ranks along three axes of parallelism: `replicate`, `shard` and `tensor`.

Ranks along `replicate` have identical weights, ranks along `shard` each hold a slice of the weights, and ranks along
`tensor` each compute a slice of the operators. Tensor groups are innermost, because they communicate the most. Shard
groups follow, so that a shard group is exactly one node if its size equals the number of devices per node.
"""

from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import ConfigError

Axis = Literal["replicate", "shard", "tensor"]


@dataclass(frozen=True)
class Layout:
    """The position of a rank along each axis.

    It satisfies `rank = (replicate_rank * shard_size + shard_rank) * tensor_size + tensor_rank`.
    """

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
        """Index of the slice of the global batch that this rank processes.

        All ranks of a tensor group share this index, so they read the same rows and use the same dropout masks.
        """
        return self.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        """Number of slices that a global batch is split into. Samplers use this as their world size."""
        return self.replicate_size * self.shard_size

    def groups(self, axis: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each group along an axis, in order."""
        strides = {"tensor": 1, "shard": self.tensor_size, "replicate": self.tensor_size * self.shard_size}
        sizes = {"tensor": self.tensor_size, "shard": self.shard_size, "replicate": self.replicate_size}
        stride, size = strides[axis], sizes[axis]
        first_ranks = [rank for rank in range(self.world_size) if rank // stride % size == 0]
        return tuple(tuple(range(first, first + size * stride, stride)) for first in first_ranks)


def layout_of(rank: int, world_size: int, *, shard_degree: int, tensor_degree: int) -> Layout:
    """Return the layout of a rank.

    If `shard_degree` is 0, the weights are sharded across all data-parallel ranks. Raises ConfigError if the number of
    ranks is not divisible by `tensor_degree`, or the number of data-parallel ranks is not divisible by `shard_degree`.
    """
    data, rest = divmod(world_size, tensor_degree)
    if rest:
        raise ConfigError(
            f"tensor_degree {tensor_degree} does not divide {world_size} ranks",
            expected="a divisor of the number of ranks",
            next_command=f"use tensor_degree {_largest_divisor(world_size, tensor_degree)}, or change the rank count",
        )
    shard = shard_degree or data
    if data % shard:
        derivation = "" if tensor_degree == 1 else f" ({world_size} ranks / tensor_degree {tensor_degree})"
        raise ConfigError(
            f"shard_degree {shard} does not divide {data} data-parallel ranks{derivation}",
            expected="a divisor of the number of data-parallel ranks, or 0 for all of them",
            next_command=f"use shard_degree {_largest_divisor(data, shard)}, or change the rank count",
        )
    return Layout(rank, data // shard, shard, tensor_degree)


def _largest_divisor(number: int, maximum: int) -> int:
    return next(degree for degree in range(min(number, maximum), 0, -1) if number % degree == 0)
