"""The loss of a global batch that is divided into micro-batches and ranks. A batch has Q queries with S products each.

The graded term is a sum over a micro-batch divided by a constant count, so dividing a batch never changes the gradient.
The contrastive term is computed over the whole global batch. If one graph holds the batch, or can gather it from the
other ranks, the term is computed there. Otherwise a step has two passes (GradCache, Gao et al., "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021). The first embeds every micro-batch without
a gradient, then computes the loss and its gradient with respect to the embeddings. The second runs forward and backward
of each micro-batch with the dot product of embeddings and those gradients as a surrogate loss.
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
_MASKED = -1e4  # added to a similarity, so that its softmax weight is 0


class Targets(NamedTuple):
    """Training targets of a batch. An empty slot has label and gain -1, a mined negative has label -1 and gain 0."""

    label: Tensor  # int32 [Q S], negative: unlabelled
    gain: Tensor  # float32 [Q S]
    query_key: Tensor  # int32 [Q], equal for equal queries
    product_key: Tensor  # int32 [Q S], equal for equal products


def relevance_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig, mined: int = 0) -> Tensor:
    """Compute the loss of a complete global batch, fp32 scalar."""
    total = pair_loss(outputs, targets, config, mined)
    if config.contrastive_weight:
        contrastive = contrastive_loss(outputs.query, outputs.product, targets, config)
        total = total + config.contrastive_weight * contrastive
    return total


def pair_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig, mined: int = 0) -> Tensor:
    """Compute the weighted graded loss: fp32 scalar, mean over the slots of a micro-batch.

    `mined`: slots per query for mined negatives. They have no label and are excluded from the mean.
    """
    slots = outputs.product.shape[0] // outputs.query.shape[0]
    weight = config.graded_weight * (slots / (slots - mined))
    return weight * graded_loss(outputs.logits, targets.label)


def graded_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Compute the cross entropy over relevance classes, 0 for unlabelled samples. logits [B, K] -> scalar."""
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    classes = torch.arange(logits.shape[1], device=logits.device, dtype=label.dtype)
    chosen = (label[:, None] == classes[None, :]).float()  # all zero for a negative label
    return -(log_probabilities * chosen).sum() / logits.shape[0]


