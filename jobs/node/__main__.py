"""`trnjobs-entry -- COMMAND [ARGUMENT ...]`, the same as `python -m jobs.node`: run a command as a job of a cycle."""

import os
import sys
import traceback
from collections.abc import Sequence

from jobs.node.environment import write_failure
from jobs.node.run import run
from pipeline.core.errors import ConfigError, TrnpipeError, exit_code_of

USAGE = "trnjobs-entry -- COMMAND [ARGUMENT ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the job: the table of pipeline/core/errors.py."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] != ["--"] or len(words) == 1:
            raise ConfigError(f"no command: {words}", expected=USAGE, next_command=USAGE)
        return run(words[1:], os.environ, say)
    except (TrnpipeError, KeyboardInterrupt) as error:
        say(f"{type(error).__name__}: {error}")
        failed: BaseException = error
    except Exception as error:  # a bug: traceback and exit code 1, from one place
        traceback.print_exc()
        failed = error
    write_failure(os.environ, exit_code_of(failed), str(failed) if isinstance(failed, TrnpipeError) else repr(failed))
    return exit_code_of(failed)


def say(text: str) -> None:
    """One line of the entry itself, apart from the command's own output."""
    print(f"trnjobs-entry: {text}", file=sys.stderr, flush=True)


def script() -> None:
    """Ends the process here: a request to storage that hangs must not hold back the exit code."""
    code = main()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    script()
