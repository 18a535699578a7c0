"""Apply tensor parallelism, activation checkpointing and FSDP to a model in place.

They are applied in this order, which is also used by torchtitan (torchtitan/models/llama3/infra/parallelize.py).
Degrees of 1 don't need special handling.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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
"""The name and module of an FSDP unit, which is usually a layer.

The parameters of a unit are gathered together, and its activations are recomputed together.
"""
UnitRule = Callable[[nn.Module], Sequence[Unit]]
_DROPOUT, _INITIAL_VALUES = 1, 2  # purposes of random streams


def find_units(model: nn.Module) -> list[Unit]:
    """Find the repeated layers of a model, which are used as FSDP units by default.

    These are the members of each ModuleList or Sequential that contains at least two modules with parameters, if all of
    these are instances of the same class. Lists nested within another such list are ignored. Any other parameters
    belong to the root module.
    """
    return list(_units(model, ""))


def _units(module: nn.Module, prefix: str) -> Iterator[Unit]:
    members = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    if isinstance(module, nn.ModuleList | nn.Sequential):
        layers = [(name, child) for name, child in members if next(child.parameters(), None) is not None]
        # A list of lists is never called. Only the modules in the inner lists are.
        is_called = not any(isinstance(child, nn.ModuleList | nn.ModuleDict) for _, child in layers)
        if len(layers) > 1 and len({type(child) for _, child in layers}) == 1 and is_called:
            yield from layers
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
    """Shard a model in place according to the plan passed to `init`.

    The optimizer must be created afterwards, since this replaces the parameters. If `init` has not been called, it is
    called with the default plan (TRNPIPE_PARALLEL, or sharding over all ranks) and the device of the parameters.

    All ranks start from the weights of rank 0, and gradients are averaged over data-parallel ranks. As in
    DistributedDataParallel, the buffers of rank 0 are broadcast after each training step, and `model.no_sync()` is a
    context manager for all but the last micro-step of gradient accumulation. Note that `shard` "state" also shards
    gradients, but keeps the parameters of a unit gathered from its forward pass until the end of its backward pass.

    `units`: function that returns the FSDP units of a model, see `find_units`.
    `tensor_plan`: parallel styles of layers, which are required if tensor_degree is above 1. Defaults to the tensor
    parallel plan in the configuration of a Hugging Face model.
    `weights`: folder written by `save` to load the weights from, for a model that was built under `delayed_init`.
    Raises ConfigError on every rank if the plan cannot be applied to the model.
    """
    if not has_mesh():
        kinds = {parameter.device.type for parameter in model.parameters() if not parameter.is_meta}
        init(device=kinds.pop() if len(kinds) == 1 else "auto")
    parallelize(model, current_mesh(), units=units, tensor_plan=tensor_plan, weights=weights)
    sync_buffers(model)
    model.no_sync = partial(no_sync, model)  # type: ignore[assignment]
    return model


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without reducing them over ranks inside the block."""
    sharded = cast(FSDPModule, model)
    sharded.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        sharded.set_requires_gradient_sync(True)


def sync_buffers(model: nn.Module) -> None:
    """Broadcast the persistent buffers of rank 0, such as the statistics of a BatchNorm.

    As in DistributedDataParallel, this is done before a forward pass if the last one was with gradients, so that ranks
    may evaluate different numbers of batches.
    """
    saved, is_due = model.state_dict(), True
    known = [(name, buffer) for name, buffer in model.named_buffers() if name in saved and buffer.numel()]
    names = {name for name, buffer in known if buffer.dtype in _BROADCAST_DTYPES}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def broadcast(*_: object) -> None:
        nonlocal is_due
        for name, buffer in model.named_buffers() if is_due else ():
            if name in names:
                _broadcast_tensor(buffer, buffer.device)
        is_due = torch.is_grad_enabled()

    if names and dist.get_world_size() > 1:
        model.register_forward_pre_hook(broadcast)


