"""Live figures from counts and a clock."""

from dataclasses import dataclass

import pytest

from pipeline.embed.pace import Pace


@dataclass
class Device:
    texts: int = 0
    tokens: int = 0
    padding_share: float = 0.0
    idle_share: float = 0.0


def test_figures_of_a_worker_that_continues() -> None:
    now, device = [100.0], Device()
    pace = Pace(device, total=1000, done=200, price_usd_per_hour=3.6, clock=lambda: now[0])
    first = pace.read()
    assert (first.rows, first.eta_s, first.usd_per_million) == (200, None, None)
    now[0] = 110.0
    device.texts, device.tokens, device.padding_share, device.idle_share = 300, 6000, 0.04, 0.25
    pace.passed(100)
    figures = pace.read()
    assert (figures.rows, figures.total) == (600, 1000)
    assert (figures.texts_per_s, figures.tokens_per_s) == (30.0, 600.0)
    assert figures.eta_s == pytest.approx(10.0), "400 rows left, 40 a second"
    assert figures.usd_per_million == pytest.approx(0.001 * 10 / 300 * 1e6)
    assert figures.line() == (
        "embed 600/1.00k rows | 30 texts/s | 600 tokens/s | padding 4.0% | idle 25% | eta 10s | $33.3 a million texts"
    )


def test_without_a_price_there_is_no_cost() -> None:
    device = Device(texts=5)
    assert Pace(device, total=10, done=0, price_usd_per_hour=None).read().line().endswith("| - a million texts")
