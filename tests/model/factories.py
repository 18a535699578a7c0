"""Functions that `model.factory` may name, some of them wrong in one way."""

from typing import Any

import torch
from torch import Tensor, nn


class States(nn.Module):
    """A word's state is that of itself and of the mean of its text. `change`: what is made of the states."""

    def __init__(self, vocab_size: int, width: int = 16, *, change: str = "", positions: int = 0) -> None:
        super().__init__()
        self.change = change
        self.words = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.register_buffer("share", torch.full((width,), 0.5), persistent=False)
        self.share: Tensor
        self.places = nn.Embedding(positions, width) if positions else None

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        if self.change == "look" and bool(attention_mask.all()):  # asked on the host
            attention_mask = torch.ones_like(attention_mask)
        hidden = self.words(input_ids)
        if self.change == "padding":  # is seen, too
            return hidden + hidden.mean(1, keepdim=True)
        seen = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        states = hidden + torch.tanh(self.mix(mean * self.share))
        if self.places is not None:
            states = states + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        match self.change:
            case "vectors":
                return (states * seen).sum(1)
            case "tuple":
                return (states,)
            case "scores":
                return states[..., 0, 0]
            case "integers":
                return states.long()
            case "nan":
                return states / 0.0 * 0.0
            case "raise":
                raise RuntimeError("no such head\nand a second line")
        return states


def states(*, vocab_size: int, pad_id: int, max_positions: int, width: int = 16, change: str = "") -> nn.Module:
    return States(vocab_size, width, change=change)


def looks(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return States(vocab_size, change="look")


def raises(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    raise KeyError("layers")


def no_arguments() -> nn.Module:
    return States(10)


def wrong(*, vocab_size: int, pad_id: int, max_positions: int, fault: str) -> Any:
    """Build a module with one fault, or none at all."""
    if fault == "few words":
        return States(vocab_size - 1)
    if fault == "few positions":
        return States(vocab_size, positions=max_positions - 1)
    made = States(vocab_size)
    if fault == "tied":
        made.again = made.words
    elif fault == "frozen":
        made.words.weight.requires_grad_(False)
    elif fault == "buffer":
        made.norm = nn.BatchNorm1d(16)
    else:
        return nn.Identity() if fault == "empty" else "bert-base-uncased"
    return made
