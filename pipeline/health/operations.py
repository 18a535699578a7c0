"""The tensor operations a model of ours really uses, each with the same in float64 on the host to hold it against."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.health.config import OperationName

ROWS, WIDTH, TABLE = 128, 256, 512  # small: what is looked for is a wrong core, not a slow one


@dataclass(frozen=True)
class Operation:
    """`compute(*inputs)` gives the tensors to compare; `tolerance` is relative to the largest reference value."""

    name: OperationName
    inputs: Callable[[torch.Generator], tuple[Tensor, ...]]
    compute: Callable[..., tuple[Tensor, ...]]
    dtype: torch.dtype
    tolerance: float


def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _many(*makers: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    return lambda generator: tuple(make(generator) for make in makers)


def _ids(generator: torch.Generator) -> Tensor:
    return torch.randint(0, TABLE, (ROWS,), generator=generator, dtype=torch.int32)


def _positive(generator: torch.Generator) -> Tensor:
    return torch.rand(WIDTH, generator=generator) + 0.5


def _matmul(left: Tensor, right: Tensor) -> tuple[Tensor, ...]:
    return (left @ right,)


def _attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    return (torch.softmax(query @ key.transpose(0, 1) * WIDTH**-0.5, dim=-1) @ value,)


def _layer_norm(values: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.layer_norm(values, (WIDTH,), weight, bias, 1e-5),)


def _softmax(values: Tensor) -> tuple[Tensor, ...]:
    return torch.softmax(values, dim=1), torch.log_softmax(values, dim=1)


def _gelu(values: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(values),)


def _embedding(table: Tensor, ids: Tensor, direction: Tensor) -> tuple[Tensor, ...]:
    """Rows of a table, and the gradient of the table: a scatter with rows that meet."""
    table = table.detach().requires_grad_()
    rows = F.embedding(ids, table)
    (gradient,) = torch.autograd.grad((rows * direction).sum(), [table])
    return rows.detach(), gradient


def _reductions(values: Tensor) -> tuple[Tensor, ...]:
    return values.sum(dim=0), values.mean(dim=1), values.amax(dim=1), (values * values).sum()


def _optimizer_step(weight: Tensor, gradient: Tensor, average: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    """AdamW (Loshchilov and Hutter 2019) without bias correction."""
    average = 0.9 * average + 0.1 * gradient
    square = 0.999 * square + 0.001 * gradient * gradient
    return weight * 0.99 - 1e-3 * average / (torch.sqrt(square) + 1e-8), average, square


_SQUARES = _many(_normal(WIDTH), _normal(WIDTH), _normal(WIDTH), _positive)

# Relative errors: fp32 sums of a few hundred products, and bf16 with 8 bits of mantissa. Hardware may multiply fp32 in
# pieces, so these leave room; a flipped bit of weight is far outside.
OPERATIONS = (
    Operation("matmul fp32", _many(_normal(ROWS, WIDTH), _normal(WIDTH, WIDTH)), _matmul, torch.float32, 1e-4),
    Operation("matmul bf16", _many(_normal(ROWS, WIDTH), _normal(WIDTH, WIDTH)), _matmul, torch.bfloat16, 2e-2),
    Operation("attention fp32", _many(*[_normal(ROWS, WIDTH)] * 3), _attention, torch.float32, 1e-4),
    Operation("attention bf16", _many(*[_normal(ROWS, WIDTH)] * 3), _attention, torch.bfloat16, 4e-2),
    Operation(
        "layer norm", _many(_normal(ROWS, WIDTH), _normal(WIDTH), _normal(WIDTH)), _layer_norm, torch.float32, 1e-4
    ),
    Operation("softmax", _many(_normal(ROWS, WIDTH)), _softmax, torch.float32, 1e-4),
    Operation("gelu", _many(_normal(ROWS, WIDTH)), _gelu, torch.float32, 1e-3),
    Operation("embedding", _many(_normal(TABLE, WIDTH), _ids, _normal(ROWS, WIDTH)), _embedding, torch.float32, 1e-4),
    Operation("reductions", _many(_normal(ROWS, WIDTH)), _reductions, torch.float32, 1e-4),
    Operation("optimizer step", _SQUARES, _optimizer_step, torch.float32, 1e-4),
)


def reference(operation: Operation, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The same on the host in float64, from the values the device gets (rounded to its dtype)."""
    exact = tuple(value.to(operation.dtype).double() if value.is_floating_point() else value for value in inputs)
    return tuple(tensor.detach() for tensor in operation.compute(*exact))


def worst_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude; infinite when anything found is not finite."""
    found = found.double()
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    scale = max(float(expected.abs().max()), 1e-30)
    return float((found - expected).abs().max()) / scale
