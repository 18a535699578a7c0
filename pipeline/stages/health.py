"""The health stage: host, tools, cores and collectives of every node, and one verdict for the gang.

Each node runs one process, which checks the host and then starts the ranks for the rest: a rank that hangs or dies
takes nobody with it. Nodes meet after each part, so that no rank waits for a node that was found unfit before.
"""

import math
import os
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pipeline.backends import on_neuron
from pipeline.context import Figure, StageContext, StageResult, nodes_of, store_result
from pipeline.core.errors import EXIT_OK, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.health.across_nodes import LIMIT_S as ACROSS_LIMIT_S
from pipeline.health.across_nodes import across_check, address_check
from pipeline.health.check import Check, run_checks
from pipeline.health.gang import meet
from pipeline.health.host import HostChecks, read_identity, usual_places, usual_ports
from pipeline.health.instances import NeuronInstance, neuron_instance
from pipeline.health.limits import ranks_limit_s
from pipeline.health.ranks import results_of, with_slow_ranks
from pipeline.health.report import report_key, show, store_report
from pipeline.health.tolerance import with_shared_errors
from pipeline.health.tools import tool_checks, tools_limit_s
from pipeline.health.verdict import CheckResult, NodeReport, Verdict, gang_error
from pipeline.health.versions import versions_check
from pipeline.parallel.launch import launch
from pipeline.parallel.nodes import Nodes
from pipeline.parallel.world import RANK_REPORTS
from pipeline.proc.cleanup import exported, guarded
from pipeline.settings import Settings

NAME = "health"

