"""The training loss of a global batch, which may be divided over micro-batches and ranks.

A batch has Q queries with S products each. The loss is the sum of two terms. The graded term is averaged over a
constant number of slots, so that its gradient does not depend on how the batch is divided. The contrastive term,
however, compares every query with all products in the global batch. If a single graph holds the global batch, or can
gather it from the other ranks, the term is computed in that graph. Otherwise each step needs two passes (GradCache, Gao
et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021). The first pass embeds
all micro-batches without tracking gradients, and then computes the loss and its gradient with respect to the
embeddings. The second pass runs forward and backward for each micro-batch, using the dot product of the embeddings and
these gradients as a surrogate loss.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.config import LossConfig
from pipeline.model.ops import l2_normalize
from pipeline.model.relevance import RelevanceOutputs, TaughtOutputs
from pipeline.train.config import TrainConfig

Batch = Mapping[str, Tensor]
_MASKED = -1e4  # added to the similarities to exclude, so that their softmax weight is 0


class Targets(NamedTuple):
    """Training targets of a batch.

    Empty slots have a label and a gain of -1. Mined negatives have a label of -1 and a gain of 0. A teacher has scores
    or vectors.
    """

    label: Tensor  # int32 [Q S], negative if unlabelled
    gain: Tensor  # float32 [Q S]
    query_key: Tensor  # int32 [Q], equal for equal queries
    product_key: Tensor  # int32 [Q S], equal for equal products
    teacher_score: Tensor | None = None  # float32 [Q S]
    teacher_mask: Tensor | None = None  # float32 [Q S], 1 for slots that the teacher has scored, otherwise 0
    teacher_query: Tensor | None = None  # float32 [Q, Dt], unit vectors
    teacher_product: Tensor | None = None  # float32 [Q S, Dt], 0 for empty slots

    @property
    def judged(self) -> tuple[Tensor, ...]:
        """The targets without those of the teacher."""
        return (self.label, self.gain, self.query_key, self.product_key)


def relevance_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig, mined: int = 0) -> Tensor:
    """Compute the loss of a complete global batch as an fp32 scalar."""
    total = pair_loss(outputs, targets, config, mined)
    if config.contrastive_weight:
        contrastive = contrastive_loss(outputs.query, outputs.product, targets, config)
        total = total + config.contrastive_weight * contrastive
    return total


def pair_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig, mined: int = 0) -> Tensor:
    """Compute the weighted graded loss, averaged over the slots of a micro-batch, as an fp32 scalar.

    `mined` is the number of slots per query for mined negatives. These have no label, so they are excluded from the
    mean.
    """
    slots = outputs.product.shape[0] // outputs.query.shape[0]
    weight = config.graded_weight * (slots / (slots - mined))
    return weight * graded_loss(outputs.logits, targets.label)


def graded_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Compute the mean cross entropy of logits [B, K] over relevance classes. Unlabelled samples contribute 0."""
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    classes = torch.arange(logits.shape[1], device=logits.device, dtype=label.dtype)
    chosen = (label[:, None] == classes[None, :]).float()  # all zero for a negative label
    return -(log_probabilities * chosen).sum() / logits.shape[0]


def contrastive_loss(query: Tensor, product: Tensor, targets: Targets, config: LossConfig) -> Tensor:
    """Compute the InfoNCE loss of a whole global batch, averaged over its positives (van den Oord et al., 2018).

    The inputs are query [Q, D] and product [Q S, D] embeddings, and the result is an fp32 scalar. Every product in the
    batch is a negative of a query unless it is a positive of that query or a duplicate of one, so a query's own
    products with low grades are negatives, too. With `matryoshka_sizes`, the losses of the full and the truncated
    vectors are averaged with equal weights (Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022).
    """
    queries, products = query.shape[0], product.shape[0]
    # Comparing with 0 avoids an f64 constant in the graph.
    positive = (targets.gain - config.positive_gain >= 0).float()
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


