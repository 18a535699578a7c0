"""What each rank checks: its device alone, then collectives with all others."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.backends import Backend, device_guard, on_neuron, process_group
from pipeline.backends.c10d import all_gather_single
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, CheckResult, NodeReport, Verdict, one_line, run_checks
from pipeline.health.config import HealthConfig
from pipeline.health.device import check_burn, check_memory, check_operations
from pipeline.health.nodes import BURN, OPERATIONS_CHECK, SHARED, write_rank_report
from pipeline.parallel.gang import open_device
from pipeline.parallel.world import World

# Collectives between ranks, with contents by which a wrong rank, a stale buffer or a swapped chunk is seen.
#
# Every call has a time limit, and each rank signs in before it. So a hang is not a hang: the ranks that never came are
# named. Signing in goes through the store that torchrun's agent keeps, which outlives any rank.

SIZES_BYTES = (8, 64 * 2**10, 4 * 2**20)
"""Of the largest buffer of a rank: latency, the middle, and enough to measure bandwidth on any link."""
FULL_SIZES_BYTES = (*SIZES_BYTES, 64 * 2**20)
"""With a whole gradient bucket (50 MB on Neuron: torch_xla/_internal/neuron.py)."""
_FIRST_POLL_S, _POLL_S = 0.001, 0.05
_STORE_LIMIT_S = 60.0
_REASON_LENGTH = 200


@dataclass(frozen=True)
class Ranks:
    """This rank among those that take part, numbered as in the whole world.

    device: where tensors must lie for the process group. group: None is that of all ranks. first_limit_s: for the first
    call of each shape, which may have to be compiled; None: no longer than the others.
    """

    rank: int
    ranks: range
    store: Any
    """torch.distributed's TCPStore, which has no types."""
    device: torch.device
    limit_s: float
    stop: StopSignal
    name: str = "collectives"
    group: dist.ProcessGroup | None = None
    first_limit_s: float | None = None

    def arrive(self, place: str, limit_s: float | None = None) -> list[int]:
        """Sign in at `place` and wait for the others: the ranks that did not come in time, [] when all did."""
        self.store.set(self._key(f"{place}/{self.rank}"), "1")
        if self.store.add(self._key(f"{place}/count"), 1) == len(self.ranks):
            self.store.set(self._key(f"{place}/all"), "1")
        return self.missing(place, limit_s)

    def missing(self, place: str, limit_s: float | None = None) -> list[int]:
        """Wait until all are there or it is too late, without signing in. A rank that has given up is missing, too."""
        end, pause_s = time.monotonic() + (limit_s or self.limit_s), _FIRST_POLL_S
        while not self.store.check([self._key(f"{place}/all")]):
            self.stop.raise_if_set(f"waiting for the other ranks at {place}")
            if (gone := self.gave_up()) is not None:
                return [gone]
            if time.monotonic() > end:
                return [rank for rank in self.ranks if not self.store.check([self._key(f"{place}/{rank}")])]
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)
        return []

    def give_up(self) -> None:
        """Tell those who would wait for this rank that it has its verdict."""
        self.store.set(self._key("gave up"), str(self.rank))

    def gave_up(self) -> int | None:
        return int(self.store.get(self._key("gave up"))) if self.store.check([self._key("gave up")]) else None

    def _key(self, name: str) -> str:
        return f"trnpipe/health/{self.name}/{self.ranks.start}/{name}"


def agent_store(address: str, port: int, *, is_agent: bool = False) -> Any:
    """The store of torchrun's agent, as one more client of it (port 0: any, for an agent)."""
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store(address, port, is_master=is_agent, wait_for_workers=False, timeout=timedelta(seconds=_STORE_LIMIT_S))


def join(ranks: Ranks, kind: str, limit_s: float) -> CheckResult | None:
    """Bring up the process group of torchrun's environment; the verdict when a rank does not come or it fails."""
    try:
        _sign_in(ranks, "start", limit_s)
        try:
            # nccl ends the process when a call takes longer than this: our own limit comes first.
            dist.init_process_group(kind, timeout=timedelta(seconds=limit_s + _STORE_LIMIT_S))
        except RuntimeError as error:
            raise _lost("start", error, ranks) from error
    except _Fault as fault:
        return fault.result(ranks, {})
    return None


def contents(source: int, turn: int, count: int) -> Tensor:
    """What rank `source` gives, fp32 [count]: whole numbers below 2^12, so that sums are exact.

    It differs with source and turn, and along the tensor.
    """
    return ((torch.arange(count, dtype=torch.int64) * 7 + 997 * source + 101 * turn) % 4093).to(torch.float32)


Collective = Callable[["Ranks", Tensor], Callable[[], Tensor]]
"""Makes one ready of (ranks, what this rank gives [count], on its device): what runs it and gives what arrived."""


