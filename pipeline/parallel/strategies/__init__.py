"""What training asks of a strategy: a model on a device, and all of a step that depends on how it is spread."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pipeline.model.relevance import RelevanceModel, RelevanceOutputs

Precision = Literal["fp32", "autocast", "bf16"]
State = Mapping[str, Sequence[Tensor]]
"""Tensors of an optimizer on the device, by their name in a checkpoint, where there is one of each name."""
KINDS = {"decayed": True, "plain": False}
"""The two vectors of a checkpoint that hold what there is one of for each parameter."""


@dataclass(frozen=True)
class FlatVector:
    """One flat vector: whole parameters, in the module's order."""

    decayed: bool
    """Matrices are; biases and layer norms are not."""
    encoder: bool
    """Parameters of the text encoder, or of what stands behind it: no chunk has both."""
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    """As the module has them; a matrix with more rows than columns may lie transposed (see FlatLayout)."""
    segments: tuple[int, ...]
    """Elements of each run of parameters that sums are taken over, whatever the chunk."""

    @property
    def size(self) -> int:
        return sum(self.segments)


class ParallelStrategy(Protocol):
    """The weights of one model, as this rank holds them.

    `snapshot` and `restore` speak of plain named weights, and of optimizer state in the order of a module's parameters:
    a checkpoint does not know how its model was spread.
    """

    model: RelevanceModel
    """Its structure, and the switch between training and evaluation."""
    weights: Sequence[Tensor]
    """What the forward pass takes: the masters, or copies that `publish` makes."""
    template: Mapping[str, Tensor]
    """Names and shapes of the tensors in a checkpoint, on the meta device."""
    masters: Sequence[Tensor]
    """fp32, on the device: what the optimizer changes, in place."""
    parts: Sequence[FlatVector]
    """What each master holds of the parameters, or what it is a slice of."""
    size: int
    """Elements of the whole model's parameters."""

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute scores and embeddings of one batch on the device."""

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Return that of a micro-batch, to be added up by the caller and given to `reduce`; `is_last`: of its step.

        A strategy that adds up by itself returns nothing before the last one, then the sums.
        """

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the rows of all data ranks, in their order, without a gradient."""

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Return the means over data ranks of what `gradient` gave, by master, and of the loss after it."""

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the whole gradient, once it is reduced: fp32 scalar, equal on ranks."""

    def publish(self) -> None:
        """Make the weights what the masters are, after these have changed. All ranks call it."""

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy (named weights fp32, optimizer state) to host memory, on rank 0 at least; all ranks call it."""

    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        """Put weights (our names, any dtype) on the device and, when resuming, the `saved` optimizer state.

        It has the names of `state`. Raises CheckpointError for the state of another model.
        """
