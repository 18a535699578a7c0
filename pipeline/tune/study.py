"""A search from its start to its end, by one process or by several that share its folder.

All that is known lies in the folder: `study.json` says what is searched, `journal.log` is Optuna's journal, `trial-<n>`
holds what a trial under way continues from. A process takes the trials that nobody works on, which the kernel's locks
say, then begins new ones. So killed anywhere the same command goes on, and more workers are the same command again.
"""

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from pydantic import Field, JsonValue, ValidationError

from pipeline.checkpoint.store import Checkpoint, CheckpointStore
from pipeline.context import NoEvents, StageContext, share_tokens
from pipeline.core.errors import ConfigError, NumericError, Preempted, TransientError, TrnpipeError
from pipeline.core.fingerprint import Json, fingerprint
from pipeline.core.format import UNKNOWN, format_duration
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.io import atomic
from pipeline.io.atomic import make_dirs
from pipeline.io.paths import user_path
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.world import World
from pipeline.settings import Settings, settings_hash
from pipeline.stages.inputs import find_parent, load_prepared, mined_negatives
from pipeline.telemetry.events import EventLog
from pipeline.train.build import open_run
from pipeline.train.config import CheckpointConfig, TrainConfig, batch_share
from pipeline.train.inputs import RunInputs, gather_inputs
from pipeline.train.run import PruningRule, train
from pipeline.tune.journal import Journal, OpenTrial, Space, State, TrialRecord, best_toml, open_space, reason_of

# One trial of a search: the training program itself with the trial's values, in a place of its own.

CYCLE = "trial"
MOST_STARTS = 3
"""From one step: a trial that ends the process so often without getting further would end it for ever."""


@dataclass(frozen=True)
class Basis:
    """What all trials of a search train on and start from."""

    space: Space
    token_sets: tuple[str, ...]
    negatives: str | None
    """Those mined in this cycle."""
    tokenizer: bytes
    parent: Checkpoint | None
    metric: str

    def of_trial(self, settings: Settings) -> Settings:
        """Settings with what a search sets for every trial.

        Raises ValidationError where the metric of the search says nothing of what they train.
        """
        tune = settings.tune
        train = {
            "max_steps": tune.steps,
            "evaluate_every": tune.min_steps,
            "metric": self.metric,
            "patience": 0,
            "deadline": None,
        }
        return settings.model_copy(
            update={
                "train": TrainConfig.model_validate({**settings.train.model_dump(), **train}),
                # Each is traced anew where values are constants of the graphs; none is compiled ahead of time.
                "compile": settings.compile.model_copy(update={"on_unknown_graph": "warn"}),
                "checkpoint": CheckpointConfig(every_steps=settings.checkpoint.every_steps, keep_last=1),
                "log": settings.log.model_copy(update={"tensorboard": False}),
            }
        )

    def inputs(self, settings: Settings, workspace: Storage) -> RunInputs:
        """Of a trial with these settings. Raises ConfigError for values that do not go together."""
        batch_share(settings.train, 1)
        _ = settings.model.encoder
        return gather_inputs(workspace, self.token_sets, self.parent, settings.train, settings.model, self.negatives)


