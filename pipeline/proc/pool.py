"""A bounded pool of worker processes for tasks that are made on the fly."""

import os
import pickle
import selectors
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

from pipeline.core.errors import TransientError, TrnpipeError
from pipeline.core.stop import StopSignal

Task = TypeVar("Task")
Context = TypeVar("Context")
Result = TypeVar("Result")

_PACKAGE_ROOT = str(Path(__file__).parents[2])
_POLL_S = 0.2
_EXIT_WAIT_S = 2.0


def num_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Worker:
    def __init__(self, first_frame: bytes) -> None:
        environment = {
            **os.environ,
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, *filter(None, sys.path)]),
        }
        self.process = subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", "pipeline.proc.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.input, self.output = cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stdout)
        self.send(first_frame)

    def send(self, frame: bytes) -> None:
        try:
            self.input.write(frame)
            self.input.flush()
        except BrokenPipeError as error:
            raise self.died() from error

    def receive(self) -> Any:
        try:
            kind, answer = pickle.load(self.output)  # noqa: S301  (our own child wrote it)
        except (EOFError, pickle.UnpicklingError) as error:
            raise self.died() from error
        if kind == "error":
            family, seen, expected, next_command = answer
            raise cast(type[TrnpipeError], family)(seen, expected=expected, next_command=next_command)
        if kind == "bug":
            raise RuntimeError(f"in a worker process:\n{answer}")
        return answer

    def died(self) -> TransientError:
        try:
            status = self.process.wait(_EXIT_WAIT_S)
        except subprocess.TimeoutExpired:
            status = 0
        return TransientError(
            f"a worker process ended by itself ({f'signal {-status}' if status < 0 else f'exit {status}'})",
            expected="workers that live until their input ends; signal 9 mostly means that memory ran out",
            next_command="run the same command again; with signal 9 lower --data.rows-per-chunk or --data.num-workers",
        )


class WorkerPool(Generic[Context, Task, Result]):
    """Runs `function(context, task)` in up to `num_workers` processes. Use as a context manager: leaving ends them all.

    Args:
        function: a module-level function; context, tasks and results must pickle.
        num_workers: 0 means one per core. Processes start only when there is a task for them.
        doing: what is going on, for the message when stopped.
    """

    def __init__(
        self,
        function: Callable[[Context, Task], Result],
        context: Context,
        *,
        num_workers: int,
        stop: StopSignal,
        doing: str,
    ) -> None:
        self._first_frame = pickle.dumps((function, context), protocol=5)
        self._num_workers = num_workers or num_cores()
        self._stop, self._doing = stop, doing
        self._idle: list[_Worker] = []
        self._workers: list[_Worker] = []
        self._busy = selectors.DefaultSelector()

    def __enter__(self) -> "WorkerPool[Context, Task, Result]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, tasks: Iterator[Task], waiting: Callable[[], object] = lambda: None) -> Iterator[Result]:
        """Results in the order they finish. At most one task per worker and one more are held at a time.

        `waiting` is called a few times a second while workers work.

        Raises what the function raised (a bug as RuntimeError), TransientError when a worker died, Preempted.
        """
        upcoming = next(tasks, None)
        while upcoming is not None or self._busy.get_map():
            self._stop.raise_if_set(self._doing)
            worker = self._free_worker() if upcoming is not None else None
            if worker is not None:
                worker.send(pickle.dumps(upcoming, protocol=5))
                self._busy.register(worker.output, selectors.EVENT_READ, worker)
                upcoming = next(tasks, None)
            timeout_s = 0 if upcoming is not None and self._can_take_more else _POLL_S
            ready = self._busy.select(timeout_s)
            waiting()
            for key, _ in ready:
                self._busy.unregister(key.fileobj)
                self._idle.append(key.data)
                yield cast(Result, key.data.receive())

    def run_in_order(self, tasks: Iterator[Task]) -> Iterator[Result]:
        """As run(), but in the order of the tasks; at most twice as many as there are workers are held, done or not."""
        sent = due = 0
        done: dict[int, Result] = {}
        upcoming = next(tasks, None)
        while upcoming is not None or due < sent:
            self._stop.raise_if_set(self._doing)
            has_room = upcoming is not None and sent - due < 2 * self._num_workers
            worker = self._free_worker() if has_room else None
            if worker is not None:
                worker.send(pickle.dumps(upcoming, protocol=5))
                self._busy.register(worker.output, selectors.EVENT_READ, (sent, worker))
                sent, upcoming = sent + 1, next(tasks, None)
            for key, _ in self._busy.select(0 if worker is not None or due in done else _POLL_S):
                self._busy.unregister(key.fileobj)
                number, answering = key.data
                self._idle.append(answering)
                done[number] = cast(Result, answering.receive())
            if due in done:
                yield done.pop(due)
                due += 1

    @property
    def _can_take_more(self) -> bool:
        return bool(self._idle) or len(self._workers) < self._num_workers

    def _free_worker(self) -> _Worker | None:
        if self._idle:
            return self._idle.pop()
        if len(self._workers) >= self._num_workers:
            return None
        self._workers.append(_Worker(self._first_frame))
        return self._workers[-1]

    def close(self) -> None:
        """End all workers: idle ones by closing their input, busy ones by SIGKILL (whatever they write is atomic)."""
        self._busy.close()
        for worker in self._workers:
            if worker not in self._idle:
                worker.process.kill()
            _close_quietly(worker.input)
        for worker in self._workers:
            try:
                worker.process.wait(_EXIT_WAIT_S)
            except subprocess.TimeoutExpired:
                worker.process.kill()
                worker.process.wait()
            worker.output.close()
        self._workers, self._idle = [], []


def _close_quietly(file: BinaryIO) -> None:
    try:
        file.close()
    except BrokenPipeError:  # the unsent rest of a frame, and nobody left to read it
        return
