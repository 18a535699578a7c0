"""The graph manifest: every graph a cycle may run, and what decides it. The compile stage writes it, the rest reads."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from pipeline.compile.graphs import difference
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
