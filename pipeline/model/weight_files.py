"""Weights of unknown origin: the file of a folder that holds them, and its named tensors. No code in it is ever run."""

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.core.format import format_bytes
from pipeline.io.downloads import HEAD_BYTES, check_downloaded
from pipeline.io.storage import Storage, join_key

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
ADAPTER = "adapter_config.json"
SAFETENSORS_SUFFIX = ".safetensors"
_COUNTERS = ("position_ids", "num_batches_tracked")  # whole numbers that models keep beside their weights
_SHARED = 4  # tied weights are stored once and counted twice; far more is a small file made to fill the memory
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # of 8 bits only with scales of their own
_NEXT = "convert it to safetensors where it was made"
_WRAPPERS = ("module.", "_orig_mod.", "model.", "auto_model.", "0.auto_model.", "0.model.")


def find_weights(storage: Storage, folder: str = "") -> str:
    """Return the name of the file of weights in a Hugging Face folder.

    Raises ConfigError for an adapter, which transformers adds to the weights; CheckpointError for no or several files.
    """

    def has(name: str) -> bool:
        return storage.stat(join_key(folder, name)) is not None

    where = storage.uri(folder) if folder else storage.root
    if has(ADAPTER):
        raise ConfigError(
            f"{where} has an adapter ({ADAPTER})",
            expected="the weights of a whole encoder",
            next_command="merge it where it was made: model.merge_and_unload().save_pretrained(DIR)",
        )
    if found := next(filter(has, WEIGHT_FILES), ""):
        return found
    index = next((f"{name}.index.json" for name in WEIGHT_FILES if has(f"{name}.index.json")), "")
    why, remedy = f"no weights: neither {' nor '.join(WEIGHT_FILES)}", "copy the whole folder"
    if index:
        try:
            names = sorted(set(json.loads(storage.read_bytes(join_key(folder, index)))["weight_map"].values()))
        except (ValueError, LookupError, TypeError, AttributeError):
            names = []
        remedy = "save it again in one file: model.save_pretrained(DIR, max_shard_size='30GB')"
        lost = [name for name in names if isinstance(name, str) and not has(name)]
        why = f"its weights in several files ({index})" + (f", and {lost[0]} is missing" if lost else "")
    raise CheckpointError(
        f"{where} has {why}",
        expected=" or ".join(WEIGHT_FILES),
        next_command=remedy,
    )


def without_wrappers(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors without what DDP, torch.compile, Lightning or sentence-transformers put before every name."""
    found = dict(weights)
    while wrapper := next((one for one in _WRAPPERS if found and all(name.startswith(one) for name in found)), ""):
        found = {name.removeprefix(wrapper): tensor for name, tensor in found.items()}
    return found


def load_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Tensors by name, fp32, contiguous and in memory of their own on the CPU. `source`: its name in messages.

    Raises CheckpointError naming the tensor or the code in the file that is refused.
    """
    found = read_tensors(path, source)
    for name, tensor in found.items():
        check_tensor(name, tensor, source)
    return {
        name: tensor.detach().to(torch.float32).clone(memory_format=torch.contiguous_format)
        for name, tensor in found.items()
    }


def read_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Tensors by name as they are stored, without counters. Raises CheckpointError for a file that cannot be read."""
    with path.open("rb") as file:
        check_downloaded(file.read(HEAD_BYTES), source, CheckpointError)
    found: Mapping[str, Tensor]
    if path.name.endswith(SAFETENSORS_SUFFIX):
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{source} is damaged or no safetensors file: {error}",
                expected="a safetensors file",
                next_command="copy it again, or export it again",
            ) from error
    else:
        found = _from_torch(path, source)
    if not found:
        raise CheckpointError(f"{source} holds no tensor", expected="the weights of a model")
    return {name: tensor for name, tensor in found.items() if not name.endswith(_COUNTERS)}


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


def check_tensor(name: str, tensor: Tensor, source: str) -> None:
    """Raise CheckpointError for what cannot be a weight."""
    seen = ""
    if tensor.layout != torch.strided or tensor.is_quantized or not tensor.is_cpu:
        seen = f"{tensor.layout} on {tensor.device.type}{', quantised' if tensor.is_quantized else ''}"
    elif tensor.dtype not in _DTYPES:
        seen = str(tensor.dtype)
    elif tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        seen = f"shape {list(tensor.shape)} over {tensor.untyped_storage().nbytes()} bytes"
    elif not bool(torch.isfinite(tensor.to(torch.float32)).all()):
        seen = "NaN or infinite values"
    if seen:
        raise CheckpointError(
            f"{source}: {name}: {seen}",
            expected="finite numbers in fp32, fp16 or bf16, all of them stored",
            next_command="save it in fp32 where it was made: model.float().save_pretrained(DIR)",
        )
