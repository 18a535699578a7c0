"""The `trnjobs` command: a table of commands, one place where errors become exit codes."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

import pipeline
from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError, exit_code_of

# A command is `jobs/commands/<name>.py` with `add_arguments(parser)` and `run(arguments, say) -> exit code`.
COMMANDS: dict[str, str] = {
    "simulate": "replay a workload through fair-share policies: waiting, utilisation, shares, starvation",
}


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would exit with a code of its own."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self.format_usage().strip(), next_command=f"{self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The result is the exit code of pipeline/core/errors.py; only bugs show a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except (TrnpipeError, KeyboardInterrupt) as error:
        print(f"trnjobs {' '.join(words[:1])}: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except Exception as error:
        traceback.print_exc()
        return exit_code_of(error)


def _command(words: list[str]) -> int:
    parser = _Parser(prog="trnjobs", description="Plan and run a cycle as jobs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"trnjobs {pipeline.__version__}")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
    name = words[0] if words and words[0] in COMMANDS else ""
    for command, text in COMMANDS.items():
        sub = commands.add_parser(command, help=text, description=text, allow_abbrev=False)
        if command == name:  # the others are not imported
            import_module(f"jobs.commands.{command}").add_arguments(sub)
    arguments = parser.parse_args(words)
    if not arguments.command:
        parser.print_help()
        return EXIT_OK
    return int(import_module(f"jobs.commands.{arguments.command}").run(arguments, _show))


def _show(text: str) -> None:
    """Print; a reader that closes early (`| head`) is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
