"""The graph manifest: every graph a cycle may run. The compile stage records it, and runs are held against it."""

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
"""Everything that decides the graphs of a run, by name; two runs with the same plan share their graphs."""


class GraphRecord(Record):
    """One graph."""

    key: str = Field(description="The same on every machine: digest of operations, flags, world and versions")
    phase: str = Field(
        description="What it does: start, step, first_micro_step, micro_step, update,"
        " embed_batch, embeddings, contrast, evaluate, embed"
    )
    bucket: str = Field(description="QUERYxPRODUCT tokens, tokens of a text to embed, or empty without a batch")
    batch_size: int = Field(description="Samples on one device; 0 for a graph without a batch")
    num_instructions: int
    hlo_bytes: int = Field(description="Length of the HLO text")
    op_counts: dict[str, int] = Field(description="Instructions by operation and shape")
    compiles: int = Field(description="Times it was compiled: graphs that differ in aliasing alone have one key")
    compile_s: float = Field(description="Seconds the compiler took when it was recorded")


class GraphManifest(Record):
    """All graphs of one way of running: settings, device, world size, flags, versions."""

    schema_version: Literal[1, 2] = Field(
        2, description="1: keys of an earlier revision, which name no graph of this one"
    )
    plan: dict[str, PlanValue] = Field(description="Everything that decides the graphs, by name")
    graphs: tuple[GraphRecord, ...]
    cache_entries: dict[str, float | None] = Field(
        default={}, description="Entries of the Neuron compile cache that hold them, with compile seconds where known"
    )

    @property
    def plan_id(self) -> str:
        return fingerprint(dict(self.plan))

    @property
    def compile_s(self) -> float:
        """Total seconds of compiling, on any machine."""
        entries = sum(seconds or 0.0 for seconds in self.cache_entries.values())
        return round(entries or sum(graph.compile_s for graph in self.graphs), 3)

    @property
    def place(self) -> str:
        """Its key in a workspace."""
        return f"{FOLDER}/{self.plan_id}.json"

    def nearest(self, phase: str, op_counts: Mapping[str, int]) -> GraphRecord | None:
        """Return the graph with the fewest operations more or fewer; of the same phase if there is one."""
        same = [graph for graph in self.graphs if graph.phase == phase] or list(self.graphs)
        return min(same, key=lambda one: sum(map(abs, difference(one.op_counts, op_counts).values())), default=None)


def graph_key(graph_hash: str, plan: Plan) -> str:
    """Return the key of a graph: its operations (backend.graph_hash), compiler options and the optimizer.

    torch_xla passes the optimizer's numbers as inputs on XLA:CPU; on other devices they may be constants of the graph.
    """
    compiler = ("device", "flags", "replicas", "versions", "world_size")
    rest = {name: value for name, value in plan.items() if name in compiler or name.startswith("train.optimizer.")}
    return fingerprint({"graph": graph_hash, **rest})


def store_manifest(workspace: Storage, manifest: GraphManifest) -> None:
    """Publish a manifest (atomic)."""
    workspace.write_bytes(manifest.place, manifest.model_dump_json(indent=1).encode() + b"\n")


def load_manifest(workspace: Storage, plan: Plan) -> GraphManifest | None:
    """Return the manifest of exactly this plan; None if it was never compiled, or by an earlier revision.

    Raises DataError for one that is damaged.
    """
    return _read(workspace, f"{FOLDER}/{fingerprint(dict(plan))}.json")


def load_manifests(workspace: Storage) -> list[GraphManifest]:
    """Return every manifest of the workspace but those of earlier revisions."""
    keys = [stat.key for stat in workspace.list(FOLDER) if stat.key.endswith(".json")]
    return [manifest for key in keys if (manifest := _read(workspace, key)) is not None]


def _read(workspace: Storage, key: str) -> GraphManifest | None:
    found = read_record(workspace, key, GraphManifest, "a graph manifest", "trnpipe compile")
    return found if found is not None and found.schema_version == 2 else None


def plan_differences(wanted: Plan, manifests: Sequence[GraphManifest]) -> list[str]:
    """Compare with the nearest compiled plan: one `name: compiled ..., now ...` a line; empty without manifests."""
    tables = []
    for plan in [manifest.plan for manifest in manifests]:
        names = sorted(name for name in plan.keys() | wanted.keys() if plan.get(name) != wanted.get(name))
        tables.append([f"{name}: compiled {plan.get(name)}, now {wanted.get(name)}" for name in names])
    return min(tables, key=len, default=[])


# Graphs as a program meets them: recorded during a trial run, compared with the manifest otherwise. A graph is looked
# at where the program is about to cut it, before anything is compiled. Naming it costs a walk over all its operations,
# so a place in the program (phase, bucket) is looked at the first few times only, and again after the compile counter
# has moved. Devices that compile as they go (`compiles_steps`) have no graph to look at: there a place counts as
# compiled once its program was called.

Tensors = Sequence[Any]
"""Tensors of torch, which this module does without."""
COMPILE = "trnpipe compile, with the same settings"
_WARN_ONLY = "--compile.on-unknown-graph warn"
_LOOKS = 3  # at each place, before the compile counter alone is trusted


@dataclass(frozen=True)
class GraphPosition:
    """Where in a program a graph ends."""

    phase: str
    bucket: str = ""
    batch_size: int = 0

    def __str__(self) -> str:
        shape = f" of {self.batch_size} x {self.bucket} tokens" if self.bucket else ""
        return f"{self.phase}{shape}"


class Tracer(Protocol):
    """The part of a backend that names graphs and counts compiles."""

    compiles_steps: bool

    def graph_hash(self, tensors: Tensors) -> str: ...
    def hlo_text(self, tensors: Tensors) -> str: ...
    def compile_count(self) -> int: ...
    def compile_seconds(self) -> float: ...


