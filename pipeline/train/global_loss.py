"""The loss of a global batch that is cut into micro-batches and ranks.

Graded and listwise terms are means over micro-batches. The contrastive term is one number of the whole global batch,
however that is cut. Where one graph holds all of the batch, or can gather it from the other ranks, it is computed
there. Elsewhere a step has two passes (GradCache, Gao et al., "Scaling Deep Contrastive Learning Batch Size under
Memory Limited Setup", RepL4NLP 2021): embeddings of every micro-batch without a gradient; the loss of all of them and
its gradient by embedding; then forward and backward of each micro-batch, where the product of embeddings and those
gradients stands for the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.model.losses import (
    Memory,
    Targets,
    contrastive_loss,
    pair_loss,
    relevance_loss,
    remember,
    temperature_of,
)
from pipeline.model.relevance import RelevanceOutputs
from pipeline.train.config import TrainConfig


class Contrast(NamedTuple):
    """The contrastive loss of a global batch, and its gradient by the embeddings of all its queries and products.

    And by the parameter of the temperature, where that is learnt.
    """

    loss: Tensor
    query: Tensor
    product: Tensor
    log_scale: Tensor | None = None


def targets_of(micros: Sequence[Mapping[str, Tensor]]) -> Targets:
    """The targets of micro-batches, one after the other."""
    if len(micros) == 1:
        return Targets(*(micros[0][name] for name in Targets._fields))
    return Targets(*(torch.cat([batch[name] for batch in micros]) for name in Targets._fields))


@dataclass(frozen=True)
class GlobalLoss:
    """What each micro-batch of a rank adds to the loss of the global batch."""

    config: TrainConfig
    accumulation: int
    world_size: int
    gather: Callable[[list[Tensor]], list[Tensor]]
    """The rows of all ranks, in the order of the global batch, without a gradient."""
    log_scale: Tensor | None
    """Parameter of the temperature, where that is learnt."""

    def contrast(self, mine: Sequence[Tensor], memory: Memory | None = None) -> tuple[Contrast, Memory | None]:
        """Between the two passes, and the memory after it.

        Args:
            mine: the embeddings of this rank's queries and products, then their Targets.
        """
        query, product, targets = self._everybody(mine[0], mine[1], Targets(*mine[2:]))
        with torch.set_grad_enabled(True), torch.autograd.set_multithreading_enabled(False):
            query, product = query.requires_grad_(), product.requires_grad_()
            loss = contrastive_loss(query, product, targets, self.config.loss, self._temperature(), memory)
            by = (query, product) if self.log_scale is None else (query, product, self.log_scale)
            contrast = Contrast(loss.detach(), *torch.autograd.grad(loss, by))
        return contrast, None if memory is None else remember(memory, product, targets, self.config.loss)

    def remembered(
        self,
        memory: Memory,
        outputs: RelevanceOutputs,
        batch: Mapping[str, Tensor],
        everybody: tuple[Tensor, Tensor, Targets] | None,
    ) -> Memory:
        """The memory after a global batch of one pass. `everybody`: what `gathered` gave."""
        product, targets = everybody[1:] if everybody else (outputs.product, targets_of([batch]))
        return remember(memory, product, targets, self.config.loss)

    def gathered(
        self, outputs: RelevanceOutputs, batch: Mapping[str, Tensor], contrast: Contrast | None
    ) -> tuple[Tensor, Tensor, Targets] | None:
        """What the contrastive loss of one pass needs of all ranks, without a gradient; None where it needs nothing."""
        if not self.config.loss.contrastive_weight or contrast is not None or self.world_size == 1:
            return None
        query, product = outputs.query.float().detach(), outputs.product.float().detach()
        return self._everybody(query, product, targets_of([batch]))

    def of_gathered(
        self,
        outputs: RelevanceOutputs,
        batch: Mapping[str, Tensor],
        contrast: Contrast | None,
        everybody: tuple[Tensor, Tensor, Targets] | None,
        memory: Memory | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(what is differentiated, what is reported) of a micro-batch, without a collective in it.

        The mean of the first over micro-batches and ranks has the gradient of the loss of the global batch. `contrast`:
        of the first pass, if there is one; `everybody`: what `gathered` gave.
        """
        targets, config, mined = targets_of([batch]), self.config.loss, self.config.mined_per_query
        weight = config.contrastive_weight
        if not weight or (contrast is None and self.world_size == 1):
            loss = relevance_loss(outputs, targets, config, mined, self._temperature(), memory)
            return loss, loss
        pairs = pair_loss(outputs, targets, config, mined, self._temperature())
        parts = self.accumulation * self.world_size
        if everybody is not None:
            contrastive = self._gathered(outputs, everybody, batch["place"], memory)
            return pairs + weight * parts * contrastive, pairs + weight * contrastive
        if contrast is None:
            raise ValueError("neither a first pass nor the embeddings of all ranks")
        place, groups, width = batch["place"], *contrast.query.shape
        products = contrast.product.view(groups, -1).index_select(0, place).view(-1, width)
        stand_in = (outputs.query.float() * contrast.query.index_select(0, place)).sum()
        stand_in = stand_in + (outputs.product.float() * products).sum()
        if self.log_scale is not None and contrast.log_scale is not None:  # the same for all, so each has its part
            stand_in = stand_in + (self.log_scale * contrast.log_scale).sum() / parts
        return pairs + weight * parts * stand_in, pairs + weight * contrast.loss

    def _gathered(
        self,
        outputs: RelevanceOutputs,
        everybody: tuple[Tensor, Tensor, Targets],
        place: Tensor,
        memory: Memory | None,
    ) -> Tensor:
        """The contrastive loss in this rank's graph, differentiable by this rank's embeddings alone.

        The other ranks' come without a gradient, and the temperature's is shared by all ranks. Where this rank's stand
        is data, not structure: the graph is the same on every rank.
        """
        query, product = outputs.query.float(), outputs.product.float()
        places = torch.arange(everybody[0].shape[0], dtype=place.dtype, device=place.device)
        at = (places[:, None] == place[None, :]).float()  # [Q of all, Q]
        groups, width = query.shape
        # Zeros, with the gradient of this rank's.
        of_query = torch.matmul(at, query - query.detach())
        of_product = torch.matmul(at, (product - product.detach()).view(groups, -1)).view(-1, width)
        return contrastive_loss(
            everybody[0] + of_query,
            everybody[1] + of_product,
            everybody[2],
            self.config.loss,
            self._temperature(1.0 / self.world_size),
            memory,
        )

    def _everybody(self, query: Tensor, product: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Targets]:
        mine = self.gather([query, product, *targets])
        return mine[0], mine[1], Targets(*mine[2:])

    def _temperature(self, share: float = 1.0) -> Tensor | None:
        """That is learnt, fp32 [1]; `share` of its gradient reaches the parameter. None: it is fixed."""
        if self.log_scale is None or share == 1.0:
            return None if self.log_scale is None else temperature_of(self.log_scale)
        fixed = self.log_scale.detach()
        return temperature_of(fixed + (self.log_scale - fixed) * share)
