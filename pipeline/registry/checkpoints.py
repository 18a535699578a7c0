"""Which checkpoint is meant by a name, what the registry knows of it, and what it descends from. Without torch."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.checkpoint.store import (
    SCHEMA_VERSION,
    STATE,
    TOKENIZER,
    WEIGHTS,
    Parent,
    TrainState,
    checkpoint_manifest,
    parse_state,
)
from pipeline.core.errors import CheckpointError, ConfigError, DataError, first_line
from pipeline.io.commit import check_record, record_of, verify_dir
from pipeline.io.storage import KeyNotFound, Storage, join_key, place_of
from pipeline.registry.records import Place, check_prefix, load_verdict, one_line, pointer_key
from pipeline.settings import Settings

CHECKPOINTS = "checkpoints/"
HOLDOUTS = ("valid_", "test_")
_CYCLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# Names: a prefix in the workspace, a path or URI anywhere, or the model in production.


def locate(named: str, settings: Settings, workspace: Storage) -> tuple[Storage, str]:
    """Storage and prefix of the checkpoint at `checkpoints/<cycle>/step-<n>` in the workspace, or a path or URI.

    The storage is `workspace` itself for all that lies there. Raises ConfigError for what names no folder.
    """
    key = key_in(workspace, named)
    if key is not None:
        return workspace, check_prefix(key)
    return place_of(named, retry=settings.storage, stop=workspace.stop)


def prefix_in(workspace: Storage, named: str) -> str:
    """The same where only the workspace will do. Raises ConfigError for a checkpoint of another place."""
    key = key_in(workspace, named)
    if key is None and "://" in named:
        raise ConfigError(
            f"{one_line(named)} is not in the workspace {workspace.root}",
            expected="a checkpoint of this workspace, as checkpoints/<cycle>/step-<n>",
            next_command="give --workspace",
        )
    return check_prefix(named.rstrip("/") if key is None else key)


def key_in(workspace: Storage, named: str) -> str | None:
    """The key of a prefix, path or URI in the workspace; None for other places."""
    named, folder = named.rstrip("/"), workspace.local_path("")
    if named.startswith(CHECKPOINTS):
        return named
    if named.startswith(f"{workspace.root}/"):
        return named.removeprefix(f"{workspace.root}/")
    if "://" not in named and folder is not None and Path(named).absolute().is_relative_to(folder):
        return Path(named).absolute().relative_to(folder).as_posix()
    return None


def incumbent_prefix(workspace: Storage, model_name: str) -> str | None:
    """Where the promoted checkpoint lies in the workspace; None when nothing is promoted. Raises CheckpointError.

    Only this field is read: a job that runs on an older version must not stumble over the others of a newer one.
    """
    key = pointer_key(model_name)
    try:
        pointer = workspace.read_bytes(key)
    except KeyNotFound:
        return None
    try:
        return check_prefix(json.loads(pointer)["checkpoint"])
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{workspace.uri(key)} is no pointer to a checkpoint: {error}",
            expected='{"checkpoint": "checkpoints/<cycle>/step-<n>", ...}',
            next_command="promote a checkpoint again, or --train.start scratch",
        ) from error


def start_place(start: str, settings: Settings, workspace: Storage) -> tuple[Storage, str] | None:
    """Where the checkpoint of `train.start` lies; None for `scratch`, and for `incumbent` while nothing is promoted."""
    if start == "scratch":
        return None
    if start == "incumbent":
        prefix = incumbent_prefix(workspace, settings.model_name)
        return None if prefix is None else (workspace, prefix)
    return locate(start, settings, workspace)


def parent_tokenizer(settings: Settings, workspace: Storage) -> bytes | None:
    """tokenizer.json of the parent, which new data must use. Training verifies the checkpoint and that both agree."""
    place = start_place(settings.train.start, settings, workspace)
    if place is None:
        return None
    storage, prefix = place
    try:
        return storage.read_bytes(f"{prefix}/{TOKENIZER}")
    except KeyNotFound as error:
        raise CheckpointError(
            f"the parent {storage.uri(prefix)} has no {TOKENIZER}",
            expected="a committed checkpoint (train.start)",
            next_command="name another with --train.start, or --train.start scratch",
        ) from error


# A checkpoint of this workspace as the registry sees it: its content's name and its state.


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint of this workspace."""

    prefix: str
    digest: str
    state: TrainState

    @property
    def place(self) -> Place:
        return Place(checkpoint=self.prefix, digest=self.digest)


def read_checkpoint(workspace: Storage, prefix: str, *, every_byte: bool = False) -> CommittedCheckpoint:
    """Its manifest and state; with `every_byte` all other files are read, too, where they lie.

    Raises CheckpointError naming what is wrong, ConfigError for the prefix.
    """
    uri = workspace.uri(check_prefix(prefix))
    try:
        named = "name a checkpoint of this workspace as checkpoints/<cycle>/step-<n>"
        manifest = checkpoint_manifest(workspace, prefix, next_command=named)
        if missing := sorted({WEIGHTS, STATE, TOKENIZER} - manifest.files.keys()):
            raise DataError(f"its manifest has no {missing[0]}")
        if every_byte and verify_dir(workspace, prefix, deep=True) != manifest:
            raise DataError("it is being replaced")
        data = workspace.read_bytes(join_key(prefix, STATE))
        check_record(workspace.uri(join_key(prefix, STATE)), manifest.files[STATE], record_of(BytesIO(data)))
        state = parse_state(data)
    except (DataError, ValidationError) as error:
        raise _bad(uri, error) from error
    return CommittedCheckpoint(prefix, manifest.digest, state)


