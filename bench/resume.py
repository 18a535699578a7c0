"""From process start to the first new step of a run that continues from a checkpoint, split by what takes the time."""

import argparse
import tempfile
from pathlib import Path

from bench.results import Figure, Result, figure, finish
from bench.watched_run import run_stage, train_until

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


def measure(backend: str, repeats: int) -> list[Figure]:
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


def run(*, quick: bool) -> Result:
    """Both backends in turn."""
    repeats = 1 if quick else 5
    figures = [f for backend in ("xla", "cpu") for f in measure(backend, repeats)]
    return finish(NAME, TITLE, METHOD, figures, quick=quick, settings={"config": "quickstart"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="one repeat: proves that the script works")
    run(quick=parser.parse_args().quick)
