"""What a side is to compute, as its process is told: everything is decided before it starts."""

import os
import subprocess
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from pipeline.checkpoint.config import CheckpointConfig
from pipeline.context import StageContext
from pipeline.core.errors import CheckpointError, ConfigError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage
from pipeline.model.config import ModelConfig
from pipeline.parity.record import Side
from pipeline.registry.checkpoints import start_place
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared, mined_negatives
from pipeline.train.config import TrainConfig


class SideTask(BaseModel):
    """One side to record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    settings: Settings
    side: Side
    run: str
    """Names what is computed: sides of one run can be compared."""
    place: str
    """URI of the folder for the record."""
    checkpoint: tuple[str, str]
    """Root URI of its storage, and prefix."""
    token_sets: tuple[str, ...]
    negatives: str | None = None
    """Prefix of those that were mined for the cycle."""
    tokenizer: str
    scratch: Path
    """A folder for this side alone."""
    shared_scratch: Path
    """Downloads that all may use."""
    settings_hash: str
    code_version: str

    @property
    def train(self) -> TrainConfig:
        """As set, but of `parity.steps`, with evaluations as often as parity wants them, and without a deadline."""
        parity = self.settings.parity
        return self.settings.train.model_copy(
            update={
                "max_steps": parity.steps,
                "evaluate_every": parity.evaluate_every,
                "evaluate_rows": parity.rows,
                "precision": self.side.precision,
                "deadline": None,
            }
        )

    @property
    def model(self) -> ModelConfig:
        """Without dropout: every device draws other random numbers."""
        return self.settings.model.model_copy(update={"dropout": 0.0})

    @property
    def checkpoints(self) -> CheckpointConfig:
        """Only to continue from."""
        return CheckpointConfig(every_steps=self.settings.parity.evaluate_every, keep_last=1)


def make_task(settings: Settings, ctx: StageContext, side: Side, place: str = "") -> SideTask:
    """The task of one side. `place`: folder or URI for the record; empty: in the workspace, by what is computed.

    Raises ConfigError, CheckpointError when there is no checkpoint, DataError when there is no prepared data.
    """
    prepared, negatives = load_prepared(ctx), mined_negatives(ctx)
    storage, prefix = _checkpoint(settings, ctx)
    manifest = read_manifest(storage, prefix)
    if manifest is None:
        raise CheckpointError(
            f"{storage.uri(prefix)} holds no committed checkpoint",
            expected="a folder with a MANIFEST.json",
            next_command="--parity.checkpoint WORKSPACE/checkpoints/CYCLE/step-N",
        )
    parity = settings.parity.model_dump(mode="json", include={"steps", "evaluate_every", "rows", "vector_rows"})
    run = fingerprint(
        {
            "checkpoint": manifest.digest,
            "token_sets": list(prepared.token_sets),
            "negatives": negatives,
            "train": settings.train.model_dump(mode="json", exclude={"start", "precision", "deadline", "on_deadline"}),
            "model": settings.model.model_dump(mode="json"),
            "parity": parity,
            "code_version": ctx.code_version,
        }
    )[:12]
    return SideTask(
        settings=settings,
        side=side,
        run=run,
        place=place or ctx.workspace.uri(f"cycles/{ctx.cycle}/parity/sides/{run}/{side.name}"),
        checkpoint=(storage.root, prefix),
        token_sets=prepared.token_sets,
        negatives=negatives,
        tokenizer=prepared.tokenizer,
        scratch=ctx.scratch / "parity" / f"{run}-{side.name}",
        shared_scratch=ctx.scratch,
        settings_hash=ctx.settings_hash,
        code_version=ctx.code_version,
    )


def _checkpoint(settings: Settings, ctx: StageContext) -> tuple[Storage, str]:
    """Storage and prefix of what both sides start from."""
    named = settings.parity.checkpoint
    if named:
        place = start_place(named, settings, ctx.workspace)
    else:
        result = ctx.earlier("train")
        place = None if result is None else (ctx.workspace, result.outputs["checkpoint"])
    if place is None:
        reasons = {"": "this cycle is not trained", "incumbent": "nothing is promoted"}
        raise ConfigError(
            f"there is no checkpoint to start from: {reasons.get(named, f'parity.checkpoint is {named}')}",
            expected="a trained model",
            next_command="trnpipe train, or --parity.checkpoint WORKSPACE/checkpoints/CYCLE/step-N",
        )
    return place


# Starts the process of a side and waits for it.

_POLL_S = 0.2


def record_side(task: SideTask, stop: StopSignal) -> int:
    """Record a side in a process of its own; its exit code. It has told what went wrong.

    Raises TransientError when it was killed.
    """
    file = task.scratch / "task.json"
    atomic.make_dirs(task.scratch)
    atomic.write_bytes_atomic(file, task.model_dump_json(indent=1).encode())
    command = [sys.executable, "-m", "pipeline.parity.child", str(file), str(os.getpid())]
    # A session of its own: Ctrl-C reaches us alone, and we pass it on once.
    child = subprocess.Popen(command, start_new_session=True)  # noqa: S603 - a list, no shell
    told = False
    while child.poll() is None:
        if stop.wait(_POLL_S) and not told:
            child.terminate()
            told = True
        elif told:
            try:
                child.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                continue
    code = int(child.returncode)
    if code < 0:
        raise TransientError(
            f"the process of {task.side.name} was ended by signal {-code}",
            expected="a process that lives until its side is recorded; signal 9 mostly means that memory ran out",
            next_command="run the same command again; it continues where it stopped",
        )
    return code