class GraphWatch:
    """Called by a program around every graph it cuts. This base class watches nothing: devices that do not trace."""

    def before(self, place: GraphPosition, tensors: Tensors) -> None:
        """Look at the graph that computes `tensors`, complete and not yet compiled."""

    def after(self, place: GraphPosition) -> None:
        """Count what was compiled: the graph has been given to the device."""


@dataclass
class Recorder(GraphWatch):
    """Records every different graph of a trial run with the time that compiling it took."""

    tracer: Tracer
    plan: Plan
    graphs: dict[str, GraphRecord] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    """HLO text by key, for the lint."""
    met: Callable[[int, GraphPosition], object] = lambda number, place: None
    """Called with every new graph, from 1 on: before it is compiled, or after on a device that compiles as it goes."""
    outside: list[str] = field(default_factory=list)
    """Places at which more was compiled than the graph looked at."""
    _key: str = field(default="", init=False)
    _count: int = field(default=0, init=False)
    _seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        if self.tracer.compiles_steps:
            self._look()

    def before(self, place: GraphPosition, tensors: Tensors) -> None:
        if self.tracer.compiles_steps:
            return
        self._key = graph_key(self.tracer.graph_hash(tensors), self.plan)
        if self._key not in self.graphs:
            self.texts[self._key] = text = self.tracer.hlo_text(tensors)
            self._record(place, op_counts(text), len(text))
        if self._look():
            self.outside.append(f"{place}, before its graph")

    def after(self, place: GraphPosition) -> None:
        if self.tracer.compiles_steps:
            self._key = graph_key(str(place), self.plan)
            if self._key not in self.graphs:
                self._record(place, {}, 0)
        before, known = self._seconds, self.graphs[self._key]
        compiled = self._look()
        seconds = round(known.compile_s + self._seconds - before, 3)
        update = {"compiles": known.compiles + compiled, "compile_s": seconds}
        self.graphs[self._key] = known.model_copy(update=update)
        if compiled > 1 and not self.tracer.compiles_steps:
            self.outside.append(str(place))

    def _record(self, place: GraphPosition, counts: dict[str, int], num_bytes: int) -> None:
        self.graphs[self._key] = GraphRecord(
            key=self._key,
            phase=place.phase,
            bucket=place.bucket,
            batch_size=place.batch_size,
            num_instructions=sum(counts.values()),
            hlo_bytes=num_bytes,
            op_counts=counts,
            compiles=0,
            compile_s=0.0,
        )
        self.met(len(self.graphs), place)

    def _look(self) -> int:
        """Return how many graphs were compiled since the last call; later ones belong to the next graph."""
        count = self.tracer.compile_count()
        compiled, self._count = count - self._count, count
        self._seconds = self.tracer.compile_seconds()
        return compiled


@dataclass
class Guard(GraphWatch):
    """Compares what a run is about to compile with the manifest.

    On a device that compiles as it goes, programs may come from the cache at the first pass of a place only.
    """

    tracer: Tracer
    manifest: GraphManifest
    on_unknown: Literal["error", "warn"]
    warn: Callable[[str], None]
    unknown: int = 0
    steps: int = 0
    """Finished in this process."""
    _count: int = field(default=0, init=False)
    _looks: Counter[GraphPosition] = field(default_factory=Counter, init=False)
    """At each place; on a device that compiles as it goes: how often it was passed."""
    _looked: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._keys = {graph.key for graph in self.manifest.graphs}
        self._count = self.tracer.compile_count()

    def before(self, place: GraphPosition, tensors: Tensors) -> None:
        self._looked = not self.tracer.compiles_steps and self._looks[place] < _LOOKS
        if not self._looked:
            return
        self._looks[place] += 1
        if graph_key(self.tracer.graph_hash(tensors), self.manifest.plan) not in self._keys:
            seen = f"after {self.steps} steps, the graph of {place} was not compiled ahead of time"
            self._unknown(1, seen, self._explain(place, self.tracer.hlo_text(tensors)))

    def after(self, place: GraphPosition) -> None:
        self.steps += place.phase in ("step", "update")
        count = self.tracer.compile_count()
        compiled, self._count = count - self._count, count
        if not self.tracer.compiles_steps:
            if compiled and not self._looked:
                self._looks[place] -= 1  # it differs in aliasing alone, or is new: look at the next one
            return
        self._looks[place] += 1
        is_known = graph_key(str(place), self.manifest.plan) in self._keys
        if not compiled or (is_known and self._looks[place] == 1):
            return
        why = "was not met ahead of time" if not is_known else "was compiled already: a shape or a type has changed"
        seen = f"after {self.steps} steps, {compiled} graphs were compiled at {place}, which {why}"
        self._unknown(compiled, seen, "one graph for each shape of the compile stage (TORCH_LOGS=recompiles says why)")

    def _unknown(self, num: int, seen: str, expected: str) -> None:
        """Count graphs that the manifest does not have. Raises ConfigError, or warns."""
        self.unknown += num
        if self.on_unknown == "error":
            raise ConfigError(seen, expected=expected, next_command=f"{COMPILE}, or {_WARN_ONLY}")
        self.warn(f"{seen}; expected {expected}")

    def _explain(self, place: GraphPosition, text: str) -> str:
        """Name the nearest known graph and the difference from it."""
        counts = op_counts(text)
        nearest = self.manifest.nearest(place.phase, counts)
        if nearest is None:
            return "a manifest with at least one graph"
        known = GraphPosition(nearest.phase, nearest.bucket, nearest.batch_size)
        changes = describe(difference(nearest.op_counts, counts))
        return f"{known}, the nearest graph that was; this one has {changes}"
