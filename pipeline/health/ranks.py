"""What each rank checks: its device alone, then collectives with all others."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from pipeline.backends import Backend, device_guard, on_neuron, process_group
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, run_checks
from pipeline.health.collectives import (
    FULL_SIZES_BYTES,
    SIZES_BYTES,
    Ranks,
    agent_store,
    check_collectives,
    in_graph,
    join,
)
from pipeline.health.config import HealthConfig
from pipeline.health.device import check_burn, check_memory, check_operations
from pipeline.health.nodes import BURN, OPERATIONS_CHECK, SHARED, leave
from pipeline.health.report import CheckResult, NodeReport, Verdict
from pipeline.parallel.gang import open_device
from pipeline.parallel.world import World

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
                OPERATIONS_CHECK,
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
            ranks = replace(ranks, name="device collectives", device=backend.device, first_limit_s=first_limit_s)
            yield check(ranks, minimum_gb_s=config.min_bus_gb_s, collectives=in_graph(backend))
        if process_group(self.backend_name):
            dist.destroy_process_group()  # nccl warns of a leak where a process ends without


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
