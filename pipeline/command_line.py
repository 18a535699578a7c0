"""The command line of both console programs: their words, help and exit codes."""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError, exit_code_of

if TYPE_CHECKING:  # the tree of settings takes a while to import, and an overview needs none
    from pipeline.settings import Resolved, S

HELP = frozenset({"--help", "-h"})
_SETTINGS = """\
Order: defaults < --config files < environment < flags. --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the
environment and max_steps under [train] in a file. Lists: a,b or JSON; no value: null; booleans also as --no-key."""


def run_program(
    name: str, commands: Mapping[str, str], run: Callable[[str, list[str]], int], argv: Sequence[str] | None
) -> int:
    """Run one command of a table with the words behind it. Errors become the exit codes of core/errors.py here."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else "help"
    try:
        if command in {*HELP, "help"}:
            usage = f"usage: {name} <command> [--config FILE.toml ...] [--section.key value ...]"
            version, more = f"       {name} --version", f"{name} <command> --help lists every setting."
            return show("\n".join([usage, version, "", *rows(commands), "", _SETTINGS, "", more]))
        if command == "--version":
            from pipeline.telemetry.events import code_version

            return show(f"{name} {code_version()}")
        if command not in commands:
            raise ConfigError(
                f"no command {command!r}{hint(command, commands)}",
                expected=f"one of {', '.join(commands)}",
                next_command=f"{name} --help",
            )
        return run(command, words[1:])
    except (TrnpipeError, KeyboardInterrupt) as error:
        print(f"{' '.join([name, *words[:1]])}: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except Exception as error:  # a bug: traceback and exit code 1, from one place
        traceback.print_exc()
        return exit_code_of(error)


class CommandParser(argparse.ArgumentParser):
    """The words of one command; every other flag is a setting. Raises ConfigError where argparse would exit."""

    def __init__(self, prog: str, text: str, command: str = "") -> None:
        """`command`: how another command, behind `--`, is shown."""
        self._own = set(HELP)
        self._command = f" -- {command}" if command else ""
        super().__init__(
            prog=prog,
            description=text,
            epilog=_SETTINGS,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=44, width=110),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="this text")
        files = "settings from a file; may be repeated, later files win (default: trnpipe.toml here or above)"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE.toml", help=files)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._own.update(names)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self._words(), next_command=f"{self.prog} --help")

    def read(self, words: Sequence[str], model: "type[S]") -> "tuple[argparse.Namespace, Resolved[S]] | None":
        """What the command was asked, with the flags of settings in `flags`, and the settings; None: help was shown."""
        from pipeline.settings import FlagSource, project_files, resolve

        if HELP & set(words):
            self.usage = self._words()  # without every flag of the settings
            FlagSource(model, self)
            show(self.format_help())
            return None
        own, flags = self._split(words)
        asked = self.parse_args(own, argparse.Namespace(flags=flags))
        files = asked.config or project_files(Path.cwd())
        return asked, resolve(files, os.environ, flags, model, other_flags=sorted(self._own))

    def _words(self) -> str:
        return self.format_usage().removeprefix("usage: ").strip() + f" [--section.key value ...]{self._command}"

    def _split(self, words: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
        """The words of the command, and flags of settings: `--flag value`, `--flag=value` or a bare `--flag`."""
        own, flags, rest = list[str](), list[tuple[str, str | None]](), list(words)
        while rest:
            word = rest.pop(0)
            flag, equals, text = word.partition("=")
            if not flag.startswith("--") or flag in {*self._own, "--"}:
                own.append(word)
            else:
                flags.append((flag, text if equals else rest.pop(0) if rest and rest[0][:2] != "--" else None))
        return own, flags


def hint(word: str, known: Iterable[str]) -> str:
    """What may have been meant; empty when nothing is near."""
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def rows(table: Mapping[str, str]) -> list[str]:
    """Two columns."""
    width = max(map(len, table), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in table.items()]


def show(text: str) -> int:
    """Print; a reader that closes early (`| head`) is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK
