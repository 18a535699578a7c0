"""Activation checkpointing for units (layers), optionally offloading the unit inputs to host memory.

`recompute_units` wraps modules with torch's non-reentrant checkpoint. `checkpointed_call` supports models whose weights
are views of flat vectors that are only swapped in for the duration of a call. Torch's checkpoint would no longer see
those weights during recomputation, and on a tracing device the compiler would deduplicate the two forward passes.
`checkpointed_call` is therefore implemented as an autograd function that takes both the inputs and the weights.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pipeline.backends import Backend

_CACHES = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Arguments that disable the cache of transformers layers, since recomputation would update it twice."""


def recompute_units(units: Sequence[nn.Module], *, offload: bool = False, pin_memory: bool = False) -> None:
    """Wrap each unit in place so that only its inputs are saved for backward and the rest is recomputed.

    With `offload`, the inputs are moved to host memory (pinned if `pin_memory` is set) until backward. This must be
    called before `fully_shard`. Parameter and module names are preserved. Note that only `forward` is recomputed, not
    `__call__`, so that hooks on the unit, such as the ones that gather its parameters, run only once.
    """
    for unit in units:
        saving = partial(save_on_cpu, pin_memory) if offload else nullcontext
        unit.forward = partial(_checkpointed_forward, unit, unit.forward, saving)


def _checkpointed_forward(
    unit: nn.Module, forward: Callable[..., Any], saving: Callable[[], Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    kwargs |= {name: disabled for name, disabled in _CACHES.items() if name in kwargs}
    contexts: dict[str, Any] = {}
    if next(unit.buffers(), None) is not None and not torch.compiler.is_compiling():
        contexts["context_fn"] = lambda: (nullcontext(), _Unchanged(unit))  # a compiled program updates them only once
    with saving():
        return checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)


class _Unchanged(AbstractContextManager[None]):
    """Restore buffers after each recomputation, because the forward pass has already updated them (BatchNorm)."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit

    def __enter__(self) -> None:
        self._before = [
            (module, name, buffer, buffer.clone())
            for module in self._unit.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def __exit__(self, *_: object) -> None:
        for module, name, buffer, value in self._before:
            setattr(module, name, buffer)  # a forward pass may also replace it
            buffer.data.copy_(value)


def compiled_call(backend: Backend) -> Callable[..., Tensor]:
    """Return a function that calls a layer in training, with one compiled program per shape for all layers.

    Evaluation is not compiled, because it has more shapes than training. Raises ConfigError if there is no compiler.
    """

    def call(layer: nn.Module, *inputs: Tensor) -> Tensor:
        output: Tensor = layer(*inputs)
        return output

    program = backend.compiled(call)
    return lambda *inputs: (program if torch.is_grad_enabled() else call)(*inputs)


def checkpointed_call(backend: Backend, layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a layer with its current weights and recompute its activations during backward.

    The weights are saved by reference, so they must not be modified before backward. Results are bitwise identical to
    calling the layer directly.
    """
    output: Tensor
    if torch.is_grad_enabled():
        weights = dict(layer.named_parameters())
        output = _CheckpointedCall.apply(backend, layer, tuple(weights), *inputs, *weights.values())  # type: ignore[no-untyped-call]
    else:
        output = layer(*inputs)
    return output


class _CheckpointedCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, backend: Backend, layer: nn.Module, names: tuple[str, ...], *tensors: Tensor) -> Tensor:
        ctx.backend, ctx.layer, ctx.names = backend, layer, names
        ctx.replay, ctx.autocast = backend.replay(), nullcontext
        if torch.is_autocast_enabled(kind := backend.device.type):
            ctx.autocast = partial(backend.autocast, torch.get_autocast_dtype(kind))
        ctx.save_for_backward(*tensors)
        output: Tensor = layer(*tensors[: len(tensors) - len(names)])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        first, *others = ctx.saved_tensors
        grad, first = ctx.backend.barrier([grad, first])
        needed = ctx.needs_input_grad[3:]
        tensors = [t.detach().requires_grad_(n) for t, n in zip((first, *others), needed, strict=True)]
        inputs, weights = tensors[: -len(ctx.names)], tensors[-len(ctx.names) :]
        with torch.set_grad_enabled(True), ctx.replay(), ctx.autocast():
            output = torch.func.functional_call(ctx.layer, dict(zip(ctx.names, weights, strict=True)), tuple(inputs))
        grads = iter(torch.autograd.grad(output, [t for t in tensors if t.requires_grad], grad))
        return None, None, None, *(next(grads) if t.requires_grad else None for t in tensors)
