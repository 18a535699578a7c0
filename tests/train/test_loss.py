"""Losses: their value against loops, what they leave out, and that cutting a batch does not change the gradient."""

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from pipeline.core.errors import ConfigError
from pipeline.model.config import LossConfig
from pipeline.model.relevance import RelevanceOutputs
from pipeline.train.loss import (
    Targets,
    contrastive_loss,
    graded_loss,
    pair_loss,
)

QUERIES, SLOTS, CLASSES, WIDTH = 5, 3, 3, 6
CONFIG = LossConfig(contrastive_weight=0.7, graded_weight=1.3, temperature=0.2)


def outputs() -> RelevanceOutputs:
    generator = torch.Generator().manual_seed(4)
    return RelevanceOutputs(
        torch.randn(QUERIES * SLOTS, CLASSES, generator=generator),
        torch.randn(QUERIES, WIDTH, generator=generator),
        torch.randn(QUERIES * SLOTS, WIDTH, generator=generator),
    )


def targets() -> Targets:
    """Queries 0 and 3 are the same; product 4 is a twin of positive 0; slots 5 and 14 are empty."""
    gain = [1.0, 0.5, 0.0, 1.0, 0.0, -1, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 0.2, 1.0, -1]
    return Targets(
        torch.tensor([2, 1, 0, 2, 0, -1, 0, 1, 0, 2, 2, -1, 1, 2, -1], dtype=torch.int32),
        torch.tensor(gain),
        torch.tensor([7, 8, 9, 7, 11], dtype=torch.int32),
        torch.tensor([100, 101, 102, 103, 100, 103, 106, 107, 108, 109, 110, 111, 112, 113, 112], dtype=torch.int32),
    )


