"""Losses: their value against loops, what they leave out, and that cutting a batch does not change the gradient."""

import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from pipeline.core.errors import ConfigError
from pipeline.model.config import LossConfig
from pipeline.model.losses import (
    Targets,
    Temperature,
    contrastive_loss,
    empty_memory,
    graded_loss,
    listwise_loss,
    pair_loss,
    relevance_loss,
    remember,
    temperature_of,
)
from pipeline.model.relevance import RelevanceOutputs

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
    query: Tensor,
    product: Tensor,
    wanted: Targets,
    config: LossConfig,
    slots: int = SLOTS,
    asking: int | None = None,
) -> Tensor:
    """InfoNCE with Python loops. `asking`: so many of the products are asked for, by default all."""

    def cosine(one: int, other: int) -> Tensor:
        return F.cosine_similarity(query[one], product[other], dim=0)

    positives = [j for j in range(len(product)) if wanted.gain[j] >= config.positive_gain]
    keys = [int(wanted.query_key[j // slots]) for j in range(len(product))]

    def is_negative(one: int, other: int) -> bool:
        """Product `other` for query `one`."""
        mine = [j for j in positives if j // slots == one]
        if wanted.gain[other] < 0 or int(wanted.product_key[other]) in [int(wanted.product_key[j]) for j in mine]:
            return False
        if other in positives and keys[other] == int(wanted.query_key[one]):
            return False
        if config.false_negative_margin is None:
            return True
        best = max(cosine(one, j) for j in mine) if mine else torch.tensor(-1e4)
        return bool(cosine(one, other) <= best - config.false_negative_margin)

    total = torch.zeros(())
    asked = [j for j in positives if asking is None or j < asking]
    for j in asked:
        one = j // slots
        against = [cosine(one, other) for other in range(len(product)) if is_negative(one, other)]
        scores = torch.stack([cosine(one, j), *against]) / config.temperature
        total = total - (1 - config.symmetric_share) * F.log_softmax(scores, 0)[0]
        askers = [cosine(other, j) for other in range(QUERIES) if is_negative(other, j)]
        scores = torch.stack([cosine(one, j), *askers]) / config.temperature
        total = total - config.symmetric_share * F.log_softmax(scores, 0)[0]
    return total / len(asked)


@pytest.mark.parametrize(
    "change",
    [{}, {"symmetric_share": 0.4}, {"false_negative_margin": 0.1}, {"positive_gain": 0.5}, {"temperature": 0.05}],
)
def test_contrastive_loss_by_hand(change: dict[str, float]) -> None:
    config = CONFIG.model_copy(update=change)
    query, product = (side.double().requires_grad_() for side in outputs()[1:])
    mine = contrastive_loss(query, product, targets(), config)
    theirs = contrastive_by_hand(query, product, targets(), config)
    torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-6)
    pairs = zip(torch.autograd.grad(mine, (query, product)), torch.autograd.grad(theirs, (query, product)), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "change", [{}, {"symmetric_share": 0.4}, {"false_negative_margin": 0.1}, {"matryoshka_sizes": (2, 3)}]
)
def test_a_memory_is_more_products_that_nobody_asks_from(change: dict[str, Any]) -> None:
    """As the whole of both batches has it: the loss of the positives of one, against the products of both."""
    config = CONFIG.model_copy(update={**change, "memory_batches": 2})
    seen, wanted = outputs(), targets()
    query, product = seen.query.requires_grad_(), seen.product.requires_grad_()
    generator = torch.Generator().manual_seed(5)
    before = torch.randn(QUERIES * SLOTS, WIDTH, generator=generator)
    # Query 7 is one of this batch, too: its positive 200 is none of its negatives; 103 is a positive of this batch's
    # query 8, and 108 a product without a grade above 0 that is also in this batch.
    earlier = Targets(
        torch.zeros(15, dtype=torch.int32),
        torch.tensor([1.0, 0.0, -1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]),
        torch.tensor([7, 21, 22, 23, 24], dtype=torch.int32),
        torch.tensor([200, 201, 202, 103, 108, *range(205, 215)], dtype=torch.int32),
    )
    memory = remember(empty_memory(config, len(before), WIDTH, before.device), before, earlier, config)
    mine = contrastive_loss(query, product, wanted, config, memory=memory)
    sizes = (WIDTH, *config.matryoshka_sizes)
    parts = [with_memory_by_hand(query[:, :k], product[:, :k], wanted, before[:, :k], earlier, config) for k in sizes]
    theirs = torch.stack(parts).mean()
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    assert mine.item() > contrastive_loss(query, product, wanted, config).item() + 0.1
    pairs = zip(torch.autograd.grad(mine, (query, product)), torch.autograd.grad(theirs, (query, product)), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)


def with_memory_by_hand(
    query: Tensor, product: Tensor, wanted: Targets, before: Tensor, earlier: Targets, config: LossConfig
) -> Tensor:
    """Both batches in one, of which the earlier one's queries ask nothing and are asked by nobody."""
    everything = torch.cat([product, before])
    keys = torch.cat([wanted.query_key, earlier.query_key])
    whole = Targets(
        torch.cat([wanted.label, earlier.label]),
        torch.cat([wanted.gain, earlier.gain]),
        keys,
        torch.cat([wanted.product_key, earlier.product_key]),
    )
    return contrastive_by_hand(query, everything, whole, config, asking=len(product))


def test_what_is_not_finite_is_not_remembered() -> None:
    config = CONFIG.model_copy(update={"memory_batches": 1})
    product = outputs().product
    product[4] = float("nan")
    memory = remember(empty_memory(config, len(product), WIDTH, product.device), product, targets(), config)
    there = (memory.kind > 0).tolist()
    assert there == [row not in (4, 5, 14) for row in range(15)], "nor what an empty slot holds"
    assert bool(torch.isfinite(memory.vectors).all())
    loss = contrastive_loss(outputs().query, outputs().product, targets(), config, memory=memory)
    assert bool(torch.isfinite(loss))


def test_a_memory_without_a_contrastive_loss_is_refused() -> None:
    with pytest.raises(ValidationError, match="memory_batches 2 without a contrastive loss"):
        LossConfig(contrastive_weight=0, memory_batches=2)


@pytest.mark.parametrize("change", [{}, {"symmetric_share": 0.4}, {"false_negative_margin": 0.1}])
def test_matryoshka_is_the_mean_over_leading_dimensions(change: dict[str, float]) -> None:
    config = CONFIG.model_copy(update={**change, "matryoshka_sizes": (2, 3), "graded_weight": 0.0})
    seen, wanted = outputs(), targets()
    query, product = (side.double().requires_grad_() for side in seen[1:])
    mine = contrastive_loss(query, product, wanted, config)
    parts = [contrastive_by_hand(query[:, :k], product[:, :k], wanted, config) for k in (WIDTH, 2, 3)]
    theirs = torch.stack(parts).mean()
    torch.testing.assert_close(mine, theirs.float(), rtol=1e-5, atol=1e-6)
    pairs = zip(torch.autograd.grad(mine, (query, product)), torch.autograd.grad(theirs, (query, product)), strict=True)
    for ours, expected in pairs:
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
    listed = [listwise_loss(seen.query[:, :k], seen.product[:, :k], wanted, config.temperature) for k in (WIDTH, 2, 3)]
    both = pair_loss(seen, wanted, config.model_copy(update={"listwise_weight": 0.5}))
    torch.testing.assert_close(both, 0.5 * torch.stack(listed).mean())


def test_a_learnt_temperature_has_the_gradient_by_hand() -> None:
    config = CONFIG.model_copy(update={"symmetric_share": 0.3, "matryoshka_sizes": (3,), "listwise_weight": 0.5})
    seen, wanted, step = outputs(), targets(), 1e-3
    log_scale = Temperature(0.2).log_scale
    loss = relevance_loss(seen, wanted, config, temperature=temperature_of(log_scale))
    torch.testing.assert_close(loss, relevance_loss(seen, wanted, config))
    (gradient,) = torch.autograd.grad(loss, log_scale)
    hotter, colder = (
        relevance_loss(seen, wanted, config.model_copy(update={"temperature": 0.2 * math.exp(sign * step)}))
        for sign in (1, -1)
    )
    assert float(gradient) == pytest.approx(float(colder - hotter) / (2 * step), rel=1e-2)
    assert abs(float(gradient)) > 0.1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"purpose": "retrieval", "graded_weight": 2},
            "graded_weight 2 with purpose retrieval: expected graded_weight",
        ),
        ({"purpose": "retrieval", "contrastive_weight": 0}, "no term of the loss has a weight"),
        ({"purpose": "ranking", "contrastive_weight": 0.5}, "contrastive_weight 0.5 and graded_weight 1 with purpose"),
        ({"purpose": "ranking", "graded_weight": 0}, "expected contrastive_weight 0 and graded_weight above 0"),
        ({"graded_weight": 0, "contrastive_weight": 0}, "no term of the loss has a weight"),
        ({"learn_temperature": True, "temperature": 0.005}, "expected 0.01 or above"),
        ({"learn_temperature": True, "purpose": "ranking"}, "nothing has a temperature"),
        ({"matryoshka_sizes": (64, 32)}, "expected rising widths"),
        ({"matryoshka_sizes": (0,)}, "greater than or equal to 1"),
        ({"matryoshka_sizes": (8,), "contrastive_weight": 0}, "nothing is learnt of vectors"),
    ],
)
def test_terms_that_contradict_each_other_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        LossConfig(**given)


