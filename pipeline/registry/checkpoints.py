"""Which checkpoint is meant by a name, what the registry knows of it, and what it descends from. Without torch."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

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
from pipeline.io.commit import check_record, stream_record, verify_dir
from pipeline.io.storage import KeyNotFound, Storage, join_key, open_parent
from pipeline.registry.records import CheckpointRef, check_prefix, load_verdict, one_line, pointer_key
from pipeline.settings import Settings

CHECKPOINTS = "checkpoints/"
_CYCLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# Names: a prefix in the workspace, a path or URI anywhere, or the model in production.


def locate(named: str, settings: Settings, workspace: Storage) -> tuple[Storage, str]:
    """Return storage and prefix of a checkpoint named as `checkpoints/<cycle>/step-<n>` in the workspace, path or URI.

    The storage is `workspace` itself for all that lies there. Raises ConfigError if it names no folder.
    """
    key = key_in(workspace, named)
    if key is not None:
        return workspace, check_prefix(key)
    return open_parent(named, retry=settings.storage, stop=workspace.stop)


def prefix_in(workspace: Storage, named: str) -> str:
    """Return the prefix in the workspace. Raises ConfigError for a checkpoint elsewhere."""
    key = key_in(workspace, named)
    if key is None and "://" in named:
        raise ConfigError(
            f"{one_line(named)} is not in the workspace {workspace.root}",
            expected="a checkpoint of this workspace, as checkpoints/<cycle>/step-<n>",
            next_command="give --workspace",
        )
    return check_prefix(named.rstrip("/") if key is None else key)


def key_in(workspace: Storage, named: str) -> str | None:
    """Return the key of a prefix, path or URI in the workspace; None for other places."""
    named, folder = named.rstrip("/"), workspace.local_path("")
    if named.startswith(CHECKPOINTS):
        return named
    if named.startswith(f"{workspace.root}/"):
        return named.removeprefix(f"{workspace.root}/")
    if "://" not in named and folder is not None and Path(named).absolute().is_relative_to(folder):
        return Path(named).absolute().relative_to(folder).as_posix()
    return None


def incumbent_prefix(workspace: Storage, model_name: str) -> str | None:
    """Return the prefix of the promoted checkpoint; None if nothing is promoted. Raises CheckpointError.

    Only this field is read: an older version must not fail at other fields of a newer one.
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
    """Return where the checkpoint of `train.start` lies; None for `scratch`, and `incumbent` if nothing is promoted."""
    if start == "scratch":
        return None
    if start == "incumbent":
        prefix = incumbent_prefix(workspace, settings.model_name)
        return None if prefix is None else (workspace, prefix)
    return locate(start, settings, workspace)


def parent_tokenizer(settings: Settings, workspace: Storage) -> bytes | None:
    """Return tokenizer.json of the parent, which new data must use. Training verifies the checkpoint itself."""
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
    """A committed checkpoint of this workspace, with its manifest's digest."""

    prefix: str
    digest: str
    state: TrainState

    @property
    def place(self) -> CheckpointRef:
        return CheckpointRef(checkpoint=self.prefix, digest=self.digest)