Results = tuple[CheckResult, ...]
Reports = tuple[NodeReport, ...]


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Check this node and the gang; done anew each time. Raises what gang_error says of an unfit gang, Preempted."""
    started = datetime.now(UTC)
    if folder := os.environ.get(RANK_REPORTS):
        return _result(ctx, [_be_a_rank(settings, ctx, Path(folder))], started)
    nodes = nodes_of(ctx, "health/nodes", timeout_s=math.inf)
    with nodes.telling(), guarded() as temporary:
        reports = _Node(settings, ctx, nodes, temporary).check()
    result = _result(ctx, reports, started)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result


def _be_a_rank(settings: Settings, ctx: StageContext, folder: Path) -> NodeReport:
    """Ends the process where something is wrong: a thread may hang, and gloo aborts when a peer is gone."""
    from pipeline.health.ranks import RankChecks, report_rank  # torch, which the node's own process does without

    seed = zlib.crc32(ctx.cycle.encode())  # of all nodes; another one in each cycle
    checks = RankChecks(settings.backend, ctx.world, settings.health, os.environ, seed)
    report = report_rank(checks, folder, ctx.stop)
    if report.verdict >= Verdict.RETRY:
        sys.stdout.flush()
        os._exit(EXIT_OK)  # the report says the rest
    return report


class _Node:
    """One node of the job, one part after the other."""

    def __init__(self, settings: Settings, ctx: StageContext, nodes: Nodes, temporary: Path) -> None:
        self._settings, self._ctx, self._nodes, self._temporary = settings, ctx, nodes, temporary
        self._config = settings.health
        self._on_neuron = on_neuron(settings.backend, os.environ)
        self._identity = read_identity(os.environ)
        self._report = NodeReport(ctx.world.node_rank, self._identity.host, ())

    def check(self) -> Reports:
        """Reports of all nodes, shown and stored. Raises gang_error, where the other nodes hear of it."""
        parts: list[tuple[str, Callable[[Reports], Results], float]] = [
            ("hosts", self._host, tools_limit_s(self._tools, self._config))
        ]
        if self._across_nodes:
            parts.append(("nccom-test", self._nccom, ACROSS_LIMIT_S))
        if self._config.wants("cores", "collectives"):
            parts.append(("ranks", self._ranks, self._limit_s))
        reports: Reports = ()
        for name, part, limit_s in parts:
            reports = self._do(name, part, reports, limit_s, is_last=name == parts[-1][0])
        return reports

    def _do(
        self, name: str, part: Callable[[Reports], Results], before: Reports, limit_s: float, *, is_last: bool
    ) -> Reports:
        """One part, `limit_s` at most, and what all nodes say after it."""
        self._report = replace(self._report, results=(*self._report.results, *part(before)))
        self._keep()  # before anything that may wait for others
        reports = meet(self._nodes, name, self._report, self._config.nodes_wait_s + limit_s)
        reports = with_slow_ranks(reports, self._config.slow_ratio)
        num_ranks = self._ctx.world.world_size * self._settings.launch.processes
        reports = with_shared_errors(reports, num_ranks)
        self._report = next((one for one in reports if one.node_rank == self._report.node_rank), self._report)
        self._keep()
        error = gang_error(reports)
        if is_last or error is not None:
            for report in reports:
                show(report, sys.stdout)
        if error is not None:
            raise error
        return reports

    def _keep(self) -> None:
        """Store it. What the host checks say of a workspace that cannot be written says more than the failing write."""
        try:
            store_report(self._ctx.workspace, self._ctx.cycle, self._report)
        except TrnpipeError:
            show(self._report, sys.stdout)
            if (error := gang_error([self._report])) is not None:
                raise error from None
            raise

    def _host(self, before: Reports) -> Results:
        settings, ctx, nodes = self._settings, self._ctx, self._ctx.world.world_size
        host = HostChecks(
            config=self._config,
            identity=self._identity,
            workspace=ctx.workspace,
            after_stop=ctx.workspace_after_stop,
            probes=f"cycles/{ctx.cycle}/health/probe-{ctx.world.node_rank}-",
            places=usual_places(ctx.scratch, settings.compile.cache_root(ctx.workspace.root), ctx.workspace),
            ports=usual_ports(
                os.environ,
                node_rank=ctx.world.node_rank,
                num_nodes=nodes,
                on_neuron=self._on_neuron,
                nccom=self._across_nodes,
            ),
            on_neuron=self._on_neuron,
        )
        more = {"code": ctx.code_version, "settings": ctx.settings_hash}
        if self._on_neuron:
            more["compiler flags"] = settings.compile.flags.text()
        address = (address_check(),) if self._across_nodes else ()
        return self._run(versions_check(more), *host.checks(), *self._tools, *address)

    def _nccom(self, before: Reports) -> Results:
        """By the main node; what it finds reaches the others in its report."""
        if self._instance is None or not self._ctx.world.is_main:
            return ()
        processes = self._settings.launch.processes
        return self._run(across_check(self._instance, self._config, before, processes=processes))

    def _ranks(self, before: Reports) -> Results:
        """Start the ranks of this node with this very command; they leave their results in a folder."""
        ctx, processes = self._ctx, self._settings.launch.processes
        folder = self._temporary / "ranks"
        folder.mkdir()
        env = {RANK_REPORTS: str(folder)}
        if self._on_neuron:  # tolerances are those of the types as they are written
            env["NEURON_CC_FLAGS"] = self._settings.compile.flags.model_copy(update={"auto_cast": "none"}).text()
            env["NEURON_COMPILE_CACHE_URL"] = self._settings.compile.cache_root(ctx.workspace.root)
        with exported(env), _limited(ctx.stop, self._limit_s) as stop:
            launch([*(ctx.words or (NAME,)), "--cycle", ctx.cycle], processes, stop)
        ctx.stop.raise_if_set("checking the ranks of this node")
        first = ctx.world.node_rank * processes
        return results_of(folder, range(first, first + processes))

    def _run(self, *checks: Check) -> Results:
        report = run_checks(
            checks, self._config, node_rank=self._report.node_rank, host=self._report.host, stop=self._ctx.stop
        )
        return report.results

    @property
    def _tools(self) -> tuple[Check, ...]:
        return tool_checks(
            self._instance,
            self._config,
            num_nodes=self._ctx.world.world_size,
            processes=self._settings.launch.processes,
            on_neuron=self._on_neuron,
        )

    @property
    def _instance(self) -> NeuronInstance | None:
        """What this machine should be; None where no Neuron tool is expected."""
        expected = self._config.expected_instance or self._identity.instance_type
        return neuron_instance(expected) if self._on_neuron or self._config.expected_instance else None

    @property
    def _across_nodes(self) -> bool:
        wanted = self._config.nccom_across_nodes and self._config.wants("tools")
        return wanted and self._ctx.world.world_size > 1 and self._instance is not None

    @property
    def _limit_s(self) -> float:
        """For all checks of a rank."""
        return ranks_limit_s(self._config, on_neuron=self._on_neuron)


@contextmanager
def _limited(outer: StopSignal, limit_s: float) -> Iterator[StopSignal]:
    """A stop signal that is set with the outer one, and when all ranks together take too long."""
    inner, left = StopSignal(), threading.Event()

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
    return ctx.finish(
        NAME,
        started,
        inputs={},
        outputs={f"node_{report.node_rank}": report_key(ctx.cycle, report) for report in reports},
        figures=figures,
    )
