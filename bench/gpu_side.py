"""One side of bench.gpu in a process of its own, taking steps when told to (bench/side_process.py)."""

import argparse
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.rows import RandomRows, input_spec
from bench.side_process import Line
from bench.stepper import ENDLESS, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.core.batch_order import Bucket
from pipeline.model.config import ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import World
from pipeline.train.config import batch_share
from pipeline.train.step import TrainProgram, flat_strategy, module_strategy

if TYPE_CHECKING:
    from bench.hf_pair import HfPairModel

SIDES = ("flat", "module", "module_compiled", "ddp", "trainer")
VOCABULARY, WARM_UP_STEPS, LOG_EVERY = 30522, 5, 20
AGAIN = 1
"""Steps before each block that are not timed: memory comes back that was given up."""


class Task:
    """What every side trains: random pairs of one shape, the same weights, AdamW and clipping, in bf16 on a GPU."""

    def __init__(self, preset: str, batch_size: int, tokens: int, device: str) -> None:
        self.model, self.spec = ModelConfig.model_validate({"preset": preset}), input_spec(VOCABULARY)
        self.device, self.is_gpu = device, device == "cuda"
        precision = {"precision": "bf16"} if self.is_gpu else {}
        self.config = train_config(batch_size).model_copy(update=precision)
        self.bucket = Bucket(tokens, tokens)
        # Nothing is padding: our rows leave it out, so that our steps would be of fewer operations than are counted.
        self.rows = RandomRows(self.spec, self.bucket, rows=batch_size * 16, least=1.0)

    def peer(self) -> "HfPairModel":
        """The same weights in transformers' BertModel."""
        from bench.hf_pair import HfPairModel  # seconds of imports, which our own sides do not need

        return HfPairModel(build_model(self.model, self.spec, 1), self.model, self.spec, self.config.loss)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """On the device before the first step, so that no loop waits for rows."""
        from bench.hf_pair import RowDataset

        size, rows = self.config.global_batch_size, RowDataset(self.rows.arrays)
        starts = range(0, len(rows), size)
        made = [rows.__getitems__(list(range(start, start + size)))[0] for start in starts]
        there = [{name: tensor.to(self.device) for name, tensor in batch.items()} for batch in made]
        while True:
            yield from there

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def make_room(self) -> None:
        """For the other sides, whose processes are on the same GPU: activations of all of them would not fit."""
        if self.is_gpu:
            torch.cuda.empty_cache()


def serve_ours(task: Task, line: Line, *, is_flat: bool, is_compiled: bool = False) -> None:
    """Our training program: as it comes, or through a module spread over the one rank there is."""
    backend, config, share = open_backend(task.device), task.config, batch_share(task.config, 1)
    model = build_model(task.model, task.spec, config.seed)
    for layer in model.encoder.layers if is_compiled else ():
        vars(layer)["forward"] = torch.compile(layer.forward)  # hooks of shards stay outside
    alone = Gang(World(), timeout_s=60)
    strategy = flat_strategy(model, backend, config) if is_flat else module_strategy(model, backend, config, alone)
    program = TrainProgram(strategy, backend, config, share, figure_rows=LOG_EVERY, buckets=(task.bucket,))
    with open_stepper(program, backend, task.rows, config, LOG_EVERY) as stepper:
        stepper.warm_up()
        task.make_room()
        steps = line.ready(0)
        while steps:
            stepper.seconds(AGAIN)
            seconds = stepper.seconds(steps)
            task.make_room()
            steps = line.took(seconds, 0)


def serve_ddp(task: Task, line: Line) -> None:
    """The usual loop of a user: transformers' BertModel under DistributedDataParallel and autocast, fused AdamW."""
    dist.init_process_group("nccl" if task.is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(task.peer().to(task.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=task.is_gpu)
    low = torch.autocast(task.device, torch.bfloat16, enabled=task.is_gpu)
    batches = task.batches()

    def take(steps: int) -> float:
        task.wait()
        started = time.monotonic()
        for _ in range(steps):
            with low:
                loss = model(**next(batches))["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        task.wait()
        return time.monotonic() - started

    take(WARM_UP_STEPS)
    task.make_room()
    steps = line.ready(0)
    while steps:
        take(AGAIN)
        seconds = take(steps)
        task.make_room()
        steps = line.took(seconds, 0)


def serve_trainer(task: Task, line: Line) -> None:
    """Hugging Face Trainer with its fused AdamW and bf16."""
    from bench.hf_pair import BlockCallback, run_trainer

    def blocks() -> Iterator[int]:
        yield WARM_UP_STEPS
        task.wait()
        task.make_room()
        steps = line.ready(0)
        while steps:
            yield AGAIN
            task.wait()
            started = time.monotonic()
            yield steps
            task.wait()
            seconds = time.monotonic() - started
            task.make_room()
            steps = line.took(seconds, 0)

    chosen = {"bf16": True, "optim": "adamw_torch_fused"} if task.is_gpu else {"use_cpu": True}
    run_trainer(task.peer(), task.rows.arrays, task.config, ENDLESS, BlockCallback(blocks()), **chosen)


def main() -> None:
    """Build the task, then serve."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_side", description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--preset", default="large")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    line = Line.open()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    task = Task(asked.preset, asked.batch_size, asked.tokens, asked.device)
    if asked.side in ("ddp", "trainer"):
        (serve_ddp if asked.side == "ddp" else serve_trainer)(task, line)
    else:
        serve_ours(task, line, is_flat=asked.side == "flat", is_compiled=asked.side == "module_compiled")


if __name__ == "__main__":
    main()
