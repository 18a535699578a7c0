"""How many graphs a cycle needs and what compiling them takes, by preset and step boundary."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from bench.results import ROOT, Figure, Result, figure, finish
from pipeline.backends import TRACED, open_backend
from pipeline.compile.manifest import Recorder
from pipeline.core.stop import StopSignal
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.settings import Settings, resolve
from pipeline.stages.inputs import expected_shapes
from pipeline.telemetry.console import Console

NAME = "graphs"
TITLE = "Graphs of a cycle and seconds of compiling them on XLA:CPU, by preset and step boundary (fused, split)"
METHOD = """
Each case is a process of its own that does what `trnpipe compile` and `trnpipe doctor --hlo` do: a trial run, through
training, evaluation, a checkpoint and embedding, with a Recorder. Traced: every preset with the settings of its file in
configs/ (tiny: quickstart), three buckets, the operators of a Neuron device, nothing compiled; three micro-steps a
step instead of 8 to 64 (tiny: one), which gives the same number of graphs. Operations are those of the graph with the
most, called computations included. Compiled: tiny as it is in quickstart; small in fp32 with one bucket of three,
batches of 16 and one micro-step a step, since XLA:CPU takes too long for all of its graphs. compile_s is torch_xla's
own CompileTime, one graph after another. What neuronx-cc would take is not measured here.
"""


class Graphs(BaseModel):
    """What a trial run met."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    graphs: int
    """Different ones."""
    compiles: int
    """0 when they were only traced."""
    compile_s: float
    """Seconds in the compiler."""
    trial_s: float
    """Seconds of the whole trial run, compiling among them."""
    largest: str
    """What the graph with the most operations does."""
    operations: int
    """Of that graph."""


def meet_graphs(settings: Settings, backend_name: str) -> Graphs:
    """Run the trial of `settings` with data of the shapes that they will give it."""
    backend, shapes, world = open_backend(backend_name), expected_shapes(settings), World()
    recorder = Recorder(backend, shapes.plan(settings, world, backend.device_name()))
    started = time.monotonic()
    process_group = ProcessGroup(world, timeout_s=settings.train.collective_timeout_s)
    shapes.trial(settings, backend, process_group, recorder, StopSignal(), Console(quiet=True)).run()
    largest = max(recorder.graphs.values(), key=lambda graph: graph.num_instructions)
    return Graphs(
        graphs=len(recorder.graphs),
        compiles=backend.compile_count(),
        compile_s=backend.compile_seconds(),
        trial_s=time.monotonic() - started,
        largest=largest.phase,
        operations=largest.num_instructions,
    )


Boundary = Literal["fused", "split"]
BOUNDARIES: tuple[Boundary, ...] = ("fused", "split")


@dataclass(frozen=True)
class Case:
    """A preset, with what of its settings is made smaller."""

    preset: str
    config: str
    batch: tuple[int, int]
    """Global, micro."""
    traced: bool
    buckets: str = ""
    precision: str = ""
    note: str = ""

    def measure(self, boundary: Boundary) -> Graphs:
        """In a new process. Raises CalledProcessError when it fails."""
        command = [sys.executable, "-m", f"bench.{NAME}", "--config", f"configs/{self.config}.toml"]
        command += ["--boundary", boundary, "--batch", *map(str, self.batch)]
        command += ["--buckets", self.buckets] if self.buckets else []
        command += ["--precision", self.precision] if self.precision else []
        command += ["--traced"] if self.traced else []
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        return Graphs.model_validate_json(done.stdout)


SHORT, LONG = "16x16,16x32,64x64", "16x32,32x64,64x128"
TRACED_CASES = (
    Case("tiny", "quickstart", (64, 64), traced=True, buckets=SHORT),
    Case("small", "small", (192, 64), traced=True, buckets=LONG),
    Case("base", "base", (96, 32), traced=True, buckets=LONG),
    Case("large", "large", (48, 16), traced=True, buckets=LONG),
)
COMPILED = (
    Case("tiny", "quickstart", (64, 64), traced=False, buckets=SHORT, note="quickstart: 3 buckets, batch 64"),
    Case(
        "small",
        "small",
        (16, 16),
        traced=False,
        buckets="16x32",
        precision="fp32",  # bf16, as in small.toml: 135 s of CPU time for these four graphs instead of 47
        note="fp32, 1 bucket 16x32, batch 16, no accumulation",
    ),
)
QUICK = Case("tiny", "quickstart", (16, 16), traced=True, buckets="8x8")
QUICK_COMPILED = replace(QUICK, traced=False, note="1 bucket 8x8")


