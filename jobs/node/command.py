"""The command as a child process: started without a shell, watched, and ended with all it has started."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.core.errors import EXIT_BUG, ConfigError, Preempted, TransientError
from pipeline.proc.children import adopt_orphans
from pipeline.proc.signals import STACKS_VARIABLE, can_show_stacks

TAIL_BYTES = 64 * 1024
BLOCK_BYTES = 64 * 1024
END_S = 2.0


@dataclass(frozen=True)
class ProcessSeen:
    pid: int
    words: tuple[str, ...]
    status: str
    cpu_s: float
    memory_bytes: int


class Command:
    """A running command. Its output goes to ours, and its last part is kept."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], stacks: Path) -> None:
        """`stacks`: an empty folder for the stacks that its Python processes may be asked for.

        Raises ConfigError when there is no such command.
        """
        self._stacks = stacks
        adopt_orphans()
        source, target = os.pipe()
        try:
            # A session of its own: a signal to our group reaches us alone, and we pass it on once.
            self._process = subprocess.Popen(  # noqa: S603 - a list, no shell
                words,
                env={**env, STACKS_VARIABLE: str(stacks)},
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            os.close(source)
            seen = f"{words[0]!r} cannot be started: {error.strerror}"
            raise ConfigError(
                seen, expected="a command that is in the image", next_command="run it in that image by hand"
            ) from error
        finally:
            os.close(target)
        self._tail = b""
        self._pump = threading.Thread(target=self._copy_output, args=(source,), name="log", daemon=True)
        self._pump.start()

    def log(self) -> tuple[str, ...]:
        """Return its last lines; bytes that are no UTF-8 show as such."""
        return tuple(self._tail.decode(errors="replace").splitlines())

    def returncode(self) -> int | None:
        """Return None while it runs, minus the signal that ended it. Also reaps orphans."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                ended = None
            if ended is None or ended.si_pid == 0:
                return self._process.poll()
            if ended.si_pid == self._process.pid:
                self._process.poll()
            else:
                with suppress(ChildProcessError):
                    os.waitpid(ended.si_pid, os.WNOHANG)

    def tell(self, signum: signal.Signals) -> None:
        """Send a signal to the command itself, which is to pass it on as it sees fit."""
        self._process.send_signal(signum)

    def ask_stacks(self) -> None:
        """Ask every Python process of the command that knows how for the stacks of its threads."""
        for process in self._family():
            with suppress(psutil.Error, ProcessLookupError):
                if can_show_stacks(process.pid, self._stacks):
                    process.send_signal(signal.SIGUSR1)

    def stacks(self) -> dict[int, str]:
        shown = {int(path.name): path.read_text(errors="replace") for path in sorted(self._stacks.glob("[0-9]*"))}
        return {pid: text for pid, text in shown.items() if text}

    def processes(self) -> tuple[ProcessSeen, ...]:
        found = []
        for process in self._family():
            with suppress(psutil.Error), process.oneshot():  # gone meanwhile
                times, words = process.cpu_times(), tuple(process.cmdline())
                cpu_s, memory_bytes = round(times.user + times.system, 3), process.memory_info().rss
                found.append(ProcessSeen(process.pid, words, process.status(), cpu_s, memory_bytes))
        return tuple(found)

    def end(self) -> None:
        """Kill all processes that are left, and wait for the last of the output."""
        until = time.monotonic() + END_S
        while (family := self._family()) and time.monotonic() < until:
            for process in family:
                with suppress(psutil.Error):
                    process.kill()
            psutil.wait_procs(family, timeout=0.05)
            self.returncode()
        self._pump.join(max(0.1, until - time.monotonic()))

    def _family(self) -> list[psutil.Process]:
        """Return the living processes below us: orphans come to us, see `adopt_orphans`."""
        with suppress(psutil.Error):
            return [one for one in psutil.Process().children(recursive=True) if one.status() != psutil.STATUS_ZOMBIE]
        return []

    def _copy_output(self, source: int) -> None:
        """Copy until the last writer has closed. When nobody reads our output any more, the command still goes on."""
        target: int | None = 1
        while block := os.read(source, BLOCK_BYTES):
            self._tail = (self._tail + block)[-TAIL_BYTES:]
            try:
                while target is not None and block:
                    block = block[os.write(target, block) :]
            except OSError:
                target = None
        os.close(source)


# From how a process ended to an exit code of the family.

TOLD = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
MAY_PASS = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT})
"""A killer for lack of memory, a faulty device or its driver: another try, perhaps on another machine, may succeed."""


def exit_code_of_return(returncode: int) -> int:
    """The code of a command from the return code of its process, which is minus the signal that ended it."""
    if returncode >= 0:
        return returncode
    if -returncode in TOLD:
        return Preempted.exit_code
    return TransientError.exit_code if -returncode in MAY_PASS else EXIT_BUG
