"""Custom encoders for `--model.factory own_encoder:FUNCTION`. See docs/encoders.md.

A module is called as module(input_ids=..., attention_mask=...), both int32 [batch, length], and returns states [batch,
length, width], which trnpipe pools, or vectors [batch, width]. width is --model.hidden-size.
"""

from typing import Any

import torch
from torch import Tensor, nn


class WordsAndNeighbours(nn.Module):
    """A token embedding that is mixed with its two neighbours."""

    def __init__(self, vocab_size: int, pad_id: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width, padding_idx=pad_id)
        self.norm = nn.LayerNorm(width)
        self.neighbours = nn.Linear(3 * width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.unsqueeze(-1).to(self.norm.weight.dtype)
        hidden = self.norm(self.words(input_ids)) * mask  # padding must not reach its neighbours
        edge = torch.zeros_like(hidden[:, :1])
        before, after = torch.cat([edge, hidden[:, :-1]], dim=1), torch.cat([hidden[:, 1:], edge], dim=1)
        mixed: Tensor = self.neighbours(torch.cat([before, hidden, after], dim=-1))
        return hidden + torch.tanh(mixed)


def build(*, vocab_size: int, pad_id: int, max_positions: int, width: int = 32) -> nn.Module:
    """Build a custom model."""
    del max_positions  # the model has no position embeddings
    return WordsAndNeighbours(vocab_size, pad_id, width)


def transformers_model(*, vocab_size: int, pad_id: int, max_positions: int, model_type: str, **sizes: Any) -> nn.Module:
    """Build any model of transformers, by the names of its configuration: model_type distilbert, dim 32, ...

    The weights are read from --model.init-from FOLDER. Without it they are random.
    """
    from transformers import AutoConfig, AutoModel

    names = {"vocab_size": vocab_size, "pad_token_id": pad_id, "max_position_embeddings": max_positions}
    config = AutoConfig.for_model(model_type, **names, **sizes)
    model: nn.Module = AutoModel.from_config(config, attn_implementation="eager")
    model.register_forward_pre_hook(_expand_mask, with_kwargs=True)
    return model


def _expand_mask(model: Any, args: tuple[()], kwargs: dict[str, Tensor]) -> tuple[tuple[()], dict[str, Tensor]]:
    """Convert the mask to additive attention scores [batch, 1, 1, length].

    Models of transformers 5 use such a mask as it is. For a mask [batch, length] they check whether any token is
    masked, which forces a synchronization on XLA.
    """
    scores = (1 - kwargs["attention_mask"])[:, None, None].to(model.dtype) * -1e4
    return args, {**kwargs, "attention_mask": scores}
