"""What each rank checks: its device alone, then collectives with all others; and what its node makes of it."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from pipeline.backends import Backend
from pipeline.core.errors import DataError
from pipeline.core.health import CheckResult, NodeReport, Verdict, slow_ranks
from pipeline.core.stop import StopSignal
from pipeline.health.check import Check, CheckContext, run_checks
from pipeline.health.collectives import Ranks, agent_store, check_collectives, join
from pipeline.health.config import HealthConfig
from pipeline.health.device import check_burn, check_memory, check_operations
from pipeline.health.report import from_json, to_json
from pipeline.io import atomic
from pipeline.parallel.device import open_device
from pipeline.parallel.world import World

DEVICE, BURN, ROUND = "device", "burn", "fastest_round_s"
SHARED = "shares_host_cpu"
_RANK_ROUND = re.compile(rf"rank_(\d+)_{ROUND}")


@dataclass
class RankChecks:
    """The checks of one rank, in order; all of them need the device that the first one opens."""

    backend_name: str
    world: World
    config: HealthConfig
    env: Mapping[str, str]
    seed: int
    _open: list[Backend] = field(default_factory=list)

    def checks(self) -> tuple[Check, ...]:
        config = self.config
        quick = config.profile == "quick"
        repeats, burn_s = (2, config.burn_s) if quick else (10, 10 * config.burn_s)
        sweep_bytes = (config.sweep_mib if quick else config.full_sweep_mib) * 2**20
        alone = (
            Check(DEVICE, self._device, cost_s=0.0),
            self._on_device("operations", 1.0, partial(check_operations, seed=self.seed, repeats=repeats)),
            self._on_device("device memory", 2.0, partial(check_memory, sweep_bytes=sweep_bytes)),
            self._on_device(BURN, 3.0, partial(check_burn, seconds=burn_s)),
        )
        together = (Check("collectives", self._collectives, cost_s=4.0),) if self.world.world_size > 1 else ()
        return (*alone, *together)

    def _device(self, ctx: CheckContext) -> CheckResult:
        ctx.doing = "opening the device"
        backend = open_device(self.backend_name, self.world)
        self._open.append(backend)
        shared = backend.device.type == "cpu" or backend.device_name() == "xla:CPU"
        return CheckResult(DEVICE, Verdict.PASS, backend.device_name(), figures={SHARED: int(shared)})

    def _on_device(self, name: str, cost_s: float, check: Callable[..., CheckResult]) -> Check:
        def run(ctx: CheckContext) -> tuple[CheckResult, ...]:
            ctx.doing = f"checking {name} on the device"
            return (check(self._open[0], stop=ctx.stop),) if self._open else ()

        return Check(name, run, cost_s=cost_s)

    def _collectives(self, ctx: CheckContext) -> tuple[CheckResult, ...]:
        """Over gloo, or nccl on CUDA. On Neuron the device's own collectives are nccom-test's to check."""
        if not self._open:
            return ()
        ctx.doing = "joining the other ranks"
        backend, world = self._open[0], self.world
        store = agent_store(self.env["MASTER_ADDR"], int(self.env["MASTER_PORT"]))
        device = backend.device if backend.process_group else torch.device("cpu")
        ranks = Ranks(world.rank, world.world_size, store, device, self.config.collective_limit_s, ctx.stop)
        kind = f"cpu:gloo,{backend.process_group}" if backend.process_group else "gloo"
        if problem := join(ranks, kind):
            return (problem,)
        ctx.doing = "in a collective"
        return (check_collectives(ranks, minimum_gb_s=self.config.min_bus_gb_s),)


def report_rank(checks: RankChecks, folder: Path, stop: StopSignal) -> NodeReport:
    """Run them and leave the report of this rank in `folder`, and on the way what is done so far. Raises Preempted."""
    rank = checks.world.rank
    so_far = NodeReport(rank, f"rank {rank}", ())

    def seen(result: CheckResult) -> None:
        nonlocal so_far
        so_far = replace(so_far, results=(*so_far.results, result))
        _leave(folder / _unfinished(rank), so_far)

    try:
        run_checks(checks.checks(), checks.config, node_rank=rank, host=so_far.host, stop=stop, seen=seen)
    finally:  # when stopped, too: this rank has not died
        _leave(folder / _finished(rank), so_far)
    return so_far


def results_of(folder: Path, ranks: Iterable[int]) -> tuple[CheckResult, ...]:
    """What the ranks of a node have left in `folder`, as results of the node: who ended on the way is named, too."""
    reports: dict[int, NodeReport] = {}
    silent: list[CheckResult] = []
    for rank in ranks:
        if (report := _read(folder / _finished(rank))) is not None:
            reports[rank] = report
            continue
        before = _read(folder / _unfinished(rank))
        last = f" after check {before.results[-1].name}" if before and before.results else ""
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


def _finished(rank: int) -> str:
    return f"rank-{rank}.json"


def _unfinished(rank: int) -> str:
    return f"rank-{rank}-so-far.json"


def _leave(path: Path, report: NodeReport) -> None:
    atomic.write_bytes_atomic(path, to_json(report).encode())


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
                    seen=f"{len(found)} x {first.seen or 'right'}",
                    figures={**first.figures, **rounds},
                    seconds=max(one.seconds for one in found.values()),
                )
            )
    return tuple(merged)


def with_slow_ranks(reports: Iterable[NodeReport], ratio: float) -> tuple[NodeReport, ...]:
    """The same reports, with a word where a rank burned slower than its peers on all nodes."""
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