def teacher_loss(
    outputs: RelevanceOutputs | TaughtOutputs, targets: Targets, config: LossConfig, unscored: int = 0
) -> Tensor | None:
    """Compare the student with the vectors or the scores of the teacher, averaged over queries and products.

    Vectors are compared with projected embeddings by cosine. Scores of a query's products are compared with cosine
    similarities divided by the temperature, and with the logits of the best label, by the KL divergence between softmax
    distributions (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015). `unscored` is the number of
    last slots per query for which the logits are undefined, because mined products have no features. Returns None if
    there is no teacher.
    """
    queries = outputs.query.shape[0]
    if isinstance(outputs, TaughtOutputs) and targets.teacher_query is not None and targets.teacher_product is not None:
        filled = (targets.gain >= 0).float()
        of_query = 1.0 - (l2_normalize(outputs.projected_query.float()) * targets.teacher_query).sum(1)
        of_product = 1.0 - (l2_normalize(outputs.projected_product.float()) * targets.teacher_product).sum(1)
        return of_query.sum() / queries + (of_product * filled).sum() / len(filled)
    if targets.teacher_score is None or targets.teacher_mask is None:
        return None
    teacher, mask = (values.view(queries, -1) for values in (targets.teacher_score, targets.teacher_mask))
    products = l2_normalize(outputs.product.float()).view(queries, -1, outputs.query.shape[1])
    cosines = (l2_normalize(outputs.query.float())[:, None] * products).sum(2)
    divergence = _divergence(teacher, cosines / config.temperature, mask)
    if config.trains_head:
        logits, scored = outputs.logits.float(), slice(teacher.shape[1] - unscored)
        best = (logits[:, -1] - torch.logsumexp(logits[:, :-1], dim=1)).view(queries, -1)
        divergence = divergence + _divergence(teacher[:, scored], best[:, scored], mask[:, scored])
    return divergence / queries


def _divergence(teacher: Tensor, student: Tensor, mask: Tensor) -> Tensor:
    """Sum the KL divergences between the softmax of each row of scores [N, S], over the columns with mask 1."""
    hidden = (1.0 - mask) * _MASKED
    target, predicted = (F.log_softmax(scores + hidden, dim=1) for scores in (teacher, student))
    return (torch.exp(target) * (target - predicted) * mask).sum()


def _info_nce(query: Tensor, product: Tensor, positive: Tensor, excluded: Tensor, temperature: float) -> Tensor:
    """Compute InfoNCE with 0/1 masks for the positives [Q S] and for products that are not negatives [Q, Q S]."""
    queries, slots = query.shape[0], product.shape[0] // query.shape[0]
    similarity = torch.matmul(l2_normalize(query.float()), l2_normalize(product.float()).t())  # [Q, Q S]
    eye = torch.eye(queries, device=query.device, dtype=similarity.dtype)
    own = (similarity.reshape(queries, queries, slots) * eye[:, :, None]).sum(1)  # [Q, S], to each query's own products
    positive = positive.view(queries, slots)
    scores = (similarity + excluded * _MASKED) / temperature
    count = positive.sum().clamp(min=1.0)  # avoids 0 / 0 if the batch has no positives
    return (_log_loss(torch.logsumexp(scores, dim=1)[:, None], own / temperature) * positive).sum() / count


def _log_loss(against: Tensor, own: Tensor) -> Tensor:
    """Compute -log(exp(own) / (exp(own) + exp(against))).

    This avoids softplus, which XLA lowers to log-plus-one. AWS does not list that operator as supported by neuronx-cc.
    """
    largest = torch.maximum(against, own).detach()
    return torch.log(torch.exp(against - largest) + torch.exp(own - largest)) + largest - own


def _excluded(targets: Targets, positive: Tensor, queries: int, slots: int) -> Tensor:
    """Return an fp32 mask [Q, Q S] that is 1 for products that must not be used as negatives of a query.

    These are the positives of the query, duplicates of them, and empty slots.
    """
    keys = targets.query_key
    same_query = (keys[:, None] == keys[None, :]).float()
    excluded = (same_query[:, :, None] * positive.view(1, queries, slots)).view(queries, queries * slots)
    products, positives = targets.product_key.view(queries, slots), positive.view(queries, slots)
    for slot in range(slots):
        same = (products[:, slot : slot + 1] == targets.product_key[None, :]).float()
        excluded = torch.maximum(excluded, same * positives[:, slot : slot + 1])
    empty = (targets.gain < 0).float()
    return torch.maximum(excluded, empty[None, :].expand_as(excluded))


# The contribution of a rank's micro-batches to the loss.


class Contrast(NamedTuple):
    """The contrastive loss of a global batch and its gradients with respect to all query and product embeddings."""

    loss: Tensor
    query: Tensor
    product: Tensor


class Embeddings(NamedTuple):
    """Query and product embeddings of all ranks and their targets, in the order of the global batch."""

    query: Tensor
    product: Tensor
    targets: Targets


def concat_targets(micros: Sequence[Batch]) -> Targets:
    """Concatenate the targets of micro-batches."""
    names = [name for name in Targets._fields if name in micros[0]]
    if len(micros) == 1:
        return Targets(**{name: micros[0][name] for name in names})
    return Targets(**{name: torch.cat([batch[name] for batch in micros]) for name in names})


