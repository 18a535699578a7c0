"""The `trnpipe` command: a table of stages, one of tools, one place where errors become exit codes."""

import contextlib
import difflib
import faulthandler
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from pipeline.config_sources import resolve
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TrnpipeError, exit_code_of
from pipeline.core.events import EventName
from pipeline.core.stop import StopSignal
from pipeline.graphs.neuron_command import drives_tool, use_neuron_cache
from pipeline.parallel.launch import launch, needs_launch, note_exit_code
from pipeline.runtime_signals import LAUNCHER_GRACE_S, stop_on_signals
from pipeline.settings import Settings
from pipeline.settings_text import as_json, flags_text, table_text


@dataclass(frozen=True)
class Tool:
    """A command beside the stages: `pipeline/commands/<name>.py` with `run(settings, stop, say, *words) -> exit code`.

    `words`: the action, when it has actions, then the switches that were typed. `say` prints a line.
    """

    text: str
    actions: Mapping[str, str] = field(default_factory=dict)
    switches: frozenset[str] = frozenset()


# A stage is `pipeline/stages/<name>.py` with `run(settings, ctx) -> StageResult`, imported when it runs.
STAGES: dict[str, str] = {
    "health": "check this machine, its cores and the collectives of all ranks; exit 75 sends the job elsewhere",
    "prepare": "read new input, tokenise it once, commit token shards",
    "compile": "trace and compile every graph of this cycle ahead of time, write the graph manifest",
    "train": "train on the prepared shards, save checkpoints; continues where an earlier attempt stopped",
}
PARALLEL = frozenset({"compile", "train"})  # stages that --launch.processes runs in several ranks
TOOLS: dict[str, Tool] = {
    "doctor": Tool(
        "estimate memory and time on a Trainium core; --hlo: also lint every graph for what neuronx-cc refuses",
        switches=frozenset({"--hlo"}),
    ),
    "cache": Tool(
        "the compiled graphs of this machine: status, doctor, repair, sync",
        actions={
            "status": "list what is in the cache, how old and how large, and warn of what will be compiled again",
            "doctor": "also read every byte; say what is wrong and the next command; exit 65 when something is",
            "repair": "remove stale locks, remembered failures, half and damaged entries, versions not kept",
            "sync": "exchange finished entries with --compile.sync-url, both ways",
        },
    ),
}
SWITCHES: dict[str, frozenset[str]] = {name: tool.switches for name, tool in TOOLS.items()} | {
    "config": frozenset({"--json"})
}
COMMANDS: dict[str, str] = (
    STAGES
    | {name: tool.text for name, tool in TOOLS.items()}
    | {"config": "print every setting with its value and source; --json for machines"}
)
HELP = frozenset({"--help", "-h"})

_USAGE = "usage: trnpipe <command> [--config FILE.toml ...] [--section.key value ...]"
_COMMON = """\
  --config FILE.toml   settings from a file; may be repeated, later files win
  --help               this text

Order: defaults < --config files < environment < flags. --train.max-steps is TRNPIPE_TRAIN__MAX_STEPS in the
environment and max_steps under [train] in a file. Lists: a,b or JSON; no value: null; booleans also as --no-key."""


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart; nothing is interpreted yet."""

    files: tuple[Path, ...]
    flags: tuple[tuple[str, str | None], ...]
    switches: frozenset[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. The result is the exit code of core/errors.py; only bugs show a traceback."""
    words = list(sys.argv[1:] if argv is None else argv)
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
    except Exception as error:
        traceback.print_exc()
        return exit_code_of(error)


