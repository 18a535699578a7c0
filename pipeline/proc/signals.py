"""Set the stop signal on SIGTERM and SIGINT, and ensure that the process exits in time even if nothing polls it.

Python only runs signal handlers between bytecode instructions of the main thread. This means that a handler doesn't run
while the main thread is inside a long C++ call, such as a compilation. However, the C-level handler immediately
writes the signal number to a file descriptor (see signal.set_wakeup_fd), and a monitor thread reads it from there. Note
that the monitor needs the GIL, so this only works if the C++ call releases it.
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
STACKS_VARIABLE = "TRN_STACKS_DIR"  # doesn't start with TRNPIPE_, because it is not a setting
_CLOSE = 0  # not a signal number
STOPPING = "stopping: saving state (press Ctrl-C again to exit immediately)"

LastHook = Callable[[str], None]


@contextmanager
def stop_on_signals(stop: StopSignal, *, grace_s: float = RANK_S, last_hook: LastHook | None = None) -> Iterator[None]:
    """Set `stop` on SIGTERM and SIGINT inside the context. This only works in the main thread.

    The first SIGINT immediately prints a message to standard error, unless `stop.has_live_display` is set, and a second
    one ends the process. If the process is still running `grace_s` seconds after the first signal, `last_hook` is
    called with the reason and the process exits with code 143. The hook may take up to 3 seconds.

    After a signal, the monitor keeps running even outside the context, because the shutdown may hang as well. Forked
    workers close the wake-up descriptor that they share with this process, so that a signal to a worker doesn't stop
    this process. They also ignore SIGINT, because the terminal sends it to the whole process group.
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
    """Exit with code 143 if this process is still running `grace_s` seconds after SIGTERM or SIGINT.

    This can't be undone. It doesn't install a signal handler, so unless the program installs one itself, the signal
    still ends the process immediately.
    """
    _guard_forks(lambda: True, resets=False)
    _start_monitor(StopSignal(), grace_s, None, "")


def enable_stack_dumps(env: Mapping[str, str] = os.environ) -> None:
    """Install a handler for SIGUSR1 that writes the stacks of all threads to `$TRN_STACKS_DIR/<process id>`.

    This does nothing unless TRN_STACKS_DIR is an existing folder. The handler is implemented in C, so it also works
    while the main thread hangs in a collective.
    """
    folder = Path(env.get(STACKS_VARIABLE, ""))
    if not env.get(STACKS_VARIABLE) or not folder.is_dir():
        return
    path = folder / f".{os.getpid()}"
    faulthandler.register(signal.SIGUSR1, path.open("w"), all_threads=True)  # keeps the file open
    path.rename(folder / str(os.getpid()))  # signals that the handler is installed, see `has_stack_dumps`


def has_stack_dumps(pid: int, folder: Path) -> bool:
    """Return whether a process handles SIGUSR1 by dumping its stacks. Otherwise, the signal would end the process."""
    return (folder / str(pid)).exists()


def _guard_forks(is_active: Callable[[], bool], *, resets: bool = True) -> None:
    """Prevent forked child processes from forwarding their signals to this process.

    The child removes the wake-up descriptor that it shares with this process. With `resets`, it also restores the
    default behavior of SIGTERM and ignores SIGINT. Signals are blocked during the fork, because otherwise the child
    could forward a signal before it has removed the descriptor. Python can't unregister fork hooks, so each hook calls
    `is_active` to check whether it still applies.
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
    """Start the monitor thread. Return its wake-up socket, the previous wake-up descriptor and the thread."""
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
    """Wait for signals and end the process if it doesn't exit within `grace_s` seconds after the first one.

    `notice` is printed on the first SIGINT. The monitor closes both sockets of `pair` when it returns.
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
                if notice and num_interrupts == 1 and signum == signal.SIGINT and not stop.has_live_display:
                    with suppress(OSError):  # standard error may be closed
                        os.write(2, f"{notice}\n".encode())
            if num_interrupts > 1:
                _end("a second SIGINT", None)


def _end(reason: str, last_hook: LastHook | None) -> None:
    """Print the reason, run the hook, kill all child processes and exit.

    This skips atexit handlers, because they may be the reason why the process hangs.
    """
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
