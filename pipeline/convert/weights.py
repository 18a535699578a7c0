"""Named tensors from a file of unknown origin: safetensors, or what `torch.save` wrote. No code of the file is run."""

import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from pipeline.core.errors import CheckpointError
from pipeline.core.format import format_bytes

SAFETENSORS_SUFFIX = ".safetensors"
_COUNTERS = ("position_ids", "num_batches_tracked")  # whole numbers that models keep beside their weights
_SHARED = 4  # tied weights are stored once and counted twice; far more is a small file made to fill the memory
_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_NEXT = "convert it to safetensors where it was made"


def load_tensors(path: Path, source: str) -> dict[str, Tensor]:
    """Tensors by name, fp32 and contiguous on the CPU. `source`: what the file is called in messages.

    Raises CheckpointError naming the tensor or the code in the file that is refused.
    """
    found = _from_safetensors(path, source) if path.name.endswith(SAFETENSORS_SUFFIX) else _from_torch(path, source)
    if not found:
        raise CheckpointError(f"{source} holds no tensor", expected="the weights of a model")
    return {name: _checked(name, tensor, source) for name, tensor in found.items() if not name.endswith(_COUNTERS)}


def _from_safetensors(path: Path, source: str) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{source}: {error}", expected="a safetensors file", next_command="copy it again, or export it again"
        ) from error


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
    if not isinstance(content, Mapping):
        raise _no_state_dict(source, f"holds a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
            raise _no_state_dict(source, f"holds {name!r}, which is a {type(value).__name__}")
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in content.values())
    if size_bytes > _SHARED * path.stat().st_size:
        raise _no_state_dict(source, f"unfolds to {format_bytes(size_bytes)} of tensors that share their content")
    return content


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


def _no_state_dict(source: str, seen: str) -> CheckpointError:
    return CheckpointError(
        f"{source} {seen}",
        expected="a state dict: names and tensors, nothing else",
        next_command="torch.save(model.state_dict(), FILE)",
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
