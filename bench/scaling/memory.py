"""Memory that a plan takes on one rank, without its devices: a step on tensors without data, in a group without peers.

torch's own tracker follows every allocation of forward and backward, so the figure is that of the modules as they are
spread, not of a formula. What it does not know: the allocator's fragments and the collective library's buffers.

FakeTensorMode, FakeStore and FSDPMemTracker are private to torch 2.9 and stand in this file alone;
tests/bench/test_scaling_memory.py fails when they change.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipeline.backends import open_host
from pipeline.core.errors import ConfigError
from pipeline.core.layout import layout_of
from pipeline.parallel.config import Plan
from pipeline.parallel.mesh import AXES, Mesh
from pipeline.parallel.parallelize import apply_plan, find_units
from pipeline.parallel.tensors import tensor_styles


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the peak of a step."""

    parameters: int
    """fp32 slices that the optimizer changes, the last ranks' padding included."""
    moments: int
    gradients: int
    activations: int
    """Kept for backward, or computed again in it."""
    gathered: int
    """Whole parameters and gradients of the units at work, and buffers of their collectives."""
    peak: int

    @property
    def states(self) -> int:
        return self.parameters + self.moments


def track(
    build: Callable[[], nn.Module],
    loss: Callable[[nn.Module], Tensor],
    plan: Plan,
    world_size: int,
    *,
    accumulates: bool = False,
) -> Memory:
    """Track one forward and backward pass of rank 0 with AdamW's moments there, under `plan` over `world_size` ranks.

    `build` makes the model and `loss` a scalar of it, from inputs of its own; nothing is computed, so any size will do.
    `accumulates`: the pass is the last of several. Raises ConfigError in a process that has a process group, and for
    degrees that do not divide `world_size`.
    """
    layout = layout_of(0, world_size, shard_degree=plan.shard_degree, tensor_degree=plan.tensor_degree)
    sizes = (layout.replicate_size, layout.shard_size, layout.tensor_size)
    backend = open_host()
    with _no_peers(world_size):
        mesh = Mesh(plan, layout, backend, init_device_mesh(backend.device.type, sizes, mesh_dim_names=AXES))
        with FakeTensorMode() as without_data:
            model = build()
        members = [unit for _, unit in find_units(model)]
        styles = tensor_styles(model, None, layout) if layout.tensor_size > 1 else []
        with torch.no_grad():  # of tensors without data, and of ranks, which have it (torch 2.14)
            apply_plan(model, members, styles, mesh)
        with without_data:
            optimizer = _Moments(model.parameters())
            tracker = FSDPMemTracker(model, optimizer)
            with tracker:
                for is_last in (False, True) if accumulates else (True,):
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                    tracker.reset_mod_stats()
                    result = loss(model)
                    result.backward()  # type: ignore[no-untyped-call]
                    del result
            snapshot: dict[Any, int] = tracker.get_tracker_snapshot("peak")[backend.device]
    uses = {str(getattr(kind, "value", kind)): count for kind, count in snapshot.items()}
    return Memory(
        parameters=uses["Sharded Param"],
        moments=uses["OptState"],
        gradients=uses["Sharded Grad"],
        activations=uses["Activation"] + uses["Temp"] + uses["Inputs"] + uses["Buffer"],
        gathered=sum(uses[kind] for kind in ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter")),
        peak=uses["Total"],
    )


class _Moments(torch.optim.Optimizer):
    """AdamW's state. Its step, fused as on a GPU, takes nothing beside it and is left out."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
                self.state[parameter] = {name: torch.zeros_like(mine) for name in ("exp_avg", "exp_avg_sq")}


@contextmanager
def _no_peers(world_size: int) -> Iterator[None]:
    if dist.is_initialized():
        raise ConfigError(
            "memory is tracked in a group of ranks that are not there, and this process has a real one",
            expected="a process that has joined no others",
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
