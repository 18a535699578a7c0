"""Nodes as processes: start a keeper, look at what it wrote, tell it to stop; and the files of the engine.

Below one folder of the cycle:

engine.lock                         held, and touched now and then, by the one engine of the cycle
round-<n>/state.json                the leaves that were submitted in a round
cancel.json                         reasons by id of job: what a user has cancelled
attempts/<id>/<n>/node-<i>/         started.json, ended.json and log.txt of one node (see node_keeper.py);
                                    killed.json where the engine had to end it, or was interrupted: the reason, for
                                    when the keeper cannot tell it
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
    STARTING = "starting"  # its command has not begun
    RUNNING = "running"
    ENDED = "ended"


StoppedBy = Literal["", "timeout", "SIGTERM", "SIGINT"]
"""What made a keeper end its command. SIGINT: the user interrupted the engine."""


@dataclass(frozen=True)
class NodeEnd:
    """How the command of one node ended. `at`: seconds since 1970, None if unknown. `lost`: its keeper died.

    `error`: why it could not be started.
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
_NEVER = 0  # the process id of a node that was excluded


@dataclass
class Processes:
    """Keepers of this machine. `grace_s`: from SIGTERM to SIGKILL."""

    grace_s: float
    _own: dict[Path, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, folder: Path, command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> None:
        """Start a keeper. `timeout_s`: from the start of the command."""
        make_dirs(folder)
        with (folder / "log.txt").open("ab") as log:
            self._own[folder] = subprocess.Popen(  # noqa: S603 - a list, no shell
                [*KEEPER, str(folder), f"{timeout_s:.3f}", f"{self.grace_s:g}", *command],
                env={**environment, node_keeper.MARK: _mark(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the engine
            )

    def look(self, folder: Path) -> NodeView:
        own = self._own.get(folder)
        own_ended = own is not None and own.poll() is not None  # before the rest: it wrote all it ever will
        started = _read(folder / node_keeper.STARTED, _STARTED)
        if started is None:
            if own is None:
                return NodeView(Phase.ABSENT)
            if not own_ended:
                return NodeView(Phase.STARTING)
            lines = (folder / "log.txt").read_text(errors="replace").splitlines()
            return NodeView(Phase.ENDED, end=NodeEnd(error=lines[-1] if lines else "its keeper ended before it began"))
        if started.pid == _NEVER:
            return NodeView(Phase.ENDED, end=NodeEnd(error="stopped before it began"))
        is_alive = is_locked(folder / node_keeper.STARTED)  # before the end: a keeper writes it, then lets go
        end = _read(folder / node_keeper.ENDED, _END)
        if end is not None:
            if own is not None:
                with suppress(subprocess.TimeoutExpired):
                    self._own.pop(folder).wait(timeout=1.0)  # it has written its last file
            return NodeView(Phase.ENDED, None if end.error else started.at, end)
        if is_alive or end_marked(node_keeper.MARK, _mark(folder).__eq__):
            return NodeView(Phase.RUNNING, started.at)
        lost = NodeEnd(lost=True, stopped_by=_read(folder / KILLED, _KILLED_BY) or "")
        return NodeView(Phase.ENDED, started.at, lost)

    def stop(self, folder: Path, by: Signal) -> None:
        """Tell the keeper to end its command. The reason is written first: a second Ctrl-C ends engine and keepers at
        once, and the next engine finds the node lost."""
        started = _read(folder / node_keeper.STARTED, _STARTED)
        own = self._own.get(folder)
        with suppress(ProcessLookupError):  # ended meanwhile
            if started is not None and is_locked(folder / node_keeper.STARTED):
                if by == "SIGINT":
                    with suppress(OSError):  # a full disk keeps no signal back
                        _note_reason(folder, by)
                os.kill(started.pid, signal.Signals[by])
            elif started is None and own is not None:
                own.send_signal(signal.Signals[by])

    def kill(self, folder: Path, by: StoppedBy) -> None:
        _note_reason(folder, by)  # first: another engine may have to find it
        kill_marked(node_keeper.MARK, _mark(folder).__eq__)

    def exclude(self, folder: Path) -> None:
        """Keep a node that has not started from ever starting."""
        make_dirs(folder)
        lock = node_keeper.take(str(folder), _NEVER)
        if lock is not None:
            os.close(lock)


def end_leftovers(attempts: Mapping[str, int]) -> int:
    """Kill what is left of attempts; return how many processes. `attempts`: the last that is over, by id of leaf."""
    over = {task_id.replace(":", "_"): number for task_id, number in attempts.items()}

    def is_over(mark: str) -> bool:
        task, attempt, *_ = *mark.split("/"), ""
        return task in over and attempt.isdecimal() and int(attempt) <= over[task]

    return kill_marked(node_keeper.MARK, is_over)[0]


def _note_reason(folder: Path, by: StoppedBy) -> None:
    """Write down why a node is ended; the first reason stays."""
    if not (folder / KILLED).exists():
        write_bytes_atomic(folder / KILLED, _KILLED_BY.dump_json(by))


def _mark(folder: Path) -> str:
    """Return id of the job, attempt and node: the same whatever the path to the workspace."""
    return "/".join(folder.parts[-3:])


def _read(path: Path, adapter: TypeAdapter[T]) -> T | None:
    """Return None when there is no such file."""
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
FIRST_PORT, NUM_PORTS = 20_000, 12_000  # below those the kernel hands out to clients
# Inherited variables of a job around this one and of torchrun, which a node does not see.
LEFT_OUT = ("TRNPIPE_", "TRNJOBS_", "AWS_BATCH_", "TORCHELASTIC_")
LEFT_OUT_NAMES = frozenset(
    [f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")]
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
    """Return the environment of a node. `base`: of this process. `leaf_id`: of a child of an array `id:index`.

    `address`: of the main node.
    """
    spec = task.spec
    environment = {
        name: value for name, value in base.items() if not name.startswith(LEFT_OUT) and name not in LEFT_OUT_NAMES
    }
    # As an image has its commands on the path.
    environment["PATH"] = f"{Path(sys.executable).parent}:{base.get('PATH', '/usr/bin:/bin')}"
    environment |= spec.environment
    environment |= {**job_variables(plan, spec, submission), JOB_ID: task_id, ATTEMPT: str(attempt)}
    if task.index is not None:
        environment[ARRAY_INDEX] = str(task.index)
    if spec.num_nodes:
        port = str(group_port(task_id, attempt))
        environment |= {NUM_NODES: str(spec.num_nodes), NODE: str(node), "MASTER_PORT": port}
        if address == LOOPBACK:  # the main node would look in vain for another one of its own
            environment["MASTER_ADDR"] = address
        if node:
            environment[MAIN_ADDRESS] = address
    return environment


def group_port(task_id: str, attempt: int) -> int:
    """Return the even port at which the nodes of one attempt meet; they also use the next one.

    It differs from that of other node groups of this machine and of earlier attempts.
    """
    digest = hashlib.sha256(f"{task_id}/{attempt}".encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % (NUM_PORTS // 2) * 2


def local_command(words: Sequence[str]) -> list[str]:
    """Run our own commands with this interpreter, whatever is on the path."""
    module = _MODULES.get(words[0])
    return [*OWN_MODULE, module, *words[1:]] if module else list(words)


@dataclass(frozen=True)
class LocalFiles:
    """What the engine keeps on disk. `workspace`: log streams within it are named relative to it."""

    folder: Path
    workspace: Path | None = None

    @property
    def engine_lock(self) -> Path:
        return self.folder / "engine.lock"

    def touch(self) -> None:
        """Set the time of the lock, which shows that the engine lives."""
        with suppress(OSError):  # the jobs go on with a full disk
            os.utime(self.engine_lock)

    def state(self, submission: int) -> tuple[JobRecord, ...]:
        return _read(self.folder / f"round-{submission}" / "state.json", _STATE) or ()

    def save_state(self, submission: int, records: tuple[JobRecord, ...]) -> None:
        write_bytes_atomic(self.folder / f"round-{submission}" / "state.json", _STATE.dump_json(records, indent=1))

    def cancelled(self) -> dict[str, str]:
        return _read(self.folder / "cancel.json", _REASONS) or {}

    def cancel(self, ids: list[str], reason: str) -> None:
        """Ask the engine of these jobs to end them. The first reason stays."""
        asked = dict.fromkeys(ids, reason) | self.cancelled()
        write_bytes_atomic(self.folder / "cancel.json", _REASONS.dump_json(asked))

    def node(self, task_id: str, attempt: int, node: int) -> Path:
        """Return the folder of one node of one attempt, from 1."""
        return self.folder / "attempts" / task_id.replace(":", "_") / str(attempt) / f"node-{node}"

    def log_stream(self, task_id: str, attempt: int, node: int) -> str:
        path = self.node(task_id, attempt, node) / "log.txt"
        return str(path.relative_to(self.workspace) if self.workspace else path)

    def log_path(self, stream: str) -> Path:
        return (self.workspace or self.folder) / stream


def local_files(storage: Storage, scratch: Path, cycle: str) -> LocalFiles:
    """Return those of a cycle: in a local workspace beside its jobs, else in a scratch folder that workspaces share."""
    workspace = storage.local_path("")
    if workspace is not None:
        return LocalFiles(workspace / "cycles" / cycle / "jobs" / "local", workspace)
    return LocalFiles(scratch.absolute() / "jobs" / fingerprint(storage.root)[:16] / cycle)


def is_locked(path: Path) -> bool:
    """Return whether a living process holds the lock of a file; False when there is no file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
