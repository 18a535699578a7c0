"""AdamW in both forms against torch's, learning rates by step, and which steps the guard refuses."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.train.config import GuardConfig, OptimizerConfig, Shape
from pipeline.train.optimizer import (
    COUNT,
    MEAN,
    SKIPPED,
    SKIPPED_IN_A_ROW,
    VARIANCE,
    WARMUP_STEPS,
    AdamW,
    SpikeGuard,
    control_values,
    learning_rate_at,
)

CONFIG = OptimizerConfig(weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6)
DECAYED = (True, False)
both_forms = pytest.mark.parametrize("traced", [True, False])


def vectors(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) * scale for size in (50, 7)]


def start() -> list[Tensor]:
    return vectors(1)


def gradients(step: int) -> list[Tensor]:
    return vectors(100 + step, 3.0)


@both_forms
def test_twenty_steps_equal_torch_adamw(traced: bool) -> None:
    ours = AdamW(start(), DECAYED, CONFIG, traced=traced)
    theirs = [tensor.requires_grad_() for tensor in start()]
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    for step in range(1, 21):
        rate, clip = 0.01 * step, 0.5 if step % 2 else 1.0
        for group in reference.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(theirs, gradients(step), strict=True):
            parameter.grad = gradient * clip
        reference.step()
        ours.step(gradients(step), control_values(step, rate, CONFIG), torch.tensor(clip), torch.tensor(True))
    for master, expected in zip(ours.masters, theirs, strict=True):
        torch.testing.assert_close(master, expected.detach(), rtol=1e-6, atol=1e-6)


@both_forms
def test_a_refused_step_changes_no_bit(traced: bool) -> None:
    optimizer = AdamW(start(), DECAYED, CONFIG, traced=traced)
    control = control_values(1, 0.1, CONFIG)
    optimizer.step(gradients(1), control, torch.tensor(1.0), torch.tensor(True))
    state = [*optimizer.masters, *optimizer.exp_avg, *optimizer.exp_avg_sq]
    before = [tensor.clone() for tensor in state]
    for poison, clip in ((float("nan"), float("nan")), (float("inf"), 0.0), (1.0, 1.0)):
        bad = [gradient * poison for gradient in gradients(2)]
        optimizer.step(bad, control_values(2, 0.1, CONFIG), torch.tensor(clip), torch.tensor(False))
        assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    optimizer.step(gradients(2), control, torch.tensor(1.0), torch.tensor(True))
    assert not any(torch.equal(a, b) for a, b in zip(before, state, strict=True))


@both_forms
def test_a_vector_may_have_a_rate_of_its_own(traced: bool) -> None:
    """At ten times the rate, and one update: ten times the step."""
    plain = AdamW(start(), (False, False), CONFIG, traced=traced)
    faster = AdamW(start(), (False, False), CONFIG, traced=traced, rates=(1.0, 10.0))
    for optimizer in (plain, faster):
        optimizer.step(gradients(1), control_values(1, 0.01, CONFIG), torch.tensor(1.0), torch.tensor(True))
    assert torch.equal(plain.masters[0], faster.masters[0])
    torch.testing.assert_close(faster.masters[1] - start()[1], 10 * (plain.masters[1] - start()[1]))


def test_control_values() -> None:
    values = control_values(3, 0.25, CONFIG)
    assert values.shape == (4,) and values.dtype == torch.float32
    assert values.tolist() == pytest.approx([0.25, 1 - 0.8**3, 1 - 0.95**3, 3.0])
    assert control_values(10**7, 1e-4, CONFIG)[3] == 10**7  # exact in fp32 far beyond any run


# Learning rates.

SHAPES: tuple[Shape, ...] = ("cosine", "linear", "constant")


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_and_reaches_the_peak(shape: Shape) -> None:
    config = OptimizerConfig(learning_rate=0.5, schedule=shape, warmup_fraction=0.1)
    rates = [learning_rate_at(config, step, 100) for step in range(1, 102)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[-1] == pytest.approx(0.5 if shape == "constant" else 0.0)
    assert rates[-2] > 0.0  # the end of the decay lies after the last step, which still learns
    assert max(rates) == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(rates[9:]))


@pytest.mark.parametrize(
    ("shape", "step", "rate"),
    [("linear", 21, 0.5), ("cosine", 21, 0.5), ("cosine", 16, 0.5 * (1 + math.cos(math.pi / 4)))],
)
def test_rates_of_the_decay(shape: Shape, step: int, rate: float) -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule=shape, warmup_fraction=1 / 3)
    assert learning_rate_at(config, step, 30) == pytest.approx(rate)


@given(st.integers(1, 50), st.floats(0, 1, exclude_max=True), st.sampled_from(SHAPES))
def test_never_negative_never_above_the_peak(max_steps: int, warmup: float, shape: Shape) -> None:
    config = OptimizerConfig(learning_rate=0.3, schedule=shape, warmup_fraction=warmup)
    for step in range(1, max_steps + 2):  # one beyond the end as well
        assert 0.0 <= learning_rate_at(config, step, max_steps) <= 0.3 * (1 + 1e-12)


# The guard.

GUARD = GuardConfig()
CALM = WARMUP_STEPS + 30


def judge(guard: SpikeGuard, norm: float, loss: float = 1.0) -> bool:
    return bool(guard.judge(torch.tensor(loss), torch.tensor(norm)))


def fresh() -> SpikeGuard:
    return SpikeGuard(GUARD, torch.device("cpu"))


@pytest.fixture
def warmed() -> SpikeGuard:
    guard, generator = fresh(), torch.Generator().manual_seed(1)
    assert all(judge(guard, float(norm)) for norm in 1.0 + 0.1 * torch.randn(CALM, generator=generator))
    return guard


def test_moments_follow_the_norms(warmed: SpikeGuard) -> None:
    assert float(warmed.state[MEAN]) == pytest.approx(1.0, abs=0.05)
    assert 0.05 < float(warmed.state[VARIANCE]) ** 0.5 < 0.2
    assert warmed.state[COUNT] == CALM


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("loss_and_norm", [(math.nan, 1), (1, math.nan), (math.inf, 1), (1, math.inf), (-math.inf, 1)])
def test_not_finite_is_refused_from_the_first_step_and_leaves_the_moments(
    warmed: SpikeGuard, is_first: bool, loss_and_norm: tuple[float, float]
) -> None:
    guard, (loss, norm) = fresh() if is_first else warmed, loss_and_norm
    before = guard.state.clone()
    assert not judge(guard, norm, loss) and not judge(guard, norm, loss)
    assert torch.equal(guard.state[[MEAN, VARIANCE, COUNT]], before[[MEAN, VARIANCE, COUNT]])
    assert guard.state[SKIPPED_IN_A_ROW] == guard.state[SKIPPED] == 2


def test_a_spike_is_refused_and_the_next_calm_step_taken(warmed: SpikeGuard) -> None:
    assert not judge(warmed, 100.0) and warmed.state[SKIPPED_IN_A_ROW] == 1
    assert judge(warmed, 1.0)
    assert warmed.state[SKIPPED_IN_A_ROW] == 0 and warmed.state[SKIPPED] == 1
    assert float(warmed.state[MEAN]) < 1.2  # one spike hardly moves what is usual


@pytest.mark.parametrize(
    ("norms", "refused"),
    [
        ([1.0] * CALM + [3.9], []),  # without spread 6 sigma is nothing; the ratio keeps ordinary ups and downs
        ([1.0] * CALM + [30.0], [CALM]),
        ([1.0, 500.0, *[1.0] * 8], []),  # not judged during the warm-up
    ],
)
def test_ordinary_norms_are_not_cut(norms: list[float], refused: list[int]) -> None:
    guard = fresh()
    assert [step for step, norm in enumerate(norms) if not judge(guard, norm)] == refused


@pytest.mark.parametrize("level", [5.0, 30.0, 100.0])
def test_a_lasting_change_of_level_is_followed_within_patience(warmed: SpikeGuard, level: float) -> None:
    taken = [judge(warmed, level) for _ in range(GUARD.patience + 200)]
    first = taken.index(True)
    assert first < GUARD.patience and all(taken[first:])