def test_a_purpose_turns_the_other_term_off_and_keeps_its_own_weight() -> None:
    assert LossConfig() == LossConfig(purpose="both", graded_weight=1.0, contrastive_weight=1.0)
    vectors = LossConfig(purpose="retrieval", contrastive_weight=0.3)
    assert (vectors.graded_weight, vectors.contrastive_weight, vectors.trains_head) == (0.0, 0.3, False)
    scores = LossConfig(purpose="ranking", graded_weight=2.0)
    assert (scores.graded_weight, scores.contrastive_weight, scores.trains_head) == (2.0, 0.0, True)
    for one in (vectors, scores):
        assert LossConfig.model_validate(one.model_dump(mode="json")) == one


def test_matryoshka_sizes_are_below_the_width() -> None:
    LossConfig(matryoshka_sizes=(8, 15)).check_width(16)
    with pytest.raises(ConfigError, match=r"matryoshka_sizes has 16, the model's vectors have 16") as caught:
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
    alone = Targets(*(side[: (1 if name == "query_key" else SLOTS)] for name, side in targets()._asdict().items()))
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


def test_listwise_loss_by_hand() -> None:
    seen, wanted = outputs(), targets()
    total = torch.zeros(())
    for one in range(QUERIES):
        slots = [j for j in range(one * SLOTS, (one + 1) * SLOTS) if wanted.gain[j] >= 0]
        gains = wanted.gain[slots]
        scores = F.cosine_similarity(seen.query[one], seen.product[slots], dim=1) / CONFIG.temperature
        total = total - (gains / (gains.sum() + 1e-6) * F.log_softmax(scores, 0)).sum()
    torch.testing.assert_close(listwise_loss(seen.query, seen.product, wanted, CONFIG.temperature), total / QUERIES)


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
    config = CONFIG.model_copy(update={"listwise_weight": 0.0})
    logits = seen.logits.requires_grad_()
    loss = pair_loss(seen._replace(logits=logits), wanted, config, mined)
    torch.testing.assert_close(loss, pair_loss(outputs(), targets(), config))
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient.view(QUERIES, SLOTS + mined, CLASSES)[:, SLOTS:].any()
    assert gradient.view(QUERIES, SLOTS + mined, CLASSES)[:, :SLOTS].any()


