"""The device mesh of a run, with a replicate, a shard and a tensor axis."""

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
    """The device mesh that a model is sharded over, together with the plan it was built from."""

    plan: Plan
    layout: Layout
    backend: Backend
    devices: DeviceMesh
    """Always has all three axes, some of which may have size 1."""

    @property
    def data_axes(self) -> DeviceMesh:
        """The mesh to pass to `fully_shard`, which includes the replicate axis only for HSDP."""
        return self.devices[REPLICATE, SHARD] if self.layout.replicate_size > 1 else self.devices[SHARD]

    def ranks(self, axis: Axis) -> RankGroup:
        """Return this rank's group along the given axis."""
        return RankGroup(self.layout.rank, self.layout.groups(axis), self.devices.get_group(axis))


def check_plan(plan: Spread, backend: Backend) -> None:
    """Raise ConfigError if the plan uses a feature that this device doesn't support.

    This should be called before anything is traced or allocated.
    """
    requested = {
        "parameters": plan.shard_degree != 1 and (plan.shard == "all" or backend.compiles_steps),
        "tensor": plan.tensor_degree > 1,
        "offload": plan.offload,
        "process_group": plan.process_group != "",
    }
    for feature, description in _FEATURES.items():
        if requested[feature] and feature not in backend.parallelism:
            raise ConfigError(
                f"the plan requires {description}, which is not supported on {backend.device_name()}",
                expected=f"a plan that only uses {', '.join(sorted(backend.parallelism)) or 'shard state'}",
                next_command="see docs/parallel.md, What each device allows",
            )


_FEATURES = {
    "parameters": "sharded parameters (shard all)",
    "tensor": "tensor parallelism",
    "offload": "activation offloading to the host",
    "process_group": "a custom process group",
}
"""Descriptions of the features in Backend.parallelism, for error messages."""


def open_mesh(plan: Plan, backend: Backend, *, timeout_s: float) -> Mesh:
    """Build the device mesh over all ranks, initializing a single-rank process group if there is none yet.

    Raises the same ConfigError on every rank if the plan is not compatible with the number of ranks or the device.
    """
    if not dist.is_initialized():
        # fully_shard runs its reductions even if the group has a single rank (torch 2.9), and gloo would stage GPU
        # gradients through host memory. Devices that compile their steps don't run collectives on a single rank.
        is_eager = not (backend.is_lazy or backend.compiles_steps)
        kind = (process_group(backend.name) if is_eager else None) or "gloo"
        dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    check_plan(plan, backend)
    layout = layout_of(
        dist.get_rank(), dist.get_world_size(), shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree
    )
    sizes = (layout.replicate_size, layout.shard_size, layout.tensor_size)
    # On lazy devices, collectives outside of a graph run on the host.
    device_type = "cpu" if backend.is_lazy else backend.device.type
    override: dict[int | str, Any] = {SHARD: _import_process_group(plan.process_group)} if plan.process_group else {}
    with collective_errors("creating the process groups of the plan"):
        devices = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=override)
        for mesh in (devices, devices[REPLICATE, SHARD]):
            set_timeouts(mesh, timeout_s)
    return Mesh(plan, layout, backend, devices)


def _import_process_group(text: str) -> str:
    """Import the module in MODULE:NAME and return NAME. Raises ConfigError if NAME isn't a registered backend."""
    module, _, name = text.partition(":")
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(f"process_group {text}: {error}", expected="an importable module") from error
    if name not in dist.Backend.backend_list:
        raise ConfigError(
            f"process_group {text}: module {module} does not register a backend named {name!r}",
            expected="the module to call torch.distributed.Backend.register_backend, as in examples/process_group.py",
        )
    return name


def set_timeouts(mesh: DeviceMesh, timeout_s: float) -> None:
    """Set the timeout of every process group in a mesh.

    By default, torch uses 30 minutes for subgroups, regardless of the timeout of the default process group.
    """
    # This is a public function as of torch 2.14. tests/parallel/test_mesh.py fails if neither name exists.
    set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """Raise an error on all ranks if the block raises a TrnpipeError on any of them.

    This ensures that no rank is left waiting in a later collective. The error is that of the lowest failing rank. The
    block itself must not use collectives.
    """
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
    """Run `work` on each rank and wait until all ranks are done.

    The work may take longer than the timeout of a collective, so ranks poll each other with short collectives.
    """
    pause_s = 0.001
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        while not all(all_gather_objects(future.done(), doing)):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
    with raise_on_all_ranks(doing):
        return future.result()


def check_same(value: object, what: str) -> None:
    """Raise the same ConfigError on every rank if the value differs between ranks. `what` describes the value."""
    values = all_gather_objects(value, f"comparing the {what}s of all ranks")
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"rank 0 has {what} {values[0]}, but rank {rank} has {value}", expected=f"the same {what} on every rank"
            )


# The mesh for user scripts. There is one per process.

_mesh: Mesh | None = None


def init(
    plan: Plan | Mapping[str, Any] | str | Path | None = None, *, device: str = "auto", timeout_s: float = TIMEOUT_S
) -> Layout:
    """Initialize distributed training and build the device mesh for `plan`.

    This joins the ranks that were started by torchrun or `trnpipe launch`, unless a process group has already been
    initialized, in which case that one is used.

    `plan`: a Plan, a mapping, a JSON string, or the path to a JSON file. If None, it is read from TRNPIPE_PARALLEL,
    which defaults to sharding over all ranks.
    `device`: the name of a backend, or "auto" to use a GPU if one is available and the host otherwise.
    `timeout_s`: timeout for collectives.
    Raises ConfigError on every rank if the plan is invalid.
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
    """Return the mesh that was built by `init`. Raises ConfigError if `init` has not been called."""
    if _mesh is None:
        raise ConfigError("no plan is set", expected="trnpipe.init(...) to be called first")
    return _mesh


def mesh_of(plan: Plan | Mapping[str, Any] | str | Path | None, *, device: str, timeout_s: float) -> Mesh:
    """Return the mesh that was built by `init`, calling `init` if necessary.

    Raises ConfigError if `init` was called with a different plan or device.
    """
    if _mesh is None:
        init(plan, device=device, timeout_s=timeout_s)
    mesh = current_mesh()
    requested = mesh.plan if plan is None else Plan.read(plan)
    if (requested, device) != (mesh.plan, mesh.backend.name):
        raise ConfigError(
            f"plan {requested.model_dump_json(exclude_defaults=True)} on {device} differs from the plan passed to"
            f" init, {mesh.plan.model_dump_json(exclude_defaults=True)} on {mesh.backend.name}",
            expected="one plan per process",
        )
    return mesh


def has_mesh() -> bool:
    """Return whether `init` has been called."""
    return _mesh is not None


def layout() -> Layout:
    """Return the position of this rank in the mesh. Raises ConfigError if `init` has not been called.

    A distributed sampler should use its `data_rank` and `data_size`.
    """
    return current_mesh().layout
