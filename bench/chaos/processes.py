"""The processes of jobs on this machine, found by what their environment says."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from jobs.targets.local.node_keeper import MARK

Role = Literal["keeper", "entry", "launcher", "torchrun", "rank", "worker"]
SCAN_S = 0.1


@dataclass(frozen=True)
class Seen:
    """One living process of a job. `attempt`: id of the job and number of the try. `ticks`: when it began."""

    pid: int
    ticks: str
    workspace: str
    cycle: str
    job: str
    task: str
    attempt: str
    node: int
    role: Role
    in_group: bool
    """One of several ranks."""


def scan(workspaces: str) -> list[Seen]:
    """Every process whose workspace begins with `workspaces`."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError, KeyError, IndexError):
            if seen := _seen(pid, workspaces):
                found.append(seen)
    return found


def is_alive(seen: Seen) -> bool:
    """Still this process, and not one that has ended."""
    try:
        return _ticks(seen.pid) == seen.ticks and bool(Path(f"/proc/{seen.pid}/environ").read_bytes())
    except OSError:
        return False


@dataclass
class Watch:
    """Looks again and again, in a thread of its own, while inside `with`."""

    workspaces: str
    seen: tuple[Seen, ...] = ()
    """The newest look."""
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Watch":
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def of(self, workspace: str, cycle: str) -> list[Seen]:
        return [one for one in self.seen if (one.workspace, one.cycle) == (workspace, cycle)]

    def _run(self) -> None:
        while not self._end.wait(SCAN_S):
            self.seen = tuple(scan(self.workspaces))


def _seen(pid: int, workspaces: str) -> Seen | None:
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    if MARK.encode() not in environ:
        return None
    env = dict(line.split("=", 1) for line in environ.decode(errors="replace").split("\0") if "=" in line)
    if not env["TRNPIPE_WORKSPACE"].startswith(workspaces):
        return None
    words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    task_id, attempt, node = env[MARK].rsplit("/", 2)
    job, index = env["TRNJOBS_JOB"], env.get("TRNJOBS_INDEX", "")
    return Seen(
        pid=pid,
        ticks=_ticks(pid),
        workspace=env["TRNPIPE_WORKSPACE"],
        cycle=env["TRNPIPE_CYCLE"],
        job=job,
        task=f"{job}:{index}" if index else job,
        attempt=f"{task_id}/{attempt}",
        node=int(node.removeprefix("node-")),
        role=_role(words, env),
        in_group=int(env.get("WORLD_SIZE", "1")) > 1,
    )


def _role(words: Sequence[str], env: dict[str, str]) -> Role:
    line = " ".join(words)
    if "node_keeper.py" in line:
        return "keeper"
    if "jobs.node" in words:
        return "entry"
    if "torch.distributed.run" in words:
        return "torchrun"
    if {"pipeline", "jobs", "trnpipe", "trnjobs"} & {Path(word).name for word in words}:
        return "rank" if "WORLD_SIZE" in env or "LOCAL_RANK" in env else "launcher"
    return "worker"


def _ticks(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
