"""Records one side of a comparison: scores of the checkpoint, then the ordinary training run from it.

A process has one backend, and some (XLA, CUDA) keep the device as long as it lives: so every side has its own, which is
`python -m pipeline.parity.record TASK.json PARENT_PID`. Everything is written as it comes, so that a killed recording
goes on where it stopped; the record is one file beside the scores, written last. It can have been made anywhere.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from pipeline.backends import NAMES
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.compile.neuron import use_neuron_cache
from pipeline.context import StageContext, share_tokens
from pipeline.core.errors import (
    EXIT_OK,
    CheckpointError,
    ConfigError,
    DataError,
    TransientError,
    TrnpipeError,
    exit_code_of,
)
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import Selection, Split, open_rows
from pipeline.evaluate.holdout import HoldoutOrder, choose_rows, read_column
from pipeline.evaluate.score import PartStore, Score, ScoreProgram, Scorer, figures
from pipeline.evaluate.scores import ScoreInfo, ScoreSet, VectorSample, load_scores, save_scores
from pipeline.io import atomic
from pipeline.io.commit import read_manifest, require_manifest
from pipeline.io.storage import Storage, open_storage, read_record
from pipeline.model.config import ModelConfig
from pipeline.model.hf import from_hf
from pipeline.model.ops import unit
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.gang import Gang, open_device
from pipeline.parallel.world import World
from pipeline.parity.compare import Curve, Evaluation, Precision, RecordedSide, Side, SideRecord
from pipeline.proc.signals import stop_on_signals
from pipeline.registry.checkpoints import start_place
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared, mined_negatives
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventLog, EventName, read_events
from pipeline.train.build import RunConfig, open_run
from pipeline.train.config import CheckpointConfig, TrainConfig
from pipeline.train.inputs import RunInputs, gather_inputs, identity_parts
from pipeline.train.loop import train

BACKENDS: tuple[str, ...] = tuple(name for name in NAMES if name != "auto")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
RECORD, SCORES, WORK = "record.json", "scores", "work"
EVENTS, MARK, CYCLE = "events.jsonl", "run", "parity"
SPLIT: Split = "valid"
_POLL_S, _SAVE_EVERY_S = 0.2, 60.0


def parse_side(text: str, precision: Precision) -> Side | None:
    """`cpu` or `cuda:bf16`; None for anything else, which names a place. `precision`: where none is given.

    Raises ConfigError for a precision that is not known.
    """
    backend, colon, given = text.partition(":")
    if backend not in BACKENDS:
        return None
    for known in PRECISIONS:
        if (given if colon else precision) == known:
            return Side(backend, known)
    choice = ", ".join(f"{backend}:{known}" for known in PRECISIONS)
    raise ConfigError(f"side {text!r}", expected=f"{backend}, or with a precision: {choice}")


def sides_text() -> str:
    """What may be typed, for messages."""
    return f"{', '.join(BACKENDS)}, each also as BACKEND:{'|'.join(PRECISIONS)}, or a folder or URI of a recorded side"


def find_record(place: Storage) -> SideRecord | None:
    """The record in a place, None when there is none. Raises DataError for something else under its name."""
    again = "record the side again, into another folder"
    return read_record(place, RECORD, SideRecord, "a record of a side", "trnpipe parity", next_command=again)


def load_side(place: Storage, cache_dir: Path) -> RecordedSide:
    """A recorded side with every byte of its scores verified. Raises DataError."""
    record = find_record(place)
    if record is None:
        raise DataError(
            f"{place.uri('')} holds no recorded side",
            expected=sides_text(),
            next_command="record it with trnpipe parity SIDE --to FOLDER, on the machine that has the device",
        )
    if require_manifest(place, SCORES).digest != record.scores:
        raise DataError(
            f"{place.uri(SCORES)} are not the scores that {RECORD} beside it was written with",
            expected="the folder as it was recorded",
            next_command="copy it again as a whole, or record the side again",
        )
    return RecordedSide(place.root, record, load_scores(place, SCORES, cache_dir))


class SideTask(Record):
    """One side to record, as its process is told: everything is decided before it starts."""

    settings: Settings
    side: Side
    run: str
    """Names what is computed: sides of one run can be compared."""
    place: str
    """URI of the folder for the record."""
    checkpoint: tuple[str, str]
    """Root URI of its storage, and prefix."""
    token_sets: tuple[str, ...]
    negatives: str | None = None
    """Prefix of those that were mined for the cycle."""
    tokenizer: str
    scratch: Path
    """A folder for this side alone."""
    shared_scratch: Path
    """Downloads that all may use."""
    settings_hash: str
    code_version: str

    @property
    def train(self) -> TrainConfig:
        """As set, but of `parity.steps`, with evaluations as often as parity wants them, and without an earlier end.

        A metric that is half of a search becomes its other half: what is compared are scores of pairs.
        """
        parity, metric = self.settings.parity, self.settings.train.metric
        return self.settings.train.model_copy(
            update={
                "max_steps": parity.steps,
                "evaluate_every": parity.evaluate_every,
                "evaluate_rows": parity.rows,
                "precision": self.side.precision,
                "metric": "macro_f1" if metric == "combined" else metric,
                "deadline": None,
                "patience": 0,
            }
        )

    @property
    def model(self) -> ModelConfig:
        """Without dropout: every device draws other random numbers."""
        return self.settings.model.model_copy(update={"dropout": 0.0})

    @property
    def label(self) -> str:
        return f"{self.side.name} of run {self.run}"


def make_task(settings: Settings, ctx: StageContext, side: Side, place: str = "") -> SideTask:
    """The task of one side. `place`: folder or URI for the record; empty: in the workspace, by what is computed.

    Raises ConfigError, CheckpointError when there is no checkpoint, DataError when there is no prepared data.
    """
    if settings.train.metric == "retrieval_ndcg":
        raise ConfigError(
            "train.metric is retrieval_ndcg: parity compares scores of pairs",
            expected="a model with a trained relevance head, and a metric of pairs",
            next_command="--train.metric macro_f1",
        )
    prepared, negatives = load_prepared(ctx), mined_negatives(ctx)
    named = settings.parity.checkpoint
    if named:
        start = start_place(named, settings, ctx.workspace)
    else:
        result = ctx.earlier("train")
        start = None if result is None else (ctx.workspace, result.outputs["checkpoint"])
    if start is None:
        reasons = {"": "this cycle is not trained", "incumbent": "nothing is promoted"}
        raise ConfigError(
            f"there is no checkpoint to start from: {reasons.get(named, f'parity.checkpoint is {named}')}",
            expected="a trained model",
            next_command="trnpipe train, or --parity.checkpoint WORKSPACE/checkpoints/CYCLE/step-N",
        )
    storage, prefix = start
    manifest = read_manifest(storage, prefix)
    if manifest is None:
        raise CheckpointError(
            f"{storage.uri(prefix)} holds no committed checkpoint",
            expected="a folder with a MANIFEST.json",
            next_command="--parity.checkpoint WORKSPACE/checkpoints/CYCLE/step-N",
        )
    parity = settings.parity.model_dump(mode="json", include={"steps", "evaluate_every", "rows", "vector_rows"})
    run = fingerprint(
        {
            "checkpoint": manifest.digest,
            "token_sets": list(prepared.token_sets),
            "negatives": negatives,
            "train": settings.train.model_dump(mode="json", exclude={"start", "precision", "deadline", "on_deadline"}),
            "model": settings.model.model_dump(mode="json"),
            "parity": parity,
            "code_version": ctx.code_version,
        }
    )[:12]
    return SideTask(
        settings=settings,
        side=side,
        run=run,
        place=place or ctx.workspace.uri(f"cycles/{ctx.cycle}/parity/sides/{run}/{side.name}"),
        checkpoint=(storage.root, prefix),
        token_sets=prepared.token_sets,
        negatives=negatives,
        tokenizer=prepared.tokenizer,
        scratch=ctx.scratch / "parity" / f"{run}-{side.name}",
        shared_scratch=ctx.scratch,
        settings_hash=ctx.settings_hash,
        code_version=ctx.code_version,
    )


def record_side(task: SideTask, stop: StopSignal) -> int:
    """Record a side in a process of its own; its exit code. It has told what went wrong.

    Raises TransientError when it was killed.
    """
    file = task.scratch / "task.json"
    atomic.make_dirs(task.scratch)
    atomic.write_bytes_atomic(file, task.model_dump_json(indent=1).encode())
    command = [sys.executable, "-m", "pipeline.parity.record", str(file), str(os.getpid())]
    # A session of its own: Ctrl-C reaches us alone, and we pass it on once.
    child = subprocess.Popen(command, start_new_session=True)  # noqa: S603 - a list, no shell
    while child.poll() is None:
        if stop.wait(_POLL_S):
            child.terminate()
            child.wait()  # the signal's grace, and no longer, is its own
    code = int(child.returncode)
    if code < 0:
        raise TransientError(
            f"the process of {task.side.name} was ended by signal {-code}",
            expected="a process that lives until its side is recorded; signal 9 mostly means that memory ran out",
            next_command="run the same command again; it continues where it stopped",
        )
    return code


def main(task_file: Path, parent: int) -> int:
    """The process of a side. The exit code of core/errors.py; only bugs show a traceback."""
    task, stop, console = SideTask.model_validate_json(task_file.read_bytes()), StopSignal(), Console()
    settings = task.settings
    warning = use_neuron_cache(settings.compile, settings.workspace, task.side.backend, os.environ)
    if warning:
        console.warn(warning)
    threading.Thread(target=_stop_with_parent, args=(parent, stop), name="parent", daemon=True).start()
    with stop_on_signals(stop):
        try:
            record(task, stop, console)
        except TrnpipeError as error:
            print(f"trnpipe parity {task.side.name}: {type(error).__name__}: {error}", file=sys.stderr)
            return exit_code_of(error)
    return EXIT_OK


def _stop_with_parent(parent: int, stop: StopSignal) -> None:
    """A parent killed with SIGKILL cannot tell us; being handed to another parent does."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    stop.set("the end of the process that started it")


