"""Run nodes as local processes: start, observe and stop their keepers, and manage the files of the engine.

These files are in one folder of the cycle:

engine.lock                         locked by the engine of the cycle, which also updates its modification time
round-<n>/state.json                the records of the tasks of a submission
cancel.json                         reasons of user cancellations, by job id
attempts/<id>/<n>/node-<i>/         started.json, ended.json and log.txt of one node (see node_keeper.py). If the
                                    engine killed the node or was interrupted, killed.json contains the reason, in
                                    case the keeper cannot record it anymore
"""

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from jobs.cycle.job_states import JobRecord, Task
from jobs.node.environment import job_variables
from jobs.plan.spec import JobPlan
from jobs.targets.local import node_keeper
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.interpreter import OWN_MODULE
from pipeline.io.atomic import make_dirs, write_bytes_atomic
from pipeline.io.storage import Storage
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT, JOB_ID, MAIN_ADDRESS, NODE, NUM_NODES
from pipeline.proc.children import end_marked, kill_marked

T = TypeVar("T")
KEEPER = (sys.executable, "-I", "-S", node_keeper.__file__)
Signal = Literal["SIGTERM", "SIGINT"]


class Phase(StrEnum):
    ABSENT = "absent"
    STARTING = "starting"  # the command has not started yet
    RUNNING = "running"
    ENDED = "ended"


StoppedBy = Literal["", "timeout", "SIGTERM", "SIGINT"]
"""Why a keeper ended its command. SIGINT means that the user interrupted the engine."""


@dataclass(frozen=True)
class NodeEnd:
    """How the command of one node ended.

    `at`: seconds since 1970, or None if unknown. `lost`: whether the keeper died. `error`: why the command could not be
    started.
    """

    at: float | None = None
    exit_code: int | None = None
    stopped_by: StoppedBy = ""
    out_of_memory: bool = False
    lost: bool = False
    error: str = ""


@dataclass(frozen=True)
class NodeView:
    phase: Phase
    started_at: float | None = None
    end: NodeEnd | None = None


@dataclass(frozen=True)
class _Started:
    pid: int
    at: float


_STARTED, _END = TypeAdapter(_Started), TypeAdapter(NodeEnd)
_KILLED_BY: TypeAdapter[StoppedBy] = TypeAdapter(StoppedBy)
_STATE, _REASONS = TypeAdapter(tuple[JobRecord, ...]), TypeAdapter(dict[str, str])
KILLED = "killed.json"
_NEVER = 0  # the process id in started.json of a node that was excluded


