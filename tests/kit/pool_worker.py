"""Workers of pipeline.proc.pool, forked with their imports behind them: 0.5 s of processor time each otherwise.

All have the hash seed of the zygote: a test that compares what different workers make takes those of the product.
"""

import os
import sys
import threading
from pathlib import Path
from typing import Self

from pipeline.proc import pool
from tests.kit.zygote import Forked

_STARTING = threading.Lock()


class PoolWorker(Forked):
    """One worker, with the pipes that subprocess.Popen would have."""

    def __init__(self) -> None:
        (tasks, self_tasks), (self_answers, answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(self_tasks, "wb"), os.fdopen(self_answers, "rb")
        env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        with (
            os.fdopen(tasks, "rb") as stdin,
            os.fdopen(answers, "wb") as stdout,
            open(2, "wb", closefd=False) as stderr,
            _STARTING,  # threads start them
        ):
            super().__init__(__name__, [], env=env, cwd=Path.cwd(), stdin=stdin, stdout=stdout, stderr=stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stdout.close()
        try:
            self.stdin.close()
        finally:
            self.wait()


if __name__ == "__main__":
    sys.argv[1:] = [str(os.getppid())]
    pool.main()
