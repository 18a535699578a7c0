"""A spread model and its optimizer in plain files: the same bytes from any mesh, read by any other.

No rank holds more than its own part and one whole parameter. `model.safetensors` is what `safetensors` itself would
write, so everything that reads such files reads it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from pipeline.checkpoint.store import OPTIMIZER, WEIGHTS
from pipeline.core.errors import CheckpointError, ConfigError, DataError
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir
from pipeline.io.paths import cache_folder, temporary_folder
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, os_errors, place_of
from pipeline.parallel.gang import collective_errors
from pipeline.parallel.mesh import raise_on_all_ranks, run_without_timeout
from pipeline.parallel.tensor_plan import fused_parts
from pipeline.parallel.tensors import Slices, full_cpu_tensor, load_shard, plain_entries

KIND = "weights"
_GROUPS = "optimizer"
"""Metadata of the optimizer's file: groups and numbers as JSON."""
_TYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}
"""Names of types in a file, in the order of safetensors (tensor.rs, Dtype); the last ones come first in a file."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    name: str
    tensor: Tensor
    parts: int = 1


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Write model.safetensors, and optimizer.safetensors, to a folder or an s3:// URI; complete or not at all.

    Every rank calls it; rank 0 writes. Raises ConfigError, TransientError, on every rank.
    """
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    files: dict[str, tuple[Sequence[Entry], dict[str, str]]] = {}
    with ExitStack() as stack:
        staging: Path | None = None
        with raise_on_all_ranks("opening the folder"):
            storage, name = _place(folder)
            files[WEIGHTS] = (_model_entries(model), {"format": "pt"})
            if optimizer is not None:
                files[OPTIMIZER] = _optimizer_entries(model, optimizer)
            for entries, _ in files.values():
                _check_types(entries)
            if is_main:
                with os_errors("writing", storage.uri(name)):
                    if (target := storage.local_path(name)) is None:
                        staging = Path(stack.enter_context(TemporaryDirectory(dir=temporary_folder())))
                    else:  # beside the place, so that publishing is a rename
                        atomic.make_dirs(target.parent)
                        staging = stack.enter_context(atomic.temp_dir(target))
        errors = [_written(staging and staging / file, *content) for file, content in files.items()]

        def commit() -> None:
            if staging is not None:
                with os_errors("writing", storage.uri(name)):
                    for error in filter(None, errors):
                        raise error
                commit_dir(storage, staging, name, kind=KIND, fields={})

        run_without_timeout(commit, "saving")


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """What `save` wrote, from any mesh; each rank reads its own part alone.

    Raises CheckpointError, on every rank, where nothing is saved, or that of another model or optimizer.
    """
    with raise_on_all_ranks("opening the folder"):
        storage, name = _place(folder)
    cache = cache_folder(os.environ) / KIND
    is_main = not dist.is_initialized() or dist.get_rank() == 0

    def fetch() -> Path:
        try:
            return fetch_dir(storage, name, cache, deep=is_main)
        except DataError as error:
            raise CheckpointError(error.seen, expected="a folder that save wrote") from error

    found = run_without_timeout(fetch, "loading")
    with raise_on_all_ranks("loading"):
        try:
            _read(found / WEIGHTS, _model_entries(model))
            if optimizer is not None:
                _load_optimizer(found / OPTIMIZER, model, optimizer)
        except (SafetensorError, OSError, json.JSONDecodeError) as error:
            raise CheckpointError(f"{found}: {error}", expected="files that save wrote") from error