def traced_figures(case: Case) -> list[Figure]:
    """Graphs and operations."""
    figures = []
    with ThreadPoolExecutor(len(BOUNDARIES)) as pool:  # both at once: no time is a figure here
        cases = list(pool.map(case.measure, BOUNDARIES))
    for boundary, met in zip(BOUNDARIES, cases, strict=True):
        name, text = f"{case.preset}_{boundary}", f"{case.preset} {boundary}"
        figures += [
            figure(f"{name}_graphs", met.graphs, "graphs", text),
            figure(f"{name}_operations", met.operations, "operations", f"in the largest of {text} ({met.largest})"),
        ]
    return figures


def compiled_figures(case: Case, repeats: int) -> list[Figure]:
    """Seconds, both boundaries in turn."""
    met: dict[Boundary, list[Graphs]] = {boundary: [] for boundary in BOUNDARIES}
    for _ in range(repeats):
        for boundary in BOUNDARIES:
            met[boundary].append(case.measure(boundary))
    return [one for boundary in BOUNDARIES for one in _of_compiles(case, boundary, met[boundary])]


def _of_compiles(case: Case, boundary: Boundary, met: Sequence[Graphs]) -> list[Figure]:
    name, text = f"{case.preset}_{boundary}", f"{case.preset} {boundary} ({case.note})"
    shown = f"compiling {met[0].graphs} graphs, {text}"
    return [
        figure(f"{name}_compile_s", [one.compile_s for one in met], "s", shown),
        figure(f"{name}_compiles", [one.compiles for one in met], "graphs", f"compiled for them, {text}"),
        figure(f"{name}_trial_s", [one.trial_s for one in met], "s", f"the trial run with its compiles, {text}"),
    ]


def run(*, quick: bool, repeats: int = 1) -> Result:
    """Every case, one after another."""
    figures: list[Figure] = []
    for case in (QUICK,) if quick else TRACED_CASES:
        figures += traced_figures(case)
    for case in (QUICK_COMPILED,) if quick else COMPILED:
        figures += compiled_figures(case, repeats)
    return finish(NAME, TITLE, METHOD, figures, quick=quick)


def meet(case: argparse.Namespace) -> None:
    """Print what one case meets as JSON; whatever libraries print goes to the standard error."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    flags = [
        ("--train.step-boundary", case.boundary),
        ("--train.global-batch-size", str(case.batch[0])),
        ("--train.micro-batch-size", str(case.batch[1])),
        *([("--data.buckets", case.buckets)] if case.buckets else []),
        *([("--train.precision", case.precision)] if case.precision else []),
    ]
    os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported
    settings = resolve([case.config], {}, flags).settings
    print(meet_graphs(settings, TRACED if case.traced else "xla").model_dump_json(), file=answer, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="one small case: proves that the script works")
    parser.add_argument("--repeats", type=int, default=1, help="of the compiled cases")
    parser.add_argument("--config", type=Path, help="settings of one case, of which the graphs are printed instead")
    parser.add_argument("--boundary", choices=BOUNDARIES, help="of that case")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("GLOBAL", "MICRO"), help="of that case")
    parser.add_argument("--buckets", help="of that case, other than those of the settings")
    parser.add_argument("--precision", help="of that case, other than that of the settings")
    parser.add_argument("--traced", action="store_true", help="compile and run nothing; operators of a Neuron device")
    arguments = parser.parse_args()
    if arguments.config:
        meet(arguments)
    else:
        run(quick=arguments.quick, repeats=arguments.repeats)
