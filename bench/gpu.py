"""Share of a GPU's peak that training reaches, ours, a DDP loop's and Hugging Face Trainer's: `python -m bench.gpu`."""

import argparse
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from bench.gpu_side import SIDES, VOCABULARY
from bench.machine import gpu_name
from bench.results import Figure, Result, Target, figure, finish
from bench.side_process import Side
from pipeline.core.footprint import EncoderSizes, Workload, step_flops
from pipeline.model.config import PRESETS

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
            name: stack.enter_context(Side([sys.executable, "-m", "bench.gpu_side", name, *flags])) for name in SIDES
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="tiny, on the host: proves that the script works")
    parser.add_argument(
        "--tokens", type=int, nargs="+", choices=BATCHES, default=list(BATCHES), help="in a text; each takes 2 minutes"
    )
    asked = parser.parse_args()
    run(quick=asked.quick, lengths=asked.tokens)
