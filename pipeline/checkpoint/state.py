"""state.json: everything about a checkpoint that is not a tensor."""

from pydantic import Field

from pipeline.core.errors import CheckpointError, DataError
from pipeline.core.manifest import Manifest
from pipeline.core.record import Record
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage
from pipeline.model.config import InputSpec, ModelConfig

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
    parent: Parent | None
    best: Best | None
    origin: Origin | None = Field(None, description="Of an imported checkpoint")
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
