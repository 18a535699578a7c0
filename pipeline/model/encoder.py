"""A BERT encoder for static shapes: no data-dependent branch, no host sync.

The arithmetic is Hugging Face BERT's (post layer norm, erf GELU, learned positions); query, key and value are one
matrix.
Weights go from and to Hugging Face names in model/hf.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import ModelConfig
from pipeline.model.ops import Attention, Gelu, LayerNorm, Linear

_MASKED = -1e4  # added to scores of padding: exp underflows to 0 in fp32 and bf16, and no inf can meet another inf


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each with a residual and a layer norm after it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.encoder
        width = size.hidden_size
        self.num_heads = size.num_heads
        self.dropout = config.dropout
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
        batch, tokens, width = hidden.shape
        heads = (batch, tokens, -1, width // self.num_heads)  # of this rank, where a plan splits a layer's matrices
        query, key, value = (part.reshape(heads).transpose(1, 2) for part in self.qkv(hidden).chunk(3, dim=-1))
        attended = self.attention(query, key, value, score_bias)  # each [B, H, T, D/H]
        attended = self.attention_output(attended.transpose(1, 2).reshape(batch, tokens, -1))
        hidden = self.attention_norm(hidden + self._drop(attended))
        expanded = self.activation(self.intermediate(hidden))
        result: Tensor = self.output_norm(hidden + self._drop(self.output(expanded)))
        return result

    def _drop(self, values: Tensor) -> Tensor:
        return F.dropout(values, self.dropout, self.training) if self.dropout else values


class TextEncoder(nn.Module):
    """Token ids to one embedding a text."""

    def __init__(self, config: ModelConfig, vocab_size: int, pad_id: int) -> None:
        super().__init__()
        width = config.encoder.hidden_size
        self.pad_id = pad_id
        self.pooling = config.pooling
        self.dropout = config.dropout
        self.word_embeddings = nn.Embedding(vocab_size, width)
        self.position_embeddings = nn.Embedding(config.max_positions, width)
        self.type_embeddings = nn.Embedding(2, width)
        self.embedding_norm = LayerNorm(width, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder.num_layers))
        self.run_layer: Callable[..., Tensor] | None = None
        """(layer, hidden, score_bias) -> hidden, in place of a call of the layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int [B, T], padded with `pad_id` -> embeddings [B, D], not normalised."""
        return self.pool(self.hidden_states(tokens), tokens)

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """tokens int [B, T] -> states of the last layer [B, T, D]."""
        return self._states(
            tokens, self.position_embeddings.weight[: tokens.shape[1]], (tokens == self.pad_id)[:, None]
        )

    def rows(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Rows of up to `texts` texts -> embeddings fp32 [R, texts, D], zeros where there is no text.

        Ids, positions in the text and numbers of the texts (from 1; 0: padding), all int32 [R, T]. Texts of a row do
        not see each other: attention is masked between them, positions start anew, pooling is per text.
        """
        apart = segments[:, :, None] != segments[:, None, :]
        hidden = self._states(tokens, self.position_embeddings(positions), apart)
        numbers = torch.arange(1, texts + 1, dtype=torch.int32, device=tokens.device)
        members = segments[:, None, :] == numbers[:, None]  # [R, texts, T]
        if self.pooling == "cls":
            members = members & (positions == 0)[:, None, :]
        weights = members.float()
        with torch.autocast(hidden.device.type, enabled=False):
            sums = torch.matmul(weights, hidden.float())
        return sums / weights.sum(-1, keepdim=True).clamp(min=1.0)

    def _states(self, tokens: Tensor, positions: Tensor, masked: Tensor) -> Tensor:
        """tokens int [B, T], positions' embeddings [T, D] or [B, T, D], masked bool [B, 1 or T, T] -> [B, T, D]."""
        fixed = positions + self.type_embeddings.weight[0]
        hidden: Tensor = self.embedding_norm(self.word_embeddings(tokens) + fixed)
        if self.dropout:
            hidden = F.dropout(hidden, self.dropout, self.training)
        score_bias = (masked.to(hidden.dtype) * _MASKED)[:, None]
        run = self.run_layer
        for layer in self.layers:
            hidden = layer(hidden, score_bias) if run is None else run(layer, hidden, score_bias)
        return hidden

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """States [B, T, D] to [B, D]: the mean over real tokens, or the first state."""
        if self.pooling == "cls":
            return hidden[:, 0]
        real = (tokens != self.pad_id).to(hidden.dtype).unsqueeze(-1)
        return (hidden * real).sum(1) / real.sum(1).clamp(min=1.0)


def initialise(encoder: TextEncoder, generator: torch.Generator) -> None:
    """BERT's initial weights: normal with std 0.02, zero biases, drawn on CPU."""
    with torch.no_grad():
        for child in encoder.modules():
            if isinstance(child, nn.Linear | nn.Embedding):
                child.weight.normal_(0.0, 0.02, generator=generator)
            if isinstance(child, nn.Linear):
                child.bias.zero_()
