"""`trnpipe parity A [B]`, which scores and trains the same checkpoint on two sides and compares the results.

A side is a backend with a precision, such as `cpu` or `cuda:bf16`, that runs on this machine, or the folder of a side
that was recorded earlier, possibly on a different machine. If only A is specified, it is recorded for later.

Each side runs in a separate process, because some backends (XLA and CUDA) hold on to the device until their process
ends. A side that was interrupted resumes from its last checkpoint. The record is written last, so that a side with a
record is complete.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from pipeline.backends import NAMES
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.commands import ToolCall
from pipeline.compile.neuron import use_neuron_cache
from pipeline.context import StageContext, link_shared_tokens, open_context
from pipeline.core.arrays import Float64s
from pipeline.core.errors import EXIT_OK, ConfigError, DataError, GateRefused
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import Say, progress
from pipeline.core.record import Record
from pipeline.core.shuffle import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays
from pipeline.data.token_sets import Selection
from pipeline.evaluate.config import ParityConfig
from pipeline.evaluate.holdout import Holdout, open_holdout
from pipeline.evaluate.score import ScoreProgram, Scorer, figures, load_arrays, save_arrays, to_probabilities
from pipeline.io import atomic
from pipeline.io.commit import read_manifest, require_manifest
from pipeline.io.storage import Storage, open_storage, read_record
from pipeline.model.ops import l2_normalize
from pipeline.parallel.process_group import ProcessGroup, open_device
from pipeline.parallel.world import TRACE_FILE, World
from pipeline.proc.pool import run_tasks
from pipeline.registry.checkpoints import locate_start
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared, mined_negatives, taught_outputs
from pipeline.telemetry.events import EventLog, EventName, read_events
from pipeline.train.build import open_run
from pipeline.train.config import CheckpointConfig
from pipeline.train.inputs import gather_inputs, identity_parts
from pipeline.train.loop import train as train_model

Precision = Literal["fp32", "autocast", "bf16"]
BACKENDS = tuple(name for name in NAMES if name != "auto")
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
RECORD, ARRAYS, EVENTS, KIND = "record.json", "arrays", "events.jsonl", "parity side"
ROW_ARRAYS = ("sample_id", "query_id", "label", "gain")
VECTOR_ROWS = 1000
"""Number of rows whose embeddings are compared between sides."""
FIRST_STEPS = 10
"""Number of training steps whose losses and gradients are compared. In later steps, rounding errors are amplified."""
BARS = {
    "holdout_loss": (1e-3, 2e-2),
    "first_losses": (1e-4, 0.1),
    "first_gradients": (1e-3, 0.2),
    "probability": (1e-4, 0.3),
    "mean_probability": (1e-5, 5e-3),
    "correlation": (0.99999, 0.999),
    "cosine": (0.99999, 0.999),
}
"""Tolerances by figure, for two sides in fp32, and for at least one side in bf16 or autocast. For losses and gradients,
these are relative differences. In fp32, XLA:CPU and PyTorch's CPU kernels differ by at most 1/50 of them.

The tolerance of the metric is a setting and doesn't depend on the precision, even though training amplifies rounding
errors. After 300 steps on PriceRunner, accuracies in bf16 differed by 0.08 to 0.2%. In fp32, perturbing the initial
weights by 0.2%, which is the rounding error of bf16, led to a similar difference (0.13%)."""
_AT_LEAST = ("correlation", "cosine")
_EVALUATIONS = 6


class _Figures(Record):
    model_config = ConfigDict(ser_json_inf_nan="strings")


class ValidationPoint(_Figures):
    """An evaluation on the validation split during training. Step 0 is the initial checkpoint."""

    step: int
    metric: float
    loss: float


class TrainingCurve(_Figures):
    """The loss, the gradient norm and a digest of the samples for each training step."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    samples: tuple[str, ...]


class SideRecord(_Figures):
    """The inputs, environment and results of a side."""

    schema_version: Literal[2] = 2
    run: str = Field(description="Fingerprint of the computation, which is equal for sides that can be compared")
    backend: str
    precision: Precision
    device: str = Field(description="Device that the graphs were compiled for, such as xla:CPU")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of the checkpoint manifest, which identifies its content")
    identity: dict[str, str] = Field(
        description="Fingerprints of everything that affects the weights, except for the precision"
    )
    metric: str
    label_gains: tuple[float, ...]
    evaluations: tuple[ValidationPoint, ...] = Field(
        min_length=1, description="Evaluations in order, starting with the initial checkpoint (step 0)"
    )
    curve: TrainingCurve
    scores: str = Field(description="Digest of the manifest of the arrays, which are in the same folder")
    code_version: str
    finished: datetime = Field(description="Time in UTC")

    @property
    def name(self) -> str:
        return f"{self.backend}.{self.precision}"


