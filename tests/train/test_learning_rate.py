"""Learning rates by step."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.train.config import Shape
from pipeline.train.optimizer import learning_rate

SHAPES: tuple[Shape, ...] = ("cosine", "linear", "constant")


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_is_linear_and_reaches_the_peak(shape: Shape) -> None:
    rates = [
        learning_rate(s, max_steps=100, peak=2.0, shape=shape, warmup_steps=10, final_fraction=0.1)
        for s in range(1, 102)
    ]
    assert rates[:10] == pytest.approx([0.2 * s for s in range(1, 11)])
    assert rates[-1] == pytest.approx(2.0 if shape == "constant" else 0.2)
    assert rates[-2] > 0.2  # the end of the decay lies after the last step, which still learns
    assert max(rates) == pytest.approx(2.0)
    assert all(a >= b for a, b in pairwise(rates[9:]))


def test_half_way_values() -> None:
    values = {"max_steps": 30, "peak": 1.0, "warmup_steps": 10, "final_fraction": 0.2}
    assert learning_rate(21, shape="linear", **values) == pytest.approx(0.6)  # type: ignore[arg-type]
    assert learning_rate(21, shape="cosine", **values) == pytest.approx(0.6)  # type: ignore[arg-type]
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(16, shape="cosine", **values) == pytest.approx(quarter)  # type: ignore[arg-type]


@given(st.integers(1, 50), st.integers(0, 60), st.sampled_from(SHAPES), st.floats(0, 1))
def test_never_negative_never_above_the_peak(max_steps: int, warmup: int, shape: Shape, final: float) -> None:
    for step in range(1, max_steps + 2):  # one beyond the end as well
        rate = learning_rate(
            step, max_steps=max_steps, peak=3.0, shape=shape, warmup_steps=warmup, final_fraction=final
        )
        assert 0.0 <= rate <= 3.0 * (1 + 1e-12)
