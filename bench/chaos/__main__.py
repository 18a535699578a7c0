"""`python -m bench.chaos --cycles 40 --parallel 2 --seed 1`: cycles of jobs under random faults end as they should.

Every cycle is eight jobs, run by `trnjobs submit --target local` on a tiny model, while processes and whole nodes are
killed, ranks and nodes hang, the disk is full, S3 fails, checkpoints rot, and engines are killed. Then all that they
left is looked at. Exit 0 when everything is as claimed. Deaths of the driver are left to tests/simulation, where it
can die between any two of its calls.
"""

import argparse
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp

from bench.chaos.faults import draw
from bench.chaos.lane import ATTEMPTS, CycleResult, Lane, Shape
from bench.chaos.processes import Watch
from bench.chaos.s3 import FailingServer
from bench.results import Figure, Target, figure, finish
from tests.kit.s3 import s3_env

CYCLES_PER_LANE = 7
ALONE, NODES, RANKS, BOTH = (1, 1), (2, 1), (1, 2), (2, 2)
SHAPES: tuple[Shape, ...] = (ALONE, NODES, ALONE, ALONE, RANKS, ALONE, ALONE, NODES, ALONE, ALONE, BOTH)
MIN_JOBS, MIN_CYCLES = 0.985, 0.98
OFTEN = 3
"""A kind of fault that was drawn as often must have hit once; else the bench does not see what it aims at any more."""
KINDS = {
    "kill_process": "kill -9 of a process of a job",
    "kill_node": "kill -9 of a whole node",
    "kill_engine": "kill -9 of trnjobs submit",
    "hang_rank": "a rank stopped for good",
    "lost_heartbeat": "the entry of a node stopped",
    "full_disk": "a process that can write no large file",
    "s3_errors": "S3 failed for seconds",
    "corrupt_checkpoint": "newest checkpoint damaged while training was down",
}