def read_checkpoint(workspace: Storage, prefix: str, *, every_byte: bool = False) -> CommittedCheckpoint:
    """Read its manifest and state; with `every_byte` verify all other files, too.

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
        check_record(workspace.uri(join_key(prefix, STATE)), manifest.files[STATE], stream_record(BytesIO(data)))
        state = parse_state(data)
    except (DataError, ValidationError) as error:
        raise _bad(uri, error) from error
    return CommittedCheckpoint(prefix, manifest.digest, state)


def check_present(workspace: Storage, prefix: str) -> None:
    """Check that all files are still there in full size, by one listing. Raises CheckpointError."""
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
    """One checkpoint of a lineage.

    `checkpoint`: prefix in the workspace, or the URI that its child names if it is not there. `watermark`: newest dt=
    partition that it or its parents were trained on, empty for flat data. `partitions`: name to fingerprint of those
    that its parent had not seen, all of them if the parent is lost. `figures`: metrics, as far as they are known.
    Of the last one, `published`: the published weights that the lineage began from, and `note`: why it ends here,
    unless it is the root.
    """

    checkpoint: str
    digest: str
    cycle: str
    step: int
    watermark: str = ""
    partitions: Mapping[str, str] = field(default_factory=dict)
    settings_hash: str = ""
    code_version: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    published: str = ""
    note: str = ""


def lineage(workspace: Storage, prefix: str) -> tuple[Ancestor, ...]:
    """Return the checkpoint at `prefix`, its parent, and so on. The last one is the root, or has a note.

    A parent counts only if its content is what its child says; it may have moved with the whole workspace. Raises
    CheckpointError if there is no checkpoint at `prefix`, ConfigError for an invalid prefix.
    """
    child = read_checkpoint(workspace, prefix)
    ancestors: list[Ancestor] = []
    seen = {child.digest}
    while child.state.parent is not None:
        workspace.stop.raise_if_set("following a lineage")
        named, (parent, note) = child.state.parent, _parent(workspace, child.state.parent)
        if parent is None or parent.digest in seen:
            published = child.state.published.text if child.state.published else ""
            note = note or "the lineage runs in a circle"
            last = Ancestor(named.uri, named.digest, named.cycle, named.step, published=published, note=note)
            return (*ancestors, _ancestor(workspace, child, {}), last)
        ancestors.append(_ancestor(workspace, child, parent.state.partitions))
        seen.add(parent.digest)
        child = parent
    return (*ancestors, _ancestor(workspace, child, {}))


def _parent(workspace: Storage, named: Parent) -> tuple[CommittedCheckpoint | None, str]:
    """Return the parent in this workspace, or why there is none."""
    # It may be there, or below checkpoints/ of a workspace that was moved.
    moved = CHECKPOINTS + named.uri.rpartition(f"/{CHECKPOINTS}")[2] if f"/{CHECKPOINTS}" in named.uri else None
    notes = []
    for place in dict.fromkeys(place for place in (key_in(workspace, named.uri), moved) if place):
        try:
            found = read_checkpoint(workspace, place)
        except ConfigError:  # a name from outside that leads nowhere here
            continue
        except CheckpointError as error:
            notes.append(f"it is gone: {error.seen}")
            continue
        if found.digest == named.digest:
            return found, ""
        notes.append(f"{place} has other content by now: {found.digest[:12]}, not {named.digest[:12]}")
    own = named.uri.startswith(f"{workspace.root}/")
    return None, notes[0] if own and notes else "it is in another workspace"


def _ancestor(workspace: Storage, known: CommittedCheckpoint, before: Mapping[str, str]) -> Ancestor:
    state = known.state
    is_root = state.parent is None
    figures: dict[str, float | None] = {}
    if state.best is not None and state.best.step == state.step:
        figures[f"valid_{state.best.metric}"] = state.best.value
    if _CYCLE.fullmatch(state.cycle):  # it names a folder
        with suppress(DataError):  # a damaged verdict is reported where it decides something
            verdict = load_verdict(workspace, state.cycle)
            if verdict is not None and verdict.candidate.digest == known.digest:
                figures |= verdict.figures
    return Ancestor(
        checkpoint=known.prefix,
        digest=known.digest,
        cycle=state.cycle,
        step=state.step,
        watermark=state.watermark,
        partitions={name: print_ for name, print_ in state.partitions.items() if before.get(name) != print_},
        settings_hash=state.settings_hash,
        code_version=state.code_version,
        figures={name: value for name, value in figures.items() if value is not None},
        published=state.published.text if is_root and state.published else "",
        note=f"it was imported from {state.origin.uri} ({state.origin.format})" if is_root and state.origin else "",
    )