def expected_of(name: str, ranks: Ranks, turn: int, count: int) -> Tensor:
    """What should arrive, on the host."""
    if name == "all-gather":
        return torch.cat([contents(source, turn, count) for source in ranks.ranks])
    total = torch.zeros(count)
    for source in ranks.ranks:  # one by one: all of a large size at once fill a host with many ranks
        total += contents(source, turn, count)
    return total


def _run(ranks: Ranks, found: Tensor, call: Callable[..., dist.Work | None], *tensors: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        work = call(*tensors, group=ranks.group, async_op=True)
        if work is not None:
            work.wait(timedelta(seconds=ranks.limit_s))
        return found

    return run


def all_reduce(ranks: Ranks, mine: Tensor) -> Callable[[], Tensor]:
    return _run(ranks, mine, dist.all_reduce, mine)


def all_gather(ranks: Ranks, mine: Tensor) -> Callable[[], Tensor]:
    found = torch.zeros(len(mine) * len(ranks.ranks), device=ranks.device)
    return _run(ranks, found, all_gather_single, found, mine)


COLLECTIVES: dict[str, Collective] = {"all-gather": all_gather, "all-reduce": all_reduce}


def in_graph(backend: Backend) -> dict[str, Collective]:
    """The collectives of the device itself: the all-reduce as training uses it, and an all-gather.

    For a backend that reduces in the graph, over all ranks.
    """

    def all_reduce(ranks: Ranks, mine: Tensor) -> Callable[[], Tensor]:
        def run() -> Tensor:
            backend.reduce([mine], _no_host_mean)
            (mean,) = backend.to_host([mine])
            return torch.round(mean * len(ranks.ranks))  # these are sums of whole numbers, the mean is rounded

        return run

    def all_gather(ranks: Ranks, mine: Tensor) -> Callable[[], Tensor]:
        return lambda: backend.to_host([backend.all_gather(mine)])[0]

    return {"all-gather": all_gather, "all-reduce": all_reduce}


def _no_host_mean(tensors: list[Tensor]) -> list[Tensor]:
    raise RuntimeError("the device was to reduce this itself")


def bus_factor(name: str, ranks: int) -> float:
    """Bytes over the slowest link for each byte of the largest buffer (the nccl-tests convention)."""
    return (2 if name == "all-reduce" else 1) * (ranks - 1) / ranks


def check_collectives(
    ranks: Ranks,
    *,
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    turns: int = 2,
    minimum_gb_s: float = 0.0,
    collectives: Mapping[str, Collective] | None = None,
) -> CheckResult:
    """Every collective at every size, on all `ranks` at once; `minimum_gb_s`: bus bandwidth of the largest all-reduce.

    The process group must be up. The first problem ends the check, on every rank with a verdict of its own.
    """
    figures: dict[str, float | int | str] = {}
    num, turn = len(ranks.ranks), 0
    try:
        for name, collective in (collectives or COLLECTIVES).items():
            for size in sizes_bytes:
                chunks = num if name == "all-gather" else 1  # one buffer of it holds a chunk for each rank
                count, best_s = max(1, size // 4 // chunks), float("inf")
                for again in range(turns):
                    turn += 1
                    limit_s = ranks.limit_s if again else ranks.first_limit_s or ranks.limit_s
                    best_s = min(best_s, _timed(ranks, collective, f"{name}/{size}/{again}", count, turn, limit_s))
                rate = bus_factor(name, num) * 4 * count * chunks / best_s
                figures[f"{name}_{size}_bytes_gb_s"] = float(f"{rate / 1e9:.3g}")
    except _Fault as fault:
        return fault.result(ranks, figures)
    slowest = float(figures.get(f"all-reduce_{sizes_bytes[-1]}_bytes_gb_s", 0.0))
    if slowest < minimum_gb_s:
        seen, expected = f"all-reduce reaches {slowest:.3g} GB/s bus bandwidth", f"at least {minimum_gb_s:g} GB/s"
        return CheckResult(ranks.name, Verdict.RETRY, seen, expected, "this job elsewhere", figures)
    return CheckResult(ranks.name, Verdict.PASS, figures=figures)


class _Fault(Exception):
    """Ends the check of this rank."""

    def __init__(
        self, seen: str, next_command: str = "look at the last lines of that rank; this job elsewhere"
    ) -> None:
        super().__init__(seen)
        self.seen, self.next_command = seen, next_command

    def result(self, ranks: Ranks, figures: Mapping[str, float | int | str]) -> CheckResult:
        expected = "every rank in every collective, with its own contents"
        return CheckResult(ranks.name, Verdict.RETRY, self.seen, expected, self.next_command, figures)


class _Stuck(RuntimeError):
    """A call that has not come back."""


def _timed(ranks: Ranks, collective: Collective, place: str, count: int, turn: int, limit_s: float) -> float:
    """Seconds of one call with right results. Raises _Fault, Preempted."""
    ranks.stop.raise_if_set(f"checking {place}")
    with device_guard(ranks.device):
        run = collective(ranks, contents(ranks.rank, turn, count).to(ranks.device))
    name = place.partition("/")[0]
    expected = expected_of(name, ranks, turn, count)
    _sign_in(ranks, place, limit_s)
    started = time.monotonic()
    try:
        found = _within(limit_s, run, ranks.device)
    except RuntimeError as error:  # time-out, lost peer
        ranks.stop.raise_if_set(f"checking {place}")
        raise _lost(place, error, ranks) from error
    seconds = time.monotonic() - started
    if torch.equal(found, expected):
        return seconds
    ranks.give_up()
    wrong = (found != expected).nonzero().reshape(-1)
    first = int(wrong[0])
    source = ranks.ranks[first * len(ranks.ranks) // len(expected)]
    whose = f" (from rank {source})" if name == "all-gather" else ""
    raise _Fault(
        f"rank {ranks.rank} got {len(wrong)} wrong numbers of {len(expected)} from {place}, "
        f"the first at {first}{whose}: {float(found[first]):g} for {float(expected[first]):g}",
        "this job elsewhere; take the machine out of service if it fails again",
    )


def _within(limit_s: float, run: Callable[[], Tensor], device: torch.device) -> Tensor:
    """What it gives, on the host. It may hang where it hears nothing: then its thread stays behind. RuntimeError."""
    results: list[Tensor] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with device_guard(device):
                results.append(run().cpu())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="collective", daemon=True)
    thread.start()
    thread.join(limit_s + 1.0)  # a library that knows the limit says more
    if errors:
        raise errors[0]
    if not results:
        raise _Stuck(f"not done within {limit_s:g} s")
    return results[0]


def _sign_in(ranks: Ranks, place: str, limit_s: float) -> None:
    """Raises _Fault that names the ranks which do not come."""
    if missing := ranks.arrive(place, limit_s):
        first, last = ranks.ranks.start, ranks.ranks.stop - 1
        who = f"rank {', '.join(map(str, missing))} of {f'{first} to {last}' if first else last + 1}"
        if ranks.gave_up() is not None:
            raise _Fault(f"{who} has found a fault and does not come to {place}")
        raise _Fault(f"{who} did not arrive at {place} within {limit_s:g} s")


def _lost(place: str, error: RuntimeError, ranks: Ranks) -> _Fault:
    """All signed in and the call failed: whoever does not sign out is the one that died or hangs."""
    after = f"{place}/left"
    missing = ranks.missing(after) if isinstance(error, _Stuck) else ranks.arrive(after)
    named = 0 < len(missing) < len(ranks.ranks)
    who = f"rank {', '.join(map(str, missing))} was lost in" if named else "no rank came through"
    return _Fault(f"{who} {place}: {one_line(str(error)[:_REASON_LENGTH])}")


DEVICE = "device"
_MEMORY_SHARE = 4
"""Ranks on the host's own memory sweep one part in so many of what is free, all together."""


@dataclass
class RankChecks:
    """The checks of one rank, in order; all of them need the device that the first one opens."""

    backend_name: str
    world: World
    config: HealthConfig
    env: Mapping[str, str]
    seed: int
    """The same on all ranks: their errors are compared."""
    _ranks: list[Ranks] = field(default_factory=list)
    """This rank among the others, once it has joined them."""
    _open: list[Backend] = field(default_factory=list)

    def __post_init__(self) -> None:
        patience = self.config.patience(on_neuron=on_neuron(self.backend_name, self.env))
        self._is_quick = self.config.profile == "quick"
        self._limit_s = self.config.check_limit_s * patience
        self._meeting_s = self.config.collective_limit_s * patience
        """To join the others, and for the first collective of each shape on the device."""

    def checks(self) -> tuple[Check, ...]:
        config, join_s = self.config, self._meeting_s if self.world.world_size > 1 else 0.0
        repeats, burn_s = (2, config.burn_s) if self._is_quick else (10, 10 * config.burn_s)
        operations = partial(check_operations, seed=self.seed, repeats=repeats, tolerances=config.tolerances)
        alone = (
            Check(DEVICE, self._device, time_limit_s=self._limit_s + join_s, cost_s=0.0),
            self._on_device(OPERATIONS_CHECK, 1.0, operations),
            self._on_device("device memory", 2.0, self._memory),
            self._on_device(BURN, 3.0, partial(check_burn, seconds=burn_s)),
        )
        if self.world.world_size == 1:
            return alone
        limit_s = self._limit_s + 2 * self._meeting_s  # to name who hangs in one
        return (*alone, Check("collectives", self._collectives, "collectives", time_limit_s=limit_s, cost_s=4.0))

    def _device(self, ctx: CheckContext) -> Iterator[CheckResult]:
        if self.world.world_size > 1:
            ctx.doing = "joining the other ranks"
            if problem := self._join(ctx.stop):
                yield problem
                return
        ctx.doing = "opening the device"
        backend = open_device(self.backend_name, self.world)
        self._open.append(backend)
        figures = {SHARED: int(backend.shares_host_memory)}
        yield CheckResult(DEVICE, Verdict.PASS, backend.device_name(), figures=figures)

    def _join(self, stop: StopSignal) -> CheckResult | None:
        """Bring up the process group, before the device is touched; what is wrong when that fails."""
        store = agent_store(self.env["MASTER_ADDR"], int(self.env["MASTER_PORT"]))
        everyone, cpu = range(self.world.world_size), torch.device("cpu")
        ranks = Ranks(self.world.rank, everyone, store, cpu, self.config.collective_limit_s, stop)
        if problem := join(ranks, process_group(self.backend_name) or "gloo", self._meeting_s):
            return problem
        self._ranks.append(ranks)
        return None

    def _on_device(self, name: str, cost_s: float, check: Callable[..., CheckResult]) -> Check:
        def run(ctx: CheckContext) -> tuple[CheckResult, ...]:
            ctx.doing = f"checking {name} on the device"
            if not self._open:
                return ()
            with device_guard(self._open[0].device):
                return (check(self._open[0], stop=ctx.stop),)

        return Check(name, run, "cores", time_limit_s=self._limit_s, cost_s=cost_s)

    def _memory(self, backend: Backend, *, stop: StopSignal) -> CheckResult:
        sweep_bytes = (self.config.sweep_mib if self._is_quick else self.config.full_sweep_mib) * 2**20
        if backend.shares_host_memory:  # it holds what is written twice, and belongs to others, too
            free_bytes = psutil.virtual_memory().available
            sweep_bytes = min(sweep_bytes, free_bytes // (_MEMORY_SHARE * self.world.local_world_size))
        return check_memory(backend, sweep_bytes=sweep_bytes, stop=stop)

    def _collectives(self, ctx: CheckContext) -> Iterator[CheckResult]:
        """Over gloo, or nccl on CUDA: within the node, then across nodes; then what the device reduces in its graph."""
        if not self._open:
            return
        backend, world, config = self._open[0], self.world, self.config
        device = backend.device if process_group(self.backend_name) else torch.device("cpu")
        ranks = replace(self._ranks[0], device=device, stop=ctx.stop)
        sizes = SIZES_BYTES if self._is_quick else FULL_SIZES_BYTES
        minimum_gb_s = 0.0 if backend.reduces_in_graph else config.min_bus_gb_s
        check = partial(check_collectives, sizes_bytes=sizes)
        ctx.doing = "in a collective"
        if 1 < world.local_world_size < world.world_size:
            size = world.local_world_size
            nodes = [range(first, first + size) for first in ranks.ranks[::size]]
            groups = [dist.new_group(list(node)) for node in nodes]  # every rank makes all of them, as torch wants it
            mine = world.rank // size
            in_node = replace(ranks, ranks=nodes[mine], group=groups[mine], name="collectives in the node")
            yield (within := check(in_node))
            if within.verdict > Verdict.PASS:
                return  # the others name this rank
        yield (across := check(ranks, minimum_gb_s=minimum_gb_s))
        if across.verdict > Verdict.PASS:
            return
        if backend.reduces_in_graph:
            ctx.doing = "in a collective of the device"
            of_device = replace(ranks, name="device collectives", device=backend.device, first_limit_s=self._meeting_s)
            yield check(of_device, minimum_gb_s=config.min_bus_gb_s, collectives=in_graph(backend))
        if process_group(self.backend_name):
            dist.destroy_process_group()  # nccl warns of a leak where a process ends without


def report_rank(checks: RankChecks, folder: Path, stop: StopSignal) -> NodeReport:
    """Run them and leave the report of this rank in `folder`, and on the way what is done so far. Raises Preempted."""
    rank = checks.world.rank
    so_far = NodeReport(rank, f"rank {rank}", ())

    def seen(result: CheckResult) -> None:
        nonlocal so_far
        so_far = replace(so_far, results=(*so_far.results, result))
        write_rank_report(folder, so_far, is_finished=False)

    try:
        run_checks(checks.checks(), checks.config, node_rank=rank, host=so_far.host, stop=stop, seen=seen)
    finally:  # when stopped, too: this rank has not died
        write_rank_report(folder, so_far, is_finished=True)
    return so_far