def record(task: SideTask, stop: StopSignal, console: Console) -> SideRecord:
    """Record a side, or find it recorded. Raises TrnpipeError; Preempted when told to stop."""
    atomic.make_dirs(task.scratch)
    share_tokens(task.shared_scratch, task.scratch)
    with atomic.exclusive(task.scratch, stop):
        place = open_storage(task.place, retry=task.settings.storage, stop=stop)
        earlier = find_record(place)
        if earlier is not None:
            _check_label(task, place, f"{earlier.side.name} of run {earlier.run}")
            console.info(
                f"parity: {earlier.side.name} was recorded at {earlier.finished:%Y-%m-%d %H:%M:%S} UTC; "
                f"delete {place.root} to record it anew"
            )
            return earlier
        # Nothing of another task may be taken for a part of this one.
        if not place.write_if_absent(f"{WORK}/{MARK}", task.label.encode()):
            _check_label(task, place, place.read_bytes(f"{WORK}/{MARK}").decode(errors="replace"))
        workspace = open_storage(task.settings.workspace, retry=task.settings.storage, stop=stop)
        root, prefix = task.checkpoint
        source = open_storage(root, retry=task.settings.storage, stop=stop)
        checkpoint = open_checkpoint(source, prefix, task.shared_scratch / "parent")
        # All prepared partitions count as new: the checkpoint may have seen them, and both sides train on the same.
        inputs = gather_inputs(workspace, task.token_sets, checkpoint, task.train, task.model, task.negatives)
        selection = Selection(new=tuple(one.partition for one in inputs.sets), old=(), late=())
        buckets = inputs.sets[0].info.buckets
        mined = inputs.negatives.digest if inputs.negatives else ""
        identity = identity_parts(task.train, task.model, inputs.spec, selection, buckets, checkpoint.digest, mined)
        inputs = replace(inputs, selection=selection, identity=identity)
        if read_manifest(place, SCORES) is None:
            rows = open_rows(workspace, inputs.sets, SPLIT, task.scratch / "tokens")
            scores = _score(task, checkpoint, rows, inputs, place, stop, console)
            save_scores(place, SCORES, scores, task.scratch)
        scores = load_scores(place, SCORES, task.scratch / "scores")
        _train(task, workspace, inputs, stop, console)
        return _finish(task, place, inputs, scores, console)


