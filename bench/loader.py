"""Tokens a second the loader can give, against what training takes."""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench.catalogue import prepared_catalogue
from bench.results import Result, Target, figure, finish
from bench.stepper import ENDLESS, grouped, make_program, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.core.batch_order import BatchPlan, RankShare
from pipeline.data.shards import TokenRows
from pipeline.model.config import ModelConfig
from pipeline.train.config import TrainConfig, groups_of_batch
from pipeline.train.step import TrainProgram
from pipeline.train.stream import BatchStream

NAME = "loader"
TITLE = "Loader tokens/s with training switched off, against what training consumes"
METHOD = """
The built-in catalogue prepared with default settings; batches of 64 made from the memory-mapped shards by
training_batches and BatchStream in one thread, nothing else running; then real training steps on XLA:CPU over the same
rows, preset tiny, through MpDeviceLoader. Blocks of both alternate in one process. Tokens without padding. The ratio
is of the two medians.
"""
TARGET = Target(figure="ratio", comparison=">=", value=20.0)


def loader_rate(rows: TokenRows, config: TrainConfig, start: int, batches: int) -> float:
    """Tokens/s of making `batches` batches from position `start`."""
    groups = grouped(rows, config)
    plan = BatchPlan(groups.sizes, groups_of_batch(config), config.seed)
    stream = BatchStream(groups, plan, RankShare(), config, start, ENDLESS)
    tokens, source = 0, iter(stream)
    started = time.monotonic()
    for position in range(start, start + batches):
        next(source)
        tokens += stream.received(position)[0]
    return tokens / (time.monotonic() - started)


def run(*, quick: bool) -> Result:
    """Alternate blocks of loading and of training."""
    blocks, steps, batches, queries = (2, 4, 100, 200) if quick else (7, 20, 2000, 1500)
    config, backend = train_config(64), open_backend("xla")
    loaded: list[float] = []
    trained: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        data = prepared_catalogue(Path(folder), queries)
        rows = data.rows("train")
        program = make_program(ModelConfig(preset="tiny"), data.spec, config, backend, rows.buckets, 10, TrainProgram)
        loader_rate(rows, config, 0, 10)  # opens the memory maps
        with open_stepper(program, backend, rows, config, 10) as stepper:
            stepper.warm_up()
            compiles = backend.compile_count()
            for block in range(blocks):
                loaded.append(loader_rate(rows, config, block * batches, batches))
                before = stepper.tokens
                seconds = stepper.seconds(steps)
                trained.append((stepper.tokens - before) / seconds)
            compiles = backend.compile_count() - compiles
    ratio = figure("ratio", [a / b for a, b in zip(loaded, trained, strict=True)], "x", "loader / training")
    figures = [
        ratio.model_copy(update={"value": float(f"{statistics.median(loaded) / statistics.median(trained):.4g}")}),
        figure("loader", loaded, "tokens/s", "batches made, training switched off"),
        figure("training", trained, "tokens/s", "consumed by training, preset tiny, batch 64"),
        figure("compiles", compiles, "graphs", "compiled during the measured blocks"),
    ]
    settings: dict[str, str | int | float] = {"preset": "tiny", "batch_size": 64, "rows": sum(rows.sizes)}
    return finish(
        NAME, TITLE, METHOD, figures, quick=quick, target=TARGET, also=("loader", "training"), settings=settings
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few batches: proves that the script works")
    run(quick=parser.parse_args().quick)
