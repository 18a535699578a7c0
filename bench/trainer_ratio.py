"""Samples a second against Hugging Face Trainer: same device, architecture, batch, loss and optimizer."""

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from bench.results import Figure, Result, Target, figure, finish
from bench.side_process import Side
from bench.trainer_side import ARCHITECTURES

NAME = "trainer_ratio"
TITLE = "Samples/s against Hugging Face Trainer on the same XLA:CPU device"
METHOD = """
Two processes, ours and Trainer's, each as its user would start it, take blocks of steps in turn; a block ends with the
device waited for, and warm-up (compiles) is left out. The whole is repeated with fresh processes, because a process is
up to 15 % faster or slower for its whole life on a virtual machine; a ratio is the median over repeats of (median of
ours / median of Trainer's). Rows are the built-in catalogue's: ours in the default buckets, Trainer padded to the
largest one, since XLA needs static shapes; `one_shape` are random rows, padded to the same shape on both sides. Both
sides start from the same weights (losses compared before the run), same pair head and loss, AdamW with clipping at
1.0, fp32, no dropout. Ours: default settings, through MpDeviceLoader. Trainer: adamw_torch, no logging, saving,
evaluation or tqdm, batches gathered at once by the dataset.
"""
TARGET = Target(figure="ratio", comparison=">=", value=1.3)
DEFAULT = "4x256"


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
            command = [sys.executable, "-m", "bench.trainer_side"]
            ours = stack.enter_context(Side([*command, "ours", *flags]))
            trainer = stack.enter_context(Side([*command, "trainer", *flags]))
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
    also = ["ours", "trainer", *(["one_shape_ratio"] if lengths else [])]
    settings: dict[str, str | int | float] = {"architecture": measured, "steps_per_block": block}
    return finish(name, TITLE, METHOD, figures, quick=quick, target=TARGET, also=also, settings=settings)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=DEFAULT)
    parser.add_argument("--no-lengths", action="store_true", help="only batches of one shape")
    arguments = parser.parse_args()
    run(quick=arguments.quick, architecture=arguments.architecture, lengths=not arguments.no_lengths)
