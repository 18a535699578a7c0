"""Run tasks from an iterator in a pool of worker processes.

We start the workers as plain child processes (`python -m pipeline.proc.pool PID`), each of which is controlled by a
thread. multiprocessing would import the main module of the parent (and therefore torch) in each worker, and the workers
of loky keep running if the parent is killed.

The parent sends pickled messages to a worker. The first message is (function, context), and every message after that is
a task. The worker responds to each task with ("done", result), ("error", ...) or ("bug", traceback).
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
    """Call `function(context, task)` for each task and yield the results as they become available.

    Closing the generator stops the workers.

    Args:
        function: the function to call. It must be defined at the top level of a module.
        context: the first argument of every call. The context, tasks and results must be picklable.
        tasks: an iterator of tasks, which is consumed lazily. At most `num_workers + 1` tasks are pending at a time, or
            `2 * num_workers` if `in_order` is set.
        num_workers: number of workers, or 0 for one per core. A worker only starts once there is a task for it.
        stop: the stop signal.
        doing: describes the work in the message of Preempted.
        in_order: whether to yield the results in the order of the tasks.
        waiting: called several times per second while the workers are busy.

    Raises the same error as the function if it is a TrnpipeError, and RuntimeError for any other exception. Raises
    TransientError if a worker dies, and Preempted if `stop` is set.
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
            with suppress(BrokenPipeError), process:  # closing stdin fails if a message has been sent only partially
                process.kill()  # this is safe, because workers write files atomically
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
            expected="workers that run until all tasks are finished (signal 9 usually means that memory ran out)",
            next_command="run the command again; for signal 9, decrease --data.rows-per-chunk or --data.num-workers",
        ) from error
    if kind == "error":
        error_class, seen, expected, next_command = response
        raise cast(type[TrnpipeError], error_class)(seen, expected=expected, next_command=next_command)
    if kind == "bug":
        raise RuntimeError(f"in a worker process:\n{response}")
    return response


def main() -> None:
    """Run tasks from standard input until it is closed or the parent dies."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the whole process group gets these, but the parent handles them
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    tasks, responses = open(0, "rb"), os.fdopen(os.dup(1), "wb")  # noqa: SIM115
    os.dup2(2, 1)  # redirect stdout to stderr, so that the output of libraries can't corrupt the responses
    function, context = pickle.load(tasks)  # noqa: S301  (written by the parent)
    while tasks.peek(1):
        task = pickle.load(tasks)  # noqa: S301
        response: tuple[str, object]
        try:
            response = ("done", function(context, task))
        except TrnpipeError as error:
            response = ("error", (type(error), error.seen, error.expected, error.next_command))
        except Exception:
            response = ("bug", traceback.format_exc())  # the parent raises it
        pickle.dump(response, responses)
        responses.flush()


def _exit_with_parent(parent: int) -> None:
    """Exit once the parent of this process changes, because this means that the original parent has died."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
