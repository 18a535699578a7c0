"""Workspaces that earlier revisions wrote are read and carried on.

`workspace-<revision>.tar.gz` was written on the cpu backend with `settings.toml` (ebaa50c: without the settings that it
did not know): cycle 2026-11-20 whole (`trnjobs submit --target local`), cycle 2026-11-21 as kill -9 leaves it after the
checkpoint of step 6. Both train the same rows from the same seed, so step 12 of the first is what the second must come
to. ebaa50c trained in another way, so what it had under way is refused, and what it had finished is used.
"""

import hashlib
import os
import tarfile
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from jobs.cycle.cycle_store import CycleStore
from jobs.settings import with_values
from pipeline.core.errors import ConfigError
from pipeline.io.storage import open_storage
from tests.kit.zygote import ROOT, Forked

HERE = Path(__file__).parent
DONE, UNDER_WAY = "2026-11-20", "2026-11-21"
MODEL = "checkpoints/{}/step-12/model.safetensors"


@pytest.fixture(params=["ebaa50c", "70155e46"])
def revision(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def workspace(tmp_path: Path, revision: str) -> Path:
    with tarfile.open(HERE / f"workspace-{revision}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "ws"


def run(program: str, *words: str, workspace: Path, expected: int = 0) -> str:
    """Return what `python -m <program> <words>` printed, both streams."""
    given = [*words, "--config", str(HERE / "settings.toml"), "--workspace", str(workspace)]
    with (workspace.parent / "printed").open("w+") as printed:
        process = Forked(program, given, env=os.environ, cwd=ROOT, stdout=printed, stderr=printed)
        code = process.wait()
        printed.seek(0)
        text = printed.read()
    assert code == expected, text
    return text


@pytest.mark.stage
def test_a_run_under_way_continues_at_its_checkpoint(workspace: Path, revision: str) -> None:
    if revision == "ebaa50c":
        shown = run("pipeline", "train", "--cycle", UNDER_WAY, workspace=workspace, expected=ConfigError.exit_code)
        assert "step-6 was trained with different" in shown and "train.candidates_per_query" in shown
        return
    shown = run("pipeline", "train", "--cycle", UNDER_WAY, workspace=workspace)
    assert f"resuming from {workspace.as_uri()}/checkpoints/{UNDER_WAY}/step-6" in shown
    mine, theirs = (workspace / MODEL.format(cycle) for cycle in (UNDER_WAY, DONE))
    if hashlib.sha256(mine.read_bytes()).digest() != hashlib.sha256(theirs.read_bytes()).digest():
        # Another processor than the one that wrote the sample adds in another order.
        torch.testing.assert_close(load_file(mine), load_file(theirs), rtol=0, atol=1e-6)


@pytest.mark.stage
def test_vectors_are_carried_over(workspace: Path) -> None:
    shown = run("pipeline", "embed", "--cycle", UNDER_WAY, workspace=workspace)
    assert "0 embedded, 480 carried over" in shown
    old, new = (pq.read_table(workspace / f"embeddings/{cycle}/part-00000.parquet") for cycle in (DONE, UNDER_WAY))
    assert new.select(["id", "vector"]).equals(old.select(["id", "vector"]))


@pytest.mark.stage
def test_what_is_done_is_done_and_history_shows(workspace: Path, revision: str) -> None:
    if revision != "ebaa50c":
        for stage, message in (("prepare", "1 reused"), ("train", "already"), ("evaluate", "already")):
            assert message in run("pipeline", stage, "--cycle", DONE, workspace=workspace)
    else:
        assert "is already in production" in run("pipeline", "evaluate", "--cycle", DONE, workspace=workspace)
    assert f"checkpoints/{DONE}/step-" in run("pipeline", "registry", "list", workspace=workspace)
    assert DONE in run("jobs", "history", workspace=workspace)


def test_a_plan_keeps_its_identity(workspace: Path) -> None:
    store = CycleStore(open_storage(str(workspace)), DONE, time.time)
    plan, claim = store.plan(), store.claim()
    assert plan is not None and claim is not None
    assert plan.plan_id == claim.plan_id


def test_stored_settings_are_valid(workspace: Path, revision: str) -> None:
    stored = CycleStore(open_storage(str(workspace)), DONE, time.time).settings()
    assert stored is not None
    if revision != "ebaa50c":
        assert with_values(stored, {}).model_name == stored["model_name"]