@dataclass(frozen=True)
class GlobalLoss:
    """Computes the contribution of each micro-batch to the loss of the global batch.

    The methods `local`, `one_pass` and `second_pass` return a surrogate, which is the tensor to differentiate, and the
    loss to report. Averaging the gradients of the surrogates over all micro-batches and ranks gives the gradient of the
    loss of the global batch.
    """

    config: TrainConfig
    num_micro_batches: int
    """Number of micro-batches in the global batch, across all ranks."""
    gather: Callable[[list[Tensor]], list[Tensor]]
    """Gathers the rows of all ranks in the order of the global batch. Gradients do not flow through it."""

    def gather_embeddings(self, query: Tensor, product: Tensor, targets: Targets) -> Embeddings:
        """Gather the embeddings of all ranks. Gradients do not flow through the result."""
        all_query, all_product, *all_targets = self.gather([query, product, *targets.judged])
        return Embeddings(all_query, all_product, Targets(*all_targets))

    def contrast(self, rows: Embeddings) -> Contrast:
        """Compute the contrastive loss and its gradients between the two passes, given the embeddings of all ranks."""
        with torch.set_grad_enabled(True), torch.autograd.set_multithreading_enabled(False):
            query, product = rows.query.requires_grad_(), rows.product.requires_grad_()
            loss = contrastive_loss(query, product, rows.targets, self.config.loss)
            return Contrast(loss.detach(), *torch.autograd.grad(loss, (query, product)))

    def local(self, outputs: RelevanceOutputs, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute the loss of a micro-batch if it is the whole global batch or if there is no contrastive term."""
        loss = relevance_loss(outputs, concat_targets([batch]), self.config.loss, self.config.mined_per_query)
        loss = self._with_teacher(loss, outputs, batch)
        return loss, loss

    def one_pass(self, outputs: RelevanceOutputs, batch: Batch, rows: Embeddings) -> tuple[Tensor, Tensor]:
        """Compute the loss over the embeddings of all ranks. Only those of this rank receive a gradient.

        The row indices of this rank are an input of the graph instead of constants, so that all ranks have the same
        graph.
        """
        query, product, index = outputs.query.float(), outputs.product.float(), batch["place"]
        pairs = pair_loss(outputs, concat_targets([batch]), self.config.loss, self.config.mined_per_query)
        pairs = self._with_teacher(pairs, outputs, batch)
        indices = torch.arange(rows.query.shape[0], dtype=index.dtype, device=index.device)
        one_hot = (indices[:, None] == index[None, :]).float()  # [Q of all ranks, Q]
        groups, width = query.shape
        # Adding these zeros leaves the values unchanged, but connects this rank's embeddings to the loss.
        query_grad = torch.matmul(one_hot, query - query.detach())
        product_grad = torch.matmul(one_hot, (product - product.detach()).view(groups, -1)).view(-1, width)
        loss = contrastive_loss(rows.query + query_grad, rows.product + product_grad, rows.targets, self.config.loss)
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self.num_micro_batches * loss, pairs + weight * loss

    def second_pass(self, outputs: RelevanceOutputs, batch: Batch, contrast: Contrast) -> tuple[Tensor, Tensor]:
        """Compute the surrogate loss of a micro-batch from the embedding gradients in `contrast`."""
        pairs = pair_loss(outputs, concat_targets([batch]), self.config.loss, self.config.mined_per_query)
        pairs = self._with_teacher(pairs, outputs, batch)
        index = batch["place"]
        groups, width = contrast.query.shape
        product_grads = contrast.product.view(groups, -1).index_select(0, index).view(-1, width)
        surrogate = (outputs.query.float() * contrast.query.index_select(0, index)).sum()
        surrogate = surrogate + (outputs.product.float() * product_grads).sum()
        weight = self.config.loss.contrastive_weight
        return pairs + weight * self.num_micro_batches * surrogate, pairs + weight * contrast.loss

    def _with_teacher(self, loss: Tensor, outputs: RelevanceOutputs, batch: Batch) -> Tensor:
        """Add the terms that compare the scores of a micro-batch with those of the teacher, if there is one."""
        has_features = batch["numeric"].shape[1] + batch["categorical"].shape[1] > 0
        unscored = self.config.mined_per_query if has_features else 0
        term = teacher_loss(outputs, concat_targets([batch]), self.config.loss, unscored)
        return loss if term is None else loss + self.config.loss.teacher_weight * term
