"""Command-line parsing, help and exit codes for both `trnpipe` and `trnjobs`."""

import argparse
import difflib
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.core.errors import EXIT_OK, ConfigError, TrnpipeError, exit_code_of, reported_name

if TYPE_CHECKING:  # importing the settings takes a while, and not all commands need them
    from pipeline.settings import Resolved, S

HELP = frozenset({"--help", "-h"})
HELP_ALL, _TODAY = "--help-all", "today's date in UTC"
GENERAL = ("workspace", "cycle", "model_name", "backend", "scratch", "storage")
"""The settings that every command reads."""
_SETTINGS = (
    "Settings can be set with flags, in the environment, or in --config files, in this order of precedence. For"
    " example, --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the environment, and max_steps under [train] in a file."
    " Use a,b or JSON for lists, --no-key to turn off a boolean, and null to unset a value."
)


@dataclass(frozen=True)
class Usage:
    """The examples and settings to show in the help of a command.

    Names of settings are separated by spaces. The name of a section includes all settings in that section.

    Args:
        examples: example command lines without the name of the program.
        common: the most commonly used settings, which --help lists.
        reads: all other settings that the command reads, which only --help-all lists. If empty, it reads all of them.
    """

    examples: tuple[str, ...] = ()
    common: str = ""
    reads: str = ""
    scope: str = "workspace cycle"
    """Which of these two settings the command reads. The help lists them first."""
    cycle: str = ""
    """A description of the default cycle, unless it is today's date."""


