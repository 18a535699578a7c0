"""Hard negatives of many queries: memory, a kill half way, and what the search finds: `python -m bench.mining`."""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.mining_side import JUDGED, WIDTH, Passed, parts_at
from bench.results import ROOT, Figure, Result, Target, figure, finish
from pipeline.mine.config import MineConfig

NAME = "mining"
TITLE = "Memory of mining hard negatives: 100,000 queries against 1 million items"
METHOD = f"""
Made-up unit vectors of {WIDTH} numbers instead of a model's; each query lies near one item, its positive, and has
{JUDGED} judged items. Default settings: the 100 best of all items, exactly, without the judged and those within the
margin of the positive, the first 8 kept. One run to its end, and one that is killed (SIGKILL) when half of its parts
are committed and started again; the bench fails where their negatives differ in a byte. Memory is that of the process
every 50 ms, anonymous: heaps and stacks, without code and mapped files. recall: of the best items of some queries, by a
sort of all their scores, the share that the search in chunks found.
"""
TARGET = Target(figure="memory", comparison="<", value=4.0)
_LOOK_S = 0.05


def start(place: Path, items: int, queries: int) -> "subprocess.Popen[str]":
    """A mining in a process of its own."""
    command = [sys.executable, "-m", "bench.mining_side", str(place), str(items), str(queries)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def mine(place: Path, items: int, queries: int) -> Passed:
    """To the end. Raises RuntimeError when it fails."""
    process = start(place, items, queries)
    said, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"bench.mining_side ended with {process.returncode}")
    return Passed.model_validate_json(said)


def kill_half_way(place: Path, items: int, queries: int) -> float:
    """Start, and kill when half of the parts are there; seconds until then. Raises RuntimeError when it had ended."""
    _, parts = parts_at(place, items, queries, MineConfig())
    began, process = time.monotonic(), start(place, items, queries)
    while len(parts.parts.done()) < len(parts) // 2:
        if process.poll() is not None:
            raise RuntimeError(f"bench.mining_side ended with {process.returncode} before it was half way")
        time.sleep(_LOOK_S)
    process.kill()
    process.communicate()
    return time.monotonic() - began


def recall(place: Path, items: int, queries: int, sample: int) -> float:
    """Of a mining that has ended there."""
    command = [sys.executable, "-m", "bench.mining_side", str(place), str(items), str(queries), f"--recall={sample}"]
    return float(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout)


def figures_of(whole: Passed, killed_s: float, resumed: Passed, found: float, sample: int) -> list[Figure]:
    """Raises RuntimeError when the two runs left other negatives."""
    if resumed.digest != whole.digest:
        raise RuntimeError(f"negatives {whole.digest} of a whole run, {resumed.digest} of one that was killed")
    if not resumed.parts_found:
        raise RuntimeError("the second try found nothing of the first")
    peak = max(whole.anonymous_bytes, resumed.anonymous_bytes)
    return [
        figure("memory", peak / 2**30, "GiB", "peak of anonymous memory"),
        figure("resident", max(whole.resident_bytes, resumed.resident_bytes) / 2**30, "GiB", "with code and files"),
        figure("start", whole.start_bytes / 2**30, "GiB", "anonymous memory before: interpreter and libraries"),
        figure("recall", found, "", f"best items found, {sample} queries against a sort of all scores"),
        figure("seconds", whole.seconds, "s", "a whole run"),
        figure("killed", killed_s, "s", "the run that was killed, until then"),
        figure("resumed", resumed.seconds, "s", "the same run started again, to its end: equal negatives"),
        figure("parts_found", resumed.parts_found, "parts", "of queries, that were not mined again"),
        figure("negatives", whole.negatives, "", "negatives found"),
    ]


def run(*, quick: bool) -> Result:
    """A whole run, one that is killed, and the recall of the search."""
    items, queries, sample = (50_000, 5_000, 50) if quick else (1_000_000, 100_000, 200)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = mine(folder / "whole", items, queries)
        killed_s = kill_half_way(folder / "killed", items, queries)
        resumed = mine(folder / "killed", items, queries)
        found = recall(folder / "whole", items, queries, sample)
    return finish(
        NAME,
        TITLE,
        METHOD,
        figures_of(whole, killed_s, resumed, found, sample),
        quick=quick,
        target=TARGET,
        also=("recall", "seconds", "resumed"),
        settings={"items": items, "queries": queries, "width": WIDTH},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few items and queries: proves that the script works")
    run(quick=parser.parse_args().quick)