class RecordedSide(NamedTuple):
    """A side loaded from its record.

    Its arrays are sample_id (ascending), query_id, label and gain of shape [N], logits of shape [N, K], and unit
    embeddings `query` and `product` of shape [M, D] for a sample of the rows.
    """

    uri: str
    record: SideRecord
    arrays: Arrays


class EvaluationPair(_Figures):
    """An evaluation on both sides. `relative` is the absolute difference divided by the value of side A."""

    a: ValidationPoint
    b: ValidationPoint
    relative: float
    loss_relative: float

    @property
    def line(self) -> str:
        a, b = self.a, self.b
        metric = f"{a.metric:>12.6f}{b.metric:>12.6f}{self.relative:>12.4%}"
        return f"{a.step:>6}{metric}{a.loss:>12.6f}{b.loss:>12.6f}{self.loss_relative:>12.4%}"


class ParityCheck(_Figures):
    """A figure compared with its tolerance. Its value is None if it is undefined for this data."""

    name: str
    text: str
    value: float | None
    comparison: Literal["<=", ">="]
    bound: float
    outcome: Literal["pass", "fail", "skipped"]

    @property
    def line(self) -> str:
        shown = "-" if self.value is None else f"{self.value:.3g}" if self.comparison == "<=" else f"{self.value:.7g}"
        return f"{self.text} {shown}, {'at most' if self.comparison == '<=' else 'at least'} {self.bound:g}"


