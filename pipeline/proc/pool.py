"""Tasks made on the fly, run by worker processes: a thread here feeds each. `python -m pipeline.proc.pool PID` is one.

Plain child processes, as those of multiprocessing import the parent's main module (and torch) in each one, and those of
loky outlive a parent that is killed. Frames are pickles: first (function, context), then one task each; the answer to a
task is ("done", result) or ("error", ...).
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar, cast

from pipeline.core.errors import TransientError, TrnpipeError
from pipeline.core.interpreter import OWN_MODULE
from pipeline.core.stop import StopSignal

Task = TypeVar("Task")
Context = TypeVar("Context")
Result = TypeVar("Result")

_PACKAGE_ROOT = str(Path(__file__).parents[2])
_POLL_S = 0.2
_PARENT_CHECK_S = 0.5


def run_tasks(
    function: Callable[[Context, Task], Result],
    context: Context,
    tasks: Iterator[Task],
    *,
    num_workers: int,
    stop: StopSignal,
    doing: str,
    in_order: bool = False,
    waiting: Callable[[], object] = lambda: None,
) -> Generator[Result, None, None]:
    """Results of `function(context, task)`, in the order they finish or that of the tasks. Closing it ends the workers.

    Args:
        function: a module-level function; context, tasks and results must pickle.
        num_workers: 0 means one per core. Processes start only when there is a task for them. A task more is held than
            there are workers, twice as many `in_order`.
        doing: what is going on, for the message when stopped.
        waiting: called a few times a second while workers work.
    Raises what the function raised (a bug as RuntimeError), TransientError when a worker died, Preempted.
    """
    first_frame = pickle.dumps((function, context), protocol=5)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = num_workers or cores
    room = 2 * num_workers if in_order else num_workers + 1
    mine, ended, processes = threading.local(), threading.Event(), list[subprocess.Popen[bytes]]()

    def call(task: Task) -> Result:
        """In one of the threads, each of which has a process of its own."""
        frames = pickle.dumps(task, protocol=5)
        if not hasattr(mine, "process"):
            mine.process, frames = _start(), first_frame + frames
            processes.append(mine.process)
            if ended.is_set():
                mine.process.kill()
        return cast(Result, _call(mine.process, frames))

    threads, pending = ThreadPoolExecutor(num_workers, "worker"), list[Future[Result]]()
    try:
        while True:
            stop.raise_if_set(doing)
            for task in islice(tasks, room - len(pending)):
                pending.append(threads.submit(call, task))
            if not pending:
                return
            done, _ = wait(pending[:1] if in_order else pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            waiting()
            for future in done:
                pending.remove(future)
                yield future.result()
    finally:
        ended.set()
        threads.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with suppress(BrokenPipeError), process:  # the unsent rest of a frame, and nobody left to read it
                process.kill()  # whatever it writes is atomic
        threads.shutdown()


def _start() -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, *filter(None, sys.path)]),
    }
    return subprocess.Popen(  # noqa: S603  (our own module)
        [*OWN_MODULE, "pipeline.proc.pool", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _call(process: subprocess.Popen[bytes], frames: bytes) -> object:
    """The answer of a worker to one task."""
    tasks, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    try:
        tasks.write(frames)
        tasks.flush()
        kind, answer = pickle.load(answers)  # noqa: S301  (our own child wrote it)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        status = process.wait()
        raise TransientError(
            f"a worker process ended by itself ({f'signal {-status}' if status < 0 else f'exit {status}'})",
            expected="workers that live until their input ends; signal 9 mostly means that memory ran out",
            next_command="run the same command again; with signal 9 lower what a worker holds and how many there are:"
            " --data.rows-per-chunk, --data.num-workers",
        ) from error
    if kind == "error":
        family, seen, expected, next_command = answer
        raise cast(type[TrnpipeError], family)(seen, expected=expected, next_command=next_command)
    if kind == "bug":
        raise RuntimeError(f"in a worker process:\n{answer}")
    return answer


def main() -> None:
    """Serve tasks until the input ends, and not longer than the parent lives."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    tasks, answers = open(0, "rb"), os.fdopen(os.dup(1), "wb")  # noqa: SIM115
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    function, context = pickle.load(tasks)  # noqa: S301  (the parent wrote it)
    while tasks.peek(1):
        task = pickle.load(tasks)  # noqa: S301
        answer: tuple[str, object]
        try:
            answer = ("done", function(context, task))
        except TrnpipeError as error:
            answer = ("error", (type(error), error.seen, error.expected, error.next_command))
        except Exception:
            answer = ("bug", traceback.format_exc())  # raised again by the parent
        pickle.dump(answer, answers)
        answers.flush()


def _exit_with_parent(parent: int) -> None:
    """A parent killed with SIGKILL cannot tell us; being handed to another parent does."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
