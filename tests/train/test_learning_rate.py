"""Learning rates by step."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.train.config import OptimizerConfig, Shape
from pipeline.train.optimizer import schedule_of

SHAPES: tuple[Shape, ...] = ("cosine", "linear", "constant")


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_and_reaches_the_peak(shape: Shape) -> None:
    config = OptimizerConfig(learning_rate=0.5, schedule=shape, warmup_fraction=0.1)
    rates = [schedule_of(config, step, 100) for step in range(1, 102)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[-1] == pytest.approx(0.5 if shape == "constant" else 0.0)
    assert rates[-2] > 0.0  # the end of the decay lies after the last step, which still learns
    assert max(rates) == pytest.approx(0.5)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_half_way_values() -> None:
    linear, cosine = (
        OptimizerConfig(learning_rate=1.0, schedule=shape, warmup_fraction=1 / 3) for shape in ("linear", "cosine")
    )
    assert schedule_of(linear, 21, 30) == schedule_of(cosine, 21, 30) == pytest.approx(0.5)
    quarter = 0.5 * (1 + math.cos(math.pi / 4))
    assert schedule_of(cosine, 16, 30) == pytest.approx(quarter)


@given(st.integers(1, 50), st.floats(0, 1, exclude_max=True), st.sampled_from(SHAPES))
def test_never_negative_never_above_the_peak(max_steps: int, warmup: float, shape: Shape) -> None:
    config = OptimizerConfig(learning_rate=0.3, schedule=shape, warmup_fraction=warmup)
    for step in range(1, max_steps + 2):  # one beyond the end as well
        assert 0.0 <= schedule_of(config, step, max_steps) <= 0.3 * (1 + 1e-12)
