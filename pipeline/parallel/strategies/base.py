"""What training asks of a strategy: a model on a device, and all of a step that depends on how it is spread."""

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor

from pipeline.model.relevance import RelevanceModel, RelevanceOutputs

Precision = Literal["fp32", "autocast", "bf16"]
State = Mapping[str, Sequence[Tensor]]
"""Tensors of an optimizer on the device, by their name in a checkpoint, where there is one of each name."""


class Part(Protocol):
    """What the parameters of one master are."""

    @property
    def decayed(self) -> bool:
        """Matrices are; biases and layer norms are not."""

    @property
    def encoder(self) -> bool:
        """Of the text encoder, or of what stands behind it."""

    @property
    def layer(self) -> int | None:
        """Of the encoder, from 1; 0: what stands before its layers; None: it may have parameters of all of them."""


class Strategy(Protocol):
    """The weights of one model, as this rank holds them.

    `snapshot` and `restore` speak of plain named weights, and of optimizer state in the order of a module's parameters:
    a checkpoint does not know how its model was spread.
    """

    @property
    def model(self) -> RelevanceModel:
        """Its structure, and the switch between training and evaluation."""

    @property
    def weights(self) -> Sequence[Tensor]:
        """What the forward pass takes, and an average is made of: the masters, or copies that `publish` makes."""

    @property
    def template(self) -> Mapping[str, Tensor]:
        """Names and shapes of the tensors in a checkpoint, on the meta device."""

    @property
    def masters(self) -> Sequence[Tensor]:
        """fp32, on the device: what the optimizer changes, in place."""

    @property
    def parts(self) -> Sequence[Part]:
        """What each master holds."""

    @property
    def size(self) -> int:
        """Elements of the whole model's parameters."""

    def single(self, name: str) -> tuple[Tensor, Tensor]:
        """A parameter that is a weight by itself, and its master."""

    def forward(
        self, batch: Mapping[str, Tensor], weights: Sequence[Tensor] | None = None, *, head_gradient: float = 1.0
    ) -> RelevanceOutputs:
        """Scores and embeddings of one batch on the device. `weights`: in place of those in training."""

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Of a micro-batch, to be added up by the caller and given to `reduce`; `is_last`: of its step.

        A strategy that adds up by itself returns nothing before the last one, then the sums.
        """

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """The rows of all data ranks, in their order, without a gradient."""

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Mean over data ranks of what `gradient` gave and of the loss after it: the gradient by master, the loss."""

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Of the whole gradient, once it is reduced: fp32 scalar, equal on ranks."""

    def publish(self) -> None:
        """Make the weights what the masters are, after these have changed. All ranks call it."""

    def named(self, vectors: State) -> dict[str, list[Tensor]]:
        """Tensors that there is one of for each master, by their names in a checkpoint."""

    def snapshot(self, served: Sequence[Tensor], state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(named weights fp32, optimizer state) in host memory, on rank 0 at least; all ranks call it.

        `served`: the weights of the model that is evaluated and saved.
        """

    def restore(
        self,
        weights: Mapping[str, Tensor],
        into: Sequence[Sequence[Tensor]],
        saved: Mapping[str, Tensor] | None,
        state: State,
    ) -> None:
        """Put weights (our names, any dtype) on the device and, when resuming, the `saved` optimizer state.

        Raises CheckpointError for the state of another model or optimizer.
        """
