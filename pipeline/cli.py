"""The `trnpipe` command: a table of stages, one of tools, one place where errors become exit codes."""

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib import import_module

from pipeline.command_line import hint, parse, take_action, take_arguments
from pipeline.command_table import COMMANDS, CONFIG, PARALLEL, STAGES, TOOLS, Tool, ToolCall
from pipeline.compile.neuron_command import drives_tool, use_neuron_cache
from pipeline.config_sources import resolve
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError, exit_code_of
from pipeline.core.stop import StopSignal
from pipeline.parallel.launch import launch, needs_launch, note_exit_code
from pipeline.proc.children import LAUNCHER_S
from pipeline.proc.signals import show_stacks_when_asked, stop_on_signals
from pipeline.settings import Settings
from pipeline.settings_text import as_json, flags_text, table_text
from pipeline.telemetry.events import EventName

HELP = frozenset({"--help", "-h"})

_USAGE = "usage: trnpipe <command> [--config FILE.toml ...] [--section.key value ...]"
_COMMON = """\
  --config FILE.toml   settings from a file; may be repeated, later files win
  --help               this text

Order: defaults < --config files < environment < flags. --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the
environment and max_steps under [train] in a file. Lists: a,b or JSON; no value: null; booleans also as --no-key."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The result is the exit code of core/errors.py; only bugs show a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
    show_stacks_when_asked()
    code = _guarded(words)
    note_exit_code(code)
    return code


def _guarded(words: list[str]) -> int:
    try:
        return _command(words)
    except (TrnpipeError, KeyboardInterrupt) as error:
        name = " ".join(["trnpipe", *words[:1]])
        print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
        return exit_code_of(error)
    except Exception as error:  # a bug: traceback and exit code 1, from one place
        traceback.print_exc()
        return exit_code_of(error)


def _command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        return _show(_overview())
    name, rest = words[0], words[1:]
    if name == "--version":
        from pipeline.telemetry.code_version import code_version

        return _show(f"trnpipe {code_version()}")
    if name not in COMMANDS:
        raise ConfigError(
            f"no command {name!r}{hint(name, COMMANDS)}",
            expected=f"one of {', '.join(COMMANDS)}",
            next_command="trnpipe --help",
        )
    asks_help = bool(HELP & set(rest))
    tool = CONFIG if name == "config" else TOOLS.get(name, Tool(""))
    action = take_action(name, tool, rest, required=name not in STAGES and not asks_help)
    rest = rest[1:] if action else rest
    given = take_arguments(f"{name} {action}".strip(), () if asks_help else tool.arguments.get(action, ()), rest)
    if name in STAGES and not action:
        tool = Tool("")  # its flags belong to its actions
    arguments = parse(rest[len(given) :], HELP | tool.switches, tool.options)
    if arguments.switches & HELP:
        return _show(_help(name))
    resolved = resolve(arguments.files, os.environ, arguments.flags)
    if name == "config":
        return _show(as_json(resolved) if "--json" in arguments.switches else table_text(resolved))
    if name in TOOLS and (action or name not in STAGES):
        call = ToolCall(action, given, arguments.switches, arguments.options)
        return run_tool(tool.module or name, resolved.settings, call)
    if name in PARALLEL:
        settings = resolved.settings
        told = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
        if told:
            print(f"trnpipe {name}: warning: {told}", file=sys.stderr)
        if needs_ranks(name, settings):
            return _launch_ranks(words, settings)
    return run_stage(name, resolved.settings, words)


def _launch_ranks(words: list[str], settings: Settings) -> int:
    from pipeline.context import cycle_name

    stop = StopSignal()
    with stop_on_signals(stop, grace_s=LAUNCHER_S):  # the cycle is named once: ranks may start around midnight
        return launch([*words, "--cycle", cycle_name(settings)], settings.launch.processes, stop)


def needs_ranks(name: str, settings: Settings) -> bool:
    """True where this process is to start the ranks of a stage; a driven compile starts them in its trial run."""
    driven = name == "compile" and drives_tool(settings.compile, settings.backend, os.environ)
    return not driven and needs_launch(settings.launch.processes, os.environ)


def run_stage(name: str, settings: Settings, words: Sequence[str] = ()) -> int:
    """Run one stage under the signal handlers, with its start and outcome in the event log.

    `words` is the whole command line, for a stage that runs itself again.
    """
    from pipeline.context import StageContext, open_context

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


def run_tool(module: str, settings: Settings, call: ToolCall) -> int:
    """Run one tool under the signal handlers."""
    stop = StopSignal()
    with stop_on_signals(stop):
        return int(import_module(f"pipeline.commands.{module}").run(settings, stop, _show, call))


def _help(name: str) -> str:
    tool = TOOLS.get(name, Tool(""))
    words = name
    if tool.actions:
        words += f" [{'|'.join(tool.actions)}]" if name in STAGES else f" <{'|'.join(tool.actions)}>"
    words = " ".join([words, *tool.arguments.get("", ())])
    actions = {" ".join([one, *tool.arguments.get(one, ())]): text for one, text in tool.actions.items()}
    about = "\n".join([COMMANDS[name], *_rows(actions), *_rows(tool.options)])
    return "\n\n".join([_USAGE.replace("<command>", words), about, _COMMON, flags_text()])


def _overview() -> str:
    return "\n".join(
        [
            _USAGE,
            "       trnpipe --version",
            "",
            *_rows(COMMANDS),
            "",
            _COMMON,
            "",
            "trnpipe <command> --help lists every setting.",
        ]
    )


def _rows(table: Mapping[str, str]) -> list[str]:
    width = max(map(len, table), default=0)
    return [f"  {name:<{width}}  {text}" for name, text in table.items()]


def _show(text: str) -> int:
    """Print; a reader that closes early (`| head`) is no failure."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_OK
