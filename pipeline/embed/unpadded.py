"""The encoder on a CPU without padding: the tokens of texts are concatenated, attention is batched by text length."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import Pooling
from pipeline.model.encoder import BertEncoder, EncoderLayer
from pipeline.model.ops import LayerNorm

# Matrix products on a CPU with weights packed for oneDNN, fused with the operation that follows.
#
# The operators are those of torch.compile on CPUs, but need no compiler. Compared with F.linear on one core of an
# AVX-512 machine (1,024 x 384 x 1,536) they are 10 to 20 % faster, twice as fast in bf16, and GELU and the residual
# addition are almost free.


def supports_packed_weights(dtype: torch.dtype) -> bool:
    """Return whether PyTorch has these operators (builds with oneDNN) and the CPU supports the dtype."""
    operators: Any = torch.ops.mkldnn
    if not all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    return dtype is torch.float32 or bool(operators._is_mkldnn_bf16_supported())


class PackedLinear:
    """A Linear for [N, K] inputs of one dtype. `rows`: the N that it is optimised for.

    Without `packed` the results are the same, computed with PyTorch's standard operators.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, rows: int, *, packed: bool) -> None:
        operators: Any = torch.ops.mkldnn
        self._product = operators._linear_pointwise if packed else None
        self._bias = layer.bias.detach().to(dtype)
        weight = layer.weight.detach().to(dtype)
        self._weight = operators._reorder_linear_weight(weight, rows) if packed else weight

    def __call__(self, values: Tensor) -> Tensor:
        """Compute the product, [N, K] -> [N, M]."""
        if self._product is None:
            return F.linear(values, self._weight, self._bias)
        product: Tensor = self._product(values, self._weight, self._bias, "none", [], "")
        return product

    def gelu(self, values: Tensor) -> Tensor:
        """Compute the exact GELU of the product, [N, K] -> [N, M]."""
        if self._product is None:
            return F.gelu(self(values))
        result: Tensor = self._product(values, self._weight, self._bias, "gelu", [], "none")
        return result

    def plus(self, values: Tensor, other: Tensor) -> Tensor:
        """Compute product + other, [N, K] and fp32 [N, M] -> fp32 [N, M]."""
        if self._product is None or values.dtype is not torch.float32:
            return other + self(values)
        result: Tensor = self._product.binary(values, other, self._weight, self._bias, "add")
        return result


Run = tuple[int, int, int]
"""(first token, number of texts, tokens per text) of consecutive texts of equal length."""
_SHORT = 16  # a softmax over fewer scores than fit a vector register is 4 x slower than over a strided dimension
_LONG = 64  # fused attention is faster than two batched products from this length


def equal_length_runs(lengths: Sequence[int]) -> list[Run]:
    """Group consecutive texts of equal length."""
    runs, first = list[Run](), 0
    for length, group in groupby(lengths):
        count = len(list(group))
        runs.append((first, count, length))
        first += count * length
    return runs


_POOLS: Mapping[Pooling, Callable[[Tensor], Tensor]] = {  # [texts, tokens, D] to [texts, D]
    "mean": lambda states: states.mean(1),
    "cls": lambda states: states[:, 0],
    "last": lambda states: states[:, -1],
}


class FlatEncoder:
    """Computes the same vectors as a BertEncoder, without padding.

    Args:
        dtype: data type of matrix products and attention. All other operations are fp32.
        tokens: approximate tokens per call.
    """

    def __init__(self, encoder: BertEncoder, dtype: torch.dtype, tokens: int, *, packed: bool) -> None:
        self._word_embeddings = encoder.word_embeddings.weight.detach()
        self._position_embeddings = (encoder.position_embeddings.weight + encoder.type_embeddings.weight[0]).detach()
        self._norm = encoder.embedding_norm
        self._pool = _POOLS[encoder.pooling]
        layers = cast(Sequence[EncoderLayer], encoder.layers)
        self._layers = [_FlatLayer(layer, dtype, tokens, packed=packed) for layer in layers]
        self.dim = self._word_embeddings.shape[1]

    @torch.inference_mode()
    def __call__(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Embed n texts of `lengths` [n]: concatenated ids int32 [S], optionally padded at the end -> fp32 [n, D]."""
        runs = equal_length_runs(lengths)
        hidden = F.embedding(ids, self._word_embeddings)
        for view, (_, _, length) in _split_runs(hidden, runs):
            view += self._position_embeddings[:length]
        hidden = _layer_norm(self._norm, hidden)
        for layer in self._layers:
            hidden = layer(hidden, runs)
        return torch.cat([self._pool(view) for view, _ in _split_runs(hidden, runs)])


class _FlatLayer:
    def __init__(self, layer: EncoderLayer, dtype: torch.dtype, tokens: int, *, packed: bool) -> None:
        self._dtype, self._heads = dtype, layer.num_heads
        self._qkv, self._attention_output, self._intermediate, self._output = (
            PackedLinear(linear, dtype, tokens, packed=packed)
            for linear in (layer.qkv, layer.attention_output, layer.intermediate, layer.output)
        )
        self._attention_norm, self._output_norm = layer.attention_norm, layer.output_norm

    def __call__(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        """Compute the layer, fp32 [S, D] -> fp32 [S, D]."""
        attended = _attention(self._qkv(hidden.to(self._dtype)), runs, self._heads)
        hidden = _layer_norm(self._attention_norm, self._attention_output.plus(attended, hidden))
        expanded = self._intermediate.gelu(hidden.to(self._dtype))
        return _layer_norm(self._output_norm, self._output.plus(expanded, hidden))


def _attention(qkv: Tensor, runs: Sequence[Run], heads: int) -> Tensor:
    """Compute attention within each text: queries, keys and values [S, 3 D] -> [S, D], 0 for padding."""
    result = torch.zeros(qkv.shape[0], qkv.shape[1] // 3, dtype=qkv.dtype)
    for (view, (_, count, length)), (target, _) in zip(_split_runs(qkv, runs), _split_runs(result, runs), strict=True):
        split = view.view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        if length >= _LONG:
            attended = F.scaled_dot_product_attention(split[0], split[1], split[2])
        else:
            query, key, value = split.reshape(3, count * heads, length, -1).unbind(0)  # [B, T, E] each
            query = query * query.shape[-1] ** -0.5
            if length < _SHORT:
                scores = torch.bmm(key, query.transpose(1, 2)).softmax(1, dtype=torch.float32)
                weights = scores.to(query.dtype).transpose(1, 2)
            else:
                weights = torch.bmm(query, key.transpose(1, 2)).softmax(2, dtype=torch.float32).to(query.dtype)
            attended = torch.bmm(weights, value).view(count, heads, length, -1)
        target.view(count, length, heads, -1).copy_(attended.transpose(1, 2))
    return result


def _split_runs(values: Tensor, runs: Sequence[Run]) -> list[tuple[Tensor, Run]]:
    """Split [S, W] into one view [texts, tokens, W] per run."""
    return [
        (values[first : first + count * length].view(count, length, -1), (first, count, length))
        for first, count, length in runs
    ]


def _layer_norm(norm: LayerNorm, values: Tensor) -> Tensor:
    return F.layer_norm(values, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
