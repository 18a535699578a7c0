"""What is imported: a folder or one file on any storage, read within limits. No code of it is ever run."""

from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from pipeline.checkpoint.store import KIND as CHECKPOINT
from pipeline.checkpoint.store import Parent, PublishedWeights
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_bytes
from pipeline.core.manifest import FileRecord, Manifest
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.io.commit import check_record, read_manifest, record_of
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import HEAD_BYTES, Storage, check_downloaded, join_key, os_errors, place_of
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import parse_json

JSON_BYTES = 4 * 2**20
TOKENIZER_BYTES = 128 * 2**20
WEIGHT_BYTES = 32 * 2**30  # eight billion parameters in fp32

EXPORT, EXPORT_FILE = "export", "trnpipe.json"
"""Kind of the manifest of an exported folder, and the file that describes it."""
SCHEMA_VERSION = 1
Format = Literal["sentence-transformers", "safetensors", "torchscript"]

Json = TypeVar("Json", bound=BaseModel)


class ExportRecord(Record):
    """The checkpoint behind an exported folder, and the files that hold its weights."""

    retired: ClassVar[dict[str, Any]] = {"programs": []}

    schema_version: int = SCHEMA_VERSION
    format: str = Field(description="A Format, or transformers or torch, which earlier versions wrote")
    checkpoint: Parent = Field(description="What was exported; the parent of what is imported from here")
    model: ModelConfig
    inputs: InputSpec
    max_tokens: int = Field(ge=3, description="Texts are cut to this, [CLS] and [SEP] included")
    tokenizer_fingerprint: str
    watermark: str
    partitions: dict[str, str]
    also_seen: dict[str, str] = Field({}, description="As in the state of a checkpoint")
    trained_head: bool = True
    published: PublishedWeights | None = Field(None, description="As in the state of a checkpoint")
    settings_hash: str
    code_version: str
    weights: tuple[str, ...] = Field(description="Files that together hold every tensor; none: a program only")
    family: Literal["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "modernbert"] = Field(
        "bert", description="Whose names the encoder has; those of RoBERTa were written by earlier versions alone"
    )


@dataclass
class Source:
    """What is to be imported. Files of an export of trnpipe are checked against its manifest."""

    storage: Storage
    folder: str
    """Prefix of the folder; empty for a single file."""
    file: str = ""
    """Name of a single file."""
    manifest: Manifest | None = None
    records: dict[str, FileRecord] = field(default_factory=dict)
    """Of every file that was read."""

    @property
    def uri(self) -> str:
        return self.where(self.file)

    @property
    def fingerprint(self) -> str:
        """Names the content of all that was read."""
        return fingerprint({name: record.xxh3_128 for name, record in self.records.items()})

    def where(self, name: str) -> str:
        """Return the URI of one file; '' for the folder itself."""
        return self.storage.uri(join_key(self.folder, name) if name else self.folder)

    def has(self, name: str) -> bool:
        return self.storage.stat(join_key(self.folder, name)) is not None

    def read(self, name: str, limit_bytes: int = JSON_BYTES) -> bytes:
        """Read a small file. Raises CheckpointError if it is missing, too large or differs from its manifest."""
        data = self.storage.read_bytes(self._checked_key(name, limit_bytes))
        self._note(name, record_of(BytesIO(data)))
        return data

    def json(self, name: str, model: type[Json]) -> Json:
        """Read a small JSON file. Raises ConfigError naming the field that does not fit."""
        return parse_json(self.read(name), model, self.where(name))

    def local(self, name: str, scratch: Path) -> Path:
        """Return a file of weights as a local one, downloaded if needed. Raises as `read` does."""
        key = self._checked_key(name, WEIGHT_BYTES)
        path = self.storage.local_path(key)
        if path is None:
            path = scratch / name.replace("/", "-")
            self.storage.download(key, path)
        with (
            os_errors("reading", self.where(name)),
            path.open("rb") as file,
            progress(f"reading {name}", path.stat().st_size, "bytes") as advance,
        ):
            check_downloaded(file.peek(HEAD_BYTES)[:HEAD_BYTES], self.where(name), CheckpointError)
            self._note(name, record_of(file, self.storage.stop, advance))
        return path

    def _checked_key(self, name: str, limit_bytes: int) -> str:
        key = join_key(self.folder, name)
        stat = self.storage.stat(key)
        if stat is None or stat.size_bytes > limit_bytes:
            raise CheckpointError(
                f"{self.where(name)} {f'has {format_bytes(stat.size_bytes)}' if stat else 'does not exist'}",
                expected=f"a file of at most {format_bytes(limit_bytes)}",
                next_command="copy the whole folder, or name the file with the weights",
            )
        return key

    def _note(self, name: str, record: FileRecord) -> None:
        if self.manifest is not None and name in self.manifest.files:
            try:
                check_record(self.where(name), self.manifest.files[name], record)
            except DataError as error:
                raise CheckpointError(
                    error.seen, expected=error.expected, next_command="export the model again"
                ) from error
        self.records[name] = record


def open_source(text: str, *, retry: RetryPolicy, stop: StopSignal) -> Source:
    """Open the folder or file at a path or URI. Raises ConfigError if nothing is there, or a checkpoint of ours."""
    storage, name = place_of(text, retry=retry, stop=stop)
    if storage.stat(name) is not None:
        return Source(storage, "", file=name)
    if next(iter(storage.list(name)), None) is None:
        raise ConfigError(
            f"{storage.uri(name)} does not exist",
            expected="a Hugging Face folder, a safetensors file or a torch.save file",
            next_command="check the path",
        )
    try:
        manifest = read_manifest(storage, name)
    except DataError:  # a MANIFEST.json of another program
        manifest = None
    if manifest is not None and manifest.kind == CHECKPOINT:
        raise ConfigError(
            f"{storage.uri(name)} is a checkpoint of trnpipe already",
            expected="a model of other tools, or a folder that trnpipe export wrote",
            next_command=f"--train.start {storage.uri(name)}",
        )
    return Source(storage, name, manifest=manifest if manifest is not None and manifest.kind == EXPORT else None)
