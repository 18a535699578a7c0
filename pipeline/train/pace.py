"""Where the time of an interval went, and how fast it was."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """Figures of the steps since the last reading."""

    steps: int
    seconds: float
    data_wait_s: float
    samples_per_s: float
    tokens_per_s: float

    @property
    def data_wait_share(self) -> float:
        return self.data_wait_s / self.seconds if self.seconds > 0 else 0.0


class Pace:
    """Counts steps, tokens and waiting; `read` closes an interval. Evaluation and saving are paused out of it."""

    def __init__(self, samples_per_step: int, world_size: int) -> None:
        self._samples = samples_per_step
        self._world_size = world_size
        self.seconds_per_step = 0.0
        self._reset()

    def _reset(self) -> None:
        self._started = time.monotonic()
        self._steps, self._tokens, self._wait_s = 0, 0, 0.0

    def waited(self, seconds: float) -> None:
        self._wait_s += seconds

    def step_done(self, tokens: int) -> None:
        """One optimizer step of this rank is traced or done; `tokens` without padding."""
        self._steps += 1
        self._tokens += tokens

    def read(self) -> Interval:
        """Call right after the device was waited for, so that the interval is real time."""
        seconds = max(1e-9, time.monotonic() - self._started)
        interval = Interval(
            self._steps,
            seconds,
            self._wait_s,
            self._steps * self._samples / seconds,
            self._tokens * self._world_size / seconds,
        )
        if self._steps:
            newest = seconds / self._steps
            self.seconds_per_step = newest if not self.seconds_per_step else 0.7 * self.seconds_per_step + 0.3 * newest
        self._reset()
        return interval

    def resume(self) -> None:
        """Start the next interval now."""
        self._reset()
