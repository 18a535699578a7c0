"""Turn SIGTERM and SIGINT into the stop signal, and exit in time even if the stop signal is not polled.

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
STACKS_VARIABLE = "TRN_STACKS_DIR"  # without the prefix TRNPIPE_ of settings
_CLOSE = 0  # not a signal number
STOPPING = "stopping: saving state (press Ctrl-C again to stop at once)"

LastHook = Callable[[str], None]


@contextmanager
def stop_on_signals(stop: StopSignal, *, grace_s: float = RANK_S, last_hook: LastHook | None = None) -> Iterator[None]:
    """Set `stop` on SIGTERM and SIGINT inside the context. For the main thread only.

    The first SIGINT prints a line to standard error at once, unless `stop.has_live_display`. If the process still runs
    `grace_s` after the first signal, `last_hook(reason)` gets at most 3 s and the process exits with 143. A second
    SIGINT ends it at once.
    After a signal the monitor keeps running, because shutdown may hang too. Forked workers close the shared wake-up
    descriptor, so that a signal to one of them does not stop this process. They ignore SIGINT, which a terminal sends
    to the whole process group and this process handles.
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
    """Exit with 143 if this process still runs `grace_s` after SIGTERM or SIGINT. Cannot be undone.

    No handler is installed. Without a handler in the program, the signal ends the process at once.
    """
    _guard_forks(lambda: True, resets=False)
    _start_monitor(StopSignal(), grace_s, None, "")


def enable_stack_dumps(env: Mapping[str, str] = os.environ) -> None:
    """Make SIGUSR1 write the stacks of all threads to `<folder>/<process id>`, if TRN_STACKS_DIR names a folder.

    The handler is C code, so it also works while the main thread hangs in a collective.
    """
    folder = Path(env.get(STACKS_VARIABLE, ""))
    if not env.get(STACKS_VARIABLE) or not folder.is_dir():
        return
    path = folder / f".{os.getpid()}"
    faulthandler.register(signal.SIGUSR1, path.open("w"), all_threads=True)  # keeps the file open
    path.rename(folder / str(os.getpid()))  # shows that the handler is installed


def has_stack_dumps(pid: int, folder: Path) -> bool:
    """Return whether SIGUSR1 makes a process dump its stacks. It ends any other process."""
    return (folder / str(pid)).exists()


def _guard_forks(is_active: Callable[[], bool], *, resets: bool = True) -> None:
    """Remove the wake-up descriptor in forked children and, with `resets`, default SIGTERM and ignore SIGINT.

    Signals are blocked during a fork, because the child would pass one to the parent before the descriptor is removed.
    Fork hooks cannot be unregistered, so they call `is_active` each time.
    """
    saved = threading.local()

    def before() -> None:
        saved.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if is_active() else None

    def in_parent() -> None:
        if saved.mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, saved.mask)

    def in_child() -> None:
        if saved.mask is not None:
            signal.set_wakeup_fd(-1)
            if resets:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, saved.mask)

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _start_monitor(
    stop: StopSignal, grace_s: float, last_hook: LastHook | None, notice: str
) -> tuple[socket.socket, int, threading.Thread]:
    """Start the monitor. Return its wake-up socket, the earlier wake-up descriptor, and its thread."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    earlier = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    monitor = threading.Thread(
        target=_monitor, args=((reader, writer), stop, grace_s, last_hook, notice), name="signals", daemon=True
    )
    monitor.start()
    return writer, earlier, monitor


def _monitor(
    pair: tuple[socket.socket, socket.socket],
    stop: StopSignal,
    grace_s: float,
    last_hook: LastHook | None,
    notice: str,
) -> None:
    """Read signal numbers: count down from the first, print `notice` at the first SIGINT. Owns the sockets."""
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
                if notice and num_interrupts == 1 and signum == signal.SIGINT and not stop.has_live_display:
                    with suppress(OSError):  # standard error is closed
                        os.write(2, f"{notice}\n".encode())
            if num_interrupts > 1:
                _end("a second SIGINT", None)


def _end(reason: str, last_hook: LastHook | None) -> None:
    """Print the reason, run the hook, kill the children and exit without atexit handlers, which may be hanging."""
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
