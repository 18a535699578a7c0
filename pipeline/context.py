"""What a stage is given beside its settings, built once at the rim, and the result it leaves behind."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.backends import auto_on_host, host_backend, is_lazy_host
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

# What a stage leaves behind: one result.json per cycle and stage.

Figure = str | int | float | bool | None
Status = Literal["done", "already_done"]


class StageResult(Record):
    """The outcome of one stage. Failures are exceptions, so a stored result is always a success."""

    schema_version: Literal[1] = 1
    stage: str = Field(description="Name of the stage")
    cycle: str = Field(description="The cycle it belongs to")
    status: Status = Field(description="done; already_done when an earlier run's result was found (never stored)")
    inputs: dict[str, str] = Field(description="Fingerprint (or committed prefix) of each input by name")
    outputs: dict[str, str] = Field(default={}, description="Key of each artefact by name, relative to the workspace")
    figures: dict[str, Figure] = Field(default={}, description="What was measured; the unit is in the name")
    settings_hash: str
    code_version: str
    started: datetime = Field(description="UTC")
    finished: datetime = Field(description="UTC")


def result_key(cycle: str, stage: str) -> str:
    return f"cycles/{cycle}/{stage}/result.json"


def load_result(workspace: Storage, cycle: str, stage: str) -> StageResult | None:
    """The stored result, None when the stage has not finished. Raises DataError when it cannot be read."""
    key = result_key(cycle, stage)
    return read_record(workspace, key, StageResult, "a stage result", f"trnpipe {stage}")


def store_result(workspace: Storage, result: StageResult) -> StageResult:
    """Publish a result (atomic). The last thing a stage does."""
    stored = result.model_copy(update={"status": "done"})
    workspace.write_bytes(result_key(result.cycle, result.stage), stored.model_dump_json(indent=2).encode() + b"\n")
    return result


# What a stage is given.


@dataclass(frozen=True)
class StageContext:
    """The outside world of one stage run.

    `workspace` gives up with Preempted once `stop` is set. `workspace_after_stop` is the same place for what must still
    be written then (the last checkpoint, events); the grace of runtime_signals is its bound. `scratch` is a local
    folder that may be lost at any time.
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
    """The command line, for a stage that runs itself again."""

    def earlier(self, stage: str) -> StageResult | None:
        """What a stage left in this cycle, None when it has not finished. Raises DataError when it cannot be read."""
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
        """The result of a stage, finished now. The stage stores it (store_result) as its last act."""
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
    """Open the workspace and the event log; close the log on leaving. Raises ConfigError for either."""
    workspace = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    after_stop = open_storage(settings.workspace, retry=settings.storage, stop=StopSignal())
    cycle = cycle_name(settings)
    scratch = scratch_folder(settings, workspace, env)
    world = world_from_env(env)
    # Processes that a stage starts for itself, a trial run or ranks under test, leave the log to it. Of an array of
    # jobs the first one writes: a thousand would only hinder each other.
    is_first = world.is_main and env.get(ARRAY_INDEX, "0") == "0"
    is_first = is_first and not settings.embed.worker
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
        with contextlib.suppress(TrnpipeError):  # what ended the stage says more than a log that cannot be written
            events.close()
        raise
    finally:
        console.end_line()
    events.close()


def cycle_name(settings: Settings) -> str:
    """The cycle of the settings, else today's date (UTC)."""
    return settings.cycle or datetime.now(UTC).date().isoformat()


def scratch_folder(settings: Settings, workspace: Storage, env: Mapping[str, str]) -> Path:
    """The folder for temporary files, made when missing. Another attempt finds it again, so downloads are reused.

    In a local workspace (so that publishing is a rename), else `<hash of the root>` in the folder for caches
    (io/paths.py). Setting `scratch`, unless it is empty, goes before all. Raises ConfigError when it cannot be
    made.
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
            f"scratch folder {folder}: {error.strerror}",
            expected="a local folder that can be written",
            next_command="set --workspace or --scratch to another folder",
        ) from error
    return folder


# Which device a stage takes where the settings leave it open.

GRAPH_WEIGHTS = 1_000_000
"""Of an encoder's layers. A cycle of the tiny preset (0.4 M) compiles its ten graphs on XLA:CPU in half a minute, which
takes too long for those of small (10.6 M, bench/results/graphs.json). PyTorch on the CPU compiles nothing.
"""


def with_backend(settings: Settings, ctx: StageContext, stage: str) -> Settings:
    """Return the settings with the backend of this host in place of `auto`, where that depends on the model.

    Without an accelerator a model larger than tiny runs on the CPU, and the console says so. A cycle that has compiled
    its graphs for this host, or has trained with graphs, goes on as it began.
    """
    if not auto_on_host(settings.backend, os.environ):
        return settings
    size = settings.model.encoder
    weights = size.num_layers * size.hidden_size * (4 * size.hidden_size + 2 * size.intermediate_size)
    is_small = settings.model.factory is not None or weights <= GRAPH_WEIGHTS
    backend = host_backend(compiles_graphs=is_small or _began_with_graphs(ctx, stage))
    if not is_small:
        here = f"no accelerator here; backend {backend}"
        why = f"{size.num_layers} x {size.hidden_size} would compile on XLA:CPU for long; --backend xla does it"
        ctx.console.info(
            f"{here}, as this cycle began" if backend != host_backend(compiles_graphs=False) else f"{here}: {why}"
        )
    return settings.model_copy(update={"backend": backend})


def _began_with_graphs(ctx: StageContext, stage: str) -> bool:
    compiled = ctx.earlier("compile")
    if compiled is not None and compiled.figures.get("graphs"):
        with contextlib.suppress(KeyNotFound):  # a cache that was cleared
            plan = json.loads(ctx.workspace.read_bytes(compiled.outputs["manifest"]))["plan"]
            if is_lazy_host(str(plan.get("device"))):
                return True
    if stage != "train":
        return False
    events = read_events(ctx.workspace, f"cycles/{ctx.cycle}/events.jsonl")
    started = [event for event in events if event["event"] == EventName.TRAIN_STARTED]
    return bool(started) and started[-1].get("backend") == host_backend(compiles_graphs=True)


def link_shared_tokens(shared: Path, own: Path) -> None:
    """Token shards of a workspace elsewhere are fetched once for all runs that have a scratch folder of their own."""
    make_dirs(shared / "tokens")
    here = own / "tokens"
    if not here.is_symlink():
        here.symlink_to((shared / "tokens").absolute(), target_is_directory=True)


# The nodes of the job that a stage is part of, met through the workspace.


def node_group(ctx: StageContext, place: str, timeout_s: float) -> Nodes:
    """All nodes of this try of the job, one process each; `place`: where in the cycle they meet."""
    return Nodes(
        ctx.workspace_after_stop,
        f"cycles/{ctx.cycle}/{place}/{attempt_name(os.environ)}",
        ctx.world.node_rank,
        ctx.world.world_size,  # one process a node: ranks are started by the stage
        timeout_s,
        ctx.stop,
    )


def attempt_name(env: Mapping[str, str]) -> str:
    """Return what all nodes of one attempt of one job agree on."""
    return f"{env.get(JOB_ID, 'local')}-{env.get(ATTEMPT, '1')}"
