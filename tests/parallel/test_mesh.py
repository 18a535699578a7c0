"""Plans, layouts of ranks, and the groups that are made of them."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline.backends import open_host
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.layout import Layout, layout_of
from pipeline.parallel import mesh
from pipeline.parallel.config import Plan
from pipeline.parallel.mesh import AXES, check_plan, set_timeouts
from pipeline.parallel.process_group import collective_errors
from tests.kit.ranks import run_ranks

CASES = "tests.parallel.test_mesh"


def test_every_rank_has_one_place() -> None:
    places = [layout_of(rank, 24, shard_degree=4, tensor_degree=2) for rank in range(24)]
    assert {(p.replicate_rank, p.shard_rank, p.tensor_rank) for p in places} == {
        (r, s, t) for r in range(3) for s in range(4) for t in range(2)
    }
    assert [p.data_rank for p in places] == [rank // 2 for rank in range(24)]
    assert places[0].data_size == 12 and places[0].world_size == 24
    groups = {axis: places[0].groups(axis) for axis in AXES}
    assert [(len(found), len(found[0])) for found in groups.values()] == [(8, 3), (6, 4), (12, 2)]
    assert all([places[rank].shard_rank for rank in group] == [0, 1, 2, 3] for group in groups["shard"])
    assert groups["replicate"][0] == (0, 8, 16) and groups["tensor"][1] == (2, 3)
    assert layout_of(3, 4, shard_degree=0, tensor_degree=1) == Layout(3, 1, 4, 1)


@pytest.mark.parametrize(
    ("shard", "tensor", "match"),
    [(3, 1, "shard_degree 3 .* 8 .*\n.*\n.*shard_degree 2"), (1, 3, "tensor_degree 2"), (8, 2, "8 ranks / tensor")],
)
def test_a_degree_that_does_not_divide_names_one_that_does(shard: int, tensor: int, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        layout_of(0, 8, shard_degree=shard, tensor_degree=tensor)


def test_where_a_plan_is_read_from(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"shard_degree": 2}')
    expected = Plan(shard_degree=2)
    assert Plan.read(tmp_path / "plan.json") == Plan.read(str(tmp_path / "plan.json")) == expected
    assert Plan.read(None, {"TRNPIPE_PARALLEL": '{"shard_degree": 2}'}) == Plan.read(expected) == expected
    assert Plan.read(None, {}) == Plan()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"shard_degre": 1}, "shard_degre 1: Extra.*\n.*shard_degree"),
        ({"shard_degree": -1}, "shard_degree -1"),
        ({"offload": True}, "only inputs of recomputed units"),
        ({"process_group": "topo"}, "process_group 'topo'"),
        ({"shard": "state", "tensor_degree": 2}, "expected shard all"),
        ("{x", "cannot be read"),
        ("no/such/file.json", "cannot be read"),
    ],
)
def test_a_bad_plan_is_one_error(given: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Plan.read(given)


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        ({}, "sharded parameters.*\n.*shard state"),
        ({"shard_degree": 1, "tensor_degree": 2}, "tensor parallelism"),
        ({"shard_degree": 1, "recompute": "units", "offload": True}, "offloading"),
        ({"shard_degree": 1, "process_group": "a:b"}, "a custom process group"),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_the_way_out(plan: dict[str, Any], match: str) -> None:
    class Traced:
        parallelism: frozenset[str] = frozenset()
        compiles_steps = False

        def device_name(self) -> str:
            return "xla:NEURON"

    with pytest.raises(ConfigError, match=match):
        check_plan(Plan.read(plan), Traced())  # type: ignore[arg-type]
    check_plan(Plan.read(plan), open_host())
    check_plan(Plan(shard="state"), Traced())  # type: ignore[arg-type]


def groups(plan: str) -> list[list[int]]:
    rank, found = mesh.init(plan).rank, []
    for axis in AXES:
        ranks = mesh.current_mesh().ranks(axis)
        found.append(dist.get_process_group_ranks(ranks.process_group))
        assert tuple(found[-1]) in ranks.groups and found[-1][ranks.index] == rank and len(found[-1]) == ranks.size
    return found


def test_the_groups_of_a_plan(tmp_path: Path) -> None:
    found = run_ranks(f"{CASES}:groups", 4, tmp_path, '{"shard_degree": 2}')
    assert found == [[[0, 2], [0, 1], [0]], [[1, 3], [0, 1], [1]], [[0, 2], [2, 3], [2]], [[1, 3], [2, 3], [3]]]


def asleep(_: str) -> float:
    """Rank 0 of a shard group never comes: the other one gives up when its time is over, not after 30 minutes."""
    place = mesh.init({"shard_degree": 2}, timeout_s=200)
    group = mesh.current_mesh().devices.get_group("shard")
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=200)
    set_timeouts(mesh.current_mesh().devices, 2)
    if place.shard_rank == 0:
        return 0.0
    started = time.monotonic()
    with pytest.raises(TransientError, match="another rank failed while waiting"), collective_errors("waiting"):
        dist.all_reduce(torch.ones(1), group=group)
    return time.monotonic() - started


def test_sub_groups_time_out_as_the_run_does(tmp_path: Path) -> None:
    waited = run_ranks(f"{CASES}:asleep", 4, tmp_path, "")
    assert all(seconds > 1.5 for seconds in waited[1::2])  # and this test ends


def apart(device: str, *plans: str) -> str:
    mesh.init(plans[int(os.environ["RANK"])], device=device)
    return "joined"


@pytest.mark.parametrize(
    ("plans", "match"),
    [
        (('{"shard_degree": 1}', '{"shard_degree": 2}'), "rank 0 has plan"),
        (('{"shard_degree": 1}', '{"shard_degree: 2}'), "rank 1: the plan cannot be read"),
    ],
)
def test_every_rank_says_what_is_wrong(tmp_path: Path, plans: tuple[str, str], match: str) -> None:
    errors = run_ranks(f"{CASES}:apart", 2, tmp_path, "cpu", *plans, code=78)
    assert all(match in text and "Traceback" not in text for text in errors)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU")
def test_a_device_that_is_not_there_is_one_error_on_every_rank(tmp_path: Path) -> None:
    errors = run_ranks(f"{CASES}:apart", 2, tmp_path, "cuda", "{}", "{}", code=78)
    assert all("no CUDA device is visible" in text and "Traceback" not in text for text in errors)
