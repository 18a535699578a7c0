"""The device mesh of a run: replicate x shard x tensor, whose process groups have the run's timeout."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.backends import Backend, RankGroup, module_device, process_group
from pipeline.core.errors import ConfigError, TrnpipeError
from pipeline.core.layout import Axis, Layout, layout_of
from pipeline.parallel.config import Plan, Spread
from pipeline.parallel.process_group import (
    all_gather_objects,
    collective_errors,
    host_group,
    open_device,
    open_world_group,
)
from pipeline.parallel.world import world_from_env

REPLICATE: Axis = "replicate"
SHARD: Axis = "shard"
TENSOR: Axis = "tensor"
AXES = (REPLICATE, SHARD, TENSOR)
TIMEOUT_S = 300.0
T = TypeVar("T")


@dataclass(frozen=True)
class Mesh:
    """The device mesh a model is sharded over, with its plan."""

    plan: Plan
    layout: Layout
    backend: Backend
    devices: DeviceMesh
    """Always three axes, some of which may have size 1."""

    @property
    def data_axes(self) -> DeviceMesh:
        """The mesh for fully_shard: the shard axis, or replicate x shard (HSDP)."""
        return self.devices[REPLICATE, SHARD] if self.layout.replicate_size > 1 else self.devices[SHARD]

    def ranks(self, axis: Axis) -> RankGroup:
        """Return the group of ranks along an axis that this rank belongs to."""
        return RankGroup(self.layout.rank, self.layout.groups(axis), self.devices.get_group(axis))


def check_plan(plan: Spread, backend: Backend) -> None:
    """Raise ConfigError if this device cannot run the plan. Call it before anything is traced or allocated."""
    requested = {
        "parameters": plan.shards_parameters or (backend.compiles_steps and plan.shard_degree != 1),
        "tensor": plan.tensor_degree > 1,
        "offload": plan.offload,
        "process_group": plan.process_group != "",
    }
    for feature, description in _FEATURES.items():
        if requested[feature] and feature not in backend.parallelism:
            raise ConfigError(
                f"the plan requires {description}, which {backend.device_name()} does not support here",
                expected=f"only features of this device: {', '.join(sorted(backend.parallelism)) or 'shard state'}",
                next_command="docs/parallel.md, What each device allows",
            )


_FEATURES = {
    "parameters": "sharded parameters (shard all)",
    "tensor": "tensor parallelism",
    "offload": "activation offloading to the host",
    "process_group": "a custom process group",
}
"""Descriptions of the features in Backend.parallelism."""


def open_mesh(plan: Plan, backend: Backend, *, timeout_s: float) -> Mesh:
    """Build the mesh of all ranks, creating a process group of one rank if none is initialized.

    Raises ConfigError, the same on every rank, if the plan does not fit the number of ranks or the device.
    """
    if not dist.is_initialized():
        # fully_shard also reduces over groups of one rank (torch 2.9), and gloo would move gradients of a GPU through
        # the host. Devices that compile their steps run no collectives on a single rank.
        is_eager = not (backend.is_lazy or backend.compiles_steps)
        kind = (process_group(backend.name) if is_eager else None) or "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    check_plan(plan, backend)
    layout = layout_of(
        dist.get_rank(), dist.get_world_size(), shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree
    )
    sizes = (layout.replicate_size, layout.shard_size, layout.tensor_size)
    # Collectives of lazy devices outside of graphs run on the host.
    device_type = "cpu" if backend.is_lazy else backend.device.type
    override: dict[int | str, Any] = {SHARD: _import_process_group(plan.process_group)} if plan.process_group else {}
    with collective_errors("creating the process groups of the plan"):
        devices = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=override)
        for mesh in (devices, devices[REPLICATE, SHARD]):
            set_timeouts(mesh, timeout_s)
    return Mesh(plan, layout, backend, devices)


def _import_process_group(text: str) -> str:
    """Import MODULE of MODULE:NAME and return NAME. Raises ConfigError if MODULE does not register NAME."""
    module, _, name = text.partition(":")
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"process_group {text}: {error}", expected="an importable module") from error
    if name not in dist.Backend.backend_list:
        raise ConfigError(
            f"process_group {text}: module {module} does not register {name!r}",
            expected="a call of torch.distributed.Backend.register_backend, as in examples/process_group.py",
        )
    return name


def set_timeouts(mesh: DeviceMesh, timeout_s: float) -> None:
    """Set the timeout of every group of a mesh, because torch gives sub-groups 30 minutes regardless of the world's."""
    # Public since torch 2.14. tests/parallel/test_mesh.py fails if neither name exists.
    set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Raise the first rank's error on all ranks if the block, which must not use collectives, fails on any rank."""
    local_error: TrnpipeError | None = None
    try:
        yield
    except TrnpipeError as error:
        local_error = error
    errors = all_gather_objects(local_error, doing)
    rank, first = next(((rank, error) for rank, error in enumerate(errors) if error is not None), (0, None))
    if first is None:
        return
    is_same = all(error is not None and error.seen == first.seen for error in errors)
    message = first.seen if is_same else f"rank {rank}: {first.seen}"
    raise type(first)(message, expected=first.expected, next_command=first.next_command) from local_error


