"""Graph manifests, which list all graphs of a cycle, are recorded by the compile stage and enforced by later runs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic import Field

from pipeline.compile.hlo import describe, difference, op_counts
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.io.storage import Storage, read_record

FOLDER = "compile-cache/graphs"
PlanValue = None | bool | int | float | str | list[int] | list[str] | dict[str, str]
Plan = Mapping[str, PlanValue]
"""Everything that determines the graphs of a run, by name. Runs with the same plan have the same graphs."""


class GraphRecord(Record):
    """A graph in a manifest."""

    key: str = Field(description="Digest of operations, flags, world size and versions, which is machine-independent")
    phase: str = Field(
        description="Part of the program: start, step, first_micro_step, micro_step, update,"
        " embed_batch, embeddings, contrast, evaluate, embed"
    )
    bucket: str = Field(
        description="QUERYxPRODUCT tokens, number of tokens of texts to embed, or empty for a graph without a batch"
    )
    batch_size: int = Field(description="Number of samples per device, or 0 for a graph without a batch")
    num_instructions: int
    hlo_bytes: int = Field(description="Length of the HLO text")
    op_counts: dict[str, int] = Field(description="Number of instructions by operation and shape")
    compiles: int = Field(
        description="Number of compilations, which may exceed 1 since graphs that only differ in aliasing have one key"
    )
    compile_s: float = Field(description="Compile time in seconds when the graph was recorded")


class GraphManifest(Record):
    """All graphs for a plan, which includes the settings, device, world size, compiler flags and versions."""

    schema_version: Literal[1, 2] = Field(
        2, description="Version of the graph keys, where keys of version 1 never match"
    )
    plan: dict[str, PlanValue] = Field(description="Everything that determines the graphs, by name")
    graphs: tuple[GraphRecord, ...]
    cache_entries: dict[str, float | None] = Field(
        default={}, description="Neuron compile cache entries of the graphs, with compile times in seconds if known"
    )
    code: str = Field("", description="Digest of the source code that the graphs were traced from (see source_digest)")

    @property
    def plan_id(self) -> str:
        return fingerprint(dict(self.plan))

    @property
    def compile_s(self) -> float:
        """Total compile time in seconds on all machines."""
        entries = sum(seconds or 0.0 for seconds in self.cache_entries.values())
        return round(entries or sum(graph.compile_s for graph in self.graphs), 3)

    @property
    def key(self) -> str:
        """The storage key of this manifest in a workspace."""
        return f"{FOLDER}/{self.plan_id}.json"

    def nearest(self, phase: str, op_counts: Mapping[str, int]) -> GraphRecord | None:
        """Return the graph with the most similar operation counts, preferring graphs of the same phase."""

        def distance(graph: GraphRecord) -> int:
            return sum(map(abs, difference(graph.op_counts, op_counts).values()))

        return min([graph for graph in self.graphs if graph.phase == phase] or self.graphs, key=distance, default=None)


def graph_key(graph_hash: str, plan: Plan) -> str:
    """Return the key of a graph, which is a digest of its operations, compiler flags and optimizer settings.

    Optimizer settings are included because they may be constants in the graph, even though torch_xla passes them as
    inputs on XLA:CPU. `graph_hash`: the hash of operations that the backend computes.
    """
    compiler = ("device", "flags", "replicas", "versions", "world_size")
    rest = {name: value for name, value in plan.items() if name in compiler or name.startswith("train.optimizer.")}
    return fingerprint({"graph": graph_hash, **rest})


def store_manifest(workspace: Storage, manifest: GraphManifest) -> None:
    """Atomically write a manifest to the workspace."""
    workspace.write_bytes(manifest.key, manifest.to_json())


def load_manifest(workspace: Storage, plan: Plan) -> GraphManifest | None:
    """Load the manifest of a plan, or return None if there is none with the current schema.

    Raises DataError if the manifest is damaged.
    """
    return _read(workspace, f"{FOLDER}/{fingerprint(dict(plan))}.json")


def load_traced(workspace: Storage, plan: Plan, code: str) -> GraphManifest | None:
    """Load the manifest of a plan if it was traced from this source code, since other code may have other graphs."""
    manifest = load_manifest(workspace, plan)
    return manifest if manifest is not None and manifest.code == code else None


def load_manifests(workspace: Storage) -> list[GraphManifest]:
    """Load all manifests in the workspace, except for those with an earlier schema."""
    keys = [stat.key for stat in workspace.list(FOLDER) if stat.key.endswith(".json")]
    return [manifest for key in keys if (manifest := _read(workspace, key)) is not None]


def _read(workspace: Storage, key: str) -> GraphManifest | None:
    manifest = read_record(workspace, key, GraphManifest, "a graph manifest", "trnpipe compile")
    return manifest if manifest is not None and manifest.schema_version == 2 else None


def plan_differences(requested: Plan, manifests: Sequence[GraphManifest]) -> list[str]:
    """Compare a plan with the most similar one that was compiled.

    Each difference is returned in the form `name: compiled ..., now ...`.
    """
    tables = []
    for plan in [manifest.plan for manifest in manifests]:
        names = sorted(name for name in plan.keys() | requested.keys() if plan.get(name) != requested.get(name))
        tables.append([f"{name}: compiled {plan.get(name)}, now {requested.get(name)}" for name in names])
    return min(tables, key=len, default=[])


# Watching the graphs of a program. A trial run records them, and other runs compare them with the manifest. We hash a
# graph when the program is about to cut it, before anything is compiled. Since this requires iterating over all of its
# operations, we only hash the first few graphs at each position (phase and bucket), and again whenever the compile
# counter has changed. Devices that compile entire steps (`compiles_steps`) don't expose graphs, so a position is
# considered to be compiled once its program has run.

Tensors = Sequence[Any]
"""Torch tensors. This module doesn't import torch."""
COMPILE = "trnpipe compile, with the same settings"
_WARN_ONLY = "--compile.on-unknown-graph warn"
_MAX_CHECKS = 3  # number of graphs to hash at each position before relying on the compile counter


