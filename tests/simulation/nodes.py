"""The stages of a cycle as small models of themselves: they commit, die and resume like the product's stages.

What they read and write goes through the product: results, checkpoints, parts, manifests, verdicts and the registry.
Only the work in between is replaced by a wait. Whether a candidate is better is decided by its digest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import cast

from pipeline.checkpoint.store import KIND, OPTIMIZER, STATE, TOKENIZER, WEIGHTS, CheckpointStore, Parent, prefix_of
from pipeline.context import Figure, StageResult, load_result, store_result
from pipeline.core.errors import DataError, GateRefused
from pipeline.core.manifest import FileRecord
from pipeline.io.commit import commit_dir, commit_files, hash_bytes, read_manifest, verify_dir
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import read_checkpoint
from pipeline.registry.model import DeployedPair, Vectors, serve_verified_pair
from pipeline.registry.promote import promote, record_refusal
from pipeline.registry.records import (
    Author,
    Pointer,
    StoredVerdict,
    checkpoints_in_use,
    load_verdict,
    read_pointer,
    store_verdict,
)
from tests.jobs.targets.faults import Request
from tests.kit.states import train_state
from tests.simulation.s3 import FakeS3, MemoryFolder, SimulatedStorage
from tests.simulation.world import Process, World

MODEL = "relevance"
NUM_STEPS, KEPT_STEPS, WORKERS = 2, 1, 2
AT = datetime(2026, 11, 20, tzinfo=UTC)
_STATE = train_state()
_BYTES = {WEIGHTS: b"weights", OPTIMIZER: b"moments", TOKENIZER: b"{}"}


@dataclass(frozen=True)
class Node:
    """One attempt of a task."""

    world: World
    process: Process
    workspace: Storage
    cycle: str
    stage: str
    index: int

    def work(self, seconds: float) -> None:
        """Let time pass. The work is interrupted by SIGTERM."""
        self.process.stop.wait(seconds)
        self.process.stop.raise_if_set(f"working on {self.stage}")

    def earlier(self, stage: str) -> StageResult | None:
        return load_result(self.workspace, self.cycle, stage)

    def require(self, stage: str) -> StageResult:
        if (result := self.earlier(stage)) is None:
            raise DataError(f"{stage} of {self.cycle} has no result")
        return result

    def finish(self, **outputs: str) -> None:
        promoted: dict[str, Figure] = {"promoted": True} if self.stage == "evaluate" else {}
        result = StageResult(
            stage=self.stage,
            cycle=self.cycle,
            status="done",
            inputs={},
            outputs=outputs,
            figures=promoted,
            settings_hash="",
            code_version="",
            started=AT,
            finished=AT,
        )
        store_result(self.workspace, result)

    @property
    def author(self) -> Author:
        return Author(by=self.process.name, cycle=self.cycle, at=AT)


def run_stage(node: Node) -> None:
    """Run a stage, unless its result exists."""
    node.work(20.0)
    if node.stage == "embed" or node.earlier(node.stage) is None:
        _STAGES.get(node.stage, _simple)(node)


def _simple(node: Node) -> None:
    node.work(120.0)
    node.finish()


def _train(node: Node) -> None:
    """Train from the model in production, and resume from the newest checkpoint."""
    workspace, cycle = node.workspace, node.cycle
    pinned = f"cycles/{cycle}/train/parent.json"
    stored = read_pointer(workspace, MODEL)
    prefix = stored[0].checkpoint if stored else ""
    if not workspace.write_if_absent(pinned, prefix.encode()):
        prefix = workspace.read_bytes(pinned).decode()
    parent = read_checkpoint(workspace, prefix) if prefix else None
    store = CheckpointStore(workspace, cycle, cache_dir=Path(), emit=lambda *_, **__: None)
    done = store.steps()
    for step in range(max(done, default=0) + 1, NUM_STEPS + 1):
        node.work(300.0)
        link = parent and Parent(
            uri=workspace.uri(parent.prefix), digest=parent.digest, cycle=parent.state.cycle, step=parent.state.step
        )
        state = _STATE.model_copy(update={"cycle": cycle, "step": step, "parent": link})
        files = _BYTES | {STATE: state.model_dump_json().encode()}
        folder = cast(Path, MemoryFolder(files))
        commit_dir(workspace, folder, prefix_of(cycle, step), kind=KIND, fields={"step": step, "cycle": cycle})
        kept = {*store.steps()[-KEPT_STEPS:]}
        if old := {*store.steps()} - kept:
            in_use = checkpoints_in_use(workspace)
            for number in sorted(old):
                if prefix_of(cycle, number) not in in_use:
                    store.delete(number)
    node.finish(checkpoint=prefix_of(cycle, NUM_STEPS))


def _evaluate(node: Node) -> None:
    """Judge the candidate against production, then promote it or record its refusal (see stages/evaluate.py)."""
    workspace, cycle = node.workspace, node.cycle
    candidate = read_checkpoint(workspace, node.require("train").outputs["checkpoint"])
    stored, verdict = read_pointer(workspace, MODEL), load_verdict(workspace, cycle)
    pointer = stored[0] if stored else None
    if pointer is not None and pointer.digest == candidate.digest and verdict is not None:
        node.finish(checkpoint=candidate.prefix)  # an earlier attempt promoted it, but was killed before it ended
        return
    incumbent = pointer.ref if pointer else None
    if verdict is None or verdict.incumbent != incumbent:
        node.work(200.0)
        verdict = StoredVerdict(
            model=MODEL,
            cycle=cycle,
            candidate=candidate.ref,
            incumbent=incumbent,
            promote=is_better(candidate.digest, pointer),
            reasons=("judged",),
            settings_hash="",
            code_version="",
            at=AT,
        )
        store_verdict(workspace, verdict)
    decision = verdict.decision()
    if not verdict.promote:
        record_refusal(workspace, MODEL, candidate.prefix, decision, node.author)
        raise GateRefused(f"{candidate.prefix} is not promoted")
    promote(workspace, MODEL, candidate.prefix, expected=pointer, decision=decision, author=node.author)
    node.finish(checkpoint=candidate.prefix)


def is_better(digest: str, pointer: Pointer | None) -> bool:
    """Return the verdict of the gate, which depends on the contents of both models."""
    return int(digest[:8], 16) % 5 > 0 or pointer is None


class _Part(Part):
    pass


def _embed(node: Node) -> None:
    """Embed a worker slice. The last worker publishes the vectors."""
    workspace, cycle = node.workspace, node.cycle
    checkpoint = read_checkpoint(workspace, node.require("evaluate").outputs["checkpoint"])
    prefix = f"embeddings/{cycle}"
    if read_manifest(workspace, prefix) is None:
        parts = Parts(workspace, f"cycles/{cycle}/embed/parts", prefix, _Part, names)
        if node.index not in parts.done():
            node.work(400.0)
            data = f"vectors {node.index} of {checkpoint.digest}".encode()
            parts.commit(_Part(index=node.index), {names(node.index)[0]: data})
        if len(parts.done()) < WORKERS:
            return
        files = dict[str, FileRecord]()
        for record in parts.read_all(range(WORKERS)):
            files |= record.files
        commit_files(workspace, prefix, kind="embeddings", fields={"checkpoint": checkpoint.prefix}, files=files)
    if node.earlier("embed") is None:
        node.finish(embeddings=prefix)


def names(index: int) -> tuple[str]:
    return (f"part-{index:05d}.parquet",)


def _verify(node: Node) -> None:
    """Verify the vectors and deploy them with their model."""
    workspace, cycle = node.workspace, node.cycle
    manifest = verify_dir(workspace, node.require("embed").outputs["embeddings"], deep=True)
    checkpoint = read_checkpoint(workspace, str(manifest.fields["checkpoint"]))
    if any(file != expected_part(name, checkpoint.digest) for name, file in manifest.files.items()):
        raise DataError(f"the vectors of {cycle} are not those of {checkpoint.prefix}")
    node.work(60.0)
    vectors = Vectors(cycle=cycle, digest=manifest.digest, generation=int(cycle[-2:]), rows=2, dim=1)
    pair = DeployedPair(
        model=MODEL, checkpoint=checkpoint.prefix, digest=checkpoint.digest, vectors=vectors, author=node.author
    )
    serve_verified_pair(workspace, pair)
    node.finish(embeddings=vectors.prefix)


def expected_part(name: str, digest: str) -> FileRecord:
    data = f"vectors {int(name[5:10])} of {digest}".encode()
    return FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))


_STAGES: dict[str, Callable[[Node], None]] = {
    "train": _train,
    "evaluate": _evaluate,
    "embed": _embed,
    "verify": _verify,
}


def container(world: World, s3: FakeS3) -> Callable[[Request, int], Callable[[Process], int]]:
    """Return the containers of all tasks, as SimulatedBatch starts them."""

    def of_task(job: Request, attempt: int) -> Callable[[Process], int]:
        stage, cycle = job["tags"]["job"], job["tags"]["cycle"]
        index = int(job.get("arrayProperties", {}).get("index", 0))

        def run(process: Process) -> int:
            workspace = SimulatedStorage(s3, process.stop)
            node = Node(world, process, workspace, cycle, stage, index)
            weather = s3.service.weather
            for kind in ("transient", "bug", "hang"):
                if weather.happens(world, f"{kind} of {stage}", weather.jobs.get(kind, 0.0)):
                    world.at(world.faults_rng.random() * 700, partial(process.troubles.append, kind))
            run_stage(node)
            return 0

        return run

    return of_task
