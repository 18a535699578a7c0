"""Locate checkpoints by name, and read their state and lineage. This module does not import torch."""

import hashlib
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
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.data.token_sets import load_digest
from pipeline.io.commit import check_record, stream_record, verify_dir
from pipeline.io.storage import KeyNotFound, Storage, join_key, open_parent
from pipeline.model.config import InputSpec
from pipeline.registry.records import CheckpointRef, check_prefix, load_verdict, one_line, pointer_key
from pipeline.settings import Settings

CHECKPOINTS = "checkpoints/"
_CYCLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")

# Resolving checkpoint names. A name can be a prefix in the workspace, a path, or a URI.


def locate(name: str, settings: Settings, workspace: Storage) -> tuple[Storage, str]:
    """Return the storage and the prefix of a checkpoint, given as `checkpoints/<cycle>/step-<n>`, a path, or a URI.

    If the checkpoint is in the workspace, `workspace` itself is returned as the storage. Raises ConfigError if the name
    is invalid.
    """
    key = key_in(workspace, name)
    if key is not None:
        return workspace, check_prefix(key)
    return open_parent(name, retry=settings.storage, stop=workspace.stop)


def prefix_in(workspace: Storage, name: str) -> str:
    """Return the prefix of a checkpoint in the workspace. Raises ConfigError if it is not in the workspace."""
    key = key_in(workspace, name)
    if key is None and "://" in name:
        raise ConfigError(
            f"{one_line(name)} is not in the workspace {workspace.root}",
            expected="a checkpoint in this workspace, such as checkpoints/<cycle>/step-<n>",
            next_command="set --workspace",
        )
    return check_prefix(name.rstrip("/") if key is None else key)


def key_in(workspace: Storage, name: str) -> str | None:
    """Convert a prefix, path or URI to a key in the workspace. Returns None if it is outside the workspace."""
    name, folder = name.rstrip("/"), workspace.local_path("")
    if name.startswith(CHECKPOINTS):
        return name
    if name.startswith(f"{workspace.root}/"):
        return name.removeprefix(f"{workspace.root}/")
    if "://" not in name and folder is not None and Path(name).absolute().is_relative_to(folder):
        return Path(name).absolute().relative_to(folder).as_posix()
    return None


def production_prefix(workspace: Storage, model_name: str) -> str | None:
    """Return the prefix of the production checkpoint, or None if no checkpoint is in production.

    Raises CheckpointError if the pointer is damaged.
    """
    # Only read this field, so that older versions do not fail if newer versions add fields.
    key = pointer_key(model_name)
    try:
        pointer = workspace.read_bytes(key)
    except KeyNotFound:
        return None
    try:
        return check_prefix(json.loads(pointer)["checkpoint"])
    except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
        raise CheckpointError(
            f"{workspace.uri(key)} is not a valid pointer to a checkpoint: {error}",
            expected='{"checkpoint": "checkpoints/<cycle>/step-<n>", ...}',
            next_command="promote a checkpoint again, or --train.start scratch",
        ) from error


def locate_start(start: str, settings: Settings, workspace: Storage) -> tuple[Storage, str] | None:
    """Return the storage and prefix of the checkpoint that `train.start` refers to.

    Returns None for `scratch`, and also for `incumbent` if no checkpoint is in production.
    """
    if start == "scratch":
        return None
    if start == "incumbent":
        prefix = production_prefix(workspace, settings.model_name)
        return None if prefix is None else (workspace, prefix)
    return locate(start, settings, workspace)


def parent_tokenizer(settings: Settings, workspace: Storage) -> bytes | None:
    """Read the tokenizer.json of the parent, which new data must be tokenised with.

    Returns None if there is no parent. Raises CheckpointError if the parent does not have a tokenizer.
    """
    return _parent_file(settings, workspace, TOKENIZER)