@dataclass(frozen=True)
class GraphPosition:
    """A position in a program where a graph is cut."""

    phase: str
    bucket: str = ""
    batch_size: int = 0

    def __str__(self) -> str:
        shape = f" of {self.batch_size} x {self.bucket} tokens" if self.bucket else ""
        return f"{self.phase}{shape}"


class Tracer(Protocol):
    """The methods of a backend that hash graphs and count compilations."""

    compiles_steps: bool

    def graph_hash(self, tensors: Tensors) -> str: ...
    def hlo_text(self, tensors: Tensors) -> str: ...
    def compile_count(self) -> int: ...
    def compile_seconds(self) -> float: ...


class GraphWatch:
    """Hooks that are called for each graph that a program cuts. This base class does nothing."""

    def before(self, position: GraphPosition, tensors: Tensors) -> None:
        """Check the graph that computes `tensors`. It is complete, but has not been compiled yet."""

    def after(self, position: GraphPosition) -> None:
        """Count compilations after the graph has been sent to the device."""


@dataclass
class Recorder(GraphWatch):
    """Recorder that keeps track of all distinct graphs of a trial run and their compile times."""

    tracer: Tracer
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """HLO text of each graph by key, which is used by the lint."""
    on_graph: Callable[[int, GraphPosition], object] = lambda number, position: None
    """Called with the number of each new graph, starting from 1.

    It is called before the graph is compiled, or afterwards if the device has `compiles_steps`.
    """
    extra_compiles: list[str] = field(default_factory=list)
    """Positions where any graph was compiled in addition to the recorded one."""
    _key: str = field(default="", init=False)
    _count: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.tracer.compiles_steps:
            self._new_compiles()

    def before(self, position: GraphPosition, tensors: Tensors) -> None:
        if self.tracer.compiles_steps:
            return
        self._key = graph_key(self.tracer.graph_hash(tensors), self.plan)
        if self._key not in self.graphs:
            self.texts[self._key] = text = self.tracer.hlo_text(tensors)
            self._record(position, op_counts(text), len(text))
        if self._new_compiles():
            self.extra_compiles.append(f"{position}, before its graph")

    def after(self, position: GraphPosition) -> None:
        if self.tracer.compiles_steps:
            self._key = graph_key(str(position), self.plan)
            if self._key not in self.graphs:
                self._record(position, {}, 0)
        before, graph = self._seconds, self.graphs[self._key]
        compiled = self._new_compiles()
        seconds = round(graph.compile_s + self._seconds - before, 3)
        update = {"compiles": graph.compiles + compiled, "compile_s": seconds}
        self.graphs[self._key] = graph.model_copy(update=update)
        if compiled > 1 and not self.tracer.compiles_steps:
            self.extra_compiles.append(str(position))

    def _record(self, position: GraphPosition, counts: dict[str, int], num_bytes: int) -> None:
        self.graphs[self._key] = GraphRecord(
            key=self._key,
            phase=position.phase,
            bucket=position.bucket,
            batch_size=position.batch_size,
            num_instructions=sum(counts.values()),
            hlo_bytes=num_bytes,
            op_counts=counts,
            compiles=0,
            compile_s=0.0,
        )
        self.on_graph(len(self.graphs), position)

    def _new_compiles(self) -> int:
        """Return the number of compilations since the previous call."""
        count = self.tracer.compile_count()
        compiled, self._count = count - self._count, count
        self._seconds = self.tracer.compile_seconds()
        return compiled


