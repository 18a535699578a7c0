"""A process group of one's own by name, in a plan and in plain scripts: examples/process_group.py equals gloo."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from examples.process_group import FORWARDED, NAME, TwoStageGroup, nodes_of
from pipeline.core.errors import ConfigError
from pipeline.parallel import mesh
from tests.kit.ranks import run_ranks
from tests.parallel.models import dense, opened

CASES = "tests.parallel.test_process_group"
GROUP = f"examples.process_group:{NAME}"


@pytest.mark.parametrize(
    ("ranks", "per_node", "expected"),
    [
        ([0, 1, 2, 3], 2, (2, 2)),
        ([0, 2, 4, 6], 4, (2, 2)),  # shards of a mesh with tensor_degree 2
        ([0, 1, 2, 3], 4, None),  # one node
        ([0, 1, 2], 2, None),  # uneven
        ([0, 2, 1, 3], 2, None),  # not node by node
    ],
)
def test_nodes_of_a_group(ranks: list[int], per_node: int, expected: tuple[int, int] | None) -> None:
    assert nodes_of(ranks, per_node) == expected


def test_what_torch_calls_in_a_subclass_is_forwarded() -> None:
    """An inherited one would wait for gloo with the interpreter's lock: see examples/process_group.py."""
    (header,) = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d").rglob("PyProcessGroup.hpp")
    called = set(re.findall(r"intrusive_ptr<Work> (\w+)\(", header.read_text())) - {"endCoalescing"}
    assert len(called) > 8 and called <= vars(TwoStageGroup).keys() and len(FORWARDED.split()) > 8


def numbers(count: int) -> Tensor:
    """Of this rank, with low bits that an addition in another order would show."""
    return torch.randn(count, generator=torch.Generator().manual_seed(dist.get_rank()))


def gathered(group: Any) -> Tensor:
    found = torch.empty(3 * dist.get_world_size())
    dist.all_gather_into_tensor(found, numbers(3), group)
    return found


def scattered(group: Any, operation: Any) -> Tensor:
    found = torch.empty(6)
    dist.reduce_scatter_tensor(found, numbers(6 * dist.get_world_size()), operation, group)
    return found


def trained(shards: Any, replicas: Any) -> list[float]:
    """Losses of all ranks, summed, under DDP, then under FSDP."""
    found = []
    for spread in (lambda model: DistributedDataParallel(model, process_group=replicas), shards):
        model: nn.Module = spread(dense(0, 6, 9, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            loss = model(rows).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found.append(float(total))
    return found


def planned(name: str) -> dict[str, Any]:
    """By the plan, beside gloo: as the library, in two stages where there are several nodes of several ranks."""
    mesh.init({"process_group": name})
    group = mesh.current_mesh().devices.get_group("shard")
    assert dist.get_backend() == "gloo" and isinstance(group, TwoStageGroup)
    assert torch.equal(gathered(group), gathered(None))
    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        torch.testing.assert_close(scattered(group, operation), scattered(None, operation), rtol=0, atol=1e-6)
    counts = torch.tensor([dist.get_rank(), 7])
    dist.all_reduce(counts, dist.ReduceOp.AVG, group)
    losses = []
    for plan, of in (({"process_group": name}, dist.new_group(backend=NAME)), ({}, None)):
        shards = opened(plan).data_axes
        losses.append(trained(lambda model, shards=shards: fully_shard(model, mesh=shards), of))
    return {"stages": len(group.stages), "counts": counts.tolist(), "losses": losses}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_by_plan(tmp_path: Path, ranks: int) -> None:
    for found in run_ranks(f"{CASES}:planned", ranks, tmp_path, GROUP, env={"LOCAL_WORLD_SIZE": "2"}):
        assert found["stages"] == (2 if ranks == 4 else 0)
        assert found["counts"] == [(ranks - 1) // 2, 7]
        assert found["losses"][0] == pytest.approx(found["losses"][1], abs=1e-6)


@pytest.mark.parametrize("name", ["no.such.module:name", "examples.process_group:other"])
def test_one_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        mesh._registered(name)
