"""The loss of a global batch that is cut into micro-batches and ranks.

The graded term is a mean over micro-batches. The contrastive term is one number of the whole global batch, however that
is cut. Where one graph holds all of the batch, or can gather it from the other ranks, it is computed there. Elsewhere a
step has two passes (GradCache, Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
RepL4NLP 2021): embeddings of every micro-batch without a gradient; the loss of all of them and its gradient by
embedding; then forward and backward of each micro-batch, where the product of embeddings and those gradients stands for
the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.model.losses import Targets, contrastive_loss, pair_loss, relevance_loss
from pipeline.model.relevance import RelevanceOutputs
from pipeline.train.config import TrainConfig

Batch = Mapping[str, Tensor]


class Contrast(NamedTuple):
    """The contrastive loss of a global batch, and its gradient by the embeddings of all its queries and products."""

    loss: Tensor
    query: Tensor
    product: Tensor


class Embeddings(NamedTuple):
    """Embeddings of the queries and products of all ranks, in the order of the global batch, and their targets."""

    query: Tensor
    product: Tensor
    targets: Targets


def targets_of(micros: Sequence[Batch]) -> Targets:
    """Return the targets of micro-batches, one after the other."""
    if len(micros) == 1:
        return Targets(*(micros[0][name] for name in Targets._fields))
    return Targets(*(torch.cat([batch[name] for batch in micros]) for name in Targets._fields))


@dataclass(frozen=True)
class GlobalLoss:
    """What each micro-batch of a rank adds to the loss of the global batch.

    `whole`, `one_pass` and `second_pass` return what is differentiated and what is reported. The mean of the first over
    micro-batches and ranks has the gradient of the loss of the global batch.
    """

    config: TrainConfig
    accumulation: int
    world_size: int
    gather: Callable[[list[Tensor]], list[Tensor]]
    """Returns the rows of all ranks, in the order of the global batch, without a gradient."""

    def gathered(self, query: Tensor, product: Tensor, targets: Targets) -> Embeddings:
        """Gather the embeddings of all ranks, without a gradient."""
        all_query, all_product, *all_targets = self.gather([query, product, *targets])
        return Embeddings(all_query, all_product, Targets(*all_targets))

    def contrast(self, rows: Embeddings) -> Contrast:
        """Compute the loss between the two passes, of the embeddings of all ranks."""
        with torch.set_grad_enabled(True), torch.autograd.set_multithreading_enabled(False):
            query, product = rows.query.requires_grad_(), rows.product.requires_grad_()
            loss = contrastive_loss(query, product, rows.targets, self.config.loss)
            return Contrast(loss.detach(), *torch.autograd.grad(loss, (query, product)))

    def whole(self, outputs: RelevanceOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch that is all of the global batch, or has no contrastive term."""
        loss = relevance_loss(outputs, targets_of([batch]), self.config.loss, self.config.mined_per_query)
        return loss, loss

    def one_pass(self, outputs: RelevanceOutputs, batch: Batch, rows: Embeddings) -> tuple[Tensor, Tensor]:
        """Compute the loss beside the embeddings of all ranks, differentiable by those of this rank alone.

        Which rows are this rank's is data, not structure: the graph is the same on every rank.
        """
        query, product, place = outputs.query.float(), outputs.product.float(), batch["place"]
        pairs = self._pair_loss(outputs, batch)
        places = torch.arange(rows.query.shape[0], dtype=place.dtype, device=place.device)
        at = (places[:, None] == place[None, :]).float()  # [Q of all, Q]
        groups, width = query.shape
        # Zeros, with the gradient of this rank's.
        of_query = torch.matmul(at, query - query.detach())
        of_product = torch.matmul(at, (product - product.detach()).view(groups, -1)).view(-1, width)
        loss = contrastive_loss(rows.query + of_query, rows.product + of_product, rows.targets, self.config.loss)
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self._parts * loss, pairs + weight * loss

    def second_pass(self, outputs: RelevanceOutputs, batch: Batch, contrast: Contrast) -> tuple[Tensor, Tensor]:
        """Compute what stands for the loss once `contrast` is known."""
        pairs, place = self._pair_loss(outputs, batch), batch["place"]
        groups, width = contrast.query.shape
        products = contrast.product.view(groups, -1).index_select(0, place).view(-1, width)
        stand_in = (outputs.query.float() * contrast.query.index_select(0, place)).sum()
        stand_in = stand_in + (outputs.product.float() * products).sum()
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self._parts * stand_in, pairs + weight * contrast.loss

    def _pair_loss(self, outputs: RelevanceOutputs, batch: Batch) -> Tensor:
        return pair_loss(outputs, targets_of([batch]), self.config.loss, self.config.mined_per_query)

    @property
    def _parts(self) -> int:
        return self.accumulation * self.world_size
