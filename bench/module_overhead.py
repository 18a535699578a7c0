"""What the program over modules costs where nothing is sharded: `python -m bench.module_overhead`."""

import argparse
from pathlib import Path

import torch

from bench.results import Result, figure, finish
from bench.rows import RandomRows, input_spec
from bench.stepper import make_program, open_stepper, train_config
from pipeline.backends import open_host
from pipeline.core.batch_order import Bucket
from pipeline.model.config import ModelConfig
from pipeline.model.weights import initial_model
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.train.config import batch_share
from pipeline.train.step import TrainProgram, module_strategy

NAME = "module_overhead"
TITLE = "Time of a step through modules (FSDP2, shard_degree 1) over that of one through flat vectors, one CPU rank"
METHOD = """
Preset small in fp32, 32 pairs of up to 64 + 64 tokens, eager on one thread; both programs in one process take blocks of
steps in turn, through the real loader. A plan that shards nothing is given flat vectors: the module program stands here
only to show what its hooks, copies and smaller tensors add. Ratio of the times of neighbouring blocks.
"""
LOG_EVERY = 10


def run(*, quick: bool) -> Result:
    """Alternate blocks."""
    blocks, steps = (2, 2) if quick else (6, 2)
    model, vocab_size, bucket = ModelConfig(preset="small"), 30522, Bucket(64, 64)
    if quick:
        model, vocab_size, bucket = ModelConfig(preset="tiny"), 1000, Bucket(16, 16)
    torch.set_num_threads(1)
    spec, config, backend = input_spec(vocab_size), train_config(32), open_host()
    source = RandomRows(spec, bucket, rows=32 * 64)
    flat = make_program(model, spec, config, backend, (bucket,), LOG_EVERY, TrainProgram)
    modules = TrainProgram(
        module_strategy(
            initial_model(model, spec, config.seed, Path()), backend, config, Gang(World(), timeout_s=60.0)
        ),
        backend,
        config,
        batch_share(config, 1),
        figure_rows=LOG_EVERY,
        buckets=(bucket,),
    )
    times: tuple[list[float], list[float]] = [], []
    with (
        open_stepper(flat, backend, source, config, LOG_EVERY) as ours,
        open_stepper(modules, backend, source, config, LOG_EVERY) as theirs,
    ):
        for stepper in (ours, theirs):
            stepper.warm_up()
        for _ in range(blocks):
            for stepper, found in zip((ours, theirs), times, strict=True):
                found.append(stepper.seconds(steps) / steps)
    ratios = [module / plain for plain, module in zip(*times, strict=True)]
    figures = [
        figure("ratio", ratios, "x", "time of a step through modules / through flat vectors"),
        figure("flat", [1e3 * s for s in times[0]], "ms", "one step, flat vectors"),
        figure("modules", [1e3 * s for s in times[1]], "ms", "one step, modules"),
    ]
    return finish(NAME, TITLE, METHOD, figures, quick=quick, settings={"preset": model.preset, "pairs": 32})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    run(quick=parser.parse_args().quick)
