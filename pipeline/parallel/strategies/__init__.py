"""The interface of a parallelism strategy: all of a training step that depends on how the model is sharded."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pipeline.model.relevance import RelevanceModel, RelevanceOutputs

Precision = Literal["fp32", "autocast", "bf16"]
State = Mapping[str, Sequence[Tensor]]
"""Optimizer state on the device: tensors by name of the vector that holds them in a checkpoint."""
KINDS = {"decayed": True, "plain": False}
"""Whether weight decay applies to a checkpoint vector with one element per parameter, by the end of its name."""


@dataclass(frozen=True)
class FlatVector:
    """Layout of one flat vector of complete parameters, in the module's order."""

    decayed: bool
    """Whether weight decay applies: to matrices, not to biases and layer norms."""
    encoder: bool
    """Whether the parameters belong to the text encoder or to later layers. No chunk has both."""
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    """Shapes in the module. A matrix with more rows than columns may be stored transposed (see _is_transposed)."""
    segments: tuple[int, ...]
    """Sizes of the runs of parameters over which sums are taken, which do not depend on the chunks."""

    @property
    def size(self) -> int:
        return sum(self.segments)


class ParallelStrategy(Protocol):
    """The weights of one model on this rank, and the collectives of a training step.

    `snapshot` and `restore` use plain named weights and optimizer state in the order of the module's parameters, so
    checkpoints do not depend on how the model was sharded.
    """

    model: RelevanceModel
    """The module, for its structure and its training or evaluation mode."""
    weights: Sequence[Tensor]
    """Weights of the forward pass: the masters, or copies that `publish` updates."""
    template: Mapping[str, Tensor]
    """Names and shapes of the tensors in a checkpoint, on the meta device."""
    masters: Sequence[Tensor]
    """fp32 master weights on the device, which the optimizer updates in place."""
    parts: Sequence[FlatVector]
    """The layout of each master, or of the vector that it is a slice of."""
    size: int
    """Number of elements of the full model's parameters."""

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute scores and embeddings of one batch on the device."""

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Return the gradient of a micro-batch, which the caller sums and passes to `reduce`.

        A strategy that accumulates gradients itself returns an empty list until the micro-batch that `is_last`.
        """

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Gather rows from all data ranks in rank order, without gradients."""

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Average over data ranks the gradients of `gradient`, by master, and the loss, which is the last tensor."""

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm of the full reduced gradient as an fp32 scalar, equal on all ranks."""

    def publish(self) -> None:
        """Update the weights from the masters after an optimizer step. All ranks must call it."""

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy (named fp32 weights, optimizer state) to host memory, at least on rank 0. All ranks must call it."""

    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        """Load named weights of any dtype and, when resuming, the `saved` optimizer state, named as in `state`.

        Raises CheckpointError if the state is of another model.
        """
