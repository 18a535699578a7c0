"""The health stage, which checks the host, tools, cores and collectives of all nodes of a job.

Each node runs one process, which checks the host and then starts ranks that run the other checks. This way, the process
is not affected if a rank hangs or dies. Nodes exchange reports after each part and agree on a verdict, so that no rank
waits for a node that is unfit.
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
    """Check this node and agree on a verdict with the others. Results of earlier attempts are never used.

    Raises `job_error` if the job is unfit to run, and Preempted on a stop signal.
    """
    started = datetime.now(UTC)
    if folder := os.environ.get(RANK_REPORTS):
        from pipeline.health.device import rank_checks, report_rank  # imports torch, which is only needed by ranks

        seed = zlib.crc32(ctx.cycle.encode())  # the same on all nodes, but different in each cycle
        checks = rank_checks(settings.backend, ctx.world, settings.health, os.environ, seed)
        report = report_rank(checks, settings.health, ctx.world.rank, Path(folder), ctx.stop)
        if report.verdict >= HealthVerdict.RETRY:
            # Exit immediately, because a thread may hang, and gloo aborts the process if another rank has exited. The
            # exit code does not matter, because the node reads the verdict from the report.
            sys.stdout.flush()
            os._exit(EXIT_OK)
        return _result(ctx, (report,), started)
    nodes = node_group(ctx, "health/nodes", timeout_s=math.inf)
    with nodes.report_failure(), guarded_temp_folder() as temporary:
        reports = _check(settings, ctx, nodes, temporary / "ranks")
    result = _result(ctx, reports, started)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result


def _check(settings: Settings, ctx: StageContext, nodes: Nodes, folder: Path) -> Reports:
    """Check the host, start ranks that run the other checks, and exchange reports after each part.

    The ranks write their results to `folder`. Prints, stores and returns the reports of all nodes. If the job is unfit
    to run, raises `job_error` on all nodes.
    """
    config, identity, node_rank, num_nodes = settings.health, read_identity(), ctx.world.node_rank, ctx.world.world_size
    is_neuron, processes = on_neuron(settings.backend, os.environ), settings.launch.processes
    wait_s = config.stage_limit_s(on_neuron=is_neuron, num_nodes=num_nodes, processes=processes)
    report = NodeReport(node_rank, identity.host, ())

    def exchange(part: str, results: tuple[CheckResult, ...], *, is_last: bool) -> Reports:
        nonlocal report
        report = replace(report, results=(*report.results, *results))
        store_local_report(ctx.workspace, ctx.cycle, report)  # in case that waiting for the other nodes fails
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
    if is_neuron:  # disable auto-cast, because the tolerances assume that computations use the data types we specify
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
