"""Run as a program, `python -I -S guardian.py FOLDER MARK`: clears up after its owner, however that one ended.

It waits at a pipe, its standard input, which the kernel closes when the owner is gone. Then it kills whoever carries
MARK (NAME=value) in the environment, and removes FOLDER. Only the standard library: it starts in 20 ms.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

PROC = Path("/proc")
PAUSE_S = 0.02
LOOK_S = 1.0  # what the owner was just starting when it was killed shows its mark a little later
SETTLE_S = 0.5  # for what is being started: /proc shows an empty environment until it has one
LIMIT_S = 5.0  # for those that SIGKILL does not end, as one stuck in a driver


def marked(mark: str) -> tuple[list[int], bool]:
    """Processes that were started with `mark` in their environment, and whether all show theirs already.

    None without /proc (macOS).
    """
    found, is_settled = [], True
    for folder in PROC.glob("[0-9]*"):
        try:
            environ = (folder / "environ").read_bytes()
            if not environ:
                (folder / "exe").readlink()  # threads of the kernel and zombies have none
                is_settled = False
        except OSError:  # gone meanwhile, or another user's
            continue
        if os.fsencode(mark) in environ.split(b"\0"):
            found.append(int(folder.name))
    return found, is_settled


def end_marked(mark: str, look_s: float) -> None:
    """Kill them, and look for more until there has been none for `look_s`."""
    limit = time.monotonic() + LIMIT_S
    quiet_since = time.monotonic()
    while time.monotonic() < limit:
        found, is_settled = marked(mark)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if found:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since >= (look_s if is_settled else max(look_s, SETTLE_S)):
            return
        time.sleep(PAUSE_S)


def main() -> None:
    """Nobody's child and in no terminal's group: what ends the owner's whole family does not reach it."""
    folder, mark = sys.argv[1:]
    if os.fork():
        os._exit(0)
    os.setsid()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    leaves_in_order = bool(os.read(0, 1))
    end_marked(mark, 0.0 if leaves_in_order else LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
