"""The loss of a global batch that is cut into micro-batches and ranks. A batch has groups: Q queries, S products each.

The graded term is a sum over a micro-batch divided by a constant count, so cutting a batch never changes the gradient.
The contrastive term is one number of the whole global batch, however that is cut. Where one graph holds all of the
batch, or can gather it from the other ranks, it is computed there. Elsewhere a step has two passes (GradCache, Gao et
al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021): embeddings of every
micro-batch without a gradient; the loss of all of them and its gradient by embedding; then forward and backward of each
micro-batch, where the product of embeddings and those gradients stands for the loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.config import LossConfig
from pipeline.model.ops import l2_normalize
from pipeline.model.relevance import RelevanceOutputs
from pipeline.train.config import TrainConfig

Batch = Mapping[str, Tensor]
_MASKED = -1e4  # added to a similarity: its share of the softmax is 0


class Targets(NamedTuple):
    """What a batch is trained towards. An empty slot has label and gain -1, a mined negative label -1 and gain 0."""

    label: Tensor  # int32 [Q S], negative: unlabelled
    gain: Tensor  # float32 [Q S]
    query_key: Tensor  # int32 [Q], equal for equal queries
    product_key: Tensor  # int32 [Q S], equal for equal products


def relevance_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig, mined: int = 0) -> Tensor:
    """Compute all terms of a global batch that is here as a whole, fp32 scalar."""
    total = pair_loss(outputs, targets, config, mined)
    if config.contrastive_weight:
        found = contrastive_loss(outputs.query, outputs.product, targets, config)
        total = total + config.contrastive_weight * found
    return total


def pair_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig, mined: int = 0) -> Tensor:
    """Compute the term that needs no other query: fp32 scalar, mean over the slots of a micro-batch.

    `mined`: slots of each query for mined negatives. They have no label, and do not count in the mean.
    """
    slots = outputs.product.shape[0] // outputs.query.shape[0]
    weight = config.graded_weight * (slots / (slots - mined))
    return weight * graded_loss(outputs.logits, targets.label)


def graded_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Compute the cross entropy over relevance classes; unlabelled samples count as zero. logits [B, K] -> scalar."""
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    classes = torch.arange(logits.shape[1], device=logits.device, dtype=label.dtype)
    chosen = (label[:, None] == classes[None, :]).float()  # all zero for a negative label
    return -(log_probabilities * chosen).sum() / logits.shape[0]


def contrastive_loss(query: Tensor, product: Tensor, targets: Targets, config: LossConfig) -> Tensor:
    """Compute InfoNCE over a whole global batch (van den Oord et al., 2018): mean over its positives, fp32 scalar.

    query [Q, D], product [Q S, D]. Each positive is held against every product of the batch that is no positive of its
    query, nor the same product as one. Judged low grades of a query are negatives of it. With `matryoshka_sizes` it is
    the mean over the leading dimensions and the whole vectors (Kusupati et al., "Matryoshka Representation Learning",
    NeurIPS 2022, with equal weights).
    """
    queries, products = query.shape[0], product.shape[0]
    positive = (targets.gain - config.positive_gain >= 0).float()  # >= with a Python float would put f64 into the graph
    excluded = _excluded(targets, positive, queries, products // queries)
    whole = _info_nce(query, product, positive, excluded, config.temperature)
    if not config.matryoshka_sizes:
        return whole
    cut = [
        _info_nce(query[:, :size], product[:, :size], positive, excluded, config.temperature)
        for size in config.matryoshka_sizes
    ]
    share = 1.0 / (1 + len(cut))
    return torch.stack([share * loss for loss in (whole, *cut)]).sum()


def _info_nce(query: Tensor, product: Tensor, positive: Tensor, excluded: Tensor, temperature: float) -> Tensor:
    """Compute the loss of vectors of one width. positive [Q S] and excluded [Q, Q S] (no negative) are 1 or 0."""
    queries, slots = query.shape[0], product.shape[0] // query.shape[0]
    similarity = torch.matmul(l2_normalize(query.float()), l2_normalize(product.float()).t())  # [Q, Q S]
    eye = torch.eye(queries, device=query.device, dtype=similarity.dtype)
    own = (similarity.reshape(queries, queries, slots) * eye[:, :, None]).sum(1)  # [Q, S], to a query's own products
    positive = positive.view(queries, slots)
    scores = (similarity + excluded * _MASKED) / temperature
    count = positive.sum().clamp(min=1.0)  # a batch without positives is 0
    return (_log_loss(torch.logsumexp(scores, dim=1)[:, None], own / temperature) * positive).sum() / count


def _log_loss(against: Tensor, own: Tensor) -> Tensor:
    """Compute -log(exp(own) / (exp(own) + exp(against))).

    Written out: XLA makes log-plus-one of softplus, which is not among the operators that AWS lists for neuronx-cc.
    """
    largest = torch.maximum(against, own).detach()
    return torch.log(torch.exp(against - largest) + torch.exp(own - largest)) + largest - own


def _excluded(targets: Targets, positive: Tensor, queries: int, slots: int) -> Tensor:
    """Return fp32 [Q, Q S], 1 where a product is no negative of a query: its positive, a twin of one, an empty slot."""
    keys = targets.query_key
    same_query = (keys[:, None] == keys[None, :]).float()
    right = (same_query[:, :, None] * positive.view(1, queries, slots)).view(queries, queries * slots)
    products, positives = targets.product_key.view(queries, slots), positive.view(queries, slots)
    for slot in range(slots):
        same = (products[:, slot : slot + 1] == targets.product_key[None, :]).float()
        right = torch.maximum(right, same * positives[:, slot : slot + 1])
    empty = (targets.gain < 0).float()
    return torch.maximum(right, empty[None, :].expand_as(right))


# The loss of what one rank has of a global batch.


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
    parts: int
    """Micro-batches of all ranks."""
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
        pairs = pair_loss(outputs, targets_of([batch]), self.config.loss, self.config.mined_per_query)
        places = torch.arange(rows.query.shape[0], dtype=place.dtype, device=place.device)
        at = (places[:, None] == place[None, :]).float()  # [Q of all, Q]
        groups, width = query.shape
        # Zeros, with the gradient of this rank's.
        of_query = torch.matmul(at, query - query.detach())
        of_product = torch.matmul(at, (product - product.detach()).view(groups, -1)).view(-1, width)
        loss = contrastive_loss(rows.query + of_query, rows.product + of_product, rows.targets, self.config.loss)
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self.parts * loss, pairs + weight * loss

    def second_pass(self, outputs: RelevanceOutputs, batch: Batch, contrast: Contrast) -> tuple[Tensor, Tensor]:
        """Compute what stands for the loss once `contrast` is known."""
        pairs = pair_loss(outputs, targets_of([batch]), self.config.loss, self.config.mined_per_query)
        place = batch["place"]
        groups, width = contrast.query.shape
        products = contrast.product.view(groups, -1).index_select(0, place).view(-1, width)
        stand_in = (outputs.query.float() * contrast.query.index_select(0, place)).sum()
        stand_in = stand_in + (outputs.product.float() * products).sum()
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self.parts * stand_in, pairs + weight * contrast.loss
