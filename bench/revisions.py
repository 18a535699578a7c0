"""Today's code beside an earlier revision of it: `python -m bench.revisions --before REVISION`."""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from bench.results import ROOT, Figure, Result, figure, finish
from bench.watched_run import environment, run_stage, train_until

NAME = "revisions"
TITLE = "Time of a step, of a start and of a whole cycle over those of an earlier revision, quickstart"
METHOD = """
Both revisions run in the same environment with their own configs/quickstart.toml, as processes of their own that take
turns; who goes first alternates. step: median time between the lines of a training's steps, the first ten left out.
start: process start until the figures of the first step. cycle: `trnjobs submit --target local` in a new workspace,
start to end. benches: each bench's own program with --quick, a process a repeat; the samples are few, the repeats many.
A ratio is of neighbours in time: today's over the earlier one's.
"""
WARM_UP = 10
BENCHES = "benches"
PARTS = ("cpu", "xla", "cycle")
JUDGED: dict[str, dict[str, str]] = {
    "host_share": {"host_share": "share", "wall_ms": "ms"},
    "trainer_ratio": {"ratio": "x", "ours": "samples/s"},
    "start_up": {"cold_total": "s", "warm_total": "s", "compile_stage": "s"},
    "resume": {"xla_total": "s", "cpu_total": "s"},
    "embed": {"ratio": "x", "fp32": "titles/s"},
}
"""Figures of each bench that both revisions have, with units. More is better of a rate, and of a ratio to a peer."""


@dataclass(frozen=True)
class Checkout:
    """A revision's files, and a workspace in which its prepare stage is done."""

    root: Path
    prepared: Path


@dataclass
class Times:
    """Values of both sides, one a repeat."""

    before: list[float] = field(default_factory=list)
    now: list[float] = field(default_factory=list)

    def figures(self, name: str, text: str, unit: str = "s") -> list[Figure]:
        ratios = [now / before for before, now in zip(self.before, self.now, strict=True)]
        return [
            figure(f"{name}_ratio", ratios, "x", f"today / before, {text}"),
            figure(f"{name}_before", self.before, unit, f"{text}, before"),
            figure(f"{name}_now", self.now, unit, f"{text}, today"),
        ]


def revision(text: str) -> str:
    """The text. Raises ArgumentTypeError for what is not the short or full hash of a commit: it names the result."""
    if not re.fullmatch("[0-9a-f]{7,40}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the hash of a commit, expected 7 to 40 of 0-9a-f: git log")
    return text


def check_out(revision: str, folder: Path) -> Path:
    """The committed files of a revision in a new folder. Raises CalledProcessError for one that git does not know."""
    archive = folder.with_suffix(".tar")
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", f"--output={archive}", "--end-of-options", revision]
    subprocess.run(command, check=True)
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    archive.unlink()
    return folder


def training(folder: Path, backend: str, steps: int, checkout: Checkout) -> tuple[float, float]:
    """(seconds of a step, seconds from process start to the first step) of one run, which is then deleted."""
    shutil.copytree(checkout.prepared, folder)
    watched = train_until(folder, backend, steps, root=checkout.root)
    shutil.rmtree(folder)
    moments = [watched.moment("train_steps", number) for number in range(steps)]
    spans = [after - before for before, after in pairwise(moments[WARM_UP:])]
    return statistics.median(spans), moments[0] - watched.started


def cycle(folder: Path, checkout: Checkout) -> tuple[float]:
    """(seconds of a whole cycle). Raises CalledProcessError when it does not end well."""
    flags = ["--config", "configs/quickstart.toml", "--workspace", str(folder), "--cycle", "bench"]
    command = [sys.executable, "-m", "jobs", "submit", "--target", "local", *flags]
    started = time.monotonic()
    subprocess.run(command, cwd=checkout.root, check=True, stdout=subprocess.DEVNULL, env=environment(checkout.root))
    seconds = time.monotonic() - started
    shutil.rmtree(folder)
    return (seconds,)


