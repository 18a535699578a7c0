"""What the bench of chaos sees: processes of jobs, and jobs that run twice at once."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from bench.chaos.faults import draw
from bench.chaos.lane import config_text
from bench.chaos.processes import scan
from jobs.settings import CycleSettings
from jobs.targets.local.node_keeper import MARK
from pipeline.settings import resolve

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@contextmanager
def process_of(workspace: Path, attempt: str, *words: str, **env: str) -> Iterator[int]:
    """A living process of a node of a job."""
    variables = {
        "TRNPIPE_WORKSPACE": str(workspace),
        "TRNPIPE_CYCLE": "c1",
        "TRNJOBS_JOB": "train",
        MARK: f"{attempt}/node-0",
    }
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **variables, **env},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


ROLES: Mapping[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "keeper": (("node_keeper.py",), {}),
    "entry": (("-m", "jobs.node"), {}),
    "torchrun": (("-m", "torch.distributed.run"), {}),
    "launcher": (("/venv/bin/trnpipe", "train"), {}),
    "rank": (("-m", "pipeline", "train"), {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}),
    "worker": (("--multiprocessing-fork",), {}),
}


def test_processes_are_told_apart(tmp_path: Path) -> None:
    with ExitStack() as stack:
        pids = {
            role: stack.enter_context(process_of(tmp_path, "id/1", *words, **env))
            for role, (words, env) in ROLES.items()
        }
        seen = {one.role: one for one in scan(str(tmp_path))}
        assert {role: one.pid for role, one in seen.items()} == pids
        assert seen["rank"].in_group and not seen["launcher"].in_group
        assert {(one.task, one.attempt, one.node) for one in seen.values()} == {("train", "id/1", 0)}
        assert scan(str(tmp_path / "elsewhere")) == []


def test_faults_are_aimed_where_they_can_hit() -> None:
    dice = random.Random(1)
    drawn = [draw(dice, ("hang_rank", "lost_heartbeat"), process_group=True) for _ in range(500)]
    assert {one.job for faults in drawn for one in faults} == {"train"}
    assert 0.15 < sum(not faults for faults in drawn) / len(drawn) < 0.25
    assert max(map(len, drawn)) == 3


def test_its_settings_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "chaos.toml"
    file.write_text(config_text())
    assert resolve([file], {}, [], model=CycleSettings).settings.jobs.embed.workers == 2
