"""A workspace with prepared rows, and a search in it that takes a second."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipeline.context import StageContext, StageResult, open_context, store_result
from pipeline.core.stop import StopSignal
from pipeline.io.commit import commit_dir
from pipeline.io.storage import open_storage
from pipeline.settings import LogConfig, Settings
from pipeline.telemetry.console import Console
from pipeline.train.config import CheckpointConfig
from pipeline.tune.config import TuneConfig
from pipeline.tune.study import StudyTable, run_study
from tests.train.rows import MODEL, TRAIN, write_token_set

CYCLE = "c1"
ROWS = {"train": (60, 60), "valid": (40, 40), "test": (6, 6)}
SPACE = {
    "train.optimizer.learning_rate": "log 1e-4 1e-1",
    "train.loss.temperature": "one of 0.02 0.05 0.2",
    "model.cross_layers": "int 0 2",
}
TUNE = TuneConfig(space=SPACE, trials=7, steps=8, min_steps=2, reduction=2, metric="ndcg")


def make_workspace(folder: Path) -> Path:
    """Rows as `prepare` leaves them."""
    workspace, staging = folder / "workspace", folder / "staging"
    storage = open_storage(str(workspace))
    staging.mkdir()
    info = write_token_set(staging, ROWS, partition="flat", fingerprint="print")
    commit_dir(storage, staging, "tokens/d/print", kind="tokens", fields=info.model_dump(mode="json"))
    storage.write_bytes("tokens/d/tokenizers/tok/tokenizer.json", b"{}")
    now = datetime.now(UTC)
    prepared = StageResult(
        stage="prepare",
        cycle=CYCLE,
        status="done",
        inputs={},
        outputs={"token_set_0000": "tokens/d/print", "tokenizer": "tokens/d/tokenizers/tok"},
        settings_hash="h",
        code_version="v",
        started=now,
        finished=now,
    )
    store_result(storage, prepared)
    return workspace


def settings_of(workspace: Path, folder: Path, **tune: Any) -> Settings:
    """A search below `folder`."""
    config = TuneConfig.model_validate({**TUNE.model_dump(), "folder": str(folder), **tune})
    train = TRAIN.model_copy(update={"max_steps": 0})
    return Settings(
        workspace=str(workspace),
        cycle=CYCLE,
        scratch=str(folder / "scratch"),
        backend="cpu",
        model=MODEL,
        train=train,
        tune=config,
        checkpoint=CheckpointConfig(every_steps=2),
        log=LogConfig(every_steps=2),
    )


@contextmanager
def context(
    settings: Settings, stop: StopSignal | None = None, said: io.StringIO | None = None
) -> Iterator[StageContext]:
    with open_context(settings, stop or StopSignal(), {}) as ctx:
        yield replace(ctx, console=Console(stream=said or io.StringIO()))


def search(settings: Settings, stop: StopSignal | None = None, said: io.StringIO | None = None) -> StudyTable:
    """What `trnpipe tune` does."""
    with context(settings, stop, said) as ctx:
        return run_study(settings, ctx)


def without_seconds(table: StudyTable) -> StudyTable:
    """All of a table that must not depend on how often the search was interrupted."""
    rows = tuple(row.model_copy(update={"seconds": 0.0}) for row in table.trials)
    return table.model_copy(update={"trials": rows})
