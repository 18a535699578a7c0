"""The guard: which steps it refuses, and that it recovers."""

import pytest
import torch

from pipeline.train.config import GuardConfig
from pipeline.train.optimizer import MEAN, SEEN, SKIPPED, SKIPPED_IN_A_ROW, VARIANCE, WARMUP_STEPS, SpikeGuard

CONFIG = GuardConfig()
CALM = WARMUP_STEPS + 30


def judge(guard: SpikeGuard, norm: float, loss: float = 1.0) -> bool:
    return bool(guard.judge(torch.tensor(loss), torch.tensor(norm)))


def warmed(config: GuardConfig = CONFIG) -> SpikeGuard:
    guard = SpikeGuard(config, torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    norms = 1.0 + 0.1 * torch.randn(CALM, generator=generator)
    assert all(judge(guard, float(norm)) for norm in norms)
    return guard


def test_moments_follow_the_norms() -> None:
    guard = warmed()
    assert float(guard.state[MEAN]) == pytest.approx(1.0, abs=0.05)
    assert 0.05 < float(guard.state[VARIANCE]) ** 0.5 < 0.2
    assert guard.state[SEEN] == CALM


@pytest.mark.parametrize("steps", [0, 40])
@pytest.mark.parametrize(
    ("loss", "norm"),
    [(float("nan"), 1.0), (1.0, float("nan")), (float("inf"), 1.0), (1.0, float("inf")), (-float("inf"), 1.0)],
)
def test_not_finite_is_refused_from_the_first_step_and_leaves_the_moments(steps: int, loss: float, norm: float) -> None:
    guard = warmed() if steps else SpikeGuard(CONFIG, torch.device("cpu"))
    before = guard.state.clone()
    assert not judge(guard, norm, loss)
    assert not judge(guard, norm, loss)
    assert torch.equal(guard.state[[MEAN, VARIANCE, SEEN]], before[[MEAN, VARIANCE, SEEN]])
    assert guard.state[SKIPPED_IN_A_ROW] == guard.state[SKIPPED] == 2


def test_a_spike_is_refused_and_the_next_calm_step_taken() -> None:
    guard = warmed()
    assert not judge(guard, 100.0)
    assert guard.state[SKIPPED_IN_A_ROW] == 1
    assert judge(guard, 1.0)
    assert guard.state[SKIPPED_IN_A_ROW] == 0 and guard.state[SKIPPED] == 1
    assert float(guard.state[MEAN]) < 1.2  # one spike hardly moves what is usual


def test_calm_runs_are_not_cut() -> None:
    """Without spread, 6 sigma is nothing; the ratio keeps ordinary ups and downs."""
    guard = SpikeGuard(CONFIG, torch.device("cpu"))
    assert all(judge(guard, 1.0) for _ in range(CALM))
    assert judge(guard, 3.9)
    assert not judge(guard, 30.0)


def test_spikes_are_not_judged_during_the_warm_up() -> None:
    guard = SpikeGuard(CONFIG, torch.device("cpu"))
    assert all(judge(guard, norm) for norm in (1.0, 500.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0))


@pytest.mark.parametrize("level", [5.0, 30.0, 100.0])
def test_a_lasting_change_of_level_is_followed_within_patience(level: float) -> None:
    guard = warmed()
    taken = [judge(guard, level) for _ in range(GuardConfig().patience + 200)]
    first = taken.index(True)
    assert first < GuardConfig().patience
    assert all(taken[first:])
