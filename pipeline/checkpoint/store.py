"""Find, verify, load and delete the checkpoints in a workspace."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

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

# The content of state.json, which includes everything in a checkpoint except for tensors.

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
    """The checkpoint that a run started from."""

    uri: str
    digest: str = Field(description="Digest of the manifest, which identifies the content of the checkpoint")
    cycle: str
    step: int


class Best(Record):
    """The best validation result so far."""

    step: int
    metric: str
    value: float


class Origin(Record):
    """The source of a checkpoint that was imported from outside of this workspace."""

    uri: str
    format: str = Field(description="Format of the imported files, such as sentence-transformers")
    fingerprint: str = Field(description="xxh3_128 hash of the imported files")


class PublishedWeights(Record):
    """The pretrained encoder weights that training started from (model.init_from)."""

    uri: str = Field(description="URI of the weights file")
    sha256: str

    @property
    def text(self) -> str:
        return f"published weights {self.uri} (sha256 {self.sha256[:12]})"


class TrainState(Record):
    """The state that a run needs to resume. Note that `step` fully determines the state of the data loader."""

    retired: ClassVar[Mapping[str, Any]] = {"averaged": ...}
    schema_version: int = SCHEMA_VERSION
    cycle: str
    step: int = Field(ge=0, description="Number of completed optimizer steps, each of which consumes one global batch")
    max_steps: int
    identity: str = Field(description="Hash of everything that determines the weights; must match for a run to resume")
    identity_parts: dict[str, str] = Field(description="Components of the identity, used to report differences")
    model: ModelConfig
    inputs: InputSpec
    tokenizer_fingerprint: str
    watermark: str = Field(
        description="Newest dt= partition that this run or its parents trained on; empty for data without partitions"
    )
    partitions: dict[str, str] = Field(
        description="Fingerprints of all partitions that this run or its parents trained on, by name"
    )
    also_seen: dict[str, str] = Field(
        {},
        description="Names of other partitions that were trained on, by fingerprint: replayed partitions that arrived"
        " late or changed, and earlier contents of those in `partitions`",
    )
    parent: Parent | None
    best: Best | None
    origin: Origin | None = Field(None, description="Source of the checkpoint if it was imported")
    published: PublishedWeights | None = Field(
        None,
        description="Pretrained weights that the first run of the lineage started from, if any",
    )
    max_tokens: int | None = Field(
        None,
        description="Maximum length of texts used to train the encoder, including [CLS] and [SEP]; none if unknown",
    )
    earlier_steps: int = Field(
        0, ge=0, description="Number of optimizer steps of earlier runs whose moments this run has started with"
    )
    trained_head: bool = Field(
        True, description="Whether the relevance head was trained, which is required for meaningful scores"
    )
    temperature: float = Field(
        1.0,
        gt=0,
        description="Divisor of the logits that makes probabilities reliable, fitted to the validation split when this"
        " step was evaluated; 1 if it was not",
    )
    settings_hash: str
    code_version: str


def checkpoint_manifest(storage: Storage, prefix: str, *, next_command: str) -> Manifest:
    """Return the manifest of a committed checkpoint. Raises CheckpointError with `next_command` if there is none."""
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise CheckpointError(
            f"{storage.uri(prefix)} is not a committed checkpoint",
            expected="a folder with a MANIFEST.json of kind checkpoint",
            next_command=next_command,
        )
    return manifest


def parse_state(data: bytes) -> TrainState:
    """Parse a state.json. Raises ValidationError if it is invalid, and DataError if the schema is not supported."""
    state = TrainState.model_validate_json(data)
    if state.schema_version != SCHEMA_VERSION:
        raise DataError(f"{STATE} has schema {state.schema_version}")
    return state


Emit = Callable[..., None]
_STEP = re.compile(r"^step-(\d+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, which has been downloaded if necessary."""

    prefix: str
    uri: str
    folder: Path
    digest: str
    state: TrainState

    def weights(self) -> "dict[str, Tensor]":
        """Load the fp32 weights, which use Hugging Face names."""
        return _load_tensors(self.folder / WEIGHTS)

    def optimizer(self) -> "dict[str, Tensor]":
        """Load the optimizer state, which uses the names defined by TrainProgram."""
        return _load_tensors(self.folder / OPTIMIZER)

    def tokenizer(self) -> bytes:
        return (self.folder / TOKENIZER).read_bytes()


def prefix_of(cycle: str, step: int) -> str:
    """Return the key prefix of a checkpoint in the workspace."""
    return f"checkpoints/{cycle}/step-{step}"


def open_checkpoint(storage: Storage, prefix: str, cache_dir: Path) -> Checkpoint:
    """Fetch a checkpoint, verify the checksums of all files, and read its state.

    Raises CheckpointError if the checkpoint is missing or damaged.
    """
    uri = storage.uri(prefix)
    try:
        next_command = "use a checkpoint such as <workspace>/checkpoints/<cycle>/step-<n>"
        manifest = checkpoint_manifest(storage, prefix, next_command=next_command)
        folder = fetch_dir(storage, prefix, cache_dir)
        state = parse_state((folder / STATE).read_bytes())
    except (DataError, ValidationError, OSError) as error:
        raise CheckpointError(
            f"{uri}: {first_line(error)}",
            expected=f"a complete checkpoint with schema {SCHEMA_VERSION}",
            next_command="use an earlier checkpoint of the cycle",
        ) from error
    return Checkpoint(prefix, uri, folder, manifest.digest, state)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of a cycle, which are downloaded to `cache_dir` when they are opened."""

    storage: Storage
    cycle: str
    cache_dir: Path
    emit: Emit

    def steps(self) -> list[int]:
        """Return the steps of all committed checkpoints in ascending order, without verifying the checkpoints."""
        names = self.storage.list_dirs(f"checkpoints/{self.cycle}/")
        steps = sorted(int(match.group(1)) for name in names if (match := _STEP.match(name)))
        return [step for step in steps if self.storage.stat(f"{prefix_of(self.cycle, step)}/{MANIFEST_NAME}")]

    def open(self, step: int) -> Checkpoint:
        """Open the checkpoint for a step. Raises CheckpointError if it is missing or damaged."""
        return open_checkpoint(self.storage, prefix_of(self.cycle, step), self.cache_dir)

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """Return the newest valid checkpoint, if any, and the reasons why newer ones were rejected.

        Emits an event for each checkpoint that is rejected.
        """
        rejected: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.open(step), rejected
            except CheckpointError as error:
                rejected.append(error.seen)
                self.emit(EventName.CHECKPOINT_REJECTED, step=step, reason=error.seen)
        return None, rejected

    def delete(self, step: int) -> None:
        """Delete a checkpoint. The manifest is deleted first, so that a partially deleted checkpoint is never used."""
        prefix = prefix_of(self.cycle, step)
        self.storage.delete([f"{prefix}/{MANIFEST_NAME}"])
        self.storage.delete_prefix(f"{prefix}/")
        self.emit(EventName.CHECKPOINT_DELETED, step=step)


def _load_tensors(path: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file  # imports torch, which would slow down prepare by seconds

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}", expected="a safetensors file") from error
