"""`trnpipe launch -- script.py`, which runs a script for torchrun in ranks, locally or on the nodes of a job."""

import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.commands import ToolCall
from pipeline.core.errors import ConfigError
from pipeline.core.interpreter import strip_interpreter
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.parallel.launch import launch_script
from pipeline.settings import Settings

USAGE = "trnpipe launch --launch.processes N -- SCRIPT.py [ARGUMENT ...]"


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Run a script in ranks and return their exit code (see `ranks_exit_code`). Raises ConfigError."""
    code = launch_script(script_arguments(call.command), settings.launch.processes, stop)
    if stop.is_set():
        print(f"trnpipe launch: stopped by {stop.reason}, exit code {code}", file=sys.stderr)
    return code


def script_arguments(command: Sequence[str]) -> list[str]:
    """Strip a leading `python` from a command. Raises ConfigError unless it runs `SCRIPT.py ...` or `-m MODULE ...`."""
    arguments = strip_interpreter(command)
    if not arguments or arguments == ["-m"]:
        raise ConfigError("no script to launch", expected=USAGE, next_command=USAGE)
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        problem = f"script {arguments[0]} does not exist in {Path.cwd()}"
        if arguments[0].startswith("-"):
            problem = (
                f"option {arguments[0]} is not supported, because ranks run under {sys.executable} without options"
            )
        raise ConfigError(problem, expected="SCRIPT.py, or -m MODULE", next_command=USAGE)
    return arguments
