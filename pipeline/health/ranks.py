"""What each rank checks: its device alone, then collectives with all others."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from pipeline.backends import Backend, device_guard, on_neuron, process_group
from pipeline.core.errors import DataError
from pipeline.core.format import format_duration
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, run_checks
from pipeline.health.collectives import (
    FULL_SIZES_BYTES,
    SIZES_BYTES,
    Ranks,
    agent_store,
    check_collectives,
    exchange_times,
    in_graph,
    join,
)
from pipeline.health.config import HealthConfig
from pipeline.health.device import check_burn, check_memory, check_operations
from pipeline.health.report import from_json, to_json
from pipeline.health.tolerance import OPERATIONS
from pipeline.health.verdict import CheckResult, NodeReport, Verdict, slow_ranks
from pipeline.io import atomic
from pipeline.parallel.gang import open_device
from pipeline.parallel.world import World

# What a node makes of the checks of its ranks: each leaves its results in a folder of the node.
#
# Without torch: the process that starts the ranks needs none.

BURN, ROUND = "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


def leave(folder: Path, report: NodeReport, *, is_finished: bool) -> None:
    """Put the report of rank `report.node_rank` there, or what it has done so far."""
    atomic.write_bytes_atomic(_place(folder, report.node_rank, is_finished), to_json(report).encode())


def results_of(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """What the ranks of a node have left in `folder`, as results of the node: who ended on the way is named, too."""
    reports: dict[int, NodeReport] = {}
    silent: list[CheckResult] = []
    for rank in ranks:
        if (report := _read(_place(folder, rank, True))) is not None:
            reports[rank] = report
            continue
        last = ""
        if (before := _read(_place(folder, rank, False))) is not None:
            reports[rank] = before
            last = f" after check {before.results[-1].name}" if before.results else ""
        silent.append(
            CheckResult(
                "ranks",
                Verdict.RETRY,
                f"rank {rank} of this node ended without a word{last}",
                "a report of each rank",
                "look at the last lines of that rank, and at dmesg for the out-of-memory killer",
            )
        )
    return (*silent, *_merged(reports))


def _place(folder: Path, rank: int, is_finished: bool) -> Path:
    return folder / (f"rank-{rank}.json" if is_finished else f"rank-{rank}-so-far.json")


def _read(path: Path) -> NodeReport | None:
    try:
        return from_json(path.read_bytes(), str(path))
    except (OSError, DataError):
        return None


def _merged(reports: Mapping[int, NodeReport]) -> tuple[CheckResult, ...]:
    """One line for each check that all ranks passed, one for each rank that did not."""
    by_name: dict[str, dict[int, CheckResult]] = {}
    for rank, report in reports.items():
        for result in report.results:
            by_name.setdefault(result.name, {})[rank] = result
    merged: list[CheckResult] = []
    for found in by_name.values():
        bad = {rank: result for rank, result in found.items() if result.verdict > Verdict.PASS}
        merged += [replace(result, seen=f"rank {rank}: {result.seen}") for rank, result in bad.items()]
        if not bad:
            first = next(iter(found.values()))
            rounds = {f"rank_{rank}_{ROUND}": one.figures[ROUND] for rank, one in found.items() if ROUND in one.figures}
            merged.append(
                replace(
                    first,
                    seen=f"{len(found)} x {first.seen or 'right'}" if len(found) > 1 else first.seen or "right",
                    figures={**first.figures, **rounds},
                    seconds=max(one.seconds for one in found.values()),
                )
            )
    return tuple(merged)


def with_slow_ranks(reports: Iterable[NodeReport], ratio: float) -> tuple[NodeReport, ...]:
    """The same reports, annotated where a rank ran slower than its peers on all nodes."""
    reports = tuple(reports)
    rounds: dict[int, float] = {}
    for report in reports:
        for result in report.results:
            for name, value in result.figures.items() if result.name == BURN else ():
                if match := _RANK_ROUND.fullmatch(name):
                    rounds[int(match[1])] = float(value)
    slow = slow_ranks(rounds, ratio)
    return tuple(
        replace(report, results=(*report.results, *_slow(report, slow, ratio))) if slow else report
        for report in reports
    )


def _slow(report: NodeReport, slow: Mapping[int, float], ratio: float) -> Iterator[CheckResult]:
    # "Cores" that are this host's share its processors with each other and with whatever else runs.
    shared = any(one.figures.get(SHARED) for one in report.results)
    own = {int(match[1]) for one in report.results for name in one.figures if (match := _RANK_ROUND.fullmatch(name))}
    for rank in sorted(own & slow.keys()):
        yield CheckResult(
            "slow core",
            Verdict.WARN if shared else Verdict.RETRY,
            f"rank {rank} takes {slow[rank]:.1f} times as long as its peers for the same products",
            f"at most {ratio:g} times",
            "this job elsewhere; look for throttling and for other processes on that machine",
        )


# Clocks of nodes, compared by what must have happened before what, not by when something arrived.
#
# In each round every node notes its time and then waits until all have done so. Its time in the next round is therefore
# later, in truth, than everybody's in this one: with a, b the times of two nodes in a round and A, B those in the next,
# their clocks are between b - A and B - a apart. However slow a node or the network is, this accuses no right clock;
# the uncertainty is that of the shortest round, which over gloo takes a millisecond or less.

NAME = "clock"
ROUNDS = 10

Stamps = Mapping[int, float]
"""Seconds since 1970 by node, each on its own clock."""


@dataclass(frozen=True)
class Skew:
    """A clock is ahead of another by something between these two; negative: behind."""

    low_s: float
    high_s: float

    @property
    def ahead_s(self) -> float:
        """The best guess."""
        return (self.low_s + self.high_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """The guess is wrong by this at most."""
        return abs(self.high_s - self.low_s) / 2

    @property
    def certain_s(self) -> float:
        """Ahead (or, negative, behind) by this at least; 0: maybe not at all."""
        return max(self.low_s, 0.0) or min(self.high_s, 0.0)


def skew(stamps: Sequence[Stamps], one: int, other: int) -> Skew:
    """How far the clock of `other` is ahead of that of `one`. `stamps`: two rounds or more."""
    bounds = [(now[other] - then[one], then[other] - now[one]) for now, then in pairwise(stamps)]
    return Skew(max(low for low, _ in bounds), min(high for _, high in bounds))


def clock_faults(stamps: Sequence[Stamps], max_skew_s: float) -> dict[int, CheckResult]:
    """What is to be said of the nodes whose clocks are surely more than `max_skew_s` from another's.

    `stamps`: one for each round, of the same nodes. Blamed is who disagrees with most, of equals the highest rank.
    """
    certain = {
        pair: found
        for pair in combinations(sorted(stamps[0]), 2)
        if abs((found := skew(stamps, *pair)).certain_s) > max_skew_s
    }
    faults: dict[int, CheckResult] = {}
    while certain:
        counts = Counter(node for pair in certain for node in pair)
        worst = max(counts, key=lambda node: (counts[node], node))
        other = next(one if two == worst else two for one, two in certain if worst in (one, two))
        faults[worst] = _result(Verdict.RETRY, skew(stamps, other, worst), other, max_skew_s)
        certain = {pair: found for pair, found in certain.items() if worst not in pair}
    return faults


def judge_clock(stamps: Sequence[Stamps], node: int, max_skew_s: float) -> CheckResult | None:
    """What `node` says of its own clock against that of the lowest node, who says nothing unless it is at fault."""
    fault, first = clock_faults(stamps, max_skew_s).get(node), min(stamps[0])
    if fault is not None or node == first:
        return fault
    return _result(Verdict.PASS, skew(stamps, first, node), first, max_skew_s)


def _result(verdict: Verdict, found: Skew, other: int, max_skew_s: float) -> CheckResult:
    order = "behind" if found.ahead_s < 0 else "ahead of"
    return CheckResult(
        NAME,
        verdict,
        f"{abs(found.ahead_s):.3g} s {order} node {other}, give or take {found.uncertainty_s:.2g} s",
        f"at most {format_duration(max_skew_s)} apart",
        "chronyc tracking on that machine",
        {"clock_ahead_s": round(found.ahead_s, 6), "uncertainty_s": round(found.uncertainty_s, 6)},
    )


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

    def checks(self) -> tuple[Check, ...]:
        config = self.config
        repeats, burn_s = (2, config.burn_s) if self._is_quick else (10, 10 * config.burn_s)
        alone = (
            Check(DEVICE, self._device, time_limit_s=self._limit_s + self._join_limit_s, cost_s=0.0),
            self._on_device(
                OPERATIONS,
                1.0,
                partial(check_operations, seed=self.seed, repeats=repeats, tolerances=config.tolerances),
            ),
            self._on_device("device memory", 2.0, self._memory),
            self._on_device(BURN, 3.0, partial(check_burn, seconds=burn_s)),
        )
        if self.world.world_size == 1:
            return alone
        limit_s = self._limit_s + 2 * config.collective_limit_s * self._patience  # to name who hangs in one
        return (*alone, Check("collectives", self._collectives, "collectives", time_limit_s=limit_s, cost_s=4.0))

    @property
    def _is_quick(self) -> bool:
        return self.config.profile == "quick"

    @property
    def _patience(self) -> int:
        return self.config.patience(on_neuron=on_neuron(self.backend_name, self.env))

    @property
    def _limit_s(self) -> float:
        return self.config.check_limit_s * self._patience

    @property
    def _join_limit_s(self) -> float:
        return self.config.collective_limit_s * self._patience if self.world.world_size > 1 else 0.0

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
        beside = process_group(self.backend_name)
        if problem := join(ranks, f"cpu:gloo,{beside}" if beside else "gloo", self._join_limit_s):
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
        first_limit_s = config.collective_limit_s * self._patience
        sizes = SIZES_BYTES if self._is_quick else FULL_SIZES_BYTES
        minimum_gb_s = 0.0 if backend.reduces_in_graph else config.min_bus_gb_s
        check = partial(check_collectives, sizes_bytes=sizes)
        ctx.doing = "in a collective"
        if 1 < world.local_world_size < world.world_size:
            yield (within := check(self._in_node(ranks)))
            if within.verdict > Verdict.PASS:
                return  # the others name this rank
        yield (across := check(ranks, minimum_gb_s=minimum_gb_s))
        if across.verdict > Verdict.PASS:
            return
        if backend.reduces_in_graph:
            ctx.doing = "in a collective of the device"
            ranks = replace(ranks, name="device collectives", device=backend.device, first_limit_s=first_limit_s)
            yield check(ranks, minimum_gb_s=config.min_bus_gb_s, collectives=in_graph(backend))
        yield from self._clock(ranks)
        if process_group(self.backend_name):
            dist.destroy_process_group()  # nccl warns of a leak where a process ends without

    def _in_node(self, ranks: Ranks) -> Ranks:
        """The ranks of this node. Every rank makes the groups of all nodes, as torch wants it."""
        size = self.world.local_world_size
        nodes = [range(first, first + size) for first in ranks.ranks[::size]]
        groups = [dist.new_group(list(node)) for node in nodes]
        mine = self.world.rank // size
        return replace(ranks, ranks=nodes[mine], group=groups[mine], name="collectives in the node")

    def _clock(self, ranks: Ranks) -> Iterator[CheckResult]:
        """Clocks of nodes are those of their first ranks."""
        size = self.world.local_world_size
        if size == self.world.world_size:
            return
        rounds = exchange_times(ranks, ROUNDS)
        stamps = [{rank // size: time for rank, time in times.items() if rank % size == 0} for times in rounds]
        found = judge_clock(stamps, self.world.rank // size, self.config.max_clock_skew_s)
        if found is not None and self.world.local_rank == 0:
            yield found


def report_rank(checks: RankChecks, folder: Path, stop: StopSignal) -> NodeReport:
    """Run them and leave the report of this rank in `folder`, and on the way what is done so far. Raises Preempted."""
    rank = checks.world.rank
    so_far = NodeReport(rank, f"rank {rank}", ())

    def seen(result: CheckResult) -> None:
        nonlocal so_far
        so_far = replace(so_far, results=(*so_far.results, result))
        leave(folder, so_far, is_finished=False)

    try:
        run_checks(checks.checks(), checks.config, node_rank=rank, host=so_far.host, stop=stop, seen=seen)
    finally:  # when stopped, too: this rank has not died
        leave(folder, so_far, is_finished=True)
    return so_far
