"""Prints what a trial run meets, by a setting and its value. Traced with the operators of a Neuron device."""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"  # before torch_xla is imported

from pipeline.backends import TRACED, open_backend
from pipeline.compile.hlo import lint, read_instructions
from pipeline.compile.manifest import Recorder
from pipeline.core.stop import StopSignal
from pipeline.model.config import MPNET_PAD
from pipeline.parallel.process_group import ProcessGroup
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


def met(change: str) -> dict[str, Any]:
    """Return graphs (key to phase), findings of the lint, and operations by phase."""
    name, _, value = change.partition("=")
    settings = resolve([], {}, [*FLAGS, (name, value)]).settings
    backend, shapes, world = open_backend(TRACED), expected_shapes(settings), World()
    shapes = replace(shapes, spec=shapes.spec.model_copy(update={"pad_id": MPNET_PAD}))
    recorder = Recorder(backend, shapes.plan(settings, world, backend.device_name()))
    process_group = ProcessGroup(world, timeout_s=60.0)
    shapes.trial(settings, backend, process_group, recorder, StopSignal(), Console(quiet=True)).run()
    phases = {key: graph.phase for key, graph in recorder.graphs.items()}
    operations = {phases[key]: Counter(one.opcode for one in read_instructions(recorder.texts[key])) for key in phases}
    findings = [str(finding) for finding in lint(*recorder.texts.values())]
    return {"graphs": phases, "findings": findings, "operations": operations}


def main() -> None:
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    print(json.dumps({change: met(change) for change in sys.argv[1:]}), file=answer, flush=True)


if __name__ == "__main__":
    main()
