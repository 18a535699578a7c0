"""From process start to the first step of the quickstart: of a new run, cold and compiled ahead, or a continued one.

A real `trnpipe train` in a process of its own, watched through its events until it is stopped.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.results import ROOT, Figure, Result, figure, finish

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


def command_line(stage: str, folder: Path, *flags: str) -> list[str]:
    """A stage of the quickstart in `folder`."""
    config = str(ROOT / "configs" / "quickstart.toml")
    return [stage, "--config", config, "--workspace", str(folder), "--cycle", "bench", *flags]


def run_stage(stage: str, folder: Path, *flags: str) -> None:
    """Run a stage to its end. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pipeline", *command_line(stage, folder, *flags)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=environment())


def train_until(folder: Path, backend: str, steps: int) -> Watched:
    """Start training with a line for every step, stop it `steps` steps later.

    Raises RuntimeError when the run ends in another way than asked for.
    """
    before = len(_events(folder))
    arguments = command_line("train", folder, *train_flags(backend))
    started = time.time()
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, backend, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
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


def environment() -> dict[str, str]:
    return os.environ | {"PJRT_DEVICE": "CPU", "PYTHONPATH": str(ROOT)}


# A new run.

NAME = "start_up"
TITLE = (
    "Process start to the first finished step of a new run, quickstart on XLA:CPU: cold, and after `trnpipe compile`"
)
METHOD = """
`trnpipe train` with configs/quickstart.toml in a new process and a new copy of a workspace that holds prepared data and
nothing else (cold), or also what `trnpipe compile` with the same settings left there (warm); both in turn. XLA:CPU
cannot read a compiled graph back, so a warm run compiles as much as a cold one: warm shows the price of holding every
graph against the manifest and that nothing else than was compiled ahead is asked for, not a saving. Times are those of
the run's own events with a line for every step. import: process start until every module is loaded and the device is
open (a driver does these first, then calls the command line's main). assemble: from then to train_started: settings,
data, model, starting weights on the device. first_step: from then to the figures of the first step. compile_s is
torch_xla's CompileTime up to these figures, and is part of assemble and first_step.
"""
TEXTS = {
    "total": "process start to first step",
    "import": "modules and device",
    "assemble": "data, model, starting weights",
    "first_step": "first step, compiles included",
    "compile_s": "of it all, compiling",
    "compile_share": "share of it compiling",
    "compiles": "graphs compiled until then",
}
UNITS = {"compile_share": "share", "compiles": "graphs"}  # all others: seconds


@dataclass
class Starts:
    """Starts from copies of one workspace."""

    name: str
    template: Path
    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in TEXTS})

    def start(self, folder: Path) -> None:
        """Once, in a workspace of its own that is deleted afterwards."""
        shutil.copytree(self.template, folder)
        for part, value in split(train_until(folder, "xla", 1)).items():
            self.parts[part].append(value)
        shutil.rmtree(folder)

    def figures(self) -> list[Figure]:
        """By part."""
        return [
            figure(f"{self.name}_{part}", values, UNITS.get(part, "s"), f"{TEXTS[part]}, {self.name}")
            for part, values in self.parts.items()
        ]


def split(watched: Watched) -> dict[str, float]:
    """What took the time of one start."""
    assembled, first = watched.moment("train_started"), watched.moment("train_steps")
    compiled = watched.compiled("train_steps")
    total = first - watched.started
    return {
        "total": total,
        "import": watched.imported - watched.started,
        "assemble": assembled - watched.imported,
        "first_step": first - assembled,
        "compile_s": compiled.seconds,
        "compile_share": compiled.seconds / total,
        "compiles": compiled.graphs,
    }


def run(*, quick: bool) -> Result:
    """Prepare, compile a copy, then start from either in turn."""
    repeats = 1 if quick else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold, warm = Starts("cold", folder / "prepared"), Starts("warm", folder / "compiled")
        run_stage("prepare", cold.template)
        shutil.copytree(cold.template, warm.template)
        started = time.monotonic()
        run_stage("compile", warm.template, *train_flags("xla"))
        stage_s = time.monotonic() - started
        for _ in range(repeats):
            for starts in (cold, warm):
                starts.start(folder / "run")
    figures = [*cold.figures(), *warm.figures()]
    figures.append(figure("compile_stage", stage_s, "s", "`trnpipe compile`, process start to end: all graphs"))
    return finish(NAME, TITLE, METHOD, figures, quick=quick, settings={"config": "quickstart"})


# A run that continues from a checkpoint.

RESUME = "resume"
RESUME_TITLE = "Process start to the first new step of a continued run, quickstart"
RESUME_METHOD = """
`trnpipe train` with configs/quickstart.toml is stopped with SIGTERM after its first steps (it saves and exits 143) and
started again, as often as there are repeats, each in a new process. Times are those of the run's own events with a line
for every step. import: process start until every module is loaded and the device is open (a driver does these first,
then calls the command line's main). restore: reading settings, opening data, building the model, verifying and loading
the checkpoint. first_step: from then to the figures of the first new step, compiles included. second_step shows what a
step costs without them.
"""


def measure_resume(backend: str, repeats: int) -> list[Figure]:
    """Prepare, train a little, then continue `repeats` times."""
    parts: dict[str, list[float]] = {"total": [], "import": [], "restore": [], "first_step": [], "second_step": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_stage("prepare", folder)
        train_until(folder, backend, 2)
        for _ in range(repeats):
            watched = train_until(folder, backend, 3)
            resumed, first = watched.moment("train_resumed"), watched.moment("train_steps")
            parts["total"].append(first - watched.started)
            parts["import"].append(watched.imported - watched.started)
            parts["restore"].append(resumed - watched.imported)
            parts["first_step"].append(first - resumed)
            parts["second_step"].append(watched.moment("train_steps", 1) - first)
    texts = {
        "total": "process start to first new step",
        "import": "modules and device",
        "restore": "settings, data, checkpoint",
        "first_step": "first new step, compiles included",
        "second_step": "the step after it",
    }
    return [figure(f"{backend}_{part}", values, "s", f"{texts[part]}, {backend}") for part, values in parts.items()]


def run_resume(*, quick: bool) -> Result:
    """Both backends in turn."""
    repeats = 1 if quick else 5
    figures = [f for backend in ("xla", "cpu") for f in measure_resume(backend, repeats)]
    return finish(RESUME, RESUME_TITLE, RESUME_METHOD, figures, quick=quick, settings={"config": "quickstart"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat: proves that the script works")
    parser.add_argument("--continued", action="store_true", help="measure runs that continue instead")
    asked = parser.parse_args()
    (run_resume if asked.continued else run)(quick=asked.quick)
