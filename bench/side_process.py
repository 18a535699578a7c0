"""A side of a comparison in a process of its own, which takes steps when asked, so that sides can take turns.

The side prints `ready <graphs compiled>` after warm-up; a line with a number asks for as many steps and is answered by
`<seconds> <graphs compiled>`; the end of input ends it.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

from bench.results import ROOT


@dataclass
class Side:
    """The bench's end: blocks of steps are asked for here."""

    command: list[str]
    seconds: list[float] = field(default_factory=list)
    compiles: int = 0
    peak_mib: float = 0.0
    """Most resident memory of the process, known when it has ended."""

    def __enter__(self) -> "Side":
        self._process = subprocess.Popen(
            self.command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._warm_compiles = int(self._answer()[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.peak_mib = peak_resident_mib(Path(f"/proc/{self._process.pid}/status"))
        self._process.kill()
        self._process.communicate()

    def block(self, steps: int) -> None:
        """Take a block and note its seconds."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        seconds, compiles = self._answer()
        self.seconds.append(float(seconds))
        self.compiles = int(compiles) - self._warm_compiles

    def _answer(self) -> list[str]:
        assert self._process.stdout is not None
        words = self._process.stdout.readline().split()
        if len(words) != 2:
            raise RuntimeError(f"a side ended without an answer; run it to see why: {' '.join(self.command)}")
        return words


def peak_resident_mib(status: Path) -> float:
    """VmHWM of a process that lives. ru_maxrss of a child would count what its parent held when it was started."""
    fields = status.read_text(encoding="utf-8").split() if status.exists() else []
    return int(fields[fields.index("VmHWM:") + 1]) / 1024 if "VmHWM:" in fields else 0.0


@dataclass
class Line:
    """The side's end. Whatever libraries print goes to the standard error."""

    answers: TextIO

    @staticmethod
    def open() -> "Line":
        """Keep the standard output for answers."""
        line = Line(os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)
        return line

    def serve(self, take: Callable[[int], float], compiles: Callable[[], int] = lambda: 0) -> None:
        """Answer with the seconds that `take(steps)` returns until the input ends."""
        steps = self._asked("ready", compiles())
        while steps:
            steps = self._asked(take(steps), compiles())

    def blocks(
        self,
        warm_up: int,
        wait: Callable[[], object],
        *,
        again: int = 0,
        after: Callable[[], object] = lambda: None,
        compiles: Callable[[], int] = lambda: 0,
    ) -> Iterator[int]:
        """Yield the steps until the next pause, for a loop that is not ours. `wait`: for the device.

        `again`: steps before each block that are not timed. `after`: called after each block.
        """
        yield warm_up
        wait()
        after()
        steps = self._asked("ready", compiles())
        while steps:
            if again:
                yield again
                wait()
            started = time.monotonic()
            yield steps
            wait()
            seconds = time.monotonic() - started
            after()
            steps = self._asked(seconds, compiles())

    def _asked(self, *answer: object) -> int:
        """Answer, and return the steps of the next block; 0 at the end."""
        print(*answer, file=self.answers, flush=True)
        return int(sys.stdin.readline().strip() or 0)
