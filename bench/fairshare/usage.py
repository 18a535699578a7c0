"""Decayed vCPU usage of every share, kept up to date in constant work a change.

Usage of a share at time t is the integral over u of v(u) k(t - u): v is its running vCPU, k a decay kernel that is zero
beyond the window W. AWS publishes the window, not the kernel, so it is a parameter:
flat k = 1, linear k = 1 - age/W, exponential k = 2^(-age/(W/2)), cut off at W.

Each integral obeys a differential equation in v(t) and v(t - W), both constant between changes, and so moves on exactly
without a look at what lies between.
"""

import math
from collections import deque
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Kernel(StrEnum):
    """How fast usage is forgotten within the window."""

    FLAT = "flat"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


class Usage:
    """Usage of S shares. Time only moves forward."""

    def __init__(self, num_shares: int, window_s: float, kernel: Kernel) -> None:
        self.now_s = 0.0
        self._window = window_s
        self._kernel = kernel
        self._rate = math.log(2.0) / (window_s / 2.0)
        self._running = np.zeros(num_shares)
        self._leaving = np.zeros(num_shares)  # what ran one window ago
        self._sum = np.zeros(num_shares)  # flat
        self._linear = np.zeros(num_shares)
        self._exponential = np.zeros(num_shares)
        self._changes: deque[tuple[float, int, float]] = deque()
        self._open = np.zeros(num_shares, dtype=np.int64)  # changes still within the window

    def change(self, share: int, vcpus: float) -> None:
        """From now on `share` runs `vcpus` more (or fewer, when negative)."""
        self._running[share] += vcpus
        self._changes.append((self.now_s + self._window, share, vcpus))
        self._open[share] += 1

    def advance(self, to_s: float) -> Floats:
        """Move to a later time. Returns the usage of each share there, vCPU-seconds [S]; do not change it."""
        while self._changes and self._changes[0][0] <= to_s:
            at, share, vcpus = self._changes.popleft()
            self._step(at - self.now_s)
            self.now_s = at
            self._leaving[share] += vcpus
            self._open[share] -= 1
            if not self._open[share] and not self._running[share]:
                self._forget(share)
        self._step(to_s - self.now_s)
        self.now_s = to_s
        return self._value()

    def _value(self) -> Floats:
        values = {Kernel.FLAT: self._sum, Kernel.LINEAR: self._linear, Kernel.EXPONENTIAL: self._exponential}
        return np.maximum(values[self._kernel], 0.0)

    def _forget(self, share: int) -> None:
        """Nothing of it is left in the window: drop what rounding left, it must not order shares."""
        for values in (self._sum, self._linear, self._exponential, self._leaving):
            values[share] = 0.0

    def _step(self, seconds: float) -> None:
        if seconds <= 0:
            return
        gain = self._running - self._leaving
        if self._kernel is Kernel.LINEAR:  # L' = v - sum / W
            self._linear += self._running * seconds - (self._sum + gain * (seconds / 2)) * (seconds / self._window)
        elif self._kernel is Kernel.EXPONENTIAL:  # E' = v - rate E - k(W) v(t - W), with k(W) = 1/4
            kept = math.exp(-self._rate * seconds)
            source = (self._running - 0.25 * self._leaving) / self._rate
            self._exponential = self._exponential * kept + source * (1.0 - kept)
        self._sum += gain * seconds