def bench_figures(name: str, words: Sequence[str], checkout: Checkout) -> tuple[float, ...]:
    """What JUDGED names of one quick run of a bench. Raises CalledProcessError."""
    command = [sys.executable, "-m", f"bench.{name}", *words, "--quick"]
    env = environment(checkout.root)
    subprocess.run(command, cwd=checkout.root, check=True, stdout=subprocess.DEVNULL, env=env)
    found = json.loads((checkout.root / "build" / "bench" / f"{name}.json").read_text(encoding="utf-8"))
    values = {one["name"]: one["value"] for one in found["figures"]}
    return tuple(values[figure] for figure in JUDGED[name])


def in_turn(
    before: Checkout, now: Checkout, repeats: int, once: Callable[[Checkout], tuple[float, ...]]
) -> list[Times]:
    """Times of each value that `once` returns."""
    found: list[Times] = []
    for number in range(repeats):
        for side in ((before, now), (now, before))[number % 2]:
            values = once(side)
            found = found or [Times() for _ in values]
            for times, value in zip(found, values, strict=True):
                (times.now if side is now else times.before).append(value)
        print("  today / before " + ", ".join(f"{times.now[-1] / times.before[-1]:.3f}" for times in found), flush=True)
    return found


def run(
    *, quick: bool, before: str, parts: tuple[str, ...], repeats: int = 5, embed: tuple[Path, Path] | None = None
) -> Result:
    """Every part in turn. Of some parts alone, the result has their names too. `embed`: titles and model of that bench,
    which is left out without them."""
    repeats, steps = (1, WARM_UP + 5) if quick else (repeats, 120)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        old = Checkout(check_out(before, folder / "before"), folder / "prepared-before")
        today = Checkout(ROOT, folder / "prepared-now")
        backends = [part for part in parts if part in ("cpu", "xla")]
        benches = [name for name in JUDGED if name in parts or BENCHES in parts]
        for side in (old, today) if backends else ():
            run_stage("prepare", side.prepared, root=side.root)
        for backend in backends:
            step, start = in_turn(old, today, repeats, partial(training, folder / "run", backend, steps))
            figures += step.figures(f"{backend}_step", f"one step, {backend}")
            figures += start.figures(f"{backend}_start", f"start to first step, {backend}")
        if "cycle" in parts:
            (whole,) = in_turn(old, today, min(repeats, 3), partial(cycle, folder / "run"))
            figures += whole.figures("cycle", "a whole cycle")
        if benches:
            today = Checkout(check_out("HEAD", folder / "now"), folder / "none")  # it leaves its results there
        for name in benches:
            if name == "embed" and embed is None:
                continue
            words = [str(path.resolve()) for path in embed or ()] if name == "embed" else []
            print(name, flush=True)
            found = in_turn(old, today, repeats, partial(bench_figures, name, words))
            for (one, unit), times in zip(JUDGED[name].items(), found, strict=True):
                figures += times.figures(f"{name}_{one}", f"{name}: {one}", unit)
    name = "_".join([NAME, before, *([] if parts == PARTS else parts)])
    return finish(name, TITLE, METHOD, figures, quick=quick, settings={"before": before, "steps": steps})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="one repeat: proves that the script works")
    parser.add_argument("--before", required=True, type=revision, help="hash of a commit that git knows")
    parser.add_argument(
        "--part", action="append", choices=(*PARTS, BENCHES, *JUDGED), help="only this one; may be repeated"
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each side, without --quick; 5")
    parser.add_argument(
        "--embed", type=Path, nargs=2, metavar=("TITLES", "MODEL"), help="benches: run `embed` with these"
    )
    flags = parser.parse_args()
    of_embed = tuple(flags.embed) if flags.embed else None
    parts = tuple(flags.part or PARTS)
    if "embed" in parts and of_embed is None:
        parser.error("--part embed: without --embed TITLES MODEL, expected both")
    run(quick=flags.quick, before=flags.before, parts=parts, repeats=max(1, flags.repeats), embed=of_embed)
