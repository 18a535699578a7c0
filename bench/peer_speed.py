"""Training pairs/s against sentence-transformers' trainer, same texts, weights and loss: `python -m bench.peer_speed`.

Needs the extra `dev` and `datasets`. `--data FILE.parquet` (query, title, gain, split) instead of made-up texts,
`--model FOLDER` (a MiniLM of Hugging Face) instead of random weights.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.results import ROOT, Figure, Result, Target, figure, finish
from bench.side_process import Side

NAME = "peer_speed"
TITLE = (
    "Training pairs/s against sentence-transformers' trainer: same loss, batch of 64, texts and MiniLM-L6, fp32, CPU"
)
METHOD = """
Processes, one a side, each as its user would start it, take blocks of steps in turn; a block ends with the device
waited for, and warm-up (compiles) is left out. A repeat is one pass over the pairs with fresh processes: pairs/s are
all pairs of the blocks over all their seconds, the ratio is ours / the peer's of the same repeat. The peer:
MultipleNegativesRankingLoss with its trainer's default settings on the CPU in eager mode, without logging or saving;
its collator tokenises texts as they come and pads to the longest of a batch. Ours: the contrastive loss alone
(graded_weight 0), a query with each product, token shards that `trnpipe prepare` wrote before, packed rows, the
default program on `cpu` and, in fp32, on `xla` (XLA:CPU). Both sides start from the same weights; that their losses of
the same texts are equal is checked first. No text comes twice in a pass. Memory: the most resident memory of each
process, libraries and warm-up included.
"""
PRECISIONS, DEVICES = ("fp32", "autocast"), ("cpu", "xla")
DEVICES_OF = {"fp32": ("cpu", "xla"), "autocast": ("cpu",)}
"""There is no autocast on XLA:CPU."""
PEER = "peer"
BATCH = 64


@dataclass
class Measured:
    """Pairs/s and peak memory (MiB) of a side, one a repeat."""

    rates: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    compiles: int = 0


Sides = dict[str, Measured]


@dataclass(frozen=True)
class Turns:
    """How often sides take turns."""

    repeats: int
    blocks: int
    block: int
    """Steps."""


def command(side: str, folder: Path, *flags: str) -> list[str]:
    """A side, or `make`."""
    return [sys.executable, "-m", "bench.peer_speed_side", side, str(folder), *flags]


def make(folder: Path, data: Path | None, model: Path | None, pairs: int) -> None:
    """What the sides share. Raises CalledProcessError."""
    flags = ["--pairs", str(pairs)]
    flags += [word for name, path in (("--data", data), ("--model", model)) if path for word in (name, str(path))]
    subprocess.run(command("make", folder, *flags), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def alternate(commands: dict[str, list[str]], turns: Turns, pairs: int = BATCH) -> Sides:
    """Fresh processes for each repeat; the order of each round is that of the one before reversed."""
    found = {name: Measured() for name in commands}
    for _ in range(turns.repeats):
        with ExitStack() as stack:
            sides = {name: stack.enter_context(Side(words)) for name, words in commands.items()}
            for number in range(turns.blocks):
                for name in list(sides)[:: 1 if number % 2 else -1]:
                    sides[name].block(turns.block)
        for name, side in sides.items():
            found[name].rates.append(pairs * turns.blocks * turns.block / sum(side.seconds))
            found[name].peaks.append(side.peak_mib)
            found[name].compiles += side.compiles
        print("  " + "  ".join(f"{name} {one.rates[-1]:.2f} pairs/s" for name, one in found.items()), flush=True)
    return found


def measure(
    sides_of: Mapping[str, Callable[[Path], dict[str, list[str]]]], quick: bool, data: Path | None, model: Path | None
) -> tuple[dict[str, Sides], dict[str, str | int | float]]:
    """What the sides of each name reach on the same pairs, and the settings of the result.

    The callables give the commands of the sides, from the folder with what they share.
    """
    turns = Turns(1, 1, 2) if quick else Turns(3, 4, 8)
    pairs = 4 * BATCH if quick else turns.blocks * turns.block * BATCH
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), data, model, pairs)
        found = {key: alternate(commands(Path(name)), turns) for key, commands in sides_of.items()}
    texts = "made up" if data is None else data.stem
    return found, {"pairs": pairs, "texts": texts, "steps_per_block": turns.block}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Repeat by repeat."""
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def of_precision(precision: str, devices: Sequence[str]) -> list[str]:
    """Those devices of ours that have it. Raises SystemExit when none does."""
    found = [device for device in devices if device in DEVICES_OF[precision]]
    if not found:
        raise SystemExit(
            f"no {precision} on {', '.join(devices)}; {precision} runs on {', '.join(DEVICES_OF[precision])}"
        )
    return found


