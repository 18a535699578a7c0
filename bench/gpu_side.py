"""One side of bench.gpu in a process of its own, taking steps when told to (bench/side_process.py)."""

import argparse
import os
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trnpipe as trn
from bench.hf_pair import BlockCallback, HfPairModel, RowDataset, run_trainer
from bench.rows import RandomRows, input_spec
from bench.side_process import Line
from bench.stepper import ENDLESS, make_program, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.core.batching import Bucket
from pipeline.model.config import LossConfig, ModelConfig
from pipeline.model.losses import Targets, relevance_loss
from pipeline.model.relevance import RelevanceInputs, RelevanceModel, build_model
from pipeline.train.step import TrainProgram

SIDES = ("flat", "module", "module_compiled", "ddp", "trainer")
VOCABULARY, WARM_UP_STEPS, LOG_EVERY = 30522, 5, 20


class Pairs(nn.Module):
    """Our model with its loss, as the peer's has it: one forward pass for a loop."""

    def __init__(self, model: RelevanceModel, loss: LossConfig) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        """Tensors of one batch (see data/loader.py) to {"loss": fp32 scalar}."""
        outputs = self.model(RelevanceInputs(*(batch[name] for name in RelevanceInputs._fields)))
        return {"loss": relevance_loss(outputs, Targets(*(batch[name] for name in Targets._fields)), self._loss)}


class Task:
    """What every side trains: random pairs of one shape, the same weights, AdamW and clipping, in bf16 on a GPU."""

    def __init__(self, preset: str, batch_size: int, tokens: int, device: str) -> None:
        self.model, self.spec = ModelConfig.model_validate({"preset": preset}), input_spec(VOCABULARY)
        self.device, self.is_gpu = device, device == "cuda"
        precision = {"precision": "bf16"} if self.is_gpu else {}
        self.config = train_config(batch_size).model_copy(update=precision)
        self.bucket = Bucket(tokens, tokens)
        self.rows = RandomRows(self.spec, self.bucket, rows=batch_size * 16)

    def peer(self) -> HfPairModel:
        """The same weights in transformers' BertModel."""
        return HfPairModel(build_model(self.model, self.spec, 1), self.model, self.spec, self.config.loss)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """On the device before the first step, so that no loop waits for rows."""
        size, rows = self.config.global_batch_size, RowDataset(self.rows.arrays)
        starts = range(0, len(rows), size)
        made = [rows.__getitems__(list(range(start, start + size)))[0] for start in starts]
        there = [{name: tensor.to(self.device) for name, tensor in batch.items()} for batch in made]
        while True:
            yield from there

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()


def serve_loop(task: Task, line: Line, model: nn.Module, clip: Callable[[nn.Module, float], Tensor]) -> None:
    """The usual loop of a user, with the fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=task.is_gpu)
    low = torch.autocast(
        task.device, torch.bfloat16, enabled=task.is_gpu and isinstance(model, DistributedDataParallel)
    )
    batches = task.batches()

    def take(steps: int) -> float:
        task.wait()
        started = time.monotonic()
        for _ in range(steps):
            with low:
                loss = model(**next(batches))["loss"]
            loss.backward()
            clip(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        task.wait()
        return time.monotonic() - started

    take(WARM_UP_STEPS)
    steps = line.ready(0)
    while steps:
        steps = line.took(take(steps), 0)


def serve_module(task: Task, line: Line, *, is_compiled: bool) -> None:
    """Our model in the two lines, sharded over the one rank there is."""
    trn.init({"precision": "bf16" if task.is_gpu else "fp32"}, device=task.device)
    model = build_model(task.model, task.spec, 1)
    if is_compiled:
        for layer in model.encoder.layers:
            layer.compile()  # type: ignore[no-untyped-call]
    serve_loop(task, line, trn.transform(Pairs(model, task.config.loss)), trn.clip_grad_norm)


def serve_ddp(task: Task, line: Line) -> None:
    """transformers' BertModel under DistributedDataParallel and autocast."""
    dist.init_process_group("nccl" if task.is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(task.peer().to(task.device))
    serve_loop(task, line, model, lambda module, norm: nn.utils.clip_grad_norm_(module.parameters(), norm))


def serve_flat(task: Task, line: Line) -> None:
    """Our training program as it comes."""
    backend = open_backend(task.device)
    program = make_program(task.model, task.spec, task.config, backend, (task.bucket,), LOG_EVERY, TrainProgram)
    with open_stepper(program, backend, task.rows, task.config, LOG_EVERY) as stepper:
        stepper.warm_up()
        steps = line.ready(0)
        while steps:
            steps = line.took(stepper.seconds(steps), 0)


def serve_trainer(task: Task, line: Line) -> None:
    """Hugging Face Trainer with its fused AdamW and bf16."""

    def blocks() -> Iterator[int]:
        yield WARM_UP_STEPS
        task.wait()
        steps = line.ready(0)
        while steps:
            started = time.monotonic()
            yield steps
            task.wait()
            steps = line.took(time.monotonic() - started, 0)

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
    if asked.side.startswith("module"):
        serve_module(task, line, is_compiled=asked.side == "module_compiled")
    else:
        {"flat": serve_flat, "ddp": serve_ddp, "trainer": serve_trainer}[asked.side](task, line)


if __name__ == "__main__":
    main()
