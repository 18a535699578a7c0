"""SIGTERM and SIGINT become the stop signal, and the process ends in time even when nobody polls it.

Python runs signal handlers only between bytecodes of the main thread, so a handler does not run while that thread is
inside a long C++ call such as a compile. The C-level handler does write the signal number to the wake-up descriptor at
once (signal.set_wakeup_fd), and a monitor thread reads it there. It needs the GIL, which such a call must release.
"""

import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil

from pipeline.core.errors import Preempted
from pipeline.core.stop import StopSignal
from pipeline.proc.children import LAST_HOOK_S, RANK_S

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STACKS_VARIABLE = "TRN_STACKS_DIR"  # not TRNPIPE_: those are settings
_CLOSE = 0  # not a signal number
STOPPING = "stopping: saving state (Ctrl-C again: at once)"

LastHook = Callable[[str], None]


@contextmanager
def stop_on_signals(stop: StopSignal, *, grace_s: float = RANK_S, last_hook: LastHook | None = None) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT set `stop`; main thread only.

    The first SIGINT is answered at once, with a line on standard error unless `stop.is_shown`. When the process still
    runs `grace_s` after the first signal, `last_hook(reason)` gets at most 3 s and the process ends with 143. A second
    SIGINT ends it at once.
    After a signal the monitor stays on: shutdown may hang too. Forked workers share the wake-up descriptor: they let go
    of it, so that ending one does not stop us, and ignore SIGINT, which a terminal sends to the whole group while it is
    ours to decide.
    """

    def on_signal(signum: int, frame: FrameType | None) -> None:
        stop.set(signal.Signals(signum).name)

    writer, wakeup_fd, monitor = _start_monitor(stop, grace_s, last_hook, STOPPING)
    handlers = {signum: signal.signal(signum, on_signal) for signum in SIGNALS}
    _guard_forks(lambda: signal.getsignal(signal.SIGTERM) is on_signal)
    try:
        yield
    finally:
        if not stop.is_set():
            signal.set_wakeup_fd(wakeup_fd)
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            writer.send(bytes([_CLOSE]))
            monitor.join()


def limit_shutdown_time(grace_s: float = RANK_S) -> None:
    """From now on SIGTERM and SIGINT, where the program handles them itself, end it with 143 after `grace_s`; for good.

    No handler is set here: where there is none, the signal ends the process at once.
    """
    _guard_forks(lambda: True, resets=False)
    _start_monitor(StopSignal(), grace_s, None, "")


def enable_stack_dumps(env: Mapping[str, str] = os.environ) -> None:
    """From now on SIGUSR1 writes the stacks of all threads to `<folder>/<process id>`, where the environment names one.

    The handler is C code: it also answers while the main thread hangs in a collective.
    """
    folder = Path(env.get(STACKS_VARIABLE, ""))
    if not env.get(STACKS_VARIABLE) or not folder.is_dir():
        return
    path = folder / f".{os.getpid()}"
    faulthandler.register(signal.SIGUSR1, path.open("w"), all_threads=True)  # keeps the file open
    path.rename(folder / str(os.getpid()))  # the name says that the handler is there


def has_stack_dumps(pid: int, folder: Path) -> bool:
    """Whether SIGUSR1 makes this process show its stacks; it ends any other."""
    return (folder / str(pid)).exists()


def _guard_forks(is_ours: Callable[[], bool], *, resets: bool = True) -> None:
    """Give forked children no wake-up descriptor and, if it `resets`, default SIGTERM and no SIGINT, while `is_ours()`.

    Signals wait while a fork is under way: one that came between the fork and the change would be taken for the
    parent's. Hooks cannot be removed again, so they ask each time.
    """
    earlier = threading.local()

    def before() -> None:
        earlier.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if is_ours() else None

    def in_parent() -> None:
        if earlier.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier.mask)

    def in_child() -> None:
        if earlier.mask is not None:
            signal.set_wakeup_fd(-1)
            if resets:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, earlier.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _start_monitor(
    stop: StopSignal, grace_s: float, last_hook: LastHook | None, answer: str
) -> tuple[socket.socket, int, threading.Thread]:
    """Where signal numbers are written from now on, where they were before, and the thread that reads them."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    monitor = threading.Thread(
        target=_monitor, args=((reader, writer), stop, grace_s, last_hook, answer), name="signals", daemon=True
    )
    monitor.start()
    return writer, earlier, monitor


def _monitor(
    pair: tuple[socket.socket, socket.socket],
    stop: StopSignal,
    grace_s: float,
    last_hook: LastHook | None,
    answer: str,
) -> None:
    """Read signal numbers; from the first on, count down. Owns both ends, which stay open as long as it runs.

    `answer`: a line for the first SIGINT; empty: none.
    """
    reader, writer = pair
    deadline: float | None = None
    num_interrupts = 0
    with reader, writer:
        while True:
            reader.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
            try:
                received = reader.recv(64)
            except TimeoutError:
                _end(f"{stop.reason}, not stopped within {grace_s:g} s", last_hook)
            if _CLOSE in received:
                return
            for signum in received:
                if signum not in SIGNALS:
                    continue
                stop.set(signal.Signals(signum).name)
                deadline = deadline or time.monotonic() + grace_s
                num_interrupts += signum == signal.SIGINT
                if answer and num_interrupts == 1 and signum == signal.SIGINT and not stop.is_shown:
                    with suppress(OSError):  # nobody reads it
                        os.write(2, f"{answer}\n".encode())
            if num_interrupts > 1:
                _end("a second SIGINT", None)


def _end(reason: str, last_hook: LastHook | None) -> None:
    """Last words, then out with the children, without atexit handlers: they may be what hangs."""
    try:
        os.write(2, f"trnpipe: {reason}; exit {Preempted.exit_code}\n".encode())
        if last_hook is not None:
            hook = threading.Thread(target=last_hook, args=(reason,), daemon=True)
            hook.start()
            hook.join(LAST_HOOK_S)
        for child in psutil.Process().children(recursive=True):
            child.kill()
    finally:
        os._exit(Preempted.exit_code)
