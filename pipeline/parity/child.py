"""`python -m pipeline.parity.child TASK.json PARENT_PID`: record one side.

A process has one backend, and some (XLA, CUDA) keep the device as long as it lives: so every side has its own.
"""

import os
import sys
import threading
import time
from pathlib import Path

from pipeline.compile.neuron_command import use_neuron_cache
from pipeline.core.errors import EXIT_OK, TrnpipeError, exit_code_of
from pipeline.core.stop import StopSignal
from pipeline.parity.recording import record
from pipeline.parity.task import SideTask
from pipeline.proc.signals import stop_on_signals
from pipeline.telemetry.console import Console

_PARENT_CHECK_S = 0.5


def main(task_file: Path, parent: int) -> int:
    """The exit code of core/errors.py; only bugs show a traceback."""
    task, stop, console = SideTask.model_validate_json(task_file.read_bytes()), StopSignal(), Console()
    settings = task.settings
    told = use_neuron_cache(settings.compile, settings.workspace, task.side.backend, os.environ)
    if told:
        console.warn(told)
    threading.Thread(target=_stop_with_parent, args=(parent, stop), name="parent", daemon=True).start()
    with stop_on_signals(stop):
        try:
            record(task, stop, console)
        except TrnpipeError as error:
            print(f"trnpipe parity {task.side.name}: {type(error).__name__}: {error}", file=sys.stderr)
            return exit_code_of(error)
    return EXIT_OK


def _stop_with_parent(parent: int, stop: StopSignal) -> None:
    """A parent killed with SIGKILL cannot tell us; being handed to another parent does."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    stop.set("the end of the process that started it")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
