"""Collectives by name: equal to those of the library, under DDP, FSDP, hybrid meshes and the plan."""

import math
import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeline.core.errors import TransientError
from pipeline.core.fabrics import Group
from pipeline.parallel import adopt
from pipeline.parallel.collectives import HierarchicalGroup, Options, group_of, largest_in_stages
from pipeline.parallel.gang import collective_errors
from pipeline.parallel.mesh import set_timeouts
from tests.ranks import run_ranks

CASES = "tests.parallel.test_collectives"
NODES = {"LOCAL_WORLD_SIZE": "2"}  # four ranks as two nodes of two


@pytest.mark.parametrize(
    ("ranks", "per_node", "group"),
    [
        ([0, 1, 2, 3], 2, Group(2, 2)),
        ([0, 2, 4, 6], 4, Group(2, 2)),  # shards of a mesh with tensor_degree 2
        ([4, 5, 6, 7, 8, 9, 10, 11], 4, Group(2, 4)),
        ([0, 1, 2, 3], 4, None),  # one node
        ([0, 2], 2, None),  # replicas: one rank on each
        ([0, 1, 2], 2, None),  # uneven
        ([0, 2, 1, 3], 2, None),  # not node by node
        ([0], 1, None),
    ],
)
def test_nodes_of_a_group(ranks: list[int], per_node: int, group: Group | None) -> None:
    assert group_of(ranks, per_node) == group


def test_auto_changes_over_by_size() -> None:
    found = [largest_in_stages(Group(nodes, 8), "auto") for nodes in (2, 8, 16, 64)]
    assert found == sorted(set(found)) and found[0] >= 2**20
    assert found[1] <= 64 * 2**20 and found[2] <= 128 * 2**20, "RCCL's own: 64 MB on 8 nodes, 128 MB on 16"
    assert largest_in_stages(Group(2, 8), "hierarchical") == math.inf
    assert largest_in_stages(None, "hierarchical") == 0


