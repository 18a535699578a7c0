"""Text encoders for static shapes, without data-dependent branches or host synchronisation.

BERT (post layer norm, erf GELU, learned positions), MPNet, which adds a relative position bias, and ModernBERT. Query,
key and value are one matrix. Results match transformers. model/hf.py converts weights from and to Hugging Face names.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.ops import Attention, Dropout, Gelu, LayerNorm, Linear

_MASKED = -1e4  # added to scores of padding: exp underflows to 0 in fp32 and bf16, and there is no inf - inf


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by a residual and a layer norm."""

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
        """Map hidden [B, T, D] to [B, T, D], with score_bias [B, 1, 1 or T, T]."""
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

    H is `num_heads`, or this rank's number of them with tensor parallelism.
    """
    batch, tokens, width = shape
    return qkv.view(batch, tokens, 3, -1, width // num_heads).permute(2, 0, 3, 1, 4).unbind(0)


class TextEncoder(nn.Module, ABC):
    """Encoder from token ids to one embedding per text. Subclasses implement `states`."""

    layers: nn.ModuleList
    packs_rows = True
    """Whether several texts in a row cost no more than their tokens."""

    def __init__(self, config: ModelConfig, pad_id: int) -> None:
        super().__init__()
        self.pad_id = pad_id
        self.width = config.encoder.hidden_size
        self.longest_text = config.max_positions
        """Maximum number of tokens of a text in any row."""
        self.pooling = config.pooling
        self.dropout = Dropout(config.dropout)
        self.run_layer: Callable[..., Tensor] | None = None
        """Function (layer, hidden, score_bias, ...) -> hidden to call instead of the layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return embeddings [B, D], not normalized, of tokens int [B, T], padded with `pad_id`."""
        return self.pool(self.hidden_states(tokens), tokens)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Return the states of the last layer [B, T, D] of tokens int [B, T]."""
        return self.states(tokens, None, (tokens == self.pad_id)[:, None])

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Return embeddings fp32 [R, texts, D] of rows of up to `texts` texts, zeros for missing texts.

        `tokens`, `positions` in the text and `segments` (number of the text from 1, 0: padding) are int32 [R, T]. Texts
        of a row are independent: attention is masked between them, positions restart, and pooling is per text.
        """
        return self.pool_rows(self.row_states(tokens, positions, segments), positions, segments, texts)

    def row_states(self, tokens: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Return the states of the last layer [R, T, D] for `rows`."""
        return self.states(tokens, positions, segments[:, :, None] != segments[:, None, :])

    def pool_rows(self, hidden: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Return the embeddings of `rows` from the states of `row_states`."""
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
        """Return the states of the last layer [B, T, D] of tokens int [B, T].

        `positions`: in the text, int [B, T], None: from 0 in every row. `masked`: bool [B, 1 or T, T], True: ignored.
        """

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Pool states [B, T, D] to [B, D]: the mean, first or last of the states of real tokens."""
        if self.pooling == "cls":
            return hidden[:, 0]
        is_real = tokens != self.pad_id
        chosen = _is_last(is_real) if self.pooling == "last" else is_real
        weights = chosen.to(hidden.dtype).unsqueeze(-1)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)

    @property
    def is_random(self) -> bool:
        """True if random numbers are drawn in training."""
        return self.dropout.p > 0

    def run(self, layer: nn.Module, *inputs: Tensor) -> Tensor:
        """Call a layer, through `run_layer` if set."""
        hidden: Tensor = layer(*inputs) if self.run_layer is None else self.run_layer(layer, *inputs)
        return hidden


class BertEncoder(TextEncoder):
    """BERT (Devlin et al. 2019), using a single token type."""

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


_BUCKETS, _FARTHEST = 32, 128  # buckets and largest distance of relative positions, fixed in MPNet's code


