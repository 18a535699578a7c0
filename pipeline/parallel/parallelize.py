"""A model spread over the ranks of a mesh, in place: its layers' matrices, then recompute and offload, then shards.

The order is torchtitan's (torchtitan/models/llama3/infra/parallelize.py). A degree of 1 is no special case: the same
calls over groups of one rank.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle

from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.core.shuffle import stream_key
from pipeline.parallel.delayed_init import Recipe, recipe_of
from pipeline.parallel.files import load
from pipeline.parallel.gang import all_gather_objects, collective_errors, host_group
from pipeline.parallel.mesh import TENSOR, Mesh, check_same, raise_on_all_ranks
from pipeline.parallel.offload import offload_units
from pipeline.parallel.parts import guard
from pipeline.parallel.recompute import recompute_units
from pipeline.parallel.tensor_plan import TensorPlan, fused_parts, split, tensor_styles
from pipeline.parallel.tensors import load_shard, plain_entries
from pipeline.parallel.units import Unit, UnitRule, check_units, find_units

Model = TypeVar("Model", bound=nn.Module)
_DROPOUT = 1  # purpose of a stream


def parallelize(
    model: Model, mesh: Mesh, *, units: UnitRule = find_units, tensor_plan: TensorPlan | None = None
) -> Model:
    """The model itself, on the mesh's device, its parameters DTensors of fp32 (or of the type that they had).

    All ranks have the weights of rank 0 then, and gradients are means over data-parallel ranks. `shard` "state" keeps
    a unit's parameters whole from its forward pass to the end of its backward pass: ZeRO-1's traffic, and its
    gradients are sharded as well. Raises ConfigError, on every rank, for a model that cannot be spread so.
    """
    plan, layout = mesh.plan, mesh.layout
    found: list[Unit] = []
    with raise_on_all_ranks("checking the model"):
        if mesh.backend.is_lazy:
            raise ConfigError(
                f"a module to be spread on {mesh.backend.device_name()}",
                expected="a device that runs each operation as it comes: cpu, cuda",
                next_command="init(..., device='cpu'); our own training has a program for this device (trnpipe train)",
            )
        found = list(units(model))
        check_units(model, found)
        if plan.recompute == "units" and not found:
            raise ConfigError(
                f"recompute units of {type(model).__name__}, in which there are none",
                expected="a ModuleList or Sequential of layers of one class",
                next_command="transform(..., units=...), or recompute none",
            )
        styles = tensor_styles(model, tensor_plan, layout.tensor_size) if layout.tensor_size > 1 else []
        recipes = _recipes(model)
    check_same(_described(model), "model")
    with collective_errors("spreading the model", mixed=True), torch.no_grad():
        if layout.world_size > 1:
            _take_from_rank_0(model, mesh.backend.device)
        arrange(model, [unit for _, unit in found], styles, mesh)
        if recipes:
            _fill(model, recipes, mesh.backend.device)
    guard(model)
    if plan.seed is not None or layout.tensor_size > 1:
        seed = all_gather_objects(torch.initial_seed(), "agreeing on a seed")[0] if plan.seed is None else plan.seed
        mesh.backend.seed(stream_key(seed, _DROPOUT, layout.data_rank))
    return model


def arrange(model: nn.Module, units: list[nn.Module], styles: list[tuple[str, ParallelStyle]], mesh: Mesh) -> None:
    """In place, what `parallelize` does once ranks agree; without peers too, for memory.py."""
    split(model, styles, mesh.devices[TENSOR])
    if mesh.plan.recompute == "units":
        recompute_units(units)
    if mesh.plan.offload_horizon:
        offload_units(units, mesh.plan.offload_horizon, mesh.backend)
    reduced = torch.bfloat16 if mesh.plan.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=reduced, reduce_dtype=torch.float32 if reduced else None)
    outermost = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, torch.float32 if reduced else None)
    whole = mesh.plan.shard == "state"
    for unit in units:
        _move(unit, mesh.backend.device)
        fully_shard(unit, mesh=mesh.data_axes, reshard_after_forward=not whole, mp_policy=policy)
    _move(model, mesh.backend.device)
    fully_shard(model, mesh=mesh.data_axes, mp_policy=outermost)  # its own parameters stay whole after forward


def _move(module: nn.Module, device: torch.device) -> None:
    """In place, keeping what is tied. fully_shard would set `.data`, which not every device takes of the host's."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("meta", device.type):
            there = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, there)  # type: ignore[no-untyped-call]


def _described(model: nn.Module) -> str:
    """What has to be the same on all ranks, so that their collectives meet."""
    entries = [*model.named_parameters(), *model.named_buffers()]
    listed: list[Json] = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in entries
    ]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {size} parameters ({fingerprint(listed)[:8]})"


def _recipes(model: nn.Module) -> dict[str, Recipe]:
    """Of parameters on meta. Raises ConfigError for one whose values cannot be told."""
    found = {name: recipe_of(parameter) for name, parameter in model.named_parameters() if parameter.is_meta}
    for name, recipe in found.items():
        if recipe.lost:
            owner = model.get_submodule(name.rpartition(".")[0])
            raise ConfigError(
                f"delayed_init: the values of {name!r} ({type(owner).__name__}) cannot be told: {recipe.lost}",
                expected="a module that sets its parameters in place, as nn.Linear does in reset_parameters",
                next_command="delayed_init(weights=FOLDER) with what save wrote, or this module built outside of it",
            )
    folders = sorted({str(recipe.weights) for recipe in found.values()})
    if len(folders) > 1:
        raise ConfigError(
            f"delayed_init: parts of {type(model).__name__} take their values from {', '.join(folders)}",
            expected="one delayed_init for all of a model (None: what its constructors draw)",
            next_command="build the model in one `with delayed_init(...)`",
        )
    return found


def _fill(model: nn.Module, recipes: Mapping[str, Recipe], device: torch.device) -> None:
    """Values of each rank's part, from a file, or drawn as rank 0 would have drawn them: one parameter at a time."""
    # As to_empty, which would take the buffers' values as well.
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    folder = next(iter(recipes.values())).weights
    if folder is not None:
        load(folder, model)
        return
    if dist.get_world_size() > 1:
        drawn: list[Any] = [[recipe.drawn_by() for recipe in recipes.values()]]
        with collective_errors("exchanging how values are drawn"):
            dist.broadcast_object_list(drawn, group=host_group())
        for recipe, found in zip(recipes.values(), drawn[0], strict=True):
            recipe.draw_as(found)
    parts = fused_parts(model)
    for name, parameter in plain_entries(model):
        if name in recipes:
            load_shard(parameter, recipes[name].drawn().__getitem__, parts.get(name, 1))


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Every parameter and buffer: ranks may have been seeded differently, and shards of two models are none."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.numel():
            whole: Tensor = tensor.detach().to(device).contiguous()
            if whole.dtype in _SENT_AS_THEY_ARE:
                dist.broadcast(whole, 0)
            else:
                whole = whole.cpu()
                dist.broadcast(whole.view(-1).view(torch.uint8), 0, group=host_group())
            tensor.detach().copy_(whole)


_SENT_AS_THEY_ARE = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
"""Types that every library knows: AWS's tests of a broadcast have these alone. Others are sent by hosts, as bytes."""
