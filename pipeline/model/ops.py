"""Linear, layer norm and GELU with a second implementation for XLA:CPU.

XLA:CPU computes a plain sum over rows or columns in one scalar loop, and the backward pass of a transformer has many of
them: bias gradients, both moments of each layer norm. The second implementation computes these sums as products with a
vector of ones, which run in the matrix library on all cores, and GELU with its derivative in one fused expression.
Results agree to 1e-5 (fp32), and `python -m bench.trainer_ratio` measures the speedup. Other devices use PyTorch's
operators.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FUSED_BELOW = 16 * 1024 // 4  # fp32 elements, as in XLA's cpu_instruction_fusion.cc


class Linear(nn.Linear):
    """nn.Linear, whose bias gradient is a matrix product if `sums_by_matmul` is set."""

    sums_by_matmul = False

    def forward(self, values: Tensor) -> Tensor:
        """Map [N, K] to [N, M]."""
        if not self.sums_by_matmul or self.bias is None:  # without a bias there is no sum
            return F.linear(values, self.weight, self.bias)
        result: Tensor = _Linear.apply(values, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last dimension, whose means and sums are matrix products if `sums_by_matmul` is set."""

    sums_by_matmul = False

    def forward(self, values: Tensor) -> Tensor:
        """Normalize [..., D] over the last dimension."""
        if not self.sums_by_matmul:
            return F.layer_norm(values, self.normalized_shape, self.weight, self.bias, self.eps)
        if values.dim() > 2:
            return self.forward(values.flatten(0, -2)).view(values.shape)
        result: Tensor = _LayerNorm.apply(values, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return result


class Gelu(nn.Module):
    """Exact GELU (Hendrycks and Gimpel 2016)."""

    sums_by_matmul = False

    def forward(self, values: Tensor) -> Tensor:
        """Apply GELU to each element."""
        if not self.sums_by_matmul:
            return F.gelu(values)
        result: Tensor = _Gelu.apply(values)  # type: ignore[no-untyped-call]
        return result


class Attention(nn.Module):
    """Scaled dot-product attention (Vaswani et al. 2017).

    `is_decomposed` is for tracing devices: XLA gets single operators either way, PyTorch's function adds a reduction
    over booleans (for fully masked rows, which do not occur here), and XLA:CPU fuses this implementation.
    """

    is_decomposed = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, score_bias: Tensor) -> Tensor:
        """Attend with query, key, value [B, H, T, E] and score_bias, broadcast to [B, H, T, T]. Return [B, H, T, E]."""
        if not self.is_decomposed:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=score_bias)
        # torch.bmm and not torch.matmul, which expands both sides and costs host time on a tracing device.
        batch, heads, tokens, width = query.shape
        query, key, value = (query * width**-0.5).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        scores = torch.bmm(query, key.transpose(1, 2)).view(batch, heads, tokens, tokens) + score_bias
        return torch.bmm(torch.softmax(scores, dim=-1).flatten(0, 1), value).view(batch, heads, tokens, width)


class Dropout(nn.Dropout):
    """nn.Dropout that traces nothing if its probability is 0."""

    def forward(self, values: Tensor) -> Tensor:
        """Apply dropout to each element."""
        return super().forward(values) if self.p else values


def l2_normalize(values: Tensor) -> Tensor:
    """Scale rows [B, D] to length 1. Unlike this, F.normalize compares with a Python float, which traces to f64."""
    return values * torch.rsqrt((values * values).sum(dim=1, keepdim=True) + 1e-12)


def choose_forms(module: nn.Module, *, traced: bool, sums_by_matmul: bool) -> None:
    """Choose the implementation of every operator of this file in `module`."""
    for child in module.modules():
        if isinstance(child, Linear | LayerNorm | Gelu):
            child.sums_by_matmul = sums_by_matmul
        elif isinstance(child, Attention):
            child.is_decomposed = traced


def _column_sums(*values: Tensor) -> list[Tensor]:
    """Sum each [N, D] over its rows, to [D].

    XLA:CPU fuses a product with a vector below 16 KiB and the computation of its matrix (a GELU's derivative) into one
    scalar loop over columns. A step of 64 pairs of 24 tokens took twice as long as one of 40. Two rows of ones are not
    a vector and prevent this.
    """
    first = values[0]
    rows = 1 if first.shape[0] > _FUSED_BELOW else 2
    ones = torch.ones(rows, first.shape[0], dtype=first.dtype, device=first.device)
    return [torch.mm(ones, matrix)[0] for matrix in values]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return torch.addmm(bias, values, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        values, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ values, *_column_sums(grad)


class _LayerNorm(torch.autograd.Function):
    """Layer norm (Ba, Kiros and Hinton 2016). The gradient is (g w - mean(g w) - x^ mean(g w x^)) / std per row."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        width = values.shape[1]
        mean_of = torch.full((width, 1), 1.0 / width, dtype=values.dtype, device=values.device)
        centred = values - values @ mean_of
        inverse = torch.rsqrt((centred * centred) @ mean_of + eps)
        normal = centred * inverse
        ctx.save_for_backward(normal, inverse, weight)
        ctx.is_shifted = bias is not None
        return normal * weight if bias is None else normal * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        normal, inverse, weight = ctx.saved_tensors
        along = grad * normal
        weighted_mean = (weight / weight.shape[0]).reshape(-1, 1)
        shift, slope = grad @ weighted_mean, along @ weighted_mean
        slopes, *shifts = _column_sums(along, grad) if ctx.is_shifted else _column_sums(along)
        inputs = (grad * weight - shift - normal * slope) * inverse
        return inputs, slopes, shifts[0] if shifts else None, None


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values * _normal_cdf(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        density = torch.exp(values * values * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
        result: Tensor = grad * (_normal_cdf(values) + values * density)
        return result


def _normal_cdf(values: Tensor) -> Tensor:
    return (torch.erf(values * math.sqrt(0.5)) + 1.0) * 0.5
