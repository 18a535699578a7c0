"""The encoder on a CPU, without padding: the tokens of many texts back to back, attention among texts of one length."""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import Pooling
from pipeline.model.encoder import BertEncoder, EncoderLayer
from pipeline.model.ops import LayerNorm

# Matrix products on a CPU with weights laid out for oneDNN, and what follows them in the same kernel.
#
# The operators are those torch.compile uses on CPUs; they need no compiler. Against F.linear on one core of an AVX-512
# machine (1,024 x 384 x 1,536): 10 to 20 % faster, and GELU and the residual cost next to nothing; in bf16 twice as
# fast.


def packs_weights(dtype: torch.dtype) -> bool:
    """True where PyTorch has these operators (builds with oneDNN) and the CPU does that arithmetic."""
    operators: Any = torch.ops.mkldnn
    if not all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    return dtype is torch.float32 or bool(operators._is_mkldnn_bf16_supported())


class PackedLinear:
    """A Linear for [N, K] inputs of one dtype. `rows`: the N it is laid out for; others work.

    `packed` False: the same arithmetic with PyTorch's ordinary operators.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, rows: int, *, packed: bool) -> None:
        operators: Any = torch.ops.mkldnn
        self._product = operators._linear_pointwise if packed else None
        self._bias = layer.bias.detach().to(dtype)
        weight = layer.weight.detach().to(dtype)
        self._weight = operators._reorder_linear_weight(weight, rows) if packed else weight

    def __call__(self, values: Tensor) -> Tensor:
        """[N, K] -> [N, M]."""
        if self._product is None:
            return F.linear(values, self._weight, self._bias)
        product: Tensor = self._product(values, self._weight, self._bias, "none", [], "")
        return product

    def gelu(self, values: Tensor) -> Tensor:
        """[N, K] -> exact GELU of the product [N, M]."""
        if self._product is None:
            return F.gelu(self(values))
        result: Tensor = self._product(values, self._weight, self._bias, "gelu", [], "none")
        return result

    def plus(self, values: Tensor, other: Tensor) -> Tensor:
        """[N, K] and fp32 [N, M] -> product + other, fp32 [N, M]."""
        if self._product is None or values.dtype is not torch.float32:
            return other + self(values)
        result: Tensor = self._product.binary(values, other, self._weight, self._bias, "add")
        return result


Run = tuple[int, int, int]
"""(first token, texts, tokens of each) of neighbours of one length."""
_SHORT = 16  # softmax over fewer scores than a vector register holds is 4 x slower than over a strided dimension
_LONG = 64  # from here on the fused attention is faster than two batched products


def runs_of(lengths: Sequence[int]) -> list[Run]:
    """Neighbours of one length."""
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
    """Vectors of texts, the same as those of a BertEncoder.

    Args:
        dtype: of matrix products and attention; everything between them is fp32.
        tokens: about so many will come at a time.
    """

    def __init__(self, encoder: BertEncoder, dtype: torch.dtype, tokens: int, *, packed: bool) -> None:
        self._words = encoder.word_embeddings.weight.detach()
        self._places = (encoder.position_embeddings.weight + encoder.type_embeddings.weight[0]).detach()
        self._norm = encoder.embedding_norm
        self._pool = _POOLS[encoder.pooling]
        layers = cast(Sequence[EncoderLayer], encoder.layers)
        self._layers = [_FlatLayer(layer, dtype, tokens, packed=packed) for layer in layers]
        self.dim = self._words.shape[1]

    @torch.inference_mode()
    def __call__(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Ids int32 [S] of n texts back to back, their lengths [n], perhaps padding after them -> fp32 [n, D]."""
        runs = runs_of(lengths)
        hidden = F.embedding(ids, self._words)
        for part, (_, _, length) in _parts(hidden, runs):
            part += self._places[:length]
        hidden = _normed(self._norm, hidden)
        for layer in self._layers:
            hidden = layer(hidden, runs)
        return torch.cat([self._pool(part) for part, _ in _parts(hidden, runs)])


class _FlatLayer:
    def __init__(self, layer: EncoderLayer, dtype: torch.dtype, tokens: int, *, packed: bool) -> None:
        self._dtype, self._heads = dtype, layer.num_heads
        self._qkv, self._attention_output, self._intermediate, self._output = (
            PackedLinear(part, dtype, tokens, packed=packed)
            for part in (layer.qkv, layer.attention_output, layer.intermediate, layer.output)
        )
        self._attention_norm, self._output_norm = layer.attention_norm, layer.output_norm

    def __call__(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        """fp32 [S, D] -> fp32 [S, D]."""
        attended = _attention(self._qkv(hidden.to(self._dtype)), runs, self._heads)
        hidden = _normed(self._attention_norm, self._attention_output.plus(attended, hidden))
        expanded = self._intermediate.gelu(hidden.to(self._dtype))
        return _normed(self._output_norm, self._output.plus(expanded, hidden))


def _attention(qkv: Tensor, runs: Sequence[Run], heads: int) -> Tensor:
    """Queries, keys and values [S, 3 D] -> [S, D]; zeros for padding."""
    result = torch.zeros(qkv.shape[0], qkv.shape[1] // 3, dtype=qkv.dtype)
    for (part, (_, count, length)), (target, _) in zip(_parts(qkv, runs), _parts(result, runs), strict=True):
        split = part.view(count, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
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


def _parts(values: Tensor, runs: Sequence[Run]) -> list[tuple[Tensor, Run]]:
    """Views [texts, tokens, W] of [S, W], one a run."""
    return [
        (values[first : first + count * length].view(count, length, -1), (first, count, length))
        for first, count, length in runs
    ]


def _normed(norm: LayerNorm, values: Tensor) -> Tensor:
    return F.layer_norm(values, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
