"""The compile stage: meet every graph a cycle needs before it starts, and write them down in the graph manifest."""

from contextlib import closing
from datetime import UTC, datetime

from pipeline.backends import Backend, open_backend
from pipeline.core.buckets import Bucket
from pipeline.core.errors import DataError
from pipeline.core.events import EventName
from pipeline.core.format import format_duration
from pipeline.data.loader import RankShare
from pipeline.data.token_store import read_token_sets
from pipeline.graphs.hlo import parse
from pipeline.graphs.lint import Finding, lint
from pipeline.graphs.manifest import GraphManifest, load_manifest, store_manifest
from pipeline.graphs.watch import Recorder
from pipeline.model.config import InputSpec
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import check_world
from pipeline.settings import Settings
from pipeline.stages.context import StageContext
from pipeline.stages.result import Figure, StageResult, load_result, store_result
from pipeline.stages.train import token_set_prefixes
from pipeline.train.inputs import spec_of
from pipeline.train.plan import graph_plan
from pipeline.train.share import batch_share
from pipeline.train.trial import Trial

NAME = "compile"


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Compile what this cycle will need, or say that it is done already. Raises every error of the family."""
    started = datetime.now(UTC)
    prepared = load_result(ctx.workspace, ctx.cycle, "prepare")
    if prepared is None:
        raise DataError(
            f"cycle {ctx.cycle} has no prepared data",
            expected="its vocabulary, classes and features, which decide shapes",
            next_command=f"trnpipe prepare --cycle {ctx.cycle}, with the same settings",
        )
    info = read_token_sets(ctx.workspace, token_set_prefixes(prepared))[0].info
    spec, buckets = spec_of(info), tuple(Bucket.parse(text) for text in info.buckets)
    share = batch_share(settings.train, ctx.world)
    backend = open_backend(settings.backend, ctx.world.local_rank)
    check_world(
        ctx.world,
        runtime_world_size=backend.runtime_world_size(),
        reduces_in_graph=backend.reduces_in_graph,
        device=backend.name,
    )
    plan = graph_plan(
        settings.train,
        settings.model,
        settings.compile,
        spec,
        buckets,
        device=backend.device_name(),
        world_size=ctx.world.world_size,
        accumulation=share.accumulation,
        figure_rows=settings.log.every_steps,
    )
    known = load_manifest(ctx.workspace, plan)
    if known is not None:
        ctx.console.info(f"compile: done already, {len(known.graphs)} graphs, manifest {known.plan_id}")
        return _result(ctx, known, started).model_copy(update={"status": "already_done"})
    recorder = Recorder(backend, plan)
    if backend.is_lazy:
        _try_out(settings, ctx, spec, buckets, share, backend, recorder)
    manifest = GraphManifest(plan=plan, graphs=tuple(recorder.graphs.values()))
    result = _result(ctx, manifest, started)
    if not ctx.world.is_main:
        return result
    _report(ctx, manifest, recorder, (datetime.now(UTC) - started).total_seconds())
    store_manifest(ctx.workspace, manifest)
    return store_result(ctx.workspace, result)


def _try_out(
    settings: Settings,
    ctx: StageContext,
    spec: InputSpec,
    buckets: tuple[Bucket, ...],
    share: RankShare,
    backend: Backend,
    recorder: Recorder,
) -> None:
    with closing(
        Gang(ctx.world, timeout_s=settings.train.collective_timeout_s, device_backend=backend.process_group)
    ) as gang:
        Trial(
            train=settings.train,
            model=settings.model,
            spec=spec,
            buckets=buckets,
            share=share,
            backend=backend,
            gang=gang,
            stop=ctx.stop,
            console=ctx.console,
            watch=recorder,
            figure_rows=settings.log.every_steps,
        ).run()


def _report(ctx: StageContext, manifest: GraphManifest, recorder: Recorder, seconds: float) -> None:
    """One line a graph, what the lint found, and the sum."""
    for graph in manifest.graphs:
        shape = f"{graph.batch_size} x {graph.bucket}" if graph.bucket else "-"
        ctx.console.info(
            f"  {graph.phase:<16} {shape:<12} {graph.num_instructions:>6,} operations  "
            f"{graph.hlo_bytes / 1e6:6.2f} MB  {graph.compile_s:6.1f} s  {graph.key[:12]}"
        )
    for place in recorder.outside:
        ctx.console.warn(f"more than one graph was compiled at {place}")
    findings = _findings(recorder)
    for finding in findings:
        ctx.console.warn(str(finding))
    total_s = sum(graph.compile_s for graph in manifest.graphs)
    ctx.console.info(
        f"compile: {len(manifest.graphs)} graphs, {total_s:.1f} s compiling, {len(findings)} findings of the lint, "
        f"done in {format_duration(seconds)}, manifest {manifest.plan_id}"
    )
    ctx.events.emit(EventName.GRAPH_COMPILED, step=0, new=len(manifest.graphs), total=len(manifest.graphs))


def _findings(recorder: Recorder) -> list[Finding]:
    """What neuronx-cc would refuse or get wrong, each once."""
    found = {
        (finding.code, finding.message): finding for text in recorder.texts.values() for finding in lint(parse(text))
    }
    return list(found.values())


def _result(ctx: StageContext, manifest: GraphManifest, started: datetime) -> StageResult:
    figures: dict[str, Figure] = {
        "graphs": len(manifest.graphs),
        "compile_s": round(sum(graph.compile_s for graph in manifest.graphs), 3),
    }
    return StageResult(
        stage=NAME,
        cycle=ctx.cycle,
        status="done",
        inputs={"plan": manifest.plan_id},
        outputs={"manifest": f"compile-cache/graphs/{manifest.plan_id}.json"},
        figures=figures,
        settings_hash=ctx.settings_hash,
        code_version=ctx.code_version,
        started=started,
        finished=datetime.now(UTC),
    )
