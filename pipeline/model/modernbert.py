"""ModernBERT (Warner et al. 2024) for static shapes: rotary positions, gated feed-forward, mostly local attention.

No matrix and no layer norm has a bias, norms come before what they are for, and there is one after the last layer.
Every third layer sees the whole text, the others see so many tokens to either side. The arithmetic is that of
modeling_modernbert.py of transformers; gte-modernbert and others are of this form.
"""

import torch
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.encoder import TextEncoder, hidden_scores
from pipeline.model.ops import Attention, Gelu, LayerNorm, Linear, dropout


class ModernLayer(nn.Module):
    """Self-attention and gated feed-forward, each with a layer norm before and a residual around it."""

    def __init__(self, config: ModelConfig, *, is_first: bool) -> None:
        super().__init__()
        size, eps = config.encoder, config.layer_norm_eps
        width = size.hidden_size
        self.num_heads = size.num_heads
        self.dropout = config.dropout
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
        batch, tokens, width = hidden.shape
        heads = (batch, tokens, self.num_heads, width // self.num_heads)
        parts = self.qkv(self.attention_norm(hidden)).chunk(3, dim=-1)
        query, key, value = (part.reshape(heads).transpose(1, 2) for part in parts)
        query, key = _rotated(query, cosine, sine), _rotated(key, cosine, sine)
        attended = self.attention(query, key, value, score_bias)  # each [B, H, T, E]
        attended = self.attention_output(attended.transpose(1, 2).reshape(batch, tokens, width))
        hidden = hidden + dropout(attended, self.dropout, training=self.training)
        values, gate = self.gated(self.feed_forward_norm(hidden)).chunk(2, dim=-1)
        return hidden + dropout(self.output(self.activation(values) * gate), self.dropout, training=self.training)


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
        self._is_global = [number % config.global_attention_every == 0 for number in range(size.num_layers)]
        self._reach = config.local_attention // 2
        self._thetas = {True: config.global_rope_theta, False: config.local_rope_theta}

    def states(self, tokens: Tensor, positions: Tensor | None, masked: Tensor) -> Tensor:
        """As TextEncoder.states. Texts of a row lie in one piece, so distances in the row are those in the text."""
        numbers = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
        places = numbers[None] if positions is None else positions
        hidden = dropout(self.embedding_norm(self.word_embeddings(tokens)), self.dropout, training=self.training)
        is_far = (numbers[None, :] - numbers[:, None]).abs() > self._reach
        inputs = {
            kind: (hidden_scores(seen, hidden), *_rotations(places, self._head_width, self._thetas[kind]))
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
