"""The `trnjobs` command: a table of commands, one place where errors become exit codes."""

import argparse
import os
import sys
import traceback
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import NoReturn

import pipeline
from pipeline.command_line import parse
from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError, exit_code_of

# A command is `jobs/commands/<name>.py` with `add_arguments(parser)` and `run(arguments, say) -> exit code`.
# Those of a cycle also take every setting, as `trnpipe` does, and find them in `arguments.settings`.
OF_A_CYCLE: dict[str, str] = {
    "plan": "the jobs of a cycle: sizes, limits, expected duration and dollars; --json: the exact requests",
    "fit": "would a cycle run on what Terraform is about to make: schedule, limits, room for every job",
    "submit": "hand the jobs over, here or to AWS Batch; run again after any stop, none is started twice",
    "status": "the jobs of a cycle now",
    "logs": "what a try of a job said, on any of its nodes",
    "cancel": "end what is left of a cycle, from the last job backwards",
    "retry": "once more: the jobs that failed, and those after them",
    "reconcile": "put on record what became of the jobs of a cycle, or of all under way, and close what has ended",
    "history": "the cycles of a workspace",
    "cost": "where the time and the money of a cycle went; --last N: several, with their success rate",
    "report": "write the page of a cycle, reports/<cycle>.html; done at every end of a cycle, too",
    "driver": "what the scheduler starts: the cycle that is due, once; missed and late ones by policy",
    "config": "every setting with its value and source, those under [jobs] included",
}
COMMANDS: dict[str, str] = OF_A_CYCLE
_SETTINGS = """settings:
  --config FILE.toml   may be repeated, later files win; [jobs] beside the sections of the pipeline
  --section.key VALUE  such as --cycle 2026-11-20, --workspace URI, --jobs.train.nodes 2
trnjobs config lists all of them with their values and sources."""


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
    except Exception as error:  # a bug: traceback and exit code 1, from one place
        traceback.print_exc()
        return exit_code_of(error)


def _command(words: list[str]) -> int:
    parser = _Parser(prog="trnjobs", description="Plan and run a cycle as jobs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"trnjobs {pipeline.__version__}")
    commands = parser.add_subparsers(dest="command", parser_class=_Parser)
    name = words[0] if words and words[0] in COMMANDS else ""
    flags: list[str] = []
    for command, text in COMMANDS.items():
        about = _SETTINGS if command in OF_A_CYCLE else None
        sub = commands.add_parser(
            command,
            help=text,
            description=text,
            epilog=about,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if command == name:  # the others are not imported
            import_module(f"jobs.commands.{command}").add_arguments(sub)
            if command in OF_A_CYCLE:
                words, flags = _split(words, own={text for action in sub._actions for text in action.option_strings})
    arguments = parser.parse_args(words)
    if not arguments.command:
        parser.print_help()
        return EXIT_OK
    if arguments.command in OF_A_CYCLE:
        from jobs.settings import SCHEMA

        given = arguments.given = parse(flags, ())
        arguments.resolved = SCHEMA.resolve(given.files, os.environ, given.flags)
        arguments.settings = arguments.resolved.settings
    return int(import_module(f"jobs.commands.{arguments.command}").run(arguments, _show))


def _split(words: Sequence[str], own: Collection[str]) -> tuple[list[str], list[str]]:
    """Words of the command itself, and flags with their values that are settings."""
    mine, settings, rest = list[str](), list[str](), list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word.partition("=")[0] in own:
            mine.append(word)
            continue
        settings.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            settings.append(rest.pop(0))
    return mine, settings


def _show(text: str) -> None:
    """Print; a reader that closes early (`| head`) is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
