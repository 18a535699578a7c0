"""The compile stage, which compiles all graphs of a cycle ahead of time and stores a manifest of them."""

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pipeline.backends import Backend, is_lazy_host, lazy_device_name, trial_backend
from pipeline.compile.hlo import HOST_READ, Finding, lint, lint_counters
from pipeline.compile.identity import source_digest
from pipeline.compile.manifest import GraphManifest, GraphPosition, Recorder, load_traced, store_manifest
from pipeline.compile.neuron import SCORING, compile_on_neuron, drives_tool
from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import ConfigError
from pipeline.core.format import format_duration
from pipeline.core.progress import no_display, use_display
from pipeline.io import atomic
from pipeline.parallel.process_group import ProcessGroup, open_ranks
from pipeline.parallel.world import TRACE_FILE, World
from pipeline.settings import Settings
from pipeline.stages.inputs import Shapes, shapes_of
from pipeline.teach.teacher import CheckpointTeacher, find_teacher, open_teacher
from pipeline.telemetry.events import EventName

NAME = "compile"
TEACHER = "teacher"
"""Value of SCORING for the graphs of the teacher."""


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Compile all graphs of this cycle, unless this has already been done. Raises TrnpipeError."""
    started = datetime.now(UTC)
    shapes, teacher = shapes_of(settings, ctx, ctx.console.warn), None
    ref = find_teacher(settings, ctx)
    if ref is not None and ref.width:  # the few graphs of a cross-encoder are compiled on demand
        opened = open_teacher(ref, shapes.buckets, settings, ctx)
        if isinstance(opened, CheckpointTeacher):
            teacher = opened
    if drives_tool(settings.compile, settings.backend, os.environ):
        return _drive(settings, ctx, shapes, teacher, started)
    return _trace(settings, ctx, shapes, teacher, started)


def _drive(
    settings: Settings, ctx: StageContext, shapes: Shapes, teacher: CheckpointTeacher | None, started: datetime
) -> StageResult:
    """Compile the graphs with the Neuron compile tool.

    The tool runs the trial in processes that need exclusive access to the device, so this process never opens it.
    """
    ranks = World(world_size=settings.launch.processes * ctx.world.world_size)
    device = lazy_device_name(os.environ)
    plan = shapes.plan(settings, ranks, device)
    counts = settings.compile.scoring_ranks
    scoring = {(count, "1"): shapes.scoring_plan(settings, count, device) for count in counts}
    if teacher is not None:
        for count in counts or (settings.launch.processes,):
            scoring[count, TEACHER] = teacher.graph_plan(device, count)
    other = {key: part for key, part in scoring.items() if not part.items() <= plan.items()}
    manifests, existed = compile_on_neuron(settings, ctx, plan, other)
    if not manifests:
        return _result(ctx, GraphManifest(plan=dict(plan), graphs=()), started)
    manifest, *others = manifests
    if existed:
        return _already_done(ctx, manifest, started)
    for other_manifest in others:  # store these before the result, which marks the stage as complete
        store_manifest(ctx.workspace, other_manifest)
    return _publish(ctx, manifest, started)


def _trace(
    settings: Settings, ctx: StageContext, shapes: Shapes, teacher: CheckpointTeacher | None, started: datetime
) -> StageResult:
    """Run the trial in this process, which compiles each new graph as soon as it is needed.

    On XLA:CPU, the graphs are only traced. A custom module is executed nevertheless, because it may read values.
    """
    name = settings.backend if settings.model.factory else trial_backend(settings.backend, os.environ)
    with open_ranks(name, ctx.world, timeout_s=settings.train.collective_timeout_s) as (
        process_group,
        backend,
    ):
        trace_file, is_scoring = os.environ.get(TRACE_FILE), SCORING in os.environ
        device, traces = backend.device_name(), backend.is_lazy or backend.compiles_steps
        is_teacher = os.environ.get(SCORING) == TEACHER
        if is_teacher and teacher is not None:
            plan = teacher.graph_plan(device, ctx.world.world_size)
        elif is_scoring:
            plan = shapes.scoring_plan(settings, ctx.world.world_size, device)
        else:
            plan = shapes.plan(settings, ctx.world, device)
        code = source_digest(settings.model.factory)
        existing = None if trace_file else load_traced(ctx.workspace, plan, code)
        recorder = Recorder(backend, plan)
        if traces and is_teacher and teacher is not None:
            _embed(teacher, ctx, backend, process_group, recorder)
        elif traces and existing is None:
            trial = shapes.trial(settings, backend, process_group, recorder, ctx.stop, ctx.console)
            if not trace_file:
                recorder.on_graph = _progress(ctx, trial.num_graphs, started)
            with use_display(no_display):  # do not show the progress of scoring, which is only part of the trial
                trial.score() if is_scoring else trial.run()
        if teacher is not None and traces and not trace_file:
            _add_teacher(teacher, ctx, backend, process_group, code)
    if existing is not None:
        return _already_done(ctx, existing, started)
    manifest = GraphManifest(plan=dict(plan), graphs=tuple(recorder.graphs.values()), code=code)
    if not ctx.world.is_main:
        return _result(ctx, manifest, started)
    for graph in manifest.graphs:
        shape = f"{graph.batch_size} x {graph.bucket}" if graph.bucket else "-"
        size = f"{graph.num_instructions:>6,} operations  {graph.hlo_bytes / 1e6:6.2f} MB"
        size = size if graph.hlo_bytes else f"{graph.compiles:>6} programs"
        ctx.console.info(f"  {graph.phase:<16} {shape:<12} {size}  {graph.compile_s:6.1f} s  {graph.key[:12]}")
    for position in recorder.extra_compiles:
        ctx.console.warn(f"more than one graph was compiled at {position}")
    findings = (*lint(*recorder.texts.values()), *lint_counters(backend.host_operators()))
    for finding in findings:
        ctx.console.warn(str(finding))
    if backend.is_lazy and settings.model.factory is not None:
        _check_factory(settings.model.factory, findings)
    if trace_file:
        atomic.write_bytes_atomic(Path(trace_file), manifest.model_dump_json().encode())
        return _result(ctx, manifest, started)
    return _publish(ctx, manifest, started)


def _embed(
    teacher: CheckpointTeacher, ctx: StageContext, backend: Backend, process_group: ProcessGroup, recorder: Recorder
) -> None:
    shapes = Shapes(teacher.inputs, ())
    shapes.trial(teacher.settings, backend, process_group, recorder, ctx.stop, ctx.console).embed_dummies()


def _add_teacher(
    teacher: CheckpointTeacher, ctx: StageContext, backend: Backend, process_group: ProcessGroup, code: str
) -> None:
    """Compile the graphs of the teacher, unless this has already been done, and store a manifest of them."""
    plan = teacher.graph_plan(backend.device_name(), ctx.world.world_size)
    if load_traced(ctx.workspace, plan, code) is not None:
        return
    recorder = Recorder(backend, plan)
    with use_display(no_display):
        _embed(teacher, ctx, backend, process_group, recorder)
    ctx.console.info(f"compile: {len(recorder.graphs)} graphs of the teacher")
    if ctx.world.is_main:
        graphs = tuple(recorder.graphs.values())
        store_manifest(ctx.workspace, GraphManifest(plan=dict(plan), graphs=graphs, code=code))


def _progress(ctx: StageContext, expected: int, started: datetime) -> Callable[[int, GraphPosition], None]:
    """Return a callback that logs each graph before it is compiled, because compiling it may take minutes."""

    def met(number: int, position: GraphPosition) -> None:
        total = f" of about {expected}" if number <= expected else ""
        seconds = (datetime.now(UTC) - started).total_seconds()
        ctx.console.info(f"compile: graph {number}{total}, {position} | {format_duration(seconds)} so far")

    return met


def _check_factory(factory: str, findings: Sequence[Finding]) -> None:
    """Verify that a custom module is suitable for ahead-of-time compilation.

    Raises ConfigError if the compiler would reject the module, or if its graphs depend on tensor values.
    """
    errors = [finding for finding in findings if finding.severity == "error" or finding.code == HOST_READ]
    if errors:
        raise ConfigError(
            f"the graphs of model.factory {factory} are not valid: {errors[0].code}, {errors[0].message}",
            expected="a module with static shapes that never reads a tensor value on the host",
            next_command=f"{errors[0].remedy}; trnpipe doctor --hlo shows the source lines",
        )


def _already_done(ctx: StageContext, manifest: GraphManifest, started: datetime) -> StageResult:
    ctx.console.info(f"compile: already done, {len(manifest.graphs)} graphs, manifest {manifest.plan_id}")
    result = _result(ctx, manifest, started)
    if ctx.world.is_main and ctx.earlier(NAME) is None:  # an earlier cycle compiled the graphs
        store_result(ctx.workspace, result)
    return result.model_copy(update={"status": "already_done"})


def _publish(ctx: StageContext, manifest: GraphManifest, started: datetime) -> StageResult:
    """Store the manifest, followed by the result. Only called on rank 0."""
    result = _result(ctx, manifest, started)
    is_host = is_lazy_host(str(manifest.plan["device"])) and not manifest.compile_s
    how = "none is compiled: XLA:CPU cannot keep programs" if is_host else f"{manifest.compile_s:.1f} s compiling"
    ctx.console.info(
        f"compile: {len(manifest.graphs)} graphs, {how}, done in "
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
        NAME, started, inputs={"plan": manifest.plan_id}, outputs={"manifest": manifest.key}, figures=figures
    )
