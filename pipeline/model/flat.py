"""All parameters as two flat vectors (decayed and not), viewed as named tensors in the forward pass.

Why: an optimizer, a gradient reduction or a norm over two tensors instead of a hundred. Tracing AdamW over a hundred
tensors costs 70-90 ms of host time a step on XLA; over two it is under 2 ms (`make bench`, host share).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_WIDEST = 4  # out / in of a feed-forward layer; embedding tables are taller


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor lies. Group 0 is decayed (matrices), group 1 is not (biases, layer norms)."""

    names: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[torch.Size, ...], ...]
    """As the module has them; a matrix with more rows than columns lies transposed (see `_is_transposed`)."""

    @staticmethod
    def of(module: nn.Module) -> "FlatLayout":
        """Groups of a module's parameters, in their order of definition. Tied parameters are not supported."""
        named = [(name, parameter.shape) for name, parameter in module.named_parameters()]
        groups = ([p for p in named if len(p[1]) > 1], [p for p in named if len(p[1]) <= 1])
        return FlatLayout(
            tuple(tuple(name for name, _ in group) for group in groups),
            tuple(tuple(shape for _, shape in group) for group in groups),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each group."""
        return tuple(sum(shape.numel() for shape in group) for group in self.shapes)

    def pack(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Named tensors to flat ones, fp32 on CPU."""
        return [
            torch.cat([_flatten(state[name].detach().to("cpu", torch.float32)) for name in group])
            for group in self.names
        ]

    def unpack(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Flat tensors to named views, differentiable: the gradient comes back as one concatenation a group."""
        named: dict[str, Tensor] = {}
        for group, shapes, flat in zip(self.names, self.shapes, flats, strict=True):
            named.update(zip(group, _views(flat, shapes), strict=True))
        return named


class _Views(torch.autograd.Function):
    """Split a vector into shaped views; backward concatenates (the built-in backward would add padded full vectors)."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, shapes: tuple[torch.Size, ...]) -> tuple[Tensor, ...]:
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        return tuple(_shaped(piece, shape) for piece, shape in zip(pieces, shapes, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat([_flatten(grad) for grad in grads]), None


def _is_transposed(shape: Sequence[int]) -> bool:
    """A layer that widens, [out, in] with out > in, has its gradient computed 1.4x faster as [in, out] on XLA:CPU.

    Embedding tables are read by row and stay as they are.
    """
    return len(shape) == 2 and shape[1] < shape[0] <= _WIDEST * shape[1]


def _flatten(tensor: Tensor) -> Tensor:
    return (tensor.t() if _is_transposed(tensor.shape) else tensor).reshape(-1)


def _shaped(piece: Tensor, shape: torch.Size) -> Tensor:
    return piece.view(shape[1], shape[0]).t() if _is_transposed(shape) else piece.view(shape)


def _views(flat: Tensor, shapes: tuple[torch.Size, ...]) -> tuple[Tensor, ...]:
    views: tuple[Tensor, ...] = _Views.apply(flat, shapes)  # type: ignore[no-untyped-call]
    return views
