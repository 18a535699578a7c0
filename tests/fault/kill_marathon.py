"""`python -m tests.fault.kill_marathon --kills 20 --backend xla [--s3] [--teacher] [--processes 2] [--mesh 2:... ...]`.

Kills come in cycles of up to five; each cycle is restarted until it finishes and must then equal, bit for bit, the one
that nobody touched. Exit 0 when all of them do. With several meshes (processes and a plan) cycles take turns, and each
mesh has its share of the kills; `--mesh all`: those of MATRIX. Then what the last kill of a cycle left goes on twice:
on its mesh, and as a copy on another one, whose losses must equal those of the untouched run within ELSEWHERE.
"""

import argparse
import os
import random
import re
import shutil
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fault import harness
from tests.fault.harness import ON_XLA, TINY, Ended, Place, copy_of_prepared, empty_place, forget, reference, trace_of
from tests.fault.kills import PREPARE_PHASES, S3_PHASES, TRAIN_PHASES, finish, kill_at, lose_scratch, random_moment
from tests.fault.s3_server import S3Server

MATRIX = (
    "2:shard_degree=1",
    "2:shard=state,shard_degree=2",
    "2:shard_degree=2,recompute=units",
    "2:tensor_degree=2",
    "4:shard=state,shard_degree=4",
    "4:shard=state,shard_degree=2",
    "4:shard_degree=4",
    "4:shard_degree=2",
    "4:shard_degree=1,tensor_degree=2",
    "4:shard_degree=2,tensor_degree=2,recompute=units,offload=true",
)
ELSEWHERE = 1e-6  # relative
OVER_RANKS = ("--train.candidates-per-query=2", "--train.max-steps=60", "--train.evaluate-every=20")


