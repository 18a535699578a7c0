"""Text encoders with static shapes, without any data-dependent control flow or host synchronization.

We implement BERT (with post layer norm, erf GELU and learned positions), MPNet, which adds a relative position bias,
and ModernBERT. Query, key and value projections are fused into one matrix. The results match those of transformers, and
model/hf.py converts weights to and from Hugging Face names.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.ops import Attention, Dropout, Gelu, LayerNorm, Linear

# Added to the scores of padding. This is low enough for exp to underflow to 0 in fp32 and bf16, but avoids inf - inf.
_MASKED = -1e4


class EncoderLayer(nn.Module):
    """A transformer layer with self-attention and feed-forward, each followed by a residual and a layer norm."""

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
        """Apply the layer to hidden states of shape [B, T, D].

        `score_bias`: bias that is added to the attention scores, of shape [B, 1, 1 or T, T].
        """
        shape, hidden = hidden.shape, hidden.flatten(0, 1)
        query, key, value = _heads(self.qkv(hidden), shape, self.num_heads)
        attended = self.attention(query, key, value, score_bias).transpose(1, 2)  # [B, T, H, E]
        attended = self.attention_output(attended.reshape(len(hidden), -1))
        hidden = self.attention_norm(hidden + self.dropout(attended))
        expanded = self.activation(self.intermediate(hidden))
        result: Tensor = self.output_norm(hidden + self.dropout(self.output(expanded)))
        return result.view(shape)


def _heads(qkv: Tensor, shape: torch.Size, num_heads: int) -> tuple[Tensor, ...]:
    """Split fused projections of shape [B T, 3 H E] into query, key and value, each of shape [B, H, T, E].

    `shape`: shape of the hidden states, [B, T, D]. With tensor parallelism, H is the number of heads on this rank.
    """
    batch, tokens, width = shape
    return qkv.view(batch, tokens, 3, -1, width // num_heads).permute(2, 0, 3, 1, 4).unbind(0)


class TextEncoder(nn.Module, ABC):
    """Base class for encoders that map token ids to one embedding per text. Subclasses implement `states`."""

    layers: nn.ModuleList
    packs_rows = True
    """Whether packing several texts into a row saves computation compared to one padded row per text."""

    def __init__(self, config: ModelConfig, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.width = config.encoder.hidden_size
        self.longest_text = config.max_positions
        """Maximum number of tokens in a text, even if rows are longer."""
        self.pooling = config.pooling
        self.dropout = Dropout(config.dropout)
        self.run_layer: Callable[..., Tensor] | None = None
        """Wrapper `(layer, hidden, score_bias, ...) -> hidden` that is called instead of each layer, if set."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute embeddings of shape [B, D], without normalizing them, for token ids of shape [B, T].

        Texts must be padded with `pad_id`.
        """
        return self.pool(self.hidden_states(tokens), tokens)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Compute the hidden states of the last layer, of shape [B, T, D], for token ids of shape [B, T]."""
        return self.states(tokens, None, (tokens == self.pad_id)[:, None])

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Compute fp32 embeddings of shape [R, texts, D] for rows that each contain up to `texts` packed texts.

        The texts in a row don't affect each other, because attention is masked between texts and each one is pooled
        separately. The embeddings of missing texts are zeros. All inputs are int32 tensors of shape [R, T].

        `positions`: position of each token within its text. `segments`: index of the text that each token belongs to,
        starting from 1, or 0 for padding.
        """
        return self.pool_rows(self.row_states(tokens, positions, segments), positions, segments, texts)

    def row_states(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Compute the hidden states of the last layer, of shape [R, T, D], for packed rows (see `rows`)."""
        return self.states(tokens, positions, segments[:, :, None] != segments[:, None, :])

    def pool_rows(self, hidden: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Pool the hidden states returned by `row_states` to one embedding per text (see `rows`)."""
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
        """Compute the hidden states of the last layer, of shape [B, T, D], for token ids of shape [B, T].

        `positions`: position of each token within its text, of shape [B, T]. If None, there is one text per row.
        `masked`: bool tensor of shape [B, 1 or T, T], where True means that the token is ignored by attention.
        """

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Pool hidden states of shape [B, T, D] to [B, D], ignoring padding.

        Depending on `pooling`, this takes the mean of all tokens, the first token, or the last token.
        """
        if self.pooling == "cls":
            return hidden[:, 0]
        is_real = tokens != self.pad_id
        chosen = _is_last(is_real) if self.pooling == "last" else is_real
        weights = chosen.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)

    @property
    def is_random(self) -> bool:
        """True if the encoder uses random numbers during training."""
        return self.dropout.p > 0

    def run(self, layer: nn.Module, *inputs: Tensor) -> Tensor:
        """Call a layer, using the wrapper `run_layer` if it is set."""
        hidden: Tensor = layer(*inputs) if self.run_layer is None else self.run_layer(layer, *inputs)
        return hidden


