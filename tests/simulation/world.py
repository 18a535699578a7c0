"""Virtual time, and processes that run one at a time in an order that only the seed determines.

A process is a thread. Exactly one thread runs at any moment: the holder of the baton. It gives the baton away when it
waits for virtual time to pass, which every request to a service does. If nothing else happens until then, it keeps the
baton and only the clock moves, so that most requests cost no switch of threads.
"""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

from pipeline.core.errors import TransientError, exit_code_of
from pipeline.core.stop import StopSignal

EPOCH = 1_795_132_800.0  # 2026-11-20T00:00:00Z


DAY_S = 86_400.0


class Bug(Exception):
    """A bug of a stage, which ends it with exit code 1."""


class Died(BaseException):
    """The process was killed with SIGKILL. From here on, nothing that it does has an effect."""


@dataclass(eq=False)
class Process:
    """A simulated process. `skew_s` is the error of its clock."""

    name: str
    work: Callable[["Process"], int | None]
    on_exit: Callable[[int | None], object] = lambda code: None
    skew_s: float = 0.0
    is_node: bool = False
    is_dead: bool = False
    has_ended: bool = False
    troubles: list[str] = field(default_factory=list)
    """What is wrong with this process, from its next request on."""
    baton: threading.Lock = field(default_factory=threading.Lock)
    stop: "VirtualStop" = field(init=False)
    waits_for: int = 0
    """Number of the event that resumes this process."""