def check_present(workspace: Storage, prefix: str) -> None:
    """That all files are still there in full size, by one listing. Raises CheckpointError."""
    try:
        verify_dir(workspace, prefix, deep=False)
    except DataError as error:
        raise _bad(workspace.uri(prefix), error) from error


def _bad(uri: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{uri}: {first_line(error)}",
        expected=f"a whole checkpoint of schema {SCHEMA_VERSION}",
        next_command="name another checkpoint; trnpipe registry show lists those that were in production",
    )


# What it descends from: its parents, back to the root.


@dataclass(frozen=True)
class Ancestor:
    """One checkpoint of a lineage."""

    checkpoint: str
    """Prefix in the workspace; the URI that its child names, when it is not there."""
    digest: str
    cycle: str
    step: int
    watermark: str = ""
    """Newest dt= partition that it or its parents were trained on; empty for flat data."""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """Name to fingerprint of the partitions that its parent had not seen; all of them when the parent is lost."""
    settings_hash: str = ""
    code_version: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Metrics, as far as they are known."""
    published: str = ""
    """The published weights that the lineage began from, told of the last one."""
    note: str = ""
    """Why the lineage ends here: it was imported, or this is not its root."""


def lineage(workspace: Storage, prefix: str) -> tuple[Ancestor, ...]:
    """The checkpoint at `prefix`, its parent, and so on. The last one is the root, or has a note.

    A parent is taken for what its child says only when its content is the same; it may have moved with the whole
    workspace. Raises CheckpointError when there is no checkpoint at `prefix`, ConfigError for a prefix that is none.
    """
    child = read_checkpoint(workspace, prefix)
    ancestors: list[Ancestor] = []
    seen = {child.digest}
    while child.state.parent is not None:
        workspace.stop.raise_if_set("following a lineage")
        parent, note = _parent(workspace, child.state.parent)
        if parent is None or parent.digest in seen:
            lost = child.state.parent
            why, began = note or "the lineage runs in a circle", child.state.published
            published = "" if began is None else began.text
            last = Ancestor(lost.uri, lost.digest, lost.cycle, lost.step, published=published, note=why)
            return (*ancestors, _ancestor(workspace, child, {}), last)
        ancestors.append(_ancestor(workspace, child, parent.state.partitions))
        seen.add(parent.digest)
        child = parent
    return (*ancestors, _ancestor(workspace, child, {}))


def _parent(workspace: Storage, named: Parent) -> tuple[CommittedCheckpoint | None, str]:
    """The parent in this workspace, or why there is none."""
    own = named.uri.startswith(f"{workspace.root}/")
    # Where it may be in this workspace: there, or below checkpoints/ of a workspace that was moved.
    moved = CHECKPOINTS + named.uri.rpartition(f"/{CHECKPOINTS}")[2] if f"/{CHECKPOINTS}" in named.uri else None
    notes = []
    for place in dict.fromkeys(place for place in (key_in(workspace, named.uri), moved) if place):
        try:
            check_prefix(place)
        except ConfigError:  # a name from outside that leads nowhere here
            continue
        try:
            found = read_checkpoint(workspace, place)
        except CheckpointError as error:
            notes.append(f"it is gone: {error.seen}")
            continue
        if found.digest == named.digest:
            return found, ""
        notes.append(f"{place} has other content by now: {found.digest[:12]}, not {named.digest[:12]}")
    return None, notes[0] if own and notes else "it is in another workspace"


def _ancestor(workspace: Storage, known: CommittedCheckpoint, before: Mapping[str, str]) -> Ancestor:
    state = known.state
    origin = state.origin if state.parent is None else None
    return Ancestor(
        checkpoint=known.prefix,
        digest=known.digest,
        cycle=state.cycle,
        step=state.step,
        watermark=state.watermark,
        partitions={name: print_ for name, print_ in state.partitions.items() if before.get(name) != print_},
        settings_hash=state.settings_hash,
        code_version=state.code_version,
        figures=_figures(workspace, known),
        published="" if state.parent is not None or state.published is None else state.published.text,
        note="" if origin is None else f"it was imported from {origin.uri} ({origin.format})",
    )


def _figures(workspace: Storage, known: CommittedCheckpoint) -> dict[str, float]:
    """Metrics of the checkpoint: its best evaluation, what training said of it at its end, what the gate saw."""
    state = known.state
    found: dict[str, Any] = {}
    if state.best is not None and state.best.step == state.step:
        found[f"valid_{state.best.metric}"] = state.best.value
    if not _CYCLE.fullmatch(state.cycle):  # it names a folder next
        return found
    # What training said, when this is its checkpoint; the reader of a stage's result is a layer above.
    with suppress(KeyNotFound, ValueError, KeyError, TypeError, AttributeError):  # no result, or not one of ours
        result = json.loads(workspace.read_bytes(f"cycles/{state.cycle}/train/result.json"))
        if result["outputs"]["checkpoint"] == known.prefix:
            found |= {name: value for name, value in result["figures"].items() if name.startswith(HOLDOUTS)}
    try:
        verdict = load_verdict(workspace, state.cycle)
    except DataError:  # it is reported where it decides something; here it is one source of three
        verdict = None
    if verdict is not None and verdict.candidate.digest == known.digest:
        found |= verdict.figures
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
