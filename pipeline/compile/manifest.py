"""The graph manifest: all graphs of a cycle, recorded by the compile stage and enforced by later runs."""

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
"""Everything that determines the graphs of a run, by name. Runs with equal plans share their graphs."""


class GraphRecord(Record):
    """One graph of a manifest."""

    key: str = Field(description="Digest of operations, flags, world and versions, the same on every machine")
    phase: str = Field(
        description="Part of the program: start, step, first_micro_step, micro_step, update,"
        " embed_batch, embeddings, contrast, evaluate, embed"
    )
    bucket: str = Field(description="QUERYxPRODUCT tokens, tokens of a text to embed, or empty without a batch")
    batch_size: int = Field(description="Samples on one device, 0 for a graph without a batch")
    num_instructions: int
    hlo_bytes: int = Field(description="Length of the HLO text")
    op_counts: dict[str, int] = Field(description="Number of instructions by operation and shape")
    compiles: int = Field(description="Number of compilations, since graphs that differ only in aliasing have one key")
    compile_s: float = Field(description="Compile time in seconds when it was recorded")


class GraphManifest(Record):
    """All graphs of one plan: settings, device, world size, flags and versions."""

    schema_version: Literal[1, 2] = Field(2, description="1: keys of an earlier revision, which match no graph")
    plan: dict[str, PlanValue] = Field(description="Everything that determines the graphs, by name")
    graphs: tuple[GraphRecord, ...]
    cache_entries: dict[str, float | None] = Field(
        default={}, description="Entries of the Neuron compile cache with the graphs, and compile seconds if known"
    )

    @property
    def plan_id(self) -> str:
        return fingerprint(dict(self.plan))

    @property
    def compile_s(self) -> float:
        """Total compile time in seconds, over all machines."""
        entries = sum(seconds or 0.0 for seconds in self.cache_entries.values())
        return round(entries or sum(graph.compile_s for graph in self.graphs), 3)

    @property
    def key(self) -> str:
        """Its storage key in a workspace."""
        return f"{FOLDER}/{self.plan_id}.json"

    def nearest(self, phase: str, op_counts: Mapping[str, int]) -> GraphRecord | None:
        """Return the graph with the smallest difference of operation counts, in the same phase if possible."""

        def distance(graph: GraphRecord) -> int:
            return sum(map(abs, difference(graph.op_counts, op_counts).values()))

        return min([graph for graph in self.graphs if graph.phase == phase] or self.graphs, key=distance, default=None)


def graph_key(graph_hash: str, plan: Plan) -> str:
    """Return a graph's key: a digest of its operations (backend.graph_hash), compiler flags and optimizer settings.

    torch_xla passes the optimizer's values as inputs on XLA:CPU, but on other devices they may be graph constants.
    """
    compiler = ("device", "flags", "replicas", "versions", "world_size")
    rest = {name: value for name, value in plan.items() if name in compiler or name.startswith("train.optimizer.")}
    return fingerprint({"graph": graph_hash, **rest})


def store_manifest(workspace: Storage, manifest: GraphManifest) -> None:
    """Publish a manifest atomically."""
    workspace.write_bytes(manifest.key, manifest.model_dump_json(indent=1).encode() + b"\n")


def load_manifest(workspace: Storage, plan: Plan) -> GraphManifest | None:
    """Return the manifest of exactly this plan and this schema, if any. Raises DataError if it is damaged."""
    return _read(workspace, f"{FOLDER}/{fingerprint(dict(plan))}.json")


def load_manifests(workspace: Storage) -> list[GraphManifest]:
    """Return all manifests of the workspace, except those of earlier schemas."""
    keys = [stat.key for stat in workspace.list(FOLDER) if stat.key.endswith(".json")]
    return [manifest for key in keys if (manifest := _read(workspace, key)) is not None]


def _read(workspace: Storage, key: str) -> GraphManifest | None:
    manifest = read_record(workspace, key, GraphManifest, "a graph manifest", "trnpipe compile")
    return manifest if manifest is not None and manifest.schema_version == 2 else None


def plan_differences(requested: Plan, manifests: Sequence[GraphManifest]) -> list[str]:
    """Compare a plan with the nearest compiled one, with a line `name: compiled ..., now ...` per difference."""
    tables = []
    for plan in [manifest.plan for manifest in manifests]:
        names = sorted(name for name in plan.keys() | requested.keys() if plan.get(name) != requested.get(name))
        tables.append([f"{name}: compiled {plan.get(name)}, now {requested.get(name)}" for name in names])
    return min(tables, key=len, default=[])


