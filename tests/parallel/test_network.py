"""Which address the other nodes of a job can reach, and what libraries are told of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.parallel.world import Interface, choose_interface, default_routes, gang_variables, has_efa
from tests.parallel.namespaces import MAIN_ADDRESS, ecs_tasks

ECS_TASK = (
    Interface("lo", "127.0.0.1"),
    Interface("ecs-eth0", "169.254.172.8"),
    Interface("eth0", "10.0.0.212"),
)
"""As `ip address` lists them in a task of Amazon ECS with a network interface of its own."""
TABLE = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
ens6\t00000000\t0100000A\t0003\t0\t0\t1024\t00000000\t0\t0\t0
ens5\t00000000\t0100000A\t0003\t0\t0\t512\t00000000\t0\t0\t0
"""


def test_the_link_to_the_agent_of_ecs_is_never_taken() -> None:
    for routed in (["eth0"], [], ["ecs-eth0"]):
        assert choose_interface(ECS_TASK, routed) == Interface("eth0", "10.0.0.212")


def test_the_default_route_goes_before_the_order_of_the_system() -> None:
    host = [
        Interface("lo", "127.0.0.1"),
        Interface("docker0", "172.17.0.1"),
        Interface("br-5f1c", "172.18.0.1"),
        Interface("veth12ab", "172.19.0.1"),
        Interface("ens6", "10.0.0.6"),
        Interface("ens5", "169.254.1.1"),
        Interface("ens5", "10.0.0.5"),
    ]
    assert default_routes(TABLE) == ["ens5", "ens6"]
    assert choose_interface(host, default_routes(TABLE)).address == "10.0.0.5"
    assert choose_interface(host, []).address == "10.0.0.6"
    assert choose_interface(host, ["docker0", "ens7"]).address == "10.0.0.6"


@pytest.mark.parametrize("found", [(), ECS_TASK[:2], (Interface("docker0", "172.17.0.1"),)])
def test_a_machine_that_nobody_can_reach(found: tuple[Interface, ...]) -> None:
    with pytest.raises(ConfigError, match="no network interface that other machines can reach") as raised:
        choose_interface(found, [])
    assert raised.value.expected and all(interface.address in raised.value.seen for interface in found)


def test_no_routes_at_all() -> None:
    assert default_routes("") == default_routes(TABLE.splitlines()[0]) == []


def test_variables_name_the_interface_and_efa_only_where_there_is_some() -> None:
    names = {"CCOM_SOCKET_IFNAME": "ens5", "GLOO_SOCKET_IFNAME": "ens5"}
    efa = names | {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    own = Interface("ens5", "10.0.0.5")
    assert gang_variables(own, has_efa=False, kernel="5.10.1-amzn2") == names
    assert gang_variables(own, has_efa=True, kernel="6.1.102-111.182.amzn2023.x86_64") == efa
    assert gang_variables(own, has_efa=True, kernel="5.15.0") == efa
    assert gang_variables(own, has_efa=True, kernel="5.10.220") == efa | {"FI_EFA_FORK_SAFE": "1"}


def test_efa_devices_are_those_of_the_container(tmp_path: Path) -> None:
    assert not has_efa(tmp_path / "none")
    (tmp_path / "rdma_cm").touch()
    assert not has_efa(tmp_path)
    (tmp_path / "uverbs0").touch()
    assert has_efa(tmp_path)


@pytest.mark.stage
def test_in_a_task_of_ecs_torchrun_is_told_the_address_of_the_task() -> None:
    code = (
        "from pipeline.parallel.world import torchrun_arguments\n"
        "print(*torchrun_arguments(1, {'TRNJOBS_NODE': '0', 'TRNJOBS_NODES': '2'}))"
    )
    with ecs_tasks() as (main, _):
        done = subprocess.run([*main, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"--master-addr={MAIN_ADDRESS} " in done.stdout
