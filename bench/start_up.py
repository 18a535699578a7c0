"""From process start to the first finished step of a new run, with and without graphs compiled ahead, split."""

import argparse
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.results import Figure, Result, figure, finish
from bench.watched_run import Watched, run_stage, train_flags, train_until

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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="one repeat: proves that the script works")
    run(quick=parser.parse_args().quick)
