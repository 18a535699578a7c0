"""Where ranks meet: alone, on the main node, on the others."""

import pytest

from pipeline.core.errors import ConfigError
from pipeline.parallel.network import torchrun_arguments

BATCH = {
    "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_JOB_NODE_INDEX": "2",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
}


def test_alone() -> None:
    assert torchrun_arguments(2, {}) == ["--standalone", "--nproc-per-node=2", "--max-restarts=0"]


def test_a_child_node_uses_the_address_it_is_given() -> None:
    arguments = torchrun_arguments(32, BATCH, own=lambda: "10.0.0.9")
    assert arguments[2:5] == ["--nnodes=4", "--node-rank=2", "--master-addr=10.0.0.7"]


def test_the_main_node_is_its_own_master() -> None:
    env = {**BATCH, "AWS_BATCH_JOB_NODE_INDEX": "0"}
    del env["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"]
    assert torchrun_arguments(32, env, own=lambda: "10.0.0.7")[3:5] == ["--node-rank=0", "--master-addr=10.0.0.7"]


def test_node_ranks_start_at_the_main_node() -> None:
    ranks = set()
    for index in range(4):
        env = {**BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "3", "AWS_BATCH_JOB_NODE_INDEX": str(index)}
        ranks.add(torchrun_arguments(1, env, own=lambda: "10.0.0.7")[3])
    assert ranks == {f"--node-rank={rank}" for rank in range(4)}
    assert torchrun_arguments(1, {**BATCH, "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2"}, own=lambda: "")[3] == "--node-rank=0"


def test_half_a_set_of_variables_is_refused() -> None:
    env = {name: value for name, value in BATCH.items() if "ADDRESS" not in name}
    with pytest.raises(ConfigError, match="AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"):
        torchrun_arguments(1, env)


def test_gangs_of_one_machine_meet_on_ports_of_their_own() -> None:
    assert torchrun_arguments(1, BATCH)[5] == "--master-port=41000"
    given = {**BATCH, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "23654"}
    expected = ["--master-addr=127.0.0.1", "--master-port=23654"]
    for index in ("0", "2"):
        assert torchrun_arguments(1, {**given, "AWS_BATCH_JOB_NODE_INDEX": index})[4:] == expected
