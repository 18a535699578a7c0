"""The ranks of a run as a grid: replicate x shard x tensor, with groups that time out as the run itself does."""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline.backends import Backend, RankGroup, process_group
from pipeline.core.errors import ConfigError, TrnpipeError
from pipeline.core.layout import Axis, Layout, layout_of
from pipeline.parallel.config import Plan
from pipeline.parallel.gang import all_gather_objects, collective_errors, open_group_of_one

REPLICATE: Axis = "replicate"
SHARD: Axis = "shard"
TENSOR: Axis = "tensor"
AXES = (REPLICATE, SHARD, TENSOR)
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
        """Those that this rank exchanges with along an axis."""
        return RankGroup(self.layout.rank, self.layout.groups(axis), self.devices.get_group(axis))


def check_plan(plan: Plan, backend: Backend) -> None:
    """Before anything is traced or allocated. Raises ConfigError for what this device cannot do, with the way out."""
    asked = {
        "parameters": plan.shards_parameters or (backend.compiles_steps and plan.shard_degree != 1),
        "tensor": plan.tensor_degree > 1,
        "offload": plan.offload_horizon > 0,
        "collectives": plan.collectives == "hierarchical",
    }
    for feature, (described, way_out) in _FEATURES.items():
        if asked[feature] and feature not in backend.spreads:
            able = ", ".join(sorted(backend.spreads)) or "nothing of it"
            raise ConfigError(
                f"the plan asks for {described}, which {backend.device_name()} cannot do here",
                expected=f"a plan within what this device does ({able})",
                next_command=way_out,
            )


_FEATURES = {
    "parameters": ("sharded parameters (shard all)", "shard state, or shard_degree 1"),
    "tensor": (
        "tensor parallelism",
        "tensor_degree 1, or a device of which each operation is a call of its own",
    ),
    "offload": (
        "activations offloaded to the host",
        "offload_horizon 0; recompute units saves most of the same memory",
    ),
    "collectives": ("hierarchical collectives", "collectives default: the runtime chooses by itself"),
}
"""Of Backend.spreads: how each is called, and the way out without it."""


def open_mesh(plan: Plan, backend: Backend, *, timeout_s: float) -> Mesh:
    """The grid of all ranks of the process group; of one process, where there is none (one is made).

    Raises ConfigError, on every rank the same, for a plan that does not fit the ranks or the device.
    """
    if not dist.is_initialized():
        # fully_shard reduces over groups of one as well (torch 2.9): by gloo, gradients on a GPU would go through the
        # host. Devices that compile their steps meet nobody when they are alone.
        eager = not (backend.is_lazy or backend.compiles_steps)
        open_group_of_one(process_group(backend.name) if eager else None)
    check_plan(plan, backend)
    layout = layout_of(
        dist.get_rank(), dist.get_world_size(), shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree
    )
    sizes = (layout.replicate_size, layout.shard_size, layout.tensor_size)
    # What lazy devices exchange outside their graphs goes through the host.
    device_type = "cpu" if backend.is_lazy else backend.device.type
    algorithm = plan.collectives if "collectives" in backend.spreads else "default"
    chosen: dict[int | str, Any] = {}
    if algorithm != "default":  # else nobody needs the private names of torch in it
        from pipeline.parallel.collectives import NAME, Options, describe

        chosen = {SHARD: (NAME, Options(algorithm))}
    with collective_errors("making the groups of the plan"):
        devices = init_device_mesh(device_type, sizes, mesh_dim_names=AXES, backend_override=chosen)
        for mesh in (devices, devices[REPLICATE, SHARD]):
            set_timeouts(mesh, timeout_s)
    if algorithm != "default" and layout.rank == 0:
        print(describe(devices.get_group(SHARD)), file=sys.stderr, flush=True)
    return Mesh(plan, layout, backend, devices)


def set_timeouts(mesh: DeviceMesh, timeout_s: float) -> None:
    """Of every group of a mesh: sub-groups come with the library's own 30 minutes, whatever the world was given."""
    # Public since torch 2.14; tests/parallel/test_mesh.py fails when neither is there.
    set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=timeout_s), group)


@contextmanager
def raise_on_all_ranks(doing: str) -> Iterator[None]:
    """What each rank does by itself, without collectives: where it fails on one of them, all raise its error."""
    mine: TrnpipeError | None = None
    try:
        yield
    except TrnpipeError as error:
        mine = error
    found = all_gather_objects(mine, doing)
    rank, first = next(((rank, error) for rank, error in enumerate(found) if error is not None), (0, None))
    if first is None:
        return
    alike = all(error is not None and error.seen == first.seen for error in found)
    seen = first.seen if alike else f"rank {rank}: {first.seen}"
    raise type(first)(seen, expected=first.expected, next_command=first.next_command) from mine


def run_without_timeout(work: Callable[[], T], doing: str) -> T:
    """`work` of each rank, without collectives, which may take longer than they may: all wait in short exchanges."""
    pause_s = 0.001
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(work)
        while not all(all_gather_objects(future.done(), doing)):
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 1.0)
    with raise_on_all_ranks(doing):
        return future.result()


def check_same(value: object, what: str) -> None:
    """Raises ConfigError, on every rank the same, where ranks were given different things."""
    values = all_gather_objects(value, f"comparing the {what}s of all ranks")
    for rank, value in enumerate(values):
        if value != values[0]:
            raise ConfigError(
                f"rank 0 was given {what} {values[0]}, rank {rank} {value}", expected=f"the same {what} on every rank"
            )
