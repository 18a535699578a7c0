"""Child processes and temporary files that are gone when we are.

kill -9 removes neither the children of a process nor its files. The next start does: it sweeps the folder, on which the
owner holds a lock while it lives, and kills the processes that carry the mark of a folder that is gone.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.core.errors import TransientError
from pipeline.io.atomic import sweep_temps, temp_beside
from pipeline.proc.children import end_marked, kill_marked

MARK_VARIABLE = "TRN_GUARD"  # not TRNPIPE_: those are settings


@contextmanager
def temporary_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the processes that are started inside; restore the earlier values on leaving."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def guarded_temp_folder() -> Iterator[Path]:
    """Yield a folder for the temporary files of this process and of all it starts inside. One at a time in a process.

    On leaving, the folder is removed and what was started inside is killed. Raises TransientError if no folder can be
    made.
    """
    place = Path()
    try:
        place = Path(tempfile.gettempdir())
        sweep_temps(place)
        kill_marked(MARK_VARIABLE, lambda folder: not Path(folder).exists())
        folder = temp_beside(place / "health")
        folder.mkdir(mode=0o700)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise TransientError(
            f"the checks cannot be started: {error}",
            expected=f"a folder for temporary files that can be written ({place})",
            next_command="look at that machine; the job itself may be retried elsewhere",
        ) from error
    with ExitStack() as stack:
        stack.callback(os.close, lock)
        with suppress(OSError):  # a file system without locks: the folder is never swept
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.callback(end_marked, MARK_VARIABLE, str(folder).__eq__)
        # Children get the mark; their temporary files and ours go into the folder.
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(folder)
        stack.enter_context(temporary_environment({MARK_VARIABLE: str(folder), "TMPDIR": str(folder)}))
        yield folder
