"""Ports for ranks of tests to meet at."""

import random
import socket


def free_port() -> int:
    """An even number at which nobody listens, nor at the one after it (a gang of nodes meets there).

    Below those that the kernel hands out to servers and clients of other tests, and those of `trnjobs --target local`.
    """
    while True:
        port = random.randrange(10_000, 20_000, 2)
        if _is_free(port) and _is_free(port + 1):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