def contrastive_by_hand(
    query: Tensor, product: Tensor, wanted: Targets, config: LossConfig, slots: int = SLOTS
) -> Tensor:
    """InfoNCE with Python loops."""
    positives = [j for j in range(len(product)) if wanted.gain[j] >= config.positive_gain]
    keys = [int(wanted.query_key[j // slots]) for j in range(len(product))]

    def is_negative(one: int, other: int) -> bool:
        """Product `other` for query `one`."""
        twins = [int(wanted.product_key[j]) for j in positives if j // slots == one]
        if wanted.gain[other] < 0 or int(wanted.product_key[other]) in twins:
            return False
        return not (other in positives and keys[other] == int(wanted.query_key[one]))

    total = torch.zeros(())
    for j in positives:
        negatives = [other for other in range(len(product)) if is_negative(j // slots, other)]
        cosines = F.cosine_similarity(query[j // slots][None], product[[j, *negatives]], dim=1)
        total = total - F.log_softmax(cosines / config.temperature, 0)[0]
    return total / len(positives)


@pytest.mark.parametrize("change", [{}, {"positive_gain": 0.5}, {"temperature": 0.05}, {"matryoshka_sizes": (2, 3)}])
def test_contrastive_loss_by_hand(change: dict[str, Any]) -> None:
    """Also the mean over leading dimensions and whole vectors."""
    config = CONFIG.model_copy(update=change)
    query, product = (side.double().requires_grad_() for side in outputs()[1:])
    loss = contrastive_loss(query, product, targets(), config)
    sizes = (WIDTH, *config.matryoshka_sizes)
    parts = [contrastive_by_hand(query[:, :size], product[:, :size], targets(), config) for size in sizes]
    expected = torch.stack(parts).mean()
    torch.testing.assert_close(loss, expected.float(), rtol=1e-5, atol=1e-6)
    pairs = zip(*(torch.autograd.grad(one, (query, product)) for one in (loss, expected)), strict=True)
    for found, gradient in pairs:
        torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"graded_weight": 0, "contrastive_weight": 0}, "both loss weights are 0"),
        ({"matryoshka_sizes": (64, 32)}, "expected ascending widths"),
        ({"matryoshka_sizes": (0,)}, "greater than or equal to 1"),
        ({"matryoshka_sizes": (8,), "contrastive_weight": 0}, "matryoshka_sizes requires the contrastive loss"),
        ({"purpose": "retrieval"}, "this setting was removed"),
    ],
)
def test_terms_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        LossConfig(**given)


def test_matryoshka_sizes_are_below_the_width() -> None:
    LossConfig(matryoshka_sizes=(8, 15)).check_width(16)
    with pytest.raises(ConfigError, match=r"matryoshka_sizes has 16, but the model's vectors have 16") as caught:
        LossConfig(matryoshka_sizes=(8, 16)).check_width(16)
    assert caught.value.next_command == "--train.loss.matryoshka-sizes 8"


def test_a_batch_without_positives_is_zero() -> None:
    _, query, product = outputs()
    nothing = targets()._replace(gain=torch.zeros(QUERIES * SLOTS))
    product.requires_grad_()
    loss = contrastive_loss(query, product, nothing, CONFIG)
    assert loss.item() == 0.0
    assert not torch.autograd.grad(loss, product)[0].any()


def test_one_query_alone_has_its_own_low_grades_as_negatives() -> None:
    _, query, product = (side[:SLOTS] for side in outputs())
    alone = Targets(*(side[: (1 if number == 2 else SLOTS)] for number, side in enumerate(targets().judged)))
    loss = contrastive_loss(query[:1], product, alone, CONFIG)
    cosines = F.cosine_similarity(query[:1], product, dim=1) / CONFIG.temperature
    torch.testing.assert_close(loss, -F.log_softmax(cosines, 0)[0], rtol=1e-5, atol=1e-6)


def test_graded_loss_is_cross_entropy_and_unlabelled_rows_count_as_zero() -> None:
    logits, label = outputs().logits, targets().label
    expected = F.cross_entropy(logits, label.long(), ignore_index=-1, reduction="sum") / len(label)
    torch.testing.assert_close(graded_loss(logits, label), expected)
    assert float(graded_loss(logits, torch.full_like(label, -1))) == 0.0


def test_unlabelled_rows_get_no_gradient() -> None:
    logits = outputs().logits.requires_grad_()
    (gradient,) = torch.autograd.grad(graded_loss(logits, targets().label), logits)
    unlabelled = targets().label < 0
    assert (gradient[unlabelled] == 0).all() and (gradient[~unlabelled] != 0).all()


def with_mined(mined: int) -> tuple[RelevanceOutputs, Targets]:
    """The batch with `mined` more slots a query, all but the last query's with a product."""
    seen, wanted = outputs(), targets()
    generator = torch.Generator().manual_seed(5)

    def longer(values: Tensor, further: Tensor) -> Tensor:
        parts = [values.view(QUERIES, SLOTS, *values.shape[1:]), further.view(QUERIES, mined, *values.shape[1:])]
        return torch.cat(parts, dim=1).flatten(0, 1)

    count = QUERIES * mined
    gain = torch.zeros(count)
    gain[-mined:] = -1
    keys = torch.arange(200, 200 + count, dtype=torch.int32)
    return (
        RelevanceOutputs(
            longer(seen.logits, torch.randn(count, CLASSES, generator=generator)),
            seen.query,
            longer(seen.product, torch.randn(count, WIDTH, generator=generator)),
        ),
        Targets(
            longer(wanted.label, torch.full((count,), -1, dtype=torch.int32)),
            longer(wanted.gain, gain),
            wanted.query_key,
            longer(wanted.product_key, keys),
        ),
    )


def test_mined_negatives_have_no_part_in_the_graded_loss() -> None:
    (seen, wanted), mined = with_mined(2), 2
    logits = seen.logits.requires_grad_()
    loss = pair_loss(seen._replace(logits=logits), wanted, CONFIG, mined)
    torch.testing.assert_close(loss, pair_loss(outputs(), targets(), CONFIG))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient.view(QUERIES, SLOTS + mined, CLASSES)[:, SLOTS:].any()
    assert gradient.view(QUERIES, SLOTS + mined, CLASSES)[:, :SLOTS].any()


def test_mined_negatives_stand_against_all_queries() -> None:
    seen, wanted = with_mined(1)
    by_hand = contrastive_by_hand(seen.query, seen.product, wanted, CONFIG, slots=SLOTS + 1)
    torch.testing.assert_close(contrastive_loss(seen.query, seen.product, wanted, CONFIG), by_hand)
    assert float(by_hand) > float(contrastive_loss(*outputs()[1:], targets(), CONFIG))


def test_bf16_outputs_give_an_fp32_loss() -> None:
    low = RelevanceOutputs(*(tensor.bfloat16() for tensor in outputs()))
    for mine, full in (
        (pair_loss(low, targets(), CONFIG), pair_loss(outputs(), targets(), CONFIG)),
        (
            contrastive_loss(low.query, low.product, targets(), CONFIG),
            contrastive_loss(outputs().query, outputs().product, targets(), CONFIG),
        ),
    ):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, full, rtol=0.03, atol=0.03)