def test_what_torch_calls_in_a_subclass_is_forwarded() -> None:
    """An inherited one would wait for gloo with the interpreter's lock: see pipeline/parallel/collectives.py."""
    (header,) = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    called = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", header.read_text())) - {"endCoalescing"}
    assert len(called) > 8 and called <= vars(HierarchicalGroup).keys()


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of this rank, with low bits that an addition in another order would show."""
    seeded = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(count, generator=seeded).to(dtype)


def gathered(group: Any, count: int, dtype: torch.dtype) -> Tensor:
    found = torch.empty(4 * count, dtype=dtype)
    dist.all_gather_into_tensor(found, numbers(count, dtype), group)
    return found


def scattered(group: Any, op: Any, *, asynchronous: bool = False) -> Tensor:
    found = torch.empty(6)
    work = dist.reduce_scatter_tensor(found, numbers(24), op, group, async_op=asynchronous)
    if work is not None:
        work.wait()
    return found


def watched(group: HierarchicalGroup) -> list[bool]:
    """Of each collective from here on that may go in stages: whether it does."""
    found: list[bool] = []
    asked = group._goes_in_stages

    def ask(whole: Tensor) -> bool:
        found.append(asked(whole))
        return found[-1]

    group._goes_in_stages = ask  # type: ignore[method-assign]
    return found


def losses(backend: str) -> list[float]:
    """Three steps under DDP, FSDP over all ranks, FSDP over two with two replicas; losses of all ranks, summed."""
    found = []
    for shape in ({}, {"shard": 4}, {"replicate": 2, "shard": 2}):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5), nn.Linear(5, 1))
        if shape:
            axes, sizes = tuple(shape), tuple(shape.values())
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes, backend_override=dict.fromkeys(axes, backend))
            for layer in model.children():
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model, process_group=dist.new_group(backend=backend))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found.append(float(total))
    return found


def by_name(_: str) -> None:
    """2 x 2 ranks: bytes of all-gather equal, sums within rounding, training under DDP, FSDP and hybrid the same."""
    dist.init_process_group("topo", pg_options=Options(ranks_per_node=2), timeout=timedelta(seconds=200))
    rank, group = dist.get_rank(), dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    same, flat = dist.new_group([0, 1, 2, 3]), dist.new_group(backend="gloo")
    assert dist.get_backend() == "topo" and dist.get_backend(flat) == "gloo"
    assert isinstance(group, HierarchicalGroup) and len(group._stages) == 2 and group.nodes == Group(2, 2)
    assert isinstance(same, HierarchicalGroup) and same.nodes == Group(2, 2), "nodes that were given are inherited"
    assert all(getattr(mesh.get_group(axis), "nodes", "") is None for axis in ("outer", "inner"))
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": rank} for rank in range(4)]
    staged = watched(group)
    for case in [(3, torch.float32), (1, torch.int64), (70_000, torch.bfloat16), (5, torch.bool)]:
        assert torch.equal(gathered(group, *case), gathered(flat, *case))
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        torch.testing.assert_close(scattered(group, operation), scattered(flat, operation), rtol=0, atol=1e-6)
    assert staged == [True] * 6, "four all-gathers, the sum and the mean"
    asynchronous = scattered(group, dist.ReduceOp.SUM, asynchronous=True)
    assert torch.equal(asynchronous, scattered(group, dist.ReduceOp.SUM))
    counts = torch.tensor([rank, 7])
    dist.all_reduce(counts, dist.ReduceOp.AVG)
    assert counts.tolist() == [1, 7], "6 of 4 ranks, rounded to zero"
    inner = functional.all_gather_tensor(torch.ones(1) * rank, 0, mesh["inner"])
    assert inner.tolist() == [2 * (rank // 2), 2 * (rank // 2) + 1]
    assert losses("topo") == pytest.approx(losses("gloo"), abs=1e-6)
    dist.destroy_process_group()


def test_by_name_as_the_library(tmp_path: Path) -> None:
    run_ranks(f"{CASES}:by_name", 4, tmp_path, "")


def planned(algorithm: str) -> dict[str, Any]:
    """By the plan: shards over two nodes in stages, and time-outs within them as those of the run."""
    adopt.init({"collectives": algorithm})
    mesh = adopt.current_mesh().devices
    group = mesh.get_group("shard")
    assert isinstance(group, HierarchicalGroup)
    found: dict[str, Any] = {"stages": len(group._stages), "world": dist.get_backend()}
    if algorithm == "hierarchical":
        found["gathers"] = torch.equal(gathered(group, 3, torch.float32), gathered(dist.group.WORLD, 3, torch.float32))
        set_timeouts(mesh, 3)
        started = time.monotonic()
        if os.environ["RANK"] != "0":  # which does not come
            with pytest.raises(TransientError, match="a peer failed while waiting"), collective_errors("waiting"):
                gathered(group, 3, torch.float32)
                scattered(group, dist.ReduceOp.SUM)
        found["waited_s"] = time.monotonic() - started
    return found


def test_by_plan(tmp_path: Path) -> None:
    folder = tmp_path / "hierarchical"
    ranks = run_ranks(f"{CASES}:planned", 4, folder, "hierarchical", env=NODES)
    assert all(rank["stages"] == 2 and rank["world"] == "gloo" and rank["gathers"] for rank in ranks)
    # Of the first that gives up; others may only lose it. And this test ends.
    assert max(rank["waited_s"] for rank in ranks[1:]) > 1.5
    assert "collectives: hierarchical over 2 nodes of 2 ranks\n" in (folder / "rank-0.err").read_text()
    assert "collectives:" not in (folder / "rank-1.err").read_text()


def test_auto_says_what_it_chose(tmp_path: Path) -> None:
    assert [rank["stages"] for rank in run_ranks(f"{CASES}:planned", 4, tmp_path, "auto", env=NODES)] == [2] * 4
    assert "collectives: hierarchical over 2 nodes of 2 ranks up to " in (tmp_path / "rank-0.err").read_text()
