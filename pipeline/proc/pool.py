"""Run tasks from an iterator in worker processes (`python -m pipeline.proc.pool PID`), each fed by a thread.

Workers are plain child processes: those of multiprocessing import the parent's main module (and torch), and those of
loky outlive a killed parent. Frames are pickles. The first is (function, context), then one for each task. The response
to a task is ("done", result) or ("error", ...).
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
    """Yield the results of `function(context, task)` as they finish. Closing the generator ends the workers.

    Args:
        function: a module-level function. Context, tasks and results must be picklable.
        num_workers: 0 means one per core. A process starts when there is a task for it. Up to `num_workers` + 1 tasks
            are taken from the iterator ahead of their results, 2 * `num_workers` if `in_order`.
        doing: describes the work in the message of Preempted.
        in_order: yield results in the order of the tasks.
        waiting: called a few times a second while workers work.

    Raises the error of the function (RuntimeError for a bug), TransientError if a worker dies, Preempted if stopped.
    """
    first_frame = pickle.dumps((function, context), protocol=5)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    num_workers = num_workers or cores
    max_pending = 2 * num_workers if in_order else num_workers + 1
    local, ended, processes = threading.local(), threading.Event(), list[subprocess.Popen[bytes]]()

    def call(task: Task) -> Result:
        """Run a task in the worker process of the current thread."""
        frames = pickle.dumps(task, protocol=5)
        if not hasattr(local, "process"):
            local.process, frames = _start(), first_frame + frames
            processes.append(local.process)
            if ended.is_set():
                local.process.kill()
        return cast(Result, _call(local.process, frames))

    threads, pending = ThreadPoolExecutor(num_workers, "worker"), list[Future[Result]]()
    try:
        while True:
            stop.raise_if_set(doing)
            for task in islice(tasks, max_pending - len(pending)):
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
            with suppress(BrokenPipeError), process:  # the rest of a frame cannot be sent to a killed worker
                process.kill()  # its writes are atomic
        threads.shutdown()


def _start() -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, *filter(None, sys.path)]),
    }
    return subprocess.Popen(  # noqa: S603  (this module)
        [*OWN_MODULE, "pipeline.proc.pool", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )


def _call(process: subprocess.Popen[bytes], frames: bytes) -> object:
    """Send a task to a worker and return its result."""
    tasks, responses = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
    try:
        tasks.write(frames)
        tasks.flush()
        kind, response = pickle.load(responses)  # noqa: S301  (written by the child)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        status = process.wait()
        raise TransientError(
            f"a worker process died ({f'signal {-status}' if status < 0 else f'exit {status}'})",
            expected="workers that run until their input ends (signal 9 usually means that memory ran out)",
            next_command="run the command again; after signal 9, lower --data.rows-per-chunk or --data.num-workers",
        ) from error
    if kind == "error":
        error_class, seen, expected, next_command = response
        raise cast(type[TrnpipeError], error_class)(seen, expected=expected, next_command=next_command)
    if kind == "bug":
        raise RuntimeError(f"in a worker process:\n{response}")
    return response


def main() -> None:
    """Run tasks from standard input until it ends or the parent dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group, and handled by the parent
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    tasks, responses = open(0, "rb"), os.fdopen(os.dup(1), "wb")  # noqa: SIM115
    os.dup2(2, 1)  # output of libraries must not mix with the responses
    function, context = pickle.load(tasks)  # noqa: S301  (the parent wrote it)
    while tasks.peek(1):
        task = pickle.load(tasks)  # noqa: S301
        response: tuple[str, object]
        try:
            response = ("done", function(context, task))
        except TrnpipeError as error:
            response = ("error", (type(error), error.seen, error.expected, error.next_command))
        except Exception:
            response = ("bug", traceback.format_exc())  # raised again by the parent
        pickle.dump(response, responses)
        responses.flush()


def _exit_with_parent(parent: int) -> None:
    """Exit when this process gets another parent, which also happens after a SIGKILL of the first one."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
