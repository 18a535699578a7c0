"""Checkpoints of one cycle in the workspace: find, verify, load, delete."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, ValidationError
from safetensors import SafetensorError

from pipeline.core.errors import CheckpointError, DataError, first_line
from pipeline.core.manifest import MANIFEST_NAME, Manifest
from pipeline.core.record import Record
from pipeline.io.commit import fetch_dir, read_manifest
from pipeline.io.storage import Storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.telemetry.events import EventName

if TYPE_CHECKING:
    from torch import Tensor

# state.json: all content of a checkpoint that is not a tensor.

SCHEMA_VERSION = 1
KIND = "checkpoint"
WEIGHTS, OPTIMIZER, STATE, HF_CONFIG, TOKENIZER = (
    "model.safetensors",
    "optimizer.safetensors",
    "state.json",
    "config.json",
    "tokenizer.json",
)


class Parent(Record):
    """The checkpoint a run started from."""

    uri: str
    digest: str = Field(description="Digest of its manifest, which identifies its content")
    cycle: str
    step: int


class Best(Record):
    """The best validation result so far."""

    step: int
    metric: str
    value: float


class Origin(Record):
    """The source of imported weights, the root of a lineage that began outside of this workspace."""

    uri: str
    format: str = Field(description="Format of the imported files, such as sentence-transformers")
    fingerprint: str = Field(description="xxh3_128 over the imported files")


class PublishedWeights(Record):
    """Weights of a published encoder that training started from (model.init_from)."""

    uri: str = Field(description="URI of the weights file")
    sha256: str

    @property
    def text(self) -> str:
        return f"published weights {self.uri} (sha256 {self.sha256[:12]})"


class TrainState(Record):
    """The state of a run, from which it resumes. `step` is also the complete state of the data loader."""

    schema_version: int = SCHEMA_VERSION
    cycle: str
    step: int = Field(ge=0, description="Optimizer steps done, which is also the number of global batches consumed")
    max_steps: int
    identity: str = Field(description="Hash of everything that determines the weights; a run resumes only on a match")
    identity_parts: dict[str, str] = Field(description="Components of the identity, to report a difference")
    model: ModelConfig
    inputs: InputSpec
    tokenizer_fingerprint: str
    watermark: str = Field(
        description="Newest dt= partition trained on, by this run or its parents; empty for flat data"
    )
    partitions: dict[str, str] = Field(
        description="Fingerprint of every partition trained on, by this run or its parents"
    )
    also_seen: dict[str, str] = Field(
        {},
        description="Further content that was trained on, fingerprint to name: replayed partitions that arrived late or"
        " changed, and earlier content of a name in `partitions`",
    )
    parent: Parent | None
    best: Best | None
    origin: Origin | None = Field(None, description="Source of an imported checkpoint")
    published: PublishedWeights | None = Field(
        None, description="Initial weights of this run or the first of its lineage; none: from scratch or unknown"
    )
    max_tokens: int | None = Field(
        None, description="Longest text the encoder was trained on, including [CLS] and [SEP]; none: unknown"
    )
    trained_head: bool = Field(
        True, description="Whether the relevance head was trained, so that scores are meaningful"
    )
    settings_hash: str
    code_version: str


def checkpoint_manifest(storage: Storage, prefix: str, *, next_command: str) -> Manifest:
    """Return the manifest of a committed checkpoint. Raises CheckpointError with `next_command` if there is none."""
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise CheckpointError(
            f"{storage.uri(prefix)} holds no committed checkpoint",
            expected="a folder with a MANIFEST.json of kind checkpoint",
            next_command=next_command,
        )
    return manifest


def parse_state(data: bytes) -> TrainState:
    """Parse a state.json. Raises ValidationError if it is invalid, and DataError for another schema."""
    state = TrainState.model_validate_json(data)
    if state.schema_version != SCHEMA_VERSION:
        raise DataError(f"{STATE} has schema {state.schema_version}")
    return state


Emit = Callable[..., None]
_STEP = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint in local files."""

    prefix: str
    uri: str
    folder: Path
    digest: str
    state: TrainState

    def weights(self) -> "dict[str, Tensor]":
        """Load the fp32 weights, under Hugging Face names."""
        return _load_tensors(self.folder / WEIGHTS)

    def optimizer(self) -> "dict[str, Tensor]":
        """Load the optimizer state, under the names of TrainProgram."""
        return _load_tensors(self.folder / OPTIMIZER)

    def tokenizer(self) -> bytes:
        return (self.folder / TOKENIZER).read_bytes()


def prefix_of(cycle: str, step: int) -> str:
    """Return the key prefix of a step's checkpoint in the workspace."""
    return f"checkpoints/{cycle}/step-{step}"


def open_checkpoint(storage: Storage, prefix: str, cache_dir: Path) -> Checkpoint:
    """Fetch a checkpoint, verify every byte and read its state. Raises CheckpointError if it is missing or damaged."""
    uri = storage.uri(prefix)
    try:
        next_command = "use a checkpoint such as <workspace>/checkpoints/<cycle>/step-<n>, or --train.start scratch"
        manifest = checkpoint_manifest(storage, prefix, next_command=next_command)
        folder = fetch_dir(storage, prefix, cache_dir)
        state = parse_state((folder / STATE).read_bytes())
    except (DataError, ValidationError, OSError) as error:
        raise CheckpointError(
            f"{uri}: {first_line(error)}",
            expected=f"a complete checkpoint of schema {SCHEMA_VERSION}",
            next_command="use an earlier checkpoint of the cycle",
        ) from error
    return Checkpoint(prefix, uri, folder, manifest.digest, state)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one cycle, which are fetched to `cache_dir` when opened."""

    storage: Storage
    cycle: str
    cache_dir: Path
    emit: Emit

    def steps(self) -> list[int]:
        """Return the steps with a committed checkpoint in ascending order, without verifying them."""
        names = self.storage.list_dirs(f"checkpoints/{self.cycle}/")
        steps = sorted(int(match.group(1)) for name in names if (match := _STEP.match(name)))
        return [step for step in steps if self.storage.stat(f"{prefix_of(self.cycle, step)}/{MANIFEST_NAME}")]

    def open(self, step: int) -> Checkpoint:
        """Open a step's checkpoint. Raises CheckpointError if it is missing or damaged."""
        return open_checkpoint(self.storage, prefix_of(self.cycle, step), self.cache_dir)

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint, if any, and the problems of newer ones, emitting an event for each."""
        rejected: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.open(step), rejected
            except CheckpointError as error:
                rejected.append(error.seen)
                self.emit(EventName.CHECKPOINT_REJECTED, step=step, reason=error.seen)
        return None, rejected

    def delete(self, step: int) -> None:
        """Delete a checkpoint, its marker first, so that a half-deleted one never counts as complete."""
        prefix = prefix_of(self.cycle, step)
        self.storage.delete([f"{prefix}/{MANIFEST_NAME}"])
        self.storage.delete_prefix(f"{prefix}/")
        self.emit(EventName.CHECKPOINT_DELETED, step=step)


def _load_tensors(path: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file  # imports torch, which would cost prepare seconds

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}", expected="a safetensors file") from error
