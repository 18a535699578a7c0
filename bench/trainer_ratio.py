"""Samples a second against Hugging Face Trainer: same device, architecture, batch, loss and optimizer."""

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from bench.catalogue import prepared_catalogue
from bench.hf_pair import BlockCallback, HfPairModel, RowDataset, run_trainer
from bench.results import Figure, Result, Target, figure, finish
from bench.rows import RandomRows, input_spec
from bench.stepper import Stepper, make_program, open_stepper, train_config
from pipeline.backends import Backend, open_backend
from pipeline.core.buckets import Bucket
from pipeline.data.loader import RowSource
from pipeline.data.shards import Arrays, TokenRows
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.losses import Targets, relevance_loss
from pipeline.model.relevance import RelevanceInputs, build_model
from pipeline.train.config import TrainConfig
from pipeline.train.program import TrainProgram

NAME = "trainer_ratio"
TITLE = "Samples/s against Hugging Face Trainer on the same XLA:CPU device"
METHOD = """
One process. A run of Trainer is interrupted every few steps and our loop takes as many, through MpDeviceLoader and with
the default step boundaries; each block ends with the device waited for. The first blocks (compiles) are left out. The
ratio is of the two medians over blocks. Both sides start from the same weights (losses compared before the run),
same pair head and loss, AdamW with clipping at 1.0, fp32, no dropout. Trainer: adamw_torch, no logging, saving,
evaluation or tqdm, batches gathered at once by the dataset. Real lengths: rows of the built-in catalogue, ours in the
default buckets, Trainer padded to the largest one.
"""
TARGET = Target(figure="ratio", comparison=">=", value=1.3)


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
DEFAULT = "4x256"


@dataclass
class Alternation:
    """Seconds of each block of both sides, in turn."""

    stepper: Stepper
    backend: Backend
    block: int
    blocks: int
    warmup: int
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    compiles: int = 0
    _started: float = field(default_factory=time.monotonic)

    def between(self) -> bool:
        """Trainer's block is traced: wait for it, take ours, go on. True when there are enough."""
        self.backend.synchronise()
        self.theirs_s.append(time.monotonic() - self._started)
        self.ours_s.append(self.stepper.seconds(self.block))
        if len(self.ours_s) <= self.warmup:
            self.compiles = self.backend.compile_count()
        self.backend.synchronise()
        self._started = time.monotonic()
        return len(self.ours_s) == self.blocks + self.warmup

    def rates(self, batch_size: int) -> tuple[list[float], list[float]]:
        """Samples/s of the measured blocks (ours, theirs)."""
        samples = self.block * batch_size
        return (
            [samples / seconds for seconds in self.ours_s[self.warmup :]],
            [samples / seconds for seconds in self.theirs_s[self.warmup :]],
        )


def compare(
    shape: Shape,
    spec: InputSpec,
    source: RowSource,
    buckets: tuple[Bucket, ...],
    rows: Arrays,
    *,
    block: int,
    blocks: int,
) -> tuple[list[float], list[float], int]:
    """(ours, theirs) in samples/s by block, and graphs compiled while measuring. `rows` are Trainer's, padded."""
    config, backend = train_config(shape.batch_size), open_backend("xla")
    model = build_model(shape.model, spec, config.seed)
    peer = HfPairModel(model, shape.model, spec, config.loss)
    check_same_loss(model, peer, rows, config)
    program = make_program(shape.model, spec, config, backend, buckets, block, TrainProgram)
    warmup = 2
    with open_stepper(program, backend, source, config, log_every=block) as stepper:
        stepper.warm_up()
        turns = Alternation(stepper, backend, block, blocks, warmup)
        run_trainer(peer, rows, config, 2 * block * (blocks + warmup), BlockCallback(block, turns.between))
    ours, theirs = turns.rates(shape.batch_size)
    return ours, theirs, backend.compile_count() - turns.compiles