def run_program(
    name: str, commands: Mapping[str, str], run: Callable[[str, list[str]], int], argv: Sequence[str] | None
) -> int:
    """Run a command and return its exit code (see core/errors.py).

    Args:
        name: name of the program.
        commands: the available commands and their descriptions. The overview only shows the first sentence of each.
        run: a function that runs a command, given its name and arguments, and returns the exit code.
        argv: the command line without the name of the program (default: sys.argv).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "help"
    try:
        if command in {*HELP, "help"}:
            if arguments[1:]:  # help COMMAND, --help SECTION
                topic = arguments[1]
                return run(topic, ["--help"]) if topic in commands else run("config", ["--help", topic])
            usage = f"usage: {name} <command> [--config FILE.toml ...] [--section.key value ...]"
            summaries = {command: text.partition(". ")[0].rstrip(".") for command, text in commands.items()}
            more = (
                f"Run {name} <command> --help for examples and common settings, or {name} --help train for a section."
            )
            return show("\n".join([usage, f"       {name} --version", "", *rows(summaries), "", wrapped(more)]))
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
    except (Exception, KeyboardInterrupt) as error:
        known = _translate_disk_full(error)
        if isinstance(known, TrnpipeError | KeyboardInterrupt):
            print(f"{' '.join([name, *arguments[:1]])}: {reported_name(known)}: {known}", file=sys.stderr)
        else:  # a bug
            traceback.print_exc()
        return exit_code_of(known)


def _translate_disk_full(error: BaseException) -> BaseException:
    """Return DiskFull if a local file could not be written because the disk is full, and otherwise the same error."""
    if not isinstance(error, OSError):
        return error
    from pipeline.io.storage import FULL_ERRNOS, translate_os_error

    is_full = error.errno in FULL_ERRNOS
    return translate_os_error(error, "writing", error.filename or "a local file") if is_full else error


class CommandParser(argparse.ArgumentParser):
    """An argument parser for a single command, which treats all unknown flags as settings.

    Unlike `argparse.ArgumentParser`, it raises ConfigError instead of exiting.
    """

    def __init__(self, prog: str, text: str, command: str = "", usage: Usage | None = None) -> None:
        """Create a parser. If users specify a command after `--`, `command` is its placeholder in the usage."""
        self._own_flags, self._usage = {*HELP, HELP_ALL}, usage or Usage()
        self._command = f" -- {command}" if command else ""
        self._name = " ".join(prog.split()[:2])
        examples = ["", "examples:", *(f"  {self._name} {example}".rstrip() for example in self._usage.examples)]
        super().__init__(
            prog=prog,
            description="\n".join([wrapped(text), *(examples if self._usage.examples else [])]),
            epilog=wrapped(_SETTINGS),
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
                prog, max_help_position=30, width=help_width()
            ),
            allow_abbrev=False,
            add_help=False,
        )
        self.add_argument(
            "-h", "--help", action="store_true", help="show this help, or the settings of a section (--help SECTION)"
        )
        self.add_argument(HELP_ALL, action="store_true", help="show all settings that the command reads")
        files = "read settings from this file, repeatable (default: trnpipe.toml in this or a parent folder)"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE.toml", help=files)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._own_flags.update(names)
        return super().add_argument(*names, **options)

    @property
    def flags(self) -> list[str]:
        """Return the flags of the command that are not settings."""
        return [name for action in self._actions for name in action.option_strings]

    @property
    def choices(self) -> dict[str, list[str]]:
        """Return the accepted values of each flag that only accepts certain values."""
        return {name: [*action.choices] for action in self._actions if action.choices for name in action.option_strings}

    @property
    def reads(self) -> list[str]:
        """Return flag prefixes (without dashes) of the settings that the command reads, or [] if it reads all."""
        names = [*GENERAL, *self._usage.common.split(), *self._usage.reads.split()] if self._usage.reads else []
        return [name.replace("_", "-") for name in names]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self._usage_line(), next_command=f"{self.prog} --help")

    def read(self, arguments: Sequence[str], model: "type[S]") -> "tuple[argparse.Namespace, Resolved[S]] | None":
        """Parse the arguments and resolve the settings.

        Returns None after printing the help if the user requested it. The `flags` attribute of the returned namespace
        holds the flags that are settings.
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

        By default, the help only lists the most common settings. --help-all lists all settings that the command reads,
        and --help SECTION lists those in a section.
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
        common, reads = [*self._usage.scope.split(), *self._usage.common.split()], self._usage.reads.split()
        prefixes = tuple(f"{name}." for name in (*GENERAL, *common, *reads))
        read = [name for name in fields if not reads or f"{name}.".startswith(prefixes)]
        groups = dict[str, list[str]]()
        if HELP_ALL in arguments:
            for name in read:
                groups.setdefault(name.rpartition(".")[0] or "general", []).append(name)
        else:
            groups = {"settings": named} if named else {"common settings": common}
            more = f"Run {self._name} {HELP_ALL} to list all {len(read)} settings of this command"
            sections = [name.rpartition(".")[0] or name for name in (*self._usage.common.split(), *reads)]
            section = next((name for name in sections if name not in GENERAL), "" if reads else "train.loss")
            more += f", or {self._name} --help {section} for those in a section" if section else ""
            self.epilog = wrapped(f"{_SETTINGS}\n\n{more}.")
        usage = self._usage_line()  # set this before adding flags for settings, so that it doesn't list them
        self.usage = wrapped(usage, help_width() - len("usage: "), " " * len("usage: "))
        for title, names in groups.items():
            group = self.add_argument_group(title)
            for leaf in (fields[name] for name in names):
                text = f"{leaf.field.description} [{leaf.default.replace(',', ', ')}]"
                if leaf.name == "cycle":
                    text = f"Name of the cycle (default: {self._usage.cycle or _TODAY})"
                text = text.replace("%", "%%")
                group.add_argument(leaf.flag, dest=leaf.name, metavar=leaf.takes, help=text)
        show(self.format_help())

    def _usage_line(self) -> str:
        usage = " ".join(self.format_usage().removeprefix("usage: ").split())
        return (
            usage.replace(" [-h] [--help-all] [--config FILE.toml]", "") + f" [--section.key value ...]{self._command}"
        )

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
        """Split the command line into the command's own arguments and settings.

        A setting can be given as `--flag value`, `--flag=value` or just `--flag`.
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


COMPLETION = 'Print the completion script for bash, zsh or fish. Load it with eval "$(trnpipe completion bash)".'
_BASH = """\
_{name}() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} own= reads=- actions= words=
    case ${{COMP_WORDS[1]}} in
{commands}
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        words='{names}'
    elif [ "${{word:0:1}}" = - ]; then
        words="$own $(printf '%s\\n' {settings} | grep -E "^--($reads)")"
    else
        case $before in
{choices}
        esac
        if [ -z "$words" ] && [ "$COMP_CWORD" = 2 ]; then
            words=$actions
        fi
    fi
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$word"))
    else
        COMPREPLY=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _{name} {name}