def _command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        return _show(_overview())
    name, rest = words[0], words[1:]
    if name == "--version":
        from pipeline.stages.code_version import code_version

        return _show(f"trnpipe {code_version()}")
    if name not in COMMANDS:
        hint = _hint(name, COMMANDS)
        raise ConfigError(
            f"no command {name!r}{hint}", expected=f"one of {', '.join(COMMANDS)}", next_command="trnpipe --help"
        )
    action = _action(name, rest)
    arguments = parse(rest[len(action) :], switches=HELP | SWITCHES.get(name, frozenset()))
    if arguments.switches & HELP:
        return _show(_help(name))
    resolved = resolve(arguments.files, os.environ, arguments.flags)
    if name == "config":
        return _show(as_json(resolved) if "--json" in arguments.switches else table_text(resolved))
    if name in TOOLS:
        return run_tool(name, resolved.settings, [*action, *sorted(arguments.switches)])
    if name in PARALLEL:
        settings = resolved.settings
        told = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
        if told:
            print(f"trnpipe {name}: warning: {told}", file=sys.stderr)
        if needs_ranks(name, settings):
            return _launch_ranks(words, settings)
    return run_stage(name, resolved.settings, words)


def _action(name: str, rest: Sequence[str]) -> Sequence[str]:
    """The action of a tool that has actions, as a list of one word; an empty one where none is needed."""
    actions = TOOLS[name].actions if name in TOOLS else {}
    given = rest[:1] if rest and not rest[0].startswith("-") else []
    if not actions or (not given and HELP & set(rest)):
        return []
    if given and given[0] in actions:
        return given
    seen = f"trnpipe {name} has no action {given[0]!r}{_hint(given[0], actions)}" if given else "no action is given"
    raise ConfigError(
        seen, expected=f"one of {', '.join(actions)}, before the flags", next_command=f"trnpipe {name} --help"
    )


def _hint(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _launch_ranks(words: list[str], settings: Settings) -> int:
    from pipeline.stages.context import cycle_name

    stop = StopSignal()
    with stop_on_signals(stop, grace_s=LAUNCHER_GRACE_S):  # the cycle is named once: ranks may start around midnight
        return launch([*words, "--cycle", cycle_name(settings)], settings.launch.processes, stop)


def parse(words: Sequence[str], switches: Collection[str]) -> Arguments:
    """Split into --config files, flags and switches. `--flag value`, `--flag=value` and a bare `--flag` are taken.

    Raises ConfigError for words that belong to no flag.
    """
    files: list[Path] = []
    flags: list[tuple[str, str | None]] = []
    seen: set[str] = set()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in switches:
            seen.add(word)
            continue
        if not word.startswith("--") or word == "--":
            raise ConfigError(
                f"unexpected argument {word!r}", expected="--section.key value", next_command="trnpipe --help"
            )
        flag, equals, text = word.partition("=")
        value = text if equals else rest.pop(0) if rest and not rest[0].startswith("--") else None
        if flag != "--config":
            flags.append((flag, value))
        elif value:
            files.append(Path(value))
        else:
            raise ConfigError("--config has no value", expected="--config FILE.toml")
    return Arguments(tuple(files), tuple(flags), frozenset(seen))


def needs_ranks(name: str, settings: Settings) -> bool:
    """True where this process is to start the ranks of a stage; a driven compile starts them in its trial run."""
    driven = name == "compile" and drives_tool(settings.compile, settings.backend, os.environ)
    return not driven and needs_launch(settings.launch.processes, os.environ)


def run_stage(name: str, settings: Settings, words: Sequence[str] = ()) -> int:
    """Run one stage under the signal handlers, with its start and outcome in the event log.

    `words` is the whole command line, for a stage that runs itself again.
    """
    from pipeline.stages.context import StageContext, open_context

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


def run_tool(name: str, settings: Settings, words: Sequence[str]) -> int:
    """Run one tool under the signal handlers."""
    stop = StopSignal()
    with stop_on_signals(stop):
        return int(import_module(f"pipeline.commands.{name}").run(settings, stop, _show, *words))


def _help(name: str) -> str:
    actions = TOOLS[name].actions if name in TOOLS else {}
    words = f"{name} <{'|'.join(actions)}>" if actions else name
    about = "\n".join([COMMANDS[name], *_rows(actions)])
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