def _check_types(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if entry.tensor.dtype not in _TYPES:
            raise ConfigError(
                f"{entry.name} is {entry.tensor.dtype}, which is not saved",
                expected=f"one of {', '.join(str(name) for name in _TYPES)}",
                next_command="persistent=False for a buffer that the constructor computes",
            )


def _place(folder: str | Path) -> tuple[Storage, str]:
    return place_of(str(folder), retry=RetryPolicy(), stop=StopSignal(), follow_links=True)


def _model_entries(model: nn.Module) -> list[Entry]:
    parts = fused_parts(model)
    return [Entry(name, tensor, parts.get(name, 1)) for name, tensor in plain_entries(model)]


# The format: eight bytes of length, a header as JSON, the tensors (github.com/huggingface/safetensors, "Format").


def _written(path: Path | None, entries: Sequence[Entry], metadata: Mapping[str, str]) -> OSError | None:
    """Every rank takes part, the one with a path writes. Its error is returned: the others must not wait for it."""
    types = list(_TYPES)
    ordered = sorted(entries, key=lambda entry: (-types.index(entry.tensor.dtype), entry.name))
    tensors = (full_cpu_tensor(entry.tensor, entry.parts).contiguous() for entry in ordered)
    blocks: Iterator[Any] = chain(
        (_header(ordered, metadata),), (tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors)
    )
    failure: OSError | None = None
    with collective_errors("gathering what is saved", mixed=True):
        if path is not None:
            try:
                with path.open("xb") as file:
                    for block in blocks:
                        file.write(block)
            except OSError as error:
                failure = error
        for _ in blocks:
            pass
    return failure


def _header(ordered: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    described: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for entry in ordered:
        start, end = end, end + entry.tensor.numel() * entry.tensor.element_size()
        described[entry.name] = {
            "dtype": _TYPES[entry.tensor.dtype],
            "shape": list(entry.tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _read(path: Path, entries: Sequence[Entry]) -> None:
    """Raises CheckpointError where names or shapes are those of another model."""
    with safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a mapping
        check_shapes(str(path), {entry.name: list(entry.tensor.shape) for entry in entries}, shapes)
        for entry in entries:
            load_shard(entry.tensor, _reader(file, entry.name), entry.parts)


def _reader(file: Any, name: str) -> Callable[[Slices], Tensor]:
    piece = file.get_slice(name)
    return lambda where: piece[where] if where else file.get_tensor(name)


def check_shapes(source: str, expected: Mapping[str, list[int]], shapes: Mapping[str, list[int]]) -> None:
    """Raises CheckpointError where the tensors of a source have other names or shapes than those of a model."""
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise CheckpointError(
                f"{source}: {name!r} is {shapes.get(name, 'not there')}",
                expected=f"{expected.get(name, 'nothing of that name')}, as the model has it",
                next_command="build the model, and its optimizer, as where they were saved",
            )


# An optimizer: tensors like its parameters and numbers, by name of the parameter, and options of its groups.


def _optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Entry], dict[str, str]]:
    parts, entries, numbers, groups = fused_parts(model), [], {}, []
    for names, group in _groups(model, optimizer):
        options = {key: value for key, value in group.items() if _is_option(key, value)}
        options = {key: value.item() if isinstance(value, Tensor) else value for key, value in options.items()}
        groups.append({"names": names, "options": options})
        for name, parameter in zip(names, group["params"], strict=True):
            for key, value in optimizer.state.get(parameter, {}).items():
                is_like = isinstance(value, Tensor) and value.shape == parameter.shape
                if is_like or (isinstance(value, Tensor) and value.numel() == 1):
                    entries.append(Entry(f"{key}.{name}", value, parts.get(name, 1) if is_like else 1))
                elif isinstance(value, bool | int | float):
                    numbers[f"{key}.{name}"] = value
                elif value is not None:
                    seen = f"of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                    raise ConfigError(
                        f"{type(optimizer).__name__} keeps {key!r} of {name!r}, {seen}",
                        expected="a number, or a tensor of the parameter's shape",
                        next_command="save(folder, model), and the optimizer by its own state_dict",
                    )
    return entries, {_GROUPS: json.dumps({"groups": groups, "numbers": numbers})}


def _load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Through its own load_state_dict, which knows where a step count lies."""
    with safe_open(path, "pt") as file:
        saved = json.loads((file.metadata() or {}).get(_GROUPS, '{"groups": []}'))
    found = list(_groups(model, optimizer))
    if [group["names"] for group in saved["groups"]] != [names for names, _ in found]:
        raise CheckpointError(
            f"{path} has the state of {len(saved['groups'])} groups of other parameters",
            expected=f"{len(found)} groups as the optimizer has them",
            next_command="make the optimizer as where it was saved",
        )
    by_name = {name: one for names, group in found for name, one in zip(names, group["params"], strict=True)}
    order = {name: index for index, name in enumerate(by_name)}
    state: dict[int, dict[str, Any]] = {}
    parts, entries = fused_parts(model), []
    with safe_open(path, "pt") as file:
        for whole_name in file.keys():  # noqa: SIM118 - not a mapping
            key, _, name = whole_name.partition(".")
            like = list(by_name[name].shape) == file.get_slice(whole_name).get_shape()
            value = torch.empty_like(by_name[name]) if like else file.get_tensor(whole_name)
            entries.append(Entry(whole_name, value, parts.get(name, 1) if like else 1))
            state.setdefault(order[name], {})[key] = value
    _read(path, entries)
    for whole_name, number in saved["numbers"].items():
        key, _, name = whole_name.partition(".")
        state.setdefault(order[name], {})[key] = number
    groups = []
    for (names, group), other in zip(found, saved["groups"], strict=True):
        options = {key: _like(group.get(key), value) for key, value in other["options"].items()}
        groups.append({**group, **options, "params": [order[name] for name in names]})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Each with the names of its parameters. Raises ConfigError for parameters that are not the model's."""
    names = {id(tensor): name for name, tensor in plain_entries(model)}
    for group in optimizer.param_groups:
        if unknown := [parameter for parameter in group["params"] if id(parameter) not in names]:
            raise ConfigError(
                f"the optimizer has {len(unknown)} parameters that are not the model's",
                expected="an optimizer of model.parameters() as they are after transform",
                next_command="model = transform(model) first, then the optimizer",
            )
        yield [names[id(parameter)] for parameter in group["params"]], group


def _is_option(key: str, value: object) -> bool:
    return key != "params" and (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, Tensor) and value.numel() == 1)
        or (isinstance(value, tuple | list) and all(isinstance(one, bool | int | float) for one in value))
    )


def _like(current: object, saved: Any) -> Any:
    """A saved option in the type that the optimizer has it in."""
    if isinstance(current, Tensor):
        return torch.full_like(current, saved)
    return tuple(saved) if isinstance(current, tuple) else saved
