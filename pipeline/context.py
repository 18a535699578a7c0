"""The context that a stage runs in, such as its workspace, event log and console, and the result that it stores."""

import contextlib
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.backends import auto_uses_xla_cpu, host_backend, is_lazy_host
from pipeline.core.errors import ConfigError, TrnpipeError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import use_display
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.io.atomic import make_dirs
from pipeline.io.paths import cache_folder, user_path
from pipeline.io.storage import KeyNotFound, Storage, open_storage, read_record
from pipeline.parallel.world import ARRAY_INDEX, ATTEMPT, JOB_ID, RANK_REPORTS, TRACE_FILE, Nodes, World, world_from_env
from pipeline.settings import Settings, settings_hash
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventLog, EventName, code_version, read_events

# The result of a stage, which is stored as a result.json per cycle and stage.

Figure = str | int | float | bool | None
Status = Literal["done", "already_done"]


class StageResult(Record):
    """The result of a stage. Since failures are raised as exceptions, a result always means success."""

    schema_version: Literal[1] = 1
    stage: str = Field(description="Name of the stage")
    cycle: str = Field(description="Name of the cycle")
    status: Status = Field(description="done, or already_done if an earlier result exists (never stored)")
    inputs: dict[str, str] = Field(description="Fingerprint (or committed prefix) of each input by name")
    outputs: dict[str, str] = Field(default={}, description="Key of each artifact by name, relative to the workspace")
    figures: dict[str, Figure] = Field(default={}, description="Measured values, with the unit in the name")
    settings_hash: str
    code_version: str
    started: datetime = Field(description="UTC")
    finished: datetime = Field(description="UTC")


def result_key(cycle: str, stage: str) -> str:
    return f"cycles/{cycle}/{stage}/result.json"


def load_result(workspace: Storage, cycle: str, stage: str) -> StageResult | None:
    """Load the result of a stage, or return None if the stage hasn't finished. Raises DataError if it is damaged."""
    key = result_key(cycle, stage)
    return read_record(workspace, key, StageResult, "a stage result", f"trnpipe {stage}")


def store_result(workspace: Storage, result: StageResult) -> StageResult:
    """Store the result of a stage atomically. This must be the last thing that a stage does."""
    stored = result.model_copy(update={"status": "done"})
    workspace.write_bytes(result_key(result.cycle, result.stage), stored.model_dump_json(indent=2).encode() + b"\n")
    return result


# The context of a stage.


@dataclass(frozen=True)
class StageContext:
    """Everything that a stage needs to run.

    Once `stop` is set, all requests to `workspace` raise Preempted. Use `workspace_after_stop` for data that must still
    be written during the grace period, such as the last checkpoint and the event log. `scratch` is a local folder for
    temporary files, which may be lost at any time.
    """

    settings: Settings
    workspace: Storage
    workspace_after_stop: Storage
    cycle: str
    scratch: Path
    events: EventLog
    console: Console
    stop: StopSignal
    world: World
    settings_hash: str
    code_version: str
    command_line: tuple[str, ...] = ()
    """The command line. Some stages need this to launch additional processes with the same command."""

    def earlier(self, stage: str) -> StageResult | None:
        """Load the result of an earlier stage of this cycle, see `load_result`."""
        return load_result(self.workspace, self.cycle, stage)

    def finish(
        self,
        stage: str,
        started: datetime,
        *,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        figures: Mapping[str, Figure],
    ) -> StageResult:
        """Create the result for a stage that has just finished. The caller must store it with `store_result`."""
        return StageResult(
            stage=stage,
            cycle=self.cycle,
            status="done",
            inputs=dict(inputs),
            outputs=dict(outputs),
            figures=dict(figures),
            settings_hash=self.settings_hash,
            code_version=self.code_version,
            started=started,
            finished=datetime.now(UTC),
        )


@contextmanager
def open_context(
    settings: Settings, stop: StopSignal, env: Mapping[str, str] = os.environ, command_line: Sequence[str] = ()
) -> Iterator[StageContext]:
    """Open the workspace and the event log. The log is closed on exit.

    Raises ConfigError if the workspace or the log can't be opened.
    """
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    after_stop = open_storage(settings.workspace, retry=settings.storage, stop=StopSignal())
    cycle = cycle_name(settings)
    scratch = scratch_folder(settings, workspace, env)
    world = world_from_env(env)
    # Processes that are started by a stage, such as a trial run or the ranks of a health check, don't write to the log.
    # Neither do the tasks of an array, except for the first one, because a thousand writers would be too slow.
    is_first = world.is_main and env.get(ARRAY_INDEX, "0") == "0" and not settings.embed.worker
    logs = is_first and not {TRACE_FILE, RANK_REPORTS} & env.keys()
    writer = f"{command_line[0] if command_line else 'tool'}-{env.get(ATTEMPT, '1')}"
    key = f"cycles/{cycle}/events.jsonl"
    events = EventLog(after_stop, key, writer=writer, is_muted=not logs)
    console = Console(quiet=not world.is_main)
    try:
        with use_display(console.progress):
            yield StageContext(
                settings=settings,
                workspace=workspace,
                workspace_after_stop=after_stop,
                cycle=cycle,
                scratch=scratch,
                events=events,
                console=console,
                stop=stop,
                world=world,
                settings_hash=settings_hash(settings),
                code_version=code_version(),
                command_line=tuple(command_line),
            )
    except BaseException:
        with contextlib.suppress(TrnpipeError):  # don't hide the original error if the log can't be written
            events.close()
        raise
    finally:
        console.end_line()
    events.close()