def parallelize(
    model: Model,
    mesh: Mesh,
    *,
    units: UnitRule = find_units,
    tensor_plan: TensorPlan | None = None,
    weights: str | Path | None = None,
) -> Model:
    """Shard a model over the given mesh in place, as `transform` does. Parameters are replaced with DTensors."""
    plan, layout = mesh.plan, mesh.layout
    fsdp_units: list[Unit] = []
    delayed: list[tuple[str, nn.Module]] = []
    with raise_on_all_ranks("checking the model"):
        if mesh.backend.is_lazy:
            raise ConfigError(
                f"transform does not support {mesh.backend.device_name()}, which traces operations",
                expected="a device that executes operations eagerly, such as cpu or cuda",
                next_command="init(..., device='cpu'), or trnpipe train, which supports this device",
            )
        fsdp_units = list(units(model))
        check_units(model, fsdp_units)
        if plan.recompute == "units" and not fsdp_units:
            raise ConfigError(
                f"recompute units is set, but {type(model).__name__} has no units",
                expected="a ModuleList or Sequential whose layers have the same class",
                next_command="transform(..., units=...), or recompute none",
            )
        delayed = _delayed_modules(model, is_loaded=weights is not None)
        styles = tensor_styles(model, tensor_plan, layout) if layout.tensor_size > 1 else []
    check_same(_description(model), "model")
    seed = all_gather_objects(torch.initial_seed(), "agreeing on a seed")[0] if plan.seed is None else plan.seed
    with collective_errors("sharding the model", mixed=True), torch.no_grad():
        if layout.world_size > 1:
            _broadcast_from_rank_0(model, mesh.backend.device)
        modules: list[nn.Module] = [*(unit for _, unit in fsdp_units), model]
        apply_plan(model, modules[:-1], styles, mesh)
        for module in modules:
            module.register_forward_hook(_reshard_after_evaluation)
        if delayed:  # unlike to_empty, this preserves the values of buffers
            device = mesh.backend.device
            model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
        if weights is not None:
            load(weights, model)
        elif delayed:
            _initialize(model, delayed, stream_key(seed, _INITIAL_VALUES, 0))
    watch_tensors()
    if plan.seed is not None or layout.tensor_size > 1:
        mesh.backend.seed(stream_key(seed, _DROPOUT, layout.data_rank))
    return model


def apply_plan(model: nn.Module, units: list[nn.Module], styles: list[tuple[str, ParallelStyle]], mesh: Mesh) -> None:
    """Apply tensor parallelism, activation checkpointing and FSDP to a model in place.

    This is also called by bench/scaling, which uses a fake process group.
    """
    split(model, styles, mesh.devices[TENSOR])
    if mesh.plan.recompute == "units":
        recompute_units(units, offload=mesh.plan.offload, pin_memory=not mesh.backend.shares_host_memory)
    param_dtype = torch.bfloat16 if mesh.plan.precision == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype else None)
    root_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, torch.float32 if param_dtype else None)
    for unit in units:
        _move(unit, mesh.backend.device)
        fully_shard(unit, mesh=mesh.data_axes, reshard_after_forward=mesh.plan.shard != "state", mp_policy=policy)
    _move(model, mesh.backend.device)
    fully_shard(model, mesh=mesh.data_axes, mp_policy=root_policy)  # FSDP keeps root parameters gathered after forward


def _reshard_after_evaluation(module: nn.Module, *_: object) -> None:
    """Free gathered parameters that no backward pass will free, so that `model.parameters()` are the sharded ones."""
    if not torch.is_grad_enabled():
        cast(FSDPModule, module).reshard()


def _move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device in place while preserving tied tensors.

    Otherwise, `fully_shard` would move it by assigning to `.data`, which is not supported on some devices.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("meta", device.type):
            moved = tensor.detach().to(device)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]


def _broadcast_from_rank_0(model: nn.Module, device: torch.device) -> None:
    """Broadcast all parameters and buffers, since the ranks may have used different seeds to initialize them."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and tensor.numel():
            _broadcast_tensor(tensor, device)


def _broadcast_tensor(tensor: Tensor, device: torch.device) -> None:
    """Broadcast a tensor in place, over the collectives of `device` if they support its type."""
    full: Tensor = tensor.detach().to(device).contiguous()
    if full.dtype in _BROADCAST_DTYPES:
        dist.broadcast(full, 0)
    else:
        full = full.cpu()
        dist.broadcast(full.view(-1).view(torch.uint8), 0, group=host_group())
    tensor.data.copy_(full)  # unlike the tensor, `data` may change between a forward pass and its backward pass


_BROADCAST_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64)
"""Data types that all collective libraries support, which are the ones that AWS tests broadcast with.