@dataclass
class Processes:
    """The keepers on this machine. `grace_s`: seconds from SIGTERM to SIGKILL."""

    grace_s: float
    _own: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, folder: Path, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        """Start a keeper. `timeout_s` limits the time from the start of the command."""
        make_dirs(folder)
        with (folder / "log.txt").open("ab") as log:
            self._own[folder] = subprocess.Popen(  # noqa: S603 - a list, no shell
                [*KEEPER, str(folder), f"{timeout_s:.3f}", f"{self.grace_s:g}", *command],
                env={**environment, node_keeper.MARK: _mark(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C only reaches the engine
            )

    def observe(self, folder: Path) -> NodeView:
        """Determine the state of a node from the files and the lock of its keeper."""
        own = self._own.get(folder)
        own_ended = own is not None and own.poll() is not None  # checked before reading: all its files are written
        started = _read(folder / node_keeper.STARTED, _STARTED)
        if started is None:
            if own is None:
                return NodeView(Phase.ABSENT)
            if not own_ended:
                return NodeView(Phase.STARTING)
            lines = (folder / "log.txt").read_text(errors="replace").splitlines()
            return NodeView(
                Phase.ENDED, end=NodeEnd(error=lines[-1] if lines else "the keeper ended before it started the command")
            )
        if started.pid == _NEVER:
            return NodeView(Phase.ENDED, end=NodeEnd(error="stopped before it began"))
        is_alive = is_locked(folder / node_keeper.STARTED)  # check before ended.json, which is written before unlocking
        end = _read(folder / node_keeper.ENDED, _END)
        if end is not None:
            if own is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._own.pop(folder).wait(timeout=1.0)  # reap the keeper, which has written its last file
            return NodeView(Phase.ENDED, None if end.error else started.at, end)
        if is_alive or end_marked(node_keeper.MARK, _mark(folder).__eq__):
            return NodeView(Phase.RUNNING, started.at)
        lost = NodeEnd(lost=True, stopped_by=_read(folder / KILLED, _KILLED_BY) or "")
        return NodeView(Phase.ENDED, started.at, lost)

    def stop(self, folder: Path, by: Signal) -> None:
        """Signal the keeper to end its command.

        The reason is written first, because a second Ctrl-C kills the engine and the keepers immediately, in which case
        the next engine considers the node as lost.
        """
        started = _read(folder / node_keeper.STARTED, _STARTED)
        own = self._own.get(folder)
        with suppress(ProcessLookupError):  # it may have ended in the meantime
            if started is not None and is_locked(folder / node_keeper.STARTED):
                if by == "SIGINT":
                    with suppress(OSError):  # a full disk must not prevent the signal
                        _note_reason(folder, by)
                os.kill(started.pid, signal.Signals[by])
            elif started is None and own is not None:
                own.send_signal(signal.Signals[by])

    def kill(self, folder: Path, by: StoppedBy) -> None:
        _note_reason(folder, by)  # write this first, for the next engine in case this one dies
        kill_marked(node_keeper.MARK, _mark(folder).__eq__)

    def exclude(self, folder: Path) -> None:
        """Prevent a node from starting by claiming it instead of a keeper."""
        make_dirs(folder)
        lock = node_keeper.claim(str(folder), _NEVER)
        if lock is not None:
            os.close(lock)


def end_leftovers(attempts: Mapping[str, int]) -> int:
    """Kill leftover processes of earlier attempts and return how many there were.

    `attempts` maps task ids to the number of the last attempt that has ended.
    """
    over = {task_id.replace(":", "_"): number for task_id, number in attempts.items()}

    def is_over(mark: str) -> bool:
        task, attempt, *_ = *mark.split("/"), ""
        return task in over and attempt.isdecimal() and int(attempt) <= over[task]

    return kill_marked(node_keeper.MARK, is_over)[0]


def _note_reason(folder: Path, by: StoppedBy) -> None:
    """Record the reason why a node is ended, unless a reason is already recorded."""
    if not (folder / KILLED).exists():
        write_bytes_atomic(folder / KILLED, _KILLED_BY.dump_json(by))


def _mark(folder: Path) -> str:
    """Return the mark `<job id>/<attempt>/node-<i>`, which is independent of the path of the workspace."""
    return "/".join(folder.parts[-3:])


def _read(path: Path, adapter: TypeAdapter[T]) -> T | None:
    """Read a record, or return None if the file does not exist. Raises DataError for an invalid record."""
    try:
        return adapter.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise DataError(
            f"{path} is not a valid record: {error.errors(include_url=False)[0]['msg']}",
            expected="a record written by trnjobs",
            next_command="restore an earlier version of it",
        ) from error


LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below the range of ephemeral ports
# Nodes must not inherit the variables that an enclosing job or torchrun has set.
DROPPED_PREFIXES = ("TRNPIPE_", "TRNJOBS_", "AWS_BATCH_", "TORCHELASTIC_")
DROPPED_NAMES = frozenset(
    [f"{scope}{name}" for scope in ("", "LOCAL_", "GROUP_", "ROLE_") for name in ("RANK", "WORLD_SIZE")]
    + ["ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TRN_EXIT_DIR", "TRN_STACKS_DIR"]
)
_MODULES = {"trnjobs-entry": "jobs.node", "trnpipe": "pipeline", "trnjobs": "jobs"}


def node_environment(
    base: Mapping[str, str],
    plan: JobPlan,
    task: Task,
    task_id: str,
    attempt: int,
    node: int,
    address: str,
    *,
    submission: int = 1,
) -> dict[str, str]:
    """Return the environment variables of a node.

    `base` is the environment of this process, `task_id` is the job id (or `id:index` for a child of an array), and
    `address` is the address of the main node.
    """
    spec = task.spec
    environment = {
        name: value
        for name, value in base.items()
        if not name.startswith(DROPPED_PREFIXES) and name not in DROPPED_NAMES
    }
    # Ensure that `trnpipe` and `trnjobs` are on the PATH, as they are in a container image.
    environment["PATH"] = f"{Path(sys.executable).parent}:{base.get('PATH', '/usr/bin:/bin')}"
    environment |= spec.environment
    environment |= {**job_variables(plan, spec, submission), JOB_ID: task_id, ATTEMPT: str(attempt)}
    if task.index is not None:
        environment[ARRAY_INDEX] = str(task.index)
    if spec.num_nodes:
        port = str(group_port(task_id, attempt))
        environment |= {NUM_NODES: str(spec.num_nodes), NODE: str(node), "MASTER_PORT": port}
        if address == LOOPBACK:  # without a network, the main node cannot determine its address
            environment["MASTER_ADDR"] = address
        if node:
            environment[MAIN_ADDRESS] = address
    return environment


def group_port(task_id: str, attempt: int) -> int:
    """Return the port for the rendezvous of one attempt. It is even, because the node group also uses the next port."""
    digest = hashlib.sha256(f"{task_id}/{attempt}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % (NUM_PORTS // 2) * 2


def local_command(command: Sequence[str]) -> list[str]:
    """Return the command, where `trnpipe` and `trnjobs` are replaced by calls of this interpreter."""
    module = _MODULES.get(command[0])
    return [*OWN_MODULE, module, *command[1:]] if module else list(command)


@dataclass(frozen=True)
class LocalFiles:
    """The files of the engine.

    If the workspace is local, `workspace` is its folder, and the names of log streams are relative to it.
    """

    folder: Path
    workspace: Path | None = None

    @property
    def engine_lock(self) -> Path:
        return self.folder / "engine.lock"

    def touch(self) -> None:
        """Update the modification time of the lock, to show that the engine is alive."""
        with suppress(OSError):  # jobs keep running even if the disk is full
            os.utime(self.engine_lock)

    def state(self, submission: int) -> tuple[JobRecord, ...]:
        return _read(self.folder / f"round-{submission}" / "state.json", _STATE) or ()

    def save_state(self, submission: int, records: tuple[JobRecord, ...]) -> None:
        write_bytes_atomic(self.folder / f"round-{submission}" / "state.json", _STATE.dump_json(records, indent=1))

    def cancelled(self) -> dict[str, str]:
        return _read(self.folder / "cancel.json", _REASONS) or {}

    def cancel(self, ids: list[str], reason: str) -> None:
        """Request that the engine ends these jobs. If a job was already cancelled, its first reason is kept."""
        reasons = dict.fromkeys(ids, reason) | self.cancelled()
        write_bytes_atomic(self.folder / "cancel.json", _REASONS.dump_json(reasons))

    def node(self, task_id: str, attempt: int, node: int) -> Path:
        """Return the folder of one node of one attempt (from 1)."""
        return self.folder / "attempts" / task_id.replace(":", "_") / str(attempt) / f"node-{node}"

    def log_stream(self, task_id: str, attempt: int, node: int) -> str:
        path = self.node(task_id, attempt, node) / "log.txt"
        return str(path.relative_to(self.workspace) if self.workspace else path)

    def log_path(self, stream: str) -> Path:
        return (self.workspace or self.folder) / stream


def local_files(storage: Storage, scratch: Path, cycle: str) -> LocalFiles:
    """Return the files of the engine, which are in the workspace if that is local, and else in the scratch folder."""
    workspace = storage.local_path("")
    if workspace is not None:
        return LocalFiles(workspace / "cycles" / cycle / "jobs" / "local", workspace)
    return LocalFiles(scratch.absolute() / "jobs" / fingerprint(storage.root)[:16] / cycle)


def is_locked(path: Path) -> bool:
    """Return whether a running process holds a lock on the file. Return False if the file does not exist."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
