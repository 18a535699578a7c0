"""The health stage: check host, tools, cores and collectives of every node, with one verdict for the job.

Each node runs one process, which checks the host and then starts its ranks for the other checks, so a rank that hangs
or dies does not affect it. Nodes exchange reports after each part, so no rank waits for an unfit node.
"""

import math
import os
import sys
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.backends import on_neuron
from pipeline.context import Figure, StageContext, StageResult, node_group, store_result
from pipeline.core.errors import EXIT_OK
from pipeline.health.check import (
    CheckResult,
    HealthVerdict,
    NodeReport,
    add_slow_ranks,
    exchange_reports,
    job_error,
    merge_rank_results,
    print_report,
    report_key,
    run_checks,
    store_local_report,
)
from pipeline.health.node import HostChecks, local_folders, neuron_checks, read_identity
from pipeline.parallel.launch import launch
from pipeline.parallel.world import RANK_REPORTS, Nodes
from pipeline.proc.tool import guarded_temp_folder, temporary_environment
from pipeline.settings import Settings

NAME = "health"

Reports = tuple[NodeReport, ...]


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Check this node and the job, without reusing earlier results. Raises `job_error` if unfit, Preempted."""
    started = datetime.now(UTC)
    if folder := os.environ.get(RANK_REPORTS):
        from pipeline.health.device import rank_checks, report_rank  # imports torch, which only the ranks need

        seed = zlib.crc32(ctx.cycle.encode())  # the same on all nodes, different in each cycle
        checks = rank_checks(settings.backend, ctx.world, settings.health, os.environ, seed)
        report = report_rank(checks, settings.health, ctx.world.rank, Path(folder), ctx.stop)
        if report.verdict >= HealthVerdict.RETRY:  # a thread may hang, and gloo aborts when another rank has exited
            sys.stdout.flush()
            os._exit(EXIT_OK)  # the verdict is in the report
        return _result(ctx, (report,), started)
    nodes = node_group(ctx, "health/nodes", timeout_s=math.inf)
    with nodes.report_failure(), guarded_temp_folder() as temporary:
        reports = _check(settings, ctx, nodes, temporary / "ranks")
    result = _result(ctx, reports, started)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result


def _check(settings: Settings, ctx: StageContext, nodes: Nodes, folder: Path) -> Reports:
    """Check the host, then its ranks, which write results to `folder`, and exchange reports after each part.

    Shows, stores and returns the reports of all nodes. Raises `job_error` if the job is unfit, on all nodes.
    """
    config, identity, node_rank, num_nodes = settings.health, read_identity(), ctx.world.node_rank, ctx.world.world_size
    is_neuron, processes = on_neuron(settings.backend, os.environ), settings.launch.processes
    wait_s = config.stage_limit_s(on_neuron=is_neuron, num_nodes=num_nodes, processes=processes)
    report = NodeReport(node_rank, identity.host, ())

    def exchange(part: str, results: tuple[CheckResult, ...], *, is_last: bool) -> Reports:
        nonlocal report
        report = replace(report, results=(*report.results, *results))
        store_local_report(ctx.workspace, ctx.cycle, report)  # before waiting for other nodes
        reports = add_slow_ranks(exchange_reports(nodes, part, report, wait_s))
        report = next((each for each in reports if each.node_rank == node_rank), report)
        store_local_report(ctx.workspace, ctx.cycle, report)
        error = job_error(reports)
        for each in reports if error or is_last else ():
            print_report(each, sys.stdout)
        if error is not None:
            raise error
        return reports

    host = HostChecks(
        config=config,
        identity=identity,
        workspace=ctx.workspace,
        after_stop=ctx.workspace_after_stop,
        probes=f"cycles/{ctx.cycle}/health/probe-{node_rank}-",
        folders=local_folders(ctx.scratch, settings.compile.cache_root(ctx.workspace.root), ctx.workspace),
        env=os.environ,
        node_rank=node_rank,
        num_nodes=num_nodes,
        on_neuron=is_neuron,
    )
    instance = config.expected_instance or identity.instance_type
    versions = {"code": ctx.code_version, "settings": ctx.settings_hash}
    tools = neuron_checks(config, instance, versions, num_nodes=num_nodes, processes=processes, on_neuron=is_neuron)
    checks = (*host.checks(), *tools)
    host_report = run_checks(checks, config, node_rank=node_rank, host=report.host, stop=ctx.stop)
    with_ranks = config.includes("cores", "collectives")
    reports = exchange("hosts", host_report.results, is_last=not with_ranks)
    if not with_ranks:
        return reports
    folder.mkdir()
    env = {RANK_REPORTS: str(folder)}
    if is_neuron:  # the tolerances assume the written data types, so disable auto-cast
        env["NEURON_CC_FLAGS"] = settings.compile.flags.model_copy(update={"auto_cast": "none"}).text()
        env["NEURON_COMPILE_CACHE_URL"] = settings.compile.cache_root(ctx.workspace.root)
    with temporary_environment(env):
        launch([*(ctx.command_line or (NAME,)), "--cycle", ctx.cycle], processes, ctx.stop)
    ctx.stop.raise_if_set("checking the ranks of this node")
    first = node_rank * processes
    return exchange("ranks", merge_rank_results(folder, range(first, first + processes)), is_last=True)


def _result(ctx: StageContext, reports: Reports, started: datetime) -> StageResult:
    figures: dict[str, Figure] = {
        "nodes": len(reports),
        "checks": sum(len(report.results) for report in reports),
        "warnings": sum(result.verdict is HealthVerdict.WARN for report in reports for result in report.results),
    }
    outputs = {f"node_{report.node_rank}": report_key(ctx.cycle, report) for report in reports}
    return ctx.finish(NAME, started, inputs={}, outputs=outputs, figures=figures)