def main() -> int:
    """Parse, kill, compare, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--backend", choices=("cpu", "xla"), default="cpu")
    parser.add_argument("--s3", action="store_true", help="workspace on S3 (a moto server in this process)")
    parser.add_argument("--teacher", action="store_true", help="train with a teacher, and kill `teach` too")
    parser.add_argument("--processes", type=int, default=1, help="ranks that train together")
    parser.add_argument("--mesh", nargs="*", default=[], help="PROCESSES:key=value,... of train.parallel, or all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wait-s", type=float, default=harness.WAIT_S, help="longest wait, more on a loaded machine")
    arguments = parser.parse_args()
    harness.WAIT_S = arguments.wait_s
    with ExitStack() as stack:
        server = stack.enter_context(S3Server()) if arguments.s3 else None
        if server is not None:
            os.environ.update(server.env)
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="trnpipe-kills-")))
        stack.callback(forget)
        return _marathon(arguments, server, folder)


def _marathon(arguments: argparse.Namespace, server: S3Server | None, folder: Path) -> int:
    started = time.monotonic()
    meshes = MATRIX if arguments.mesh == ["all"] else arguments.mesh or [f"{arguments.processes}:"]
    taught = (harness.teacher(), f"--backend={arguments.backend}") if arguments.teacher else ()
    cases = [(*_flags(arguments.backend, mesh), *taught) for mesh in meshes]
    most = max(1, min(5, -(-arguments.kills // len(cases))))
    wholes = [reference(arguments.backend, flags) for flags in cases]
    start_s = (time.monotonic() - started) / len(cases)
    for whole in wholes:
        print(f"reference: candidate {whole.candidate}, {len(whole.trace)} steps", flush=True)
    rng = random.Random(arguments.seed)
    counts, kills, cycles, different = Counter[str](), 0, 0, 0
    while kills < arguments.kills:
        whole, flags = wholes[cycles % len(cases)], cases[cycles % len(cases)]
        cycles += 1
        home = folder / f"cycle-{cycles}"
        home.mkdir()
        place = _new_place(home, arguments.backend, flags, server, empty=rng.random() < (0.7 if taught else 0.3))
        hits = _kill_some(
            place, rng, min(rng.randint(min(2, most), most), arguments.kills - kills), server, start_s, kills
        )
        mesh, elsewhere = meshes[(cycles - 1) % len(cases)], ""
        if hits and len(cases) > 1 and server is None:
            other = rng.choice([number for number in range(len(cases)) if meshes[number] != mesh])
            print(f"          and a copy goes on on {meshes[other]}", flush=True)
            flags = (*cases[other], f"--backend={arguments.backend}")
            elsewhere = _difference_elsewhere(whole, place, home / "elsewhere", flags)
        finish(place)
        kills += len(hits)
        counts.update(hits)
        problem = ", ".join(filter(None, (_difference(whole, place), elsewhere)))
        different += bool(problem)
        print(f"cycle {cycles} of {mesh}: {problem or 'bit-identical'} after {len(hits)} kills", flush=True)
    verdict = "ALL BIT-IDENTICAL" if not different else f"{different} OF {cycles} CYCLES DIFFER"
    print(f"{verdict}: {kills} kills in {cycles} cycles on {arguments.backend}{' with s3' if server else ''}")
    for what, number in sorted(counts.items()):
        print(f"  {number:3d}  {what}")
    return bool(different)


def _flags(backend: str, mesh: str) -> tuple[str, ...]:
    flags: tuple[str, ...] = ON_XLA if backend == "xla" else TINY
    processes, _, plan = mesh.partition(":")
    if processes != "1":
        flags += (f"--launch.processes={processes}", *OVER_RANKS)
    keys = (key.partition("=") for key in plan.split(",") if key)
    return flags + tuple(f"--train.parallel.{name.replace('_', '-')}={value}" for name, _, value in keys)


def _new_place(home: Path, backend: str, flags: tuple[str, ...], server: S3Server | None, *, empty: bool) -> Place:
    if server is not None:
        return server.place(home, backend, flags=flags, with_data=not empty)
    return (empty_place if empty else copy_of_prepared)(home, backend, flags)


def _kill_some(
    place: Place, rng: random.Random, wanted: int, server: S3Server | None, start_s: float, before: int
) -> list[str]:
    """Kill `wanted` times; a process that ended before its moment counts as no kill. What each was doing."""
    hits: list[str] = []
    for _ in range(3 * wanted):
        if len(hits) == wanted:
            break
        if any(hit.startswith("teach") for hit in hits):  # one kill of it is enough for a cycle, as of prepare
            place.prepare()
        elif hits:
            place.run("prepare")
        is_prepared = place.storage.stat("cycles/c1/prepare/result.json") is not None
        train = tuple(phase for phase in (S3_PHASES if server else TRAIN_PHASES) if phase != "prepare")
        if place.has_teacher and is_prepared and place.storage.stat("cycles/c1/teach/result.json") is None:
            train = ("teach",)
        saved = place.steps_saved()
        after = saved[-1] if saved else -1
        moment = random_moment(
            rng,
            train if is_prepared else PREPARE_PHASES,
            after=after,
            prepare_s=2.5,
            start_s=min(start_s, 12.0),
            max_steps=place.max_steps,
            evaluate_every=place.evaluate_every,
        )
        if place.storage.stat("cycles/c1/train/result.json") is not None:
            break
        _, doing = kill_at(place, moment, server)
        if doing:
            hits.append(re.sub(r"step-\d+", "step-n", doing))
            print(f"kill {before + len(hits):3d}: {moment} -> {doing}", flush=True)
            if server is not None and rng.random() < 0.3:
                lose_scratch(place)
                print("          scratch lost: the next attempt runs elsewhere", flush=True)
    return hits


def _difference(whole: Ended, place: Place) -> str:
    """What differs from the reference, in words; empty when nothing does."""
    try:
        ours = place.ended()
    except AssertionError as error:
        return f"TRACE DIFFERS WITHIN: {error}"
    names = [
        name for name in ("candidate", "digests", "trace", "figures") if getattr(ours, name) != getattr(whole, name)
    ]
    return f"DIFFERENT {', '.join(names)}" if names else ""


def _difference_elsewhere(whole: Ended, killed: Place, folder: Path, flags: tuple[str, ...]) -> str:
    """Let a copy of what was killed go on with other flags; what differs, in words, empty when nothing does."""
    for name in ("workspace", "scratch"):
        if (killed.folder / name).exists():
            shutil.copytree(killed.folder / name, folder / name)
    place = Place(str(folder / "workspace"), folder, flags)
    seen = len(place.events())
    finish(place)
    trace = trace_of(place.events()[seen:])
    if not trace:  # the kill came when all steps were done
        return ""
    if max(trace) != place.max_steps or any(trace[step][2] != whole.trace[step][2] for step in trace):
        return f"ELSEWHERE other samples, or the end at step {max(trace)}"
    apart, step = max((abs(trace[step][0] / whole.trace[step][0] - 1), step) for step in trace)
    print(f"          {len(trace)} steps there, losses at most {apart:.2e} away (step {step})", flush=True)
    return f"ELSEWHERE {apart:.2e} away at step {step}" if apart > ELSEWHERE else ""


if __name__ == "__main__":
    sys.exit(main())
