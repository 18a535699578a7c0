"""What is kept of a unit (layer) for backward: everything, its inputs alone, or its inputs in host memory.

Twice, for two kinds of program. A module's units are run by torch's non-reentrant checkpoint. Where weights are views
of flat vectors, put into the model for one call, that would run again without them, and on a device that traces the
compiler would find both computations equal and keep the first: there it is a function of inputs and weights.
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
"""Arguments of transformers' layers: a cache of keys and values would be written twice (its modeling_layers.py)."""


def recompute_units(units: Sequence[nn.Module], *, offload: bool = False, pin_memory: bool = False) -> None:
    """Keep only the inputs of each unit for backward, and with `offload` keep these in (pinned) host memory.

    In place, before fully_shard; names of parameters and modules stay. `forward` is run again and not the call: hooks
    of a unit, such as those that gather its parameters, run once.
    """
    for unit in units:
        unit.forward = partial(
            _checkpointed, unit.forward, partial(save_on_cpu, pin_memory) if offload else nullcontext
        )


def _checkpointed(forward: Callable[..., Any], saving: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    kwargs |= {name: absent for name, absent in _CACHES.items() if name in kwargs}
    with saving():
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def recomputed(backend: Backend, layer: nn.Module, *inputs: Tensor) -> Tensor:
    """Return layer(*inputs), with the weights it has at this moment, as functional_call put them there.

    The weights are kept as they are, so they must not change before backward. To the bit what it is without.
    """
    if not torch.is_grad_enabled():
        plain: Tensor = layer(*inputs)
        return plain
    weights = dict(layer.named_parameters())
    found: Tensor = _Recomputed.apply(backend, layer, tuple(weights), *inputs, *weights.values())  # type: ignore[no-untyped-call]
    return found


class _Recomputed(torch.autograd.Function):
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
