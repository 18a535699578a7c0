"""`python -m bench`: run every bench, each in a process of its own (compiled graphs and counters start afresh)."""

import argparse
import subprocess
import sys
from dataclasses import dataclass

from bench.results import ROOT


@dataclass(frozen=True)
class Bench:
    """One script and what it shows."""

    module: str
    claim: str
    flags: tuple[str, ...] = ()
    by_default: bool = True
    """False: only when asked for; it takes longer than all others."""


BENCHES: dict[str, Bench] = {
    "host_share": Bench("host_share", "at most 10 % of a step outside device execution"),
    "trainer_ratio": Bench("trainer_ratio", "at least 1.3 x the samples/s of Hugging Face Trainer"),
    "trainer_ratio_small": Bench(
        "trainer_ratio", "the same with preset small", ("--architecture", "small", "--no-lengths")
    ),
    "resume": Bench("start_up", "process start to first new step, split", ("--continued",)),
    "start_up": Bench("start_up", "process start to first step of a new run, cold and compiled ahead, split"),
    "graphs": Bench("graphs", "graphs, operations and compile time by preset and step boundary"),
    "mining": Bench(
        "mining",
        "negatives of 100,000 queries from 1 million items in under 4 GiB (half an hour: --only)",
        by_default=False,
    ),
    "peer_speed": Bench(
        "peer_speed",
        "training faster than sentence-transformers' trainer, same loss and batch (needs datasets: --only)",
        by_default=False,
    ),
    "gpu": Bench("gpu", "over 50 % of a GPU's peak, ahead of DDP and Trainer (needs a GPU: --only)", by_default=False),
    "plans": Bench("plans", "every plan of parallelism gives the losses of one process; what a rank takes under each"),
    "cycle_page": Bench("cycle_page", "the page of 128 nodes and 200,000 steps: under 300 kB, 5 s and 500 MiB"),
    "search": Bench("search", "a search among 1 million products in under 2 s"),
    "gate_rates": Bench("gate_rates", "about 5 % of the models worse by just what is allowed are promoted"),
    "chaos": Bench(
        "chaos",
        "98.5 % of jobs and 98 % of the cycles survive random faults (over 10 minutes: --only)",
        by_default=False,
    ),
}


def main() -> int:
    """Run the benches asked for. 0 when all of them ran; whether a target was met is in its result."""
    width = max(map(len, BENCHES))
    listing = "\n".join(f"  {name:<{width}}  {bench.claim}" for name, bench in BENCHES.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"Measure the claims of the README on this machine.\n\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", choices=BENCHES, help="run this one; may be repeated")
    parser.add_argument(
        "--quick", action="store_true", help="prove that the scripts work; results go to build/bench, not to the table"
    )
    arguments = parser.parse_args()
    by_default = [name for name, bench in BENCHES.items() if bench.by_default]
    failed = [name for name in arguments.only or by_default if not run_one(BENCHES[name], quick=arguments.quick)]
    if failed:
        print(f"failed to run: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run_one(bench: Bench, *, quick: bool) -> bool:
    """True when the script ended well; its verdict is in its result."""
    command = [sys.executable, "-m", f"bench.{bench.module}", *bench.flags, *(["--quick"] if quick else [])]
    print(f"\n$ python {' '.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