def _check_label(task: SideTask, place: Storage, found: str) -> None:
    if found != task.label:
        raise ConfigError(
            f"{place.root} holds {found}",
            expected=f"nothing, or {task.label}",
            next_command="name another folder with --to, or delete that one",
        )


def _train(task: SideTask, workspace: Storage, inputs: RunInputs, stop: StopSignal, console: Console) -> None:
    """The ordinary training run, with its checkpoints (only to continue from) and events below the record."""
    settings = task.settings.model_copy(
        update={
            "train": task.train,
            "model": task.model,
            "checkpoint": CheckpointConfig(every_steps=task.settings.parity.evaluate_every, keep_last=1),
            "compile": task.settings.compile.model_copy(update={"on_unknown_graph": "warn"}),
            "log": task.settings.log.model_copy(update={"tensorboard": False}),
            "backend": task.side.backend,
        }
    )
    after_stop = open_storage(f"{task.place.rstrip('/')}/{WORK}", retry=settings.storage, stop=StopSignal())
    events = EventLog(after_stop, EVENTS)
    ctx = StageContext(
        settings=settings,
        workspace=workspace,
        workspace_after_stop=after_stop,
        cycle=CYCLE,
        scratch=task.scratch,
        events=events,
        console=console,
        stop=stop,
        world=World(),
        settings_hash=task.settings_hash,
        code_version=task.code_version,
    )
    tokenizer = workspace.read_bytes(f"{task.tokenizer}/tokenizer.json")
    try:
        config = RunConfig(
            settings.backend, settings.model, settings.train, settings.checkpoint, settings.log, settings.health
        )
        with open_run(config, ctx, inputs, tokenizer) as opened:
            train(opened)
    finally:
        events.close()


