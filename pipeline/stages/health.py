"""The health stage: host, tools, cores and collectives of every node, and one verdict for the gang.

Each node runs one process, which checks the host and then starts the ranks for the rest: a rank that hangs or dies
takes nobody with it. Nodes meet twice, so that no rank waits for a node that was found unfit before.
"""

import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.core.errors import TrnpipeError
from pipeline.core.health import CheckResult, NodeReport, Verdict, gang_error
from pipeline.core.pjrt import pjrt_device
from pipeline.core.stop import StopSignal
from pipeline.health.check import run_checks
from pipeline.health.gang import meet
from pipeline.health.host import HostChecks, usual_places, usual_ports
from pipeline.health.identity import read_identity
from pipeline.health.instances import neuron_instance
from pipeline.health.ranks import RankChecks, report_rank, results_of, with_slow_ranks
from pipeline.health.report import FOLDER_VARIABLE, report_key, show, store_report
from pipeline.health.tools import tool_checks
from pipeline.health.versions import versions_check
from pipeline.parallel.launch import launch
from pipeline.settings import Settings
from pipeline.stages.context import StageContext
from pipeline.stages.nodes import nodes_of
from pipeline.stages.result import Figure, StageResult, store_result

NAME = "health"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Check this node and the gang; done anew each time. Raises what gang_error says of an unfit gang, Preempted."""
    started = datetime.now(UTC)
    if folder := os.environ.get(FOLDER_VARIABLE):
        checks = RankChecks(settings.backend, ctx.world, settings.health, os.environ, seed=int(started.timestamp()))
        return _result(ctx, [report_rank(checks, Path(folder), ctx.stop)], started)
    reports = _check_gang(settings, ctx)
    result = _result(ctx, reports, started)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result


def _check_gang(settings: Settings, ctx: StageContext) -> tuple[NodeReport, ...]:
    """Reports of all nodes, shown and stored. Raises gang_error, where the other nodes hear of it."""
    config = settings.health
    hosts = nodes_of(ctx, "health/nodes", config.nodes_wait_s)
    hosts = replace(hosts, folder=f"{hosts.folder}/hosts")
    with hosts.telling():
        mine = _check_host(settings, ctx)
        _keep(ctx, mine)  # before anything that may wait for others
        mine = _judge(ctx, mine, meet(hosts, mine, config), is_last=False)
    ranks = replace(hosts, folder=hosts.folder.removesuffix("hosts") + "ranks")
    with ranks.telling():
        mine = replace(mine, results=(*mine.results, *_check_ranks(settings, ctx)))
        reports = with_slow_ranks(meet(ranks, mine, config), config.slow_ratio)
        _judge(ctx, mine, reports, is_last=True)
    return reports


def _judge(ctx: StageContext, mine: NodeReport, reports: tuple[NodeReport, ...], *, is_last: bool) -> NodeReport:
    """Store this node's report with what the comparison added, and return it. Shows all when there is no more to come.

    Raises gang_error.
    """
    own = next((report for report in reports if report.node_rank == mine.node_rank), mine)
    _keep(ctx, own)
    error = gang_error(reports)
    if is_last or error is not None:
        for report in reports:
            show(report, sys.stdout)
    if error is not None:
        raise error
    return own


def _keep(ctx: StageContext, report: NodeReport) -> None:
    """Store it. What the host checks say of a workspace that cannot be written says more than the failing write."""
    try:
        store_report(ctx.workspace, ctx.cycle, report)
    except TrnpipeError:
        show(report, sys.stdout)
        if (error := gang_error([report])) is not None:
            raise error from None
        raise


def _check_host(settings: Settings, ctx: StageContext) -> NodeReport:
    identity = read_identity(os.environ)
    on_neuron = settings.backend in ("auto", "xla") and pjrt_device(os.environ) == "NEURON"
    host = HostChecks(
        config=settings.health,
        identity=identity,
        workspace=ctx.workspace,
        after_stop=ctx.workspace_after_stop,
        places=usual_places(ctx.scratch, settings.compile.cache_root(ctx.workspace.root), ctx.workspace),
        ports=usual_ports(
            os.environ, node_rank=ctx.world.node_rank, num_nodes=ctx.world.world_size, on_neuron=on_neuron
        ),
        on_neuron=on_neuron,
    )
    expected = settings.health.expected_instance or identity.instance_type
    instance = neuron_instance(expected) if on_neuron or settings.health.expected_instance else None
    tools = tool_checks(instance, num_nodes=ctx.world.world_size, num_ranks=settings.launch.processes)
    more = {"code": ctx.code_version, "settings": ctx.settings_hash}
    return run_checks(
        (versions_check(more), *host.checks(), *tools),
        settings.health,
        node_rank=ctx.world.node_rank,
        host=identity.host,
        stop=ctx.stop,
    )


def _check_ranks(settings: Settings, ctx: StageContext) -> tuple[CheckResult, ...]:
    """Start this node's ranks with this very command; they leave their results in a folder."""
    processes = settings.launch.processes
    own = range(ctx.world.node_rank * processes, (ctx.world.node_rank + 1) * processes)
    with tempfile.TemporaryDirectory(prefix="trnpipe-health-") as folder, _limited(ctx.stop, settings) as stop:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            launch([*(ctx.words or (NAME,)), "--cycle", ctx.cycle], processes, stop)
        finally:
            del os.environ[FOLDER_VARIABLE]
        ctx.stop.raise_if_set("checking the ranks of this node")
        return results_of(Path(folder), own)


@contextmanager
def _limited(outer: StopSignal, settings: Settings) -> Iterator[StopSignal]:
    """A stop signal that is set with the outer one, and when all ranks together take too long."""
    inner, left = StopSignal(), threading.Event()
    config = settings.health
    limit_s = config.check_limit_s * 4 + config.collective_limit_s * 2

    def watch() -> None:
        waited = 0.0
        while not left.wait(0.2):
            waited += 0.2
            if outer.is_set() or waited > limit_s:
                inner.set(outer.reason or "the time limit of all checks")
                return

    threading.Thread(target=watch, name="health limit", daemon=True).start()
    try:
        yield inner
    finally:
        left.set()


def _result(ctx: StageContext, reports: Iterable[NodeReport], started: datetime) -> StageResult:
    reports = tuple(reports)
    warnings = sum(result.verdict is Verdict.WARN for report in reports for result in report.results)
    figures: dict[str, Figure] = {
        "nodes": len(reports),
        "checks": sum(len(report.results) for report in reports),
        "warnings": warnings,
    }
    return StageResult(
        stage=NAME,
        cycle=ctx.cycle,
        status="done",
        inputs={},
        outputs={f"node_{report.node_rank}": report_key(ctx.cycle, report) for report in reports},
        figures=figures,
        settings_hash=ctx.settings_hash,
        code_version=ctx.code_version,
        started=started,
        finished=datetime.now(UTC),
    )