class MPNetEncoder(TextEncoder):
    """MPNet (Song et al. 2020): BERT without token types, with a relative position bias shared by all layers."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__(config, pad_id)
        width = config.encoder.hidden_size
        self.word_embeddings = nn.Embedding(vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_positions, width)
        self.relative_bias = nn.Embedding(_BUCKETS, config.encoder.num_heads)
        self.embedding_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """Return states as TextEncoder does. Texts are contiguous, so distances in the row equal those in the text."""
        embedded = _embed_positions(self.position_embeddings, positions, tokens.shape[1])
        hidden: Tensor = self.dropout(self.embedding_norm(self.word_embeddings(tokens) + embedded))
        # A product with one-hot rows instead of a look-up makes the gradient a product instead of a scatter.
        buckets = _distance_buckets(tokens.shape[1], tokens.device)[..., None]
        one_hot = buckets == torch.arange(_BUCKETS, dtype=torch.int32, device=tokens.device)
        weight = self.relative_bias.weight
        distance_bias = torch.matmul(one_hot.to(weight.dtype), weight).permute(2, 0, 1)  # [H, T, T]
        score_bias = mask_bias(masked, hidden) + distance_bias.to(hidden.dtype)
        for layer in self.layers:
            hidden = self.run(layer, hidden, score_bias)
        return hidden


def _distance_buckets(tokens: int, device: torch.device) -> Tensor:
    """Return T5's bidirectional buckets, int32 [T, T]: exact for distances up to 7, then logarithmic up to 128.

    Source: modeling_mpnet.py of transformers (relative_position_bucket). The same arithmetic computes the borders on
    the host, so that the graph only compares integers.
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
    """Return position embeddings [T, D], or [B, T, D] if `positions` is not None."""
    embedded: Tensor = table.weight[:tokens] if positions is None else table(positions)
    return embedded


def _is_last(segments: Tensor) -> Tensor:
    """Return bool [B, T]: whether a real token (segment above 0) is the last one of its segment."""
    following = torch.cat([segments[:, 1:], torch.zeros_like(segments[:, :1])], dim=1)
    return (segments != following) & (segments != 0)


def mask_bias(masked: Tensor, hidden: Tensor) -> Tensor:
    """Convert a mask, bool [B, 1 or T, T], to a bias of attention scores [B, 1, 1 or T, T] in the type of `hidden`."""
    return (masked.to(hidden.dtype) * _MASKED)[:, None]


# ModernBERT (Warner et al. 2024), also used by gte-modernbert: rotary positions, gated feed-forward, pre-norm with a
# final norm, no biases, and global attention in every third layer only.

GLOBAL_EVERY = 3
"""Every n-th layer, starting with the first, uses global attention."""
LOCAL_ATTENTION = 128
"""Window of local attention in tokens, half of it to either side."""
ROPE_THETA = {True: 160_000.0, False: 10_000.0}
"""Base of rotary angles for global (True) and local attention."""


class ModernLayer(nn.Module):
    """Self-attention and gated feed-forward, each with a layer norm before it and a residual around it."""

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
        """Map hidden [B, T, D] to [B, T, D], with score_bias [B, 1, 1 or T, T] and cosine, sine [B or 1, 1, T, E]."""
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
    """ModernBERT (Warner et al. 2024), without biases and with mostly local attention."""

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
        """Return states as TextEncoder does. Texts are contiguous, so distances in the row equal those in the text."""
        numbers = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        positions = numbers[None] if positions is None else positions
        hidden = self.dropout(self.embedding_norm(self.word_embeddings(tokens)))
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
    """Return cosine and sine, fp32 [B, 1, T, E], of positions int [B, T] (RoFormer, Su et al. 2021).

    They are computed in the graph, because buffers would be cast with the weights.
    """
    evens = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
    frequencies = 1.0 / torch.pow(torch.full_like(evens, theta), evens / width)
    angles = positions.float()[..., None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotate(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate dimension e with e + E/2 of values [B, H, T, E] in fp32, and return them in their own type."""
    precise = values.float()
    first, second = precise.chunk(2, dim=-1)
    return (precise * cosine + torch.cat([-second, first], dim=-1) * sine).to(values.dtype)