Tensors with other data types are broadcast as bytes between the hosts.
"""


# Delayed initialization, where a model is built without allocating its parameters and is initialized after sharding.


@contextmanager
def delayed_init() -> Iterator[None]:
    """Create parameters on the meta device within the block, so that `transform` only allocates each rank's shards.

    `transform` then loads the weights from the folder passed as `weights`. If there is none, it calls
    `reset_parameters` on each module with parameters, using the seed of the plan or, by default, of rank 0. The initial
    values are different from those without delayed initialization, but do not depend on the mesh. Buffers are still
    created immediately, since most are computed in the constructor.
    """
    register = nn.Module.register_parameter
    delayed = dict[int, tuple[nn.Parameter, nn.Parameter]]()  # by id, which stays unique because it keeps the original

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            on_meta = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            _, parameter = delayed.setdefault(id(parameter), (parameter, on_meta))  # it may belong to several modules
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _delayed_modules(model: nn.Module, *, is_loaded: bool) -> list[tuple[str, nn.Module]]:
    """Return the modules (with their names) whose own parameters are on the meta device.

    Raises ConfigError if one of them cannot be initialized.
    """
    delayed = []
    for name, module in model.named_modules():
        own = [key for key, parameter in module.named_parameters(recurse=False) if parameter.is_meta]
        if own and not is_loaded and not hasattr(module, "reset_parameters"):
            raise ConfigError(
                f"delayed_init: {name + '.' if name else ''}{own[0]} cannot be initialized because"
                f" {type(module).__name__} has no reset_parameters",
                expected="a method reset_parameters that initializes all parameters that the module itself owns",
                next_command="transform(..., weights=FOLDER), or build the module outside of delayed_init",
            )
        delayed += [(name, module)] if own else []
    return delayed


def _initialize(model: nn.Module, modules: Sequence[tuple[str, nn.Module]], seed: int) -> None:
    """Initialize the shards on this rank.

    Every rank initializes one full module at a time in host memory, using the same seed, and copies its own shard.
    """
    parts = fused_parts(model)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, module in modules:
            sharded = dict(module.named_parameters(recurse=False))
            for key, parameter in sharded.items():
                full = torch.empty(parameter.shape, dtype=parameter.dtype)
                setattr(module, key, nn.Parameter(full, parameter.requires_grad))
            module.reset_parameters()  # type: ignore[operator]
            for key, parameter in sharded.items():
                load_shard(parameter, getattr(module, key).detach(), parts.get(f"{name}.{key}".lstrip("."), 1))
                setattr(module, key, parameter)


# Checks that run before the first collective.


def _description(model: nn.Module) -> str:
    """Describe a model by its class, size and a fingerprint of its tensors.

    If the description is different on any rank, the collectives would not match.
    """
    entries = [*model.named_parameters(), *model.named_buffers()]
    tensors: list[Json] = [
        [name, list(tensor.shape), str(tensor.dtype), tensor.requires_grad] for name, tensor in entries
    ]
    size = sum(parameter.numel() for parameter in model.parameters())
    return f"{type(model).__name__} of {size} parameters ({fingerprint(tensors)[:8]})"


def check_units(model: nn.Module, units: Sequence[Unit]) -> None:
    """Raise ConfigError if sharding would silently untie any tied parameters."""
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = max((f"unit {unit!r}" for unit, _ in units if name.startswith(f"{unit}.")), key=len, default="no unit")
        first_name, first_owner = owners.setdefault(id(parameter), (name, owner))
        if first_owner != owner:
            raise ConfigError(
                f"{first_name!r} (in {first_owner}) and {name!r} (in {owner}) are tied, but sharding would turn them"
                " into two parameters with different gradients",
                expected="parameters to be tied only within the same unit, or outside of all units",
                next_command="transform(..., units=...) with a single unit that contains both, or without these units",
            )
