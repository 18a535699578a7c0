"""The interface of parallelism strategies, which implement the sharding-dependent operations of a training step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from pipeline.model.relevance import RelevanceModel, RelevanceOutputs

Precision = Literal["fp32", "autocast", "bf16"]
State = Mapping[str, Sequence[Tensor]]
"""Optimizer state on the device, keyed by the name of the checkpoint vector that the tensors are stored in."""
KINDS = {"decayed": True, "plain": False}
"""Whether weight decay applies to the optimizer state in a checkpoint vector, keyed by the suffix of its name."""


@dataclass(frozen=True)
class FlatVector:
    """The layout of a flat vector, which consists of whole parameters in the order of the module."""

    decayed: bool
    """Whether weight decay applies to these parameters. It applies to matrices, but not to biases and layer norms."""
    encoder: bool
    """Whether the parameters belong to the text encoder, as opposed to later layers.

    Unless a layout is built with `has_one_rate`, no chunk contains parameters of both.
    """
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    """Shapes in the module. Note that some matrices are stored transposed (see `flat._is_transposed`)."""
    segments: tuple[int, ...]
    """Sizes of the runs of parameters over which partial sums are computed. They don't depend on the chunk size."""

    @property
    def size(self) -> int:
        return sum(self.segments)


class ParallelStrategy(Protocol):
    """Interface for strategies, which hold this rank's weights of a model and run the collectives of a training step.

    `snapshot` and `restore` exchange unsharded named weights and optimizer state in the order of the module's
    parameters, so that checkpoints don't depend on how the model was sharded.
    """

    model: RelevanceModel
    """The module, which defines the structure of the model and whether it is in training or evaluation mode."""
    weights: Sequence[Tensor]
    """Weights used in the forward pass. These are either the masters or copies that are updated by `publish`."""
    template: Mapping[str, Tensor]
    """Meta tensors with the names and shapes of the tensors in a checkpoint."""
    masters: Sequence[Tensor]
    """fp32 master weights on the device, which the optimizer updates in place."""
    parts: Sequence[FlatVector]
    """The layout of each master, or, if it is a slice of a vector, the layout of that vector."""
    size: int
    """Total number of parameters in the unsharded model."""

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute scores and embeddings for a batch that is already on the device."""

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Compute the gradient of a micro-batch. The caller sums the gradients and passes the sums to `reduce`.

        A strategy that accumulates gradients itself returns an empty list unless `is_last` is set.
        """

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Gather rows from all data-parallel ranks in rank order. Gradients are not propagated."""

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Average the gradients and the loss, which is the last tensor, over data-parallel ranks.

        Returns one gradient per master, followed by the loss.
        """

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Compute the norm of the full reduced gradient as an fp32 scalar, which is the same on all ranks."""

    def publish(self) -> None:
        """Update the weights from the masters after an optimizer step. This must be called on all ranks."""

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy the named fp32 weights and the optimizer state to host memory.

        This must be called on all ranks, but only rank 0 is guaranteed to get the values.
        """

    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        """Load named weights of any data type and, when resuming, copy the `saved` optimizer state into `state`.

        Raises CheckpointError if the saved state doesn't match the model.
        """
