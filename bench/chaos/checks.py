"""What a cycle has left: is the model in production whole and the right one, and does every id have one vector?"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.cycle.job_states import JobRecord
from jobs.targets.local.node_keeper import ENDED, STARTED
from jobs.targets.local.nodes import LocalFiles
from pipeline.core.errors import TrnpipeError
from pipeline.embed.vectors import find_vectors
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage
from pipeline.registry.checkpoints import read_checkpoint
from pipeline.registry.records import Pointer, read_history, read_pointer


@dataclass(frozen=True)
class Expected:
    """Of a cycle. `before`: what was in production until then."""

    cycle: str
    model: str
    max_steps: int
    days: frozenset[str]
    ids: frozenset[str]
    before: Pointer | None


def wrong_model(storage: Storage, expected: Expected, *, succeeded: bool) -> Iterator[str]:
    """Everything that is wrong with what is in production."""
    try:
        found = read_pointer(storage, expected.model)
        pointer = found[0] if found else None
        if pointer == expected.before:
            if succeeded:
                yield "nothing was promoted"
            return
        if pointer is None or pointer.cycle != expected.cycle:
            yield f"production is {pointer and pointer.checkpoint}"
            return
        yield from _wrong_promotion(storage, expected, pointer)
    except TrnpipeError as error:
        yield f"production: {error}"


def _wrong_promotion(storage: Storage, expected: Expected, pointer: Pointer) -> Iterator[str]:
    known = read_checkpoint(storage, pointer.checkpoint, every_byte=True)  # every byte
    result = json.loads(storage.read_bytes(f"cycles/{expected.cycle}/train/result.json"))
    before = expected.before
    parent = known.state.parent
    history = read_history(storage, expected.model)
    holds = {
        "the digest": (known.digest, pointer.digest),
        "the checkpoint": (pointer.checkpoint, result["outputs"]["checkpoint"]),
        "the step": (known.state.step, result["figures"]["step"]),
        "the steps of training": (result["figures"]["steps_done"], expected.max_steps),
        "the days it was trained on": (set(known.state.partitions), set(expected.days)),
        "the digest of its parent": (parent and parent.digest, before and before.digest),
        "the cycle of its parent": (parent and parent.cycle, before and before.cycle),
        "what it replaced": (pointer.replaced, before and before.production),
        "promotions in this cycle": (sum(entry.cycle == expected.cycle for entry in history), 1),
    }
    for what, (seen, wanted) in holds.items():
        if seen != wanted:
            yield f"{what} of {pointer.checkpoint}: {seen}, not {wanted}"


def wrong_vectors(storage: Storage, expected: Expected, *, succeeded: bool) -> Iterator[str]:
    """Everything that is wrong with the vectors, if they are committed; `succeeded`: they must be."""
    prefix = f"embeddings/{expected.cycle}"
    if not storage.stat(f"{prefix}/MANIFEST.json"):
        if succeeded:
            yield "there are no vectors"
        return
    try:
        verify_dir(storage, prefix, deep=True)
        vectors = find_vectors(storage, expected.cycle)
        parts = range(len(vectors.info.parts))
        ids = Counter(i for part in parts for i in vectors.columns(part, ["id"])["id"].to_pylist())
        if twice := [one for one, times in ids.items() if times > 1]:
            yield f"{len(twice)} ids twice, such as {twice[0]}"
        if wrong := ids.keys() ^ expected.ids:
            yield f"{len(wrong)} ids missing or not of the catalogue, such as {min(wrong)}"
        found = read_pointer(storage, expected.model)
        if found is None or vectors.info.model.digest != found[0].digest:
            yield "the vectors are not of the model in production"
    except TrnpipeError as error:
        yield f"vectors: {error}"


def tries_beside(files: LocalFiles, records: tuple[JobRecord, ...]) -> Iterator[str]:
    """By what the keepers wrote: two tries of a job of which one began before the other had ended."""
    for task in (task for record in records for task in record.tasks()):
        until = 0.0
        for attempt in range(1, len(task.attempts) + 1):
            nodes = [files.node(task.id, attempt, node) for node in range(max(1, task.num_nodes))]
            begins, ends = _moments(nodes, STARTED), _moments(nodes, ENDED)
            if begins and min(begins) < until:
                yield f"{task.name}: attempt {attempt} began {until - min(begins):.2f} s before the end of another"
            until = max([until, *begins, *ends])


def _moments(nodes: list[Path], name: str) -> list[float]:
    """When nodes began or ended, as far as it was written down."""
    written = [json.loads((node / name).read_text()) for node in nodes if (node / name).exists()]
    return [one["at"] for one in written if one.get("at") and one.get("pid") != 0]
