"""Samples a second against Hugging Face Trainer: same device, architecture, batch, loss and optimizer."""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from bench.hf_pair import BlockCallback, HfPairModel, RowDataset, run_trainer
from bench.results import Figure, Result, Target, figure, finish
from bench.rows import RandomRows, input_spec
from bench.side_process import Line, Side
from bench.stepper import ENDLESS, BucketedRows, make_program, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.core.batch_order import Bucket
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import open_rows, read_token_sets, spec_of
from pipeline.io.storage import open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.relevance import RelevanceInputs, build_model
from pipeline.train.config import TrainConfig
from pipeline.train.loss import concat_targets, relevance_loss
from pipeline.train.step import TrainProgram

NAME = "trainer_ratio"
TITLE = "Samples/s against Hugging Face Trainer on the same XLA:CPU device"
METHOD = """
Two processes, ours and Trainer's, each as its user would start it, take blocks of steps in turn; a block ends with the
device waited for, and warm-up (compiles) is left out. The whole is repeated with fresh processes, because a process is
up to 15 % faster or slower for its whole life on a virtual machine; a ratio is the median over repeats of (median of
ours / median of Trainer's). Rows are the built-in catalogue's: ours in three buckets, Trainer padded to the
largest one, since XLA needs static shapes; `one_shape` are random rows, padded to the same shape on both sides. Both
sides start from the same weights (losses compared before the run), same pair head and loss, AdamW with clipping at
1.0, fp32, no dropout. Ours: default settings, through MpDeviceLoader. Trainer: adamw_torch, no logging, saving,
evaluation or tqdm, batches gathered at once by the dataset.
"""
TARGET = Target(figure="ratio", comparison=">=", value=1.3)
DEFAULT = "4x256"


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
    """Rows of the built-in catalogue, prepared as `trnpipe prepare` does it: `num_queries` times 12."""
    workspace = open_storage(str(folder / "workspace"))
    config = DataConfig(
        name="bench",
        buckets=("16x16", "16x32", "64x64"),
        synthetic=SyntheticConfig(num_queries=num_queries),
        tokenizer=TokenizerConfig(vocab_size=shape.vocab_size),
    )
    done = prepare(config, workspace, scratch=folder / "scratch", events=lambda _, /, **__: None, stop=StopSignal())
    sets = read_token_sets(workspace, done.token_set_prefixes)
    rows = open_rows(workspace, sets, "train", folder / "cache")
    return Task(shape, spec_of(sets[0].info), rows, rows.buckets, all_rows(rows))


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
        line.serve(stepper.seconds, backend.compile_count)


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

    blocks = line.blocks(WARM_UP_STEPS, partial(torch_xla.sync, wait=True), compiles=compiles)
    run_trainer(peer, task.padded, config, ENDLESS, BlockCallback(blocks))


def check_same_loss(ours: torch.nn.Module, theirs: HfPairModel, rows: Arrays, config: TrainConfig) -> None:
    """Both models give the same loss for the same batch on CPU, else the comparison would mean nothing."""
    batch = RowDataset(rows).__getitems__(list(range(config.global_batch_size)))[0]
    with torch.no_grad():
        inputs = RelevanceInputs(batch["query"], batch["product"], batch["numeric"], batch["categorical"])
        targets = concat_targets([batch])
        mine = float(relevance_loss(ours.eval()(inputs), targets, config.loss))
        peers = float(theirs.eval()(**batch)["loss"])
    if abs(mine - peers) > 1e-4 * abs(mine):
        raise ValueError(f"our loss is {mine}, the peer's {peers}: not the same model")


@dataclass
class Rates:
    """Samples/s of both sides, one value a repeat."""

    ours: list[float] = field(default_factory=list)
    trainer: list[float] = field(default_factory=list)
    compiles: int = 0

    @property
    def ratios(self) -> list[float]:
        return [ours / trainer for ours, trainer in zip(self.ours, self.trainer, strict=True)]

    def figures(self, prefix: str, text: str) -> list[Figure]:
        """Ratio first."""
        return [
            figure(f"{prefix}ratio", self.ratios, "x", f"ours / Trainer, {text}"),
            figure(f"{prefix}ours", self.ours, "samples/s", text),
            figure(f"{prefix}trainer", self.trainer, "samples/s", text),
            figure(f"{prefix}compiles", self.compiles, "graphs", "compiled during the measured blocks, both sides"),
        ]


def alternate(flags: list[str], batch_size: int, *, repeats: int, blocks: int, block: int) -> Rates:
    """Fresh processes for each repeat; who goes first alternates too."""
    rates = Rates()
    for _ in range(repeats):
        with ExitStack() as stack:
            command = [sys.executable, "-m", f"bench.{NAME}", *flags, "--side"]
            ours = stack.enter_context(Side([*command, "ours"]))
            trainer = stack.enter_context(Side([*command, "trainer"]))
            for number in range(blocks):
                for side in (ours, trainer) if number % 2 else (trainer, ours):
                    side.block(block)
            rates.ours.append(batch_size * block / statistics.median(ours.seconds))
            rates.trainer.append(batch_size * block / statistics.median(trainer.seconds))
            rates.compiles += ours.compiles + trainer.compiles
        print(f"  ours / Trainer {rates.ratios[-1]:.3f}", flush=True)
    return rates


def run(*, quick: bool, architecture: str = DEFAULT, lengths: bool = True) -> Result:
    """Measure both figures."""
    repeats, blocks, block = (1, 2, 2) if quick else (2, 6, 3)
    measured = "tiny" if quick else architecture
    shape, flags = ARCHITECTURES[measured], ["--architecture", measured]
    figures: list[Figure] = []
    if lengths:
        with tempfile.TemporaryDirectory() as folder:
            catalogue = ["--catalogue", str(Path(folder)), "--num-queries", "100" if quick else "1500"]
            real = alternate([*flags, *catalogue], shape.batch_size, repeats=repeats, blocks=blocks, block=2 * block)
        figures += real.figures("", f"{measured}, batch {shape.batch_size}, built-in catalogue")
    fixed = alternate(flags, shape.batch_size, repeats=repeats, blocks=blocks, block=block)
    text = f"{measured}, every batch {shape.batch_size} pairs x {shape.tokens} tokens a side"
    figures += fixed.figures("one_shape_" if lengths else "", text)
    name = NAME if architecture == DEFAULT else f"{NAME}_{architecture}"
    settings: dict[str, str | int | float] = {"architecture": measured, "steps_per_block": block}
    return finish(name, TITLE, METHOD, figures, quick=quick, target=TARGET, settings=settings)


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=DEFAULT)
    parser.add_argument("--no-lengths", action="store_true", help="only batches of one shape")
    parser.add_argument("--side", choices=("ours", "trainer"), help="be this side of it, see bench/side_process.py")
    parser.add_argument("--catalogue", type=Path, help="of a side: folder of a prepared catalogue; none: random rows")
    parser.add_argument("--num-queries", type=int, default=0, help="of the catalogue")
    arguments = parser.parse_args()
    if not arguments.side:
        run(quick=arguments.quick, architecture=arguments.architecture, lengths=not arguments.no_lengths)
        return
    line, shape = Line.open(), ARCHITECTURES[arguments.architecture]
    rows = arguments.catalogue
    task = catalogue_task(shape, rows, arguments.num_queries) if rows else random_task(shape)
    (serve_ours if arguments.side == "ours" else serve_trainer)(task, line)


if __name__ == "__main__":
    main()
