"""What devices have in common that run each operation as it comes: nothing is traced, compiled or cut."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Eager:
    """The part of Backend that is about graphs."""

    name: str
    is_lazy = False
    reduces_in_graph = False
    gathers_in_graph = True
    sums_by_matmul = False
    is_neuron = False

    def runtime_world_size(self) -> int:
        return 1

    def step_boundary(self, computed: Sequence[Tensor]) -> None:
        return None

    def all_gather(self, tensor: Tensor) -> Tensor:
        return gathered(tensor)

    def compile_count(self) -> int:
        return 0

    def compile_seconds(self) -> float:
        return 0.0

    def execute_seconds(self) -> float:
        return 0.0

    def host_operators(self) -> dict[str, int]:
        return {}

    def device_name(self) -> str:
        return self.name

    def hlo_text(self, tensors: Sequence[Tensor]) -> str:
        return ""


def gathered(tensor: Tensor) -> Tensor:
    """That of all ranks by the process group of its device: gloo or nccl; its own where there is none."""
    if not dist.is_initialized():
        return tensor
    found = torch.empty(
        (dist.get_world_size() * len(tensor), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device
    )
    dist.all_gather_into_tensor(found, tensor)
    return found
