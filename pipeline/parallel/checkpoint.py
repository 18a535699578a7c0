"""Save and load a sharded model and its optimizer in a format that does not depend on the mesh.

Note that rank 0 holds the full, unsharded state in host memory while saving and loading.
"""

import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule

from pipeline.checkpoint.store import OPTIMIZER, WEIGHTS
from pipeline.core.errors import CheckpointError, ConfigError, DataError, TransientError
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir
from pipeline.io.paths import cache_folder, temporary_folder
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, open_parent, os_errors
from pipeline.parallel.mesh import raise_on_all_ranks, run_without_timeout
from pipeline.parallel.process_group import all_gather_objects, collective_errors
from pipeline.parallel.tensors import fused_parts, interleave_rows

KIND = "weights"
_GROUPS = "optimizer"
"""Metadata key in the optimizer file that holds the parameter groups and scalar state as JSON."""
_GATHER = StateDictOptions(full_state_dict=True, cpu_offload=True)
State = dict[str, Any]
Tensors = dict[str, Tensor]


def save(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Save the model, and optionally its optimizer, to a folder or an s3:// URI.

    A folder that was not saved completely is never loaded. If the folder exists, it is replaced, and cannot be loaded
    in the meantime, so save each step to a new folder.

    This must be called on all ranks, but only rank 0 writes. It writes model.safetensors, plus optimizer.safetensors if
    an optimizer is passed. Tied tensors are written once, under the first of their names. On every rank, raises
    ConfigError if the optimizer contains parameters that don't belong to the model, and TransientError if the write or
    a collective fails.
    """
    with raise_on_all_ranks("opening the folder"):
        storage, name = _location(folder)
        reshard(model)
        if optimizer is not None:
            _group_names(model, optimizer)
    tied = _tied(model)
    with collective_errors("gathering the state to save", mixed=True):
        state = get_model_state_dict(model, options=_GATHER)
        weights: State = {key: value for key, value in state.items() if key not in tied}
        files: dict[str, tuple[Tensors, dict[str, str]]] = {WEIGHTS: (weights, {"format": "pt"})}
        if optimizer is not None:
            files[OPTIMIZER] = _as_tensors(get_optimizer_state_dict(model, optimizer, options=_GATHER))
    with raise_on_all_ranks("collecting the state"):
        if other := [key for key, value in weights.items() if not isinstance(value, Tensor)]:
            raise ConfigError(
                f"the state of the model has {other[0]}, which is not a tensor",
                expected="only tensors, which safetensors can store",
                next_command="return a tensor from get_extra_state",
            )

    def write() -> None:
        target = storage.local_path(name)
        with os_errors("writing", storage.uri(name)):
            if target is not None:  # stage on the target's filesystem, so that the commit is an atomic rename
                atomic.make_dirs(target.parent)
            temporary = TemporaryDirectory(dir=temporary_folder()) if target is None else atomic.temp_dir(target)
            with temporary as staging:
                for file, (tensors, metadata) in files.items():
                    _write(Path(staging) / file, _reorder_fused(model, tensors, for_file=True), metadata)
                commit_dir(storage, Path(staging), name, kind=KIND, fields={})

    run_without_timeout(write if _is_main() else lambda: None, "saving")


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:  # safetensors raises this when the disk is full
        raise TransientError(f"{path.name} cannot be written: {error}", expected="free disk space") from error
    path.chmod(0o644)  # safetensors creates files that only the owner can read


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Load a model, and optionally its optimizer, from a folder written by `save` on any mesh.

    Raises CheckpointError on every rank if the folder is missing or corrupted, or if it doesn't match the model or the
    optimizer.
    """
    with raise_on_all_ranks("opening the folder"):
        storage, name = _location(folder)
        reshard(model)
        names = [] if optimizer is None else _group_names(model, optimizer)
    uri = storage.uri(name)

    def read() -> tuple[State, State]:
        if not _is_main():
            return {}, {}
        try:
            local = fetch_dir(storage, name, cache_folder(os.environ) / KIND, deep=True)
            weights = load_file(local / WEIGHTS)
            weights |= {key: weights[first] for key, first in _tied(model).items() if first in weights}
            check_shapes(uri, tensor_shapes(model.state_dict()), tensor_shapes(weights))
            state = {} if optimizer is None else _read_optimizer(local / OPTIMIZER, model)
        except (DataError, SafetensorError, OSError, json.JSONDecodeError, KeyError) as error:
            problem = error.seen if isinstance(error, DataError) else f"{uri}: {error}"
            raise CheckpointError(
                problem, expected="a folder written by trnpipe.save", next_command="load an earlier folder"
            ) from error
        if optimizer is not None and [group["params"] for group in state["param_groups"]] != names:
            raise CheckpointError(
                f"{uri} has {len(state['param_groups'])} parameter groups that differ from the optimizer's",
                expected=f"the optimizer's {len(names)} groups, with the same parameters",
                next_command="build the optimizer with the same parameter groups as when it was saved",
            )
        return _reorder_fused(model, weights, for_file=False), state

    weights, state = run_without_timeout(read, "loading")
    is_distributed = dist.is_initialized()
    options = StateDictOptions(full_state_dict=is_distributed, broadcast_from_rank0=is_distributed)
    with collective_errors("loading", mixed=True):
        set_model_state_dict(model, weights, options=options)
        saved_names: list[str] = next(filter(None, all_gather_objects([*state.get("state", ())], "loading")), [])
        if optimizer is not None and saved_names:
            with frozen_except(model, saved_names):
                set_optimizer_state_dict(model, optimizer, state, options=options)
        elif optimizer is not None:  # torch does not support optimizers without state, such as SGD without momentum
            saved = next(filter(None, all_gather_objects(state.get("param_groups"), "loading")))
            for group, saved_group in zip(optimizer.param_groups, saved, strict=True):
                group.update({key: value for key, value in saved_group.items() if key != "params"})


def reshard(model: nn.Module) -> None:
    """Free the parameters that the last forward pass gathered, if no backward pass followed."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def frozen_except(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Freeze parameters without optimizer state inside the block, because torch would raise KeyError for them.

    A parameter has no state if it never had a gradient. `names`: parameters with state.
    """
    known = set(names)
    frozen = [value for name, value in model.named_parameters() if value.requires_grad and name not in known]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def _reorder_fused(model: nn.Module, tensors: Mapping[str, Tensor], *, for_file: bool) -> Tensors:
    """Reorder the rows of fused parameters and their moments, which are consecutive in files but interleaved in memory.

    `for_file`: whether to convert from the in-memory order to the file order, instead of the other way round.
    """
    num_fused, result = fused_parts(model), dict(tensors)
    for name, tensor in tensors.items():
        parts = num_fused.get(name) or num_fused.get(name.partition(".")[2], 1)  # moments are named key.name
        if parts > 1 and tensor.ndim:
            result[name] = interleave_rows(tensor, len(tensor) // parts if for_file else parts)
    return result


def _group_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the parameter names in each group. Raises ConfigError if a parameter doesn't belong to the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if unknown := [parameter for parameter in parameters if id(parameter) not in names]:
        raise ConfigError(
            f"the optimizer has {len(unknown)} parameters that do not belong to the model",
            expected="an optimizer of model.parameters() after transform",
            next_command="call model = transform(model) before building the optimizer",
        )
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def check_shapes(source: str, expected: Mapping[str, list[int]], shapes: Mapping[str, list[int]]) -> None:
    """Raise CheckpointError if the tensor names or shapes in `source` don't match the model."""
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            raise CheckpointError(
                f"{source}: the shape of {name!r} is {shapes.get(name, 'missing')}",
                expected=f"{expected.get(name, 'no such tensor')}, as in the model",
                next_command="build the model and its optimizer the same way as when they were saved",
            )


def tensor_shapes(state: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return a mapping from tensor names to shapes, ignoring values that are not tensors."""
    return {name: list(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def _is_main() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _location(folder: str | Path) -> tuple[Storage, str]:
    return open_parent(str(folder), retry=RetryPolicy(), stop=StopSignal(), follow_links=True)


def _tied(model: nn.Module) -> dict[str, str]:
    """Return a mapping from every additional name of a tied tensor to its first name."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first for name, value in state.items() if (first := names.setdefault(id(value), name)) != name}


def _as_tensors(state: State) -> tuple[Tensors, dict[str, str]]:
    """Split an optimizer's state into tensors named `key.name` and JSON metadata with the scalars and options."""
    values = {f"{key}.{name}": value for name, slots in state.get("state", {}).items() for key, value in slots.items()}
    numbers = {name: value for name, value in values.items() if not isinstance(value, Tensor)}
    groups = []
    for group in state.get("param_groups", ()):
        options = {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items()}
        groups.append({"names": options.pop("params"), "options": options})
    metadata = {_GROUPS: json.dumps({"groups": groups, "numbers": numbers})}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}, metadata


def _read_optimizer(path: Path, model: nn.Module) -> State:
    with safe_open(path, "pt") as file:
        saved = json.loads(file.metadata()[_GROUPS])
    state: State = {}
    for full_name, value in {**_reorder_fused(model, load_file(path), for_file=False), **saved["numbers"]}.items():
        key, _, name = full_name.partition(".")
        state.setdefault(name, {})[key] = value
    groups = []
    for group in saved["groups"]:
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in group["options"].items()}
        groups.append({**options, "params": group["names"]})
    return {"state": state, "param_groups": groups}