class TrialFolder:
    """Where one trial works: what stays of it when it is over are its events."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch, self.lock = folder, scratch, folder / "lock"
        self.storage = open_storage(str(folder))
        make_dirs(folder)

    def step(self) -> int:
        """Of the newest checkpoint; 0 without one."""
        store = CheckpointStore(self.storage, CYCLE, cache_dir=self.scratch, emit=NoEvents().emit)
        return max(store.steps(), default=0)

    def clear(self) -> None:
        """Remove what only a trial under way needs."""
        self.storage.delete_prefix("checkpoints/")
        shutil.rmtree(self.scratch, ignore_errors=True)


def run_trial(basis: Basis, opened: OpenTrial, place: TrialFolder, ctx: StageContext) -> None:
    """Train it to its end, from where an earlier attempt was, and write down how it ended.

    Values that do not go together and training that diverges are ends of a trial like others. Every other error is
    raised: Preempted and TransientError leave the trial to be continued.
    """
    try:
        settings = basis.of_trial(basis.space.apply(opened.record.values))
        inputs = basis.inputs(settings, ctx.workspace)
    except (ValidationError, ConfigError) as error:
        opened.fail(error.seen if isinstance(error, ConfigError) else reason_of(error))
        return
    starts, before_s, started = opened.record.starts, opened.record.seconds, time.monotonic()
    opened.note(starts=[*starts, place.step()])
    band, is_pruned = settings.tune.hyperband, False

    def note_seconds() -> None:
        opened.note(seconds=before_s + time.monotonic() - started)

    def is_hopeless(step: int, value: float) -> bool:
        """Tells the journal of a rung."""
        nonlocal is_pruned
        opened.report(step, value)
        note_seconds()
        is_pruned = step < band.max_steps and opened.is_pruned()
        return is_pruned

    try:
        _train(settings, inputs, basis, PruningRule(lambda step: step in band.rungs, is_hopeless), place, ctx)
    except NumericError as error:
        opened.fail(error.seen)
    except (Preempted, TransientError):
        note_seconds()
        opened.note(starts=starts)
        raise
    except TrnpipeError:
        raise
    except Exception as error:  # a bug or no memory: raised, but the next run of the command tries other values
        opened.fail(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        place.clear()
        raise
    else:
        note_seconds()
        if is_pruned:
            opened.prune()
        else:
            opened.complete(opened.record.metric_by_step[settings.tune.steps])
    place.clear()


def _train(
    settings: Settings, inputs: RunInputs, basis: Basis, pruning: PruningRule, place: TrialFolder, ctx: StageContext
) -> None:
    make_dirs(place.scratch)
    share_tokens(ctx.scratch, place.scratch)
    after_stop = open_storage(str(place.folder), stop=StopSignal())
    events = EventLog(after_stop, "events.jsonl", scratch=place.scratch)
    own = replace(
        ctx,
        settings=settings,
        workspace_after_stop=after_stop,
        cycle=CYCLE,
        scratch=place.scratch,
        events=events,
        world=World(),
        settings_hash=settings_hash(settings),
    )
    try:
        with open_run(settings, own, inputs, basis.tokenizer) as opened:
            train(opened, pruning)
    finally:
        events.close()


STUDY, JOURNAL, TABLE, BEST = "study.json", "journal.log", "table.json", "best.toml"


# The table of a search, best first, for people and for machines.


class TrialRow(Record):
    """One trial."""

    trial: int
    state: State
    metric: float | None = Field(description="At the last step of a full trial; null for one that did not get there")
    metric_by_step: dict[int, float] = Field(description="On the valid split, by rung")
    settings: dict[str, JsonValue]
    seconds: float = Field(description="Of work, over all attempts; what a kill cost since the last rung is not in it")
    reason: str = Field(description="Why it failed")


class StudyTable(Record):
    """A search, its trials best first: complete ones by metric, then those that got furthest."""

    name: str
    metric: str
    space: dict[str, str]
    seed: int
    rungs: tuple[int, ...] = Field(description="Steps at which trials are scored on valid")
    num_trials: int = Field(description="To be done in all")
    settings_hash: str
    code_version: str
    trials: tuple[TrialRow, ...]

    @property
    def best(self) -> TrialRow | None:
        """The complete trial with the highest metric; the earlier one of two that are equal."""
        return next((row for row in self.trials if row.metric is not None), None)

    @property
    def num_running(self) -> int:
        return sum(row.state == "running" for row in self.trials)


def rows_of(records: Sequence[TrialRecord], space: Space, max_steps: int) -> tuple[TrialRow, ...]:
    rows = (
        TrialRow(
            trial=record.number,
            state=record.state,
            metric=record.metric_by_step[max_steps] if record.state == "complete" else None,
            metric_by_step=dict(record.metric_by_step),
            settings=space.typed(record.values),
            seconds=record.seconds,
            reason=record.reason,
        )
        for record in records
    )
    order: dict[State, int] = {"complete": 0, "running": 1, "pruned": 1, "failed": 2}

    def rank(row: TrialRow) -> tuple[int, int, float, int]:
        step = max(row.metric_by_step, default=0)
        return order[row.state], -step, -row.metric_by_step.get(step, 0.0), row.trial

    return tuple(sorted(rows, key=rank))


def lines_of(table: StudyTable) -> list[str]:
    last = [name.rpartition(".")[2] for name in table.space]  # a name is shortened where no other ends in the same word
    names = [name if last.count(word) > 1 else word for name, word in zip(table.space, last, strict=True)]
    heading = ["trial", "state", *(f"step {step}" for step in table.rungs), "time", *names]
    cells = [heading]
    for row in table.trials:
        metrics = (row.metric_by_step.get(step) for step in table.rungs)
        settings = (row.settings.get(name) for name in table.space)
        cells.append(
            [
                str(row.trial),
                row.state,
                *(UNKNOWN if value is None else f"{value:.4f}" for value in metrics),
                format_duration(row.seconds),
                *(shown(value) for value in settings),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    reasons = [f"trial {row.trial} failed: {row.reason}" for row in table.trials if row.reason]
    return [f"search {table.name}: {table.metric} on valid, best first", *lines, *reasons]


def shown(value: JsonValue) -> str:
    """A setting's value, numbers to three figures."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return ",".join(map(str, value)) if isinstance(value, list) else UNKNOWN if value is None else str(value)