def check_same_loss(ours: torch.nn.Module, theirs: HfPairModel, rows: Arrays, config: TrainConfig) -> None:
    """Both models give the same loss for the same batch on CPU, else the comparison would mean nothing."""
    batch = RowDataset(rows).__getitems__(list(range(config.global_batch_size)))[0]
    with torch.no_grad():
        inputs = RelevanceInputs(batch["query"], batch["product"], batch["numeric"], batch["categorical"])
        targets = Targets(batch["label"], batch["gain"], batch["query_key"])
        mine = float(relevance_loss(ours.eval()(inputs), targets, config.loss))
        peers = float(theirs.eval()(**batch)["loss"])
    if abs(mine - peers) > 1e-4 * abs(mine):
        raise ValueError(f"our loss is {mine}, the peer's {peers}: not the same model")


def fixed_shape(name: str, *, block: int, blocks: int) -> list[Figure]:
    """Every batch of one shape."""
    shape = ARCHITECTURES[name]
    spec, bucket = input_spec(shape.vocab_size), Bucket(shape.tokens, shape.tokens)
    source = RandomRows(spec, bucket, rows=shape.batch_size * 64)
    ours, theirs, compiles = compare(shape, spec, source, (bucket,), source.arrays, block=block, blocks=blocks)
    text = f"{name}, batch {shape.batch_size} pairs x {shape.tokens} tokens a side"
    ratio = statistics.median(ours) / statistics.median(theirs)
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        Figure(
            **(figure("ratio", each, "x", f"ours / Trainer, {text}").model_dump() | {"value": float(f"{ratio:.4g}")})
        ),
        figure("ours", ours, "samples/s", text),
        figure("trainer", theirs, "samples/s", text),
        figure("compiles", compiles, "graphs", "compiled during the measured blocks, both sides"),
    ]


def real_lengths(name: str, *, block: int, blocks: int, num_queries: int) -> list[Figure]:
    """Rows of the built-in catalogue: buckets against padding to the largest."""
    shape = ARCHITECTURES[name]
    with tempfile.TemporaryDirectory() as folder:
        data = prepared_catalogue(Path(folder), num_queries, vocab_size=shape.vocab_size)
        rows = data.rows("train")
        padded = all_rows(rows)
        ours, theirs, _ = compare(shape, data.spec, rows, rows.buckets, padded, block=block, blocks=blocks)
    text = f"{name}, batch {shape.batch_size}, built-in catalogue, buckets {' '.join(b.name for b in rows.buckets)}"
    ratio = statistics.median(ours) / statistics.median(theirs)
    each = [a / b for a, b in zip(ours, theirs, strict=True)]
    return [
        Figure(
            **(
                figure("real_lengths_ratio", each, "x", f"ours / Trainer padded to the largest, {text}").model_dump()
                | {"value": float(f"{ratio:.4g}")}
            )
        ),
        figure("real_lengths_ours", ours, "samples/s", text),
        figure("real_lengths_trainer", theirs, "samples/s", text),
    ]


def all_rows(rows: TokenRows) -> Arrays:
    """Every row of a split in the largest bucket's shape."""
    largest = len(rows.buckets) - 1
    pools = np.repeat(np.arange(len(rows.sizes)), rows.sizes).astype(np.int64)
    numbers = np.concatenate([np.arange(size) for size in rows.sizes]).astype(np.int64)
    return rows.read(pools, numbers, largest)


def run(*, quick: bool, architecture: str = DEFAULT, lengths: bool = True) -> Result:
    """Measure both figures."""
    block, blocks = (2, 2) if quick else (6, 7)
    measured = "tiny" if quick else architecture
    figures = fixed_shape(measured, block=block, blocks=blocks)
    if lengths:
        figures += real_lengths(measured, block=4 * block, blocks=blocks, num_queries=100 if quick else 1500)
    name = NAME if architecture == DEFAULT else f"{NAME}_{architecture}"
    also = ["ours", "trainer", *(["real_lengths_ratio"] if lengths else [])]
    settings: dict[str, str | int | float] = {"architecture": measured, "steps_per_block": block}
    return finish(name, TITLE, METHOD, figures, quick=quick, target=TARGET, also=also, settings=settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=DEFAULT)
    parser.add_argument("--no-lengths", action="store_true", help="leave out the figure with real lengths")
    arguments = parser.parse_args()
    run(quick=arguments.quick, architecture=arguments.architecture, lengths=not arguments.no_lengths)
