"""What the engine keeps on disk, below one folder of the cycle.

engine.lock                         held by the one engine of the cycle
round-<n>/state.json                the leaves that were submitted in a round
cancel.json                         reasons by id of job: what a user has cancelled
attempts/<id>/<n>/node-<i>/         started.json, ended.json and log.txt of one node (see keeper.py);
                                    killed.json where the engine had to end it
"""

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from jobs.cycle.records import JobRecord
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.storage import Storage

T = TypeVar("T")
_STATE = TypeAdapter(tuple[JobRecord, ...])
_REASONS = TypeAdapter(dict[str, str])


@dataclass(frozen=True)
class LocalFiles:
    """`workspace`: log streams within it are named relative to it."""

    folder: Path
    workspace: Path | None = None

    @property
    def lock(self) -> Path:
        return self.folder / "engine.lock"

    def state(self, round_: int) -> tuple[JobRecord, ...]:
        """Empty before anything was written."""
        return self._read(self._state_path(round_), _STATE) or ()

    def save_state(self, round_: int, records: tuple[JobRecord, ...]) -> None:
        """OSError passes through: the state is as it was."""
        write_bytes_atomic(self._state_path(round_), _STATE.dump_json(records, indent=1))

    def cancelled(self) -> dict[str, str]:
        """Reasons by id of job."""
        return self._read(self.folder / "cancel.json", _REASONS) or {}

    def cancel(self, ids: list[str], reason: str) -> None:
        """Ask whoever runs these jobs to end them. The first reason stays."""
        asked = dict.fromkeys(ids, reason) | self.cancelled()
        write_bytes_atomic(self.folder / "cancel.json", _REASONS.dump_json(asked))

    def node(self, leaf_id: str, attempt: int, node: int) -> Path:
        """Of one node of one try (from 1)."""
        return self.folder / "attempts" / leaf_folder(leaf_id) / str(attempt) / f"node-{node}"

    def log_stream(self, leaf_id: str, attempt: int, node: int) -> str:
        """How records name a log."""
        path = self.node(leaf_id, attempt, node) / "log.txt"
        is_inside = self.workspace is not None and path.is_relative_to(self.workspace)
        return str(path.relative_to(self.workspace) if self.workspace is not None and is_inside else path)

    def log_path(self, stream: str) -> Path:
        """Where a log of a record is."""
        return (self.workspace or self.folder) / stream

    def _state_path(self, round_: int) -> Path:
        return self.folder / f"round-{round_}" / "state.json"

    def _read(self, path: Path, adapter: TypeAdapter[T]) -> T | None:
        try:
            return adapter.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise DataError(
                f"{path} is no such record: {error.errors(include_url=False)[0]['msg']}",
                expected="what trnjobs wrote there",
                next_command="restore an earlier version of it",
            ) from error


def leaf_folder(leaf_id: str) -> str:
    """The name of a leaf's folder."""
    return leaf_id.replace(":", "_")


def local_files(storage: Storage, scratch: Path, cycle: str) -> LocalFiles:
    """In a local workspace beside the jobs of the cycle; else in a scratch folder, which workspaces may share."""
    workspace = storage.local_path("")
    if workspace is not None:
        return LocalFiles(workspace / "cycles" / cycle / "jobs" / "local", workspace)
    return LocalFiles(scratch.absolute() / "jobs" / fingerprint(storage.root)[:16] / cycle)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the lock of a file; False when there is none."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
