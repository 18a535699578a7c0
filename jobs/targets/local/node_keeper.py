"""The keeper of one node, which starts the command once, enforces its timeout and records how it ended.

    python -I -S node_keeper.py FOLDER TIMEOUT_S GRACE_S COMMAND...

There is one keeper per node and attempt, so that the command keeps running even if the engine dies. A keeper claims the
node by creating FOLDER/started.json, and holds a lock on this file as long as it runs. As a result, the command is only
run once even if two keepers are started. If the lock is free but FOLDER/ended.json does not exist, the keeper has died.

On SIGTERM, SIGINT or a timeout, the keeper sends SIGTERM to the command, followed by SIGKILL to all remaining processes
after GRACE_S. When the command ends, all processes that it started are killed as well, just as a container ends with
its first process. They are identified by TRNJOBS_ATTEMPT_ID in their environment, which also finds processes in other
sessions. (This requires Linux. On other systems, only the command itself is found.)

The keeper is executed by path and imports little more than the standard library, so that it starts within 50 ms.
"""
# ruff: noqa: PTH105, PTH108, PTH118, PTH120

import errno
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable

if __name__ == "__main__":  # because of -I, this package is not on the path
    sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "../../..")))  # noqa: PTH100
from pipeline.proc.children import MACHINE_OOM_FILES, end_marked, kill_marked, oom_kill_count

MARK = "TRNJOBS_ATTEMPT_ID"
STARTED, ENDED = "started.json", "ended.json"
POLL_S, AGAIN_S = 0.05, 0.5


def main(argv: list[str]) -> int:
    """Run the keeper and return 0, even if a different keeper has already claimed the node."""
    folder, timeout_s, grace_s, command = argv[1], float(argv[2]), float(argv[3]), argv[4:]
    stop_signals = list[str]()
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, frame: stop_signals.append(signal.Signals(number).name))
    lock = _retry_while_full(lambda: claim(folder, os.getpid()), stop_signals)
    if lock is not None:
        end = keep(command, timeout_s, grace_s, stop_signals)
        _retry_while_full(lambda: publish_end(folder, end), [])
        os.close(lock)
    return 0


def keep(command: list[str], timeout_s: float, grace_s: float, stop_signals: list[str]) -> dict[str, object]:
    """Run the command, kill its remaining processes, and return the content of ended.json (nodes.NodeEnd)."""
    deadline, kill_at, stopped_by = time.monotonic() + timeout_s, float("inf"), ""
    is_own, kills = os.environ[MARK].__eq__, oom_kill_count(MACHINE_OOM_FILES) or 0
    try:
        ignored = [signal.SIGPIPE, signal.SIGXFSZ]  # Python ignores these signals, which the child would inherit
        pid = os.posix_spawnp(command[0], command, os.environ, setsid=True, setsigdef=ignored)
    except OSError as error:
        return {"at": time.time(), "error": f"{command[0]}: {os.strerror(error.errno or 0)}"}
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        now = time.monotonic()
        if not stopped_by and (stop_signals or now >= deadline):
            stopped_by, kill_at = stop_signals[0] if stop_signals else "timeout", now + grace_s
            os.kill(pid, signal.SIGTERM)
        if now >= kill_at:
            os.kill(pid, signal.SIGKILL)
            kill_marked(MARK, is_own)
            kill_at = now + AGAIN_S
        time.sleep(POLL_S)
    code, at = os.waitstatus_to_exitcode(ended[1]), time.time()
    while end_marked(MARK, is_own):
        time.sleep(AGAIN_S)
    return {
        "at": at,
        "exit_code": code if code >= 0 else 128 - code,
        "stopped_by": stopped_by,
        "out_of_memory": (oom_kill_count(MACHINE_OOM_FILES) or 0) > kills,
    }


def claim(folder: str, pid: int) -> int | None:
    """Create started.json and lock it. Return the file descriptor of the lock, or None if the file already exists."""
    descriptor, temp = _written(folder, {"pid": pid, "at": time.time()})
    try:
        os.link(temp, os.path.join(folder, STARTED))
    except FileExistsError:
        os.close(descriptor)
        return None
    finally:
        os.unlink(temp)
    _flush(folder)
    return descriptor


def publish_end(folder: str, end: dict[str, object]) -> bool:
    """Write ended.json atomically."""
    descriptor, temp = _written(folder, end)
    os.replace(temp, os.path.join(folder, ENDED))
    os.close(descriptor)
    _flush(folder)
    return True


def _written(folder: str, content: dict[str, object]) -> tuple[int, str]:
    """Write the content to a temporary file in the folder, locked and fsynced. Return its file descriptor and path."""
    temp = os.path.join(folder, f".trnpipe-tmp-{os.getpid()}")
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(descriptor, json.dumps(content).encode())
        os.fsync(descriptor)
    except OSError:
        os.close(descriptor)
        os.unlink(temp)
        raise
    return descriptor, temp


def _flush(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _retry_while_full(write: Callable[[], int | None], stop_signals: list[str]) -> int | None:
    """Call `write`, and retry as long as the disk is full. Return None if a stop signal arrives first."""
    while not stop_signals:
        try:
            return write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
        time.sleep(POLL_S)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv))
