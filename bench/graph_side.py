"""One case of bench.graphs in a process of its own, so that compile counters start at 0: every graph of one preset.

Does what the compile stage does, a trial run with a Recorder. With --traced no graph is compiled or run, and the
operators are those of a Neuron device.
"""

import argparse
import os
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline.backends import TRACED, open_backend
from pipeline.compile.manifest import Recorder
from pipeline.core.stop import StopSignal
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.settings import Settings, resolve
from pipeline.stages.inputs import expected_shapes
from pipeline.telemetry.console import Console


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
    gang = Gang(world, timeout_s=settings.train.collective_timeout_s)
    shapes.trial(settings, backend, gang, recorder, StopSignal(), Console(quiet=True)).run()
    largest = max(recorder.graphs.values(), key=lambda graph: graph.num_instructions)
    return Graphs(
        graphs=len(recorder.graphs),
        compiles=backend.compile_count(),
        compile_s=backend.compile_seconds(),
        trial_s=time.monotonic() - started,
        largest=largest.phase,
        operations=largest.num_instructions,
    )


def main() -> None:
    """Print one JSON object; whatever libraries print goes to the standard error."""
    parser = argparse.ArgumentParser(prog="python -m bench.graph_side", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="settings of the preset")
    parser.add_argument("--boundary", choices=("fused", "split"), required=True)
    parser.add_argument("--batch", type=int, nargs=2, metavar=("GLOBAL", "MICRO"), required=True)
    parser.add_argument("--buckets", help="other than those of the settings")
    parser.add_argument("--precision", help="other than that of the settings")
    parser.add_argument("--traced", action="store_true", help="compile and run nothing")
    arguments = parser.parse_args()
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    flags = [
        ("--train.step-boundary", arguments.boundary),
        ("--train.global-batch-size", str(arguments.batch[0])),
        ("--train.micro-batch-size", str(arguments.batch[1])),
    ]
    if arguments.buckets:
        flags.append(("--data.buckets", arguments.buckets))
    if arguments.precision:
        flags.append(("--train.precision", arguments.precision))
    os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported
    settings = resolve([arguments.config], {}, flags).settings
    print(meet_graphs(settings, TRACED if arguments.traced else "xla").model_dump_json(), file=answer, flush=True)


if __name__ == "__main__":
    main()
