"""Plans of parallelism on this host: the same losses under each, and what a rank takes: `python -m bench.plans`."""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.results import ROOT, Figure, Result, Target, figure, finish

NAME = "plans"
TITLE = "Largest difference of a loss from one process's, over all plans on 2 and 4 ranks (parity, not speed)"
METHOD = """
Preset small in fp32, 16 pairs of 32 + 32 tokens a global batch, cross entropy of the relevance head, AdamW with
clipping, on gloo; each plan in fresh processes started by `trnpipe launch`, one thread a rank. The difference is the
largest over the steps between the mean loss over ranks and that of one process on the same batches. Ranks share the
host's cores, so times say what a plan adds in work and in copies on a host, nothing of its speed on devices of their
own. Memory is the most that a rank has resident, libraries included; the first step is left out of the times.
"""
TARGET = Target(figure="difference", comparison="<=", value=1e-6)


@dataclass(frozen=True)
class Case:
    """A plan on so many ranks."""

    name: str
    ranks: int
    plan: str
    text: str


_RECOMPUTE = '"recompute": "units"'
CASES = (
    Case("one", 1, '{"shard_degree": 1}', "one process"),
    Case("r2_data", 2, '{"shard_degree": 1}', "2 ranks, data parallel"),
    Case("r2_state", 2, '{"shard": "state"}', "2 ranks, shard state"),
    Case("r2_all", 2, "{}", "2 ranks, shard all"),
    Case("r2_tensor", 2, '{"tensor_degree": 2}', "2 ranks, tensor_degree 2"),
    Case("r2_all_recompute", 2, f"{{{_RECOMPUTE}}}", "2 ranks, shard all, recompute"),
    Case("r2_all_offload", 2, '{"offload_horizon": 2}', "2 ranks, shard all, recompute, offload_horizon 2"),
    Case("r4_data", 4, '{"shard_degree": 1}', "4 ranks, data parallel"),
    Case("r4_all", 4, "{}", "4 ranks, shard all"),
    Case("r4_hybrid", 4, '{"shard_degree": 2}', "4 ranks, shard_degree 2"),
    Case("r4_tensor", 4, '{"tensor_degree": 2}', "4 ranks, shard all x tensor_degree 2"),
    Case("r4_tensor_recompute", 4, f'{{"tensor_degree": 2, {_RECOMPUTE}}}', "4 ranks, the same, recompute"),
)


def measured(case: Case, folder: Path, flags: list[str]) -> dict[str, list[float]]:
    """What rank 0 found. Raises CalledProcessError for a launch that failed."""
    output = folder / f"{case.name}.json"
    launch = [sys.executable, "-m", "pipeline", "launch", f"--launch.processes={case.ranks}", "--"]
    words = ["-m", "bench.plan_side", str(output), "--plan", case.plan, *flags]
    subprocess.run([*launch, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    found: dict[str, list[float]] = json.loads(output.read_text())
    return found


def run(*, quick: bool) -> Result:
    """Every case, one after the other."""
    flags = ["--preset", "tiny", "--steps", "2", "--tokens", "8"] if quick else []
    cases = [case for case in CASES if not quick or case.name in ("one", "r2_all", "r2_tensor")]
    with tempfile.TemporaryDirectory() as folder:
        found = {case.name: measured(case, Path(folder), flags) for case in cases}
    alone = found["one"]["losses"]
    figures: list[Figure] = []
    worst = 0.0
    for case in cases:
        one = found[case.name]
        difference = max(abs(mine - theirs) for mine, theirs in zip(one["losses"], alone, strict=True))
        worst = max(worst, difference)
        if case.name != "one":
            figures.append(figure(f"{case.name}_difference", difference, "", f"difference of a loss, {case.text}"))
        figures.append(figure(f"{case.name}_step", [1e3 * s for s in one["seconds"]], "ms", f"step, {case.text}"))
        figures.append(figure(f"{case.name}_memory", one["peak_mib"], "MiB", f"most resident of a rank, {case.text}"))
    whole = figure("difference", worst, "", "largest difference of a loss, all plans")
    return finish(NAME, TITLE, METHOD, [whole, *figures], quick=quick, target=TARGET, settings={"pairs": 16})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description=TITLE)
    parser.add_argument("--quick", action="store_true", help="few steps of few plans: proves that the script works")
    run(quick=parser.parse_args().quick)
