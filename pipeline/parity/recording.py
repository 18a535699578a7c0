"""Records one side, in a process of its own: scores of the checkpoint, then the training run from it.

Everything is written as it comes, so that a killed recording goes on where it stopped.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import StageContext, share_tokens
from pipeline.core.errors import ConfigError
from pipeline.core.stop import StopSignal
from pipeline.data.tokens import Selection, open_rows
from pipeline.evaluate.parity import Curve, Evaluation
from pipeline.evaluate.score import figures
from pipeline.evaluate.scores import ScoreSet, load_scores, save_scores
from pipeline.io import atomic
from pipeline.io.commit import read_manifest, require_manifest
from pipeline.io.storage import Storage, open_storage
from pipeline.parallel.world import World
from pipeline.parity.record import SCORES, WORK, Side, SideRecord, find_record, store_record
from pipeline.parity.scoring import PARTS, SPLIT, SideScorer
from pipeline.parity.task import SideTask
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventLog, EventName, read_events
from pipeline.train.build import open_run
from pipeline.train.identity import identity_parts
from pipeline.train.inputs import RunInputs, gather_inputs
from pipeline.train.run import train

CYCLE = "parity"
EVENTS, MARK = "events.jsonl", "run"


def record(task: SideTask, stop: StopSignal, console: Console) -> SideRecord:
    """Record a side, or find it recorded. Raises TrnpipeError; Preempted when told to stop."""
    atomic.make_dirs(task.scratch)
    share_tokens(task.shared_scratch, task.scratch)
    with atomic.exclusive(task.scratch, stop):
        return _Recording(task, stop, console).run()


@dataclass
class _Recording:
    task: SideTask
    stop: StopSignal
    console: Console

    def run(self) -> SideRecord:
        task = self.task
        place = self._open(task.place)
        earlier = find_record(place)
        if earlier is not None:
            return self._found(place, earlier)
        self._claim(place)
        workspace = self._open(task.settings.workspace)
        root, prefix = task.checkpoint
        checkpoint = open_checkpoint(self._open(root), prefix, task.shared_scratch / "parent")
        inputs = self._inputs(workspace, checkpoint)
        scores = self._scores(workspace, place, inputs, checkpoint)
        self._train(workspace, inputs)
        return self._finish(place, inputs, scores)

    def _open(self, uri: str) -> Storage:
        return open_storage(uri, retry=self.task.settings.storage, stop=self.stop)

    def _found(self, place: Storage, earlier: SideRecord) -> SideRecord:
        self._check_mark(place, _mark(earlier.run, earlier.side))
        self.console.info(
            f"parity: {earlier.side.name} was recorded at {earlier.finished:%Y-%m-%d %H:%M:%S} UTC; "
            f"delete {place.root} to record it anew"
        )
        return earlier

    def _claim(self, place: Storage) -> None:
        """Nothing of another task may be taken for a part of this one."""
        mine = _mark(self.task.run, self.task.side)
        if not place.write_if_absent(f"{WORK}/{MARK}", mine.encode()):
            self._check_mark(place, place.read_bytes(f"{WORK}/{MARK}").decode(errors="replace"))

    def _check_mark(self, place: Storage, found: str) -> None:
        mine = _mark(self.task.run, self.task.side)
        if found != mine:
            raise ConfigError(
                f"{place.root} holds {found}",
                expected=f"nothing, or {mine}",
                next_command="name another folder with --to, or delete that one",
            )

    def _inputs(self, workspace: Storage, checkpoint: Checkpoint) -> RunInputs:
        """All prepared partitions count as new: the checkpoint may have seen them, and both sides train on the same."""
        train, model = self.task.train, self.task.model
        inputs = gather_inputs(workspace, self.task.token_sets, checkpoint, train, model, self.task.negatives)
        selection = Selection(new=tuple(one.partition for one in inputs.sets), old=(), late=())
        buckets = inputs.sets[0].info.buckets
        negatives = inputs.negatives.digest if inputs.negatives else ""
        identity = identity_parts(train, model, inputs.spec, selection, buckets, checkpoint.digest, negatives)
        return replace(inputs, selection=selection, identity=identity)

    def _scores(self, workspace: Storage, place: Storage, inputs: RunInputs, checkpoint: Checkpoint) -> ScoreSet:
        """Those of an earlier attempt, or new ones."""
        task = self.task
        if read_manifest(place, SCORES) is None:
            rows = open_rows(workspace, inputs.sets, SPLIT, task.scratch / "tokens")
            data = tuple(one.info.fingerprint for one in inputs.sets)
            scorer = SideScorer(task, checkpoint, rows, data, place, self.stop, self.console)
            save_scores(place, SCORES, scorer.run(), task.scratch)
        return load_scores(place, SCORES, task.scratch / "scores")

    def _train(self, workspace: Storage, inputs: RunInputs) -> None:
        """The real training run, with its checkpoints and events below the record."""
        task = self.task
        settings = task.settings.model_copy(
            update={
                "train": task.train,
                "model": task.model,
                "checkpoint": task.checkpoints,
                "compile": task.settings.compile.model_copy(update={"on_unknown_graph": "warn"}),
                "log": task.settings.log.model_copy(update={"tensorboard": False}),
                "backend": task.side.backend,
            }
        )
        after_stop = open_storage(f"{task.place.rstrip('/')}/{WORK}", retry=settings.storage, stop=StopSignal())
        events = EventLog(after_stop, EVENTS, scratch=task.scratch)
        ctx = StageContext(
            settings=settings,
            workspace=workspace,
            workspace_after_stop=after_stop,
            cycle=CYCLE,
            scratch=task.scratch,
            events=events,
            console=self.console,
            stop=self.stop,
            world=World(),
            settings_hash=task.settings_hash,
            code_version=task.code_version,
        )
        tokenizer = workspace.read_bytes(f"{task.tokenizer}/tokenizer.json")
        try:
            with open_run(settings, ctx, inputs, tokenizer) as opened:
                train(opened)
        finally:
            events.close()

    def _finish(self, place: Storage, inputs: RunInputs, scores: ScoreSet) -> SideRecord:
        """Put it all together; what was only to continue from goes."""
        task, metric = self.task, self.task.train.metric
        events = read_events(place, f"{WORK}/{EVENTS}")
        identity = {name: value for name, value in inputs.identity.items() if name != "train.precision"}
        made = SideRecord(
            run=task.run,
            backend=task.side.backend,
            precision=task.side.precision,
            device=scores.info.device,
            checkpoint=scores.info.checkpoint,
            digest=scores.info.digest,
            identity=identity,
            metric=metric,
            evaluations=(start_of(scores, metric), *evaluations_of(events, metric)),
            curve=curve_of(events),
            scores=require_manifest(place, SCORES).digest,
            settings_hash=task.settings_hash,
            code_version=task.code_version,
            finished=datetime.now(UTC),
        )
        store_record(place, made)
        for name in ("checkpoints", *PARTS):
            place.delete_prefix(f"{WORK}/{name}/")
        self.console.info(f"parity: {task.side.name} is recorded in {place.root}")
        return made


def _mark(run: str, side: Side) -> str:
    """Label of one side of a run."""
    return f"{side.name} of run {run}"


def start_of(scores: ScoreSet, metric: str) -> Evaluation:
    """What the checkpoint itself reaches on the scored rows."""
    arrays = {name: getattr(scores, name) for name in ("query_id", "label", "gain", "logits")}
    reached = figures(arrays, scores.info.label_gains)
    return Evaluation(step=0, metric=float(getattr(reached, metric)), loss=reached.loss)


def evaluations_of(events: Iterable[dict[str, Any]], metric: str) -> tuple[Evaluation, ...]:
    """Evaluations during training, by step. A step that was done again after a kill counts as it was done last."""
    found = {
        event["step"]: Evaluation(step=event["step"], metric=float(event[metric]), loss=float(event["loss"]))
        for event in events
        if event["event"] == EventName.HOLDOUT_EVALUATED and "best" in event  # not those of the finished candidate
    }
    return tuple(found[step] for step in sorted(found))


def curve_of(events: Iterable[dict[str, Any]]) -> Curve:
    """Every training step. Raises RuntimeError when one is missing."""
    rows: dict[int, tuple[float, float, str]] = {}
    for event in events:
        if event["event"] == EventName.TRAIN_STEPS:
            made = zip(event["losses"], event["grad_norms"], event["samples"], strict=True)
            for step, (loss, norm, samples) in enumerate(made, start=event["step"] - len(event["losses"]) + 1):
                rows[step] = (float(loss), float(norm), samples)  # not finite: kept as a word
    if missing := sorted(set(range(1, max(rows, default=1) + 1)) - rows.keys()):
        raise RuntimeError(f"the events of the run lack steps {missing[:5]}")
    losses, norms, samples = zip(*(rows[step] for step in sorted(rows)), strict=True)
    return Curve(losses=losses, grad_norms=norms, samples=samples)
