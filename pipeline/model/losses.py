"""Graded and contrastive losses.

Every term is a sum over samples divided by a constant count, so that cutting a batch into micro-batches or ranks never
changes the gradient.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.config import LossConfig
from pipeline.model.ops import unit
from pipeline.model.relevance import RelevanceOutputs

_LEFT_OUT = -1e4  # added to a similarity: its share of the softmax is 0


class Targets(NamedTuple):
    """What a batch is trained towards. B samples."""

    label: Tensor  # int32 [B], negative: unlabelled
    gain: Tensor  # float32 [B]
    query_key: Tensor  # int32 [B], equal for samples of one query


def relevance_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig) -> Tensor:
    """Mean loss of a (micro-)batch, fp32 scalar."""
    total = config.graded_weight * graded_loss(outputs.logits, targets.label)
    if config.contrastive_weight:
        total = total + config.contrastive_weight * contrastive_loss(outputs, targets, config)
    return total


def graded_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Cross entropy over relevance classes; unlabelled samples count as zero. logits [B, K] -> scalar."""
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    classes = torch.arange(logits.shape[1], device=logits.device, dtype=label.dtype)
    chosen = (label[:, None] == classes[None, :]).float()  # all zero for a negative label
    return -(log_probabilities * chosen).sum() / logits.shape[0]


def contrastive_loss(outputs: RelevanceOutputs, targets: Targets, config: LossConfig) -> Tensor:
    """InfoNCE within fixed groups of samples (van den Oord et al., 2018): positive query against its group's products.

    Groups are `negatives_group` neighbours in the global batch, never cut by ranks or micro-batches. Another positive
    of the same query is no negative and is left out of the denominator.
    """
    batch, group = targets.gain.shape[0], config.negatives_group
    shape = (batch // group, group)
    query, product = (unit(side.float()).view(*shape, -1) for side in (outputs.query, outputs.product))
    similarity = torch.matmul(query, product.transpose(1, 2)) / config.temperature  # [B/G, G, G]
    own = torch.eye(group, device=similarity.device, dtype=similarity.dtype)
    positive = (targets.gain - config.positive_gain >= 0).float()  # >= with a Python float would put f64 into the graph
    keys = targets.query_key.view(shape)
    same_query = (keys[:, :, None] == keys[:, None, :]).float() * positive.view(shape)[:, None, :]
    similarity = similarity + same_query * (1.0 - own) * _LEFT_OUT
    own_score = (F.log_softmax(similarity, dim=2) * own).sum(2).view(batch)
    return -(own_score * positive).sum() / batch
