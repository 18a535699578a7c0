"""A worker process: `python -m pipeline.proc.worker PARENT_PID`, fed through its standard input.

A plain child process instead of `multiprocessing`, which would import the parent's main module (and torch) in each one.
Frames are pickles: first (function, context), then one task each; the answer to a task is ("done", result) or
("error", ...). The worker ends at the end of its input, and at once when its parent is gone.
"""

import os
import pickle
import signal
import sys
import threading
import time
import traceback

from pipeline.core.errors import TrnpipeError

_PARENT_CHECK_S = 0.5


def main() -> None:
    """Serve tasks until the input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not mix with the answers
    function, context = pickle.load(tasks)  # noqa: S301  (the parent wrote it)
    while True:
        try:
            task = pickle.load(tasks)  # noqa: S301
        except EOFError:
            return
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
