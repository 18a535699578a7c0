"""Losses: their value, what they leave out, and that cutting a batch does not change the gradient."""

import pytest
import torch
import torch.nn.functional as F

from pipeline.model.config import LossConfig
from pipeline.model.losses import Targets, contrastive_loss, graded_loss, relevance_loss
from pipeline.model.relevance import RelevanceOutputs

BATCH, GROUP, CLASSES, WIDTH = 12, 4, 3, 6
CONFIG = LossConfig(contrastive_weight=0.7, graded_weight=1.3, negatives_group=GROUP, temperature=0.2)


def outputs() -> RelevanceOutputs:
    generator = torch.Generator().manual_seed(4)
    return RelevanceOutputs(
        torch.randn(BATCH, CLASSES, generator=generator),
        torch.randn(BATCH, WIDTH, generator=generator),
        torch.randn(BATCH, WIDTH, generator=generator),
    )


def targets() -> Targets:
    return Targets(
        torch.tensor([0, 1, 2, -1, 2, 2, 1, 0, -1, -1, 0, 2], dtype=torch.int32),
        torch.tensor([0, 0.5, 1, 0, 1, 1, 0.5, 0, 0, 0, 0, 1.0]),
        torch.tensor([1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 6], dtype=torch.int32),
    )


def test_graded_loss_is_cross_entropy_and_unlabelled_rows_count_as_zero() -> None:
    logits, label = outputs().logits, targets().label
    expected = F.cross_entropy(logits, label.long(), ignore_index=-1, reduction="sum") / BATCH
    torch.testing.assert_close(graded_loss(logits, label), expected)
    assert float(graded_loss(logits, torch.full_like(label, -1))) == 0.0


def test_unlabelled_rows_get_no_gradient() -> None:
    logits = outputs().logits.requires_grad_()
    (gradient,) = torch.autograd.grad(graded_loss(logits, targets().label), logits)
    unlabelled = targets().label < 0
    assert (gradient[unlabelled] == 0).all() and (gradient[~unlabelled] != 0).all()


def by_hand(seen: RelevanceOutputs, wanted: Targets, config: LossConfig) -> torch.Tensor:
    """InfoNCE with Python loops."""
    total = torch.zeros(())
    for start in range(0, BATCH, GROUP):
        for row in range(start, start + GROUP):
            if wanted.gain[row] < config.positive_gain:
                continue
            scores = []
            for column in range(start, start + GROUP):
                same = wanted.query_key[row] == wanted.query_key[column]
                if column != row and same and wanted.gain[column] >= config.positive_gain:
                    continue  # another right answer to the same query
                cosine = F.cosine_similarity(seen.query[row], seen.product[column], dim=0)
                scores.append(cosine / config.temperature)
                if column == row:
                    own = scores[-1]
            total = total - (own - torch.logsumexp(torch.stack(scores), 0))
    return total / BATCH


def test_contrastive_loss_by_hand() -> None:
    torch.testing.assert_close(
        contrastive_loss(outputs(), targets(), CONFIG), by_hand(outputs(), targets(), CONFIG), rtol=1e-5, atol=1e-6
    )


def test_another_positive_of_the_query_is_no_negative() -> None:
    """Rows 4 and 5 are both right for query 2: moving product 5 must not change the loss of row 4."""
    seen, wanted = outputs(), targets()
    only_row_4 = wanted._replace(gain=torch.where(torch.arange(BATCH) == 4, wanted.gain, 0.0))
    product = seen.product.clone().requires_grad_()
    both = wanted._replace(gain=torch.where((torch.arange(BATCH) == 4) | (torch.arange(BATCH) == 5), wanted.gain, 0.0))
    (masked,) = torch.autograd.grad(contrastive_loss(seen._replace(product=product), both, CONFIG), product)
    (unmasked,) = torch.autograd.grad(contrastive_loss(seen._replace(product=product), only_row_4, CONFIG), product)
    own_only = torch.autograd.grad(by_hand(seen._replace(product=product), both, CONFIG), product)[0]
    torch.testing.assert_close(masked, own_only, rtol=1e-4, atol=1e-7)
    assert float(unmasked[5].norm()) > 1e-3  # a negative while it is no positive


def test_groups_do_not_see_each_other() -> None:
    seen = outputs()
    product = seen.product.clone().requires_grad_()
    first_group = targets()._replace(gain=torch.where(torch.arange(BATCH) < GROUP, targets().gain, 0.0))
    (gradient,) = torch.autograd.grad(contrastive_loss(seen._replace(product=product), first_group, CONFIG), product)
    assert (gradient[:GROUP] != 0).any() and (gradient[GROUP:] == 0).all()


@pytest.mark.parametrize("pieces", [1, 3])
def test_cutting_into_micro_batches_of_whole_groups_keeps_the_gradient(pieces: int) -> None:
    seen = RelevanceOutputs(*(tensor.requires_grad_() for tensor in outputs()))
    whole = torch.autograd.grad(relevance_loss(seen, targets(), CONFIG), seen)
    size = BATCH // pieces
    total = [torch.zeros_like(tensor) for tensor in seen]
    for start in range(0, BATCH, size):
        part = slice(start, start + size)
        loss = relevance_loss(
            RelevanceOutputs(*(t[part] for t in seen)), Targets(*(t[part] for t in targets())), CONFIG
        )
        for collected, gradient in zip(total, torch.autograd.grad(loss / pieces, seen), strict=True):
            collected += gradient
    for collected, expected in zip(total, whole, strict=True):
        torch.testing.assert_close(collected, expected, rtol=1e-6, atol=1e-7)


def test_without_weight_the_contrastive_part_is_not_computed() -> None:
    config = CONFIG.model_copy(update={"contrastive_weight": 0.0, "negatives_group": 5})  # 5 does not divide 12
    torch.testing.assert_close(
        relevance_loss(outputs(), targets(), config), 1.3 * graded_loss(outputs().logits, targets().label)
    )


def test_bf16_outputs_give_an_fp32_loss() -> None:
    low = RelevanceOutputs(*(tensor.bfloat16() for tensor in outputs()))
    loss = relevance_loss(low, targets(), CONFIG)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, relevance_loss(outputs(), targets(), CONFIG), rtol=0.03, atol=0.03)
