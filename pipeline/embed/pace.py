"""Live figures of a worker: how fast, how full, how idle, how long still, what it costs."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline.core.format import UNKNOWN, format_count, format_duration, format_share
from pipeline.core.prices import usd_per_million


class DeviceFigures(Protocol):
    """What the embedder has done so far."""

    @property
    def texts(self) -> int: ...
    @property
    def tokens(self) -> int:
        """Computed, without padding."""

    @property
    def padding_share(self) -> float:
        """Padding, as a share of all tokens computed."""

    @property
    def idle_share(self) -> float:
        """Share of the time in which the device had nothing to do."""


@dataclass(frozen=True)
class PaceFigures:
    """`eta_s` is None before anything is done, `usd_per_million` (texts, at this pace) without a price."""

    rows: int
    total: int
    texts_per_s: float
    tokens_per_s: float
    padding_share: float
    idle_share: float
    eta_s: float | None
    usd_per_million: float | None

    def line(self) -> str:
        """`embed 120k/1.00M rows | 812 texts/s | 14.1k tokens/s | padding 4.2% | idle 1.0% | eta 3m12s | $0.034/M`"""
        cost = UNKNOWN if self.usd_per_million is None else f"${self.usd_per_million:.3g}"
        return " | ".join(
            (
                f"embed {format_count(self.rows)}/{format_count(self.total)} rows",
                f"{format_count(self.texts_per_s)} texts/s",
                f"{format_count(self.tokens_per_s)} tokens/s",
                f"padding {format_share(self.padding_share)}",
                f"idle {format_share(self.idle_share)}",
                f"eta {format_duration(self.eta_s)}",
                f"{cost} a million texts",
            )
        )


class Pace:
    """Adds up what one worker does.

    Args:
        total: rows of the worker's share.
        done: of them finished by an earlier attempt.
        price_usd_per_hour: of the machine's part that this worker has; None when nobody knows.
    """

    def __init__(
        self,
        device: DeviceFigures,
        *,
        total: int,
        done: int,
        price_usd_per_hour: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._total, self._before = device, total, done
        self._price, self._clock, self._started = price_usd_per_hour, clock, clock()
        self._passed = 0

    def passed(self, rows: int) -> None:
        """Rows that needed no device: taken over, bad, or left out by the filter."""
        self._passed += rows

    def read(self) -> PaceFigures:
        """Figures since the start."""
        device, seconds = self._device, max(1e-9, self._clock() - self._started)
        rows = device.texts + self._passed
        return PaceFigures(
            rows=self._before + rows,
            total=self._total,
            texts_per_s=device.texts / seconds,
            tokens_per_s=device.tokens / seconds,
            padding_share=device.padding_share,
            idle_share=device.idle_share,
            eta_s=(self._total - self._before - rows) * seconds / rows if rows else None,
            usd_per_million=None if self._price is None else usd_per_million(self._price, device.texts, seconds),
        )
