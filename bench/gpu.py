"""Share of a GPU's peak that training reaches, ours, a DDP loop's and Hugging Face Trainer's: `python -m bench.gpu`."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

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
TITLES = 0.25
"""Least share of a row that the text of `flat_titles` fills."""
TITLE = "Share of the peak (MFU) of our best program on a GPU, BERT-large, bf16"
FORMULA = (
    "FLOPs of a step = 6 N T + 12 L D T S, for T tokens in texts of S tokens, N weights in the layers' matrices, and L"
    " layers of width D"
)
METHOD = f"""
Processes that take blocks of steps in turn, each with its own copy of the same random pairs, none of whose tokens is
padding, and of the weights: our flat program, with compiled layers (the default) and eager, and our module program
over the one rank; transformers' BertModel in a plain loop under DDP and autocast, eager and under torch.compile; the
same under Hugging Face Trainer, eager and with its torch_compile. All with AdamW (fused in the peers), clipping at
1.0, no dropout. {FORMULA} (PaLM, appendix B; embeddings and heads not counted), the same for
all sides; MFU is that over the step's time and the dense bf16 peak of the data sheet. `flat_titles` is our flat program
with texts of {TITLES:.0%} to all of the length. Warm-up and compilation are left out.
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
SHAPES = ((128, 64), (128, 256), (512, 16))
"""Tokens of a text, and pairs of a batch."""
OURS, PEERS = ("flat", "flat_eager", "module"), ("ddp", "ddp_compiled", "trainer", "trainer_compiled")
SIDES = (*OURS, "flat_titles", *PEERS)
VOCABULARY, WARM_UP_STEPS, LOG_EVERY = 30522, 5, 20
AGAIN = 1
"""Steps before each block that are not timed: memory comes back that was given up."""


class Task:
    """What every side trains: random pairs of one shape, the same weights, AdamW and clipping, in bf16 on a GPU."""

    def __init__(self, preset: str, batch_size: int, tokens: int, device: str, least: float = 1.0) -> None:
        self.model, self.spec = ModelConfig.model_validate({"preset": preset}), input_spec(VOCABULARY)
        self.device, self.is_gpu = device, device == "cuda"
        precision = {"precision": "bf16"} if self.is_gpu else {}
        self.config = train_config(batch_size).model_copy(update=precision)
        self.bucket = Bucket(tokens, tokens)
        # Nothing is padding: our rows leave it out, so that our steps would be of fewer operations than are counted.
        self.rows = RandomRows(self.spec, self.bucket, rows=batch_size * 16, least=least)

    @property
    def tokens(self) -> float:
        """Of a batch on average, without padding."""
        texts = (self.rows.arrays["query"], self.rows.arrays["product"])
        return float(sum((text != self.rows.pad_id).sum(1).mean() for text in texts)) * self.config.global_batch_size

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


def serve_ours(task: Task, line: Line, *, is_flat: bool, is_eager: bool = False) -> None:
    """Our training program: as it comes, or through a module spread over the one rank there is."""
    config = task.config.model_copy(update={"compiled": False if is_eager else None})
    backend, share = open_backend(task.device), rank_slice(config, 1)
    model = build_model(task.model, task.spec, config.seed)
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


