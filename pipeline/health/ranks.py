"""What each rank checks: its device alone, then collectives with all others under the process group's time limit."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends import Backend, RankGroup, device_guard, on_neuron, process_group
from pipeline.core.stop import StopSignal
from pipeline.health.check import (
    BURN,
    ELSEWHERE,
    OPERATIONS_CHECK,
    SHARED,
    Check,
    CheckContext,
    CheckResult,
    NodeReport,
    Verdict,
    one_line,
    run_checks,
    write_rank_report,
)
from pipeline.health.config import HealthConfig
from pipeline.health.device import check_burn, check_memory, check_operations
from pipeline.parallel.gang import host_group, open_device, open_world_group
from pipeline.parallel.world import World

DEVICE, COLLECTIVES = "device", "collectives"
SIZES_BYTES = (8, 64 * 2**10, 4 * 2**20)
"""Of the largest buffer of a rank: latency, the middle, and enough to measure bandwidth on any link."""
TURNS = 2  # the first call of a shape may have to be compiled
MIB = 2**20
LINK_SHARES = {"all-gather": 1, "all-reduce": 2, "reduce-scatter": 1}
"""The collectives, with the bytes over the slowest link for each byte of the largest buffer, times n / (n - 1)."""


def contents(source: int, turn: int, count: int) -> Tensor:
    """Return what rank `source` gives, fp32 [count]: whole numbers below 2^12, so that sums are exact.

    It differs with source and turn, and along the tensor: a wrong rank, a stale buffer or a swapped chunk is seen.
    """
    return ((torch.arange(count, dtype=torch.int64) * 7 + 997 * source + 101 * turn) % 4093).to(torch.float32)


def expected_of(name: str, world: World, turn: int, count: int) -> Tensor:
    """Return the result of a collective over `contents`, computed on the host."""
    sources = range(world.world_size)
    if name == "all-gather":
        return torch.cat([contents(source, turn, count) for source in sources])
    total = torch.zeros(count)
    for source in sources:  # one by one: all of a large size at once fill a host with many ranks
        total += contents(source, turn, count)
    return total if name == "all-reduce" else total.reshape(world.world_size, -1)[world.rank]


def check_collectives(
    backend: Backend,
    world: World,
    *,
    limit_s: float,
    ctx: CheckContext,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    minimum_gb_s: float = 0.0,
) -> CheckResult:
    """Run every collective at every size; `minimum_gb_s`: bus bandwidth of the largest all-reduce.

    The process group must be open. A rank with wrong numbers goes on to the end, so that no other rank waits for it.
    """
    figures: dict[str, float | int | str] = {}
    fault, num, turn = "", world.world_size, 0
    ranks = RankGroup(world.rank, (tuple(range(num)),))
    run: dict[str, Callable[[Tensor], Tensor]] = {
        "all-gather": backend.all_gather,
        "all-reduce": lambda tensor: backend.all_reduce(tensor, ranks),
        "reduce-scatter": lambda tensor: backend.reduce_scatter(tensor, ranks),
    }
    for name, share in LINK_SHARES.items():
        for size in sizes_bytes:
            chunks = num if name == "all-gather" else 1  # its result holds a chunk for each rank
            count = num * max(1, size // 4 // chunks // num)
            best_s = float("inf")
            for _ in range(TURNS):
                turn += 1
                ctx.stop.raise_if_set("checking collectives")
                ctx.doing = f"in {name} of {size} bytes"
                expected = expected_of(name, world, turn, count)
                try:
                    dist.monitored_barrier(host_group(), timedelta(seconds=limit_s), wait_all_ranks=True)
                    started = time.monotonic()
                    with device_guard(backend.device):
                        tensor = contents(world.rank, turn, count).to(backend.device)
                        (found,) = backend.to_host([run[name](tensor)])
                except RuntimeError as error:  # time-out, lost rank
                    ctx.stop.raise_if_set("checking collectives")
                    seen = f"{ctx.doing}: {one_line(str(error))[:300]}"
                    do = "look at the last lines of the ranks that are named; this job elsewhere"
                    return CheckResult(COLLECTIVES, Verdict.RETRY, seen, "every rank in every collective", do, figures)
                best_s = min(best_s, time.monotonic() - started)
                if not fault and not torch.equal(found, expected):
                    wrong = (found != expected).nonzero().reshape(-1)
                    first = int(wrong[0])
                    source = f" (from rank {first // count})" if name == "all-gather" else ""
                    fault = (
                        f"{len(wrong)} wrong numbers of {len(expected)} {ctx.doing}, the first at {first}{source}: "
                        f"{float(found[first]):g} for {float(expected[first]):g}"
                    )
            rate = share * (num - 1) / num * 4 * count * chunks / best_s
            figures[f"{name}_{size}_bytes_gb_s"] = float(f"{rate / 1e9:.3g}")
    if fault:
        return CheckResult(COLLECTIVES, Verdict.RETRY, fault, "the contents of every rank", ELSEWHERE, figures)
    reached = float(figures[f"all-reduce_{sizes_bytes[-1]}_bytes_gb_s"])
    if reached < minimum_gb_s:
        seen, wanted = f"all-reduce reaches {reached:.3g} GB/s bus bandwidth", f"at least {minimum_gb_s:g} GB/s"
        return CheckResult(COLLECTIVES, Verdict.RETRY, seen, wanted, "this job elsewhere", figures)
    return CheckResult(COLLECTIVES, Verdict.PASS, figures=figures)


def rank_checks(name: str, world: World, config: HealthConfig, env: Mapping[str, str], seed: int) -> tuple[Check, ...]:
    """Return the checks of one rank, in order, on a device of backend `name`, which the first one opens.

    `seed`: the same on all ranks.
    """
    opened: list[Backend] = []
    limit_s = config.device_limit_s(on_neuron=on_neuron(name, env))

    def device(ctx: CheckContext) -> CheckResult:
        if world.world_size > 1:
            ctx.doing = "joining the other ranks"
            open_world_group(process_group(name), limit_s)
        ctx.doing = "opening the device"
        backend = open_device(name, world)
        opened.append(backend)
        figures = {SHARED: int(backend.shares_host_memory)}
        return CheckResult(DEVICE, Verdict.PASS, backend.device_name(), figures=figures)

    def on_device(what: str, cost_s: float, check: Callable[..., CheckResult]) -> Check:
        def run(ctx: CheckContext) -> Iterator[CheckResult]:
            ctx.doing = f"checking {what} on the device"
            for backend in opened:
                with device_guard(backend.device):
                    yield check(backend, stop=ctx.stop)

        return Check(what, run, "cores", time_limit_s=limit_s, cost_s=cost_s)

    def memory(backend: Backend, *, stop: StopSignal) -> CheckResult:
        # A host's own memory holds what is written twice, and belongs to others, too.
        return check_memory(backend, sweep_bytes=(64 if backend.shares_host_memory else 256) * MIB, stop=stop)

    def burn(backend: Backend, *, stop: StopSignal) -> CheckResult:
        return check_burn(backend, seconds=0.3 if backend.shares_host_memory else 3.0, stop=stop)

    def collectives(ctx: CheckContext) -> Iterator[CheckResult]:
        for backend in opened:
            yield check_collectives(backend, world, limit_s=limit_s, ctx=ctx, minimum_gb_s=config.min_bus_gb_s)
            if process_group(name):
                dist.destroy_process_group()  # nccl warns of a leak if a process ends without

    operations = partial(check_operations, seed=seed, repeats=2, tolerances=config.tolerances)
    alone = (
        Check(DEVICE, device, time_limit_s=2 * limit_s, cost_s=0.0),
        on_device(OPERATIONS_CHECK, 1.0, operations),
        on_device("device memory", 2.0, memory),
        on_device(BURN, 3.0, burn),
    )
    if world.world_size == 1:
        return alone
    return (*alone, Check(COLLECTIVES, collectives, "collectives", time_limit_s=3 * limit_s, cost_s=4.0))


def report_rank(checks: Sequence[Check], config: HealthConfig, rank: int, folder: Path, stop: StopSignal) -> NodeReport:
    """Run the checks of a rank and leave its report in `folder`, also after each check. Raises Preempted."""
    so_far = NodeReport(rank, f"rank {rank}", ())

    def seen(result: CheckResult) -> None:
        nonlocal so_far
        so_far = replace(so_far, results=(*so_far.results, result))
        write_rank_report(folder, so_far, is_finished=False)

    try:
        run_checks(checks, config, node_rank=rank, host=so_far.host, stop=stop, seen=seen)
    finally:  # when stopped, too: this rank has not died
        write_rank_report(folder, so_far, is_finished=True)
    return so_far
