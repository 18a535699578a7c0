"""NVIDIA GPUs through eager PyTorch and NCCL."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends.base import Batch, HostMean
from pipeline.backends.cpu import Accelerator, has_compiler, replayed
from pipeline.core.errors import ConfigError


def check_visible() -> None:
    """Raise ConfigError if there is no GPU."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "no CUDA device is visible",
            expected="an NVIDIA GPU and driver",
            next_command="--backend cpu, or in a script trnpipe.init(device='cpu')",
        )


class CudaBackend(Accelerator):
    """The backend for a single GPU, which is selected by the local rank."""

    name = "cuda"
    prefers_bf16 = True  # fp32 is computed in full, without TF32
    default_tokens = 32_768

    def __init__(self, local_rank: int) -> None:
        check_visible()
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"local rank {local_rank} has no GPU: {torch.cuda.device_count()} are visible",
                expected="at most one process per GPU",
            )
        self.device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.device)
        self.compiles_layers = has_compiler()
        self._copying: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        return self.uploaded({name: tensor.pin_memory() for name, tensor in batch.items()} for batch in batches)

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        del host_mean
        if dist.is_initialized():
            for tensor in tensors:
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Copy tensors on a separate stream, so that the copies overlap with the next computation."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        self._copying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copying):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor.detach(), non_blocking=True)
                tensor.record_stream(self._copying)
            copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()

        def wait() -> list[Tensor]:
            copied.synchronize()
            return copies

        return wait

    def replay(self) -> Callable[[], AbstractContextManager[None]]:
        return replayed(torch.cuda.get_rng_state, torch.cuda.set_rng_state)

    def memory_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def synchronise(self) -> None:
        torch.cuda.synchronize(self.device)
