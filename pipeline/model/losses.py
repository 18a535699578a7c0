"""Graded, listwise and contrastive losses of groups: Q queries with S slots for products each.

Graded and listwise terms are sums over a micro-batch divided by a constant count, so cutting a batch never changes the
gradient. The contrastive term is one number of the whole global batch: `contrastive_loss` is given all of it.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.model.config import LOWEST_TEMPERATURE, LossConfig
from pipeline.model.ops import unit
from pipeline.model.relevance import RelevanceOutputs

_LEFT_OUT = -1e4  # added to a similarity: its share of the softmax is 0


class Targets(NamedTuple):
    """What a batch is trained towards. An empty slot has label and gain -1, a mined negative label -1 and gain 0."""

    label: Tensor  # int32 [Q S], negative: unlabelled
    gain: Tensor  # float32 [Q S]
    query_key: Tensor  # int32 [Q], equal for equal queries
    product_key: Tensor  # int32 [Q S], equal for equal products


class Memory(NamedTuple):
    """Products of the last global batches, oldest first: M of them. In one dimension, as optimizer state is stored."""

    vectors: Tensor  # float32 [M D], of unit length
    product_key: Tensor  # int32 [M]
    query_key: Tensor  # int32 [M], of the query that it stood with
    kind: Tensor  # float32 [M], 2: a positive of that query, 1: any other product, 0: nothing


def relevance_loss(
    outputs: RelevanceOutputs,
    targets: Targets,
    config: LossConfig,
    mined: int = 0,
    temperature: Tensor | None = None,
    memory: Memory | None = None,
) -> Tensor:
    """All terms of a global batch that is here as a whole, fp32 scalar. `temperature` [1]: one that is learnt."""
    total = pair_loss(outputs, targets, config, mined, temperature)
    if config.contrastive_weight:
        found = contrastive_loss(outputs.query, outputs.product, targets, config, temperature, memory)
        total = total + config.contrastive_weight * found
    return total


def pair_loss(
    outputs: RelevanceOutputs,
    targets: Targets,
    config: LossConfig,
    mined: int = 0,
    temperature: Tensor | None = None,
) -> Tensor:
    """The terms that need no other query: fp32 scalar, mean over the slots or queries of a micro-batch.

    `mined`: slots of each query for mined negatives. They have no label, and do not count in the graded term's mean.
    """
    slots = outputs.product.shape[0] // outputs.query.shape[0]
    weight = config.graded_weight * (slots / (slots - mined))
    total = weight * graded_loss(outputs.logits, targets.label)
    if config.listwise_weight:
        divisor = config.temperature if temperature is None else temperature
        for share, query, product in _cut(outputs.query, outputs.product, config.matryoshka_sizes):
            found = listwise_loss(query, product, targets, divisor)
            total = total + config.listwise_weight * share * found
    return total


def _cut(query: Tensor, product: Tensor, sizes: Sequence[int]) -> Iterator[tuple[float, Tensor, Tensor]]:
    """The vectors whole, and their leading dimensions; each with its share in the loss.

    Kusupati et al., "Matryoshka Representation Learning" (NeurIPS 2022), with equal weights.
    """
    share = 1.0 / (1 + len(sizes))
    yield share, query, product
    for size in sizes:
        yield share, query[:, :size], product[:, :size]


def graded_loss(logits: Tensor, label: Tensor) -> Tensor:
    """Cross entropy over relevance classes; unlabelled samples count as zero. logits [B, K] -> scalar."""
    log_probabilities = F.log_softmax(logits.float(), dim=1)
    classes = torch.arange(logits.shape[1], device=logits.device, dtype=label.dtype)
    chosen = (label[:, None] == classes[None, :]).float()  # all zero for a negative label
    return -(log_probabilities * chosen).sum() / logits.shape[0]


def listwise_loss(query: Tensor, product: Tensor, targets: Targets, temperature: float | Tensor) -> Tensor:
    """ListNet with top-one probabilities (Cao et al., 2007) between gains and similarities of a query's own slots."""
    queries = query.shape[0]
    query, product = unit(query.float()), unit(product.float())
    similarity = (query[:, None, :] * product.view(queries, -1, query.shape[1])).sum(2) / temperature
    gain = targets.gain.view(queries, -1)
    is_row = (gain >= 0).float()
    wanted = gain * is_row
    wanted = wanted / (wanted.sum(1, keepdim=True) + 1e-6)
    return -(wanted * F.log_softmax(similarity + (1.0 - is_row) * _LEFT_OUT, dim=1)).sum() / queries


