"""A BERT encoder for CPUs that computes no padding.

The tokens of all texts are concatenated, and attention is computed in batches of texts with the same length.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.backends import open_host
from pipeline.model.config import Pooling
from pipeline.model.encoder import BertEncoder, EncoderLayer

# CPU matrix products with weights that are packed for oneDNN, fused with the subsequent operation.
#
# These are the operators that torch.compile uses on CPUs, but they do not require a compiler. On one core of an AVX-512
# machine (1,024 x 384 x 1,536), they are 10 to 20 % faster than F.linear in fp32 and twice as fast in bf16, and they
# make GELU and the residual addition almost free.


def supports_packed_weights(dtype: torch.dtype) -> bool:
    """Return whether this build of PyTorch includes oneDNN and the CPU supports the dtype."""
    has_onednn = all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
    return has_onednn and (dtype is torch.float32 or not open_host().emulates_bf16)


class PackedLinear:
    """A linear layer for [N, K] inputs that is optimised for N = `rows`.

    If `packed` is false, the layer falls back to PyTorch's standard operators, which compute the same results.
    """

    def __init__(self, layer: nn.Linear, dtype: torch.dtype, rows: int, *, packed: bool) -> None:
        operators: Any = torch.ops.mkldnn
        self._product = operators._linear_pointwise if packed else None
        self._bias = layer.bias.detach().to(dtype)
        weight = layer.weight.detach().to(dtype)
        self._weight = operators._reorder_linear_weight(weight, rows) if packed else weight

    def __call__(self, values: Tensor) -> Tensor:
        """Apply the layer to values [N, K]. Returns [N, M]."""
        if self._product is None:
            return F.linear(values, self._weight, self._bias)
        product: Tensor = self._product(values, self._weight, self._bias, "none", [], "")
        return product

    def gelu(self, values: Tensor) -> Tensor:
        """Apply the layer and an exact GELU to values [N, K]. Returns [N, M]."""
        if self._product is None:
            return F.gelu(self(values))
        result: Tensor = self._product(values, self._weight, self._bias, "gelu", [], "none")
        return result

    def plus(self, values: Tensor, other: Tensor) -> Tensor:
        """Apply the layer to values [N, K] and add `other` [N, M]. Returns [N, M]."""
        if self._product is None:
            return other + self(values)
        result: Tensor = self._product.binary(values, other, self._weight, self._bias, "add")
        return result


Run = tuple[int, int, int]
"""(first token, number of texts, tokens per text) of consecutive texts with the same length."""
_SHORT = 16  # below this length, a softmax over the last dimension does not fill a vector register and is 4 x slower
_LONG = 64  # from this length on, fused attention is faster than two batched matrix products


def equal_length_runs(lengths: Sequence[int]) -> list[Run]:
    """Group consecutive texts with the same length."""
    runs, first = list[Run](), 0
    for length, group in groupby(lengths):
        count = len(list(group))
        runs.append((first, count, length))
        first += count * length
    return runs


_POOLS: Mapping[Pooling, Callable[[Tensor], Tensor]] = {  # from [texts, tokens, D] to [texts, D]
    "mean": lambda states: states.mean(1),
    "cls": lambda states: states[:, 0],
    "last": lambda states: states[:, -1],
}


class FlatEncoder:
    """Computes the same vectors as a BertEncoder, but without padding.

    Args:
        dtype: data type of the layers. Embeddings, softmax and pooling are computed in fp32.
        tokens: approximate number of tokens per call, for which the matrix products are optimised.
    """

    def __init__(self, encoder: BertEncoder, dtype: torch.dtype, tokens: int, *, packed: bool) -> None:
        self._word_embeddings = encoder.word_embeddings.weight.detach()
        self._position_embeddings = (encoder.position_embeddings.weight + encoder.type_embeddings.weight[0]).detach()
        self._norm = encoder.embedding_norm
        self._pool, self._dtype = _POOLS[encoder.pooling], dtype
        layers = cast(Sequence[EncoderLayer], encoder.layers)
        self._layers = [_FlatLayer(layer, dtype, tokens, packed=packed) for layer in layers]
        self.dim = self._word_embeddings.shape[1]

    @torch.inference_mode()
    def __call__(self, ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Embed n texts with the given lengths. Returns fp32 [n, D].

        `ids` (int32 [S]) has the concatenated tokens of all texts, optionally followed by padding.
        """
        runs = equal_length_runs(lengths)
        hidden = F.embedding(ids, self._word_embeddings)
        for view, (_, _, length) in _split_runs(hidden, runs):
            view += self._position_embeddings[:length]
        hidden = self._norm.forward(hidden).to(self._dtype)
        for layer in self._layers:
            hidden = layer(hidden, runs)
        return torch.cat([self._pool(view) for view, _ in _split_runs(hidden.float(), runs)])


class _FlatLayer:
    def __init__(self, layer: EncoderLayer, dtype: torch.dtype, tokens: int, *, packed: bool) -> None:
        self._heads = layer.num_heads
        self._qkv, self._attention_output, self._intermediate, self._output = (
            PackedLinear(linear, dtype, tokens, packed=packed)
            for linear in (layer.qkv, layer.attention_output, layer.intermediate, layer.output)
        )
        self._attention_norm, self._output_norm = layer.attention_norm, layer.output_norm

    def __call__(self, hidden: Tensor, runs: Sequence[Run]) -> Tensor:
        """Apply the layer to hidden states of shape [S, D]."""
        attended = _attention(self._qkv(hidden), runs, self._heads)
        hidden = self._attention_norm.forward(self._attention_output.plus(attended, hidden))
        expanded = self._intermediate.gelu(hidden)
        return self._output_norm.forward(self._output.plus(expanded, hidden))


def _attention(qkv: Tensor, runs: Sequence[Run], heads: int) -> Tensor:
    """Compute attention within each text from queries, keys and values [S, 3 D]. Returns [S, D], with 0 for padding."""
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
    """Split values [S, W] into a view [texts, tokens, W] for each run."""
    return [
        (values[first : first + count * length].view(count, length, -1), (first, count, length))
        for first, count, length in runs
    ]
