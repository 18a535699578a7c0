"""The `trnpipe` command, which runs the stages of a cycle and various tools."""

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
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError, reported_name
from pipeline.core.stop import StopSignal
from pipeline.parallel.launch import MAX_RESTARTS, launch, line_buffer_c_stdout, needs_launch, record_exit_code
from pipeline.proc.children import LAUNCHER_S, RANK_S
from pipeline.proc.signals import enable_stack_dumps, stop_on_signals

if TYPE_CHECKING:  # importing the settings takes a while, and `trnpipe --help` doesn't need them
    from pipeline.settings import Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code (see core/errors.py). A traceback is only printed for bugs."""
    enable_stack_dumps()
    line_buffer_c_stdout()
    code = run_program("trnpipe", COMMANDS, _run, argv)
    record_exit_code(code)
    return code


def allow_open_files(num_files: int = 65_536) -> None:
    """Raise the limit on open files.

    Every token shard is a memory-mapped file, so that the default limit, which is often 1,024, may be too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = num_files if hard == resource.RLIM_INFINITY else min(num_files, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _run(name: str, arguments: list[str]) -> int:
    from pipeline.settings import Settings, as_json, table_text

    if name == "completion":
        tools = {command: TOOLS.get(command, Tool("")) for command in COMMANDS if command != name} | {"config": CONFIG}
        parsers = {
            command: {action: _parser(command, action, tool) for action in ("", *tool.actions)}
            for command, tool in tools.items()
        }
        return show(completion("trnpipe", parsers, arguments, Settings))
    if name != "health":  # the health checks must see the default limit
        allow_open_files()
    tool = CONFIG if name == "config" else TOOLS.get(name, Tool(""))
    end = arguments.index("--") if tool.command and "--" in arguments else len(arguments)
    action = _action(name, tool, arguments)
    command = tool.actions[action] if action else tool
    parsed = _parser(name, action, tool).read(arguments[bool(action) : end], Settings)
    if parsed is None:
        return EXIT_OK
    options, settings = vars(parsed[0]), parsed[1].settings
    if name == "config":
        return show(as_json(parsed[1]) if options["--json"] else table_text(parsed[1]))
    if action or (name in TOOLS and name not in STAGES):
        call = ToolCall(
            action,
            tuple(options[argument] for argument in command.arguments if options[argument] is not None),
            frozenset(switch for switch in command.switches if options[switch]),
            {option: options[option] for option in command.options if options[option] is not None},
            tuple(arguments[end + 1 :]),
        )
        return run_tool(name, settings, call)
    if name in PARALLEL:
        from pipeline.compile.neuron import drives_tool, use_neuron_cache

        warning = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
        if warning:
            print(f"trnpipe {name}: warning: {warning}", file=sys.stderr)
        # With neuron_parallel_compile, the trial run starts the ranks instead.
        drives = name == "compile" and drives_tool(settings.compile, settings.backend, os.environ)
        if not drives and needs_launch(settings.launch.processes, os.environ):
            return _launch_ranks(name, [name, *arguments], settings)
    return run_stage(name, settings, [name, *arguments])


def _action(name: str, tool: Tool, arguments: Sequence[str]) -> str:
    """Return the action from the command line, or an empty string if the command is used without one.

    Raises ConfigError if a required action is missing, or if the action is unknown.
    """
    action = arguments[0] if arguments and not arguments[0].startswith("-") else ""
    if action in tool.actions:
        return action
    if not tool.actions or tool.arguments or (not action and (name in STAGES or HELP & set(arguments))):
        return ""
    raise ConfigError(
        f"trnpipe {name} has no action {action!r}{hint(action, tool.actions)}" if action else "the action is missing",
        expected=f"one of {', '.join(tool.actions)}, before the flags",
        next_command=f"trnpipe {name} --help",
    )


def _parser(name: str, action: str, tool: Tool) -> CommandParser:
    command, prog, lines = tool.actions[action] if action else tool, f"trnpipe {name} {action}".strip(), list[str]()
    if command.actions:
        choice = "|".join(command.actions)
        prog += f" [{choice}]" if command.arguments or name in STAGES else f" <{choice}>"
        lines = ["", *rows({" ".join([key, *sub.arguments]): sub.text for key, sub in command.actions.items()})]
        lines.append(f"Run trnpipe {name} {next(iter(command.actions))} --help for the flags of an action.")
    parser = CommandParser(prog, "\n".join([command.text or COMMANDS[name], *lines]), tool.command, USAGE[name])
    for argument in command.arguments:
        parser.add_argument(argument, metavar=argument.strip("[]"), nargs="?" if argument.startswith("[") else None)
    for switch in sorted(command.switches):
        parser.add_argument(switch, dest=switch, action="store_true", help=command.switches[switch])
    for option, text in command.options.items():
        metavar, _, description = text.partition("  ")
        parser.add_argument(option, dest=option, metavar=metavar, help=description)
    return parser


def _launch_ranks(name: str, command_line: list[str], settings: "Settings") -> int:
    from pipeline.compile.sync import shared_compile_cache
    from pipeline.context import cycle_name

    def say(line: str) -> None:
        print(f"trnpipe {name}: {line}", file=sys.stderr, flush=True)

    stop = StopSignal()
    # The cycle defaults to the current date. Pass it explicitly, so that all ranks agree if they start around midnight.
    with stop_on_signals(stop, grace_s=LAUNCHER_S), shared_compile_cache(settings, stop, say):
        arguments = [*command_line, "--cycle", cycle_name(settings)]
        return launch(arguments, settings.launch.processes, stop, restarts=MAX_RESTARTS)


def run_stage(name: str, settings: "Settings", command_line: Sequence[str] = ()) -> int:
    """Run a stage with signal handlers installed, and record its start and outcome in the event log."""
    from pipeline.compile.sync import shared_compile_cache
    from pipeline.context import StageContext, open_context, with_backend
    from pipeline.telemetry.events import EventName

    stop, opened = StopSignal(), list[StageContext]()

    def log_stop(reason: str) -> None:
        faulthandler.dump_traceback()
        for ctx in opened:
            ctx.events.emit(EventName.STAGE_STOPPED, stage=name, reason=reason)
            ctx.events.flush(durable=True)

    with stop_on_signals(stop, last_hook=log_stop), open_context(settings, stop, command_line=command_line) as ctx:
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
            # If the event log cannot be written either, for example because the disk is full, raise the original error.
            with contextlib.suppress(TrnpipeError):
                ctx.events.emit(outcome, stage=name, error=reported_name(error), reason=str(error))
            raise
        skipped = result.status == "already_done"
        ctx.events.emit(
            EventName.STAGE_SKIPPED if skipped else EventName.STAGE_FINISHED, stage=name, figures=result.figures
        )
    return EXIT_OK


def run_tool(name: str, settings: "Settings", call: ToolCall) -> int:
    """Run a tool with signal handlers installed."""
    tool, stop = TOOLS[name], StopSignal()
    with stop_on_signals(stop, grace_s=LAUNCHER_S if call.command else RANK_S):
        module = import_module(f"pipeline.commands.{tool.module or name}")
        return int(getattr(module, tool.function)(settings, stop, show, call))
