"""Command-line parsing, help and exit codes of both console programs."""

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

if TYPE_CHECKING:  # importing the settings takes a while, and the overview does not need them
    from pipeline.settings import Resolved, S

HELP = frozenset({"--help", "-h"})
HELP_ALL = "--help-all"
GENERAL = ("workspace", "cycle", "model_name", "backend", "scratch", "storage")
"""Settings that every command reads."""
_SETTINGS = """\
Order: defaults < --config files < environment < flags. --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the
environment and max_steps under [train] in files. Lists: a,b or JSON. Booleans also take --no-key. null is no value."""


@dataclass(frozen=True)
class Usage:
    """Help of a command: examples without the program name, common settings, and all other settings that it reads.

    Settings are dotted names, or names of sections for all their settings, separated by spaces.
    """

    examples: tuple[str, ...] = ()
    common: str = ""
    reads: str = ""


def run_program(
    name: str, commands: Mapping[str, str], run: Callable[[str, list[str]], int], argv: Sequence[str] | None
) -> int:
    """Run the command that `argv` names with the other arguments. Errors become the exit codes of core/errors.py."""
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
    """Parser of one command. Unknown flags are settings. Raises ConfigError instead of exiting."""

    def __init__(self, prog: str, text: str, command: str = "", usage: Usage | None = None) -> None:
        """Create a parser. `command`: name of a command that follows `--` in the usage."""
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
        self.add_argument("-h", "--help", action="store_true", help="show this help (--help SECTION: its settings)")
        self.add_argument(HELP_ALL, action="store_true", help="show every setting that the command reads")
        files = "settings from a file, repeatable, later files win (default: trnpipe.toml here or above)"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE.toml", help=files)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._own_flags.update(names)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self._usage_line(), next_command=f"{self.prog} --help")

    def read(self, arguments: Sequence[str], model: "type[S]") -> "tuple[argparse.Namespace, Resolved[S]] | None":
        """Parse the arguments, with flags of settings in `flags`, and resolve the settings. None if help was shown."""
        from pipeline.settings import project_files, resolve

        if {*HELP, HELP_ALL} & set(arguments):
            self._show_help(arguments, model)
            return None
        own, flags = self._split(arguments)
        options = self.parse_args(own, argparse.Namespace(flags=flags))
        files = options.config or project_files(Path.cwd())
        return options, resolve(files, os.environ, flags, model, other_flags=sorted(self._own_flags))

    def _show_help(self, arguments: Sequence[str], model: "type[S]") -> None:
        """Print the help with common settings, all (--help-all), or those of a section (--help SECTION)."""
        from pipeline.settings import leaves

        topic = next((after for before, after in pairwise(arguments) if before in HELP and after[:1] != "-"), "")
        fields = leaves(model)
        named = [name for name in fields if topic and f"{name}.".startswith(f"{topic.lstrip('-').replace('-', '_')}.")]
        if topic and not named and not any(topic in action.option_strings for action in self._actions):
            sections = [name.rpartition(".")[0] for name in fields]
            raise ConfigError(
                f"unknown setting or section {topic!r}{hint(topic, [*fields, *sections])}",
                expected="one such as train or train.loss",
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
            more = f"{self._name} {HELP_ALL} shows all {len(read)} settings of this command"
            self.epilog = f"{_SETTINGS}\n\n{more}, {self._name} --help train.loss those of a section."
        self.usage = self._usage_line()  # without the flags of the settings
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
        """Separate the command's own arguments from settings: `--flag value`, `--flag=value` or a bare `--flag`."""
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
    """Return the completion script of a console program for a shell. Raises ConfigError for an unknown shell."""
    from pipeline.settings import leaves

    shell = " ".join(arguments)
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(
            f"unknown shell {shell!r}",
            expected="bash, zsh or fish",
            next_command=f'eval "$({name} completion bash)"; fish: {name} completion fish | source',
        )
    flags = ["--config", "--help", HELP_ALL, *(leaf.flag for leaf in leaves(model).values())]
    script = (_FISH if shell == "fish" else _BASH).format(name=name, commands=" ".join(commands), flags=" ".join(flags))
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + script


def hint(name: str, candidates: Iterable[str]) -> str:
    """Return a hint to the most similar candidate, empty if none is similar."""
    close = difflib.get_close_matches(name, candidates, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def rows(table: Mapping[str, str]) -> list[str]:
    """Format names and texts in two aligned columns."""
    width = max(map(len, table), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in table.items()]


def show(text: str) -> int:
    """Print a text. A reader that closes the pipe early (`| head`) is not an error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK
