"""Command-line parsing, help and exit codes for both `trnpipe` and `trnjobs`."""

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

if TYPE_CHECKING:  # importing the settings takes a while, and not all commands need them
    from pipeline.settings import Resolved, S

HELP = frozenset({"--help", "-h"})
HELP_ALL = "--help-all"
GENERAL = ("workspace", "cycle", "model_name", "backend", "scratch", "storage")
"""The settings that every command reads."""
_SETTINGS = """\
Settings can be set with flags, in the environment, or in --config files, in this order of precedence. For example,
--train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the environment, and max_steps under [train] in a file. Use a,b or
JSON for lists, --no-key to turn off a boolean, and null to unset a value."""


@dataclass(frozen=True)
class Usage:
    """The help of a command.

    Settings are separated by spaces. The name of a section stands for all settings in that section.

    Args:
        examples: example command lines without the name of the program.
        common: the most commonly used settings, which --help shows.
        reads: all other settings that the command reads, which --help-all shows.
    """

    examples: tuple[str, ...] = ()
    common: str = ""
    reads: str = ""


def run_program(
    name: str, commands: Mapping[str, str], run: Callable[[str, list[str]], int], argv: Sequence[str] | None
) -> int:
    """Run a command and return its exit code (core/errors.py).

    Args:
        name: name of the program.
        commands: the available commands and their descriptions.
        run: takes the name of a command and its arguments, runs the command, and returns its exit code.
        argv: the command line without the name of the program (default: sys.argv).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "help"
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
                f"unknown command {command!r}{hint(command, commands)}",
                expected=f"one of {', '.join(commands)}",
                next_command=f"{name} --help",
            )
        return run(command, arguments[1:])
    except (TrnpipeError, KeyboardInterrupt) as error:
        print(f"{' '.join([name, *arguments[:1]])}: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except Exception as error:  # a bug
        traceback.print_exc()
        return exit_code_of(error)


class CommandParser(argparse.ArgumentParser):
    """An argument parser for one command that treats all unknown flags as settings.

    Unlike argparse, it raises ConfigError instead of exiting.
    """

    def __init__(self, prog: str, text: str, command: str = "", usage: Usage | None = None) -> None:
        """Create a parser. `command` is the placeholder for a command that the user specifies after `--`, if any."""
        self._own_flags, self._usage = {*HELP, HELP_ALL}, usage or Usage()
        self._command = f" -- {command}" if command else ""
        self._name = " ".join(prog.split()[:2])
        examples = ["", "examples:", *(f"  {self._name} {example}".rstrip() for example in self._usage.examples)]
        super().__init__(
            prog=prog,
            description="\n".join([text, *(examples if self._usage.examples else [])]),
            epilog=_SETTINGS,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=44, width=110),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument(
            "-h", "--help", action="store_true", help="show this help, or the settings of a section (--help SECTION)"
        )
        self.add_argument(HELP_ALL, action="store_true", help="show all settings that the command reads")
        files = "read settings from a file; can be repeated (default: trnpipe.toml in this or a parent folder)"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE.toml", help=files)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._own_flags.update(names)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self._usage_line(), next_command=f"{self.prog} --help")

    def read(self, arguments: Sequence[str], model: "type[S]") -> "tuple[argparse.Namespace, Resolved[S]] | None":
        """Parse the arguments and resolve the settings. Returns None if the user requested help, which is printed.

        The flags of settings are also available as `flags` in the returned namespace.
        """
        from pipeline.settings import project_files, resolve

        if {*HELP, HELP_ALL} & set(arguments):
            self._show_help(arguments, model)
            return None
        own, flags = self._split(arguments)
        options = self.parse_args(own, argparse.Namespace(flags=flags))
        files = options.config or project_files(Path.cwd())
        return options, resolve(files, os.environ, flags, model, other_flags=sorted(self._own_flags))

    def _show_help(self, arguments: Sequence[str], model: "type[S]") -> None:
        """Print the help of the command.

        By default, this only includes the most common settings. --help-all shows all settings of the command, and
        --help SECTION shows those in a section.
        """
        from pipeline.settings import leaves

        topic = next((after for before, after in pairwise(arguments) if before in HELP and after[:1] != "-"), "")
        fields = leaves(model)
        named = [name for name in fields if topic and f"{name}.".startswith(f"{topic.lstrip('-').replace('-', '_')}.")]
        if topic and not named and not any(topic in action.option_strings for action in self._actions):
            sections = [name.rpartition(".")[0] for name in fields]
            raise ConfigError(
                f"unknown setting or section {topic!r}{hint(topic, [*fields, *sections])}",
                expected="the name of a section or setting, such as train or train.loss",
                next_command=f"{self._name} {HELP_ALL}",
            )
        common, reads = self._usage.common.split(), self._usage.reads.split()
        prefixes = tuple(f"{name}." for name in (*GENERAL, *common, *reads))
        read = [name for name in fields if not reads or f"{name}.".startswith(prefixes)]
        groups = dict[str, list[str]]()
        if HELP_ALL in arguments:
            for name in read:
                groups.setdefault(name.rpartition(".")[0] or "general", []).append(name)
        else:
            groups = {"settings": named} if named else {"common settings": common}
            more = f"Run {self._name} {HELP_ALL} to list all {len(read)} settings of this command"
            self.epilog = f"{_SETTINGS}\n\n{more},\nor {self._name} --help train.loss for those in a section."
        self.usage = self._usage_line()  # set this before adding flags for settings, so that it doesn't list them
        for title, names in groups.items():
            group = self.add_argument_group(title)
            for leaf in (fields[name] for name in names):
                text = f"{leaf.field.description} [{leaf.default}]".replace("%", "%%")
                group.add_argument(leaf.flag, dest=leaf.name, metavar=leaf.takes, help=text)
        show(self.format_help())

    def _usage_line(self) -> str:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        return (
            usage.replace(" [-h] [--help-all] [--config FILE.toml]", "") + f" [--section.key value ...]{self._command}"
        )

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
        """Split the command line into arguments of the command itself and settings.

        A setting is `--flag value`, `--flag=value` or just `--flag`.
        """
        own, flags, rest = list[str](), list[tuple[str, str | None]](), list(arguments)
        while rest:
            argument = rest.pop(0)
            flag, equals, text = argument.partition("=")
            if not flag.startswith("--") or flag in {*self._own_flags, "--"}:
                own.append(argument)
            else:
                flags.append((flag, text if equals else rest.pop(0) if rest and rest[0][:2] != "--" else None))
        return own, flags


COMPLETION = 'print a script that completes commands and flags in bash, zsh or fish: eval "$(trnpipe completion bash)"'
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


def completion(name: str, commands: Iterable[str], arguments: Sequence[str], model: "type[S]") -> str:
    """Return a shell script that completes the commands and flags of a program.

    Raises ConfigError if the shell is not supported.
    """
    from pipeline.settings import leaves

    shell = " ".join(arguments)
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(
            f"unsupported shell {shell!r}",
            expected="bash, zsh or fish",
            next_command=f'eval "$({name} completion bash)"; fish: {name} completion fish | source',
        )
    flags = ["--config", "--help", HELP_ALL, *(leaf.flag for leaf in leaves(model).values())]
    script = (_FISH if shell == "fish" else _BASH).format(name=name, commands=" ".join(commands), flags=" ".join(flags))
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


def hint(name: str, candidates: Iterable[str]) -> str:
    """Return a hint such as "; did you mean train?", or an empty string if there is no similar candidate."""
    close = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def rows(table: Mapping[str, str]) -> list[str]:
    """Format names and their descriptions in two aligned columns."""
    width = max(map(len, table), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in table.items()]


def show(text: str) -> int:
    """Print a text to standard output. It is not an error if the reader closes the pipe early, as in `| head`."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK
