"""How long a checkpoint keeps training waiting, as a share of the time between two of them."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench.results import Result, Target, figure, finish
from bench.rows import RandomRows, input_spec
from bench.stepper import make_program, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.checkpoint.save import CheckpointWriter
from pipeline.checkpoint.store import CheckpointStore, TrainState
from pipeline.core.batch_order import Bucket
from pipeline.io.storage import open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.train.build import Saver
from pipeline.train.config import CheckpointConfig
from pipeline.train.step import TrainProgram

NAME = "checkpoint_stall"
TITLE = "Training held up by a checkpoint, as a share of the time between saves at the default cadence"
METHOD = """
Preset small (vocabulary 30,522), batch 32 x 64 tokens a side, XLA:CPU, real saves through Saver to a local workspace.
The stall of a save is the wall time of Saver.save on the training thread, with the device idle before it as in the
loop: copying weights and moments to host memory, handing over, waiting for an earlier save. Steps are timed with no
save under way. The share is stall / (stall + every_steps x step). Apart from that: how much slower steps are while the
background thread writes, as seconds lost for each save (negative: lost in the noise).
"""
TARGET = Target(figure="stall_share", comparison="<", value=0.01)


def make_saver(program: TrainProgram, model: ModelConfig, spec: InputSpec, folder: Path) -> Saver:
    """A Saver as train/build makes it, with a state that names no real run."""
    store = CheckpointStore(
        open_storage(str(folder / "workspace")), "bench", cache_dir=folder / "cache", emit=lambda *args, **fields: None
    )
    base = TrainState(
        cycle="bench",
        step=0,
        max_steps=1,
        identity="bench",
        identity_parts={},
        model=model,
        inputs=spec,
        tokenizer_fingerprint="bench",
        watermark="",
        partitions={},
        parent=None,
        best=None,
        settings_hash="bench",
        code_version="bench",
    )
    writer = CheckpointWriter(store, CheckpointConfig(), folder / "saving")
    return Saver(program, store, writer, Gang(World(), timeout_s=60.0), base, b"{}", print)


def run(*, quick: bool) -> Result:
    """Save a few times; measure stall and steps."""
    saves, steps = (2, 2) if quick else (6, 5)
    model, vocab_size, bucket = ModelConfig(preset="small"), 30522, Bucket(64, 64)
    if quick:
        model, vocab_size, bucket = ModelConfig(preset="tiny"), 1000, Bucket(16, 16)
    spec, config = input_spec(vocab_size), train_config(32)
    backend = open_backend("xla")
    program = make_program(model, spec, config, backend, (bucket,), 10, TrainProgram)
    every = CheckpointConfig().every_steps
    stalls: list[float] = []
    quiet: list[float] = []
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        saver = make_saver(program, model, spec, Path(folder))
        source = RandomRows(spec, bucket, rows=32 * 64)
        with open_stepper(program, backend, source, config, 10) as stepper:
            stepper.warm_up()
            for save in range(saves + 1):
                quiet.append(stepper.seconds(steps) / steps)
                backend.synchronise()
                started = time.monotonic()
                saver.save(stepper.position, best=None)
                stalls.append(time.monotonic() - started)
                while_saving = stepper.seconds(steps) / steps
                losses.append((while_saving - quiet[-1]) * steps)
                saver.writer.wait()
                if save == 0:  # the first copy also allocates
                    stalls, quiet, losses = stalls[:0], quiet[:0], losses[:0]
            saver.wait_saved(saver.writer.last_saved or 0)
    step_s = statistics.median(quiet)
    figures = [
        figure("stall_share", [s / (s + every * step_s) for s in stalls], "share", f"of {every} steps and a save"),
        figure("stall", stalls, "s", "training thread blocked, each save"),
        figure("step", quiet, "s", "one step, no save under way"),
        figure("slowdown", losses, "s", "lost by the steps taken while a save was written"),
        figure(
            "all_share",
            [(s + max(0.0, loss)) / (s + every * step_s) for s, loss in zip(stalls, losses, strict=True)],
            "share",
            "stall and slow-down together",
        ),
    ]
    settings: dict[str, str | int | float] = {
        "preset": model.preset,
        "every_steps": every,
        "parameters": program.strategy.size,
        "bytes_per_save": 12 * program.strategy.size,
    }
    return finish(
        NAME, TITLE, METHOD, figures, quick=quick, target=TARGET, also=("stall", "step", "all_share"), settings=settings
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few saves: proves that the script works")
    run(quick=parser.parse_args().quick)
