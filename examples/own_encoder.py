"""Encoders that are not trnpipe's own, for `--model.factory own_encoder:FUNCTION`; see docs/encoders.md.

A module is called as module(input_ids=..., attention_mask=...), both int32 [batch, length], and returns states [batch,
length, width], which trnpipe pools, or vectors [batch, width]. width is --model.hidden-size.
"""

from typing import Any

import torch
from torch import Tensor, nn


class WordsAndNeighbours(nn.Module):
    """States from words and those beside them."""

    def __init__(self, vocab_size: int, pad_id: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width, padding_idx=pad_id)
        self.norm = nn.LayerNorm(width)
        self.neighbours = nn.Linear(3 * width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        seen = attention_mask.unsqueeze(-1).to(self.norm.weight.dtype)
        hidden = self.norm(self.words(input_ids)) * seen  # nothing of padding reaches a word beside it
        edge = torch.zeros_like(hidden[:, :1])
        before, after = torch.cat([edge, hidden[:, :-1]], dim=1), torch.cat([hidden[:, 1:], edge], dim=1)
        mixed: Tensor = self.neighbours(torch.cat([before, hidden, after], dim=-1))
        return hidden + torch.tanh(mixed)


def build(*, vocab_size: int, pad_id: int, max_positions: int, width: int = 32) -> nn.Module:
    """A model of one's own."""
    del max_positions  # there are no positions in it
    return WordsAndNeighbours(vocab_size, pad_id, width)


def transformers_model(*, vocab_size: int, pad_id: int, max_positions: int, model_type: str, **sizes: Any) -> nn.Module:
    """A model of transformers of any type, by the names of its configuration: model_type distilbert, dim 32, ...

    Its own weights come with --model.init-from FOLDER; without, it begins at random.
    """
    from transformers import AutoConfig, AutoModel

    names = {"vocab_size": vocab_size, "pad_token_id": pad_id, "max_position_embeddings": max_positions}
    config = AutoConfig.for_model(model_type, **names, **sizes)
    model: nn.Module = AutoModel.from_config(config, attn_implementation="eager")
    model.register_forward_pre_hook(_with_scores, with_kwargs=True)
    return model


def _with_scores(model: Any, args: tuple[()], kwargs: dict[str, Tensor]) -> tuple[tuple[()], dict[str, Tensor]]:
    """The mask as what is added to scores of attention, [batch, 1, 1, length], which models of transformers 5 take as
    it is. A mask [batch, length] they look into: is anything masked at all? That stops a device that traces (XLA).
    """
    hidden = (1 - kwargs["attention_mask"])[:, None, None].to(model.dtype) * -1e4
    return args, {**kwargs, "attention_mask": hidden}
