"""One trial of a search: the training program itself with the trial's values, in a place of its own."""

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.checkpoint.store import Checkpoint, CheckpointStore
from pipeline.context import NoEvents, StageContext, share_tokens
from pipeline.core.errors import ConfigError, NumericError, Preempted, TransientError, TrnpipeError
from pipeline.core.stop import StopSignal
from pipeline.io.atomic import make_dirs
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.world import World
from pipeline.settings import Settings, settings_hash
from pipeline.telemetry.events import EventLog
from pipeline.train.build import open_run
from pipeline.train.config import CheckpointConfig, batch_share
from pipeline.train.inputs import RunInputs, gather_inputs
from pipeline.train.run import Rungs, train
from pipeline.tune.config import Hyperband
from pipeline.tune.journal import OpenTrial
from pipeline.tune.space import Space

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

    def settings(self, opened: OpenTrial) -> Settings:
        return self.of_trial(self.space.apply(opened.record.values))

    def of_trial(self, settings: Settings) -> Settings:
        """Settings with what a search sets for every trial."""
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
                "train": settings.train.model_copy(update=train),
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
        self.folder, self.scratch = folder, scratch
        self.storage = open_storage(str(folder))
        make_dirs(folder)

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    def step(self) -> int:
        """Of the newest checkpoint; 0 without one."""
        store = CheckpointStore(self.storage, CYCLE, cache_dir=self.scratch, emit=NoEvents().emit)
        return max(store.steps(), default=0)

    def clear(self) -> None:
        """Remove what only a trial under way needs."""
        self.storage.delete_prefix("checkpoints/")
        shutil.rmtree(self.scratch, ignore_errors=True)


class _Reported:
    """Tells the journal of every rung, and the run whether to go on. Its clock starts with the attempt."""

    def __init__(self, opened: OpenTrial, band: Hyperband) -> None:
        self._opened, self._band = opened, band
        self._before_s, self._started = opened.record.seconds, time.monotonic()
        self.is_pruned = False

    def is_due(self, step: int) -> bool:
        return step in self._band.rungs

    def is_hopeless(self, step: int, value: float) -> bool:
        self._opened.report(step, value)
        self.note()
        self.is_pruned = step < self._band.max_steps and self._opened.is_pruned()
        return self.is_pruned

    def note(self) -> None:
        self._opened.note(seconds=self._before_s + time.monotonic() - self._started)


def run_trial(basis: Basis, opened: OpenTrial, place: TrialFolder, ctx: StageContext) -> None:
    """Train it to its end, from where an earlier attempt was, and write down how it ended.

    Values that do not go together and training that diverges are ends of a trial like others. Every other error is
    raised: Preempted and TransientError leave the trial to be continued.
    """
    settings = basis.settings(opened)
    try:
        inputs = basis.inputs(settings, ctx.workspace)
    except ConfigError as error:
        opened.fail(error.seen)
        return
    starts = opened.record.starts
    opened.note(starts=[*starts, place.step()])
    rungs = _Reported(opened, settings.tune.hyperband)
    try:
        _train(settings, inputs, basis, rungs, place, ctx)
    except NumericError as error:
        opened.fail(error.seen)
    except (Preempted, TransientError):
        rungs.note()
        opened.note(starts=starts)
        raise
    except TrnpipeError:
        raise
    except Exception as error:  # a bug or no memory: raised, but the next run of the command tries other values
        opened.fail(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        place.clear()
        raise
    else:
        rungs.note()
        if rungs.is_pruned:
            opened.prune()
        else:
            opened.complete(opened.record.metric_by_step[settings.tune.steps])
    place.clear()


def is_stuck(starts: tuple[int, ...], step: int) -> bool:
    """Whether the last attempts all began at `step` and ended without a word."""
    return len(starts) >= MOST_STARTS and set(starts[-MOST_STARTS:]) == {step}


def _train(
    settings: Settings, inputs: RunInputs, basis: Basis, rungs: _Reported, place: TrialFolder, ctx: StageContext
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
            train(opened, Rungs(rungs.is_due, rungs.is_hopeless))
    finally:
        events.close()
