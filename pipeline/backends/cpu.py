"""Eager PyTorch on the CPU."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import psutil
import torch
from torch import Tensor

from pipeline.backends.base import Batch, HostMean
from pipeline.backends.prefetch import prefetched


class CpuBackend:
    """Backend of the host itself."""

    name = "cpu"
    is_lazy = False
    reduces_in_graph = False
    sums_by_matmul = False
    process_group: str | None = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def runtime_world_size(self) -> int:
        return 1

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        return prefetched(batches, depth=4)

    def step_boundary(self) -> None:
        return None

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        host_mean(list(tensors))

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    def autocast(self, dtype: torch.dtype) -> AbstractContextManager[object]:
        return torch.autocast("cpu", dtype=dtype)

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def compile_count(self) -> int:
        return 0

    def compile_seconds(self) -> float:
        return 0.0

    def device_name(self) -> str:
        return self.name

    def hlo_text(self, tensors: Sequence[Tensor]) -> str:
        return ""

    def execute_seconds(self) -> float:
        return 0.0

    def memory_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    def synchronise(self) -> None:
        return None
