"""From process start to the first new step of a run that continues from a checkpoint, split by what takes the time."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.results import ROOT, Figure, Result, figure, finish

NAME = "resume"
TITLE = "Process start to the first new step of a continued run, quickstart"
METHOD = """
`trnpipe train` with configs/quickstart.toml is stopped with SIGTERM after its first steps (it saves and exits 143) and
started again, as often as there are repeats, each in a new process. Times are those of the run's own events with a line
for every step. import: process start until every module is loaded and the device is open (a driver does these first,
then calls the command line's main). restore: reading settings, opening data, building the model, verifying and loading
the checkpoint. first_step: from then to the figures of the first new step, compiles included. second_step shows what a
step costs without them.
"""
TIMEOUT_S = 600.0
_DRIVER = """
import sys, time
import pipeline.stages.train
from pipeline.backends import open_backend
from pipeline.cli import main
open_backend(sys.argv[1])
print("imported", time.time(), flush=True)
sys.exit(main(sys.argv[2:]))
"""


def command_line(stage: str, folder: Path, *flags: str) -> list[str]:
    """A stage of the quickstart in `folder`."""
    config = str(ROOT / "configs" / "quickstart.toml")
    return [stage, "--config", config, "--workspace", str(folder), "--cycle", "bench", *flags]


def events(folder: Path) -> list[dict[str, Any]]:
    """What the run has logged so far."""
    path = folder / "cycles" / "bench" / "events.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def train_until(folder: Path, backend: str, steps: int) -> tuple[float, float, list[dict[str, Any]]]:
    """Start training, stop it `steps` steps later. Returns (process start, all imported, its events), seconds of epoch.

    Raises RuntimeError when the run ends in another way than asked for.
    """
    before = len(events(folder))
    arguments = command_line("train", folder, "--backend", backend, "--log.every-steps", "1")
    started = time.time()
    with subprocess.Popen(
        [sys.executable, "-c", _DRIVER, backend, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PJRT_DEVICE": "CPU"},
    ) as process:
        deadline = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            new = events(folder)[before:]
            if sum(event["event"] == "train_steps" for event in new) >= steps:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    if process.returncode != 143:
        raise RuntimeError(f"the run exited with {process.returncode}, expected 143 (stopped and saved):\n{output}")
    imported = next(float(line.split()[1]) for line in output.splitlines() if line.startswith("imported "))
    return started, imported, events(folder)[before:]


def moment(seen: Sequence[dict[str, Any]], name: str, number: int = 0) -> float:
    """When the `number`-th event of a name was written, seconds of epoch."""
    times = [event["time"] for event in seen if event["event"] == name]
    return datetime.fromisoformat(times[number]).timestamp()


def measure(backend: str, repeats: int) -> list[Figure]:
    """Prepare, train a little, then continue `repeats` times."""
    parts: dict[str, list[float]] = {"total": [], "import": [], "restore": [], "first_step": [], "second_step": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [sys.executable, "-m", "pipeline", *command_line("prepare", folder)],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        train_until(folder, backend, 2)
        for _ in range(repeats):
            started, imported, seen = train_until(folder, backend, 3)
            resumed, first = moment(seen, "train_resumed"), moment(seen, "train_steps")
            parts["total"].append(first - started)
            parts["import"].append(imported - started)
            parts["restore"].append(resumed - imported)
            parts["first_step"].append(first - resumed)
            parts["second_step"].append(moment(seen, "train_steps", 1) - first)
    texts = {
        "total": "process start to first new step",
        "import": "modules and device",
        "restore": "settings, data, checkpoint",
        "first_step": "first new step, compiles included",
        "second_step": "the step after it",
    }
    return [figure(f"{backend}_{part}", values, "s", f"{texts[part]}, {backend}") for part, values in parts.items()]


def run(*, quick: bool) -> Result:
    """Both backends in turn."""
    repeats = 1 if quick else 5
    figures = [f for backend in ("xla", "cpu") for f in measure(backend, repeats)]
    return finish(NAME, TITLE, METHOD, figures, quick=quick, settings={"config": "quickstart"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="one repeat: proves that the script works")
    run(quick=parser.parse_args().quick)
