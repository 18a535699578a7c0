"""Two real ranks over gloo."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline.core.errors import ConfigError, TransientError
from pipeline.parallel.gang import collective_errors, open_world_group
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os

import torch
from pipeline.core.errors import TransientError
from pipeline.parallel.gang import Gang
from pipeline.parallel.world import world_from_env

world = world_from_env()
gang = Gang(world, timeout_s=200)
one = world.rank == 1
assert gang.gather(world.rank * 10) == [0, 10]
assert [t.tolist() for t in gang.mean([torch.tensor([1.0 + world.rank])])] == [[1.5]]
assert [gang.agree(one and step == 1) for step in range(4)] == [False, False, True, False], "one call later, on all"
# A stop that is under way must neither look like the answer to another question nor get lost.
assert not gang.agree(one)
assert not gang.agree_now(False)
assert gang.agree(False)
assert gang.agree_now(one)
gang.barrier()
if one:
    os._exit(3)  # as if killed
try:
    gang.gather("x")
    raise SystemExit("the lost peer was not noticed")
except TransientError as error:
    assert "while gathering results" in str(error)
    os._exit(0)  # gloo's threads may abort an orderly exit once a peer is gone
"""


@pytest.mark.stage
def test_two_ranks_agree_gather_and_notice_a_lost_one(tmp_path: Path) -> None:
    port = str(free_port())

    def start(rank: int) -> subprocess.Popen[str]:
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, cwd=tmp_path)

    ranks = [start(rank) for rank in range(2)]
    ends = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert ranks[0].returncode == 0, ends[0]
    assert ranks[1].returncode == 3, ends[1]


def test_ranks_without_a_launcher_are_told_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK, MASTER_ADDR, MASTER_PORT not set"):
        open_world_group(None, 1.0)


def test_what_this_rank_did_wrong_alone_is_no_peers_fault() -> None:
    with pytest.raises(torch.OutOfMemoryError), collective_errors("spreading the model", mixed=True):
        raise torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(TransientError, match="while leaving: RuntimeError"), collective_errors("leaving"):
        raise RuntimeError
