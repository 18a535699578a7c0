"""Live figures from counts and a clock."""

from types import SimpleNamespace
from typing import Any

from pipeline.embed.engine import EmbedFigures
from pipeline.embed.flow import EmbedWatch
from pipeline.embed.parts import PartRecord
from pipeline.embed.vectors import PartCounts


def test_figures_of_a_worker_that_continues() -> None:
    now, device = [100.0], EmbedFigures()
    nothing = SimpleNamespace(info=lambda line: None, emit=lambda *args, **fields: None)
    ctx: Any = SimpleNamespace(events=nothing, console=nothing)
    plan: Any = SimpleNamespace(shards=[SimpleNamespace(rows=150)], catalogue=SimpleNamespace(rows=1000))
    watch = EmbedWatch(ctx, plan, device, total=1000, done=200, max_bad_fraction=0.1, clock=lambda: now[0])
    assert watch.line() == "embed 200/1.00k rows | 0 texts/s | 0 tokens/s | padding 0.0% | idle 0.0%"
    now[0] = 110.0
    device.texts, device.tokens, device.padded_tokens, device.seconds, device.idle_s = 300, 6000, 250, 8.0, 2.0
    counts = PartCounts(read=150, bad=10, embedded=50, carried=90)
    part: dict[str, Any] = {"index": 0, "rows": 140, "id_min": "", "id_max": "", "quarantined": (), "seconds": 1.0}
    watch.on_part(PartRecord(**part, counts=counts, reasons={"no id": 10}))
    assert watch.parts == 1
    assert watch.line() == (  # 400 rows left, 40 a second
        "embed 600/1.00k rows | 30 texts/s | 600 tokens/s | padding 4.0% | idle 25% | eta 10s"
    )
    figures = watch.finish()
    assert (figures["texts_per_s"], figures["tokens_per_s"]) == (30.0, 600.0)
