"""A model spread over the ranks of a mesh, in place: its layers' matrices, then what is kept of layers, then shards.

The order is torchtitan's (torchtitan/models/llama3/infra/parallelize.py). A degree of 1 is no special case: the same
calls over groups of one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle

from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.core.shuffle import stream_key
from pipeline.parallel.activations import recompute_units
from pipeline.parallel.checkpoint import load
from pipeline.parallel.mesh import TENSOR, Mesh, check_same, current_mesh, has_mesh, init, raise_on_all_ranks
from pipeline.parallel.process_group import all_gather_objects, collective_errors, host_group
from pipeline.parallel.tensors import TensorPlan, fused_parts, load_shard, split, tensor_styles, watch_tensors

Model = TypeVar("Model", bound=nn.Module)
Unit = tuple[str, nn.Module]
"""A part of a model that is gathered and computed again by itself, as its layers are: its name, and itself."""
UnitRule = Callable[[nn.Module], Sequence[Unit]]
_DROPOUT, _INITIAL_VALUES = 1, 2  # purposes of streams


def find_units(model: nn.Module) -> list[Unit]:
    """Return the members of each ModuleList or Sequential that has two or more with parameters, all of one class.

    Of such lists within each other the outermost counts. What is in no unit stands with the model itself.
    """
    return list(_units(model, ""))


def _units(module: nn.Module, prefix: str) -> Iterator[Unit]:
    members = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        weighty = [(name, child) for name, child in members if next(child.parameters(), None) is not None]
        # A list of lists is never called itself: its members' members are.
        is_called = not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for _, child in weighty)
        if len(weighty) > 1 and len({type(child) for _, child in weighty}) == 1 and is_called:
            yield from weighty
            return
    for name, child in members:
        yield from _units(child, f"{name}.")


def transform(
    model: Model,
    *,
    units: UnitRule = find_units,
    tensor_plan: TensorPlan | None = None,
    weights: str | Path | None = None,
) -> Model:
    """Spread a model as the plan of `init` says, in place; then make the optimizer, of its parameters as they are now.

    Without `init` before it the plan is that of TRNPIPE_PARALLEL, else full sharding, and the device the parameters'.
    `units`: which parts are gathered and computed again one at a time; by default the members of its lists of layers.
    `tensor_plan`: how layers are split where tensor_degree is above 1; by default that of a Hugging Face model's
    configuration. `weights`: a folder that `save` wrote, for a model that was built under `delayed_init`. All ranks get
    the weights of rank 0, and gradients are means over data-parallel ranks. A loop that accumulates gradients saves
    traffic by `model.set_requires_gradient_sync(is_last)` before each forward pass. `shard` "state" shards gradients as
    well: parameters are whole from a unit's forward pass to the end of its backward pass.
    Raises ConfigError, on every rank, for a model that cannot be spread so.
    """
    if not has_mesh():
        kinds = {parameter.device.type for parameter in model.parameters() if not parameter.is_meta}
        init(device=kinds.pop() if len(kinds) == 1 else "auto")
    return parallelize(model, current_mesh(), units=units, tensor_plan=tensor_plan, weights=weights)


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    units: UnitRule = find_units,
    tensor_plan: TensorPlan | None = None,
    weights: str | Path | None = None,
) -> Model:
    """Return the model itself, on the mesh's device, its parameters DTensors of fp32 (or of the type that they had)."""
    plan, layout = mesh.plan, mesh.layout
    found: list[Unit] = []
    delayed: list[tuple[str, nn.Module]] = []
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
        delayed = _delayed(model, is_loaded=weights is not None)
        styles = tensor_styles(model, tensor_plan, layout) if layout.tensor_size > 1 else []
    check_same(_described(model), "model")
    seed = all_gather_objects(torch.initial_seed(), "agreeing on a seed")[0] if plan.seed is None else plan.seed
    with collective_errors("spreading the model", mixed=True), torch.no_grad():
        if layout.world_size > 1:
            _take_from_rank_0(model, mesh.backend.device)
        arrange(model, [unit for _, unit in found], styles, mesh)
        if delayed:  # as to_empty, which would take the buffers' values as well
            device = mesh.backend.device
            model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)  # type: ignore[no-untyped-call]
        if weights is not None:
            load(weights, model)
        elif delayed:
            _draw(model, delayed, stream_key(seed, _INITIAL_VALUES, 0))
    watch_tensors()
    if plan.seed is not None or layout.tensor_size > 1:
        mesh.backend.seed(stream_key(seed, _DROPOUT, layout.data_rank))
    return model


