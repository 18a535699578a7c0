"""What ranks agree on: two real ranks over gloo, a gang of one, and whose fault an error is."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.core.errors import ConfigError, TransientError
from pipeline.parallel.process_group import ProcessGroup, collective_errors, open_world_group
from pipeline.parallel.world import World, world_from_env
from tests.kit.ranks import run_ranks


def agree(_: str) -> str:
    """Everything a gang does; then rank 1 is gone, and the other one notices."""
    world = world_from_env()
    process_group, last = ProcessGroup(world, timeout_s=200), world.rank == 1
    assert process_group.gather(world.rank * 10) == [0, 10]
    assert [tensor.tolist() for tensor in process_group.mean([torch.tensor([1.0 + world.rank])])] == [[1.5]]
    assert [tensor.tolist() for tensor in process_group.gather_rows([torch.tensor([world.rank])])] == [[0, 1]]
    assert [process_group.agree(last and step == 1) for step in range(4)] == [False, False, True, False], (
        "one call later"
    )
    # A stop that is under way must neither look like the answer to another question nor get lost.
    assert not process_group.agree(last) and not process_group.agree_now(False)
    assert process_group.agree(False) and process_group.agree_now(last)
    process_group.barrier()
    if last:
        os._exit(75)
    process_group.gather("x")
    return "the lost peer was not noticed"


@pytest.mark.stage
def test_two_ranks_agree_gather_and_notice_a_lost_one(tmp_path: Path) -> None:
    errors = run_ranks("tests.parallel.test_process_group:agree", 2, tmp_path, "", code=75)
    assert "another rank failed while gathering results" in errors[0]


def test_a_gang_of_one_answers_at_once() -> None:
    process_group = ProcessGroup(World(), timeout_s=1)
    assert process_group.agree(True) and not process_group.agree(False)
    assert process_group.agree_now(True) and not process_group.agree_now(False)
    tensors = [torch.ones(2)]
    assert process_group.mean(tensors) is tensors and tensors[0].tolist() == [1, 1]
    assert process_group.gather({"x": np.arange(2)})[0]["x"].tolist() == [0, 1]
    process_group.barrier()
    process_group.close()
    assert not torch.distributed.is_initialized()


def test_ranks_without_a_launcher_are_told_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK, MASTER_ADDR, MASTER_PORT is not set"):
        open_world_group(None, 1.0)


@pytest.mark.parametrize(
    ("error", "mixed", "expected"),
    [
        (RuntimeError("Connection closed by peer\nstack"), False, TransientError),
        (RuntimeError(), False, TransientError),
        (torch.OutOfMemoryError("CUDA out of memory"), True, torch.OutOfMemoryError),  # what this rank did alone
        (KeyError("x"), False, KeyError),
    ],
)
def test_whose_fault_an_error_is(error: Exception, mixed: bool, expected: type[Exception]) -> None:
    with pytest.raises(expected), collective_errors("waiting", mixed=mixed):
        raise error
