"""Functions that `model.factory` may name, most of them wrong in one way."""

from typing import Any

import torch
from torch import Tensor, nn


class States(nn.Module):
    """A word's state is that of itself and of the mean of its text."""

    def __init__(self, vocab_size: int, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.register_buffer("share", torch.full((width,), 0.5), persistent=False)
        self.share: Tensor

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.words(input_ids)
        seen = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        mixed: Tensor = hidden + torch.tanh(self.mix(mean * self.share))
        return mixed


class Vectors(States):
    """The same, pooled by itself: the sum over the text."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = super().forward(input_ids, attention_mask)
        return (states * attention_mask.unsqueeze(-1)).sum(1)


def states(*, vocab_size: int, pad_id: int, max_positions: int, width: int = 16) -> nn.Module:
    return States(vocab_size, width)


def vectors(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return Vectors(vocab_size)


def raises(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    raise KeyError("layers")


def no_module(*, vocab_size: int, pad_id: int, max_positions: int) -> Any:
    return "bert-base-uncased"


def no_arguments() -> nn.Module:
    return States(10)


class Returns(States):
    """Whatever `change` makes of the states."""

    def __init__(self, vocab_size: int, change: str) -> None:
        super().__init__(vocab_size)
        self.change = change

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        found = super().forward(input_ids, attention_mask)
        if self.change == "tuple":
            return (found,)
        if self.change == "scores":
            return found[..., 0, 0]
        if self.change == "integers":
            return found.long()
        if self.change == "nan":
            return found / 0.0 * 0.0
        if self.change == "raise":
            raise RuntimeError("no such head\nand a second line")
        return self.words(input_ids) + self.words(input_ids).mean(1, keepdim=True)  # padding, too


def returns(*, vocab_size: int, pad_id: int, max_positions: int, change: str) -> nn.Module:
    return Returns(vocab_size, change)


def few_words(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return States(vocab_size - 1)


def few_positions(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return Positions(vocab_size, max_positions - 1)


def positions(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return Positions(vocab_size, max_positions)


class Positions(States):
    def __init__(self, vocab_size: int, positions: int) -> None:
        super().__init__(vocab_size)
        self.places = nn.Embedding(positions, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found = super().forward(input_ids, attention_mask)
        places: Tensor = self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        return found + places


def tied(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    made = States(vocab_size)
    made.again = made.words
    return made


def frozen(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    made = States(vocab_size)
    made.words.weight.requires_grad_(False)
    return made


def running(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    made = States(vocab_size)
    made.norm = nn.BatchNorm1d(16)
    return made


def empty(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return nn.Identity()


def bert(*, vocab_size: int, pad_id: int, max_positions: int, add_pooling_layer: bool, **sizes: Any) -> nn.Module:
    """Of transformers, as examples/own_encoder.py makes others."""
    from transformers import AutoConfig, AutoModel

    names: dict[str, Any] = {"vocab_size": vocab_size, "pad_token_id": pad_id}
    names["max_position_embeddings"] = max_positions
    config = AutoConfig.for_model(**names, **sizes)
    make: Any = AutoModel.from_config
    model: nn.Module = make(config, attn_implementation="eager", add_pooling_layer=add_pooling_layer)
    return model


class Looks(States):
    """Asks on the host whether anything is masked."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        if bool(attention_mask.all()):
            return super().forward(input_ids, torch.ones_like(attention_mask))
        return super().forward(input_ids, attention_mask)


def looks(*, vocab_size: int, pad_id: int, max_positions: int) -> nn.Module:
    return Looks(vocab_size)
