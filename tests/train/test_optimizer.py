"""Our two AdamW forms against torch.optim.AdamW."""

import pytest
import torch
from torch import Tensor

from pipeline.train.config import OptimizerConfig
from pipeline.train.optimizer import CONTROL_SIZE, AdamW, control_values

CONFIG = OptimizerConfig(weight_decay=0.1, beta1=0.8, beta2=0.95, eps=1e-6)

DECAYED = (True, False)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(50, generator=generator), torch.randn(7, generator=generator)]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(50, generator=generator) * 3, torch.randn(7, generator=generator)]


@pytest.mark.parametrize("traced", [True, False])
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


@pytest.mark.parametrize("traced", [True, False])
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


def test_control_values() -> None:
    values = control_values(3, 0.25, CONFIG)
    assert values.shape == (CONTROL_SIZE,) and values.dtype == torch.float32
    assert values.tolist() == pytest.approx([0.25, 1 - 0.8**3, 1 - 0.95**3, 3.0])
    assert control_values(10**7, 1e-4, CONFIG)[3] == 10**7  # exact in fp32 far beyond any run


@pytest.mark.parametrize("traced", [True, False])
def test_a_vector_may_have_a_rate_of_its_own(traced: bool) -> None:
    """At ten times the rate, and one update: ten times the step."""
    plain = AdamW(start(), (False, False), CONFIG, traced=traced)
    faster = AdamW(start(), (False, False), CONFIG, traced=traced, rates=(1.0, 10.0))
    for optimizer in (plain, faster):
        optimizer.step(gradients(1), control_values(1, 0.01, CONFIG), torch.tensor(1.0), torch.tensor(True))
    assert torch.equal(plain.masters[0], faster.masters[0])
    torch.testing.assert_close(faster.masters[1] - start()[1], 10 * (plain.masters[1] - start()[1]))