# The search itself.


def run_study(settings: Settings, ctx: StageContext) -> StudyTable:
    """Carry out what is left of the search. Its table; other processes may still be at work on trials of it.

    Raises TrnpipeError; ConfigError when no trial has come to a figure.
    """
    ranks = max(settings.launch.processes, ctx.world.world_size)
    if ranks > 1:
        raise ConfigError(
            f"a search in {ranks} ranks",
            expected="one process, on one device; trials run side by side in more workers",
            next_command="leave out --launch.processes, and start the command once for each device",
        )
    folder = study_folder(settings, ctx)
    space, prepared = open_space(settings), load_prepared(ctx)
    known = get_args(TrainConfig.model_fields["metric"].annotation)
    metric = settings.tune.metric or settings.train.metric
    if metric not in known:
        raise ConfigError(
            f"tune.metric is {metric}", expected=f"one of {', '.join(known)}", next_command=f"--tune.metric {known[0]}"
        )
    basis = Basis(
        space=space,
        token_sets=prepared.token_sets,
        negatives=mined_negatives(ctx),
        tokenizer=ctx.workspace.read_bytes(f"{prepared.tokenizer}/tokenizer.json"),
        parent=find_parent(settings, ctx),
        metric=metric,
    )
    make_dirs(folder)
    _pin(settings, basis, folder, ctx)
    journal = Journal(
        folder / JOURNAL,
        settings.tune.name,
        space.ranges,
        space.start(),
        settings.tune.hyperband,
        settings.tune.seed,
    )
    return _Study(settings, ctx, folder, basis, journal).run()


def study_folder(settings: Settings, ctx: StageContext) -> Path:
    """Where the search lies. Raises ConfigError when there is no folder whose files can be appended to and locked."""
    tune = settings.tune
    if tune.folder is not None:
        if "://" in tune.folder:
            raise ConfigError(
                "tune.folder is a URI",
                expected="a folder, on this machine or shared by the workers: a journal is appended to and locked",
                next_command="--tune.folder FOLDER",
            )
        return user_path(tune.folder) / tune.name
    inside = ctx.workspace.local_path(f"tune/{tune.name}")
    if inside is None:
        raise ConfigError(
            f"the workspace {ctx.workspace.root} cannot hold a search: its journal is appended to and locked",
            expected="tune.folder, a folder on this machine or shared by the workers (EFS, FSx, NFS)",
            next_command="--tune.folder FOLDER; the data is read from the workspace as before",
        )
    return inside


def _pin(settings: Settings, basis: Basis, folder: Path, ctx: StageContext) -> None:
    """A search is continued with what it was started with: the first process writes that down.

    Raises ConfigError naming what is different, and for settings that cannot be trained with at all.
    """
    tune = settings.tune
    try:
        base = basis.of_trial(settings)
    except ValidationError as error:
        raise ConfigError(
            f"tune.metric {basis.metric}: {reason_of(error)}",
            expected="a metric of what is trained",
            next_command="--tune.metric retrieval_ndcg, or a train.loss.graded_weight above 0",
        ) from None
    parts = dict(basis.inputs(base, ctx.workspace).identity)
    ours: dict[str, Json] = {
        "space": tune.space,
        "seed": tune.seed,
        "min_steps": tune.min_steps,
        "reduction": tune.reduction,
    }
    parts |= {f"tune.{name}": fingerprint(value) for name, value in ours.items()}
    storage = open_storage(str(folder))
    storage.write_if_absent(STUDY, json.dumps(parts, indent=1, sort_keys=True).encode())
    found = json.loads(storage.read_bytes(STUDY))
    different = sorted(name for name in found.keys() | parts.keys() if found.get(name) != parts.get(name))
    if different:
        raise ConfigError(
            f"search {tune.name} in {folder} was started with other {', '.join(different)}",
            expected="the settings and data it was started with (tune.trials may grow)",
            next_command="go back to them, or search under another --tune.name",
        )


