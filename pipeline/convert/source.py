"""What comes from outside, a folder or one file on any storage, read within limits; of weights no code is ever run."""

import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import TypeVar, cast

import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.checkpoint.store import KIND as CHECKPOINT
from pipeline.convert.record import KIND as EXPORT
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import format_bytes
from pipeline.core.manifest import FileRecord, Manifest
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.io.commit import check_record, read_manifest, record_of
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, join_key, os_errors, place_of
from pipeline.model.hf_config import parse_json

JSON_BYTES = 4 * 2**20
TOKENIZER_BYTES = 128 * 2**20
WEIGHT_BYTES = 32 * 2**30  # eight billion parameters in fp32

Json = TypeVar("Json", bound=BaseModel)


@dataclass
class Source:
    """What is to be imported. Files of one of our own exports are held against its manifest."""

    storage: Storage
    folder: str
    """Prefix of the folder; of a single file, the empty prefix."""
    file: str = ""
    """Name, when a single file was given."""
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
        """URI of one file; '' for the folder itself."""
        return self.storage.uri(join_key(self.folder, name) if name else self.folder)

    def has(self, name: str) -> bool:
        return self.storage.stat(join_key(self.folder, name)) is not None

    def read(self, name: str, limit_bytes: int) -> bytes:
        """A small file. Raises CheckpointError when it is missing, too large or not what its manifest says."""
        self._check_size(name, limit_bytes)
        data = self.storage.read_bytes(join_key(self.folder, name))
        self._note(name, record_of(BytesIO(data)))
        return data

    def json(self, name: str, model: type[Json]) -> Json:
        """A small JSON file. Raises ConfigError naming the field that does not fit."""
        return parse_json(self.read(name, JSON_BYTES), model, self.where(name))

    def local(self, name: str, scratch: Path) -> Path:
        """A file of weights as a local one. Raises as `read` does."""
        self._check_size(name, WEIGHT_BYTES)
        key = join_key(self.folder, name)
        path = self.storage.local_path(key)
        if path is None:
            path = scratch / name.replace("/", "-")
            self.storage.download(key, path)
        with (
            os_errors("reading", self.where(name)),
            path.open("rb") as file,
            progress(f"reading {name}", path.stat().st_size, "bytes") as advance,
        ):
            self._note(name, record_of(file, self.storage.stop, advance))
        return path

    def _check_size(self, name: str, limit_bytes: int) -> None:
        stat = self.storage.stat(join_key(self.folder, name))
        if stat is None:
            raise CheckpointError(
                f"{self.where(name)} does not exist",
                expected=f"{name} in the folder of the model",
                next_command="copy the whole folder, or name the file with the weights",
            )
        if stat.size_bytes > limit_bytes:
            raise CheckpointError(
                f"{self.where(name)} has {format_bytes(stat.size_bytes)}",
                expected=f"at most {format_bytes(limit_bytes)}",
                next_command="check that it is what its name says",
            )

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
    """The folder or file at a path or URI. Raises ConfigError when nothing is there, or a checkpoint of ours."""
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


# Named tensors from a file of unknown origin: safetensors, or what `torch.save` wrote.

SAFETENSORS_SUFFIX = ".safetensors"
_COUNTERS = ("position_ids", "num_batches_tracked")  # whole numbers that models keep beside their weights
_SHARED = 4  # tied weights are stored once and counted twice; far more is a small file made to fill the memory
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_NEXT = "convert it to safetensors where it was made"


def load_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Tensors by name, fp32 and contiguous on the CPU. `source`: what the file is called in messages.

    Raises CheckpointError naming the tensor or the code in the file that is refused.
    """
    found: Mapping[str, Tensor]
    if path.name.endswith(SAFETENSORS_SUFFIX):
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source}: {error}", expected="a safetensors file", next_command="copy it again, or export it again"
            ) from error
    else:
        found = _from_torch(path, source)
    if not found:
        raise CheckpointError(f"{source} holds no tensor", expected="the weights of a model")
    return {name: _checked(name, tensor, source) for name, tensor in found.items() if not name.endswith(_COUNTERS)}


def _from_torch(path: Path, source: str) -> Mapping[str, Tensor]:
    _check_archive(path, source)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever a damaged or hostile stream leads it to
        named = _GLOBAL.search(str(error))
        seen = f"would run {named.group(1)} when it is loaded" if named else f"cannot be read: {type(error).__name__}"
        raise CheckpointError(
            f"{source} {seen}; nothing of it was run",
            expected="a state dict saved with torch.save: names and tensors, nothing else",
            next_command=_NEXT,
        ) from error
    seen = ""
    if not isinstance(content, Mapping):
        seen = f"holds a {type(content).__name__}"
    elif odd := [
        f"holds {name!r}, which is a {type(value).__name__}"
        for name, value in content.items()
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter)
    ]:
        seen = odd[0]
    else:
        size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
        if size_bytes > _SHARED * path.stat().st_size:
            seen = f"unfolds to {format_bytes(size_bytes)} of tensors that share their content"
    if seen:
        raise CheckpointError(
            f"{source} {seen}",
            expected="a state dict: names and tensors, nothing else",
            next_command="torch.save(model.state_dict(), FILE)",
        )
    return cast(Mapping[str, Tensor], content)


def _check_archive(path: Path, source: str) -> None:
    """torch.save stores its entries as they are: a packed one may be small on disk and fill the memory."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
    except (zipfile.BadZipFile, OSError) as error:
        raise CheckpointError(f"{source}: {error}", expected="a file that torch.save wrote") from error
    if packed:
        raise CheckpointError(
            f"{source}: its entry {packed[0]} is compressed",
            expected="a file that torch.save wrote",
            next_command=_NEXT,
        )


def _checked(name: str, tensor: Tensor, source: str) -> Tensor:
    """The tensor in fp32, memory of its own. Raises CheckpointError for what cannot be a weight."""
    seen = ""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_cpu:
        seen = f"{tensor.layout} on {tensor.device.type}{', quantised' if tensor.is_quantized else ''}"
    elif not tensor.is_floating_point():
        seen = str(tensor.dtype)
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        seen = f"shape {list(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes"
    elif not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        seen = "NaN or infinite values"
    if seen:
        raise CheckpointError(
            f"{source}: {name}: {seen}",
            expected="finite numbers in fp32, fp16 or bf16, all of them stored",
            next_command=_NEXT,
        )
    return tensor.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
