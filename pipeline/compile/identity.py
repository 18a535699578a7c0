"""Graph plans and guards.

A plan identifies the graphs of a run. A guard verifies that a run only uses graphs that are listed in the manifest of
its plan.
"""

from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import xxhash

import pipeline
from pipeline.backends import is_lazy_host
from pipeline.compile.config import CompileConfig
from pipeline.compile.manifest import (
    COMPILE,
    GraphManifest,
    GraphWatch,
    Guard,
    Plan,
    PlanValue,
    Tracer,
    load_manifest,
    load_manifests,
    plan_differences,
)
from pipeline.core.batch_order import Bucket, RankSlice
from pipeline.core.errors import ConfigError
from pipeline.core.record import with_retired
from pipeline.embed.config import GRAPH_FIELDS, EmbedConfig
from pipeline.io.storage import Storage
from pipeline.model.config import ENCODER_FIELDS, EncoderSize, InputSpec, ModelConfig
from pipeline.settings import Settings
from pipeline.telemetry.console import Console

# Settings that don't affect graphs, because they are passed as inputs or are only used on the host.
_NOT_IN_GRAPHS = {
    "start",
    "teacher",  # see graph_plan
    "replay_share",
    "queries_per_topic",
    "link_queries",
    "repeat_positives",
    "epochs",
    "max_steps",
    "seed",
    "evaluate_every",
    "evaluate_rows",
    "metric",
    "metric_rows",
    "patience",
    "deadline",
    "on_deadline",
    "collective_timeout_s",
    "parallel",  # see graph_plan
}

_SCHEDULE_FIELDS = {"learning_rate", "warmup_fraction", "schedule", "final_fraction"}


def graph_plan(
    settings: Settings,
    spec: InputSpec,
    buckets: Sequence[Bucket],
    share: RankSlice,
    device: str,
    teacher: int | None = None,
) -> dict[str, PlanValue]:
    """Return the plan of a training run, which contains everything that determines its graphs.

    Runs with the same plan have the same graphs. `teacher` is the size of the teacher's vectors (0: it has none, None:
    there is no teacher).
    """
    plan = evaluation_plan(settings, spec, buckets, share.world_size, device)
    parallel = settings.train.parallel
    if parallel.recompute != "none":
        plan["train.parallel.recompute"] = parallel.recompute
    if parallel.shard == "state" and parallel.shard_degree != 1:
        plan["train.parallel.state_shards"] = parallel.shard_degree or share.world_size
    if teacher is not None:
        plan["train.teacher"] = teacher
    return plan | {"accumulation": share.accumulation, "world_size": share.world_size}


def evaluation_plan(
    settings: Settings, spec: InputSpec, buckets: Sequence[Bucket], world_size: int, device: str
) -> dict[str, PlanValue]:
    """Return the part of a training plan that determines the graphs of evaluation.

    This does not include how each step is divided between ranks.
    """
    train, model = settings.train, settings.model
    plan: dict[str, PlanValue] = {}
    for prefix, fields, excluded in (
        ("train", with_retired(train), {*_NOT_IN_GRAPHS, "optimizer", "loss", "guard"}),
        ("train.optimizer", with_retired(train.optimizer), _SCHEDULE_FIELDS),
        ("train.loss", train.loss.used_fields(), ()),
        ("train.guard", with_retired(train.guard), {"patience"}),
    ):
        plan |= {f"{prefix}.{name}": value for name, value in fields.items() if name not in excluded}
    plan |= {f"model.{name}": value for name, value in model.shape().items() if name not in ("preset", "init_from")}
    plan |= embed_plan(model, settings.embed, settings.compile, spec, device, world_size)
    if spec.may_miss:
        plan["data.missing"] = len(spec.missing)
        plan |= {"data.bins": spec.bins} if spec.bins else {}
    return plan | {
        "data.buckets": [bucket.name for bucket in buckets],
        "data.pad_id": spec.pad_id,
        "data.classes": spec.num_classes,
        "data.numeric": len(spec.numeric),
        "data.categorical": list(spec.categorical_ids),
        "log.every_steps": settings.log.every_steps,
    }


def embed_plan(
    model: ModelConfig, embed: EmbedConfig, flags: CompileConfig, spec: InputSpec, device: str, world_size: int
) -> dict[str, PlanValue]:
    """Return the part of a training plan that determines the graphs of embedding.

    This includes the encoder, the vocabulary, shapes, the device, the number of replicas, and the compiler.
    """
    plan: dict[str, PlanValue] = {
        f"model.{name}": value
        for name, value in model.shape().items()
        if name in ENCODER_FIELDS or name in EncoderSize.model_fields
    }
    fields = embed.model_dump(mode="json", include=set(GRAPH_FIELDS))
    plan |= {f"embed.{name}": value for name, value in fields.items()}
    versions: dict[str, str] = {}
    for name in ("torch", "torch-xla", "torch-neuronx", "neuronx-cc"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return plan | {
        "data.vocab_size": spec.vocab_size,
        "device": device,
        # The number of devices that each graph is compiled for, even if it doesn't contain any collectives. This may
        # affect the cache key, because PyTorch/XLA 2.9 passes it to the compiler (PjRtComputationClient::Compile). On
        # XLA:CPU, each process compiles for a single device.
        "replicas": 1 if is_lazy_host(device) else world_size,
        "flags": flags.flags.text(),
        "versions": versions,
    }


def source_digest(factory: str | None) -> str:
    """Hash all source code of this package, and the module of `model.factory`, but not what that module imports."""
    root, spec = Path(pipeline.__file__).parent, None
    files = sorted(root.rglob("*.py"))
    with suppress(ImportError):  # reported when the model is built
        spec = find_spec(factory.partition(":")[0]) if factory else None
    if spec is not None and spec.has_location and spec.origin:
        files.append(Path(spec.origin))
    digest = xxhash.xxh3_128()
    for file in files:
        digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def open_guard(workspace: Storage, plan: Plan, tracer: Tracer, config: CompileConfig, console: Console) -> GraphWatch:
    """Return a guard that compares the graphs of a run with the manifest of its plan.

    If the workspace has no manifests, the guard does nothing. Raises ConfigError before anything is traced if it only
    has manifests for different plans.
    """
    manifest = load_manifest(workspace, plan)
    if manifest is not None:
        return _guard(manifest, tracer, config, console)
    return _unguarded(workspace, plan, load_manifests(workspace), config, console)


def open_part_guard(
    workspace: Storage, plan: Plan, tracer: Tracer, config: CompileConfig, console: Console
) -> GraphWatch:
    """Return a guard for evaluation or embedding, using the manifest of any training plan that contains `plan`.

    A manifest that was traced from this source code is preferred to those of other versions.
    On accelerators, this requires the same number of ranks. On XLA:CPU, which compiles in seconds, we only enforce
    manifests for XLA:CPU and the same model, since evaluation and embedding may run on CPU instances even if the model
    is trained on Trainium.
    """
    manifests = load_manifests(workspace)
    containing = [manifest for manifest in manifests if plan.items() <= manifest.plan.items()]
    if containing:
        factory = plan.get("model.factory")
        code = source_digest(factory if isinstance(factory, str) else None)
        return _guard(max(containing, key=lambda manifest: manifest.code == code), tracer, config, console)
    if is_lazy_host(str(plan["device"])):
        names = [name for name in plan if name in ("device", "data.vocab_size") or name.startswith("model.")]
        manifests = [m for m in manifests if all(m.plan.get(name) == plan[name] for name in names)]
    parts = [GraphManifest(plan={name: manifest.plan.get(name) for name in plan}, graphs=()) for manifest in manifests]
    return _unguarded(workspace, plan, parts, config, console)


def _guard(manifest: GraphManifest, tracer: Tracer, config: CompileConfig, console: Console) -> GraphWatch:
    console.info(f"graphs: {len(manifest.graphs)} compiled ahead of time, manifest {manifest.plan_id[:12]}")
    return Guard(tracer, manifest, config.on_unknown_graph, console.warn)


def _unguarded(
    workspace: Storage, plan: Plan, others: Sequence[GraphManifest], config: CompileConfig, console: Console
) -> GraphWatch:
    if not others:
        console.info("graphs: none compiled ahead of time, compiling on demand (see trnpipe compile)")
        return GraphWatch()
    message = f"no graph of this run was compiled ahead of time: {'; '.join(plan_differences(plan, others))}"
    if config.on_unknown_graph == "error":
        raise ConfigError(
            message,
            expected=f"a graph manifest in {workspace.uri('compile-cache/graphs')}",
            next_command=f"{COMPILE}, or --compile.on-unknown-graph warn",
        )
    console.warn(f"{message}; compiling on demand")
    return GraphWatch()
