"""A small disk of its own for a workspace, to be filled up; where that is not allowed, an ordinary folder."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SIZE_MIB = 192


@dataclass(frozen=True)
class Disk:
    """`own`: nothing else is on it."""

    folder: Path
    own: bool

    def full_for(self, seconds: float) -> None:
        """Take all space, also what is freed meanwhile, and give it back."""
        until, path = time.monotonic() + seconds, self.folder / "filler"
        while time.monotonic() < until:
            with path.open("ab", buffering=0) as file:
                for block in (2**20, 2**12, 1):
                    with suppress(OSError):
                        while file.write(b"\0" * block) == block:
                            pass
            time.sleep(0.02)
        path.unlink()


@contextmanager
def small_disk(folder: Path) -> Iterator[Disk]:
    """A tmpfs for as long as inside, where this user may mount one."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)]
    can = os.geteuid() == 0 and shutil.which("mount") is not None
    own = can and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield Disk(folder, own)
    finally:
        if own:
            subprocess.run(["umount", "-l", str(folder)], check=True)
