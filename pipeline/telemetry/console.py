"""Print log lines and progress to the console, and write scalars for TensorBoard."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import rich.console
from rich.progress import BarColumn, Progress, TextColumn

from pipeline.core.format import format_bytes, format_count, format_duration, format_percent
from pipeline.core.optional import missing_package
from pipeline.core.progress import Advance

SECONDS_BETWEEN_LINES = 5.0
"""Progress is first displayed after this time. It is a bar on a terminal and otherwise a log line at this interval."""


@dataclass(frozen=True)
class StepFigures:
    """The values in one log line of training, averaged over the steps since the previous line.

    Values are None if they are unknown.
    """

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
    """Format a log line such as `step   120/2000 | loss 0.6931 | grad 1.23 | lr 2.0e-04 | 812 samples/s | ...`."""
    width = max(5, len(str(figures.max_steps)))
    grad = "-" if figures.grad_norm is None else f"{figures.grad_norm:.2f}"
    eta = () if figures.eta_s is None else (f"eta {format_duration(figures.eta_s)}",)
    return " | ".join(
        (
            f"step {figures.step:>{width}}/{figures.max_steps}",
            f"loss {figures.loss:.4f}",
            f"grad {grad}",
            f"lr {figures.learning_rate:.1e}",
            f"{format_count(figures.samples_per_s)} samples/s",
            f"{format_count(figures.tokens_per_s)} tokens/s",
            f"data wait {format_percent(figures.data_wait_share)}",
            *eta,
        )
    )


@dataclass
class _ProgressState:
    """The progress of an operation. The rate is averaged over the time since its start."""

    name: str
    total: int | None
    unit: str
    started: float
    done: int = 0

    def figures(self, now: float) -> str:
        """Format the progress as `1.20k/12.0k rows | 41.2 rows/s | eta 4m22s`.

        If the total is unknown, this contains the elapsed time instead of the ETA.
        """
        seconds = max(1e-9, now - self.started)
        rate = self.done / seconds
        of_total = "" if self.total is None else f"/{self._amount(self.total)}"
        end = f"for {format_duration(seconds)}"
        if self.total is not None:
            remaining = max(0, self.total - self.done)
            end = f"eta {format_duration(remaining / rate if rate else None)}"
        done = f"{self._amount(self.done)}{of_total}" + (f" {self.unit}" if self.unit != "bytes" else "")
        return f"{done} | {self._amount(rate)}{'' if self.unit == 'bytes' else f' {self.unit}'}/s | {end}"

    def summary(self, now: float) -> str:
        """Format the result of a finished operation, such as `12.0k rows in 5m02s`."""
        unit = "" if self.unit == "bytes" else f" {self.unit}"
        return f"{self._amount(self.done)}{unit} in {format_duration(now - self.started)}"

    def _amount(self, value: float) -> str:
        return format_bytes(value) if self.unit == "bytes" else format_count(value if value < 10 else round(value))


class Console:
    """The console of a command, which displays log lines, warnings and progress.

    Args:
        quiet: whether to print nothing, for all ranks except rank 0.
        stream: where to print (default: stdout).
        clock: returns the time in seconds.
    """

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream or sys.stdout
        self._quiet, self._clock = quiet, clock
        self._rich = rich.console.Console(file=self._stream) if self._stream.isatty() else None
        self._bars: Progress | None = None
        self._live_line = False

    def info(self, text: str) -> None:
        self._line(text)

    def warn(self, text: str) -> None:
        self._line(f"warning: {text}", style="yellow")

    def step_line(self, figures: StepFigures) -> None:
        """Print the values of a training step.

        On a terminal, this overwrites the line of the previous step, unless something else was printed in between.
        """
        if self._rich is None or self._quiet or self._bars is not None:
            self._line(step_text(figures))
            return
        self._stream.write("\r\x1b[2K" + step_text(figures)[: self._rich.width - 1])
        self._stream.flush()
        self._live_line = True

    def end_line(self) -> None:
        """Finish the current step line, so that it isn't overwritten."""
        if self._live_line:
            self._live_line = False
            self._stream.write("\n")
            self._stream.flush()

    @contextmanager
    def progress(self, name: str, total: int | None, unit: str) -> Iterator[Advance]:
        """Display the progress of an operation if it takes more than a few seconds, and print its duration at the end.

        It is safe to call the returned function from any thread.
        """
        state = _ProgressState(name, total, unit, self._clock())
        last_shown, lock = state.started, threading.Lock()
        task = None

        def advance(count: int) -> None:
            nonlocal last_shown, task
            with lock:
                state.done += count
                now = self._clock()
                if self._quiet or (now - last_shown < SECONDS_BETWEEN_LINES and task is None):
                    return
                if self._rich is None:
                    self._line(f"{name}: {state.figures(now)}")
                    last_shown = now
                    return
                if self._bars is None:  # operations may be nested, so all bars share one display
                    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
                    self._bars = Progress(*columns, console=self._rich, transient=True)
                    self.end_line()
                    self._bars.start()
                if task is None:
                    task = self._bars.add_task(name, total=total, completed=state.done, figures=state.figures(now))
                self._bars.update(task, completed=state.done, figures=state.figures(now))

        try:
            yield advance
        finally:
            if task is not None and self._bars is not None:
                self._bars.remove_task(task)
                if not self._bars.tasks:
                    self._bars.stop()
                    self._bars = None
        if task is not None or last_shown != state.started:
            self._line(f"{name}: {state.summary(self._clock())}")

    def _line(self, text: str, style: str | None = None) -> None:
        if self._quiet:
            return
        self.end_line()
        if self._rich is None:
            print(text, file=self._stream, flush=True)
        else:
            self._rich.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


class TensorBoardSink:
    """A logger that writes scalars for TensorBoard. Raises ConfigError if TensorBoard isn't installed."""

    def __init__(self, log_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise missing_package("tensorboard", "log.tensorboard", error, otherwise="turn the setting off") from error
        self._writer = SummaryWriter(str(log_dir))  # type: ignore[no-untyped-call]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]
