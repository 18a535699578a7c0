"""Where ranks meet: alone, on the main node, on the others."""

import pytest

from pipeline.core.errors import ConfigError
from pipeline.parallel.network import torchrun_arguments

GANG = {"TRNJOBS_NODES": "4", "TRNJOBS_NODE": "2", "TRNJOBS_MAIN": "10.0.0.7"}


@pytest.mark.parametrize("env", [{}, {"TRNJOBS_NODES": "1", "TRNJOBS_NODE": "0"}], ids=["here", "job of one node"])
def test_ranks_of_one_node_meet_at_127_0_0_1(env: dict[str, str]) -> None:
    expected = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=0"]
    assert torchrun_arguments(2, env) == expected


def test_a_child_node_uses_the_address_it_is_given() -> None:
    arguments = torchrun_arguments(32, GANG, own=lambda: "10.0.0.9")
    assert arguments[2:5] == ["--nnodes=4", "--node-rank=2", "--master-addr=10.0.0.7"]


def test_the_main_node_is_its_own_master() -> None:
    env = {"TRNJOBS_NODES": "4", "TRNJOBS_NODE": "0"}
    assert torchrun_arguments(32, env, own=lambda: "10.0.0.7")[3:5] == ["--node-rank=0", "--master-addr=10.0.0.7"]


@pytest.mark.parametrize("change", [{"TRNJOBS_MAIN": ""}, {"TRNJOBS_NODE": "4"}, {"TRNJOBS_NODE": ""}])
def test_half_a_set_of_variables_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        torchrun_arguments(1, GANG | change)


def test_gangs_of_one_machine_meet_on_ports_of_their_own() -> None:
    assert torchrun_arguments(1, GANG)[5] == "--master-port=41000"
    given = {**GANG, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23654"}
    expected = ["--master-addr=127.0.0.1", "--master-port=23654"]
    for index in ("0", "2"):
        assert torchrun_arguments(1, {**given, "TRNJOBS_NODE": index})[4:] == expected
