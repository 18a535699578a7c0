"""One side of trainer_ratio in a process of its own, taking steps when told to over its standard input.
See bench/side_process.py for what is said.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.catalogue import prepared_catalogue
from bench.hf_pair import BlockCallback, HfPairModel, RowDataset, run_trainer
from bench.rows import RandomRows, input_spec
from bench.side_process import Line
from bench.stepper import ENDLESS, BucketedRows, make_program, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.core.batch_order import Bucket
from pipeline.data.shards import Arrays, TokenRows
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import RelevanceInputs, build_model
from pipeline.train.config import TrainConfig
from pipeline.train.loss import Targets, relevance_loss
from pipeline.train.step import TrainProgram

WARM_UP_STEPS = 3
LOG_EVERY = 20


@dataclass(frozen=True)
class Shape:
    """An encoder and a batch."""

    model: ModelConfig
    vocab_size: int
    batch_size: int
    tokens: int


ARCHITECTURES = {
    "4x256": Shape(ModelConfig(hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024), 8192, 64, 40),
    "small": Shape(ModelConfig(preset="small"), 30522, 32, 64),
    "tiny": Shape(ModelConfig(preset="tiny"), 1000, 32, 16),  # for --quick
}


@dataclass(frozen=True)
class Task:
    """What both sides train: the same rows, ours in `buckets`, Trainer's all padded to one shape."""

    shape: Shape
    spec: InputSpec
    source: BucketedRows
    buckets: tuple[Bucket, ...]
    padded: Arrays


def random_task(shape: Shape) -> Task:
    """Every batch of one shape."""
    spec, bucket = input_spec(shape.vocab_size), Bucket(shape.tokens, shape.tokens)
    source = RandomRows(spec, bucket, rows=shape.batch_size * 64)
    return Task(shape, spec, source, (bucket,), source.arrays)


def catalogue_task(shape: Shape, folder: Path, num_queries: int) -> Task:
    """Rows of the built-in catalogue."""
    data = prepared_catalogue(folder, num_queries, vocab_size=shape.vocab_size)
    rows = data.rows("train")
    return Task(shape, data.spec, rows, rows.buckets, all_rows(rows))


def all_rows(rows: TokenRows) -> Arrays:
    """Every row of a split in the largest bucket's shape."""
    largest = len(rows.buckets) - 1
    pools = np.repeat(np.arange(len(rows.sizes)), rows.sizes).astype(np.int64)
    numbers = np.concatenate([np.arange(size) for size in rows.sizes]).astype(np.int64)
    return rows.read(pools, numbers, largest)


def serve_ours(task: Task, line: Line) -> None:
    """Our loop: TrainProgram through MpDeviceLoader, default settings."""
    config, backend = train_config(task.shape.batch_size), open_backend("xla")
    program = make_program(task.shape.model, task.spec, config, backend, task.buckets, LOG_EVERY, TrainProgram)
    with open_stepper(program, backend, task.source, config, LOG_EVERY) as stepper:
        stepper.warm_up()
        steps = line.ready(backend.compile_count())
        while steps:
            steps = line.took(stepper.seconds(steps), backend.compile_count())


def serve_trainer(task: Task, line: Line) -> None:
    """Hugging Face Trainer on torch_xla as it comes, without our backend's choices for the process."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    import torch_xla  # only here: XLA is set up by Trainer's own libraries
    from torch_xla.debug import metrics

    config = train_config(task.shape.batch_size)
    model = build_model(task.shape.model, task.spec, config.seed)
    peer = HfPairModel(model, task.shape.model, task.spec, config.loss)
    check_same_loss(model, peer, task.padded, config)

    def compiles() -> int:
        data = metrics.metric_data("CompileTime")  # type: ignore[no-untyped-call]
        return 0 if data is None else int(data[0])

    def blocks() -> Iterator[int]:
        """Steps until the next pause."""
        yield WARM_UP_STEPS
        torch_xla.sync(wait=True)
        steps = line.ready(compiles())
        while steps:
            started = time.monotonic()
            yield steps
            torch_xla.sync(wait=True)
            steps = line.took(time.monotonic() - started, compiles())

    run_trainer(peer, task.padded, config, ENDLESS, BlockCallback(blocks()))


def check_same_loss(ours: torch.nn.Module, theirs: HfPairModel, rows: Arrays, config: TrainConfig) -> None:
    """Both models give the same loss for the same batch on CPU, else the comparison would mean nothing."""
    batch = RowDataset(rows).__getitems__(list(range(config.global_batch_size)))[0]
    with torch.no_grad():
        inputs = RelevanceInputs(batch["query"], batch["product"], batch["numeric"], batch["categorical"])
        targets = Targets(*(batch[name] for name in Targets._fields))
        mine = float(relevance_loss(ours.eval()(inputs), targets, config.loss))
        peers = float(theirs.eval()(**batch)["loss"])
    if abs(mine - peers) > 1e-4 * abs(mine):
        raise ValueError(f"our loss is {mine}, the peer's {peers}: not the same model")


def main() -> None:
    """Build the task, then serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.trainer_side", description=__doc__)
    parser.add_argument("side", choices=("ours", "trainer"))
    parser.add_argument("--architecture", choices=ARCHITECTURES, required=True)
    parser.add_argument("--catalogue", type=Path, help="folder of a prepared catalogue; without it random rows")
    parser.add_argument("--num-queries", type=int, default=0, help="of the catalogue")
    arguments = parser.parse_args()
    line = Line.open()
    shape = ARCHITECTURES[arguments.architecture]
    if arguments.catalogue:
        task = catalogue_task(shape, arguments.catalogue, arguments.num_queries)
    else:
        task = random_task(shape)
    (serve_ours if arguments.side == "ours" else serve_trainer)(task, line)


if __name__ == "__main__":
    main()
