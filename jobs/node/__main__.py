"""The command line `trnjobs-entry -- COMMAND [ARGUMENT ...]`, which is also available as `python -m jobs.node`."""

import os
import sys
import traceback
from collections.abc import Sequence

from jobs.node.environment import write_failure
from jobs.node.run import run
from pipeline.core.errors import ConfigError, TrnpipeError, exit_code_of, reported_name

USAGE = "trnjobs-entry -- COMMAND [ARGUMENT ...]"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code of the job. See pipeline/core/errors.py for all exit codes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] != ["--"] or len(arguments) == 1:
            raise ConfigError(f"the arguments {arguments} contain no command", expected=USAGE, next_command=USAGE)
        return run(arguments[1:], os.environ, say)
    except (TrnpipeError, KeyboardInterrupt) as error:
        say(f"{reported_name(error)}: {error}")
        failure: BaseException = error
    except Exception as error:  # a bug: exit code 1
        traceback.print_exc()
        failure = error
    code, reason = exit_code_of(failure), str(failure) if isinstance(failure, TrnpipeError) else repr(failure)
    write_failure(os.environ, code, reason)
    return code


def say(text: str) -> None:
    """Print a message to standard error, with a prefix that distinguishes it from the output of the command."""
    print(f"trnjobs-entry: {text}", file=sys.stderr, flush=True)


def script() -> None:
    """Run `main` and exit immediately, so that a storage request that hangs cannot delay the exit."""
    code = main()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    script()
