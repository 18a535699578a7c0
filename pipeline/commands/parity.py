"""`trnpipe parity A [B]`: the same checkpoint and training on two sides, compared; with A alone, recorded for later.

A side is a backend with a precision (`cpu`, `cuda:bf16`), computed here, or a place where one was recorded before, on
this machine or another. Some backends (XLA, CUDA) keep the device as long as their process lives, so every side has its
own. A side that is stopped or killed continues from its last checkpoint; its record is written last.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from pipeline.backends import NAMES
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.commands import ToolCall
from pipeline.compile.neuron import use_neuron_cache
from pipeline.context import StageContext, open_context, share_tokens
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, GateRefused
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import Say, progress
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import Selection, open_rows
from pipeline.evaluate.holdout import choose_rows, read_column
from pipeline.evaluate.parity import Curve, Evaluation, Precision, RecordedSide, SideRecord, compare_sides
from pipeline.evaluate.score import ScoreProgram, Scorer, figures
from pipeline.evaluate.scores import load_arrays, save_arrays
from pipeline.io import atomic
from pipeline.io.commit import read_manifest, require_manifest
from pipeline.io.storage import Storage, open_storage, read_record
from pipeline.model.hf import from_hf
from pipeline.model.ops import unit
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.gang import Gang, open_device
from pipeline.parallel.world import TRACE_FILE, World
from pipeline.proc.pool import run_tasks
from pipeline.registry.checkpoints import start_place
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared, mined_negatives
from pipeline.telemetry.events import EventLog, EventName, read_events
from pipeline.train.build import RunConfig, open_run
from pipeline.train.config import CheckpointConfig
from pipeline.train.inputs import gather_inputs, identity_parts
from pipeline.train.loop import train as train_model

BACKENDS = tuple(name for name in NAMES if name != "auto")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
RECORD, ARRAYS, EVENTS, KIND = "record.json", "arrays", "events.jsonl", "parity side"
VECTOR_ROWS = 1000
"""Rows of which embeddings are compared."""
_EVALUATIONS = 6


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Record the sides that are computed here, then compare. Raises GateRefused if they are too far apart."""
    words, to = call.arguments, call.options.get("--to", "")
    sides = [_parse(word, settings.train.precision) for word in words]
    if (to and len(words) > 1) or sides == [""] or (len(words) == 2 and sides[0] == sides[1] != ""):
        choice = f"{', '.join(BACKENDS)}, each also as BACKEND:{'|'.join(PRECISIONS)}"
        raise ConfigError(
            f"sides {' and '.join(words)}{' with --to' if to else ''}",
            expected=f"two different ones, of {choice}, or a folder or URI of a recorded side; or one with --to",
            next_command="trnpipe parity A B, or trnpipe parity BACKEND --to FOLDER",
        )
    with open_context(settings, stop) as ctx:
        tasks = [make_task(settings, ctx, side, to) if side else None for side in sides]
        places = [task.place if task else word for task, word in zip(tasks, words, strict=True)]
        # What was recorded before is read first: a folder without a record is found before hours of training.
        for place in (place for task, place in zip(tasks, places, strict=True) if task is None):
            load_side(open_storage(place, retry=settings.storage, stop=stop), ctx.scratch / KIND)
        for task in filter(None, tasks):
            doing, threads = f"recording {task.name}", torch.get_num_threads()
            list(run_tasks(record, threads, iter([task]), num_workers=1, stop=stop, doing=doing))
        opened = (open_storage(place, retry=settings.storage, stop=stop) for place in places)
        recorded = [load_side(storage, ctx.scratch / KIND) for storage in opened]
        if len(words) == 1:
            say(f"compare it with another side: trnpipe parity {recorded[0].uri} SIDE")
            return EXIT_OK
        report = compare_sides(recorded[0], recorded[1], settings.parity)
        for line in report.lines():
            say(line)
        key = f"cycles/{ctx.cycle}/parity/{report.a}-{report.b}/parity.json"
        ctx.workspace.write_bytes(key, report.model_dump_json(indent=1).encode() + b"\n")
        say(f"report {ctx.workspace.uri(key)}")
    if report.failed:
        raise GateRefused(
            f"{report.a} and {report.b} differ too much: {'; '.join(check.line for check in report.failed)}",
            expected="every figure within its bar",
            next_command="see parity.json for where they differ",
        )
    return EXIT_OK