def main() -> int:
    """Run the cycles, look at what they left, write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--parallel", type=int, default=2, help="workspaces at a time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="after that no cycle is started any more")
    parser.add_argument("--keep", type=Path, help="new folder for everything, left behind")
    parser.add_argument("--quick", action="store_true", help="two cycles, to prove that it works")
    arguments = parser.parse_args()
    cycles = 2 if arguments.quick else arguments.cycles
    folder = arguments.keep or Path(mkdtemp(prefix="trnpipe-chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with ExitStack() as stack:
        chaos = Chaos(folder, arguments.seed, started + arguments.limit_s, stack)
        results = chaos.run(cycles, arguments.parallel)
        figures = figures_of(results, (time.monotonic() - started) / 60)
    finish(
        "chaos",
        f"{len(results)} cycles of jobs under random faults",
        f"""{len(results)} cycles of 8 jobs (embedding: an array of 2; training: 1 or 2 nodes with 1 or 2 processes) in
        workspaces with a day of data more each, {arguments.parallel} at a time, on the cpu backend, by `trnjobs submit
        --target local`; random faults from outside at random moments, none in about a fifth of the cycles; the command
        is started again only after it ended without the cycle having ended; {ATTEMPTS} tries a job.""",
        figures,
        quick=arguments.quick,
        target=Target(figure="jobs_finished", comparison=">=", value=MIN_JOBS),
        settings={"cycles": len(results), "parallel": arguments.parallel, "seed": arguments.seed},
    )
    values = {one.name: one.value for one in figures}
    never = values["wrong_models"] + values["wrong_vectors"] + values["run_twice"]
    good = len(results) == cycles and values["jobs_finished"] >= MIN_JOBS and values["cycles_finished"] >= MIN_CYCLES
    drawn = Counter(kind for one in results for kind in one.drawn)
    if blunt := [kind for kind in KINDS if drawn[kind] >= OFTEN and not values[kind]]:
        print(f"no fault of these kinds hit anything: {', '.join(blunt)}", file=sys.stderr)
        good = False
    return 0 if good and not never else 1


class Chaos:
    """All workspaces: every third is on S3."""

    def __init__(self, folder: Path, seed: int, until: float, stack: ExitStack) -> None:
        self._folder, self._seed, self._until, self._stack = folder, seed, until, stack
        self.server = stack.enter_context(FailingServer("chaos", random.Random(seed)))
        os.environ.update(s3_env(self.server.url))
        self._watches = [
            stack.enter_context(Watch(where))
            for where in (f"file://{folder.absolute()}/", f"s3://{self.server.bucket}/")
        ]
        self._lock = threading.Lock()
        self._results: list[CycleResult] = []

    def run(self, cycles: int, parallel: int) -> list[CycleResult]:
        sizes = [min(CYCLES_PER_LANE, cycles - first) for first in range(0, cycles, CYCLES_PER_LANE)]
        if len(sizes) < parallel:
            sizes = [len(range(one, cycles, parallel)) for one in range(min(parallel, cycles))]
        with ThreadPoolExecutor(parallel) as pool:
            for done in [pool.submit(self._lane, number, size) for number, size in enumerate(sizes)]:
                done.result()
        return self._results

    def _lane(self, number: int, size: int) -> None:
        name, dice = f"lane-{number}", random.Random(f"{self._seed}/{number}")
        place = self._folder / name
        place.mkdir()
        on_s3 = number % 3 == 2
        lane = Lane(
            name=name,
            folder=place,
            watch=self._watches[on_s3],
            dice=dice,
            server=self.server if on_s3 else None,
        )
        for cycle in range(size):
            if time.monotonic() > self._until:
                return
            shape = SHAPES[(number + cycle) % len(SHAPES)]
            faults = draw(dice, lane.kinds_for(shape), process_group=shape != (1, 1))
            result = lane.run(cycle, shape, faults)
            with self._lock:
                self._results.append(result)
                tell(result, len(self._results))


def tell(result: CycleResult, number: int) -> None:
    """One cycle, for people."""
    nodes, processes = result.shape
    print(
        f"{number:3d}  {result.lane} {result.cycle} {nodes}x{processes}: {result.outcome} in {result.seconds:.0f} s, "
        f"{result.jobs_finished} of {result.jobs} jobs, {result.attempts} tries, {result.runs} runs"
        + (f"; {result.reason}" if result.reason else ""),
        flush=True,
    )
    for hit in result.hits:
        print(f"       {hit.kind}: {hit.what}", flush=True)
    for problem in (*result.wrong_models, *result.wrong_vectors, *result.run_twice):
        print(f"  MUST NOT BE: {problem}", flush=True)


def figures_of(results: Sequence[CycleResult], minutes: float) -> list[Figure]:
    """What was measured."""
    jobs, hits = sum(one.jobs for one in results), Counter(hit.kind for one in results for hit in one.hits)
    finished = sum(one.jobs_finished for one in results) / jobs
    succeeded = sum(one.succeeded for one in results) / len(results)
    attempts = sum(one.attempts for one in results)
    touched = sum(bool(one.hits) for one in results)
    wrong_models = sum(len(one.wrong_models) for one in results)
    wrong_vectors = sum(len(one.wrong_vectors) for one in results)
    return [
        figure("jobs_finished", finished, "share", f"of {jobs} jobs finished by retries alone"),
        figure("cycles_finished", succeeded, "share", f"of {len(results)} cycles finished"),
        figure("wrong_models", wrong_models, "", "faults of what was promoted"),
        figure("wrong_vectors", wrong_vectors, "", "ids twice, missing, or other faults of vectors"),
        figure("run_twice", sum(len(one.run_twice) for one in results), "", "jobs of which two tries ran at once"),
        figure("attempts", attempts, "", "tries in all (a child of an array counts as one)"),
        figure("runs", sum(one.runs for one in results), "", "runs of the command in all"),
        figure("faults", hits.total(), "", "faults that hit"),
        figure("cycles_hit", touched, "", "cycles with at least one"),
        *(figure(kind, hits[kind], "", text) for kind, text in KINDS.items()),
        figure("duration", minutes, "min", "in all"),
    ]


if __name__ == "__main__":
    sys.exit(main())
