"""A gang of ranks as processes, forked from a server that has imported torch already: a rank starts in milliseconds."""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends.base import HostMean
from pipeline.backends.cpu import CpuBackend
from pipeline.core.stop import StopSignal
from pipeline.health import ranks as ranks_module
from pipeline.health.check import CheckResult, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.ranks import (
    COLLECTIVES,
    Collective,
    RankChecks,
    Ranks,
    agent_store,
    check_collectives,
    in_graph,
)
from pipeline.parallel.world import World

LIMIT_S = 5.0  # of faults that show when it is over: a sound rank must not be that late
PATIENT_S = 120.0  # where nobody has to wait for the end of it
SIZES_BYTES = (8, 4096)


class InGraph(CpuBackend):
    """Stands for a device whose runtime joins the ranks."""

    reduces_in_graph = True

    def runtime_world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])

    def reduce(self, tensors: Sequence[Tensor], host_mean: HostMean) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor *= 1.0 / dist.get_world_size()

    def device_name(self) -> str:
        return "xla:FAKE"


Run = Callable[[], Tensor]


def swapped(sound: Collective, ranks: Ranks, mine: Tensor) -> Run:
    run, count = sound(ranks, mine), len(mine)

    def swap() -> Tensor:
        found = run()
        return torch.cat([found[count : 2 * count], found[:count], found[2 * count :]])

    return swap


def stale(sound: Collective, ranks: Ranks, mine: Tensor) -> Run:
    """What the turn before left in the buffer."""
    run = sound(ranks, mine)

    def keep() -> Tensor:
        _kept.append(run())
        return _kept[-2:][0]

    return keep


def dies(sound: Collective, ranks: Ranks, mine: Tensor) -> Run:
    return lambda: os._exit(1)


def hangs(sound: Collective, ranks: Ranks, mine: Tensor) -> Run:
    """Deaf to every limit, as a call into a driver can be."""

    def wait() -> Tensor:
        time.sleep(600)
        return torch.zeros(1)

    return wait


_kept: list[Tensor] = []
FAULTS: dict[str, Callable[[Collective, Ranks, Tensor], Run]] = {
    "swapped": swapped,
    "stale": stale,
    "dies": dies,
    "hangs": hangs,
}


def collectives(rank: int, world: int, store: Any, fault: str) -> CheckResult:
    """The check of one rank; `fault` (maybe `device ...`) is rank 1's."""
    on_device, _, name = fault.rpartition(" ")
    limit_s = LIMIT_S if name in ("absent", "hangs", "dies") else PATIENT_S
    ranks = Ranks(rank, range(world), store, torch.device("cpu"), limit_s, StopSignal())
    chosen = in_graph(InGraph()) if on_device else dict(COLLECTIVES)
    if rank == 1 and name == "absent":
        time.sleep(600)
    if rank == 1 and name in FAULTS:
        chosen["all-gather"] = partial(FAULTS[name], chosen["all-gather"])
    return check_collectives(ranks, sizes_bytes=SIZES_BYTES, collectives=chosen)


def node(rank: int, world: int, store: Any, per_node: int) -> list[CheckResult]:
    """All collectives of a rank, as the stage has them checked, on nodes of a device that reduces in its graph."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    place = World(rank, world, rank % per_node, per_node, rank // per_node)
    vars(ranks_module)["SIZES_BYTES"] = SIZES_BYTES
    config = HealthConfig(only=("collectives",), collective_limit_s=PATIENT_S)
    checks = RankChecks("cpu", place, config, os.environ, 1)
    assert checks._join(StopSignal()) is None
    checks._open.append(InGraph())
    report = run_checks(checks.checks()[1:], config, node_rank=0, host="h", stop=StopSignal())
    return list(report.results)


def _rank(work: Callable[..., object], rank: int, world: int, port: int, told: Connection, args: Sequence[Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
    torch.set_num_threads(1)
    store = agent_store("127.0.0.1", port)
    if work is not node:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    told.send(work(rank, world, store, *args))
    os._exit(0)  # peers may be gone: no orderly goodbye


@contextmanager
def gang(work: Callable[..., object], world: int, *args: Any) -> Iterator[Callable[[int], Any]]:
    """Start `work(rank, world, store, *args)` in every rank; gives the function that waits for what a rank returns."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    store = agent_store("127.0.0.1", 0, is_agent=True)
    processes: list[BaseProcess] = []
    ears: list[Connection] = []
    for rank in range(world):
        ear, mouth = context.Pipe(duplex=False)
        processes.append(context.Process(target=_rank, args=(work, rank, world, store.port, mouth, args), daemon=True))
        processes[-1].start()
        mouth.close()
        ears.append(ear)

    def told(rank: int) -> Any:
        assert ears[rank].poll(PATIENT_S), f"rank {rank} says nothing"
        return ears[rank].recv()

    try:
        yield told
    finally:
        for process in processes:
            process.kill()
            process.join()