def contrastive_loss(
    query: Tensor,
    product: Tensor,
    targets: Targets,
    config: LossConfig,
    temperature: Tensor | None = None,
    memory: Memory | None = None,
) -> Tensor:
    """InfoNCE over a whole global batch (van den Oord et al., 2018): mean over its positives, fp32 scalar.

    query [Q, D], product [Q S, D]. Each positive is held against every product of the batch that is no positive of its
    query, nor the same product as one. Judged low grades of a query are negatives of it. `symmetric_share` asks from a
    positive product to all queries of which neither it nor its twin is a positive. With `matryoshka_sizes` the mean
    over cut vectors and whole ones. `temperature` [1]: one that is learnt. `memory`: products of earlier batches, as
    they were then, are negatives by the same rules, without a gradient of their own.
    """
    queries, products = query.shape[0], product.shape[0]
    positive = (targets.gain - config.positive_gain >= 0).float()  # >= with a Python float would put f64 into the graph
    excluded = _excluded(targets, positive, queries, products // queries)
    if memory is not None:
        excluded = torch.cat([excluded, _excluded_of_memory(targets, positive, memory)], dim=1)
        product = torch.cat([product.float(), memory.vectors.view(-1, product.shape[1])])
    divisor = config.temperature if temperature is None else temperature
    parts = _cut(query, product, config.matryoshka_sizes)
    losses = [(share, _info_nce(left, right, positive, excluded, config, divisor)) for share, left, right in parts]
    if len(losses) == 1:
        return losses[0][1]
    return torch.stack([share * loss for share, loss in losses]).sum()


def _info_nce(
    query: Tensor,
    product: Tensor,
    positive: Tensor,
    excluded: Tensor,
    config: LossConfig,
    temperature: float | Tensor,
) -> Tensor:
    """Of vectors of one width. product [Q S and M, D], the memory last; positive [Q S] and excluded [Q, Q S and M]: 1
    where a product is one, or no negative, else 0.
    """
    queries, products = query.shape[0], positive.shape[0]
    slots = products // queries
    similarity = torch.matmul(unit(query.float()), unit(product.float()).t())  # [Q, Q S and M]
    own = torch.eye(queries, device=query.device, dtype=similarity.dtype)
    here = similarity[:, :products] if product.shape[0] > products else similarity
    at = (here.reshape(queries, queries, slots) * own[:, :, None]).sum(1)  # [Q, S], to a query's own products
    positive = positive.view(queries, slots)
    if config.false_negative_margin is not None:
        best = (at + (1.0 - positive) * _LEFT_OUT).detach().amax(1, keepdim=True)
        near = (similarity.detach() - best + config.false_negative_margin > 0).float()
        excluded = torch.maximum(excluded, near)
    scores = (similarity + excluded * _LEFT_OUT) / temperature
    at = at / temperature
    count = positive.sum() + (1.0 - (positive.sum() > 0).float())  # at least one: a batch without positives is 0
    asked = (_log_loss(torch.logsumexp(scores, dim=1)[:, None], at) * positive).sum() / count
    if not config.symmetric_share:
        return asked
    backward = torch.logsumexp(scores[:, :products], dim=0).view(queries, slots)
    answered = (_log_loss(backward, at) * positive).sum() / count
    return (1.0 - config.symmetric_share) * asked + config.symmetric_share * answered


def _log_loss(against: Tensor, own: Tensor) -> Tensor:
    """-log(exp(own) / (exp(own) + exp(against))).

    Written out: XLA makes log-plus-one of softplus, which is not among the operators that AWS lists for neuronx-cc.
    """
    largest = torch.maximum(against, own).detach()
    return torch.log(torch.exp(against - largest) + torch.exp(own - largest)) + largest - own


def _excluded(targets: Targets, positive: Tensor, queries: int, slots: int) -> Tensor:
    """fp32 [Q, Q S], 1 where a product is no negative of a query: a positive of it, its twin, or an empty slot."""
    keys = targets.query_key
    same_query = (keys[:, None] == keys[None, :]).float()
    right = (same_query[:, :, None] * positive.view(1, queries, slots)).view(queries, queries * slots)
    right = _with_twins(right, targets, positive, targets.product_key)
    empty = (targets.gain < 0).float()
    return torch.maximum(right, empty[None, :].expand_as(right))


def _with_twins(right: Tensor, targets: Targets, positive: Tensor, product_key: Tensor) -> Tensor:
    """`right` fp32 [Q, N] of products with these keys, and 1 where one is the same product as a positive of a query."""
    queries = right.shape[0]
    own, slots = targets.product_key.view(queries, -1), positive.view(queries, -1)
    for slot in range(own.shape[1]):
        same = (own[:, slot : slot + 1] == product_key[None, :]).float()
        right = torch.maximum(right, same * slots[:, slot : slot + 1])
    return right


# Memory: products of past batches as further negatives (cross-batch memory, Wang et al., "Cross-Batch Memory for
# Embedding Learning", CVPR 2020). More negatives than a batch holds, for the cost of a product of matrices.


def empty_memory(config: LossConfig, products: int, width: int, device: torch.device) -> Memory:
    """Nothing yet, in the room for `config.memory_batches` global batches of so many products."""
    rows = config.memory_batches * products

    def zeros(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    return Memory(zeros(rows * width), zeros(rows, torch.int32), zeros(rows, torch.int32), zeros(rows))


@torch.no_grad()
def remember(memory: Memory, product: Tensor, targets: Targets, config: LossConfig) -> Memory:
    """Without the oldest global batch, and with this one: product [Q S, D]. A vector that is not finite is left out."""
    vectors = unit(product.float())
    is_sound = 1.5 - (vectors * vectors).sum(1) > 0  # NaN compares as false
    query_key = targets.query_key[:, None].expand(-1, product.shape[0] // targets.query_key.shape[0]).reshape(-1)
    is_positive = (targets.gain - config.positive_gain >= 0).float()
    kind = (is_sound & (targets.gain >= 0)).float() * (1.0 + is_positive)
    vectors = torch.where(is_sound[:, None], vectors, torch.zeros_like(vectors)).reshape(-1)
    newest = (vectors, targets.product_key, query_key, kind)
    # A shift, not an indexed write: static on every device.
    return Memory._make(torch.cat([old[new.shape[0] :], new]) for old, new in zip(memory, newest, strict=True))


def _excluded_of_memory(targets: Targets, positive: Tensor, memory: Memory) -> Tensor:
    """fp32 [Q, M], 1 where a product of the memory is no negative of a query: a positive of it, the twin of one, or
    nothing.
    """
    is_positive = torch.clamp(memory.kind - 1.0, min=0.0)
    right = (targets.query_key[:, None] == memory.query_key[None, :]).float() * is_positive[None, :]
    right = _with_twins(right, targets, positive, memory.product_key)
    return torch.maximum(right, torch.clamp(1.0 - memory.kind, min=0.0)[None, :].expand_as(right))


# A temperature that is learnt: one scalar of the training model, the logarithm of what cosines are multiplied by.
#
# As in CLIP (Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", ICML 2021, 2.5):
# the cosines are multiplied by at most 100, that is, the temperature stays at 0.01 or above.

LOG_SCALE = "temperature.log_scale"
"""Name of the parameter in a training model and in its checkpoints. Models that score or embed have none."""
LARGEST_LOG_SCALE = -math.log(LOWEST_TEMPERATURE)


class Temperature(nn.Module):
    """Holds the parameter."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor([-math.log(start)], dtype=torch.float32))


def start_values(config: LossConfig) -> dict[str, Tensor]:
    """The parameter by name, where the temperature is learnt: for weights that come without it."""
    return {LOG_SCALE: Temperature(config.temperature).log_scale.detach()} if config.learn_temperature else {}


def temperature_of(log_scale: Tensor) -> Tensor:
    return torch.exp(-log_scale)
