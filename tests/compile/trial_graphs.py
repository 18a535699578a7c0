"""Prints the graphs a trial run meets, key to phase, by a setting and its value. Traced as on a Neuron device."""

import json
import os
import sys
from dataclasses import replace

os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported

from pipeline.backends import TRACED, open_backend
from pipeline.compile.watch import Recorder
from pipeline.core.stop import StopSignal
from pipeline.model.config import MPNET_PAD
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.settings import resolve
from pipeline.stages.inputs import expected_shapes
from pipeline.telemetry.console import Console

FLAGS = (
    ("--data.buckets", "8x8,8x16"),
    ("--train.global-batch-size", "16"),
    ("--train.micro-batch-size", "8"),
    ("--embed.buckets", "16"),
)


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    backend, world, found = open_backend(TRACED), World(), {}
    for change in sys.argv[1:]:
        name, _, value = change.partition("=")
        settings = resolve([], {}, [*FLAGS, (name, value)]).settings
        shapes = expected_shapes(settings)
        shapes = replace(shapes, spec=shapes.spec.model_copy(update={"pad_id": MPNET_PAD}))
        recorder = Recorder(backend, shapes.plan(settings, world, backend.device_name()))
        gang = Gang(world, timeout_s=60.0)
        shapes.trial(settings, backend, gang, recorder, StopSignal(), Console(quiet=True)).run()
        found[change] = {key: graph.phase for key, graph in recorder.graphs.items()}
    print(json.dumps(found), file=answer, flush=True)


if __name__ == "__main__":
    main()
