"""Who we are, whether the runtime agrees, which share is ours, which address others reach, and where ranks meet."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.parallel.world import (
    ARRAY_INDEX,
    Interface,
    World,
    check_world,
    choose_interface,
    has_efa,
    network_variables,
    torchrun_arguments,
    worker_of,
    world_from_env,
)

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_who_we_are() -> None:
    world = world_from_env(TORCHRUN)
    assert world == World(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1) and not world.is_main
    assert world_from_env({}) == World() == world_from_env({"RANK": "3"}) and World().is_main


@pytest.mark.parametrize("change", [{"RANK": None}, {"RANK": "x"}, {"WORLD_SIZE": ""}, {"RANK": "4"}])
def test_half_an_environment_is_a_config_error(change: dict[str, str | None]) -> None:
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=r"RANK|WORLD_SIZE"):
        world_from_env(env)


@pytest.mark.parametrize(
    ("world_size", "runtime", "in_graph", "fits"),
    [
        (4, 4, True, True),  # Neuron: the runtime knows all ranks
        (4, 1, True, False),  # Neuron ranks that each believe they are alone: silent training apart
        (2, 1, False, True),  # PJRT-CPU or CUDA processes: the host reduces
        (1, 2, False, False),  # CPU_NUM_DEVICES=2 left over
    ],
)
def test_the_runtime_must_agree(world_size: int, runtime: int, in_graph: bool, fits: bool) -> None:
    said = f"torchrun reports world size {world_size}, but the xla runtime reports {runtime}"
    with nullcontext() if fits else pytest.raises(ConfigError, match=said):
        check_world(World(world_size=world_size), runtime_world_size=runtime, reduces_in_graph=in_graph, device="xla")


@pytest.mark.parametrize(
    ("jobs", "job", "world", "index", "expected"),
    [
        (1, None, World(), None, (0, 1)),
        (1, None, World(rank=2, world_size=4), None, (2, 4)),
        (7, None, World(), "5", (5, 7)),
        (7, 0, World(), "5", (0, 7)),
        (3, 2, World(rank=1, world_size=4), None, (9, 12)),
        (1, None, World(), "0", "worker 0 of 1"),
        (4, None, World(), None, "worker unknown of 4"),
        (4, None, World(), "4", "worker 4 of 4"),
        (4, 4, World(), None, "worker 4 of 4"),
        (4, None, World(), "x", "worker x of 4"),
    ],
)
def test_jobs_and_ranks_together(
    jobs: int, job: int | None, world: World, index: str | None, expected: tuple[int, int] | str
) -> None:
    env = {} if index is None else {ARRAY_INDEX: index}
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            worker_of(jobs, world, env, "embed", job)
    else:
        assert worker_of(jobs, world, env, "embed", job) == expected


ECS_TASK = (
    Interface("lo", "127.0.0.1"),
    Interface("ecs-eth0", "169.254.172.8"),
    Interface("eth0", "10.0.0.212"),
)
"""As `ip address` lists them in a task of Amazon ECS with a network interface of its own."""


def test_which_interface_other_machines_reach() -> None:
    """Never the link to the agent of ECS; the default route goes before the order of the system."""
    for routed in ("10.0.0.212", "", "169.254.172.8"):
        assert choose_interface(ECS_TASK, routed) == Interface("eth0", "10.0.0.212")
    host = [
        Interface("lo", "127.0.0.1"),
        Interface("docker0", "172.17.0.1"),
        Interface("veth12ab", "172.19.0.1"),
        Interface("ens6", "10.0.0.6"),
        Interface("ens5", "169.254.1.1"),
        Interface("ens5", "10.0.0.5"),
    ]
    assert choose_interface(host, "10.0.0.5").address == "10.0.0.5"
    assert choose_interface(host, "172.17.0.1").address == "10.0.0.6"


@pytest.mark.parametrize("found", [(), ECS_TASK[:2]])
def test_a_machine_that_nobody_can_reach(found: tuple[Interface, ...]) -> None:
    with pytest.raises(ConfigError, match="no network interface can be reached from other machines") as raised:
        choose_interface(found, "")
    assert raised.value.expected and all(interface.address in raised.value.seen for interface in found)


def test_variables_name_the_interface_and_efa_only_where_there_is_some(tmp_path: Path) -> None:
    (tmp_path / "rdma_cm").touch()
    assert not has_efa(tmp_path / "none") and not has_efa(tmp_path)
    (tmp_path / "uverbs0").touch()
    assert has_efa(tmp_path)
    names = {"CCOM_SOCKET_IFNAME": "ens5", "GLOO_SOCKET_IFNAME": "ens5"}
    efa = names | {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    own = Interface("ens5", "10.0.0.5")
    assert network_variables(own, has_efa=False, kernel="5.10.1-amzn2") == names
    assert network_variables(own, has_efa=True, kernel="6.1.102-111.182.amzn2023.x86_64") == efa
    assert network_variables(own, has_efa=True, kernel="5.15.0") == efa
    assert network_variables(own, has_efa=True, kernel="5.10.220") == efa | {"FI_EFA_FORK_SAFE": "1"}


GANG = {"TRNJOBS_NODES": "4", "TRNJOBS_NODE": "2", "TRNJOBS_MAIN": "10.0.0.7"}
MAIN = ["--nnodes=4", "--node-rank=0", "--master-addr=10.0.0.9", "--master-port=41000"]
CHILD = ["--nnodes=4", "--node-rank=2", "--master-addr=10.0.0.7", "--master-port=41000"]
GIVEN = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23654"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, []),
        ({"TRNJOBS_NODES": "1", "TRNJOBS_NODE": "0"}, []),
        (GANG, CHILD),
        ({**GANG, "TRNJOBS_NODE": "0"}, MAIN),
        (GANG | GIVEN, [*CHILD[:2], "--master-addr=127.0.0.1", "--master-port=23654"]),
    ],
)
def test_where_ranks_meet(env: dict[str, str], expected: list[str]) -> None:
    ranks = ["--nproc-per-node=2", "--max-restarts=0"]
    found = torchrun_arguments(2, env, own=lambda: "10.0.0.9")
    assert found == ([*ranks, *expected] if expected else ["--standalone", "--local-addr=127.0.0.1", *ranks])


@pytest.mark.parametrize("change", [{"TRNJOBS_MAIN": ""}, {"TRNJOBS_NODE": "4"}, {"TRNJOBS_NODE": ""}])
def test_half_a_set_of_variables_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        torchrun_arguments(1, GANG | change)
