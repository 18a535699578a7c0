"""A real `trnpipe train` of the quickstart in a process of its own, watched through its events until it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.results import ROOT

TIMEOUT_S = 600.0
# Imports first and tells when that is done, then is the command line; beside every event it tells what was compiled.
_DRIVER = """
import sys, time
import pipeline.stages.train
from pipeline.backends import open_backend
from pipeline.cli import main
from pipeline.telemetry.events import EventLog
backend = open_backend(sys.argv[1])
print("imported", time.time(), flush=True)
emit = EventLog.emit
def noted(log, event, /, **fields):
    emit(log, event, **fields)
    print("compiled", event, backend.compile_count(), backend.compile_seconds(), flush=True)
EventLog.emit = noted
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Compiled:
    """Compile counters of the process when an event was written."""

    event: str
    graphs: int
    seconds: float


@dataclass(frozen=True)
class Watched:
    """One run: seconds of epoch, its events, and the compile counters at each."""

    started: float
    imported: float
    events: list[dict[str, Any]]
    counters: list[Compiled]

    def moment(self, name: str, number: int = 0) -> float:
        """When the `number`-th event of a name was written, seconds of epoch."""
        times = [event["time"] for event in self.events if event["event"] == name]
        return datetime.fromisoformat(times[number]).timestamp()

    def compiled(self, name: str) -> Compiled:
        """What had been compiled at the first event of a name."""
        return next(counter for counter in self.counters if counter.event == name)


def command_line(stage: str, folder: Path, *flags: str, root: Path = ROOT) -> list[str]:
    """A stage of the quickstart in `folder`; root: of the checkout whose code and configs run."""
    config = str(root / "configs" / "quickstart.toml")
    return [stage, "--config", config, "--workspace", str(folder), "--cycle", "bench", *flags]


def run_stage(stage: str, folder: Path, *flags: str, root: Path = ROOT) -> None:
    """Run a stage to its end. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pipeline", *command_line(stage, folder, *flags, root=root)]
    subprocess.run(command, cwd=root, check=True, stdout=subprocess.DEVNULL, env=environment(root))


def train_until(folder: Path, backend: str, steps: int, *, root: Path = ROOT) -> Watched:
    """Start training with a line for every step, stop it `steps` steps later.

    Raises RuntimeError when the run ends in another way than asked for.
    """
    before = len(_events(folder))
    arguments = command_line("train", folder, *train_flags(backend), root=root)
    started = time.time()
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, backend, *arguments],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(root),
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            new = _events(folder)[before:]
            if sum(event["event"] == "train_steps" for event in new) >= steps:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    if process.returncode != 143:
        raise RuntimeError(f"the run exited with {process.returncode}, expected 143 (stopped and saved):\n{output}")
    lines = [line.split() for line in output.splitlines()]
    imported = next(float(words[1]) for words in lines if words[:1] == ["imported"])
    return Watched(started, imported, _events(folder)[before:], _counters(lines))


def train_flags(backend: str) -> tuple[str, ...]:
    """What train_until sets; graphs compiled ahead of it need the same."""
    return ("--backend", backend, "--log.every-steps", "1")


def _events(folder: Path) -> list[dict[str, Any]]:
    """What the run has logged so far."""
    path = folder / "cycles" / "bench" / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _counters(lines: Sequence[list[str]]) -> list[Compiled]:
    told = (words for words in lines if words[:1] == ["compiled"] and len(words) == 4)
    return [Compiled(event, int(graphs), float(seconds)) for _, event, graphs, seconds in told]


def environment(root: Path = ROOT) -> dict[str, str]:
    """For a process that runs the code below `root`."""
    return os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(root)}