def _parse(text: str, precision: Precision) -> str:
    """Return BACKEND:PRECISION; nothing for a place. Raises ConfigError for a precision that is not known."""
    backend, colon, given = text.partition(":")
    if backend not in BACKENDS:
        return ""
    if colon and given not in PRECISIONS:
        raise ConfigError(f"side {text!r}", expected=f"{backend}, or with a precision: {', '.join(PRECISIONS)}")
    return f"{backend}:{given if colon else precision}"


def load_side(place: Storage, cache_dir: Path) -> RecordedSide:
    """Load a recorded side, every byte of its arrays verified. Raises DataError."""
    again = "record the side with trnpipe parity SIDE --to FOLDER, on the machine that has the device"
    record = read_record(place, RECORD, SideRecord, "a record of a side", "trnpipe parity", next_command=again)
    if record is None or require_manifest(place, ARRAYS).digest != record.scores:
        seen = f"{place.root} holds no recorded side with its arrays"
        raise DataError(seen, expected="the whole folder of a recorded side", next_command=again)
    return RecordedSide(place.root, record, load_arrays(place, ARRAYS, KIND, cache_dir)[0])


@dataclass(frozen=True)
class SideTask:
    """One side to record, in a process of its own.

    `settings`: of its training run. `run`: names what is computed, the same for sides that can be compared. `place`:
    URI of the folder for the record.
    """

    settings: Settings
    run: str
    place: str

    @property
    def name(self) -> str:
        return f"{self.settings.backend}.{self.settings.train.precision}"


