"""Who we are, whether the runtime agrees, and what a gang of one does."""

import numpy as np
import pytest
import torch

from pipeline.core.errors import ConfigError, TransientError
from pipeline.parallel.gang import Gang, collective_errors
from pipeline.parallel.world import World, check_world, world_from_env

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}


def test_from_torchrun() -> None:
    world = world_from_env(TORCHRUN)
    assert world == World(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1)
    assert not world.is_main and world_from_env({**TORCHRUN, "RANK": "0"}).is_main


def test_alone() -> None:
    assert world_from_env({}) == World() == world_from_env({"RANK": "3"})
    assert World().is_main


@pytest.mark.parametrize(
    "change", [{"RANK": None}, {"RANK": "x"}, {"WORLD_SIZE": ""}, {"WORLD_SIZE": "0"}, {"RANK": "4"}, {"RANK": "-1"}]
)
def test_half_an_environment_is_a_config_error(change: dict[str, str | None]) -> None:
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=r"RANK|WORLD_SIZE"):
        world_from_env(env)


@pytest.mark.parametrize(
    ("world_size", "runtime", "in_graph", "fits"),
    [
        (1, 1, True, True),
        (1, 1, False, True),
        (4, 4, True, True),  # Neuron: the runtime knows all ranks
        (4, 1, True, False),  # Neuron ranks that each believe they are alone: silent training apart
        (2, 1, False, True),  # PJRT-CPU or CUDA processes: the host reduces
        (2, 2, False, False),
        (1, 2, False, False),  # CPU_NUM_DEVICES=2 left over
        (1, 32, True, False),
    ],
)
def test_the_runtime_must_agree(world_size: int, runtime: int, in_graph: bool, fits: bool) -> None:
    world = World(world_size=world_size)
    if fits:
        check_world(world, runtime_world_size=runtime, reduces_in_graph=in_graph, device="xla")
        return
    with pytest.raises(ConfigError, match=f"torchrun says world size {world_size}, the xla runtime says {runtime}"):
        check_world(world, runtime_world_size=runtime, reduces_in_graph=in_graph, device="xla")


def test_a_gang_of_one_answers_at_once() -> None:
    gang = Gang(World(), timeout_s=1)
    assert gang.agree(True) and not gang.agree(False)
    assert gang.agree_now(True) and not gang.agree_now(False)
    tensors = [torch.ones(2)]
    assert gang.mean(tensors) is tensors and tensors[0].tolist() == [1, 1]
    assert gang.gather({"x": np.arange(2)})[0]["x"].tolist() == [0, 1]
    gang.barrier()
    gang.close()
    assert not torch.distributed.is_initialized()


def test_a_lost_peer_is_transient_and_other_errors_pass() -> None:
    lost = "a peer failed while waiting: Connection closed"
    with pytest.raises(TransientError, match=lost), collective_errors("waiting"):
        raise RuntimeError("Connection closed by peer\nstack")
    with pytest.raises(KeyError), collective_errors("waiting"):
        raise KeyError("x")