@dataclass
class _Study:
    settings: Settings
    ctx: StageContext
    folder: Path
    basis: Basis
    journal: Journal

    def run(self) -> StudyTable:
        # A kill may have come between the end of a trial and its clearing.
        for record in self.journal.records():
            place = None if record.state == "running" else self._place(record.number)
            if place is not None and place.step():
                with atomic.if_free(place.lock) as is_free:
                    if is_free:
                        place.clear()
        started, done = time.monotonic(), 0
        while self._one():
            done, table = done + 1, self._store()
            over, each_s = len(table.trials) - table.num_running, (time.monotonic() - started) / done
            left_s = each_s * max(0, table.num_trials - over) / max(1, table.num_running + 1)
            best = "none yet" if table.best is None else f"{table.best.metric:.4f} (trial {table.best.trial})"
            self.ctx.console.info(
                f"tune: {over} of {table.num_trials} trials | best {table.metric} {best}"
                f" | {format_duration(each_s)} a trial | eta {format_duration(left_s)}"
            )
        table = self._store()
        if table.best is None and not table.num_running:
            raise ConfigError(
                f"none of the {len(table.trials)} trials has come to its end: {table.trials[0].reason}",
                expected="a space in which training works",
                next_command=f"see {self.folder / TABLE}; narrow tune.space, under another --tune.name",
            )
        return table

    def _one(self) -> bool:
        """Carry out one trial; False when there is none left for this process."""
        with ExitStack() as held:
            with atomic.exclusive(self.folder / "lock", self.ctx.stop):
                opened = self._take(held)
            if opened is None:
                return False
            self.ctx.stop.raise_if_set(f"searching; trial {opened.number} is next")
            values = ", ".join(f"{name} {shown(value)}" for name, value in opened.record.values.items())
            self.ctx.console.info(f"tune: trial {opened.number}: {values}")
            run_trial(self.basis, opened, self._place(opened.number), self.ctx)
        return True

    def _take(self, held: ExitStack) -> OpenTrial | None:
        """A trial that was begun and nobody works on, else a new one; its lock is `held` from then on."""
        records = self.journal.records()
        for number in [record.number for record in records if record.state == "running"]:
            place = self._place(number)
            if not held.enter_context(atomic.if_free(place.lock)):
                continue
            record = self.journal.records()[number]  # who held the lock may have ended the trial since
            if record.state != "running":
                continue
            opened = self.journal.resume(number)
            step = place.step()
            if len(record.starts) >= MOST_STARTS and set(record.starts[-MOST_STARTS:]) == {step}:
                opened.fail(f"{len(record.starts)} attempts ended the process; the last ones began at step {step}")
                place.clear()
                continue
            return opened
        if len(records) >= self.settings.tune.trials:
            return None
        opened = self.journal.begin()
        held.enter_context(atomic.if_free(self._place(opened.number).lock))
        return opened

    def _place(self, number: int) -> TrialFolder:
        name = f"trial-{number}"
        return TrialFolder(self.folder / name, self.ctx.scratch / "tune" / self.settings.tune.name / name)

    def _store(self) -> StudyTable:
        """Table and best settings beside the journal, and in a workspace that is elsewhere."""
        with atomic.exclusive(self.folder / "lock", self.ctx.stop):
            tune = self.settings.tune
            table = StudyTable(
                name=tune.name,
                metric=self.basis.metric,
                space={name: tune.space[name] for name in self.basis.space.ranges},
                seed=tune.seed,
                rungs=tune.hyperband.rungs,
                num_trials=tune.trials,
                settings_hash=self.ctx.settings_hash,
                code_version=self.ctx.code_version,
                trials=rows_of(self.journal.records(), self.basis.space, tune.steps),
            )
            files = {TABLE: table.model_dump_json(indent=1).encode() + b"\n"}
            if (best := table.best) is not None:
                comments = (
                    f"Trial {best.trial} of search {table.name}, the best of {len(table.trials)} by {table.metric}"
                    " on valid:",
                    f"{best.metric:.6f} after {table.rungs[-1]} steps. For --config, after the files of the search.",
                )
                files[BEST] = best_toml(best.settings, comments).encode()
            places = [(open_storage(str(self.folder)), "")]
            if self.ctx.workspace.local_path("") is None:
                places.append((self.ctx.workspace, f"tune/{table.name}/"))
            for storage, prefix in places:
                for name, data in files.items():
                    storage.write_bytes(f"{prefix}{name}", data)
        return table
