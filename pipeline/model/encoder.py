"""Text encoders for static shapes: no data-dependent branch, no host sync.

Here are BERT (post layer norm, erf GELU, learned positions), MPNet, which adds a bias by the distance of two tokens,
and ModernBERT. Query, key and value are one matrix. The arithmetic is that of transformers. Weights go from and to
Hugging Face names in model/hf.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.ops import Attention, Dropout, Gelu, LayerNorm, Linear

_MASKED = -1e4  # added to scores of padding: exp underflows to 0 in fp32 and bf16, and no inf can meet another inf


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a residual and a layer norm after it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.encoder
        width = size.hidden_size
        self.num_heads = size.num_heads
        self.dropout = Dropout(config.dropout)
        self.qkv = Linear(width, 3 * width)
        self.attention_output = Linear(width, width)
        self.attention_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.intermediate = Linear(width, size.intermediate_size)
        self.output = Linear(size.intermediate_size, width)
        self.activation = Gelu()
        self.attention = Attention()
        self.output_norm = LayerNorm(width, eps=config.layer_norm_eps)

    def forward(self, hidden: Tensor, score_bias: Tensor) -> Tensor:
        """hidden [B, T, D], score_bias [B, 1, 1 or T, T] -> [B, T, D]."""
        shape, hidden = hidden.shape, hidden.flatten(0, 1)
        query, key, value = _heads(self.qkv(hidden), shape, self.num_heads)
        attended = self.attention(query, key, value, score_bias).transpose(1, 2)  # [B, T, H, E]
        attended = self.attention_output(attended.reshape(len(hidden), -1))
        hidden = self.attention_norm(hidden + self.dropout(attended))
        expanded = self.activation(self.intermediate(hidden))
        result: Tensor = self.output_norm(hidden + self.dropout(self.output(expanded)))
        return result.view(shape)


def _heads(qkv: Tensor, shape: torch.Size, num_heads: int) -> tuple[Tensor, ...]:
    """Split [B T, 3 H E] of states [B, T, D] into query, key and value, each [B, H, T, E].

    H is `num_heads`, or this rank's share of them if a plan splits the matrices of a layer.
    """
    batch, tokens, width = shape
    return qkv.view(batch, tokens, 3, -1, width // num_heads).permute(2, 0, 3, 1, 4).unbind(0)


class TextEncoder(nn.Module, ABC):
    """Token ids to one embedding a text. The architectures say what happens between (`states`)."""

    layers: nn.ModuleList
    packs_rows = True
    """Several texts of a row cost what their tokens cost."""

    def __init__(self, config: ModelConfig, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.width = config.encoder.hidden_size
        self.longest_text = config.max_positions
        """Tokens of the longest text of any row."""
        self.pooling = config.pooling
        self.dropout = Dropout(config.dropout)
        self.run_layer: Callable[..., Tensor] | None = None
        """(layer, hidden, score_bias, ...) -> hidden, in place of a call of the layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [B, T], padded with `pad_id` -> embeddings [B, D], not normalised."""
        return self.pool(self.hidden_states(tokens), tokens)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """tokens int [B, T] -> states of the last layer [B, T, D]."""
        return self.states(tokens, None, (tokens == self.pad_id)[:, None])

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Rows of up to `texts` texts -> embeddings fp32 [R, texts, D], zeros where there is no text.

        Ids, positions in the text and numbers of the texts (from 1; 0: padding), all int32 [R, T]. Texts of a row do
        not see each other: attention is masked between them, positions start anew, pooling is per text.
        """
        return self.pool_rows(self.row_states(tokens, positions, segments), positions, segments, texts)

    def row_states(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """States of the last layer [R, T, D] of such rows."""
        return self.states(tokens, positions, segments[:, :, None] != segments[:, None, :])

    def pool_rows(self, hidden: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Such states to embeddings, see `rows`."""
        numbers = torch.arange(1, texts + 1, dtype=torch.int32, device=hidden.device)
        members = segments[:, None, :] == numbers[:, None]  # [R, texts, T]
        if self.pooling == "cls":
            members = members & (positions == 0)[:, None, :]
        elif self.pooling == "last":
            members = members & _is_last(segments)[:, None, :]
        weights = members.float()
        with torch.autocast(hidden.device.type, enabled=False):
            sums = torch.matmul(weights, hidden.float())
        return sums / weights.sum(-1, keepdim=True).clamp(min=1.0)

    @abstractmethod
    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """Tokens int [B, T] to states of the last layer [B, T, D].

        `positions` in the text, int [B, T] (None: from 0 on in every row); `masked` bool [B, 1 or T, T]: is not seen.
        """

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States [B, T, D] to [B, D]: the mean over real tokens, the first or the last of their states."""
        if self.pooling == "cls":
            return hidden[:, 0]
        is_real = tokens != self.pad_id
        chosen = _is_last(is_real) if self.pooling == "last" else is_real
        weights = chosen.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)

    @property
    def is_random(self) -> bool:
        """Whether random numbers are drawn in training."""
        return self.dropout.p > 0

    def run(self, layer: nn.Module, *inputs: Tensor) -> Tensor:
        """One layer, or what stands in for it."""
        found: Tensor = layer(*inputs) if self.run_layer is None else self.run_layer(layer, *inputs)
        return found


class BertEncoder(TextEncoder):
    """BERT (Devlin et al. 2019), with one token type in use."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__(config, pad_id)
        width = config.encoder.hidden_size
        self.word_embeddings = nn.Embedding(vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_positions, width)
        self.type_embeddings = nn.Embedding(2, width)
        self.embedding_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        fixed = _looked_up(self.position_embeddings, positions, tokens.shape[1]) + self.type_embeddings.weight[0]
        hidden: Tensor = self.dropout(self.embedding_norm(self.word_embeddings(tokens) + fixed))
        score_bias = hidden_scores(masked, hidden)
        for layer in self.layers:
            hidden = self.run(layer, hidden, score_bias)
        return hidden


_BUCKETS, _FARTHEST = 32, 128  # of relative positions, as in every MPNet: the numbers are in its code, not its settings


class MPNetEncoder(TextEncoder):
    """MPNet (Song et al. 2020): BERT without token types, with a bias by distance that all layers share."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__(config, pad_id)
        width = config.encoder.hidden_size
        self.word_embeddings = nn.Embedding(vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_positions, width)
        self.relative_bias = nn.Embedding(_BUCKETS, config.encoder.num_heads)
        self.embedding_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """Texts of a row lie in one piece, so distances in the row are those in the text."""
        places = _looked_up(self.position_embeddings, positions, tokens.shape[1])
        hidden: Tensor = self.dropout(self.embedding_norm(self.word_embeddings(tokens) + places))
        # A product with rows of one 1 each, not a look-up: its gradient is a product too, and no scatter.
        buckets = _distance_buckets(tokens.shape[1], tokens.device)[..., None]
        chosen = buckets == torch.arange(_BUCKETS, dtype=torch.int32, device=tokens.device)
        weight = self.relative_bias.weight
        by_distance = torch.matmul(chosen.to(weight.dtype), weight).permute(2, 0, 1)  # [H, T, T]
        score_bias = hidden_scores(masked, hidden) + by_distance.to(hidden.dtype)
        for layer in self.layers:
            hidden = self.run(layer, hidden, score_bias)
        return hidden


def _distance_buckets(tokens: int, device: torch.device) -> Tensor:
    """int32 [T, T], of T5's form in both directions: distances to 7 one by one, then by their logarithm to 128.

    Source: modeling_mpnet.py of transformers (relative_position_bucket). The borders are found here in the same
    arithmetic, so that a graph has comparisons of whole numbers alone.
    """
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    far = torch.arange(exact, _FARTHEST, dtype=torch.float32)
    steps = (torch.log(far / exact) / math.log(_FARTHEST / exact) * (half - exact)).long().tolist()
    borders = [*range(1, exact + 1), *(exact + steps.index(step) for step in range(1, half - exact))]
    numbers = torch.arange(tokens, dtype=torch.int32, device=device)
    ahead = numbers[None, :] - numbers[:, None]  # of the key, from the query
    distance = ahead.abs()
    found = (ahead > 0).to(torch.int32) * half
    for border in borders:
        found = found + (distance >= border).to(torch.int32)
    return found


def _looked_up(table: nn.Embedding, positions: Tensor | None, tokens: int) -> Tensor:
    """[T, D], or [B, T, D] of positions that are given."""
    found: Tensor = table.weight[:tokens] if positions is None else table(positions)
    return found


def _is_last(segments: Tensor) -> Tensor:
    """bool [B, T]: a token (not 0) of another segment than the one behind it, or of the row's end."""
    following = torch.cat([segments[:, 1:], torch.zeros_like(segments[:, :1])], dim=1)
    return (segments != following) & (segments != 0)


def hidden_scores(masked: Tensor, hidden: Tensor) -> Tensor:
    """bool [B, 1 or T, T] -> what is added to attention scores, [B, 1, 1 or T, T] in the type of `hidden`."""
    return (masked.to(hidden.dtype) * _MASKED)[:, None]


# ModernBERT (Warner et al. 2024): rotary positions, gated feed-forward, mostly local attention.
#
# No matrix and no layer norm has a bias, norms come before what they are for, and there is one after the last layer.
# Every third layer sees the whole text, the others see so many tokens to either side. gte-modernbert and others are of
# this form.

GLOBAL_EVERY = 3
"""Layers of which the first sees the whole text, the others their surroundings."""
LOCAL_ATTENTION = 128
"""Tokens that the other layers see, half of them to either side."""
ROPE_THETA = {True: 160_000.0, False: 10_000.0}
"""Base of rotary angles of layers that see the whole text, and of the others."""


class ModernLayer(nn.Module):
    """Self-attention and gated feed-forward, each with a layer norm before and a residual around it."""

    def __init__(self, config: ModelConfig, *, is_first: bool) -> None:
        super().__init__()
        size, eps = config.encoder, config.layer_norm_eps
        width = size.hidden_size
        self.num_heads = size.num_heads
        self.dropout = Dropout(config.dropout)
        # What the first layer reads was normalised just before.
        self.attention_norm = nn.Identity() if is_first else LayerNorm(width, eps=eps, bias=False)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.attention_output = Linear(width, width, bias=False)
        self.attention = Attention()
        self.feed_forward_norm = LayerNorm(width, eps=eps, bias=False)
        self.gated = Linear(width, 2 * size.intermediate_size, bias=False)
        self.output = Linear(size.intermediate_size, width, bias=False)
        self.activation = Gelu()

    def forward(self, hidden: Tensor, score_bias: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """hidden [B, T, D], score_bias [B, 1, 1 or T, T], cosine and sine fp32 [B or 1, 1, T, E] -> [B, T, D]."""
        shape, hidden = hidden.shape, hidden.flatten(0, 1)
        query, key, value = _heads(self.qkv(self.attention_norm(hidden)), shape, self.num_heads)
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        attended = self.attention(query, key, value, score_bias).transpose(1, 2)  # [B, T, H, E]
        attended = self.attention_output(attended.reshape(hidden.shape))
        hidden = hidden + self.dropout(attended)
        values, gate = self.gated(self.feed_forward_norm(hidden)).chunk(2, dim=-1)
        hidden = hidden + self.dropout(self.output(self.activation(values) * gate))
        return hidden.view(shape)


class ModernBertEncoder(TextEncoder):
    """Tokens to states by the layers above."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__(config, pad_id)
        size = config.encoder
        self.word_embeddings = nn.Embedding(vocab_size, size.hidden_size)
        self.embedding_norm = LayerNorm(size.hidden_size, eps=config.layer_norm_eps, bias=False)
        self.layers = nn.ModuleList(ModernLayer(config, is_first=number == 0) for number in range(size.num_layers))
        self.final_norm = LayerNorm(size.hidden_size, eps=config.layer_norm_eps, bias=False)
        self._head_width = size.hidden_size // size.num_heads
        self._is_global = [number % GLOBAL_EVERY == 0 for number in range(size.num_layers)]

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """Texts of a row lie in one piece, so distances in the row are those in the text."""
        numbers = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        places = numbers[None] if positions is None else positions
        hidden = self.dropout(self.embedding_norm(self.word_embeddings(tokens)))
        is_far = (numbers[None, :] - numbers[:, None]).abs() > LOCAL_ATTENTION // 2
        inputs = {
            kind: (hidden_scores(seen, hidden), *_rotations(places, self._head_width, ROPE_THETA[kind]))
            for kind, seen in ((True, masked), (False, masked | is_far))
        }
        for layer, is_global in zip(self.layers, self._is_global, strict=True):
            hidden = self.run(layer, hidden, *inputs[is_global])
        found: Tensor = self.final_norm(hidden)
        return found


def _rotations(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every angle, fp32 [B, 1, T, E], of positions int [B, T] (RoFormer, Su et al. 2021).

    Made in the graph: as buffers they would be cast with the weights.
    """
    evens = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / torch.pow(torch.full_like(evens, theta), evens / width)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotated(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """[B, H, T, E] in its own type, turned in fp32: dimension e with e + E/2."""
    exact = values.float()
    first, second = exact.chunk(2, dim=-1)
    return (exact * cosine + torch.cat([-second, first], dim=-1) * sine).to(values.dtype)
