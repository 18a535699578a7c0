"""What is told of embedding while it runs: lines, events, and an early end when too much of the catalogue is bad."""

import time
from collections import Counter

from pipeline.context import Figure, StageContext
from pipeline.core.events import EventName
from pipeline.embed.feed import Texts
from pipeline.embed.finish import too_many_bad
from pipeline.embed.pace import Pace
from pipeline.embed.parts import PartRecord, records_prefix
from pipeline.embed.plan import EmbedPlan

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
