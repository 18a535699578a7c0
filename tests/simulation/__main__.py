"""`python -m tests.simulation --seeds 10000 [--from 0] [--seed 54]`: simulate the histories of many seeds.

Prints the rate and the remaining time, and for each seed that violates an invariant the shortest prefix of its faults
that still does, with its history. `--seed` prints the history of one seed instead. Exit code 1 if any seed fails.
"""

import argparse
import sys
import time

from pipeline.core.format import format_duration
from tests.simulation.history import run_history, shortest
from tests.simulation.people import product_in_world

EVERY_S = 15.0


def main() -> int:
    """Parse the arguments, run the histories and report failures."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="number of histories")
    parser.add_argument("--from", type=int, default=0, dest="first", help="first seed")
    parser.add_argument("--seed", type=int, help="print the history of this seed only")
    arguments = parser.parse_args()
    with product_in_world():
        if arguments.seed is not None:
            result = run_history(arguments.seed, keeps_history=True)
            print(*result.history, sep="\n")
            return bool(result.violation)
        return _run(arguments.first, arguments.seeds)


def _run(first: int, num_seeds: int) -> int:
    began, began_cpu, printed = time.monotonic(), time.process_time(), time.monotonic()
    cycles, faults, failed = 0, 0, list[int]()
    for number in range(num_seeds):
        result = run_history(first + number)
        cycles, faults = cycles + result.num_cycles, faults + result.num_faults
        if result.violation:
            failed.append(result.seed)
            print_failure(result.seed)
        took_s = time.monotonic() - began
        if time.monotonic() - printed > EVERY_S:
            printed = time.monotonic()
            eta = format_duration(took_s / (number + 1) * (num_seeds - number - 1))
            print(f"{number + 1:,} of {num_seeds:,} seeds | {cycles / took_s:.0f} cycles/s | eta {eta}", flush=True)
    cpu_s = time.process_time() - began_cpu
    verdict = f"FAILED: {failed}" if failed else "no invariant was violated"
    cost = f"{1000 * cpu_s / max(1, cycles):.1f} ms of CPU per cycle"
    print(f"{num_seeds:,} seeds, {cycles:,} cycles, {faults:,} faults | {cost} | {verdict}")
    return bool(failed)


def print_failure(seed: int) -> None:
    """Print the shortest prefix of the faults of a seed that violates an invariant."""
    result = shortest(seed)
    print(*result.history, sep="\n")
    print(f"seed {seed} violates {result.violation} after {result.num_faults} faults", flush=True)


if __name__ == "__main__":
    sys.exit(main())
