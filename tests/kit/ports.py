"""Ports for ranks of tests to meet at."""

import fcntl
import random
import socket
import tempfile
from pathlib import Path
from typing import IO

_RESERVED: list[IO[bytes]] = []


def free_port() -> int:
    """An even number at which nobody listens, nor at the one after it (a gang of nodes meets there).

    Below those that the kernel hands out to servers and clients of other tests, and those of `trnjobs --target local`.
    No other test gets it while this process lives: ranks that meet strangers wait for them.
    """
    folder = Path(tempfile.gettempdir()) / "trnpipe-test-ports"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.randrange(10_000, 20_000, 2)
        lock = (folder / str(port)).open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        if _is_free(port) and _is_free(port + 1):
            _RESERVED.append(lock)
            return port
        lock.close()


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