"""


def completion(
    name: str, parsers: Mapping[str, Mapping[str, CommandParser]], arguments: Sequence[str], model: "type[S]"
) -> str:
    """Return the shell completion script of a program. Raises ConfigError if the shell is not supported.

    Args:
        name: name of the program.
        parsers: the parsers of each command by action, including "" for the command without an action.
        arguments: the arguments of the command, which should consist of the name of the shell.
        model: the settings to complete.
    """
    from pipeline.settings import leaves

    shell = " ".join(arguments)
    if shell in HELP:
        return wrapped(f"usage: {name} completion bash|zsh|fish\n\n{COMPLETION.replace('trnpipe', name)}")
    if shell not in ("bash", "zsh", "fish"):
        raise ConfigError(
            f"unsupported shell {shell!r}",
            expected="bash, zsh or fish",
            next_command=f'eval "$({name} completion bash)" or, in fish, {name} completion fish | source',
        )
    fields = leaves(model).values()
    settings, commands = " ".join(field.flag for field in fields), list[str]()
    choices = {field.flag: field.choices for field in fields}
    fish = [f"complete -c {name} -n __fish_use_subcommand -f -a '{' '.join([*parsers, 'completion'])}'"]
    for command, by_action in parsers.items():
        flags = list(dict.fromkeys(flag for parser in by_action.values() for flag in parser.flags))
        actions = " ".join(filter(None, by_action))
        for parser in by_action.values():
            choices |= parser.choices
        own, reads = " ".join(flags), "|".join(by_action[""].reads)
        commands.append(f"    {command}) own='{own}' reads='{reads}' actions='{actions}';;")
        fish.append(f"complete -c {name} -n '__fish_seen_subcommand_from {command}' -f -a '{own} {actions}'")
    fish.append(f"complete -c {name} -n 'string match -q -- \"--*\" (commandline -ct)' -f -a '{settings}'")
    if shell == "fish":
        return "\n".join(fish)
    commands.append("    completion) actions='bash zsh fish';;")
    cases = [f"            {flag}) words='{' '.join(values)}';;" for flag, values in choices.items() if values]
    names = " ".join([*parsers, "completion"])
    tables = {"commands": "\n".join(commands), "choices": "\n".join(cases), "names": names, "settings": settings}
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _BASH.format(
        name=name, **tables
    )


def hint(name: str, candidates: Iterable[str]) -> str:
    """Return a hint such as " (did you mean train?)", or an empty string if no candidate has a similar name."""
    close = difflib.get_close_matches(name, candidates, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def rows(table: Mapping[str, str]) -> list[str]:
    """Format names and descriptions as two aligned columns, wrapped to the width of the terminal."""
    indent = max(map(len, table), default=0) + 4
    return [wrapped(f"  {name:<{indent - 2}}{text}", indent=" " * indent) for name, text in table.items()]


def help_width() -> int:
    return min(110, shutil.get_terminal_size().columns - 1)


def wrapped(text: str, width: int = 0, indent: str = "") -> str:
    """Wrap a text to `width` characters (default: the terminal), and indent continuation lines by `indent`."""
    wrapper = textwrap.TextWrapper(
        width or help_width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(map(wrapper.fill, text.split("\n")))


def show(text: str) -> int:
    """Print a text to standard output, and ignore the error if the reader has closed the pipe (as `| head` does)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK
