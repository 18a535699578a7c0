"""Layers with an alternative implementation for XLA:CPU, in addition to PyTorch's operators.

XLA:CPU uses a single scalar loop to compute sums over rows or columns, of which there are many in the backward pass of
a transformer, such as bias gradients and both moments of each layer norm. The alternative implementation multiplies by
a vector of ones instead, so that the sums are computed by the matrix library on all cores. It also computes the GELU
and its derivative in one fused expression. Results agree to within 1e-5 in fp32. Run `python -m bench.trainer_ratio` to
measure the speedup.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_FUSED_BELOW = 16 * 1024 // 4  # in fp32 elements, as in XLA's cpu_instruction_fusion.cc


class Linear(nn.Linear):
    """Linear layer that computes the bias gradient with a matrix product if `sums_by_matmul` is set."""

    sums_by_matmul = False

    def forward(self, values: Tensor) -> Tensor:
        """Apply the layer to values of shape [N, K] and return a tensor of shape [N, M]."""
        if not self.sums_by_matmul or self.bias is None:  # without a bias, no sum needs to be computed
            return F.linear(values, self.weight, self.bias)
        result: Tensor = _Linear.apply(values, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


class LayerNorm(nn.LayerNorm):
    """Layer norm that computes means and sums with matrix products if `sums_by_matmul` is set."""

    sums_by_matmul = False

    def forward(self, values: Tensor) -> Tensor:
        """Normalize values of shape [..., D] over the last dimension."""
        if not self.sums_by_matmul:
            return F.layer_norm(values, self.normalized_shape, self.weight, self.bias, self.eps)
        if values.dim() > 2:
            return self.forward(values.flatten(0, -2)).view(values.shape)
        result: Tensor = _LayerNorm.apply(values, self.weight, self.bias, self.eps)  # type: ignore[no-untyped-call]
        return result


class Gelu(nn.Module):
    """Exact GELU (Hendrycks and Gimpel 2016), which is one fused expression if `sums_by_matmul` is set."""

    sums_by_matmul = False

    def forward(self, values: Tensor) -> Tensor:
        """Apply GELU to each element."""
        if not self.sums_by_matmul:
            return F.gelu(values)
        result: Tensor = _Gelu.apply(values)  # type: ignore[no-untyped-call]
        return result


class Attention(nn.Module):
    """Scaled dot-product attention (Vaswani et al. 2017).

    On devices that trace operations, `is_decomposed` should be set. PyTorch's function would also be decomposed there,
    but it includes a reduction over booleans to handle fully masked rows, which don't occur here. In addition, XLA:CPU
    can fuse this implementation.
    """

    is_decomposed = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor, score_bias: Tensor) -> Tensor:
        """Compute attention for query, key and value of shape [B, H, T, E] and return a tensor of the same shape.

        `score_bias`: bias that is added to the scores, which must be broadcastable to [B, H, T, T].
        """
        if not self.is_decomposed:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=score_bias)
        # Use torch.bmm instead of torch.matmul, which expands both operands and thus takes more host time for tracing.
        batch, heads, tokens, width = query.shape
        query, key, value = (query * width**-0.5).flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        scores = torch.bmm(query, key.transpose(1, 2)).view(batch, heads, tokens, tokens) + score_bias
        return torch.bmm(torch.softmax(scores, dim=-1).flatten(0, 1), value).view(batch, heads, tokens, width)


class Dropout(nn.Dropout):
    """Dropout that doesn't add any operations to the graph if the probability is 0."""

    def forward(self, values: Tensor) -> Tensor:
        """Apply dropout to each element."""
        return super().forward(values) if self.p else values


def l2_normalize(values: Tensor) -> Tensor:
    """Normalize rows of shape [B, D] to unit length.

    Unlike F.normalize, this doesn't compare with a Python float, which would be traced as f64.
    """
    return values * torch.rsqrt((values * values).sum(dim=1, keepdim=True) + 1e-12)


def choose_forms(module: nn.Module, *, traced: bool, sums_by_matmul: bool) -> None:
    """Select the implementation of all layers in `module` that are defined in this file.

    `traced`: whether the device traces operations. `sums_by_matmul`: whether to use the implementation for XLA:CPU.
    """
    for child in module.modules():
        if isinstance(child, Linear | LayerNorm | Gelu):
            child.sums_by_matmul = sums_by_matmul
        elif isinstance(child, Attention):
            child.is_decomposed = traced


def _column_sums(*values: Tensor) -> list[Tensor]:
    """Sum matrices of shape [N, D] over their rows.

    If a matrix is multiplied by a vector of less than 16 KiB, XLA:CPU fuses the product and the computation of the
    matrix (such as the derivative of a GELU) into a single scalar loop over columns. As a result, a step with 64 pairs
    of 24 tokens took twice as long as one with 40 tokens. Using two rows of ones instead of a vector prevents this.
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
    """Layer norm (Ba, Kiros and Hinton 2016).

    The gradient of each row is (g w - mean(g w) - x^ mean(g w x^)) / std, where x^ is the normalized input.
    """

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
