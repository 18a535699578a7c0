"""Save checkpoints in a background thread, which also deletes old ones."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint.store import (
    HF_CONFIG,
    KIND,
    OPTIMIZER,
    STATE,
    TOKENIZER,
    WEIGHTS,
    CheckpointStore,
    TrainState,
    prefix_of,
)
from pipeline.core.errors import CheckpointError, ConfigError, DataError, Preempted, TransientError
from pipeline.core.manifest import Manifest
from pipeline.io import atomic
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage
from pipeline.telemetry.events import EventName
from pipeline.train.config import CheckpointConfig

# Retention.


def steps_to_delete(
    steps: Iterable[int], *, keep_last: int, keep_every_steps: int, best_step: int | None
) -> tuple[int, ...]:
    """Return the steps of checkpoints that should be deleted.

    This keeps the newest `keep_last` steps, the best step, and all multiples of `keep_every_steps`.
    """
    ordered = sorted(set(steps))
    kept = set(ordered[-keep_last:])
    if best_step is not None:
        kept.add(best_step)
    if keep_every_steps:
        kept.update(step for step in ordered if step % keep_every_steps == 0)
    return tuple(step for step in ordered if step not in kept)


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint in host memory. The tensors must not be modified after it has been submitted."""

    state: TrainState
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    hf_config: str
    tokenizer: bytes


@dataclass
class CheckpointWriter:
    """Background writer that saves one snapshot at a time. If a save fails, it is reported, but the run continues."""

    store: CheckpointStore
    config: CheckpointConfig
    staging: Path
    """Folder for temporary files, which may be shared between cycles since each save creates a subfolder."""
    before_commit: Callable[[], None] = lambda: None
    """Called before the commit, so that earlier events can be fsynced."""
    in_use: Callable[[], Collection[str]] = frozenset
    """Returns the prefixes of checkpoints that must not be deleted, for example because they were promoted."""
    failure: str = field(init=False, default="")
    last_saved: int | None = field(init=False, default=None)
    _thread: threading.Thread | None = field(init=False, default=None)
    _error: BaseException | None = field(init=False, default=None)

    def submit(self, snapshot: Snapshot) -> None:
        """Wait for the previous save, if any, and start saving a snapshot in the background."""
        self.wait()
        self._thread = threading.Thread(target=self._work, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save to finish, if there is one.

        Expected errors are stored in `failure`, whereas unexpected ones are raised here.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self, snapshot: Snapshot) -> None:
        try:
            if self._save(snapshot):
                self._prune(snapshot)
        except BaseException as error:  # unexpected errors are raised in the training thread by wait()
            self._error = error

    def _save(self, snapshot: Snapshot) -> bool:
        """Save a snapshot and emit the corresponding event. Returns False if this fails with an expected error."""
        step, store, size_bytes = snapshot.state.step, self.store, 0
        started = time.monotonic()
        try:
            is_current = False
            if step in store.steps():
                # The weights are the same, but the earlier attempt may have been stopped before it evaluated them.
                try:
                    earlier = store.open(step).state.temperature
                    is_current = earlier == snapshot.state.temperature or prefix_of(store.cycle, step) in self.in_use()
                except CheckpointError:  # otherwise, keep it until the new one has been staged
                    store.delete(step)
            if not is_current:
                size_bytes = commit_snapshot(store.storage, snapshot, self.staging, self.before_commit).size_bytes
        # safetensors raises SafetensorError when the disk is full.
        except (TransientError, DataError, ConfigError, CheckpointError, OSError, SafetensorError, Preempted) as error:
            self.failure = str(error)
            store.emit(EventName.CHECKPOINT_FAILED, step=step, reason=str(error))
            return False
        self.last_saved, self.failure = step, ""
        store.emit(
            EventName.CHECKPOINT_SAVED,
            step=step,
            prefix=prefix_of(store.cycle, step),
            size_bytes=size_bytes,
            seconds=round(time.monotonic() - started, 3),
        )
        return True

    def _prune(self, snapshot: Snapshot) -> None:
        """Delete old checkpoints. If this fails, the save is not affected, and the next save will retry."""
        step, best = snapshot.state.step, snapshot.state.best
        try:
            # Ignore any later steps, which were rejected as damaged when this run resumed. Otherwise, they would count
            # towards keep_last in place of valid checkpoints.
            old = steps_to_delete(
                [saved for saved in self.store.steps() if saved <= step],
                keep_last=self.config.keep_last,
                keep_every_steps=self.config.keep_every_steps,
                best_step=best.step if best else None,
            )
            kept = self.in_use() if old else ()
            for old_step in old:
                if prefix_of(self.store.cycle, old_step) not in kept:
                    self.store.delete(old_step)
        # After a CheckpointError or DataError, we don't know which checkpoints are in use, so none are deleted.
        except (TransientError, ConfigError, CheckpointError, DataError, OSError) as error:
            reason = f"old checkpoints could not be deleted: {error}"
            self.store.emit(EventName.CHECKPOINT_FAILED, step=step, reason=reason)


def commit_snapshot(
    storage: Storage, snapshot: Snapshot, staging: Path, before_commit: Callable[[], None] = lambda: None
) -> Manifest:
    """Write a snapshot to a temporary folder in `staging`, and then commit it as the checkpoint for its step."""
    state = snapshot.state
    with atomic.staging_dir(staging) as temporary:
        folder = temporary / f"step-{state.step}"
        folder.mkdir()
        weights = {name: tensor.contiguous() for name, tensor in snapshot.weights.items()}
        save_file(weights, folder / WEIGHTS, {"format": "pt"})
        save_file(dict(snapshot.optimizer), folder / OPTIMIZER)
        (folder / STATE).write_bytes(state.model_dump_json(indent=1).encode())
        (folder / HF_CONFIG).write_text(snapshot.hf_config)
        (folder / TOKENIZER).write_bytes(snapshot.tokenizer)
        fields: dict[str, JsonValue] = {
            "step": state.step,
            "cycle": state.cycle,
            "parent": state.parent.uri if state.parent else "",
            "settings_hash": state.settings_hash,
            "tokenizer": state.tokenizer_fingerprint,
        }
        before_commit()
        return commit_dir(storage, folder, prefix_of(state.cycle, state.step), kind=KIND, fields=fields)
