"""A function run by several ranks, as torchrun would start them: `run_ranks("tests.parallel.cases:name", 4, folder)`.

Each rank is forked from the zygote, joins nothing by itself, and leaves what the function returns (plain JSON).
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from pipeline.core.errors import TrnpipeError
from tests.kit.ports import free_port
from tests.kit.zygote import ROOT, Forked

WAIT_S = 300.0  # generous, machines may be loaded
STACKS_S = WAIT_S - 20.0
ALONE_S = 30.0  # of the others, once one has ended as it should not
CRASHED = (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
STAY_S = 60.0


@dataclass(frozen=True)
class RankResult:
    """How one rank ended. `code`: as a command of ours would exit; negative for a signal."""

    code: int
    value: Any
    err: str


def environments(ranks: int, port: int) -> list[dict[str, str]]:
    """Torchrun's variables for each rank of one machine; the store is at `port`."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def start_ranks(case: str, ranks: int, folder: Path, *words: str, env: Mapping[str, str] | None = None) -> list[Forked]:
    """`module:function` of this repository in each rank, with `words`; `env`: beside torchrun's variables."""
    folder.mkdir(parents=True, exist_ok=True)
    whole, started = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    for rank, given in enumerate(environments(ranks, free_port())):
        mine = {**whole, **given, **(env or {})}
        with (folder / f"rank-{rank}.out").open("wb") as out, (folder / f"rank-{rank}.err").open("wb") as err:
            arguments = [case, str(folder / f"rank-{rank}.json"), *words]
            started.append(Forked("tests.kit.ranks", arguments, env=mine, cwd=ROOT, stdout=out, stderr=err))
    return started


def end_ranks(started: list[Forked], folder: Path, expected: int) -> list[RankResult]:
    """Wait for all of them; none is left running. Of those that take too long, or hang since another one ended with a
    code that is not expected, the code is -9.
    """
    limit, is_well = time.monotonic() + WAIT_S, True
    while None in (codes := [rank.poll() for rank in started]) and time.monotonic() < limit:
        if is_well and any(code not in (None, expected) for code in codes):
            limit, is_well = min(limit, time.monotonic() + ALONE_S), False
        time.sleep(0.01)
    found = []
    for number, rank in enumerate(started):
        rank.kill()
        path = folder / f"rank-{number}.json"
        value = json.loads(path.read_text()) if path.exists() else None
        found.append(RankResult(rank.wait(), value, (folder / f"rank-{number}.err").read_text()))
    return found


def run_ranks(
    case: str, ranks: int, folder: Path, *words: str, env: Mapping[str, str] | None = None, code: int = 0
) -> list[Any]:
    """What the function returned on each rank. Asserts how they ended.

    Seen once in some hundred runs: glibc aborts a rank of four over gloo ("munmap_chunk(): invalid pointer"). No code
    of ours frees memory, so this is warned of with the stacks, and tried again once.
    """
    for place in (folder, folder / "again"):
        ended = end_ranks(start_ranks(case, ranks, place, *words, env=env), place, code)
        said = "\n".join(f"rank {number}: exit {rank.code}\n{rank.err[-3000:]}" for number, rank in enumerate(ended))
        if not any(rank.code in CRASHED for rank in ended):
            break
        warnings.warn(f"{case} crashed\n{said}", stacklevel=2)
    assert [rank.code for rank in ended] == [code] * ranks, f"expected {code}\n{said}"
    return [rank.err if code else rank.value for rank in ended]


def main(case: str, output: str, *words: str) -> int:
    """In a rank: leave what the function returns."""
    module, _, name = case.partition(":")
    faulthandler.enable()
    faulthandler.dump_traceback_later(STACKS_S)
    try:
        value = getattr(import_module(module), name)(*words)
    except TrnpipeError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    except Exception:
        traceback.print_exc()
        return 1
    path = Path(output)
    path.with_suffix(".part").write_text(json.dumps(value))
    path.with_suffix(".part").rename(path)
    _stay(path.parent)
    return 0


def _stay(folder: Path) -> None:
    """A rank that goes takes its connections, and the store of rank 0, from those that are still at it."""
    limit = time.monotonic() + STAY_S
    while len(list(folder.glob("rank-*.json"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < limit:
        time.sleep(0.02)


if __name__ == "__main__":
    ended_with = main(*sys.argv[1:])
    sys.stderr.flush()
    os._exit(ended_with)  # threads of gloo that are still waiting for a peer must not keep a rank