def arrange(model: nn.Module, units: list[nn.Module], styles: list[tuple[str, ParallelStyle]], mesh: Mesh) -> None:
    """Do in place what `parallelize` does once ranks agree; bench/scaling does it without peers."""
    split(model, styles, mesh.devices[TENSOR])
    if mesh.plan.recompute == "units":
        recompute_units(units, offload=mesh.plan.offload, pin_memory=not mesh.backend.shares_host_memory)
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
    """Move in place, keeping what is tied. fully_shard sets `.data`, which not every device takes of the host's."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("meta", device.type):
            there = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                there = nn.Parameter(there, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, there)  # type: ignore[no-untyped-call]


def _take_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Copy every parameter and buffer: ranks may have been seeded differently, and shards of two models are none."""
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


# Delayed initialisation: a model is built without its parameters' memory, and filled after it is spread.


@contextmanager
def delayed_init() -> Iterator[None]:
    """Build modules whose parameters are on the meta device; `transform` fills them, a part on each rank.

    With the values of `transform(..., weights=FOLDER)`, else by `reset_parameters` of each module that has parameters,
    under the plan's seed or rank 0's: other values than without delay, the same on any mesh. Buffers are real from the
    start: most are computed once, in the constructor.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _delayed(model: nn.Module, *, is_loaded: bool) -> list[tuple[str, nn.Module]]:
    """Return modules with parameters on meta, by name. Raises ConfigError for one that nothing will fill."""
    found = []
    for name, module in model.named_modules():
        own = [key for key, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        if own and not is_loaded and not hasattr(module, "reset_parameters"):
            raise ConfigError(
                f"delayed_init: nothing gives {name + '.' if name else ''}{own[0]} its values:"
                f" {type(module).__name__} has no reset_parameters",
                expected="a method reset_parameters that sets all parameters of the module itself",
                next_command="transform(..., weights=FOLDER) with what save wrote, or build the module outside of it",
            )
        found += [(name, module)] if own else []
    return found


def _draw(model: nn.Module, modules: Sequence[tuple[str, nn.Module]], seed: int) -> None:
    """Fill this rank's part of each module: the whole of one at a time is drawn in host memory, on every rank alike."""
    parts = fused_parts(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in modules:
            spread = dict(module.named_parameters(recurse=False))
            for key, parameter in spread.items():
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
                setattr(module, key, nn.Parameter(whole, parameter.requires_grad))
            module.reset_parameters()  # type: ignore[operator]
            for key, parameter in spread.items():
                load_shard(parameter, getattr(module, key).detach(), parts.get(f"{name}.{key}".lstrip("."), 1))
                setattr(module, key, parameter)


# What has to be right before ranks meet.


def _described(model: nn.Module) -> str:
    """Return what has to be the same on all ranks, so that their collectives meet."""
    entries = [*model.named_parameters(), *model.named_buffers()]
    listed: list[Json] = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in entries
    ]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {size} parameters ({fingerprint(listed)[:8]})"


def check_units(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise ConfigError for parameters that sharding would untie without a word."""
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = max((f"unit {unit!r}" for unit, _ in units if name.startswith(f"{unit}.")), key=len, default="no unit")
        first_name, first_owner = owners.setdefault(id(parameter), (name, owner))
        if first_owner != owner:
            raise ConfigError(
                f"{first_name!r} (in {first_owner}) and {name!r} (in {owner}) are one parameter: it would be two after"
                " sharding, with different gradients",
                expected="parameters shared only within one unit, or by what is in no unit",
                next_command="transform(..., units=...) with one unit that holds both, or without these units",
            )
