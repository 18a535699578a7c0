"""The `trnpipe` command: the stages of a cycle, and the tools beside them. `trnjobs` reads its words the same way."""

import argparse
import contextlib
import difflib
import faulthandler
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pipeline.commands import COMMANDS, CONFIG, PARALLEL, STAGES, TOOLS, Tool, ToolCall
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError, exit_code_of
from pipeline.core.stop import StopSignal
from pipeline.parallel.launch import launch, needs_launch, note_exit_code, write_whole_lines
from pipeline.proc.children import LAUNCHER_S, RANK_S
from pipeline.proc.signals import show_stacks_when_asked, stop_on_signals

if TYPE_CHECKING:  # the tree of settings takes a while to import, and an overview needs none
    from pipeline.settings import Resolved, S, Settings

HELP = frozenset({"--help", "-h"})
_SETTINGS = """\
Order: defaults < --config files < environment < flags. --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the
environment and max_steps under [train] in a file. Lists: a,b or JSON; no value: null; booleans also as --no-key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The result is the exit code of core/errors.py; only bugs show a traceback."""
    show_stacks_when_asked()
    write_whole_lines()
    code = run_program("trnpipe", COMMANDS, _run, argv)
    note_exit_code(code)
    return code


def allow_open_files(wanted: int = 65_536) -> None:
    """Up to what the machine allows: a map of a token shard holds its file open, and a shell often grants 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _run(name: str, words: list[str]) -> int:
    from pipeline.settings import Settings, as_json, table_text

    if name != "health":  # which checks what a process gets that does not ask for more
        allow_open_files()
    tool = CONFIG if name == "config" else TOOLS.get(name, Tool(""))
    end = words.index("--") if tool.command and "--" in words else len(words)
    action = _action(name, tool, words)
    asked = tool.actions[action] if action else tool
    read = _parser(name, action, tool).read(words[bool(action) : end], Settings)
    if read is None:
        return EXIT_OK
    given, settings = vars(read[0]), read[1].settings
    if name == "config":
        return show(as_json(read[1]) if given["--json"] else table_text(read[1]))
    if action or (name in TOOLS and name not in STAGES):
        call = ToolCall(
            action,
            tuple(given[word] for word in asked.arguments if given[word] is not None),
            frozenset(switch for switch in asked.switches if given[switch]),
            {option: given[option] for option in asked.options if given[option] is not None},
            tuple(words[end + 1 :]),
        )
        return run_tool(name, settings, call)
    if name in PARALLEL:
        from pipeline.compile.neuron import drives_tool, use_neuron_cache

        warning = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
        if warning:
            print(f"trnpipe {name}: warning: {warning}", file=sys.stderr)
        # A driven compile starts the ranks in its trial run.
        driven = name == "compile" and drives_tool(settings.compile, settings.backend, os.environ)
        if not driven and needs_launch(settings.launch.processes, os.environ):
            return _launch_ranks(name, [name, *words], settings)
    return run_stage(name, settings, [name, *words])


def _action(name: str, tool: Tool, words: Sequence[str]) -> str:
    """Return the action that stands first, or '' if there is none. Raises ConfigError if it is missing or unknown."""
    given = words[0] if words and not words[0].startswith("-") else ""
    if given in tool.actions:
        return given
    if not tool.actions or tool.arguments or (not given and (name in STAGES or HELP & set(words))):
        return ""
    seen = f"trnpipe {name} has no action {given!r}{hint(given, tool.actions)}" if given else "no action is given"
    raise ConfigError(
        seen, expected=f"one of {', '.join(tool.actions)}, before the flags", next_command=f"trnpipe {name} --help"
    )


def _parser(name: str, action: str, tool: Tool) -> "CommandParser":
    asked, prog, lines = tool.actions[action] if action else tool, f"trnpipe {name} {action}".strip(), list[str]()
    if asked.actions:
        choice = "|".join(asked.actions)
        prog += f" [{choice}]" if asked.arguments or name in STAGES else f" <{choice}>"
        lines = ["", *rows({" ".join([one, *it.arguments]): it.text for one, it in asked.actions.items()})]
        lines.append(f"The flags of an action: trnpipe {name} {next(iter(asked.actions))} --help")
    parser = CommandParser(prog, "\n".join([asked.text or COMMANDS[name], *lines]), tool.command)
    for word in asked.arguments:
        parser.add_argument(word, metavar=word.strip("[]"), nargs="?" if word.startswith("[") else None)
    for switch in sorted(asked.switches):
        parser.add_argument(switch, dest=switch, action="store_true")
    for option, text in asked.options.items():
        metavar, _, about = text.partition("  ")
        parser.add_argument(option, dest=option, metavar=metavar, help=about)
    return parser


def _launch_ranks(name: str, words: list[str], settings: "Settings") -> int:
    from pipeline.compile.sync import shared_compile_cache
    from pipeline.context import cycle_name

    def say(line: str) -> None:
        print(f"trnpipe {name}: {line}", file=sys.stderr, flush=True)

    stop = StopSignal()
    # The cycle is named once: ranks may start around midnight.
    with stop_on_signals(stop, grace_s=LAUNCHER_S), shared_compile_cache(settings, stop, say):
        return launch([*words, "--cycle", cycle_name(settings)], settings.launch.processes, stop)


def run_stage(name: str, settings: "Settings", words: Sequence[str] = ()) -> int:
    """Run one stage under the signal handlers, with its start and outcome in the event log.

    `words` is the whole command line, for a stage that runs itself again.
    """
    from pipeline.compile.sync import shared_compile_cache
    from pipeline.context import StageContext, open_context, with_backend
    from pipeline.telemetry.events import EventName

    stop, opened = StopSignal(), list[StageContext]()

    def last_words(reason: str) -> None:
        faulthandler.dump_traceback()
        for ctx in opened:
            ctx.events.emit(EventName.STAGE_STOPPED, stage=name, reason=reason)
            ctx.events.flush(durable=True)

    with stop_on_signals(stop, last_hook=last_words), open_context(settings, stop, words=words) as ctx:
        opened.append(ctx)
        ctx.events.emit(
            EventName.STAGE_STARTED, stage=name, settings_hash=ctx.settings_hash, code_version=ctx.code_version
        )
        try:
            if name in PARALLEL or name == "health":
                settings = with_backend(settings, ctx, name)
            shared = name in PARALLEL
            with shared_compile_cache(settings, stop, ctx.console.info) if shared else contextlib.nullcontext():
                result = import_module(f"pipeline.stages.{name}").run(settings, ctx)
        except BaseException as error:
            outcome = EventName.STAGE_STOPPED if isinstance(error, Preempted) else EventName.STAGE_FAILED
            # What ended the stage decides the exit code, even when the log cannot be written (a full disk).
            with contextlib.suppress(TrnpipeError):
                ctx.events.emit(outcome, stage=name, error=type(error).__name__, reason=str(error))
            raise
        skipped = result.status == "already_done"
        ctx.events.emit(
            EventName.STAGE_SKIPPED if skipped else EventName.STAGE_FINISHED, stage=name, figures=result.figures
        )
    return EXIT_OK


def run_tool(name: str, settings: "Settings", call: ToolCall) -> int:
    """Run one tool under the signal handlers."""
    tool, stop = TOOLS[name], StopSignal()
    with stop_on_signals(stop, grace_s=LAUNCHER_S if call.command else RANK_S):
        module = import_module(f"pipeline.commands.{tool.module or name}")
        return int(getattr(module, tool.function)(settings, stop, show, call))


# What both console programs share: their words, help and exit codes.


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
        files = "settings from a file; may be repeated, later files win"
        self.add_argument("--config", type=Path, action="append", default=[], metavar="FILE.toml", help=files)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        self._own.update(names)
        return super().add_argument(*names, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, expected=self._words(), next_command=f"{self.prog} --help")

    def read(self, words: Sequence[str], model: "type[S]") -> "tuple[argparse.Namespace, Resolved[S]] | None":
        """What the command was asked, with the flags of settings in `flags`, and the settings; None: help was shown."""
        from pipeline.settings import FlagSource, resolve

        if HELP & set(words):
            self.usage = self._words()  # without every flag of the settings
            FlagSource(model, self)
            show(self.format_help())
            return None
        own, flags = self._split(words)
        asked = self.parse_args(own, argparse.Namespace(flags=flags))
        return asked, resolve(asked.config, os.environ, flags, model, other_flags=sorted(self._own))

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