def contrastive_loss(query: Tensor, product: Tensor, targets: Targets, config: LossConfig) -> Tensor:
    """Compute InfoNCE over a whole global batch (van den Oord et al., 2018): mean over its positives, fp32 scalar.

    query [Q, D], product [Q S, D]. The negatives of a positive are all products of the batch that are neither positives
    of its query nor duplicates of one. A query's products with low grades are negatives too. With `matryoshka_sizes`
    the result is the mean over truncated and full vectors (Kusupati et al., "Matryoshka Representation Learning",
    NeurIPS 2022, with equal weights).
    """
    queries, products = query.shape[0], product.shape[0]
    positive = (targets.gain - config.positive_gain >= 0).float()  # >= with a Python float would put f64 into the graph
    excluded = _excluded(targets, positive, queries, products // queries)
    full = _info_nce(query, product, positive, excluded, config.temperature)
    if not config.matryoshka_sizes:
        return full
    truncated = [
        _info_nce(query[:, :size], product[:, :size], positive, excluded, config.temperature)
        for size in config.matryoshka_sizes
    ]
    weight = 1.0 / (1 + len(truncated))
    return torch.stack([weight * loss for loss in (full, *truncated)]).sum()


def _info_nce(query: Tensor, product: Tensor, positive: Tensor, excluded: Tensor, temperature: float) -> Tensor:
    """Compute InfoNCE. positive [Q S] and excluded [Q, Q S] (products that are not negatives) are 1 or 0."""
    queries, slots = query.shape[0], product.shape[0] // query.shape[0]
    similarity = torch.matmul(l2_normalize(query.float()), l2_normalize(product.float()).t())  # [Q, Q S]
    eye = torch.eye(queries, device=query.device, dtype=similarity.dtype)
    own = (similarity.reshape(queries, queries, slots) * eye[:, :, None]).sum(1)  # [Q, S], the query's products
    positive = positive.view(queries, slots)
    scores = (similarity + excluded * _MASKED) / temperature
    count = positive.sum().clamp(min=1.0)  # the loss of a batch without positives is 0
    return (_log_loss(torch.logsumexp(scores, dim=1)[:, None], own / temperature) * positive).sum() / count


def _log_loss(against: Tensor, own: Tensor) -> Tensor:
    """Compute -log(exp(own) / (exp(own) + exp(against))).

    Not softplus, which XLA lowers to log-plus-one, an operator that AWS does not list for neuronx-cc.
    """
    largest = torch.maximum(against, own).detach()
    return torch.log(torch.exp(against - largest) + torch.exp(own - largest)) + largest - own


def _excluded(targets: Targets, positive: Tensor, queries: int, slots: int) -> Tensor:
    """Return fp32 [Q, Q S], 1 for the positives of a query, their duplicates and empty slots: not its negatives."""
    keys = targets.query_key
    same_query = (keys[:, None] == keys[None, :]).float()
    excluded = (same_query[:, :, None] * positive.view(1, queries, slots)).view(queries, queries * slots)
    products, positives = targets.product_key.view(queries, slots), positive.view(queries, slots)
    for slot in range(slots):
        same = (products[:, slot : slot + 1] == targets.product_key[None, :]).float()
        excluded = torch.maximum(excluded, same * positives[:, slot : slot + 1])
    empty = (targets.gain < 0).float()
    return torch.maximum(excluded, empty[None, :].expand_as(excluded))


# The loss of one rank's micro-batches.


class Contrast(NamedTuple):
    """The contrastive loss of a global batch, and its gradient with respect to all query and product embeddings."""

    loss: Tensor
    query: Tensor
    product: Tensor


class Embeddings(NamedTuple):
    """Embeddings of the queries and products of all ranks, in the order of the global batch, and their targets."""

    query: Tensor
    product: Tensor
    targets: Targets


def concat_targets(micros: Sequence[Batch]) -> Targets:
    """Concatenate the targets of micro-batches."""
    if len(micros) == 1:
        return Targets(*(micros[0][name] for name in Targets._fields))
    return Targets(*(torch.cat([batch[name] for batch in micros]) for name in Targets._fields))


@dataclass(frozen=True)
class GlobalLoss:
    """The contribution of each micro-batch of a rank to the loss of the global batch.

    `local`, `one_pass` and `second_pass` return (surrogate, loss): the tensor to differentiate and the value to report.
    The mean surrogate over micro-batches and ranks has the gradient of the global batch's loss.
    """

    config: TrainConfig
    num_micro_batches: int
    """Micro-batches of all ranks."""
    gather: Callable[[list[Tensor]], list[Tensor]]
    """Returns the rows of all ranks, in the order of the global batch, without a gradient."""

    def gather_embeddings(self, query: Tensor, product: Tensor, targets: Targets) -> Embeddings:
        """Gather the embeddings of all ranks, without a gradient."""
        all_query, all_product, *all_targets = self.gather([query, product, *targets])
        return Embeddings(all_query, all_product, Targets(*all_targets))

    def contrast(self, rows: Embeddings) -> Contrast:
        """Compute the loss over the embeddings of all ranks, between the two passes."""
        with torch.set_grad_enabled(True), torch.autograd.set_multithreading_enabled(False):
            query, product = rows.query.requires_grad_(), rows.product.requires_grad_()
            loss = contrastive_loss(query, product, rows.targets, self.config.loss)
            return Contrast(loss.detach(), *torch.autograd.grad(loss, (query, product)))

    def local(self, outputs: RelevanceOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch that is the whole global batch or has no contrastive term."""
        loss = relevance_loss(outputs, concat_targets([batch]), self.config.loss, self.config.mined_per_query)
        return loss, loss

    def one_pass(self, outputs: RelevanceOutputs, batch: Batch, rows: Embeddings) -> tuple[Tensor, Tensor]:
        """Compute the loss over the embeddings of all ranks, differentiable only by those of this rank.

        The row indices of this rank are data, not structure, so the graph is the same on every rank.
        """
        query, product, index = outputs.query.float(), outputs.product.float(), batch["place"]
        pairs = pair_loss(outputs, concat_targets([batch]), self.config.loss, self.config.mined_per_query)
        indices = torch.arange(rows.query.shape[0], dtype=index.dtype, device=index.device)
        one_hot = (indices[:, None] == index[None, :]).float()  # [Q of all ranks, Q]
        groups, width = query.shape
        # Zeros that carry the gradient of this rank's embeddings.
        query_grad = torch.matmul(one_hot, query - query.detach())
        product_grad = torch.matmul(one_hot, (product - product.detach()).view(groups, -1)).view(-1, width)
        loss = contrastive_loss(rows.query + query_grad, rows.product + product_grad, rows.targets, self.config.loss)
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self.num_micro_batches * loss, pairs + weight * loss

    def second_pass(self, outputs: RelevanceOutputs, batch: Batch, contrast: Contrast) -> tuple[Tensor, Tensor]:
        """Compute the surrogate loss of a micro-batch from the gradients in `contrast`."""
        pairs = pair_loss(outputs, concat_targets([batch]), self.config.loss, self.config.mined_per_query)
        index = batch["place"]
        groups, width = contrast.query.shape
        product_grads = contrast.product.view(groups, -1).index_select(0, index).view(-1, width)
        surrogate = (outputs.query.float() * contrast.query.index_select(0, index)).sum()
        surrogate = surrogate + (outputs.product.float() * product_grads).sum()
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self.num_micro_batches * surrogate, pairs + weight * contrast.loss