def parent_inputs(settings: Settings, workspace: Storage) -> InputSpec | None:
    """Read the inputs that the parent was trained with.

    Returns None if there is no parent. Raises CheckpointError if its state cannot be read.
    """
    state = _parent_file(settings, workspace, STATE)
    try:
        return None if state is None else parse_state(state).inputs
    except (DataError, ValidationError) as error:
        raise _bad(f"the {STATE} of the parent", error) from error


def _parent_file(settings: Settings, workspace: Storage, name: str) -> bytes | None:
    location = locate_start(settings.train.start, settings, workspace)
    if location is None:
        return None
    storage, prefix = location
    try:
        return storage.read_bytes(f"{prefix}/{name}")
    except KeyNotFound as error:
        raise CheckpointError(
            f"the parent {storage.uri(prefix)} has no {name}",
            expected="a committed checkpoint (train.start)",
            next_command="choose a different checkpoint with --train.start, or --train.start scratch",
        ) from error


def parent_buckets(settings: Settings, workspace: Storage) -> tuple[str, ...]:
    """Return the buckets of the parent's data. Returns an empty tuple if it has no parent in this workspace."""
    location = locate_start(settings.train.start, settings, workspace)
    if location is None or location[0] is not workspace or not location[1].startswith(CHECKPOINTS):
        return ()
    digest = load_digest(workspace, location[1].split("/")[1])
    return digest.buckets if digest else ()


# Reading and verifying checkpoints in this workspace.


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint in this workspace, with the digest of its manifest."""

    prefix: str
    digest: str
    state: TrainState
    sha256: Mapping[str, str]
    """SHA-256 of all files including the manifest, if every byte was read."""

    @property
    def ref(self) -> CheckpointRef:
        return CheckpointRef(checkpoint=self.prefix, digest=self.digest)


def read_checkpoint(workspace: Storage, prefix: str, *, every_byte: bool = False) -> CommittedCheckpoint:
    """Read the manifest and the state of a checkpoint. If `every_byte` is set, all other files are verified as well.

    Raises CheckpointError if the checkpoint is missing or damaged, and ConfigError if the prefix is invalid.
    """
    uri = workspace.uri(check_prefix(prefix))
    try:
        next_command = "choose a checkpoint in this workspace, such as checkpoints/<cycle>/step-<n>"
        manifest = checkpoint_manifest(workspace, prefix, next_command=next_command)
        if missing := sorted({WEIGHTS, STATE, TOKENIZER} - manifest.files.keys()):
            raise DataError(f"its manifest has no {missing[0]}")
        sha256 = dict[str, str]()
        if every_byte:
            content = workspace.read_bytes(join_key(prefix, MANIFEST_NAME))
            sha256[MANIFEST_NAME] = hashlib.sha256(content).hexdigest()
            read = Manifest.from_json(content), verify_dir(workspace, prefix, deep=True, sha256=sha256)
            if read != (manifest, manifest):
                raise DataError("the checkpoint is being replaced")
        data = workspace.read_bytes(join_key(prefix, STATE))
        check_record(workspace.uri(join_key(prefix, STATE)), manifest.files[STATE], stream_record(BytesIO(data)))
        state = parse_state(data)
    except (DataError, ValidationError) as error:
        raise _bad(uri, error) from error
    return CommittedCheckpoint(prefix, manifest.digest, state, sha256)


def check_present(workspace: Storage, prefix: str) -> None:
    """Verify that all files of a checkpoint exist and have the right size. Raises CheckpointError otherwise.

    This only needs to list the files, without reading them.
    """
    try:
        verify_dir(workspace, prefix, deep=False)
    except DataError as error:
        raise _bad(workspace.uri(prefix), error) from error


def _bad(uri: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{uri}: {first_line(error)}",
        expected=f"a complete checkpoint of schema {SCHEMA_VERSION}",
        next_command="choose a different checkpoint (trnpipe registry show lists those that were in production)",
    )


# The lineage of a checkpoint consists of its parent, the parent of its parent, and so on.


@dataclass(frozen=True)
class Ancestor:
    """A checkpoint in a lineage.

    Args:
        checkpoint: Prefix in the workspace. If the checkpoint is in a different workspace, this is the URI that its
            child has recorded.
        partitions: Fingerprints of the partitions that its parent was not trained on. If the parent is missing, this
            includes all partitions.
        figures: Metrics of the checkpoint, as far as they are known.
        published: For the last checkpoint, the published weights that training started from.
        note: For the last checkpoint, the reason why the lineage ends here although it is not the root.
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
    """Return the lineage of a checkpoint, starting with the checkpoint itself.

    The last checkpoint is the root, unless it has a note that explains why its parent is missing. A parent is only
    included if its digest matches the digest recorded by its child. Parents are also found if the whole workspace has
    been moved. Raises CheckpointError if `prefix` is not a valid checkpoint, and ConfigError if the prefix is invalid.
    """
    child = read_checkpoint(workspace, prefix)
    ancestors: list[Ancestor] = []
    digests = {child.digest}
    while child.state.parent is not None:
        workspace.stop.raise_if_set("following a lineage")
        link, (parent, note) = child.state.parent, _find_parent(workspace, child.state.parent)
        if parent is None or parent.digest in digests:
            published = child.state.published.text if child.state.published else ""
            note = note or "the lineage is circular"
            last = Ancestor(link.uri, link.digest, link.cycle, link.step, published=published, note=note)
            return (*ancestors, _ancestor(workspace, child, {}), last)
        ancestors.append(_ancestor(workspace, child, parent.state.partitions))
        digests.add(parent.digest)
        child = parent
    return (*ancestors, _ancestor(workspace, child, {}))