def make_task(settings: Settings, ctx: StageContext, side: str, place: str) -> SideTask:
    """Make the task of a side. `place`: URI for the record; empty: in the workspace, by what is computed.

    Raises ConfigError or CheckpointError if there is no checkpoint, DataError if there is no prepared data.
    """
    if settings.train.metric == "retrieval_ndcg":
        raise ConfigError(
            "train.metric is retrieval_ndcg: parity compares scores of pairs",
            expected="a model with a trained relevance head, and a metric of pairs",
            next_command="--train.metric macro_f1",
        )
    backend, _, precision = side.partition(":")
    every = max(1, settings.parity.steps // _EVALUATIONS)
    changes: dict[str, dict[str, Any]] = {
        "train": {
            "max_steps": settings.parity.steps,
            "evaluate_every": every,
            "evaluate_rows": settings.parity.rows,
            "precision": precision,
            # Half of this metric is a search; what is compared are scores of pairs.
            "metric": "macro_f1" if settings.train.metric == "combined" else settings.train.metric,
            "deadline": None,
            "patience": 0,
        },
        "model": {"dropout": 0.0},  # every device draws other random numbers
        "compile": {"on_unknown_graph": "warn"},
        "log": {"tensorboard": False},
    }
    sections = {name: getattr(settings, name).model_copy(update=values) for name, values in changes.items()}
    of_side = settings.model_copy(
        update={**sections, "backend": backend, "checkpoint": CheckpointConfig(every_steps=every, keep_last=1)}
    )
    run = fingerprint(
        {
            "checkpoint": _start(settings, ctx).digest,
            "token_sets": list(load_prepared(ctx).token_sets),
            "negatives": mined_negatives(ctx),
            "train": of_side.train.model_dump(mode="json", exclude={"start", "precision"}),
            "model": of_side.model.model_dump(mode="json"),
            "code_version": ctx.code_version,
        }
    )[:12]
    default = f"cycles/{ctx.cycle}/parity/sides/{run}/{backend}.{precision}"
    return SideTask(of_side, run, place or ctx.workspace.uri(default))


def _start(settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint that both sides start from. Raises ConfigError or CheckpointError if there is none."""
    named, trained = settings.parity.checkpoint, ctx.earlier("train")
    start = (ctx.workspace, trained.outputs["checkpoint"]) if trained else None
    if named:
        start = start_place(named, settings, ctx.workspace)
    if start is None:
        raise ConfigError(
            f"there is no checkpoint to start from: parity.checkpoint is {named or 'not set'}, cycle {ctx.cycle} is"
            f" {'trained' if trained else 'not trained'}",
            expected="a trained model",
            next_command="trnpipe train, or --parity.checkpoint WORKSPACE/checkpoints/CYCLE/step-N",
        )
    return open_checkpoint(*start, ctx.scratch / "parent")


def record(threads: int, task: SideTask) -> None:
    """Record a side unless it is recorded already: the scores of the checkpoint, then the training run from it."""
    settings = task.settings
    torch.set_num_threads(threads)  # worker processes have one
    warning = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
    # The log of events is left to the process that started this one.
    with open_context(settings, StopSignal(), {**os.environ, TRACE_FILE: ""}) as ctx:
        if warning:
            ctx.console.warn(warning)
        scratch = ctx.scratch / "parity" / f"{task.run}-{task.name}"
        atomic.make_dirs(scratch)
        share_tokens(ctx.scratch, scratch)
        with atomic.exclusive(scratch, ctx.stop):
            _record(task, replace(ctx, scratch=scratch), _start(settings, ctx))


def _record(task: SideTask, ctx: StageContext, checkpoint: Checkpoint) -> None:
    settings, prepared, label = task.settings, load_prepared(ctx), f"{task.name} of run {task.run}"
    train, model, place = (
        settings.train,
        settings.model,
        open_storage(task.place, retry=settings.storage, stop=ctx.stop),
    )
    inputs = gather_inputs(ctx.workspace, prepared.token_sets, checkpoint, train, model, mined_negatives(ctx))
    # All prepared partitions count as new: the checkpoint may have seen them, and both sides train on the same.
    selection = Selection(new=tuple(one.partition for one in inputs.sets), old=(), late=())
    buckets, mined = inputs.sets[0].info.buckets, inputs.negatives.digest if inputs.negatives else ""
    identity = identity_parts(train, model, inputs.spec, selection, buckets, checkpoint.digest, mined)
    inputs = replace(inputs, selection=selection, identity=identity)
    if read_manifest(place, ARRAYS) is None:
        rows = open_rows(ctx.workspace, inputs.sets, "valid", ctx.scratch / "tokens")
        scored, device = _score(task, checkpoint, rows, ctx.stop)
        save_arrays(place, ARRAYS, KIND, scored, ctx.scratch, {"side": label, "device": device})
    manifest = require_manifest(place, ARRAYS)
    # Nothing of another task may be taken for a part of this one.
    if manifest.fields.get("side") != label:
        raise ConfigError(
            f"{place.root} holds {manifest.fields.get('side')}",
            expected=f"nothing, or {label}",
            next_command="name another folder with --to, or delete that one",
        )
    if place.stat(RECORD) is not None:
        return
    arrays, _ = load_arrays(place, ARRAYS, KIND, ctx.scratch / ARRAYS)
    # The ordinary training, with its checkpoints and events below the record.
    work = open_storage(f"{task.place.rstrip('/')}/work", retry=settings.storage, stop=StopSignal())
    log = EventLog(work, EVENTS)
    config = RunConfig(settings.backend, model, train, settings.checkpoint, settings.log, settings.health)
    tokenizer = ctx.workspace.read_bytes(f"{prepared.tokenizer}/tokenizer.json")
    run = replace(ctx, workspace_after_stop=work, cycle="parity", events=log)
    try:
        with open_run(config, run, inputs, tokenizer) as opened:
            train_model(opened)
    finally:
        log.close()
    events, gains = list(read_events(work, EVENTS)), inputs.sets[0].info.label_gains
    reached = figures({name: arrays[name] for name in ("query_id", "label", "gain", "logits")}, gains)
    start = Evaluation(step=0, metric=float(getattr(reached, train.metric)), loss=reached.loss)
    made = SideRecord(
        run=task.run,
        backend=settings.backend,
        precision=train.precision,
        device=str(manifest.fields["device"]),
        checkpoint=checkpoint.uri,
        digest=checkpoint.digest,
        identity={name: value for name, value in identity.items() if name != "train.precision"},
        metric=train.metric,
        label_gains=gains,
        evaluations=(start, *_evaluations(events, train.metric)),
        curve=_curve(events),
        scores=manifest.digest,
        code_version=ctx.code_version,
        finished=datetime.now(UTC),
    )
    place.write_bytes(RECORD, made.model_dump_json(indent=1).encode() + b"\n")
    place.delete_prefix("work/checkpoints/")  # only to continue from
    ctx.console.info(f"parity: {task.name} is recorded in {place.root}")


def _score(task: SideTask, checkpoint: Checkpoint, rows: TokenRows, stop: StopSignal) -> tuple[Arrays, str]:
    """Score the holdout as training evaluates it. Return the arrays of a side and the name of the device.

    Raises DataError for an empty holdout, Preempted.
    """
    settings, state = task.settings.train, checkpoint.state
    order = choose_rows(read_column(rows, "query_id"), task.settings.parity.rows)
    if not order.total:
        raise DataError(
            "the holdout is empty",
            expected="rows in the valid split, in queries of at most parity.rows rows",
            next_command="raise data.valid_fraction, or give a split column",
        )
    backend = open_device(task.settings.backend, World())
    with torch.device("meta"):
        model = RelevanceModel(task.settings.model, state.inputs)
    weights = from_hf(checkpoint.weights(), model.state_dict(), source=checkpoint.prefix)
    one_rate = settings.optimizer.has_one_rate  # as in training: the same graphs
    program = ScoreProgram(model, backend, settings.precision, rows.buckets, has_one_rate=one_rate)
    program.load(weights)

    def outputs(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        found = program.outputs(batch)
        both = {"query": unit(found.query), "product": unit(found.product)}
        backend.step_boundary(list(both.values()))
        return {"logits": found.logits, **both}

    scorer = Scorer(
        backend, Gang(World(), timeout_s=1.0), stop, min(settings.micro_batch_size, settings.global_batch_size)
    )
    with progress(f"parity: {task.name} scores", order.total, "rows") as advance:
        scored = scorer.run(outputs, rows, order, None, advance)
    # Embeddings of some rows, chosen by a hash of their ids.
    some = np.sort(np.argsort(mix64(scored["sample_id"].astype(np.uint64)), kind="stable")[:VECTOR_ROWS])
    kept = {name: scored[name] for name in ("sample_id", "query_id", "label", "gain", "logits")}
    return kept | {name: scored[name][some] for name in ("query", "product")}, backend.device_name()


def _evaluations(events: Iterable[dict[str, Any]], metric: str) -> tuple[Evaluation, ...]:
    """Return the evaluations during training by step. One that was repeated after a kill counts as it was last."""
    found = {
        event["step"]: Evaluation(step=event["step"], metric=float(event[metric]), loss=float(event["loss"]))
        for event in events
        if event["event"] == EventName.HOLDOUT_EVALUATED and "best" in event  # not those of the finished candidate
    }
    return tuple(found[step] for step in sorted(found))


def _curve(events: Iterable[dict[str, Any]]) -> Curve:
    """Return every training step; one that was repeated after a kill counts as it was last."""
    rows: dict[int, tuple[float, float, str]] = {}
    for event in events:
        if event["event"] == EventName.TRAIN_STEPS:
            made = zip(event["losses"], event["grad_norms"], event["samples"], strict=True)
            for step, (loss, norm, samples) in enumerate(made, start=event["step"] - len(event["losses"]) + 1):
                rows[step] = (float(loss), float(norm), samples)  # not finite: stored as a word
    losses, norms, samples = zip(*(rows[step] for step in sorted(rows)), strict=True)
    return Curve(losses=losses, grad_norms=norms, samples=samples)