class BertEncoder(TextEncoder):
    """BERT (Devlin et al. 2019). All tokens have the same token type."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__(config, pad_id)
        width = config.encoder.hidden_size
        self.word_embeddings = nn.Embedding(vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_positions, width)
        self.type_embeddings = nn.Embedding(2, width)
        self.embedding_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        offsets = (
            _embed_positions(self.position_embeddings, positions, tokens.shape[1]) + self.type_embeddings.weight[0]
        )
        hidden: Tensor = self.dropout(self.embedding_norm(self.word_embeddings(tokens) + offsets))
        score_bias = mask_bias(masked, hidden)
        for layer in self.layers:
            hidden = self.run(layer, hidden, score_bias)
        return hidden


_BUCKETS, _FARTHEST = 32, 128  # number of relative position buckets and maximum distance, which MPNet hardcodes


class MPNetEncoder(TextEncoder):
    """MPNet (Song et al. 2020).

    Unlike BERT, it doesn't use token types and adds a relative position bias, which is shared by all layers.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__(config, pad_id)
        width = config.encoder.hidden_size
        self.word_embeddings = nn.Embedding(vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_positions, width)
        self.relative_bias = nn.Embedding(_BUCKETS, config.encoder.num_heads)
        self.embedding_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        embedded = _embed_positions(self.position_embeddings, positions, tokens.shape[1])
        hidden: Tensor = self.dropout(self.embedding_norm(self.word_embeddings(tokens) + embedded))
        # Texts are contiguous, so we can use distances within the row. Multiplying with one-hot rows instead of looking
        # up the embeddings means that the gradient is also a matrix product instead of a scatter.
        buckets = _distance_buckets(tokens.shape[1], tokens.device)[..., None]
        one_hot = buckets == torch.arange(_BUCKETS, dtype=torch.int32, device=tokens.device)
        weight = self.relative_bias.weight
        distance_bias = torch.matmul(one_hot.to(weight.dtype), weight).permute(2, 0, 1)  # [H, T, T]
        score_bias = mask_bias(masked, hidden) + distance_bias.to(hidden.dtype)
        for layer in self.layers:
            hidden = self.run(layer, hidden, score_bias)
        return hidden


def _distance_buckets(tokens: int, device: torch.device) -> Tensor:
    """Return the bidirectional relative position buckets of T5 as an int32 tensor of shape [T, T].

    Distances up to 7 have separate buckets, and larger ones are grouped on a logarithmic scale up to 128. This follows
    `relative_position_bucket` in modeling_mpnet.py of transformers, except that the bucket borders are precomputed on
    the host with the same arithmetic, so that the graph only needs to compare integers.
    """
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    far = torch.arange(exact, _FARTHEST, dtype=torch.float32)
    steps = (torch.log(far / exact) / math.log(_FARTHEST / exact) * (half - exact)).long().tolist()
    borders = [*range(1, exact + 1), *(exact + steps.index(step) for step in range(1, half - exact))]
    numbers = torch.arange(tokens, dtype=torch.int32, device=device)
    offset = numbers[None, :] - numbers[:, None]  # key position minus query position
    distance = offset.abs()
    buckets = (offset > 0).to(torch.int32) * half
    for border in borders:
        buckets = buckets + (distance >= border).to(torch.int32)
    return buckets


def _embed_positions(table: nn.Embedding, positions: Tensor | None, tokens: int) -> Tensor:
    """Return position embeddings of shape [T, D], or [B, T, D] if `positions` is set."""
    embedded: Tensor = table.weight[:tokens] if positions is None else table(positions)
    return embedded


def _is_last(segments: Tensor) -> Tensor:
    """Return a bool tensor of shape [B, T] that marks the last token of each segment, excluding padding (segment 0)."""
    following = torch.cat([segments[:, 1:], torch.zeros_like(segments[:, :1])], dim=1)
    return (segments != following) & (segments != 0)


