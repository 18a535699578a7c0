"""Console lines, plain and on a terminal."""

import io

import pytest

from pipeline.telemetry.console import Console, StepFigures, step_text

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
    assert "loss nan" in text and "grad -" in text and "- samples/s" in text and text.endswith("eta -")


def test_plain_lines() -> None:
    out = io.StringIO()
    console = Console(stream=out)
    console.info("rows [bold]2[/bold]")
    console.warn("odd")
    console.step_line(FIGURES)
    assert out.getvalue().splitlines() == ["rows [bold]2[/bold]", "warning: odd", step_text(FIGURES)]


def test_default_stream_is_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    Console().info("hello")
    assert capsys.readouterr().out == "hello\n"


def test_plain_progress_prints_tenths() -> None:
    out = io.StringIO()
    with Console(stream=out).progress("rows", 100) as advance:
        for _ in range(100):
            advance(1)
    lines = out.getvalue().splitlines()
    assert lines == [f"rows: {count}/100" for count in range(10, 101, 10)]


def test_plain_progress_with_unknown_or_unreached_total() -> None:
    out = io.StringIO()
    with Console(stream=out).progress("rows", None) as advance:
        advance(7)
    with Console(stream=out).progress("files", 0):
        pass
    assert out.getvalue().splitlines() == ["rows: 7, done", "files: 0/0, done"]


def test_an_error_inside_a_progress_comes_out() -> None:
    for stream in (io.StringIO(), Terminal()):
        with pytest.raises(KeyError), Console(stream=stream).progress("rows", 10):
            raise KeyError("x")
        assert "done" not in stream.getvalue()


def test_on_a_terminal_text_is_taken_literally() -> None:
    out = Terminal()
    console = Console(stream=out)
    console.info("rows [bold]2[/bold]")
    with console.progress("rows", 3) as advance:
        advance(3)
        console.step_line(FIGURES)
    assert "[bold]" in out.getvalue() and step_text(FIGURES) in out.getvalue()


def test_quiet_says_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        console = Console(quiet=True, stream=stream)
        console.info("x")
        console.warn("x")
        with console.progress("x", 1) as advance:
            advance(1)
        assert stream.getvalue() == ""