def figures_of(precision: str, sides: Sides) -> list[Figure]:
    """Ratios first."""
    peer = sides[PEER]
    ours = {name: one for name, one in sides.items() if name != PEER}
    made = [
        figure(f"{precision}_{name}_ratio", ratios(one.rates, peer.rates), "x", f"ours / the peer, {precision}, {name}")
        for name, one in ours.items()
    ]
    for name, one in sides.items():
        text = "sentence-transformers, cpu" if name == PEER else f"ours, {name}"
        made.append(figure(f"{precision}_{name}", one.rates, "pairs/s", f"{text}, {precision}"))
        made.append(figure(f"{precision}_{name}_memory", one.peaks, "MiB", f"peak memory, {text}, {precision}"))
    compiles = sum(one.compiles for one in ours.values())
    return [*made, figure(f"{precision}_compiles", compiles, "graphs", "compiled during the measured blocks")]


def run(
    *, quick: bool, data: Path | None, model: Path | None, precisions: Sequence[str], devices: Sequence[str]
) -> Result:
    """Every precision: the peer and ours on every device in turn."""

    def commands_of(precision: str) -> Callable[[Path], dict[str, list[str]]]:
        words = ("--precision", precision)
        ours = of_precision(precision, devices)
        return lambda folder: {
            PEER: command("peer", folder, *words),
            **{device: command("ours", folder, *words, "--device", device) for device in ours},
        }

    sides_of = {precision: commands_of(precision) for precision in precisions}
    found, settings = measure(sides_of, quick, data, model)
    figures = [one for precision, sides in found.items() for one in figures_of(precision, sides)]
    targets = [
        Target(figure=f"{precision}_{device}_ratio", comparison=">", value=1.0)
        for precision in precisions
        for device in of_precision(precision, devices)
    ]
    return finish(
        NAME,
        TITLE,
        METHOD,
        figures,
        quick=quick,
        target=targets[0],
        further=targets[1:],
        settings=settings,
    )


def texts_file(name: str) -> Path:
    """Value of --data. Raises ArgumentTypeError for anything but a Parquet file with the columns that are read."""
    path = Path(name)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file, expected a Parquet file of judgements")
    try:
        missing = {"query", "title", "gain", "split"} - set(pq.read_schema(path).names)
    except pa.ArrowInvalid as error:
        raise argparse.ArgumentTypeError(f"{path} is not a Parquet file: {error}") from error
    if missing:
        raise argparse.ArgumentTypeError(f"{path} has no column {', '.join(sorted(missing))}")
    return path


def parser_of(name: str, text: str | None) -> argparse.ArgumentParser:
    """The flags of this bench."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=text)
    parser.add_argument("--quick", action="store_true", help="few steps: proves that the script works")
    parser.add_argument(
        "--data", type=texts_file, help="Parquet file with query, title, gain, split; none: made-up texts"
    )
    parser.add_argument("--model", type=Path, help="folder of a MiniLM of Hugging Face; none: random weights")
    parser.add_argument("--device", nargs="+", choices=DEVICES, default=list(DEVICES), help="of ours")
    return parser


if __name__ == "__main__":
    parser = parser_of(NAME, __doc__)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    flags = parser.parse_args()
    run(quick=flags.quick, data=flags.data, model=flags.model, precisions=flags.precision, devices=flags.device)
