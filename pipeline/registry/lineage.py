"""What a model descends from: its parents, back to the root."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint.state import Parent
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.io.storage import KeyNotFound, Storage
from pipeline.registry.records import check_prefix
from pipeline.registry.verdict import load_verdict
from pipeline.registry.verified import Known, read_checkpoint

CHECKPOINTS = "checkpoints/"
HOLDOUTS = ("valid_", "test_")
_CYCLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
            last = Ancestor(lost.uri, lost.digest, lost.cycle, lost.step, note=note or "the lineage runs in a circle")
            return (*ancestors, _ancestor(workspace, child, {}), last)
        ancestors.append(_ancestor(workspace, child, parent.state.partitions))
        seen.add(parent.digest)
        child = parent
    return (*ancestors, _ancestor(workspace, child, {}))


def _parent(workspace: Storage, named: Parent) -> tuple[Known | None, str]:
    """The parent in this workspace, or why there is none."""
    own = named.uri.startswith(f"{workspace.root}/")
    notes = []
    for place in _places(workspace, named.uri):
        try:
            found = read_checkpoint(workspace, place)
        except CheckpointError as error:
            notes.append(f"it is gone: {error.seen}")
            continue
        if found.digest == named.digest:
            return found, ""
        notes.append(f"{place} has other content by now: {found.digest[:12]}, not {named.digest[:12]}")
    return None, notes[0] if own and notes else "it is in another workspace"


def _places(workspace: Storage, uri: str) -> Iterator[str]:
    """Where a checkpoint of this URI may be in this workspace: there, or below checkpoints/ of a workspace moved."""
    root = f"{workspace.root}/"
    tails = [uri.removeprefix(root)] if uri.startswith(root) else []
    tails += [CHECKPOINTS + uri.rpartition(f"/{CHECKPOINTS}")[2]] if f"/{CHECKPOINTS}" in uri else []
    for tail in dict.fromkeys(tails):
        try:
            yield check_prefix(tail)
        except ConfigError:  # a name from outside that leads nowhere here
            continue


def _ancestor(workspace: Storage, known: Known, before: Mapping[str, str]) -> Ancestor:
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
        note="" if origin is None else f"it was imported from {origin.uri} ({origin.format})",
    )


def _figures(workspace: Storage, known: Known) -> dict[str, float]:
    """Metrics of the checkpoint: its best evaluation, what training said of it at its end, what the gate saw."""
    state = known.state
    found: dict[str, Any] = {}
    if state.best is not None and state.best.step == state.step:
        found[f"valid_{state.best.metric}"] = state.best.value
    if not _CYCLE.fullmatch(state.cycle):  # it names a folder next
        return found
    found |= _training_figures(workspace, known)
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


def _training_figures(workspace: Storage, known: Known) -> dict[str, Any]:
    """Holdout metrics in the result of the train stage, when this is its checkpoint; its reader is a layer above."""
    try:
        result = json.loads(workspace.read_bytes(f"cycles/{known.state.cycle}/train/result.json"))
        if result["outputs"]["checkpoint"] != known.prefix:
            return {}
        return {name: value for name, value in result["figures"].items() if name.startswith(HOLDOUTS)}
    except (KeyNotFound, ValueError, KeyError, TypeError, AttributeError):  # none, or not one of ours
        return {}