def cycle_name(settings: Settings) -> str:
    """Return the name of the cycle, which defaults to the current date in UTC."""
    return settings.cycle or datetime.now(UTC).date().isoformat()


def check_workspace(workspace: Storage) -> None:
    """Raise ConfigError if a local workspace does not exist, so that a command that reads it does not create it."""
    folder = workspace.local_path("")
    if folder is not None and not folder.exists():
        names = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
        similar = difflib.get_close_matches(folder.name, names, n=1)
        raise ConfigError(
            f"workspace {folder} does not exist",
            expected="the workspace of a cycle",
            next_command=f"--workspace {folder.parent / similar[0]}" if similar else "make cycle, or trnjobs submit",
        )


def scratch_folder(settings: Settings, workspace: Storage, env: Mapping[str, str]) -> Path:
    """Create the folder for temporary files and return it. All attempts use the same folder, so downloads are reused.

    Unless `scratch` is set, the folder is inside the workspace if that is local, so that files can be published by
    renaming them. Otherwise, it is a subfolder of the cache folder (io/paths.py). Raises ConfigError if the folder
    can't be created.
    """
    inside = workspace.local_path(".scratch")
    if settings.scratch:
        folder = user_path(settings.scratch)
    elif inside is not None:
        folder = inside
    else:
        folder = cache_folder(env) / fingerprint(workspace.root)[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create the scratch folder {folder}: {error.strerror}",
            expected="a writable local folder",
            next_command="set --workspace or --scratch to a different folder",
        ) from error
    return folder


# Choose the backend of a stage if the setting is `auto`.

GRAPH_WEIGHTS = 1_000_000
"""Encoders with more weights than this in their layers are not compiled for XLA:CPU. Compiling the ten graphs of a
cycle takes half a minute for the preset tiny (0.4M weights), but far too long for small (10.6M, see
bench/results/graphs.json). Eager PyTorch on the CPU doesn't need to compile anything.
"""


def with_backend(settings: Settings, ctx: StageContext, stage: str) -> Settings:
    """Replace the backend `auto` on hosts without an accelerator and return the new settings.

    Small models use XLA:CPU. Larger models use eager PyTorch on the CPU, in which case a message is printed. However, a
    cycle that has already compiled graphs for XLA:CPU or started training with it continues to use it.
    """
    if not auto_uses_xla_cpu(settings.backend, os.environ):
        return settings
    size = settings.model.encoder
    weights = size.num_layers * size.hidden_size * (4 * size.hidden_size + 2 * size.intermediate_size)
    is_small = settings.model.factory is not None or weights <= GRAPH_WEIGHTS
    backend = host_backend(compiles_graphs=is_small or _began_with_graphs(ctx, stage))
    if not is_small:
        reason = "this cycle was started with it"
        if backend == host_backend(compiles_graphs=False):
            reason = (
                f"compiling {size.num_layers} x {size.hidden_size} for XLA:CPU takes long (--backend xla forces it)"
            )
        ctx.console.info(f"no accelerator found, using backend {backend}: {reason}")
    return settings.model_copy(update={"backend": backend})


def _began_with_graphs(ctx: StageContext, stage: str) -> bool:
    compiled = ctx.earlier("compile")
    if compiled is not None and compiled.figures.get("graphs"):
        with contextlib.suppress(KeyNotFound):  # the cache may have been cleared
            plan = json.loads(ctx.workspace.read_bytes(compiled.outputs["manifest"]))["plan"]
            if is_lazy_host(str(plan.get("device"))):
                return True
    if stage != "train":
        return False
    events = read_events(ctx.workspace, f"cycles/{ctx.cycle}/events.jsonl")
    started = [event for event in events if event["event"] == EventName.TRAIN_STARTED]
    return bool(started) and started[-1].get("backend") == host_backend(compiles_graphs=True)


def link_shared_tokens(shared: Path, own: Path) -> None:
    """Link the token shards of a shared scratch folder into a different one, so that they are downloaded only once."""
    make_dirs(shared / "tokens")
    link = own / "tokens"
    if not link.is_symlink():
        link.symlink_to((shared / "tokens").absolute(), target_is_directory=True)


# The nodes of a multi-node job, which communicate through the workspace.


def node_group(ctx: StageContext, folder: str, timeout_s: float) -> Nodes:
    """Return the nodes that take part in this attempt of the job. They exchange files in a folder of the cycle."""
    return Nodes(
        ctx.workspace_after_stop,
        f"cycles/{ctx.cycle}/{folder}/{attempt_name(os.environ)}",
        ctx.world.node_rank,
        ctx.world.world_size,  # at this point there is one process per node, because the stage starts the ranks later
        timeout_s,
        ctx.stop,
    )


def attempt_name(env: Mapping[str, str]) -> str:
    """Return a name for this attempt of the job that is the same on all its nodes."""
    return f"{env.get(JOB_ID, 'local')}-{env.get(ATTEMPT, '1')}"
