"""Share of a GPU's peak that training reaches, ours, a DDP loop's and Hugging Face Trainer's: `python -m bench.gpu`."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.machine import gpu_name
from bench.results import Figure, Result, Target, figure, finish
from bench.rows import RandomRows, input_spec
from bench.side_process import Line, Side
from bench.stepper import ENDLESS, open_stepper, train_config
from pipeline.backends import open_backend
from pipeline.core.batch_order import Bucket
from pipeline.core.footprint import EncoderSizes, Workload, step_flops
from pipeline.model.config import PRESETS, ModelConfig
from pipeline.model.relevance import build_model
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.world import World
from pipeline.train.config import rank_slice
from pipeline.train.step import TrainProgram, flat_strategy, module_strategy

if TYPE_CHECKING:
    from bench.hf_pair import HfPairModel

NAME = "gpu"
TITLE = "Share of the peak (MFU) of our best program on a GPU, BERT-large, bf16"
FORMULA = (
    "FLOPs of a step = 6 N T + 12 L D T S, for T tokens in texts of S tokens, N weights in the layers' matrices, and L"
    " layers of width D"
)
METHOD = f"""
Processes that take blocks of steps in turn, each with its own copy of the same random pairs, none of whose tokens is
padding, and of the weights: our flat program; our module program over the one rank, eager and with each layer
compiled; transformers' BertModel in a plain loop under DDP and autocast; the same under Hugging Face Trainer. All with
AdamW (fused in the peers), clipping at 1.0, no dropout. {FORMULA} (PaLM, appendix B;
embeddings and heads not counted), the same for all sides; MFU is that over the step's time and the dense bf16 peak of
the data sheet. Warm-up and compilation are left out.
"""
PEAK_TFLOPS = {
    "H200 NVL": 835.5,
    "H200": 989.0,
    "H100 NVL": 835.5,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
}
"""Dense bf16, NVIDIA's data sheets; the first that the device's name holds, so SXM where it says no more."""
BATCHES = {128: 64, 512: 16}


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
    backend, config, share = open_backend(task.device), task.config, rank_slice(task.config, 1)
    model = build_model(task.model, task.spec, config.seed)
    for layer in model.encoder.layers if is_compiled else ():
        vars(layer)["forward"] = torch.compile(layer.forward)  # hooks of shards stay outside
    alone = ProcessGroup(World(), timeout_s=60)
    strategy = flat_strategy(model, backend, config) if is_flat else module_strategy(model, backend, config, alone)
    program = TrainProgram(strategy, backend, config, share, metric_rows=LOG_EVERY, buckets=(task.bucket,))
    with open_stepper(program, backend, task.rows, config, LOG_EVERY) as stepper:
        stepper.warm_up()
        task.make_room()

        def take(steps: int) -> float:
            stepper.seconds(AGAIN)
            seconds = stepper.seconds(steps)
            task.make_room()
            return seconds

        line.serve(take)


def serve_ddp(task: Task, line: Line) -> None:
    """The usual loop of a user: transformers' BertModel under DistributedDataParallel and autocast, fused AdamW."""
    dist.init_process_group("nccl" if task.is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(task.peer().to(task.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=task.is_gpu)
    low = torch.autocast(task.device, torch.bfloat16, enabled=task.is_gpu)
    batches = task.batches()

    def timed(steps: int) -> float:
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

    def take(steps: int) -> float:
        timed(AGAIN)
        seconds = timed(steps)
        task.make_room()
        return seconds

    timed(WARM_UP_STEPS)
    task.make_room()
    line.serve(take)


def serve_trainer(task: Task, line: Line) -> None:
    """Hugging Face Trainer with its fused AdamW and bf16."""
    from bench.hf_pair import BlockCallback, run_trainer

    blocks = line.blocks(WARM_UP_STEPS, task.wait, again=AGAIN, after=task.make_room)
    chosen = {"bf16": True, "optim": "adamw_torch_fused"} if task.is_gpu else {"use_cpu": True}
    run_trainer(task.peer(), task.rows.arrays, task.config, ENDLESS, BlockCallback(blocks), **chosen)


def targets(lengths: Iterable[int]) -> list[Target]:
    """For the lengths that were measured: half of the peak, and no peer faster."""
    return [
        *(Target(figure=f"mfu_{tokens}", comparison=">=", value=0.5) for tokens in lengths),
        *(
            Target(figure=f"{peer}_ratio_{tokens}", comparison=">=", value=1.0)
            for tokens in lengths
            for peer in SIDES[3:]
        ),
    ]


def flops(preset: str, batch_size: int, tokens: int) -> float:
    """Of one step: both texts of each pair, by FORMULA."""
    size = PRESETS[preset]
    encoder = EncoderSizes(VOCABULARY, 512, size.num_layers, size.hidden_size, size.num_heads, size.intermediate_size)
    return step_flops(encoder, Workload(2 * batch_size, tokens, batch_size))


def peak_flops(name: str) -> float | None:
    """Of a GPU, by the name that its driver has for it; None for one that is not in the table."""
    return next((1e12 * peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


def seconds_of(flags: list[str], *, blocks: int, block: int) -> dict[str, list[float]]:
    """Seconds a step by side, one value a block."""
    with ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side([sys.executable, "-m", f"bench.{NAME}", "--side", name, *flags]))
            for name in SIDES
        }
        for number in range(blocks):
            for side in sides.values() if number % 2 else reversed(sides.values()):
                side.block(block)
        return {name: [s / block for s in side.seconds] for name, side in sides.items()}


def run(*, quick: bool, lengths: Sequence[int] = tuple(BATCHES)) -> Result:
    """Texts of these many tokens. Quick: tiny, on the host, where there is no peak."""
    device, preset = ("cpu", "tiny") if quick else ("cuda", "large")
    name = "this host" if quick else gpu_name()
    peak = peak_flops(name)
    batches, blocks, block = ({8: 4}, 1, 1) if quick else ({tokens: BATCHES[tokens] for tokens in lengths}, 6, 10)
    figures: list[Figure] = []
    print(FORMULA, flush=True)
    for tokens, batch_size in batches.items():
        flags = ["--device", device, "--preset", preset, "--tokens", str(tokens), "--batch-size", str(batch_size)]
        found, work = seconds_of(flags, blocks=blocks, block=block), flops(preset, batch_size, tokens)
        best = min(SIDES[:3], key=lambda side: statistics.median(found[side]))
        shape = f"texts of {tokens} tokens, batch {batch_size}"
        for side, seconds in found.items():
            rates = [2 * batch_size * tokens / one for one in seconds]
            figures.append(figure(f"{side}_rate_{tokens}", rates, "tokens/s", f"{side}, {shape}"))
            if peak:
                shares = [work / one / peak for one in seconds]
                figures.append(figure(f"{side}_mfu_{tokens}", shares, "share", f"MFU of {side}, {shape}"))
                figures += [figure(f"mfu_{tokens}", shares, "share", f"MFU of {best}, {shape}")] * (side == best)
        for peer in SIDES[3:]:
            ratios = [theirs / ours for ours, theirs in zip(found[best], found[peer], strict=True)]
            figures.append(figure(f"{peer}_ratio_{tokens}", ratios, "x", f"{best} / {peer}, {shape}"))
    settings: dict[str, str | int | float] = {"preset": preset, "gpu": name, "peak_tflops": (peak or 0) / 1e12}
    judged = targets(batches) if peak else []
    target, further = (judged[0] if judged else None), judged[1:]
    return finish(NAME, TITLE, METHOD, figures, quick=quick, target=target, further=further, settings=settings)


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="tiny, on the host: proves that the script works")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(BATCHES), help="in a text; each takes 2 minutes")
    parser.add_argument("--side", choices=SIDES, help="be this side of it, see bench/side_process.py")
    parser.add_argument("--preset", default="large", help="of a side")
    parser.add_argument("--batch-size", type=int, default=64, help="of a side")
    parser.add_argument("--device", default="cuda", help="of a side")
    asked = parser.parse_args()
    if not asked.side:
        run(quick=asked.quick, lengths=asked.tokens)
        return
    line = Line.open()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    task = Task(asked.preset, asked.batch_size, asked.tokens[0], asked.device)
    if asked.side in ("ddp", "trainer"):
        (serve_ddp if asked.side == "ddp" else serve_trainer)(task, line)
    else:
        serve_ours(task, line, is_flat=asked.side == "flat", is_compiled=asked.side == "module_compiled")


if __name__ == "__main__":
    main()