def test_mined_negatives_stand_against_all_queries_and_in_the_list_of_their_own() -> None:
    seen, wanted = with_mined(1)
    by_hand = contrastive_by_hand(seen.query, seen.product, wanted, CONFIG, slots=SLOTS + 1)
    torch.testing.assert_close(contrastive_loss(seen.query, seen.product, wanted, CONFIG), by_hand)
    assert float(by_hand) > float(contrastive_loss(*outputs()[1:], targets(), CONFIG))
    first = range(SLOTS + 1)
    cosines = torch.stack([F.cosine_similarity(seen.query[0], seen.product[j], dim=0) for j in first])
    shares = wanted.gain[: SLOTS + 1] / wanted.gain[: SLOTS + 1].sum()
    alone = seen._replace(query=seen.query[:1], product=seen.product[: SLOTS + 1])
    listed = listwise_loss(
        alone.query, alone.product, wanted._replace(gain=wanted.gain[: SLOTS + 1]), CONFIG.temperature
    )
    torch.testing.assert_close(listed, -(shares * F.log_softmax(cosines / CONFIG.temperature, 0)).sum())


def test_cutting_the_pair_losses_keeps_the_gradient() -> None:
    config = CONFIG.model_copy(update={"listwise_weight": 0.5})
    seen = RelevanceOutputs(*(tensor.requires_grad_() for tensor in outputs()))
    whole = torch.autograd.grad(pair_loss(seen, targets(), config), seen)
    total = [torch.zeros_like(tensor) for tensor in seen]
    for one in range(QUERIES):
        slots = slice(one * SLOTS, (one + 1) * SLOTS)
        part = RelevanceOutputs(seen.logits[slots], seen.query[one : one + 1], seen.product[slots])
        wanted = targets()
        mine = Targets(
            wanted.label[slots], wanted.gain[slots], wanted.query_key[one : one + 1], wanted.product_key[slots]
        )
        loss = pair_loss(part, mine, config) / QUERIES
        for collected, gradient in zip(total, torch.autograd.grad(loss, seen), strict=True):
            collected += gradient
    for collected, expected in zip(total, whole, strict=True):
        torch.testing.assert_close(collected, expected, rtol=1e-6, atol=1e-7)


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
