"""Live figures of a worker: how fast, how full, how idle, how long still, cost; lines and events of them."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pipeline.context import Figure, StageContext
from pipeline.core.format import UNKNOWN, format_count, format_duration, format_share
from pipeline.core.machines import usd_per_million
from pipeline.embed.feed import Texts
from pipeline.embed.finish import too_many_bad
from pipeline.embed.parts import PartRecord, records_prefix
from pipeline.embed.plan import EmbedPlan
from pipeline.telemetry.events import EventName


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


# What is told of embedding while it runs: lines, events, and an early end when too much of the catalogue is bad.

SECONDS_BETWEEN_LINES = 10.0


class EmbedWatch:
    """Told by the flow what goes on. `parts` are those finished by this run."""

    def __init__(self, ctx: StageContext, plan: EmbedPlan, pace: Pace, max_bad_fraction: float) -> None:
        self._ctx, self._plan, self._pace, self._max_bad_fraction = ctx, plan, pace, max_bad_fraction
        self._reasons = Counter[str]()
        self._last_line_s = time.monotonic()
        self.parts = 0

    def embedded(self, texts: Texts) -> None:
        now = time.monotonic()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now
            self._ctx.console.info(self._pace.read().line())

    def written(self, record: PartRecord) -> None:
        """Raises DataError once more rows are bad than the whole catalogue may have."""
        self.parts += 1
        self._pace.passed(self._plan.shards[record.index].rows - record.counts.embedded)
        self._ctx.events.emit(
            EventName.PART_EMBEDDED, part=record.index, rows=record.rows, seconds=record.seconds, **dict(record.counts)
        )
        self._reasons.update(record.reasons)
        bad, rows = self._reasons.total(), self._plan.catalogue.rows
        if bad > self._max_bad_fraction * rows:
            place = self._ctx.workspace.uri(records_prefix(self._plan))
            raise too_many_bad(bad, rows, self._reasons, self._max_bad_fraction, place)

    def figures(self) -> dict[str, Figure]:
        """How this run went."""
        pace = self._pace.read()
        return {
            "texts_per_s": round(pace.texts_per_s, 1),
            "tokens_per_s": round(pace.tokens_per_s, 1),
            "padding_share": _rounded(pace.padding_share),
            "idle_share": _rounded(pace.idle_share),
            "usd_per_million_texts": _rounded(pace.usd_per_million),
        }

    def last_line(self) -> None:
        self._ctx.console.info(self._pace.read().line())


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
