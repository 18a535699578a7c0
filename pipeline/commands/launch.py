"""`trnpipe launch -- script.py`: a script written for torchrun, in ranks here or on each node of a multi-node job."""

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
    """Run a script in ranks and return their exit code (ranks_exit_code). Raises ConfigError."""
    code = launch_script(script_words(call.command), settings.launch.processes, stop)
    if stop.is_set():
        print(f"trnpipe launch: stopped by {stop.reason}; exit {code}", file=sys.stderr)
    return code


def script_words(command: Sequence[str]) -> list[str]:
    """Return `SCRIPT.py ...` or `-m MODULE ...` without a leading `python`. Raises ConfigError for other commands."""
    words = strip_interpreter(command)
    if not words or words == ["-m"]:
        raise ConfigError("no script to launch", expected=USAGE, next_command=USAGE)
    if words[0] != "-m" and not Path(words[0]).is_file():
        seen = f"{words[0]}: no such script in {Path.cwd()}"
        if words[0].startswith("-"):
            seen = f"option {words[0]}: ranks run under {sys.executable}, with no options of the interpreter"
        raise ConfigError(seen, expected="SCRIPT.py, or -m MODULE", next_command=USAGE)
    return words
