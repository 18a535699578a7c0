"""What a person sees: dense lines, and a progress bar where stdout is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pipeline.core.format import format_count, format_duration, format_share

Advance = Callable[[int], None]
PLAIN_LINES_PER_PROGRESS = 10


@dataclass(frozen=True)
class StepFigures:
    """Figures of one console line: means over the steps since the last one. None = not known."""

    step: int
    max_steps: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    samples_per_s: float
    tokens_per_s: float
    data_wait_share: float
    eta_s: float | None


def step_text(figures: StepFigures) -> str:
    """`step   120/2000 | loss 0.6931 | grad 1.23 | lr 2.0e-04 | 812 samples/s | 26.1k tokens/s | ...`"""
    width = max(5, len(str(figures.max_steps)))
    grad = "-" if figures.grad_norm is None else f"{figures.grad_norm:.2f}"
    return " | ".join(
        (
            f"step {figures.step:>{width}}/{figures.max_steps}",
            f"loss {figures.loss:.4f}",
            f"grad {grad}",
            f"lr {figures.learning_rate:.1e}",
            f"{format_count(figures.samples_per_s)} samples/s",
            f"{format_count(figures.tokens_per_s)} tokens/s",
            f"data wait {format_share(figures.data_wait_share)}",
            f"eta {format_duration(figures.eta_s)}",
        )
    )


class Console:
    """Lines for people on `stream` (default stdout); warnings carry a prefix. `quiet` for ranks other than 0."""

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._quiet = quiet
        self._rich = rich.console.Console(file=self._stream) if self._stream.isatty() else None

    def info(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}", style="yellow")

    def step_line(self, figures: StepFigures) -> None:
        self._line(step_text(figures))

    @contextmanager
    def progress(self, name: str, total: int | None) -> Iterator[Advance]:
        """Yields advance(n). A bar on a terminal; elsewhere a line at every tenth, and one at the end."""
        if self._rich is None or self._quiet:
            yield from self._plain_progress(name, total)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._rich, transient=True) as bar:
            task = bar.add_task(name, total=total)
            yield lambda count: bar.advance(task, count)

    def _plain_progress(self, name: str, total: int | None) -> Iterator[Advance]:
        done = 0
        shown = 0
        of_total = "" if total is None else f"/{format_count(total)}"

        def advance(count: int) -> None:
            nonlocal done, shown
            done += count
            tenth = PLAIN_LINES_PER_PROGRESS * done // total if total else 0
            if tenth > shown:
                shown = tenth
                self._line(f"{name}: {format_count(done)}{of_total}")

        yield advance
        if not total or shown < PLAIN_LINES_PER_PROGRESS:
            self._line(f"{name}: {format_count(done)}{of_total}, done")

    def _line(self, text: str, style: str | None = None) -> None:
        if self._quiet:
            return
        if self._rich is None:
            print(text, file=self._stream, flush=True)
        else:
            self._rich.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