def _find_parent(workspace: Storage, link: Parent) -> tuple[CommittedCheckpoint | None, str]:
    """Return the parent if it exists in this workspace, otherwise None and the reason."""
    # Try the URI of the parent first, and then the same path below checkpoints/ in case the workspace was moved.
    moved = CHECKPOINTS + link.uri.rpartition(f"/{CHECKPOINTS}")[2] if f"/{CHECKPOINTS}" in link.uri else None
    notes = []
    for prefix in dict.fromkeys(prefix for prefix in (key_in(workspace, link.uri), moved) if prefix):
        try:
            checkpoint = read_checkpoint(workspace, prefix)
        except ConfigError:  # the prefix is not valid in this workspace
            continue
        except CheckpointError as error:
            notes.append(f"it cannot be read: {error.seen}")
            continue
        if checkpoint.digest == link.digest:
            return checkpoint, ""
        notes.append(f"{prefix} has changed: digest {checkpoint.digest[:12]} instead of {link.digest[:12]}")
    is_local = link.uri.startswith(f"{workspace.root}/")
    return None, notes[0] if is_local and notes else "it is in a different workspace"


def _ancestor(workspace: Storage, checkpoint: CommittedCheckpoint, parent_partitions: Mapping[str, str]) -> Ancestor:
    state = checkpoint.state
    is_root = state.parent is None
    figures: dict[str, float | None] = {}
    if state.best is not None and state.best.step == state.step:
        figures[f"valid_{state.best.metric}"] = state.best.value
    if _CYCLE.fullmatch(state.cycle):  # the name of the cycle is a valid folder name
        with suppress(DataError):  # commands that depend on the verdict report it if it is damaged
            verdict = load_verdict(workspace, state.cycle)
            if verdict is not None and verdict.candidate.digest == checkpoint.digest:
                figures |= verdict.figures
    return Ancestor(
        checkpoint=checkpoint.prefix,
        digest=checkpoint.digest,
        cycle=state.cycle,
        step=state.step,
        watermark=state.watermark,
        partitions={name: value for name, value in state.partitions.items() if parent_partitions.get(name) != value},
        settings_hash=state.settings_hash,
        code_version=state.code_version,
        figures={name: value for name, value in figures.items() if value is not None},
        published=state.published.text if is_root and state.published else "",
        note=f"it was imported from {state.origin.uri} ({state.origin.format})" if is_root and state.origin else "",
    )