def _finish(task: SideTask, place: Storage, inputs: RunInputs, scores: ScoreSet, console: Console) -> SideRecord:
    """Put it all together; what was only to continue from goes."""
    metric, events = task.train.metric, read_events(place, f"{WORK}/{EVENTS}")
    arrays = {name: getattr(scores, name) for name in ("query_id", "label", "gain", "logits")}
    reached = figures(arrays, scores.info.label_gains)
    start = Evaluation(step=0, metric=float(getattr(reached, metric)), loss=reached.loss)
    made = SideRecord(
        run=task.run,
        backend=task.side.backend,
        precision=task.side.precision,
        device=scores.info.device,
        checkpoint=scores.info.checkpoint,
        digest=scores.info.digest,
        identity={name: value for name, value in inputs.identity.items() if name != "train.precision"},
        metric=metric,
        evaluations=(start, *evaluations_of(events, metric)),
        curve=curve_of(events),
        scores=require_manifest(place, SCORES).digest,
        settings_hash=task.settings_hash,
        code_version=task.code_version,
        finished=datetime.now(UTC),
    )
    place.write_bytes(RECORD, made.model_dump_json(indent=1).encode() + b"\n")
    for name in ("checkpoints", "scores", "vectors"):  # rows lie in the last two until all are done
        place.delete_prefix(f"{WORK}/{name}/")
    console.info(f"parity: {task.side.name} is recorded in {place.root}")
    return made


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


def _score(
    task: SideTask,
    checkpoint: Checkpoint,
    rows: TokenRows,
    inputs: RunInputs,
    place: Storage,
    stop: StopSignal,
    console: Console,
) -> ScoreSet:
    """Scores of all rows asked for, and the embeddings of some, as training's evaluations compute them.

    Raises DataError for an empty holdout, Preempted.
    """
    state, settings, train = checkpoint.state, task.settings.parity, task.train
    order = choose_rows(read_column(rows, "query_id"), settings.rows)
    if not order.total:
        raise DataError(
            "the holdout is empty",
            expected=f"rows in the {SPLIT} split, in queries of at most parity.rows rows",
            next_command="raise data.valid_fraction, or give a split column",
        )
    backend = open_device(task.side.backend, World())
    with torch.device("meta"):
        model = RelevanceModel(task.model, state.inputs)
    weights = from_hf(checkpoint.weights(), model.state_dict(), source=checkpoint.prefix)
    program = ScoreProgram(model, backend, task.side.precision, rows.buckets)
    program.load(weights)
    batch_size = min(train.micro_batch_size, train.global_batch_size)
    scorer = Scorer(backend, Gang(World(), timeout_s=1.0), stop, batch_size, _SAVE_EVERY_S)

    def run(score: Score, chosen: HoldoutOrder, name: str) -> Arrays:
        parts = PartStore(place, f"{WORK}/{name}", task.scratch / name, console.warn)
        with console.progress(f"parity: {task.side.name} {name}", chosen.total, "rows") as advance:
            return scorer.run(score, rows, chosen, parts, advance)

    def pairs(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Query and product embeddings, each of length one: fp32 [B, D] on the device."""
        outputs = program.outputs(batch)
        both = {"query": unit(outputs.query), "product": unit(outputs.product)}
        backend.step_boundary(list(both.values()))
        return both

    scored = run(lambda batch: {"logits": program.outputs(batch).logits}, order, "scores")
    embedded = run(pairs, _sample(order, rows, settings.vector_rows), "vectors")
    info = ScoreInfo(
        role="parity",
        checkpoint=checkpoint.uri,
        digest=checkpoint.digest,
        cycle=state.cycle,
        step=state.step,
        split=SPLIT,
        backend=task.side.backend,
        device=backend.device_name(),
        precision=task.side.precision,
        data=tuple(one.info.fingerprint for one in inputs.sets),
        labels=state.inputs.labels,
        label_gains=state.inputs.label_gains,
        rows=len(scored["sample_id"]),
        vector_rows=len(embedded["sample_id"]),
        settings_hash=task.settings_hash,
        code_version=task.code_version,
    )
    return ScoreSet(
        info=info,
        sample_id=scored["sample_id"],
        query_id=scored["query_id"],
        label=scored["label"].astype(np.int32),
        gain=scored["gain"],
        logits=scored["logits"],
        vectors=VectorSample(embedded["sample_id"], embedded["query"], embedded["product"]),
    )


def _sample(order: HoldoutOrder, rows: TokenRows, limit: int) -> HoldoutOrder:
    """Rows of which embeddings are kept: a function of their ids alone."""
    columns = zip(read_column(rows, "sample_id"), order.rows, strict=True)
    keys = [mix64(ids[chosen].astype(np.uint64)) for ids, chosen in columns]
    wanted = min(limit, order.total)
    last = np.partition(np.concatenate(keys), wanted - 1)[wanted - 1]
    return HoldoutOrder(tuple(chosen[key <= last] for chosen, key in zip(order.rows, keys, strict=True)))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
