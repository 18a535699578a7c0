"""Starts the process of a side and waits for it."""

import os
import subprocess
import sys

from pipeline.core.errors import TransientError
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.parity.task import SideTask

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
