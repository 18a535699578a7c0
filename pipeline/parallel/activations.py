"""Activation checkpointing of units (layers), with optional offloading of their inputs to host memory.

`recompute_units` wraps modules with torch's non-reentrant checkpoint. `checkpointed_call` is for weights that exist in
the model for one call only, as views of flat vectors. Torch's checkpoint would recompute without them, and on a tracing
device the compiler would merge both computations, so it is an autograd function of inputs and weights.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from pipeline.backends import Backend

_CACHES = {"past_key_values": None, "layer_past": None, "use_cache": False}
"""Arguments of transformers' layers. Recomputing would write the key/value cache twice (its modeling_layers.py)."""


def recompute_units(units: Sequence[nn.Module], *, offload: bool = False, pin_memory: bool = False) -> None:
    """Keep only the inputs of each unit for backward, in (pinned) host memory with `offload`.

    Changes units in place and must run before fully_shard. Names of parameters and modules do not change. Only
    `forward` is recomputed, not `__call__`, so the hooks of a unit, such as those that gather its parameters, run once.
    """
    for unit in units:
        unit.forward = partial(
            _checkpointed_forward, unit.forward, partial(save_on_cpu, pin_memory) if offload else nullcontext
        )


def _checkpointed_forward(forward: Callable[..., Any], saving: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    kwargs |= {name: disabled for name, disabled in _CACHES.items() if name in kwargs}
    with saving():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def checkpointed_call(backend: Backend, layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Return layer(*inputs), using its current weights, and recompute it in backward.

    Weights are saved by reference and must not change before backward. Results are bit-identical to a plain call.
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
