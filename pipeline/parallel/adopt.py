"""The two lines with which a script of a user is adopted: `init`, then `transform`. The rest of it stays as it is."""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.backends import module_device, process_group
from pipeline.core.errors import ConfigError, TrnpipeError
from pipeline.core.layout import Layout
from pipeline.parallel.config import Plan
from pipeline.parallel.gang import open_device, peers
from pipeline.parallel.mesh import Mesh, check_same, open_mesh
from pipeline.parallel.world import world_from_env

_TIMEOUT_S = 300.0
_mesh: Mesh | None = None


def init(
    plan: Plan | Mapping[str, Any] | str | Path | None = None, *, device: str = "auto", timeout_s: float = _TIMEOUT_S
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
        kind = process_group(name)
        with peers("joining the other ranks"):
            dist.init_process_group(f"cpu:gloo,{kind}" if kind else "gloo", timeout=timedelta(seconds=timeout_s))
    found = _agreed(plan)
    _mesh = open_mesh(found, open_device(name, world), timeout_s=timeout_s)
    if found.seed is not None:
        torch.manual_seed(found.seed)
    return _mesh.layout


def _agreed(source: Plan | Mapping[str, Any] | str | Path | None) -> Plan:
    """The plan that every rank was given. A rank that cannot read its own tells all others before it fails."""
    plan, error = Plan(), ""
    try:
        plan = Plan.read(source, os.environ)
    except TrnpipeError as found:
        error = found.seen
    if dist.is_initialized() and dist.get_world_size() > 1:
        all_of_them: list[Any] = [None] * dist.get_world_size()
        with peers("comparing plans"):
            dist.all_gather_object(all_of_them, (plan.model_dump_json(), error))
        errors = [(rank, text) for rank, (_, text) in enumerate(all_of_them) if text]
        error = f"rank {errors[0][0]}: {errors[0][1]}" if errors else ""
        if not error:
            check_same([text for text, _ in all_of_them], "plan")
    if error:
        raise ConfigError(error, expected="a plan, see docs/parallel.md")
    return plan


def current_mesh() -> Mesh:
    """Of `init`. Raises ConfigError before it."""
    if _mesh is None:
        raise ConfigError("no plan is in force", expected="trnpipe.init(...) before this")
    return _mesh


def layout() -> Layout:
    """This rank's place: data_rank and data_size are what a sampler needs. Raises ConfigError before `init`."""
    return current_mesh().layout
