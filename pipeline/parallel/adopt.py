"""The two lines with which a script of a user is adopted: `init`, then `transform`. The rest of it stays as it is."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.backends import module_device, process_group
from pipeline.core.errors import ConfigError
from pipeline.core.layout import Layout
from pipeline.parallel.config import Plan
from pipeline.parallel.gang import collective_errors, host_group, open_device, open_world_group
from pipeline.parallel.mesh import Mesh, check_same, open_mesh, raise_on_all_ranks
from pipeline.parallel.parallelize import Model, parallelize
from pipeline.parallel.tensor_plan import TensorPlan
from pipeline.parallel.units import UnitRule, find_units
from pipeline.parallel.world import world_from_env

TIMEOUT_S = 300.0
_mesh: Mesh | None = None


def init(
    plan: Plan | Mapping[str, Any] | str | Path | None = None, *, device: str = "auto", timeout_s: float = TIMEOUT_S
) -> Layout:
    """Join the ranks that torchrun or `trnpipe launch` describe, in the groups of `plan`; alone without them.

    `plan`: a Plan, its keys, JSON, or the path of a JSON file; None: what TRNPIPE_PARALLEL holds, else full sharding.
    `device`: auto (a GPU where there is one, else the host), or the name of a backend. `timeout_s`: of a collective.
    A process group that is there is used as it is. Raises ConfigError, on every rank, for a plan that cannot be.
    """
    global _mesh
    if _mesh is not None:
        raise ConfigError("init was called twice", expected="one plan a process")
    name = module_device() if device == "auto" else device
    world = world_from_env()
    if world.world_size > 1 and not dist.is_initialized():
        open_world_group(process_group(name), timeout_s)
    elif dist.is_initialized():
        with collective_errors("joining the other ranks"):
            host_group(timeout_s)
    found = Plan()
    with raise_on_all_ranks("reading the plan"):
        found = Plan.read(plan, os.environ)
    check_same(found.model_dump_json(), "plan")
    _mesh = open_mesh(found, open_device(name, world), timeout_s=timeout_s)
    if found.seed is not None:
        torch.manual_seed(found.seed)
    return _mesh.layout


def current_mesh() -> Mesh:
    """Of `init`. Raises ConfigError before it."""
    if _mesh is None:
        raise ConfigError("no plan is in force", expected="trnpipe.init(...) before this")
    return _mesh


def mesh_of(plan: Plan | Mapping[str, Any] | str | Path | None, *, device: str, timeout_s: float) -> Mesh:
    """That of `init`, which is done where it was not. Raises ConfigError where that was another plan or device."""
    if _mesh is None:
        init(plan, device=device, timeout_s=timeout_s)
    mesh = current_mesh()
    wanted = mesh.plan if plan is None else Plan.read(plan)
    if (wanted, device) != (mesh.plan, mesh.backend.name):
        raise ConfigError(
            f"a plan of {wanted.model_dump_json(exclude_defaults=True)} on {device}, and init had"
            f" {mesh.plan.model_dump_json(exclude_defaults=True)} on {mesh.backend.name}",
            expected="one plan a process",
        )
    return mesh


def layout() -> Layout:
    """This rank's place: data_rank and data_size are what a sampler needs. Raises ConfigError before `init`."""
    return current_mesh().layout


def transform(model: Model, *, units: UnitRule = find_units, tensor_plan: TensorPlan | None = None) -> Model:
    """Spread a model as the plan of `init` says, in place; then make the optimizer, of its parameters as they are now.

    Without `init` before it the plan is that of TRNPIPE_PARALLEL, else full sharding, and the device the parameters'.
    `units`: which parts are gathered and computed again one at a time; by default the members of its lists of layers.
    `tensor_plan`: how layers are split where tensor_degree is above 1; by default that of a Hugging Face model's
    configuration. All ranks get the weights of rank 0, and gradients are means over data-parallel ranks. A loop that
    accumulates gradients saves traffic by `model.set_requires_gradient_sync(is_last)` before each forward pass. `shard`
    "state" shards gradients as well: parameters are whole from a unit's forward pass to the end of its backward pass.
    Raises ConfigError, on every rank, for a model that cannot be spread so.
    """
    if _mesh is None:
        kinds = {parameter.device.type for parameter in model.parameters() if not parameter.is_meta}
        init(device=kinds.pop() if len(kinds) == 1 else "auto")
    return parallelize(model, current_mesh(), units=units, tensor_plan=tensor_plan)
