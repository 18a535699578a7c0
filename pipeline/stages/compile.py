"""The compile stage: meet every graph a cycle needs before it starts, and write them down in the graph manifest."""

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pipeline.backends import lazy_device_name
from pipeline.compile.hlo import HOST_READ, Finding, lint, lint_counters
from pipeline.compile.manifest import GraphManifest, GraphPosition, Recorder, load_manifest, store_manifest
from pipeline.compile.neuron import SCORING, compile_on_neuron, drives_tool
from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_duration
from pipeline.core.progress import no_display, use_display
from pipeline.io import atomic
from pipeline.parallel.process_group import open_ranks
from pipeline.parallel.world import TRACE_FILE, World
from pipeline.settings import Settings
from pipeline.stages.inputs import Shapes, shapes_of
from pipeline.telemetry.events import EventName

NAME = "compile"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Compile what this cycle will need, or say that it is done already. Raises TrnpipeError."""
    started = datetime.now(UTC)
    shapes = shapes_of(settings, ctx, ctx.console.warn)
    if drives_tool(settings.compile, settings.backend, os.environ):
        return _drive(settings, ctx, shapes, started)
    return _trace(settings, ctx, shapes, started)


def _drive(settings: Settings, ctx: StageContext, shapes: Shapes, started: datetime) -> StageResult:
    """Let Neuron's tool run the trial. The device is left to it: this process never opens one."""
    ranks = World(world_size=settings.launch.processes * ctx.world.world_size)
    device = lazy_device_name(os.environ)
    plan = shapes.plan(settings, ranks, device)
    scoring = {ranks: shapes.scoring_plan(settings, ranks, device) for ranks in settings.compile.scoring_ranks}
    other = {ranks: part for ranks, part in scoring.items() if not part.items() <= plan.items()}
    manifests, was_there = compile_on_neuron(settings, ctx, plan, other)
    if not manifests:
        return _result(ctx, GraphManifest(plan=dict(plan), graphs=()), started)
    manifest, *others = manifests
    if was_there:
        return _already(ctx, manifest, started)
    for one in others:  # before the result, which says that all is there
        store_manifest(ctx.workspace, one)
    return _publish(ctx, manifest, started)


def _trace(settings: Settings, ctx: StageContext, shapes: Shapes, started: datetime) -> StageResult:
    """Run the trial in this rank; what it meets is compiled at once."""
    with open_ranks(settings.backend, ctx.world, timeout_s=settings.train.collective_timeout_s) as (
        process_group,
        backend,
    ):
        driven, is_scoring = os.environ.get(TRACE_FILE), SCORING in os.environ
        device = backend.device_name()
        if is_scoring:
            plan = shapes.scoring_plan(settings, ctx.world.world_size, device)
        else:
            plan = shapes.plan(settings, ctx.world, device)
        known = None if driven else load_manifest(ctx.workspace, plan)
        if known is not None:
            return _already(ctx, known, started)
        recorder = Recorder(backend, plan)
        if backend.is_lazy or backend.compiles_steps:
            trial = shapes.trial(settings, backend, process_group, recorder, ctx.stop, ctx.console)
            if not driven:
                recorder.on_graph = _progress(ctx, trial.num_graphs, started)
            with use_display(no_display):  # what a trial scores is nobody's holdout
                trial.score() if is_scoring else trial.run()
    manifest = GraphManifest(plan=dict(plan), graphs=tuple(recorder.graphs.values()))
    if not ctx.world.is_main:
        return _result(ctx, manifest, started)
    for graph in manifest.graphs:
        shape = f"{graph.batch_size} x {graph.bucket}" if graph.bucket else "-"
        size = f"{graph.num_instructions:>6,} operations  {graph.hlo_bytes / 1e6:6.2f} MB"
        what = size if graph.hlo_bytes else f"{graph.compiles:>6} programs"
        ctx.console.info(f"  {graph.phase:<16} {shape:<12} {what}  {graph.compile_s:6.1f} s  {graph.key[:12]}")
    for place in recorder.extra_compiles:
        ctx.console.warn(f"more than one graph was compiled at {place}")
    findings = (*lint(*recorder.texts.values()), *lint_counters(backend.host_operators()))
    for finding in findings:
        ctx.console.warn(str(finding))
    if backend.is_lazy and settings.model.factory is not None:
        _check_factory(settings.model.factory, findings)
    if driven:
        atomic.write_bytes_atomic(Path(driven), manifest.model_dump_json().encode())
        return _result(ctx, manifest, started)
    return _publish(ctx, manifest, started)


def _progress(ctx: StageContext, expected: int, started: datetime) -> Callable[[int, GraphPosition], None]:
    """A line before each graph is compiled, which may take minutes: which one it is, of how many, and since when."""

    def met(number: int, place: GraphPosition) -> None:
        of_all = f" of about {expected}" if number <= expected else ""
        seconds = (datetime.now(UTC) - started).total_seconds()
        ctx.console.info(f"compile: graph {number}{of_all}, {place} | {format_duration(seconds)} so far")

    return met


def _check_factory(factory: str, findings: Sequence[Finding]) -> None:
    """Raises ConfigError for a module that a compiler refuses, or whose graphs depend on values."""
    found = [one for one in findings if one.severity == "error" or one.code == HOST_READ]
    if found:
        raise ConfigError(
            f"the graphs of model.factory {factory} do not pass: {found[0].code}, {found[0].message}",
            expected="a module of static shapes that never looks at a value",
            next_command=f"{found[0].remedy}; trnpipe doctor --hlo names the places",
        )


def _already(ctx: StageContext, known: GraphManifest, started: datetime) -> StageResult:
    ctx.console.info(f"compile: done already, {len(known.graphs)} graphs, manifest {known.plan_id}")
    result = _result(ctx, known, started)
    if ctx.world.is_main and ctx.earlier(NAME) is None:  # an earlier cycle's graphs
        store_result(ctx.workspace, result)
    return result.model_copy(update={"status": "already_done"})


def _publish(ctx: StageContext, manifest: GraphManifest, started: datetime) -> StageResult:
    """The end of the stage on rank 0: the manifest, then the result."""
    result = _result(ctx, manifest, started)
    ctx.console.info(
        f"compile: {len(manifest.graphs)} graphs, {manifest.compile_s:.1f} s compiling, done in "
        f"{format_duration((result.finished - started).total_seconds())}, manifest {manifest.plan_id}"
    )
    ctx.events.emit(
        EventName.GRAPH_COMPILED,
        step=0,
        new=len(manifest.graphs),
        total=len(manifest.graphs),
        compile_s=manifest.compile_s,
    )
    store_manifest(ctx.workspace, manifest)
    return store_result(ctx.workspace, result)


def _result(ctx: StageContext, manifest: GraphManifest, started: datetime) -> StageResult:
    figures: dict[str, Figure] = {"graphs": len(manifest.graphs), "compile_s": manifest.compile_s}
    return ctx.finish(
        NAME,
        started,
        inputs={"plan": manifest.plan_id},
        outputs={"manifest": manifest.key},
        figures=figures,
    )
