"""The ranks of a run as a grid: replicate x shard x tensor, with groups that time out as the run itself does."""

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
    """Where a model is spread, and how."""

    plan: Plan
    layout: Layout
    backend: Backend
    devices: DeviceMesh
    """Of three axes, whatever their sizes."""

    @property
    def data_axes(self) -> DeviceMesh:
        """What fully_shard takes: one axis of shards, or replicas of them."""
        return self.devices[REPLICATE, SHARD] if self.layout.replicate_size > 1 else self.devices[SHARD]

    def ranks(self, axis: Axis) -> RankGroup:
        """Return those that this rank exchanges with along an axis."""
        return RankGroup(self.layout.rank, self.layout.groups(axis), self.devices.get_group(axis))


def check_plan(plan: Spread, backend: Backend) -> None:
    """Raise ConfigError for what this device cannot do. Before anything is traced or allocated."""
    asked = {
        "parameters": plan.shards_parameters or (backend.compiles_steps and plan.shard_degree != 1),
        "tensor": plan.tensor_degree > 1,
        "offload": plan.offload,
        "process_group": plan.process_group != "",
    }
    for feature, described in _FEATURES.items():
        if asked[feature] and feature not in backend.parallelism:
            raise ConfigError(
                f"the plan asks for {described}, which {backend.device_name()} cannot do here",
                expected=f"a plan that the device supports: {', '.join(sorted(backend.parallelism)) or 'shard state'}",
                next_command="docs/parallel.md, What each device allows",
            )


_FEATURES = {
    "parameters": "sharded parameters (shard all)",
    "tensor": "tensor parallelism",
    "offload": "activations offloaded to the host",
    "process_group": "a process group of its own",
}
"""Of Backend.parallelism."""


def open_mesh(plan: Plan, backend: Backend, *, timeout_s: float) -> Mesh:
    """Make the grid of all ranks of the process group; of one process if there is no group (one is made).

    Raises ConfigError, on every rank the same, for a plan that does not fit the ranks or the device.
    """
    if not dist.is_initialized():
        # fully_shard reduces over groups of one as well (torch 2.9): by gloo, gradients on a GPU would go through the
        # host. Devices that compile their steps meet nobody when they are alone.
        eager = not (backend.is_lazy or backend.compiles_steps)
        kind = (process_group(backend.name) if eager else None) or "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    check_plan(plan, backend)
    layout = layout_of(
        dist.get_rank(), dist.get_world_size(), shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree
    )
    sizes = (layout.replicate_size, layout.shard_size, layout.tensor_size)
    # What lazy devices exchange outside their graphs goes through the host.
    device_type = "cpu" if backend.is_lazy else backend.device.type
    chosen: dict[int | str, Any] = {SHARD: _registered(plan.process_group)} if plan.process_group else {}
    with collective_errors("making the groups of the plan"):
        devices = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=chosen)
        for mesh in (devices, devices[REPLICATE, SHARD]):
            set_timeouts(mesh, timeout_s)
    return Mesh(plan, layout, backend, devices)


def _registered(text: str) -> str:
    """Import MODULE of MODULE:NAME and return NAME. Raises ConfigError if that registers no such process group."""
    module, _, name = text.partition(":")
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"process_group {text}: {error}", expected="a module that can be imported") from error
    if name not in dist.Backend.backend_list:
        raise ConfigError(
            f"process_group {text}: {module} registers no {name!r}",
            expected="torch.distributed.Backend.register_backend in it, as in examples/process_group.py",
        )
    return name


def set_timeouts(mesh: DeviceMesh, timeout_s: float) -> None:
    """Set that of every group of a mesh: sub-groups come with 30 minutes, whatever the world was given."""
    # Public since torch 2.14; tests/parallel/test_mesh.py fails when neither is there.
    set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Run what each rank does by itself, without collectives: if it fails on one of them, all raise its error."""
    own: TrnpipeError | None = None
    try:
        yield
    except TrnpipeError as error:
        own = error
    errors = all_gather_objects(own, doing)
    rank, first = next(((rank, error) for rank, error in enumerate(errors) if error is not None), (0, None))
    if first is None:
        return
    alike = all(error is not None and error.seen == first.seen for error in errors)
    seen = first.seen if alike else f"rank {rank}: {first.seen}"
    raise type(first)(seen, expected=first.expected, next_command=first.next_command) from own


def run_without_timeout(work: Callable[[], T], doing: str) -> T:
    """Run `work` of each rank, which may take longer than a collective may: all wait in short exchanges."""
    pause_s = 0.001
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        while not all(all_gather_objects(future.done(), doing)):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
    with raise_on_all_ranks(doing):
        return future.result()


def check_same(value: object, what: str) -> None:
    """Raise ConfigError, on every rank the same, if ranks were given different things."""
    values = all_gather_objects(value, f"comparing the {what}s of all ranks")
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"rank 0 was given {what} {values[0]}, rank {rank} {value}", expected=f"the same {what} on every rank"
            )


# The mesh of a user's script: one a process.

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
    chosen = Plan()
    with raise_on_all_ranks("reading the plan"):
        chosen = Plan.read(plan, os.environ)
    check_same(chosen.model_dump_json(), "plan")
    _mesh = open_mesh(chosen, open_device(name, world), timeout_s=timeout_s)
    if chosen.seed is not None:
        torch.manual_seed(chosen.seed)
    return _mesh.layout


def current_mesh() -> Mesh:
    """Return the mesh of `init`. Raises ConfigError before it."""
    if _mesh is None:
        raise ConfigError("no plan is in force", expected="trnpipe.init(...) before this")
    return _mesh


def mesh_of(plan: Plan | Mapping[str, Any] | str | Path | None, *, device: str, timeout_s: float) -> Mesh:
    """Return the mesh of `init`, which is called if it was not. Raises ConfigError if it had another plan or device."""
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


def has_mesh() -> bool:
    """Return whether `init` was called."""
    return _mesh is not None


def layout() -> Layout:
    """Return this rank's place: data_rank and data_size are what a sampler needs. Raises ConfigError before `init`."""
    return current_mesh().layout
