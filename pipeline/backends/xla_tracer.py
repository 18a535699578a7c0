"""PyTorch/XLA that traces and never runs: what a program would hand to the compiler, at the price of building it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from pipeline.backends.base import Batch
from pipeline.backends.prefetch import prefetched
from pipeline.backends.xla import XlaBackend

_TYPES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.int32: "s32", torch.bool: "pred"}


class XlaTracer(XlaBackend):
    """At a step boundary what was traced is dropped, and all it computes becomes a shape without data.

    Traces the operators of a Neuron device, whatever the host is. What comes to the host is zeros.
    """

    executes = False

    def __init__(self, local_rank: int = 0, local_world_size: int = 1, world_size: int = 1) -> None:
        super().__init__(local_rank, local_world_size, world_size)
        self.sums_by_matmul = self.shares_host_memory = False

    def loader(self, batches: Iterable[Batch]) -> AbstractContextManager[Iterator[Batch]]:
        return prefetched(({name: t.to(self.device) for name, t in batch.items()} for batch in batches), depth=1)

    def step_boundary(self, computed: Sequence[Tensor]) -> None:
        for tensor in computed:
            shape = {"type": _TYPES[tensor.dtype], "sizes": list(tensor.shape)}
            self._xla._XLAC._replace_xla_tensor(tensor, self._xla._XLAC._xla_create_placeholder_tensor(shape))
        # Orders the all-reduces of one graph; a sync drops it, too.
        self._xla._XLAC._set_all_reduce_token(str(self.device), None)
        self.seed(0)  # the state of the random numbers is computed, too

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self.fetch(tensors)()

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        return lambda: [torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) for tensor in tensors]

    def synchronise(self) -> None:
        return None

    def device_name(self) -> str:
        return "xla:traced"
