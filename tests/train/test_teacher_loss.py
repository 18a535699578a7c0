"""The terms that compare the student with its teacher: their values against torch and loops, and what is masked."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.config import LossConfig
from pipeline.model.relevance import RelevanceOutputs, TaughtOutputs
from pipeline.train.loss import Targets, teacher_loss

QUERIES, SLOTS, CLASSES, WIDTH, DIM = 4, 5, 3, 6, 7
SIZE = QUERIES * SLOTS


def case(*, vectors: bool) -> tuple[RelevanceOutputs, Targets]:
    """The last slot of every query is mined, some slots are empty, and query 2 has one candidate only."""
    draw = torch.Generator().manual_seed(3)
    outputs = RelevanceOutputs(
        torch.randn(SIZE, CLASSES, generator=draw),
        torch.randn(QUERIES, WIDTH, generator=draw),
        torch.randn(SIZE, WIDTH, generator=draw),
    )
    gain = torch.rand(SIZE, generator=draw)
    gain[[3, 10, 12, 13, 14, 18]] = -1
    filled = (gain >= 0).float()
    keys = torch.arange(SIZE, dtype=torch.int32)
    sides = [F.normalize(torch.randn(size, DIM, generator=draw), dim=1) for size in (QUERIES, SIZE)]
    targets = Targets(
        torch.zeros(SIZE, dtype=torch.int32),
        gain,
        keys[:QUERIES],
        keys,
    )
    if vectors:
        return outputs, targets._replace(teacher_query=sides[0], teacher_product=sides[1] * filled[:, None])
    score = 3 * torch.randn(SIZE, generator=draw) * filled
    return outputs, targets._replace(teacher_score=score, teacher_mask=filled)


def lists(values: Tensor, targets: Targets, last: int = SLOTS) -> list[Tensor]:
    """The values of the filled slots of each query, up to slot `last`."""
    mask = (targets.gain >= 0).view(QUERIES, SLOTS)[:, :last]
    return [row[keep] for row, keep in zip(values.view(QUERIES, SLOTS)[:, :last], mask, strict=True)]


def kl(teacher: list[Tensor], student: list[Tensor]) -> Tensor:
    pairs = zip(teacher, student, strict=True)
    terms = [F.kl_div(F.log_softmax(s, 0), F.softmax(t, 0), reduction="sum") for t, s in pairs]
    return torch.stack(terms).sum() / QUERIES


def scores(outputs: RelevanceOutputs, temperature: float) -> tuple[Tensor, Tensor]:
    """The logit of the probability of the best label, and the similarities to the own products."""
    best = torch.softmax(outputs.logits, 1)[:, -1]
    query = outputs.query.repeat_interleave(SLOTS, 0)
    return torch.log(best) - torch.log1p(-best), F.cosine_similarity(query, outputs.product) / temperature


@pytest.mark.parametrize("unscored", [0, 1])
def test_scores_are_compared_with_logits_and_similarities(unscored: int) -> None:
    outputs, targets = case(vectors=False)
    config = LossConfig(temperature=0.3)
    assert targets.teacher_score is not None
    head, cosine = scores(outputs, 0.3)
    judged = SLOTS - unscored
    expected = kl(lists(targets.teacher_score, targets, judged), lists(head, targets, judged))
    expected = expected + kl(lists(targets.teacher_score, targets), lists(cosine, targets))
    loss = teacher_loss(outputs, targets, config, unscored)
    assert loss is not None and float(expected) > 0.1
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    without = teacher_loss(outputs, targets, config.model_copy(update={"graded_weight": 0.0}), unscored)
    assert without is not None, "an untrained head is left alone"
    torch.testing.assert_close(without, kl(lists(targets.teacher_score, targets), lists(cosine, targets)))


def test_projected_vectors_are_compared_with_those_of_the_teacher() -> None:
    outputs, targets = case(vectors=True)
    draw = torch.Generator().manual_seed(8)
    sides = [torch.randn(size, DIM, generator=draw) for size in (QUERIES, SIZE)]
    assert targets.teacher_query is not None and targets.teacher_product is not None
    filled = targets.gain >= 0
    expected = (1 - F.cosine_similarity(sides[0], targets.teacher_query)).mean()
    expected = expected + (1 - F.cosine_similarity(sides[1], targets.teacher_product))[filled].sum() / SIZE
    loss = teacher_loss(TaughtOutputs(*outputs, *sides), targets, LossConfig())
    torch.testing.assert_close(loss, expected)


def test_a_student_that_agrees_has_no_loss_and_no_gradient() -> None:
    outputs, targets = case(vectors=False)
    head, _ = scores(outputs, 1.0)
    logits = outputs.logits.requires_grad_()
    agreeing = targets._replace(teacher_score=head.detach() * (targets.gain >= 0))
    loss = teacher_loss(outputs._replace(logits=logits), agreeing, LossConfig())
    assert loss is not None
    (gradient,) = torch.autograd.grad(loss, logits)
    assert float(gradient.abs().max()) < 1e-6


def test_without_a_teacher_there_is_no_term() -> None:
    outputs, targets = case(vectors=True)
    assert teacher_loss(outputs, Targets(*targets[:4]), LossConfig()) is None
    outputs, targets = case(vectors=False)
    assert teacher_loss(outputs, targets._replace(teacher_mask=torch.zeros(SIZE)), LossConfig()) == 0.0
