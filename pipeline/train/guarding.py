"""The guard of a run: the manifest of exactly this way of running, or what is missing."""

from collections.abc import Sequence

from pipeline.compile.config import CompileConfig
from pipeline.compile.manifest import GraphManifest, Plan, load_manifest, load_manifests, plan_differences
from pipeline.compile.watch import COMPILE, Counters, GraphWatch, Guard, NoWatch
from pipeline.core.errors import ConfigError
from pipeline.io.storage import Storage
from pipeline.telemetry.console import Console
from pipeline.train.plan import QUICK_COMPILER


def open_guard(
    workspace: Storage, plan: Plan, counters: Counters, config: CompileConfig, console: Console
) -> GraphWatch:
    """Watch a run against its manifest. Raises ConfigError before anything is traced when it was never compiled.

    A workspace in which nothing was ever compiled ahead of time is told so once and not watched.
    """
    manifest = load_manifest(workspace, plan)
    if manifest is not None:
        return _guard(manifest, counters, config, console)
    return _unguarded(workspace, plan, load_manifests(workspace), config, console)


def open_part_guard(
    workspace: Storage, plan: Plan, counters: Counters, config: CompileConfig, console: Console
) -> GraphWatch:
    """The same for evaluation and embedding, whose part of the plan several ways of training may share.

    On devices they share them at one number of ranks. They may run on CPU machines while training runs on Trainium:
    XLA:CPU compiles in seconds, so it is bound only by what was compiled for it, of this very model.
    """
    manifests = load_manifests(workspace)
    for manifest in manifests:
        if plan.items() <= manifest.plan.items():
            return _guard(manifest, counters, config, console)
    if plan["device"] == QUICK_COMPILER:
        names = [name for name in plan if name in ("device", "data.vocab_size") or name.startswith("model.")]
        manifests = [one for one in manifests if all(one.plan.get(name) == plan[name] for name in names)]
    parts = [GraphManifest(plan={name: manifest.plan.get(name) for name in plan}, graphs=()) for manifest in manifests]
    return _unguarded(workspace, plan, parts, config, console)


def _guard(manifest: GraphManifest, counters: Counters, config: CompileConfig, console: Console) -> GraphWatch:
    console.info(f"graphs: {len(manifest.graphs)} compiled ahead of time, manifest {manifest.plan_id[:12]}")
    return Guard(counters, manifest, config.on_unknown_graph, console.warn)


def _unguarded(
    workspace: Storage, plan: Plan, others: Sequence[GraphManifest], config: CompileConfig, console: Console
) -> GraphWatch:
    if not others:
        console.info("graphs: none compiled ahead of time, so they are compiled as they come (trnpipe compile)")
        return NoWatch()
    seen = f"no graph of this run was compiled ahead of time: {'; '.join(plan_differences(plan, others))}"
    if config.on_unknown_graph == "error":
        raise ConfigError(
            seen,
            expected=f"a graph manifest below {workspace.uri('compile-cache/graphs')}",
            next_command=f"{COMPILE}, or --compile.on-unknown-graph warn",
        )
    console.warn(f"{seen}; they are compiled as they come")
    return NoWatch()
