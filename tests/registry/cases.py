"""Checkpoints of a few bytes, and everything the registry says of a model."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from pipeline.checkpoint.store import KIND, OPTIMIZER, STATE, TOKENIZER, WEIGHTS, Best, Parent, TrainState
from pipeline.io.commit import commit_dir, verify_dir
from pipeline.io.storage import Storage
from pipeline.model.config import InputSpec
from pipeline.registry.promote import promote
from pipeline.registry.records import (
    Author,
    Decision,
    HistoryEntry,
    Pointer,
    production_changes,
    read_history,
    read_pointer,
)
from tests.kit.states import train_state

MODEL = "relevance"
SPEC = InputSpec(vocab_size=20, pad_id=0, labels=("no", "yes"), label_gains=(0.0, 1.0))
AUTHOR = Author(by="tester@host", cycle="c9", settings_hash="5e77", code_version="1.0")


def prefix(cycle: str, step: int = 1) -> str:
    return f"checkpoints/{cycle}/step-{step}"


def make_checkpoint(workspace: Storage, scratch: Path, name: str, step: int = 1, **changes: Any) -> str:
    """Commit a checkpoint of the cycle `name` whose weights are a few bytes; its prefix.

    `changes` are fields of its state.
    """
    folder = Path(mkdtemp(dir=scratch))
    fields: dict[str, Any] = {"watermark": "2026-01-01", "partitions": {"dt=2026-01-01": "aa"}}
    named = {"cycle": name, "step": step, "settings_hash": f"settings-{name}"}
    (folder / STATE).write_bytes(train_state(**fields | named | changes).model_dump_json().encode())
    (folder / WEIGHTS).write_bytes(f"weights of {name} {step}".encode())
    (folder / OPTIMIZER).write_bytes(b"moments")
    (folder / TOKENIZER).write_bytes(b"{}")
    commit_dir(workspace, folder, prefix(name, step), kind=KIND, fields={"step": step, "cycle": name})
    return prefix(name, step)


def child_of(workspace: Storage, parent: str, **changes: Any) -> dict[str, Any]:
    """Fields of the state of a checkpoint that was trained from `parent`."""
    state = TrainState.model_validate_json(workspace.read_bytes(f"{parent}/{STATE}"))
    named = Parent(uri=workspace.uri(parent), digest=digest_of(workspace, parent), cycle=state.cycle, step=state.step)
    return {"parent": named, "best": Best(step=1, metric="ndcg", value=0.5), **changes}


def digest_of(workspace: Storage, place: str) -> str:
    return str(json.loads(workspace.read_bytes(f"{place}/MANIFEST.json"))["digest"])


def passed(workspace: Storage, place: str, **changes: Any) -> Decision:
    """A decision of the gate for the checkpoint as it is now."""
    fields: dict[str, Any] = {
        "passed": True,
        "digest": digest_of(workspace, place),
        "reasons": ("better",),
        "figures": {"ndcg": 0.5},
    }
    return Decision(**fields | changes)


def production(workspace: Storage) -> Pointer | None:
    found = read_pointer(workspace, MODEL)
    return found[0] if found else None


def put(workspace: Storage, place: str, author: Author = AUTHOR, **changes: Any) -> Pointer:
    """Promote in place of whatever is in production now."""
    decision = passed(workspace, place, **changes)
    return promote(workspace, MODEL, place, expected=production(workspace), decision=decision, author=author)


@dataclass(frozen=True)
class Told:
    """Pointer and history of a model, held against each other and against the checkpoints."""

    pointer: Pointer | None
    history: tuple[HistoryEntry, ...]

    @property
    def actions(self) -> list[tuple[str, str]]:
        return [(entry.action, entry.checkpoint) for entry in self.history]


def consistent(workspace: Storage) -> Told:
    """What the registry says, after checking all that must hold at any time."""
    pointer, history = production(workspace), read_history(workspace, MODEL)
    changes = production_changes(history)
    assert [change.generation for change in changes] == list(range(1, len(changes) + 1)), "each change is told once"
    assert len({entry.id for entry in history}) == len(history)
    assert (changes[-1] if changes else None) == pointer, "the history ends with what is in production"
    for before, after in pairwise(changes):
        assert after.replaced == before.production
    if pointer is not None:
        assert verify_dir(workspace, pointer.checkpoint, deep=True).digest == pointer.digest
    return Told(pointer, history)


WRITES = frozenset({"write_bytes", "write_if_absent", "write_if_match", "delete", "delete_prefix", "upload"})


class Killed(BaseException):
    """No `except Exception` and no TrnpipeError catches it, as with kill -9."""


@dataclass
class Dying:
    """A storage whose user dies at its n-th write: before it, or after it and before the answer."""

    storage: Storage
    number: int
    after: bool
    writes: list[str] = field(default_factory=list)
    look: Callable[[], None] = lambda: None
    """Called after every write."""

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.storage, name)
        if name not in WRITES:
            return call

        def write(*args: Any) -> Any:
            self.writes.append(name)
            if len(self.writes) == self.number and not self.after:
                raise Killed
            result = call(*args)
            self.look()
            if len(self.writes) == self.number:
                raise Killed
            return result

        return write