def mask_bias(masked: Tensor, hidden: Tensor) -> Tensor:
    """Convert a bool mask of shape [B, 1 or T, T] to a bias for the attention scores, of shape [B, 1, 1 or T, T].

    The bias has the data type of `hidden`.
    """
    return (masked.to(hidden.dtype) * _MASKED)[:, None]


# ModernBERT (Warner et al. 2024), which is also used by gte-modernbert. It uses rotary position embeddings, gated
# feed-forward layers and pre-norm with a final norm. There are no biases, and only every third layer uses global
# attention.

GLOBAL_EVERY = 3
"""Interval between layers that use global attention, starting with the first layer."""
LOCAL_ATTENTION = 128
"""Window size of local attention in tokens. Half of the window is on each side of a token."""
ROPE_THETA = {True: 160_000.0, False: 10_000.0}
"""Base of the rotary embeddings for global (True) and local (False) attention."""


class ModernLayer(nn.Module):
    """A pre-norm transformer layer with self-attention and a gated feed-forward."""

    def __init__(self, config: ModelConfig, *, is_first: bool) -> None:
        super().__init__()
        size, eps = config.encoder, config.layer_norm_eps
        width = size.hidden_size
        self.num_heads = size.num_heads
        self.dropout = Dropout(config.dropout)
        # The input of the first layer is already normalized.
        self.attention_norm = nn.Identity() if is_first else LayerNorm(width, eps=eps, bias=False)
        self.qkv = Linear(width, 3 * width, bias=False)
        self.attention_output = Linear(width, width, bias=False)
        self.attention = Attention()
        self.feed_forward_norm = LayerNorm(width, eps=eps, bias=False)
        self.gated = Linear(width, 2 * size.intermediate_size, bias=False)
        self.output = Linear(size.intermediate_size, width, bias=False)
        self.activation = Gelu()

    def forward(self, hidden: Tensor, score_bias: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Apply the layer to hidden states of shape [B, T, D].

        `score_bias`: bias that is added to the attention scores, of shape [B, 1, 1 or T, T].
        `cosine`, `sine`: rotary embeddings of shape [B or 1, 1, T, E].
        """
        shape, hidden = hidden.shape, hidden.flatten(0, 1)
        query, key, value = _heads(self.qkv(self.attention_norm(hidden)), shape, self.num_heads)
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        attended = self.attention(query, key, value, score_bias).transpose(1, 2)  # [B, T, H, E]
        attended = self.attention_output(attended.reshape(hidden.shape))
        hidden = hidden + self.dropout(attended)
        values, gate = self.gated(self.feed_forward_norm(hidden)).chunk(2, dim=-1)
        hidden = hidden + self.dropout(self.output(self.activation(values) * gate))
        return hidden.view(shape)


class ModernBertEncoder(TextEncoder):
    """ModernBERT (Warner et al. 2024)."""

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
        numbers = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        positions = numbers[None] if positions is None else positions
        hidden = self.dropout(self.embedding_norm(self.word_embeddings(tokens)))
        # Texts are contiguous, so we can use distances within the row.
        is_far = (numbers[None, :] - numbers[:, None]).abs() > LOCAL_ATTENTION // 2
        inputs = {
            is_global: (mask_bias(mask, hidden), *_rotations(positions, self._head_width, ROPE_THETA[is_global]))
            for is_global, mask in ((True, masked), (False, masked | is_far))
        }
        for layer, is_global in zip(self.layers, self._is_global, strict=True):
            hidden = self.run(layer, hidden, *inputs[is_global])
        states: Tensor = self.final_norm(hidden)
        return states


def _rotations(positions: Tensor, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of the rotary embeddings (RoFormer, Su et al. 2021) for positions of shape [B, T].

    Both are fp32 tensors of shape [B, 1, T, E]. We compute them in the graph instead of storing them in buffers, which
    would be cast together with the weights.
    """
    evens = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / torch.pow(torch.full_like(evens, theta), evens / width)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotate(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary embeddings to values of shape [B, H, T, E], rotating each dimension e together with e + E/2.

    This is computed in fp32, and the result is cast back to the original data type.
    """
    precise = values.float()
    first, second = precise.chunk(2, dim=-1)
    return (precise * cosine + torch.cat([-second, first], dim=-1) * sine).to(values.dtype)
