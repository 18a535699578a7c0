"""One loop: the command, the signals from outside, and the other nodes."""

import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from jobs.node.command import Command, ProcessSeen, exit_code_of_return
from jobs.node.environment import Timing
from jobs.node.group import NodeGroup
from pipeline.core.errors import EXIT_BUG, EXIT_OK, Preempted, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal

# SIGTERM, SIGINT and the end of a child wake the one loop of the entry.

STOPPING = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Signals:
    """`stop` holds the name of the first signal that asks to stop; `wake` can be read when any has come."""

    stop: StopSignal
    wake: socket.socket


@contextmanager
def watched_signals() -> Iterator[Signals]:
    """Main thread only. Handlers are set even as PID 1, where the kernel drops signals that have none."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    stop = StopSignal()

    def on_signal(signum: int, frame: FrameType | None) -> None:
        if signum in STOPPING:
            stop.set(signal.Signals(signum).name)

    earlier = {signum: signal.signal(signum, on_signal) for signum in (*STOPPING, signal.SIGCHLD)}
    earlier_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield Signals(stop, reader)
    finally:
        signal.set_wakeup_fd(earlier_fd)
        for signum, handler in earlier.items():
            signal.signal(signum, handler)
        reader.close()
        writer.close()


STACKS_S = 1.0  # for processes to show their stacks before they are killed
UNKILLABLE_S = 4.0
MAX_WAIT_S = 0.5


@dataclass
class Supervisor:
    """Run a command once all nodes are here, until the end of every node is known. `start` may raise a TrnpipeError.

    After `run` its attributes say how it ended.
    """

    start: Callable[[], Command]
    group: NodeGroup
    signals: Signals
    timing: Timing
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    command: Command | None = None
    code: int = EXIT_BUG
    """Of the job, as far as this node decides it."""
    own_code: int | None = None
    returncode: int | None = None
    """Of the process; None: it never ran."""
    reason: str = ""
    """Why it was stopped or failed to start; empty when it ended by itself."""
    told_at: float | None = None
    """When it was told to stop, by `clock`."""
    killed: bool = False
    """It did not stop within the grace."""
    processes: tuple[ProcessSeen, ...] = ()
    """What was left when it was killed."""
    _asked_stacks: bool = False

    @property
    def stopped(self) -> bool:
        """Whether a signal came from outside."""
        return self.signals.stop.is_set()

    def run(self) -> None:
        while self.own_code is None or not self.group.settled:
            self.group.tick()
            if self.command is not None and self.own_code is None:
                self.returncode = self.command.returncode()
                if self.returncode is not None:
                    self.command.end()  # what it has started ends with it
                    self._end(self._code_when_killed() if self.killed else exit_code_of_return(self.returncode))
            self._stop_when_asked()
            if self.command is None and self.own_code is None and self.group.ready:
                try:
                    self.command = self.start()
                except TrnpipeError as error:
                    self.reason = f"{type(error).__name__}: {error}"
                    self._end(error.exit_code)
            elif self.own_code is None or not self.group.settled:
                self._wait()
        self.code = self.group.exit_code(self.own_code, stopped=self.stopped)
        self.reason = self.reason or self.group.trouble

    def _stop_when_asked(self) -> None:
        asked = signal.Signals[self.signals.stop.reason] if self.stopped else None
        reason = f"{asked.name} from outside" if asked else self.group.trouble
        if not reason:
            return
        if self.told_at is None:
            self._tell(reason, asked)
        elif self.command is not None and self.own_code is None:
            waited_s = self.clock() - self.told_at
            if waited_s > self.timing.grace_s - STACKS_S and not self._asked_stacks:
                self._asked_stacks = True
                self.command.ask_stacks()
            if waited_s > self.timing.grace_s and not self.killed:
                self.say(f"the command has not stopped within {self.timing.grace_s:g} s: killing it")
                self.killed = True
                self.processes = self.command.processes()
                self.command.end()
            elif waited_s > self.timing.grace_s + UNKILLABLE_S:  # stuck in a driver
                self._end(self._code_when_killed())

    def _tell(self, reason: str, asked: signal.Signals | None) -> None:
        self.told_at = self.clock()
        self.group.stop(reason)
        if self.own_code is not None:
            return
        self.reason = reason
        self.say(f"stopping the command: {reason}")
        if self.command is None:
            self._end(self._code_when_killed())
            return
        if not asked:  # it may hang in a collective: that is the moment to see where
            self.command.ask_stacks()
        self.command.tell(asked or signal.SIGTERM)

    def _code_when_killed(self) -> int:
        return Preempted.exit_code if self.stopped else TransientError.exit_code

    def _end(self, code: int) -> None:
        self.own_code = code
        self.group.report(code)
        if code != EXIT_OK:
            self.group.stop(f"the main node exited with {code}")
        self.group.tick()

    def _wait(self) -> None:
        """Until something happens, or it is time for a heartbeat."""
        poll = select.poll()  # not select(): a thousand nodes have more descriptors than it takes
        for one in (self.signals.wake, *self.group.sockets()):
            poll.register(one, select.POLLIN)
        poll.poll(1000 * min(MAX_WAIT_S, self.timing.heartbeat_s / 4))
        with suppress(BlockingIOError):
            while self.signals.wake.recv(4096):
                continue
