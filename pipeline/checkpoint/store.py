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

# state.json: everything about a checkpoint that is not a tensor.

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
    digest: str = Field(description="Digest of its manifest: names its content")
    cycle: str
    step: int


class Best(Record):
    """The best holdout evaluation so far."""

    step: int
    metric: str
    value: float


class Origin(Record):
    """Where imported weights come from: the root of a lineage that did not begin here."""

    uri: str
    format: str = Field(description="Kind of files that were read, such as sentence-transformers")
    fingerprint: str = Field(description="xxh3_128 over the files that were read")


class PublishedWeights(Record):
    """Weights of a published encoder that training began from (model.init_from)."""

    uri: str = Field(description="Of the file that was read")
    sha256: str

    @property
    def text(self) -> str:
        return f"published weights {self.uri} (sha256 {self.sha256[:12]})"


class TrainState(Record):
    """Where a run stands. The position in the data is `step`: the loader needs nothing else."""

    schema_version: int = SCHEMA_VERSION
    cycle: str
    step: int = Field(ge=0, description="Optimizer steps done; also the number of global batches consumed")
    max_steps: int
    identity: str = Field(description="Hash of all that decides the weights; a run continues only its own checkpoints")
    identity_parts: dict[str, str] = Field(description="What went into the identity, to name a difference")
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
        description="Further content that was trained on, fingerprint to name: replayed partitions that came late or"
        " changed, and what a name in `partitions` stood for before",
    )
    parent: Parent | None
    best: Best | None
    origin: Origin | None = Field(None, description="Of an imported checkpoint")
    published: PublishedWeights | None = Field(
        None, description="What this run, or the first one of its lineage, began from; none: scratch, or not known"
    )
    max_tokens: int | None = Field(
        None, description="Longest text the encoder has learnt to read, [CLS] and [SEP] included; none: not known"
    )
    trained_head: bool = Field(
        True, description="Whether the relevance head was trained, so that scores of pairs mean something"
    )
    settings_hash: str
    code_version: str


def checkpoint_manifest(storage: Storage, prefix: str, *, next_command: str) -> Manifest:
    """Of a committed checkpoint. Raises CheckpointError with `next_command` where there is none."""
    manifest = read_manifest(storage, prefix)
    if manifest is None or manifest.kind != KIND:
        raise CheckpointError(
            f"{storage.uri(prefix)} holds no committed checkpoint",
            expected="a folder with a MANIFEST.json of kind checkpoint",
            next_command=next_command,
        )
    return manifest


def parse_state(data: bytes) -> TrainState:
    """Content of its state.json. Raises ValidationError, and DataError for another schema."""
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
        """Named tensors, Hugging Face names, fp32."""
        return _tensors(self.folder / WEIGHTS)

    def optimizer(self) -> "dict[str, Tensor]":
        """The optimizer state under the names of TrainProgram."""
        return _tensors(self.folder / OPTIMIZER)

    def tokenizer(self) -> bytes:
        return (self.folder / TOKENIZER).read_bytes()


def prefix_of(cycle: str, step: int) -> str:
    """Where the checkpoint of one step lies in the workspace."""
    return f"checkpoints/{cycle}/step-{step}"


def open_checkpoint(storage: Storage, prefix: str, cache_dir: Path) -> Checkpoint:
    """Verify every byte and read the state. Raises CheckpointError naming what is wrong."""
    uri = storage.uri(prefix)
    try:
        named = "name a checkpoint as <workspace>/checkpoints/<cycle>/step-<n>, or --train.start scratch"
        manifest = checkpoint_manifest(storage, prefix, next_command=named)
        folder = fetch_dir(storage, prefix, cache_dir)
        state = parse_state((folder / STATE).read_bytes())
    except (DataError, ValidationError, OSError) as error:
        raise CheckpointError(
            f"{uri}: {first_line(error)}",
            expected=f"a whole checkpoint of schema {SCHEMA_VERSION}",
            next_command="use an earlier checkpoint of the cycle",
        ) from error
    return Checkpoint(prefix, uri, folder, manifest.digest, state)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one cycle. What is opened is fetched into `cache_dir`."""

    storage: Storage
    cycle: str
    cache_dir: Path
    emit: Emit

    def steps(self) -> list[int]:
        """Steps that have a marker, ascending; not yet verified."""
        names = self.storage.list_dirs(f"checkpoints/{self.cycle}/")
        found = sorted(int(match.group(1)) for name in names if (match := _STEP.match(name)))
        return [step for step in found if self.storage.stat(f"{prefix_of(self.cycle, step)}/{MANIFEST_NAME}")]

    def open(self, step: int) -> Checkpoint:
        """One step's checkpoint, verified. Raises CheckpointError."""
        return open_checkpoint(self.storage, prefix_of(self.cycle, step), self.cache_dir)

    def newest_valid(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that verifies, and what was wrong with the newer ones (each also an event)."""
        rejected: list[str] = []
        for step in reversed(self.steps()):
            try:
                return self.open(step), rejected
            except CheckpointError as error:
                rejected.append(error.seen)
                self.emit(EventName.CHECKPOINT_REJECTED, step=step, reason=error.seen)
        return None, rejected

    def delete(self, step: int) -> None:
        """Remove a checkpoint, marker first, so that a half-deleted one is never taken for whole."""
        prefix = prefix_of(self.cycle, step)
        self.storage.delete([f"{prefix}/{MANIFEST_NAME}"])
        self.storage.delete_prefix(f"{prefix}/")
        self.emit(EventName.CHECKPOINT_DELETED, step=step)


def _tensors(path: Path) -> "dict[str, Tensor]":
    from safetensors.torch import load_file  # torch costs prepare, which finds checkpoints, seconds

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}", expected="a safetensors file") from error
