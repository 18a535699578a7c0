"""A commit killed before it empties its staging leaves files that are one with the published ones.

Whoever writes into that staging next must not write through them.
"""

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.checkpoint.save import Snapshot, commit_snapshot
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.data import tokenizer as tokenizer_store
from pipeline.data.config import DataConfig, SyntheticConfig, TokenizerConfig
from pipeline.data.prepare import prepare
from pipeline.data.tokenizer import TextTokenizer, store_tokenizer, train_tokenizer
from pipeline.evaluate.score import save_arrays, save_scores
from pipeline.io import commit as commit_module
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage, open_storage
from tests.checkpoint.test_checkpoints import snapshot
from tests.evaluate.test_scores import scores
from tests.kit.killing import FORK, killed_at_byte

pytestmark = pytest.mark.fault

Write = Callable[[Storage, Path, int], object]
"""Commits something that differs with the number, by way of a local folder."""


def checkpoint(storage: Storage, scratch: Path, number: int) -> None:
    made = snapshot(number)
    weights = {"w": torch.full((50,), float(number))}
    commit_snapshot(storage, Snapshot(made.state, weights, weights, "{}", b"tokens"), scratch / "saving")


def arrays(storage: Storage, scratch: Path, number: int) -> None:
    save_arrays(storage, f"baselines/{number}", "bm25", {"ranks": np.full(5, number)}, scratch)


def score_set(storage: Storage, scratch: Path, number: int) -> None:
    save_scores(
        storage, "scores/x" if number == 1 else "scores-x", scores(gain=np.full(3, number, np.float32)), scratch
    )


def killed_before_emptying(work: Callable[[], object]) -> None:
    """Run `work` in a child that dies where its first commit has just become visible."""

    def child() -> None:
        commit_module._remove_sources = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        work()

    process = FORK.Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def published(workspace: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(workspace.rglob("*")) if path.is_file()}


def assert_linked(before: dict[Path, bytes]) -> None:
    """Else the test proves nothing."""
    assert {path.stat().st_nlink for path in before if path.name != MANIFEST_NAME} == {2}


@pytest.mark.parametrize("write", [checkpoint, arrays, score_set])
def test_the_next_commit_leaves_the_killed_one_alone(tmp_path: Path, write: Write) -> None:
    """Each has a staging of its own: a killed one's is swept when it is old."""
    workspace, scratch = tmp_path / "workspace", tmp_path / "scratch"
    storage = open_storage(str(workspace))
    killed_before_emptying(partial(write, storage, scratch, 1))
    before = published(workspace)
    assert_linked(before)
    write(storage, scratch, 2)
    after = published(workspace)
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before), "the next one is there too"


def test_a_tokenizer_is_not_written_through_its_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a second writer that had looked before the first committed, killed after 100 bytes."""
    config = DataConfig()
    tokenizer = TextTokenizer(train_tokenizer(["some words"], TokenizerConfig(vocab_size=256)))
    storage, scratch = open_storage(str(tmp_path / "workspace")), tmp_path / "scratch"
    store = partial(store_tokenizer, config, None, storage, tokenizer, scratch)
    killed_before_emptying(store)
    assert_linked(published(tmp_path / "workspace"))
    monkeypatch.setattr(tokenizer_store, "read_manifest", lambda *_: None)
    assert killed_at_byte(100, store) == -signal.SIGXFSZ
    monkeypatch.undo()
    verify_dir(storage, store(), deep=True)


def test_what_a_killed_prepare_left_is_gone_before_a_damaged_set_is_made_again(tmp_path: Path) -> None:
    config = DataConfig(
        synthetic=SyntheticConfig(num_queries=20),
        num_workers=1,
        tokenizer=TokenizerConfig(vocab_size=300),
        buckets=("16x32",),  # to choose them, a forked process would use the tokenizer's threads, which it lacks
    )
    storage, scratch = open_storage(str(tmp_path / "workspace")), tmp_path / "scratch"
    given = train_tokenizer(["some words of a catalogue"], config.tokenizer)

    def run() -> str:
        (prefix,) = prepare(
            config, storage, scratch=scratch, tokenizer=given, events=lambda *_, **__: None, stop=StopSignal()
        ).token_set_prefixes
        return prefix

    store_tokenizer(config, None, storage, TextTokenizer(given), scratch)
    killed_before_emptying(run)
    (staged,) = (scratch / "tokens").iterdir()
    (shard,) = (tmp_path / "workspace" / "tokens").glob("catalogue/*/train-*.safetensors")
    whole = shard.read_bytes()
    assert shard.stat().st_nlink == 2 and (staged / "files" / shard.name).samefile(shard)
    prefix = run()  # finds it done
    assert not staged.exists()
    with shard.open("r+b") as file:  # a disk that decays
        file.seek(-1, os.SEEK_END)
        file.write(bytes([whole[-1] ^ 1]))
    shutil.rmtree(shard.parent)  # as the message of a damaged shard says
    assert run() == prefix
    assert shard.read_bytes() == whole
    verify_dir(storage, prefix, deep=True)