def run_without_timeout(work: Callable[[], T], doing: str) -> T:
    """Run `work` on each rank, polling with short collectives because it may take longer than their timeout."""
    pause_s = 0.001
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        while not all(all_gather_objects(future.done(), doing)):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
    with raise_on_all_ranks(doing):
        return future.result()


def check_same(value: object, what: str) -> None:
    """Raise ConfigError, the same on every rank, if ranks have different values. `what` names the value."""
    values = all_gather_objects(value, f"comparing the {what}s of all ranks")
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"rank 0 has {what} {values[0]}, but rank {rank} has {value}", expected=f"the same {what} on every rank"
            )


# The mesh of a user's script, one per process.

_mesh: Mesh | None = None


def init(
    plan: Plan | Mapping[str, Any] | str | Path | None = None, *, device: str = "auto", timeout_s: float = TIMEOUT_S
) -> Layout:
    """Join the ranks started by torchrun or `trnpipe launch`, if any, and build the mesh of `plan`.

    `plan`: a Plan, a mapping, JSON, or the path of a JSON file; None: TRNPIPE_PARALLEL if set, else full sharding.
    `device`: "auto" (a GPU if available, else the host), or the name of a backend. `timeout_s`: timeout of collectives.
    An initialized process group is used as it is. Raises ConfigError, on every rank, for an invalid plan.
    """
    global _mesh
    if _mesh is not None:
        raise ConfigError("init was called twice", expected="one plan per process")
    name = module_device() if device == "auto" else device
    world = world_from_env()
    if world.world_size > 1 and not dist.is_initialized():
        open_world_group(process_group(name), timeout_s)
    elif dist.is_initialized():
        with collective_errors("joining the other ranks"):
            host_group(timeout_s)
    resolved = Plan()
    with raise_on_all_ranks("reading the plan"):
        resolved = Plan.read(plan, os.environ)
    check_same(resolved.model_dump_json(), "plan")
    _mesh = open_mesh(resolved, open_device(name, world), timeout_s=timeout_s)
    if resolved.seed is not None:
        torch.manual_seed(resolved.seed)
    return _mesh.layout


def current_mesh() -> Mesh:
    """Return the mesh of `init`. Raises ConfigError if `init` was not called."""
    if _mesh is None:
        raise ConfigError("no plan is set", expected="a call of trnpipe.init(...) before this one")
    return _mesh


def mesh_of(plan: Plan | Mapping[str, Any] | str | Path | None, *, device: str, timeout_s: float) -> Mesh:
    """Return the mesh of `init`, calling it if necessary. Raises ConfigError if it had another plan or device."""
    if _mesh is None:
        init(plan, device=device, timeout_s=timeout_s)
    mesh = current_mesh()
    requested = mesh.plan if plan is None else Plan.read(plan)
    if (requested, device) != (mesh.plan, mesh.backend.name):
        raise ConfigError(
            f"plan {requested.model_dump_json(exclude_defaults=True)} on {device} differs from that of init,"
            f" {mesh.plan.model_dump_json(exclude_defaults=True)} on {mesh.backend.name}",
            expected="one plan per process",
        )
    return mesh


def has_mesh() -> bool:
    """Return whether `init` was called."""
    return _mesh is not None


def layout() -> Layout:
    """Return this rank's layout, with data_rank and data_size for a sampler. Raises ConfigError before `init`."""
    return current_mesh().layout