def serve_ddp(task: Task, line: Line, *, is_compiled: bool) -> None:
    """The usual loop of a user: transformers' BertModel under DistributedDataParallel and autocast, fused AdamW."""
    dist.init_process_group("nccl" if task.is_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    plain = DistributedDataParallel(task.peer().to(task.device))
    model = cast(DistributedDataParallel, torch.compile(plain)) if is_compiled else plain
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


def serve_trainer(task: Task, line: Line, *, is_compiled: bool) -> None:
    """Hugging Face Trainer with its fused AdamW and bf16."""
    from bench.hf_pair import BlockCallback, run_trainer

    blocks = line.blocks(WARM_UP_STEPS, task.wait, again=AGAIN, after=task.make_room)
    chosen = {"bf16": True, "optim": "adamw_torch_fused"} if task.is_gpu else {"use_cpu": True}
    callback = BlockCallback(blocks)
    run_trainer(task.peer(), task.rows.arrays, task.config, ENDLESS, callback, torch_compile=is_compiled, **chosen)


def shape_name(tokens: int, batch_size: int) -> str:
    return f"{tokens}" if batch_size == dict(reversed(SHAPES)).get(tokens) else f"{tokens}x{batch_size}"


def targets(shapes: Iterable[str], name: str) -> list[Target]:
    """For the shapes that were measured: half of the peak (of an H100, 45 % in small batches), and no peer as fast."""
    return [
        *(
            Target(figure=f"mfu_{shape}", comparison=">=", value=0.5 if "x" in shape or "H200" in name else 0.45)
            for shape in shapes
        ),
        *(Target(figure=f"{peer}_ratio_{shape}", comparison=">=", value=1.1) for shape in shapes for peer in PEERS),
        *(Target(figure=f"titles_share_{shape}", comparison=">=", value=0.85) for shape in shapes),
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


def run(*, quick: bool, lengths: Collection[int] = tuple(dict(SHAPES))) -> Result:
    """Texts of these many tokens. Quick: tiny, on the host, where there is no peak."""
    device, preset = ("cpu", "tiny") if quick else ("cuda", "large")
    name = "this host" if quick else gpu_name()
    peak = peak_flops(name)
    shapes, blocks, block = ([(8, 4)], 1, 1) if quick else ([one for one in SHAPES if one[0] in lengths], 6, 10)
    figures: list[Figure] = []
    print(FORMULA, flush=True)
    for tokens, batch_size in shapes:
        flags = ["--device", device, "--preset", preset, "--tokens", str(tokens), "--batch-size", str(batch_size)]
        found, work = seconds_of(flags, blocks=blocks, block=block), flops(preset, batch_size, tokens)
        best = min(OURS, key=lambda side: statistics.median(found[side]))
        shape, key = f"texts of {tokens} tokens, batch {batch_size}", shape_name(tokens, batch_size)
        titles = Task(preset, batch_size, tokens, "cpu", TITLES).tokens
        for side, seconds in found.items():
            rates = [(titles if side == "flat_titles" else 2 * batch_size * tokens) / one for one in seconds]
            figures.append(figure(f"{side}_rate_{key}", rates, "tokens/s", f"{side}, {shape}"))
            if peak and side != "flat_titles":
                shares = [work / one / peak for one in seconds]
                figures.append(figure(f"{side}_mfu_{key}", shares, "share", f"MFU of {side}, {shape}"))
                figures += [figure(f"mfu_{key}", shares, "share", f"MFU of {best}, {shape}")] * (side == best)
        for peer in PEERS:
            ratios = [theirs / ours for ours, theirs in zip(found[best], found[peer], strict=True)]
            figures.append(figure(f"{peer}_ratio_{key}", ratios, "x", f"{best} / {peer}, {shape}"))
        real = titles / (2 * batch_size * tokens)
        ratios = [real * full / padded for full, padded in zip(found["flat"], found["flat_titles"], strict=True)]
        figures.append(figure(f"titles_share_{key}", ratios, "x", f"tokens/s, flat_titles / flat, {shape}"))
    settings: dict[str, str | int | float] = {"preset": preset, "gpu": name, "peak_tflops": (peak or 0) / 1e12}
    judged = targets([shape_name(*one) for one in shapes], name) if peak else []
    target, further = (judged[0] if judged else None), judged[1:]
    return finish(NAME, TITLE, METHOD, figures, quick=quick, target=target, further=further, settings=settings)


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="tiny, on the host: proves that the script works")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(dict(SHAPES)), help="in a text")
    parser.add_argument("--side", choices=SIDES, help="be this side of it, see bench/side_process.py")
    parser.add_argument("--preset", default="large", help="of a side")
    parser.add_argument("--batch-size", type=int, default=64, help="of a side")
    parser.add_argument("--device", default="cuda", help="of a side")
    asked = parser.parse_args()
    if not asked.side:
        run(quick=asked.quick, lengths=asked.tokens)
        return
    line = Line.open()
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "USE_TORCH_XLA": "0"}  # accelerate would train on XLA
    least = TITLES if asked.side == "flat_titles" else 1.0
    task = Task(asked.preset, asked.batch_size, asked.tokens[0], asked.device, least)
    if asked.side in PEERS:
        serve = serve_ddp if asked.side.startswith("ddp") else serve_trainer
        serve(task, line, is_compiled=asked.side.endswith("_compiled"))
    else:
        serve_ours(task, line, is_flat=asked.side != "module", is_eager=asked.side == "flat_eager")


if __name__ == "__main__":
    main()