class VirtualStop(StopSignal):
    """A stop signal whose waits take virtual time."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world, self._is_set = world, False

    def set(self, reason: str) -> None:
        self.reason, self._is_set = self.reason or reason, True

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout_s: float) -> bool:
        if not self._is_set:
            self._world.sleep(timeout_s)
        return self._is_set


class World:
    """The clock, all processes and the history of one seed.

    `max_faults` limits the number of faults, which is how a failure is reduced to its shortest prefix.
    """

    def __init__(self, seed: int, *, max_faults: int | None = None, keeps_history: bool = False) -> None:
        self.now, self.seed = EPOCH, seed
        self.rng, self.faults_rng = Random(seed), Random(seed ^ 0x5EED)
        self.max_faults, self.num_faults = max_faults, 0
        self.history: list[str] | None = [] if keeps_history else None
        self.violation = ""
        self.current: Process | None = None
        self._events: list[tuple[float, int, Process | Callable[[], object]]] = []
        self._numbers = count(1)
        self._is_over = False
        self._main = threading.Lock()
        self._main.acquire()
        self._alive = dict[Process, None]()

    # The history.

    def log(self, *words: object) -> None:
        """Add a line to the history, if it is kept. `words` are only formatted then."""
        if self.history is not None:
            who = self.current.name if self.current else ""
            self.history.append(f"{self.now - EPOCH:10.3f} {who:<24} {' '.join(map(str, words))}".rstrip())

    def fault(self, kind: str) -> bool:
        """Count a fault. Returns False if no more faults are allowed."""
        if self.max_faults is not None and self.num_faults >= self.max_faults:
            return False
        self.num_faults += 1
        self.log("FAULT", self.num_faults, kind)
        return True

    def violate(self, invariant: int, text: str) -> None:
        """Record that an invariant does not hold, and end the history. Only the first violation counts."""
        if not self.violation:
            self.violation = f"({invariant}) {text}"
            self.log("VIOLATION", self.violation)
        self._is_over = True

    # Events and processes.

    def at(self, delay_s: float, work: Callable[[], object]) -> None:
        """Call `work` after a delay. It must not wait."""
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), work))

    def start(self, process: Process, delay_s: float = 0.0) -> None:
        process.stop = VirtualStop(self)
        process.baton.acquire()
        self._alive[process] = None
        _THREADS.run(lambda: self._run(process))
        self._resume(process, delay_s)

    def kill(self, process: Process) -> None:
        """Kill a process with SIGKILL."""
        if not process.has_ended and not process.is_dead:
            self.log("killed", process.name)
            process.is_dead = True
            self._resume(process, 0.0)

    def sleep(self, seconds: float) -> None:
        """Let the current process wait. Raises Died if it is killed meanwhile."""
        process, until = self.current, self.now + seconds
        if process is None or process.is_dead or self._is_over:
            raise Died
        if not self._events or self._events[0][0] > until:
            self.now = until
            return
        self._resume(process, seconds)
        if not self._dispatch(process):
            process.baton.acquire()
        self.current = process
        if process.is_dead or self._is_over:
            raise Died

    def run(self, until_s: float) -> None:
        """Let everything happen until a time, or until an invariant is violated. Then end all processes."""
        self.at(until_s, self._end)
        if not self._dispatch(None):
            self._main.acquire()
        self._is_over = True
        while self._alive:
            process = next(iter(self._alive))
            process.is_dead = True
            process.baton.release()
            self._main.acquire()

    def _end(self) -> None:
        self._is_over = True

    def _resume(self, process: Process, delay_s: float) -> None:
        number = process.waits_for = next(self._numbers)
        heapq.heappush(self._events, (self.now + delay_s, number, process))

    def _dispatch(self, own: Process | None) -> bool:
        """Let the next events happen in this thread, until one of them resumes a process.

        Returns True if that is the process `own` (or, for the main thread, if the history is over). Otherwise, the
        baton has been given away.
        """
        self.current = None
        while not self._is_over:
            when, number, what = heapq.heappop(self._events)
            self.now = max(self.now, when)
            if not isinstance(what, Process):
                what()
            elif number == what.waits_for and not what.has_ended:  # otherwise, it was resumed earlier
                if what is own:
                    return True
                what.baton.release()
                return False
        if own is None:
            return True
        self._main.release()
        return False

    def _run(self, process: Process) -> None:
        process.baton.acquire()
        self.current = process
        code: int | None = None
        try:
            if not process.is_dead and not self._is_over:
                self.log("started")
                code = process.work(process) or 0
        except Died:
            process.is_dead = True
        except Exception as error:
            code = exit_code_of(error)
            self.log(f"{type(error).__name__}: {error}".partition("\n")[0])
            if code == 1 and not isinstance(error, Bug):
                self.unexpected(error)
        process.has_ended = True
        del self._alive[process]
        if self._is_over:
            self._main.release()
            return
        self.log("ended", "SIGKILL" if process.is_dead else code)
        self.current = None
        process.on_exit(None if process.is_dead else code)
        self._dispatch(process)

    def unexpected(self, error: Exception) -> None:
        """Report an exception that is not a TrnpipeError, which is a bug of the product or of the simulation."""
        import traceback

        frames = traceback.extract_tb(error.__traceback__)[-4:]
        where = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
        self.violate(5, f"a process ended with {type(error).__name__}: {error} ({where})")

    def clock(self, process: Process) -> Callable[[], float]:
        """Return the clock that a process sees."""
        return lambda: self.now + process.skew_s

    def meet_trouble(self, process: Process) -> None:
        """Let what is wrong with a process happen."""
        kind = process.troubles.pop()
        if kind == "transient":
            raise TransientError("a device was lost")
        if kind == "bug":
            raise Bug("a bug of the stage")
        while True:  # it hangs
            self.sleep(3600.0)


class _Threads:
    """Threads that are used again by later processes, because starting a thread is slower than most processes."""

    def __init__(self) -> None:
        self._idle: list[tuple[threading.Lock, list[Callable[[], Any]]]] = []

    def run(self, work: Callable[[], Any]) -> None:
        if self._idle:
            lock, box = self._idle.pop()
            box.append(work)
            lock.release()
            return
        lock, box = threading.Lock(), [work]
        threading.Thread(target=self._serve, args=(lock, box), daemon=True, name="simulated").start()

    def _serve(self, lock: threading.Lock, box: list[Callable[[], Any]]) -> None:
        lock.acquire()
        while True:
            box.pop()()
            self._idle.append((lock, box))
            lock.acquire()


_THREADS = _Threads()
