"""The `trnpipe` command: the stages of a cycle, and the tools beside them."""

import contextlib
import faulthandler
import os
import resource
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from pipeline.command_line import HELP, CommandParser, completion, hint, rows, run_program, show
from pipeline.commands import COMMANDS, CONFIG, PARALLEL, STAGES, TOOLS, USAGE, Tool, ToolCall
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.parallel.launch import launch, line_buffer_c_stdout, needs_launch, record_exit_code
from pipeline.proc.children import LAUNCHER_S, RANK_S
from pipeline.proc.signals import show_stacks_when_asked, stop_on_signals

if TYPE_CHECKING:  # an overview needs no settings
    from pipeline.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The result is the exit code of core/errors.py; only bugs show a traceback."""
    show_stacks_when_asked()
    line_buffer_c_stdout()
    code = run_program("trnpipe", COMMANDS, _run, argv)
    record_exit_code(code)
    return code


def allow_open_files(wanted: int = 65_536) -> None:
    """Up to what the machine allows: a map of a token shard holds its file open, and a shell often grants 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _run(name: str, words: list[str]) -> int:
    from pipeline.settings import Settings, as_json, table_text

    if name == "completion":
        return show(completion("trnpipe", COMMANDS, words, Settings))
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


def _parser(name: str, action: str, tool: Tool) -> CommandParser:
    asked, prog, lines = tool.actions[action] if action else tool, f"trnpipe {name} {action}".strip(), list[str]()
    if asked.actions:
        choice = "|".join(asked.actions)
        prog += f" [{choice}]" if asked.arguments or name in STAGES else f" <{choice}>"
        lines = ["", *rows({" ".join([one, *it.arguments]): it.text for one, it in asked.actions.items()})]
        lines.append(f"The flags of an action: trnpipe {name} {next(iter(asked.actions))} --help")
    parser = CommandParser(prog, "\n".join([asked.text or COMMANDS[name], *lines]), tool.command, USAGE[name])
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
