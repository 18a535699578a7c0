"""The health stage: host, tools, cores and collectives of every node, and one verdict for the job.

Each node runs one process, which checks the host and then starts the ranks for the rest: a rank that hangs or dies
takes no other process with it. Nodes meet after each part, so that no rank waits for a node that was found unfit.
"""

import math
import os
import sys
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.backends import on_neuron
from pipeline.context import Figure, StageContext, StageResult, nodes_of, store_result
from pipeline.core.errors import EXIT_OK
from pipeline.health.check import (
    CheckResult,
    NodeReport,
    Verdict,
    exchange_reports,
    job_error,
    report_key,
    results_of,
    run_checks,
    show,
    store_own,
    with_slow_ranks,
)
from pipeline.health.host import HostChecks, read_identity, usual_folders
from pipeline.health.neuron import neuron_checks
from pipeline.parallel.launch import launch
from pipeline.parallel.node_barrier import Nodes
from pipeline.parallel.world import RANK_REPORTS
from pipeline.proc.tool import guarded_temp_folder, temporary_environment
from pipeline.settings import Settings

NAME = "health"

Reports = tuple[NodeReport, ...]


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Check this node and the job, each time. Raises the job_error of an unfit job, Preempted."""
    started = datetime.now(UTC)
    if folder := os.environ.get(RANK_REPORTS):
        from pipeline.health.ranks import rank_checks, report_rank  # torch, which the node's own process does without

        seed = zlib.crc32(ctx.cycle.encode())  # the same on all nodes, another one in each cycle
        checks = rank_checks(settings.backend, ctx.world, settings.health, os.environ, seed)
        report = report_rank(checks, settings.health, ctx.world.rank, Path(folder), ctx.stop)
        if report.verdict >= Verdict.RETRY:  # a thread may hang, and gloo aborts when another rank is gone
            sys.stdout.flush()
            os._exit(EXIT_OK)  # the verdict is in the report
        return _result(ctx, (report,), started)
    nodes = nodes_of(ctx, "health/nodes", timeout_s=math.inf)
    with nodes.telling(), guarded_temp_folder() as temporary:
        reports = _Node(settings, ctx, nodes).check(temporary)
    result = _result(ctx, reports, started)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result


class _Node:
    def __init__(self, settings: Settings, ctx: StageContext, nodes: Nodes) -> None:
        self._settings, self._ctx, self._nodes, self._config = settings, ctx, nodes, settings.health
        self._on_neuron = on_neuron(settings.backend, os.environ)
        self._identity = read_identity()
        self._report = NodeReport(ctx.world.node_rank, self._identity.host, ())

    def check(self, temporary: Path) -> Reports:
        """Return the reports of all nodes, shown and stored. Raises job_error, where the other nodes hear of it."""
        with_ranks = self._config.wants("cores", "collectives")
        reports = self._meet("hosts", self._host(), is_last=not with_ranks)
        return self._meet("ranks", self._ranks(temporary / "ranks"), is_last=True) if with_ranks else reports

    def _meet(self, part: str, results: tuple[CheckResult, ...], *, is_last: bool) -> Reports:
        """Return the reports of all nodes after a part."""
        ctx, processes = self._ctx, self._settings.launch.processes
        self._report = replace(self._report, results=(*self._report.results, *results))
        store_own(ctx.workspace, ctx.cycle, self._report)  # before anything that may wait for others
        wait_s = self._config.stage_limit_s(
            on_neuron=self._on_neuron, num_nodes=ctx.world.world_size, processes=processes
        )
        reports = exchange_reports(self._nodes, part, self._report, wait_s)
        reports = with_slow_ranks(reports)
        self._report = next((one for one in reports if one.node_rank == self._report.node_rank), self._report)
        store_own(ctx.workspace, ctx.cycle, self._report)
        if (error := job_error(reports)) is not None or is_last:
            for report in reports:
                show(report, sys.stdout)
        if error is not None:
            raise error
        return reports

    def _host(self) -> tuple[CheckResult, ...]:
        settings, ctx, rank = self._settings, self._ctx, self._ctx.world.node_rank
        num_nodes, processes = ctx.world.world_size, settings.launch.processes
        host = HostChecks(
            config=self._config,
            identity=self._identity,
            workspace=ctx.workspace,
            after_stop=ctx.workspace_after_stop,
            probes=f"cycles/{ctx.cycle}/health/probe-{rank}-",
            folders=usual_folders(ctx.scratch, settings.compile.cache_root(ctx.workspace.root), ctx.workspace),
            env=os.environ,
            node_rank=rank,
            num_nodes=num_nodes,
            on_neuron=self._on_neuron,
        )
        more = {"code": ctx.code_version, "settings": ctx.settings_hash}
        instance = self._config.expected_instance or self._identity.instance_type
        tools = neuron_checks(
            *(self._config, instance, more), num_nodes=num_nodes, processes=processes, on_neuron=self._on_neuron
        )
        checks = (*host.checks(), *tools)
        return run_checks(checks, self._config, node_rank=rank, host=self._report.host, stop=ctx.stop).results

    def _ranks(self, folder: Path) -> tuple[CheckResult, ...]:
        """Start the ranks of this node with this very command; they leave their results in a folder."""
        ctx, processes = self._ctx, self._settings.launch.processes
        folder.mkdir()
        env = {RANK_REPORTS: str(folder)}
        if self._on_neuron:  # tolerances are those of the types as they are written
            env["NEURON_CC_FLAGS"] = self._settings.compile.flags.model_copy(update={"auto_cast": "none"}).text()
            env["NEURON_COMPILE_CACHE_URL"] = self._settings.compile.cache_root(ctx.workspace.root)
        with temporary_environment(env):
            launch([*(ctx.words or (NAME,)), "--cycle", ctx.cycle], processes, ctx.stop)
        ctx.stop.raise_if_set("checking the ranks of this node")
        first = ctx.world.node_rank * processes
        return results_of(folder, range(first, first + processes))


def _result(ctx: StageContext, reports: Reports, started: datetime) -> StageResult:
    figures: dict[str, Figure] = {
        "nodes": len(reports),
        "checks": sum(len(report.results) for report in reports),
        "warnings": sum(result.verdict is Verdict.WARN for report in reports for result in report.results),
    }
    outputs = {f"node_{report.node_rank}": report_key(ctx.cycle, report) for report in reports}
    return ctx.finish(NAME, started, inputs={}, outputs=outputs, figures=figures)
