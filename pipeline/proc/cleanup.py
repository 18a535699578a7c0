"""Processes and temporary files that are gone when we are, however we ended.

kill -9 takes along nothing of what a process has started, nor its files. A guardian (children.py as a program), which
belongs to nobody and waits for our end, does. When it is killed as well, as with the whole machine, the next start
sweeps the folder: we and the guardian hold a lock on it, which nobody else can take while one of us lives.
"""

import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.core.errors import TransientError
from pipeline.io.atomic import sweep_temps, temp_beside
from pipeline.proc import children

# Environment variables for the processes that are started meanwhile.


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set these; what was there comes back on leaving."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


MARK_VARIABLE = "TRN_GUARD"  # not TRNPIPE_: those are settings
LEAVE_S = children.LIMIT_S + 2.0


@contextmanager
def guarded_temp_folder() -> Iterator[Path]:
    """A folder for the temporary files of this process and of all it starts inside. One at a time in a process.

    On leaving, and after any other end, the folder is removed and what was started inside is killed. Raises
    TransientError when no process can be started, or no folder made.
    """
    place = Path()
    try:
        place = Path(tempfile.gettempdir())
        sweep_temps(place)
        folder = temp_beside(place / "health")
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise _no_start(error, f"a folder for temporary files that can be written ({place})") from error
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        with suppress(OSError):  # a file system without locks: the folder is never swept
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stack.enter_context(_guardian(folder, lock))
        # Children get the mark; their temporary files and ours go into the folder.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(folder)
        stack.enter_context(temporary_environment({MARK_VARIABLE: str(folder), "TMPDIR": str(folder)}))
        yield folder


@contextmanager
def _guardian(folder: Path, lock: int) -> Iterator[None]:
    try:
        ours, gone = _start(folder, lock)
    except (OSError, subprocess.CalledProcessError) as error:
        folder.rmdir()
        raise _no_start(error, "room for another process (ulimit -u, memory)") from error
    try:
        yield
    finally:
        with suppress(BrokenPipeError):  # somebody has killed it
            os.write(ours, b"in order")
        os.close(ours)
        select.select([gone], [], [], LEAVE_S)  # it writes nothing: what comes is the end
        os.close(gone)
        if folder.exists():
            children.end_marked(MARK_VARIABLE, str(folder).__eq__)
            shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, lock: int) -> tuple[int, int]:
    """The guardian, and two pipes: what we write to keeps it waiting, what we read from ends with it."""
    listens, ours = os.pipe()
    gone, says = os.pipe()
    command = [sys.executable, "-I", "-S", children.__file__, str(folder), MARK_VARIABLE, str(folder)]
    try:
        # Returns at once: it puts itself aside.
        subprocess.run(  # noqa: S603 - a list, no shell
            command, stdin=listens, stdout=says, stderr=subprocess.DEVNULL, pass_fds=[lock], cwd="/", check=True
        )
    except BaseException:
        os.close(ours)
        os.close(gone)
        raise
    finally:
        os.close(listens)
        os.close(says)
    return ours, gone


def _no_start(error: OSError | subprocess.CalledProcessError, expected: str) -> TransientError:
    return TransientError(
        f"the checks cannot be started: {error}",
        expected=expected,
        next_command="look at that machine; the job itself may be retried elsewhere",
    )
