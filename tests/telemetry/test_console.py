"""Console lines, plain and on a terminal."""

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.telemetry.console import Console, StepFigures, TensorBoardSink, step_text

FIGURES = StepFigures(
    step=120,
    max_steps=2000,
    loss=0.6931,
    grad_norm=1.234,
    learning_rate=2e-4,
    samples_per_s=812.4,
    tokens_per_s=26_100.0,
    data_wait_share=0.003,
    eta_s=192.0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_dense_line() -> None:
    assert step_text(FIGURES) == (
        "step   120/2000 | loss 0.6931 | grad 1.23 | lr 2.0e-04 | 812 samples/s | 26.1k tokens/s"
        " | data wait 0.3% | eta 3m12s"
    )


def test_unknown_figures_are_dashes() -> None:
    text = step_text(StepFigures(1, 10, float("nan"), None, 0.0, float("inf"), 0.0, 0.0, None))
    assert "loss nan" in text and "grad -" in text and "- samples/s" in text and text.endswith("data wait 0.0%")


def test_plain_lines() -> None:
    out = io.StringIO()
    console = Console(stream=out)
    console.info("rows [bold]2[/bold]")
    console.warn("odd")
    console.step_line(FIGURES)
    assert out.getvalue().splitlines() == ["rows [bold]2[/bold]", "warning: odd", step_text(FIGURES)]


class Clock:
    """Stands still unless it is moved."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_progress_has_a_rate_and_an_eta() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(stream=out, clock=clock).progress("valid", 12_000, "rows") as advance:
        for _ in range(12):
            clock.now += 2.0
            advance(1000)
    assert out.getvalue().splitlines() == [
        "valid: 3.00k/12.0k rows | 500 rows/s | eta 18s",
        "valid: 6.00k/12.0k rows | 500 rows/s | eta 12s",
        "valid: 9.00k/12.0k rows | 500 rows/s | eta 6s",
        "valid: 12.0k/12.0k rows | 500 rows/s | eta 0s",
        "valid: 12.0k rows in 24s",
    ]


def test_bytes_and_an_unknown_total() -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(stream=out, clock=clock)
    with console.progress("uploading", 100 * 2**20, "bytes") as advance:
        clock.now += 10.0
        advance(25 * 2**20)
    with console.progress("training the tokenizer", None, "texts") as advance:
        advance(2000)
        clock.now += 10.0
        advance(0)
    assert out.getvalue().splitlines() == [
        "uploading: 25.0 MiB/100.0 MiB | 2.5 MiB/s | eta 30s",
        "uploading: 25.0 MiB in 10s",
        "training the tokenizer: 2.00k texts | 200 texts/s | for 10s",
        "training the tokenizer: 2.00k texts in 10s",
    ]


def test_short_work_shows_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with Console(stream=stream, clock=Clock()).progress("rows", 100, "rows") as advance:
            advance(100)
        assert stream.getvalue() == ""


def test_bars_within_each_other() -> None:
    out, clock = Terminal(), Clock()
    console = Console(stream=out, clock=clock)
    with console.progress("outer", 2, "files") as outer:
        clock.now += 10.0
        outer(1)
        with console.progress("inner", 8, "bytes") as inner:
            clock.now += 10.0
            inner(4)
        outer(1)
    seen = out.getvalue()
    assert "1/2 files" in seen and "4 B/8 B" in seen and "2 files in 20s" in seen and "4 B in 10s" in seen


def test_threads_add_up() -> None:
    out, clock = io.StringIO(), Clock()
    with Console(stream=out, clock=clock).progress("rows", 8000, "rows") as advance:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(8000):
                pool.submit(advance, 1)
        clock.now += 10.0
        advance(0)
    assert out.getvalue().splitlines()[-1] == "rows: 8.00k rows in 10s"


def test_on_a_terminal_text_is_taken_literally() -> None:
    out = Terminal()
    clock = Clock()
    console = Console(stream=out, clock=clock)
    console.info("rows [bold]2[/bold]")
    with console.progress("rows", 3, "rows") as advance:
        clock.now += 10.0
        advance(3)
        console.step_line(FIGURES)
    assert "[bold]" in out.getvalue() and step_text(FIGURES) in out.getvalue()


def test_quiet_says_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        console = Console(quiet=True, stream=stream, clock=clock)
        console.info("x")
        console.warn("x")
        with console.progress("x", 1, "rows") as advance:
            clock.now += 10.0
            advance(1)
        assert stream.getvalue() == ""


def test_scalars_can_be_read_back(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.scalars(3, {"loss": 0.5, "lr": 0.1})
    sink.close()
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(3, 0.5)]
    assert set(events.Tags()["scalars"]) == {"loss", "lr"}


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match="needs tensorboard") as caught:
        TensorBoardSink(tmp_path)
    assert caught.value.next_command == "pip install 'tensorboard>=2.18', or turn the setting off"


def test_one_live_line_on_a_terminal() -> None:
    """Figures replace those before them; whatever else is said stands below, and nothing is lost of it."""
    out = Terminal()
    console = Console(stream=out)
    console.step_line(FIGURES)
    console.step_line(replace(FIGURES, step=140))
    console.info("saved")
    console.end_line()
    console.step_line(replace(FIGURES, step=160))
    console.end_line()
    rows = [row.rpartition("\r\x1b[2K")[2] for row in out.getvalue().rstrip("\n").split("\n")]
    assert [row.split(" | ")[0] for row in rows] == ["step   140/2000", "saved", "step   160/2000"]
    assert out.getvalue().count("\r\x1b[2K") == 3 and out.getvalue().endswith("\n")
