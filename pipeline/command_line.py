"""The command line of both console programs: their words, help and exit codes."""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError, exit_code_of

if TYPE_CHECKING:  # the tree of settings takes a while to import, and an overview needs none
    from pipeline.settings import Resolved, S

HELP = frozenset({"--help", "-h"})
HELP_ALL = "--help-all"
GENERAL = ("workspace", "cycle", "model_name", "backend", "scratch", "storage")
"""Settings that every command reads."""
_SETTINGS = """\
Order: defaults < --config files < environment < flags. --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the
environment and max_steps under [train] in a file. Lists: a,b or JSON; no value: null; booleans also as --no-key."""


@dataclass(frozen=True)
class Usage:
    """How a command is used: examples without its name, the settings most people set, and all others that it reads.

    Settings are named by their dotted names, all of a section by that of the section, with spaces between.
    """

    examples: tuple[str, ...] = ()
    common: str = ""
    reads: str = ""


def run_program(
    name: str, commands: Mapping[str, str], run: Callable[[str, list[str]], int], argv: Sequence[str] | None
) -> int:
    """Run one command of a table with the words behind it. Errors become the exit codes of core/errors.py here."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = words[0] if words else "help"
    try:
        if command in {*HELP, "help"}:
            usage = f"usage: {name} <command> [--config FILE.toml ...] [--section.key value ...]"
            version, more = f"       {name} --version", f"{name} <command> --help has examples and common settings."
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

    def __init__(self, prog: str, text: str, command: str = "", usage: Usage | None = None) -> None:
        """`command`: how another command, behind `--`, is shown."""
        self._own, self._usage = {*HELP, HELP_ALL}, usage or Usage()
        self._command = f" -- {command}" if command else ""
        self._name = " ".join(prog.split()[:2])
        examples = ["", "examples:", *(f"  {self._name} {one}".rstrip() for one in self._usage.examples)]
        super().__init__(
            prog=prog,
            description="\n".join([text, *(examples if self._usage.examples else [])]),
            epilog=_SETTINGS,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=44, width=110),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument("-h", "--help", action="store_true", help="show this help; --help SECTION: its settings")
        self.add_argument(HELP_ALL, action="store_true", help="show every setting that the command reads")
        files = "settings from a file; may be repeated, later files win (default: trnpipe.toml here or above)"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE.toml", help=files)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._own.update(names)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self._words(), next_command=f"{self.prog} --help")

    def read(self, words: Sequence[str], model: "type[S]") -> "tuple[argparse.Namespace, Resolved[S]] | None":
        """What the command was asked, with the flags of settings in `flags`, and the settings; None: help was shown."""
        from pipeline.settings import project_files, resolve

        if {*HELP, HELP_ALL} & set(words):
            self._show_help(words, model)
            return None
        own, flags = self._split(words)
        asked = self.parse_args(own, argparse.Namespace(flags=flags))
        files = asked.config or project_files(Path.cwd())
        return asked, resolve(files, os.environ, flags, model, other_flags=sorted(self._own))

    def _show_help(self, words: Sequence[str], model: "type[S]") -> None:
        """Print the help: with common settings, with all (--help-all), or with those of a section (--help SECTION)."""
        from pipeline.settings import leaves

        asked = next((word for before, word in pairwise(words) if before in HELP and word[:1] != "-"), "")
        known = leaves(model)
        named = [name for name in known if asked and f"{name}.".startswith(f"{asked.lstrip('-').replace('-', '_')}.")]
        if asked and not named and not any(asked in action.option_strings for action in self._actions):
            raise ConfigError(
                f"no setting or section {asked!r}{hint(asked, [*known, *(name.rpartition('.')[0] for name in known)])}",
                expected="one such as train or train.loss",
                next_command=f"{self._name} {HELP_ALL}",
            )
        common, reads = self._usage.common.split(), self._usage.reads.split()
        sections = tuple(f"{name}." for name in (*GENERAL, *common, *reads))
        read = [name for name in known if not reads or f"{name}.".startswith(sections)]
        groups = dict[str, list[str]]()
        if HELP_ALL in words:
            for name in read:
                groups.setdefault(name.rpartition(".")[0] or "general", []).append(name)
        else:
            groups = {"settings": named} if named else {"common settings": common}
            more = f"{self._name} {HELP_ALL} shows all {len(read)} settings that it reads"
            self.epilog = f"{_SETTINGS}\n\n{more}, {self._name} --help train.loss those of a section."
        self.usage = self._words()  # without every flag of the settings
        for title, names in groups.items():
            group = self.add_argument_group(title)
            for leaf in (known[name] for name in names):
                text = f"{leaf.field.description} [{leaf.default}]".replace("%", "%%")
                group.add_argument(leaf.flag, dest=leaf.name, metavar=leaf.takes, help=text)
        show(self.format_help())

    def _words(self) -> str:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        return (
            usage.replace(" [-h] [--help-all] [--config FILE.toml]", "") + f" [--section.key value ...]{self._command}"
        )

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


COMPLETION = 'print a script that completes commands and flags in bash, zsh or fish; eval "$(trnpipe completion bash)"'
_BASH = """\
_{name}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}}
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W '{commands}' -- "$word"))
    elif [ "${{word:0:2}}" = -- ]; then
        COMPREPLY=($(compgen -W '{flags}' -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _{name} {name}
"""

_FISH = """\
complete -c {name} -n __fish_use_subcommand -f -a '{commands}'
complete -c {name} -n 'not __fish_use_subcommand; and string match -q -- "--*" (commandline -ct)' -f -a '{flags}'
"""


def completion(name: str, commands: Iterable[str], words: Sequence[str], model: "type[S]") -> str:
    """Return the script that completes a console program in a shell. Raises ConfigError for another shell."""
    from pipeline.settings import leaves

    shell = words[0] if len(words) == 1 else ""
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(
            f"no shell {' '.join(words)!r}",
            expected="bash, zsh or fish",
            next_command=f'eval "$({name} completion bash)"; fish: {name} completion fish | source',
        )
    flags = ["--config", "--help", HELP_ALL, *(leaf.flag for leaf in leaves(model).values())]
    script = (_FISH if shell == "fish" else _BASH).format(name=name, commands=" ".join(commands), flags=" ".join(flags))
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


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