@dataclass
class Guard(GraphWatch):
    """Guard that verifies that all graphs of a run are listed in the manifest.

    On a device with `compiles_steps`, programs may only be loaded from the cache in the first pass at each position.
    """

    tracer: Tracer
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Number of steps that were completed in this process."""
    _count: int = field(default=0, init=False)
    _checks: Counter[GraphPosition] = field(default_factory=Counter, init=False)
    """Number of graphs checked at each position, or number of passes if the device has `compiles_steps`."""
    _is_checked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._keys = {graph.key for graph in self.manifest.graphs}
        self._count = self.tracer.compile_count()

    def before(self, position: GraphPosition, tensors: Tensors) -> None:
        self._is_checked = not self.tracer.compiles_steps and self._checks[position] < _MAX_CHECKS
        if not self._is_checked:
            return
        self._checks[position] += 1
        if graph_key(self.tracer.graph_hash(tensors), self.manifest.plan) not in self._keys:
            message = f"after {self.steps} steps, the graph of {position} was not compiled ahead of time"
            self._report(1, message, self._explain(position, self.tracer.hlo_text(tensors)))

    def after(self, position: GraphPosition) -> None:
        self.steps += position.phase in ("step", "update")
        count = self.tracer.compile_count()
        compiled, self._count = count - self._count, count
        if not self.tracer.compiles_steps:
            if compiled and not self._is_checked:
                self._checks[position] -= 1  # the graph is new or only differs in aliasing, so check the next one
            return
        self._checks[position] += 1
        is_known = graph_key(str(position), self.manifest.plan) in self._keys
        if not compiled or (is_known and self._checks[position] == 1):
            return
        why = "is not in the manifest" if not is_known else "was compiled before, so a shape or type has changed"
        message = f"after {self.steps} steps, {compiled} graphs were compiled at {position}, which {why}"
        self._report(compiled, message, "one graph per shape of the compile stage (see TORCH_LOGS=recompiles)")

    def _report(self, count: int, message: str, expected: str) -> None:
        """Count graphs that are not in the manifest, and either raise ConfigError or print a warning."""
        self.unknown += count
        if self.on_unknown == "error":
            raise ConfigError(message, expected=expected, next_command=f"{COMPILE}, or {_WARN_ONLY}")
        self.warn(f"{message}; expected {expected}")

    def _explain(self, position: GraphPosition, text: str) -> str:
        """Describe how a graph differs from the most similar graph in the manifest."""
        counts = op_counts(text)
        nearest = self.manifest.nearest(position.phase, counts)
        if nearest is None:
            return "a manifest with at least one graph"
        nearest_position = GraphPosition(nearest.phase, nearest.bucket, nearest.batch_size)
        changes = describe(difference(nearest.op_counts, counts))
        return f"a graph in the manifest, the most similar of which is {nearest_position} (differences: {changes})"