# Watching the graphs of a program: recorded in a trial run, compared with the manifest otherwise. A graph is hashed
# when the program is about to cut it, before anything is compiled. Hashing walks over all its operations, so it is done
# only for the first graphs at each position (phase, bucket), and again after the compile counter has changed. Devices
# that compile each step (`compiles_steps`) expose no graph, so a position counts as compiled once its program has run.

Tensors = Sequence[Any]
"""Torch tensors, without an import of torch."""
COMPILE = "trnpipe compile, with the same settings"
_WARN_ONLY = "--compile.on-unknown-graph warn"
_MAX_CHECKS = 3  # per position, before relying on the compile counter


@dataclass(frozen=True)
class GraphPosition:
    """The position in a program at which a graph is cut."""

    phase: str
    bucket: str = ""
    batch_size: int = 0

    def __str__(self) -> str:
        shape = f" of {self.batch_size} x {self.bucket} tokens" if self.bucket else ""
        return f"{self.phase}{shape}"


class Tracer(Protocol):
    """The part of a backend that hashes graphs and counts compilations."""

    compiles_steps: bool

    def graph_hash(self, tensors: Tensors) -> str: ...
    def hlo_text(self, tensors: Tensors) -> str: ...
    def compile_count(self) -> int: ...
    def compile_seconds(self) -> float: ...


class GraphWatch:
    """Hooks around every graph that a program cuts. This base class does nothing, for devices without tracing."""

    def before(self, position: GraphPosition, tensors: Tensors) -> None:
        """Check the graph that computes `tensors`, which is complete but not yet compiled."""

    def after(self, position: GraphPosition) -> None:
        """Count compilations after the graph has been sent to the device."""


@dataclass
class Recorder(GraphWatch):
    """Recorder of all distinct graphs of a trial run with their compile times."""

    tracer: Tracer
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """HLO text by key, for the lint."""
    on_graph: Callable[[int, GraphPosition], object] = lambda number, position: None
    """Called with the number (from 1) of each new graph before it is compiled, or after if `compiles_steps`."""
    extra_compiles: list[str] = field(default_factory=list)
    """Positions at which more than the recorded graph was compiled."""
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
        """Return the number of compilations since the last call."""
        count = self.tracer.compile_count()
        compiled, self._count = count - self._count, count
        self._seconds = self.tracer.compile_seconds()
        return compiled


@dataclass
class Guard(GraphWatch):
    """Guard that compares the graphs of a run with the manifest.

    On a device with `compiles_steps`, only the first pass at a position may load programs from the cache.
    """

    tracer: Tracer
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Number of steps finished in this process."""
    _count: int = field(default=0, init=False)
    _checks: Counter[GraphPosition] = field(default_factory=Counter, init=False)
    """Number of checked graphs at each position, or of passes if the device has `compiles_steps`."""
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
                self._checks[position] -= 1  # it is new or differs only in aliasing, so check the next one
            return
        self._checks[position] += 1
        is_known = graph_key(str(position), self.manifest.plan) in self._keys
        if not compiled or (is_known and self._checks[position] == 1):
            return
        why = "is not in the manifest" if not is_known else "was compiled before, so a shape or type has changed"
        message = f"after {self.steps} steps, {compiled} graphs were compiled at {position}, which {why}"
        self._report(compiled, message, "one graph per shape of the compile stage (TORCH_LOGS=recompiles explains why)")

    def _report(self, count: int, message: str, expected: str) -> None:
        """Count graphs that are not in the manifest, and raise ConfigError or warn."""
        self.unknown += count
        if self.on_unknown == "error":
            raise ConfigError(message, expected=expected, next_command=f"{COMPILE}, or {_WARN_ONLY}")
        self.warn(f"{message}; expected {expected}")

    def _explain(self, position: GraphPosition, text: str) -> str:
        """Describe the nearest known graph and the difference from it."""
        counts = op_counts(text)
        nearest = self.manifest.nearest(position.phase, counts)
        if nearest is None:
            return "a manifest with at least one graph"
        nearest_position = GraphPosition(nearest.phase, nearest.bucket, nearest.batch_size)
        changes = describe(difference(nearest.op_counts, counts))
        return f"the nearest compiled graph, {nearest_position}, from which this one differs by {changes}"
