"""Decayed usage against the integral it stands for, in every kernel."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fairshare.usage import Kernel, Usage

WINDOW_S = 1000.0
KERNELS = {
    Kernel.FLAT: lambda age: np.ones_like(age),
    Kernel.LINEAR: lambda age: 1.0 - age / WINDOW_S,
    Kernel.EXPONENTIAL: lambda age: 2.0 ** (-age / (WINDOW_S / 2.0)),
}
# (seconds since the change before, share, vCPU more)
changes = st.lists(st.tuples(st.floats(0, 1500), st.integers(0, 1), st.integers(1, 64)), min_size=1, max_size=12)


def integral(kernel: Kernel, steps: list[tuple[float, int, int]], share: int, now: float) -> float:
    """The definition, by 40,000 midpoints over the window."""
    edges = np.linspace(max(0.0, now - WINDOW_S), now, 40_001)
    middle = (edges[1:] + edges[:-1]) / 2
    running = np.zeros_like(middle)
    at = 0.0
    for wait, one, vcpus in steps:
        at += wait
        if one == share:
            running += np.where(middle >= at, vcpus, 0)
    return float((running * KERNELS[kernel](now - middle) * np.diff(edges)).sum())


@pytest.mark.parametrize("kernel", Kernel)
@given(steps=changes, rest=st.floats(0, 3000))
def test_usage_is_the_integral(kernel: Kernel, steps: list[tuple[float, int, int]], rest: float) -> None:
    usage, now = Usage(2, WINDOW_S, kernel), 0.0
    for wait, share, vcpus in steps:
        now += wait
        usage.advance(now)
        usage.change(share, vcpus)
    now += rest
    seen = usage.advance(now)
    for share in (0, 1):
        assert seen[share] == pytest.approx(integral(kernel, steps, share, now), rel=1e-3, abs=2.0)


@pytest.mark.parametrize("kernel", Kernel)
def test_a_share_silent_for_a_window_restarts_with_exactly_zero(kernel: Kernel) -> None:
    usage = Usage(2, WINDOW_S, kernel)
    for start in (0.1, 333.3, 777.7):
        usage.advance(start)
        usage.change(0, 12)
    usage.change(1, 5)
    usage.advance(1234.5)
    usage.change(0, -36)
    assert usage.advance(1234.5 + WINDOW_S - 1)[0] > 0
    silent, busy = usage.advance(1234.5 + WINDOW_S)
    assert silent == 0.0
    assert busy > 0
