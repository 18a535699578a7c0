"""A workspace with prepared rows and a trained checkpoint, small enough that a side is recorded in a second."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline.context import StageContext, StageResult, open_context, store_result
from pipeline.core.stop import StopSignal
from pipeline.evaluate.config import ParityConfig
from pipeline.io.commit import commit_dir
from pipeline.io.storage import open_storage
from pipeline.parity.compare import RecordedSide, Side, SideRecord
from pipeline.parity.record import SideTask, load_side, make_task, record
from pipeline.settings import LogConfig, Settings
from pipeline.telemetry.console import Console
from pipeline.train.build import RunConfig, open_run
from pipeline.train.inputs import gather_inputs
from pipeline.train.loop import train
from tests.train.rows import MODEL, TRAIN, write_token_set

CYCLE = "c1"
CPU = Side("cpu", "fp32")
Rows = Mapping[str, tuple[int, int]]
"""Of each bucket, by split."""
ROWS: Rows = {"train": (60, 60), "valid": (40, 40), "test": (6, 6)}
PARITY = ParityConfig(steps=6, evaluate_every=2, vector_rows=30, first_steps=3)


@dataclass(frozen=True)
class Case:
    """A workspace and the settings its sides are recorded with."""

    folder: Path
    settings: Settings

    @contextmanager
    def context(self) -> Iterator[StageContext]:
        with open_context(self.settings, StopSignal(), {}) as ctx:
            yield ctx

    def task(self, side: Side = CPU, place: str = "", **parity: object) -> SideTask:
        settings = self.settings.model_copy(update={"parity": PARITY.model_copy(update=parity)})
        with self.context() as ctx:
            return make_task(settings, ctx, side, place and f"{self.folder}/{place}")

    def record(self, task: SideTask, stop: StopSignal | None = None) -> SideRecord:
        return record(task, stop or StopSignal(), Console(stream=io.StringIO()))

    def side(self, task: SideTask) -> RecordedSide:
        """Recorded in this process, then read."""
        self.record(task)
        return load_side(open_storage(task.place), self.folder / "cache")


def make_case(folder: Path, rows: Rows = ROWS) -> Case:
    """Rows as `prepare` leaves them, and a candidate as `train` does."""
    workspace = folder / "workspace"
    settings = Settings(
        workspace=str(workspace), cycle=CYCLE, model=MODEL, train=TRAIN, parity=PARITY, log=LogConfig(every_steps=2)
    )
    storage, staging = open_storage(str(workspace)), folder / "staging"
    staging.mkdir()
    info = write_token_set(staging, rows, partition="flat", fingerprint="print")
    commit_dir(storage, staging, "tokens/d/print", kind="tokens", fields=info.model_dump(mode="json"))
    storage.write_bytes("tokens/d/tokenizers/tok/tokenizer.json", b"{}")
    outputs = {"token_set_0000": "tokens/d/print", "tokenizer": "tokens/d/tokenizers/tok"}
    store_result(storage, _result("prepare", outputs))
    on_cpu = settings.model_copy(update={"backend": "cpu"})
    inputs = gather_inputs(storage, ["tokens/d/print"], None, TRAIN, MODEL)
    config = RunConfig("cpu", MODEL, TRAIN, on_cpu.checkpoint, on_cpu.log, on_cpu.health)
    with open_context(on_cpu, StopSignal(), {}) as ctx, open_run(config, ctx, inputs, b"{}") as opened:
        outcome = train(opened)
    store_result(storage, _result("train", {"checkpoint": outcome.prefix}))
    return Case(folder, settings)


def _result(stage: str, outputs: dict[str, str]) -> StageResult:
    now = datetime.now(UTC)
    return StageResult(
        stage=stage,
        cycle=CYCLE,
        status="done",
        inputs={},
        outputs=outputs,
        settings_hash="h",
        code_version="v",
        started=now,
        finished=now,
    )