class ParityReport(_Figures):
    """The result of comparing two sides."""

    schema_version: Literal[3] = 3
    a: str = Field(description="Backend and precision of the first side, such as cpu.fp32")
    b: str
    records: tuple[str, str] = Field(description="URIs of the records")
    checkpoint: str = Field(description="URI of the checkpoint, as recorded by the first side")
    metric: str
    rows: int
    decisions: int = Field(description="Number of rows whose most probable class differs")
    max_difference: float
    evaluations: tuple[EvaluationPair, ...]
    checks: tuple[ParityCheck, ...]
    note: str = Field(description="Warning if there are too few rows to detect a difference, or empty")

    @property
    def failed(self) -> tuple[ParityCheck, ...]:
        return tuple(check for check in self.checks if check.outcome == "fail")

    def value(self, name: str) -> float | None:
        return next(check.value for check in self.checks if check.name == name)

    def lines(self) -> list[str]:
        """Format the report for a terminal, with evaluations side by side, figures with their tolerances, and notes."""
        return [
            f"parity of A {self.a} and B {self.b}: {self.metric} and loss on {self.rows:,} holdout rows, trained from"
            f" {self.checkpoint}",
            f"{'step':>6}{'A':>12}{'B':>12}{'relative':>12}{'loss A':>12}{'loss B':>12}{'relative':>12}",
            *(pair.line for pair in self.evaluations),
            *(f"  {check.outcome:<7}  {check.line}" for check in self.checks),
            f"  {self.decisions:,} of {self.rows:,} rows have a different most probable class",
            *([f"  note: {self.note}"] if self.note else []),
        ]


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Run the sides on this machine and compare their results. Raises GateRefused if they differ too much."""
    names, to = call.arguments, call.options.get("--to", "")
    sides = [_parse(name, settings.train.precision) for name in names]
    if (to and len(names) > 1) or sides == [""] or (len(names) == 2 and sides[0] == sides[1] != ""):
        raise ConfigError(
            f"cannot compare {' and '.join(names)}{' with --to' if to else ''}",
            expected=f"two different sides, each of which is one of {', '.join(BACKENDS)}, optionally with a precision"
            f" as in BACKEND:{'|'.join(PRECISIONS)}, or the folder or URI of a recorded side. --to requires one side",
            next_command="trnpipe parity A B, or trnpipe parity BACKEND --to FOLDER",
        )
    with open_context(settings, stop) as ctx:
        tasks = {name: make_task(settings, ctx, side, to) for name, side in zip(names, sides, strict=True) if side}

        def load(name: str) -> RecordedSide:
            uri = tasks[name].uri if name in tasks else name
            return load_side(open_storage(uri, retry=settings.storage, stop=stop), ctx.scratch / KIND)

        # Load recorded sides first, so that a folder without a record fails before hours of training.
        for name in set(names) - set(tasks):
            load(name)
        for task in tasks.values():
            doing, threads = f"recording {task.name}", torch.get_num_threads()
            list(run_tasks(record, threads, iter([task]), num_workers=1, stop=stop, doing=doing))
        recorded = [load(name) for name in names]
        if len(names) == 1:
            say(f"to compare it with a different side: trnpipe parity {recorded[0].uri} SIDE")
            return EXIT_OK
        report = compare_sides(recorded[0], recorded[1], settings.parity)
        for line in report.lines():
            say(line)
        key = f"cycles/{ctx.cycle}/parity/{report.a}-{report.b}/parity.json"
        ctx.workspace.write_bytes(key, report.to_json())
        say(f"report {ctx.workspace.uri(key)}")
    if report.failed:
        raise GateRefused(
            f"{report.a} and {report.b} differ too much: {'; '.join(check.line for check in report.failed)}",
            expected="all figures within their tolerances",
            next_command="check the differences in parity.json",
        )
    return EXIT_OK


def _parse(text: str, precision: Precision) -> str:
    """Return the side as BACKEND:PRECISION, or an empty string for a folder or URI.

    Raises ConfigError if the precision is unknown.
    """
    backend, colon, named = text.partition(":")
    if backend not in BACKENDS:
        return ""
    if colon and named not in PRECISIONS:
        raise ConfigError(
            f"unknown precision in {text!r}", expected=f"one of {', '.join(PRECISIONS)}", next_command=f"{backend}:fp32"
        )
    return f"{backend}:{named if colon else precision}"


def load_side(storage: Storage, cache_dir: Path) -> RecordedSide:
    """Load a recorded side, and verify every byte of its arrays. Raises DataError if it is not complete."""
    again = "record the side with trnpipe parity SIDE --to FOLDER, on a machine with its device"
    record = read_record(storage, RECORD, SideRecord, "a record of a side", "trnpipe parity", next_command=again)
    if record is None or require_manifest(storage, ARRAYS).digest != record.scores:
        problem = f"{storage.root} does not contain a complete recorded side"
        raise DataError(problem, expected="the complete folder of a recorded side", next_command=again)
    return RecordedSide(storage.root, record, load_arrays(storage, ARRAYS, KIND, cache_dir)[0])


# Recording a side in a separate process.


@dataclass(frozen=True)
class SideTask:
    """A side to record.

    Args:
        settings: settings of the training run.
        run: fingerprint of the computation, which is equal for sides that can be compared.
        uri: URI of the folder to write the record to.
    """

    settings: Settings
    run: str
    uri: str

    @property
    def name(self) -> str:
        return f"{self.settings.backend}.{self.settings.train.precision}"


def make_task(settings: Settings, ctx: StageContext, side: str, uri: str) -> SideTask:
    """Create the task of recording a side to `uri`, or to a folder in the workspace if it is empty.

    Raises ConfigError or CheckpointError if there is no checkpoint, and DataError if there is no prepared data.
    """
    if settings.train.metric == "retrieval_ndcg":
        raise ConfigError(
            "train.metric is retrieval_ndcg, but parity compares the scores of pairs",
            expected="a model with a trained relevance head, and a metric for pairs",
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
            # Half of the combined metric measures search, but parity only compares the scores of pairs.
            "metric": "macro_f1" if settings.train.metric == "combined" else settings.train.metric,
            "deadline": None,
            "patience": 0,
        },
        "model": {"dropout": 0.0},  # devices generate different random numbers
        "compile": {"on_unknown_graph": "warn"},
        "log": {"tensorboard": False},
    }
    sections = {name: getattr(settings, name).model_copy(update=values) for name, values in changes.items()}
    side_settings = settings.model_copy(
        update={**sections, "backend": backend, "checkpoint": CheckpointConfig(every_steps=every, keep_last=1)}
    )
    run = fingerprint(
        {
            "checkpoint": _start(settings, ctx).digest,
            "token_sets": list(load_prepared(ctx).token_sets),
            "negatives": mined_negatives(ctx),
            "train": side_settings.train.model_dump(mode="json", exclude={"start", "precision"}),
            "model": side_settings.model.model_dump(mode="json"),
            "code_version": ctx.code_version,
        }
    )[:12]
    default = f"cycles/{ctx.cycle}/parity/sides/{run}/{backend}.{precision}"
    return SideTask(side_settings, run, uri or ctx.workspace.uri(default))


def _start(settings: Settings, ctx: StageContext) -> Checkpoint:
    """Open the checkpoint that both sides start from. Raises ConfigError or CheckpointError if there is none."""
    named, trained = settings.parity.checkpoint, ctx.earlier("train")
    start = (ctx.workspace, trained.outputs["checkpoint"]) if trained else None
    if named:
        start = locate_start(named, settings, ctx.workspace)
    if start is None:
        raise ConfigError(
            f"there is no checkpoint to start from, because parity.checkpoint is {named or 'not set'} and cycle"
            f" {ctx.cycle} is {'trained' if trained else 'not trained'}",
            expected="a trained model",
            next_command="trnpipe train, or --parity.checkpoint WORKSPACE/checkpoints/CYCLE/step-N",
        )
    return open_checkpoint(*start, ctx.scratch / "parent")


def record(threads: int, task: SideTask) -> None:
    """Score and train the checkpoint, and record the results, unless the side has been recorded before."""
    settings = task.settings
    torch.set_num_threads(threads)  # worker processes start with a single thread
    warning = use_neuron_cache(settings.compile, settings.workspace, settings.backend, os.environ)
    # Only the parent process writes to the event log.
    with open_context(settings, StopSignal(), {**os.environ, TRACE_FILE: ""}) as ctx:
        if warning:
            ctx.console.warn(warning)
        scratch = ctx.scratch / "parity" / f"{task.run}-{task.name}"
        atomic.make_dirs(scratch)
        link_shared_tokens(ctx.scratch, scratch)
        with atomic.exclusive(scratch, ctx.stop):
            _record(task, replace(ctx, scratch=scratch), _start(settings, ctx))


def _record(task: SideTask, ctx: StageContext, checkpoint: Checkpoint) -> None:
    settings, train, model = task.settings, task.settings.train, task.settings.model
    prepared, label = load_prepared(ctx), f"{task.name} of run {task.run}"
    storage = open_storage(task.uri, retry=settings.storage, stop=ctx.stop)
    taught = taught_outputs(ctx)
    inputs = gather_inputs(ctx.workspace, prepared.token_sets, checkpoint, train, model, mined_negatives(ctx), taught)
    # Train on all prepared partitions, even if the checkpoint was already trained on some of them.
    selection = Selection(new=tuple(each.partition for each in inputs.sets), old=(), late=())
    buckets, mined = inputs.sets[0].info.buckets, inputs.negatives.digest if inputs.negatives else ""
    teacher = inputs.taught.identity if inputs.taught else ""
    identity = identity_parts(train, model, inputs.spec, selection, buckets, checkpoint.digest, mined, teacher)
    inputs = replace(inputs, selection=selection, identity=identity)
    if read_manifest(storage, ARRAYS) is None:
        limit, cache_dir = settings.parity.rows, ctx.scratch / "tokens"
        holdout = open_holdout(ctx.workspace, inputs.sets, "valid", cache_dir, limit, "parity.rows")
        scored, device = _score(task, checkpoint, holdout, ctx.stop)
        save_arrays(storage, ARRAYS, KIND, scored, ctx.scratch, {"side": label, "device": device})
    manifest = require_manifest(storage, ARRAYS)
    # The folder may belong to a different task, whose results must not be mixed with those of this one.
    if manifest.fields.get("side") != label:
        raise ConfigError(
            f"{storage.root} already contains {manifest.fields.get('side')}",
            expected=f"an empty folder, or {label}",
            next_command="use a different folder with --to, or delete this one",
        )
    if storage.stat(RECORD) is not None:
        return
    # This is a regular training run, except that its checkpoints and events are stored next to the record.
    work = open_storage(f"{task.uri.rstrip('/')}/work", retry=settings.storage, stop=StopSignal())
    log = EventLog(work, EVENTS)
    tokenizer = ctx.workspace.read_bytes(f"{prepared.tokenizer}/tokenizer.json")
    try:
        with open_run(
            settings, replace(ctx, workspace_after_stop=work, cycle="parity", events=log), inputs, tokenizer
        ) as opened:
            train_model(opened)
    finally:
        log.close()
    arrays, gains = load_arrays(storage, ARRAYS, KIND, ctx.scratch / ARRAYS)[0], inputs.sets[0].info.label_gains
    reached = figures({name: arrays[name] for name in ("query_id", "label", "gain", "logits")}, gains)
    start = ValidationPoint(step=0, metric=float(getattr(reached, train.metric)), loss=reached.loss)
    evaluations, curve = _trained(read_events(work, EVENTS), train.metric)
    side = SideRecord(
        run=task.run,
        backend=settings.backend,
        precision=train.precision,
        device=str(manifest.fields["device"]),
        checkpoint=checkpoint.uri,
        digest=checkpoint.digest,
        identity={name: value for name, value in identity.items() if name != "train.precision"},
        metric=train.metric,
        label_gains=gains,
        evaluations=(start, *evaluations),
        curve=curve,
        scores=manifest.digest,
        code_version=ctx.code_version,
        finished=datetime.now(UTC),
    )
    storage.write_bytes(RECORD, side.to_json())
    storage.delete_prefix("work/checkpoints/")  # only needed to resume training
    ctx.console.info(f"parity: recorded {task.name} in {storage.root}")


def _score(task: SideTask, checkpoint: Checkpoint, holdout: Holdout, stop: StopSignal) -> tuple[Arrays, str]:
    """Score the holdout in the same way as evaluations during training.

    Returns the arrays of the side and the name of the device. Raises Preempted.
    """
    train, rows, order = task.settings.train, holdout.rows, holdout.order
    backend = open_device(task.settings.backend, World())
    # Use the same optimizer and batch size as in training, so that no other graphs are compiled.
    one_rate, batch_size = train.optimizer.has_one_rate, min(train.micro_batch_size, train.global_batch_size)
    program = ScoreProgram.of_checkpoint(checkpoint, backend, train.precision, has_one_rate=one_rate)

    def outputs(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        result = program.outputs(batch)
        both = {"query": l2_normalize(result.query), "product": l2_normalize(result.product)}
        backend.step_boundary(list(both.values()))
        return {"logits": result.logits, **both}

    with progress(f"parity: {task.name} scores", order.total, "rows") as advance:
        scorer = Scorer(backend, ProcessGroup(World(), timeout_s=1.0), stop, batch_size)
        scored = scorer.run(outputs, rows, order, None, advance)
    # Keep the embeddings of a sample of the rows, which is selected by a hash of their ids.
    sample = np.sort(np.argsort(mix64(scored["sample_id"].astype(np.uint64)), kind="stable")[:VECTOR_ROWS])
    kept = {name: scored[name] for name in (*ROW_ARRAYS, "logits")}
    return kept | {name: scored[name][sample] for name in ("query", "product")}, backend.device_name()


def _trained(events: Iterable[dict[str, Any]], metric: str) -> tuple[list[ValidationPoint], TrainingCurve]:
    """Read the evaluations and the training curve from the events of a training run.

    If a step was repeated after an interruption, its last figures are used. Note that figures which are not finite are
    stored as strings.
    """
    evaluations: dict[int, ValidationPoint] = {}
    steps: dict[int, tuple[float, float, str]] = {}
    for event in events:
        step = event.get("step", 0)
        if (
            event["event"] == EventName.HOLDOUT_EVALUATED and "best" in event
        ):  # skip evaluations of the finished candidate
            evaluations[step] = ValidationPoint(step=step, metric=float(event[metric]), loss=float(event["loss"]))
        if event["event"] == EventName.TRAIN_STEPS:
            figures_of_steps = zip(
                map(float, event["losses"]), map(float, event["grad_norms"]), event["samples"], strict=True
            )
            steps |= dict(enumerate(figures_of_steps, start=step - len(event["losses"]) + 1))
    losses, norms, samples = zip(*(steps[step] for step in sorted(steps)), strict=True)
    in_order = [evaluations[step] for step in sorted(evaluations)]
    return in_order, TrainingCurve(losses=losses, grad_norms=norms, samples=samples)


# Comparing two sides. Differences are relative to side A. A figure that is NaN fails its check.


def compare_sides(a: RecordedSide, b: RecordedSide, config: ParityConfig) -> ParityReport:
    """Compare two sides. Raises ConfigError or DataError if they are not comparable."""
    _check_same(a, b)
    record_a, record_b = a.record, b.record
    metric, loss = (
        relative_differences(*([getattr(point, name) for point in side.evaluations] for side in (record_a, record_b)))
        for name in ("metric", "loss")
    )
    evaluations = tuple(
        EvaluationPair(a=point_a, b=point_b, relative=relative, loss_relative=loss_relative)
        for point_a, point_b, relative, loss_relative in zip(
            record_a.evaluations, record_b.evaluations, metric.tolist(), loss.tolist(), strict=True
        )
    )
    losses = relative_differences(record_a.curve.losses, record_b.curve.losses)[:FIRST_STEPS]
    gradients = relative_differences(record_a.curve.grad_norms, record_b.curve.grad_norms)[:FIRST_STEPS]
    probabilities = [to_probabilities(side.arrays["logits"]) for side in (a, b)]
    apart = np.abs(probabilities[0] - probabilities[1])
    first, second = (table.argmax(axis=1) for table in probabilities)
    cosines = np.concatenate([(a.arrays[side] * b.arrays[side]).sum(axis=1) for side in ("query", "product")])
    correlation = _correlation(*(table @ np.array(record_a.label_gains) for table in probabilities))
    steps = f"in the first {len(losses)} steps"
    values: dict[str, tuple[str, float | None]] = {
        "metric": (f"relative difference in {record_a.metric}", metric.max()),
        "holdout_loss": ("relative difference in holdout loss", loss.max()),
        "first_losses": (f"relative difference in loss {steps}", losses.max()),
        "first_gradients": (f"relative difference in gradient norm {steps}", gradients.max()),
        "probability": ("maximum difference in a probability", apart.max()),
        "mean_probability": ("mean difference in probabilities", apart.mean()),
        "correlation": ("correlation of the scores", correlation),
        "cosine": ("minimum cosine similarity of embeddings", cosines.min(initial=1.0)),
    }
    reduced = {record_a.precision, record_b.precision} != {"fp32"}
    bounds = {"metric": config.max_difference} | {name: bars[reduced] for name, bars in BARS.items()}
    rows, start, note = len(first), record_a.evaluations[0].metric, ""
    if (one_row := 1.0 / (rows * start) if start > 0 else 1.0) > config.max_difference:
        note = f"a single one of the {rows:,} holdout rows moves the metric by {one_row:.2%}, more than the tolerance"
    return ParityReport(
        a=record_a.name,
        b=record_b.name,
        records=(a.uri, b.uri),
        checkpoint=record_a.checkpoint,
        metric=record_a.metric,
        rows=rows,
        decisions=int((first != second).sum()),
        max_difference=config.max_difference,
        evaluations=evaluations,
        checks=tuple(_check(name, text, value, bounds[name]) for name, (text, value) in values.items()),
        note=note,
    )


def relative_differences(a: Sequence[float], b: Sequence[float]) -> Float64s:
    """Return |b - a| / |a|, which is infinite if only `a` is 0, and NaN if either value is not finite."""
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    with np.errstate(all="ignore"):
        apart = np.where(left == right, 0.0, np.abs(right - left) / np.abs(left))
    return np.where(np.isfinite(left) & np.isfinite(right), apart, np.nan)


def _correlation(a: Float64s, b: Float64s) -> float | None:
    """Return the Pearson correlation of two arrays, or None if either is constant."""
    if not (np.ptp(a) and np.ptp(b)):
        return None
    with np.errstate(all="ignore"):
        return float(np.corrcoef(a, b)[0, 1])


def _check(name: str, text: str, value: float | None, bound: float) -> ParityCheck:
    comparison: Literal["<=", ">="] = ">=" if name in _AT_LEAST else "<="
    outcome: Literal["pass", "fail", "skipped"] = "skipped"
    if value is not None:  # a NaN fails
        value, outcome = float(value), "pass" if (value >= bound if name in _AT_LEAST else value <= bound) else "fail"
    return ParityCheck(name=name, text=text, value=value, comparison=comparison, bound=bound, outcome=outcome)


def _check_same(a: RecordedSide, b: RecordedSide) -> None:
    """Raise ConfigError or DataError if the sides differ in more than their backend and precision."""
    inputs_a, inputs_b = ({"checkpoint": side.record.digest, **side.record.identity} for side in (a, b))
    different = sorted(name for name in inputs_a.keys() | inputs_b.keys() if inputs_a.get(name) != inputs_b.get(name))
    is_config_error = any(not name.startswith("data.") for name in different)
    different += [f"{name} of the holdout" for name in ROW_ARRAYS if not np.array_equal(a.arrays[name], b.arrays[name])]
    different += ["samples of the training steps"] if a.record.curve.samples != b.record.curve.samples else []
    if different:
        raise (ConfigError if is_config_error else DataError)(
            f"{a.uri} and {b.uri} were recorded with different {', '.join(different)}",
            expected="the same checkpoint, data and settings, except for the backend and precision",
            next_command="record one of them again with the settings of the other",
        )
