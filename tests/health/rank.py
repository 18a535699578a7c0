"""One rank of a gang of processes that checks its collectives, with a fault: `rank.py RANK WORLD PORT FAULT`.

The last line of output is the verdict as JSON. The fault is rank 1's.
"""

import json
import os
import sys
import time
from dataclasses import asdict

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.core.stop import StopSignal
from pipeline.health.collectives import COLLECTIVES, Collective, Ranks, agent_store, check_collectives

LIMIT_S = 4.0


def swapped(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    found, expected = COLLECTIVES["all-gather"](ranks, count, turn)
    return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]]), expected


def stale(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    """What the turn before left in the buffer."""
    found, expected = COLLECTIVES["all-gather"](ranks, count, turn)
    _kept.append(found)
    return _kept[-2] if turn else found, expected


def dies(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    os._exit(1)


def hangs(ranks: Ranks, count: int, turn: int) -> tuple[Tensor, Tensor]:
    time.sleep(600)
    raise AssertionError


_kept: list[Tensor] = []
FAULTS: dict[str, Collective] = {"swapped": swapped, "stale": stale, "dies": dies, "hangs": hangs}


def main() -> None:
    rank, world, port, fault = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store = agent_store("127.0.0.1", port)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    ranks = Ranks(rank, world, store, torch.device("cpu"), LIMIT_S, StopSignal())
    chosen = dict(COLLECTIVES)
    if rank == 1 and fault == "absent":
        time.sleep(600)
    if rank == 1 and fault in FAULTS:
        chosen["all-gather"] = FAULTS[fault]
    result = check_collectives(ranks, sizes_bytes=(8, 4096), collectives=chosen)
    print(json.dumps(asdict(result)), flush=True)
    os._exit(0)  # peers may be gone: no orderly goodbye


if __name__ == "__main__":
    main()
