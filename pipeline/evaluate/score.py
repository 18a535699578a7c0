"""Score rows with a model and store the scores. The work is distributed over ranks and can be resumed."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, Field, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save, save_file
from torch import Tensor

from pipeline.backends import Backend, Batch, step_program
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.manifest import GraphPosition, GraphWatch
from pipeline.core.arrays import Float32s, Float64s
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import DataError, first_line
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.loader import RowSource, to_tensors
from pipeline.data.shards import Arrays, text_hashes
from pipeline.data.token_sets import TokenSetInfo
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.holdout import HoldoutOrder, Span, some_rows
from pipeline.evaluate.metrics.labels import accuracy, fit_temperature, label_f1, log_loss
from pipeline.evaluate.metrics.measure import retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements, Ranking, ndcg_by_query
from pipeline.evaluate.metrics.scored_rows import QueryGroups, ScoredRows, SliceColumn, mean_over_queries, value_of
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest, require_manifest
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage, os_errors
from pipeline.model.hf import from_hf
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.strategies import Precision
from pipeline.parallel.strategies.flat import FlatLayout, flat_forward, parameters_to_meta
from pipeline.retrieval.search import search_vectors

# The program that scores batches on a device. It uses the same graphs as the evaluation steps of a training run.

PHASE = "evaluate"


class ScoreProgram:
    """Computes scores and embeddings. Models with the same architecture can share one program and its graphs."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        precision: Precision,
        watch: GraphWatch | None = None,
        *,
        has_one_rate: bool = False,
    ) -> None:
        """Build the program for the architecture of `model`, which is modified.

        Weights are not taken from `model`, so `load` must be called before scoring. `has_one_rate` must be the same as
        in the optimizer of the training run, so that the graphs are the same.
        """
        choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        self.backend, self._precision = backend, precision
        self._template = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
        self._layout = FlatLayout.of(model, has_one_rate=has_one_rate)
        self._model = parameters_to_meta(model.eval(), backend)
        self._watch: GraphWatch = watch or GraphWatch()
        self._flats: list[Tensor] = []
        self._forward = step_program(backend, self._computed)

    @classmethod
    def of_checkpoint(
        cls,
        checkpoint: Checkpoint,
        backend: Backend,
        precision: Precision,
        watch: GraphWatch | None = None,
        *,
        has_one_rate: bool = False,
    ) -> "ScoreProgram":
        """Build the program for the architecture of a checkpoint, and load its weights."""
        with torch.device("meta"):  # don't allocate parameters
            model = RelevanceModel(checkpoint.state.model, checkpoint.state.inputs)
        program = cls(model, backend, precision, watch, has_one_rate=has_one_rate)
        program.load_checkpoint(checkpoint)
        return program

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the weights of a checkpoint. Raises CheckpointError if they do not have the shapes of the model."""
        self.load(from_hf(checkpoint.weights(), self._template, source=checkpoint.uri))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights to the device. They must be on the CPU and have the names and shapes of the model."""
        self._flats = [flat.to(self.backend.device) for flat in self._layout.pack(weights)]

    def _computed(self, flats: list[Tensor], batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        return flat_forward(self._model, self._layout, flats, batch, backend=self.backend, precision=self._precision)

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Compute the logits [B, K] and the embeddings [B, D] of a batch. Both are fp32 and stay on the device."""
        (rows, query_tokens), product_tokens = batch["query"].shape, batch["product"].shape[1]
        raw = self._forward(self._flats, batch)
        outputs = RelevanceOutputs(*(tensor.float() for tensor in raw))
        del raw  # otherwise these tensors would also become outputs of the graph
        position = GraphPosition(PHASE, Bucket(query_tokens, product_tokens).name, rows)
        self._watch.before(position, outputs)
        self.backend.step_boundary(outputs)
        self._watch.after(position)
        return outputs


@dataclass(frozen=True)
class PartStore:
    """Stores the scores of a model on a holdout in parts, so that an interrupted evaluation can be resumed.

    The index of a part is the position of its first row in the order of the holdout.
    """

    parts: Parts[Part]
    cache_dir: Path
    warn: Callable[[str], None]

    @classmethod
    def open(cls, storage: Storage, prefix: str, scratch: Path, warn: Callable[[str], None]) -> "PartStore":
        parts = Parts(storage, f"{prefix}/done", prefix, Part, lambda start: (f"{start:012d}.safetensors",))
        return cls(parts, scratch / "parts", warn)

    def load(self) -> tuple[int, list[Arrays]]:
        """Return the position to resume from, and the arrays of all parts before it.

        If a part is damaged, all parts are deleted and scoring starts from the beginning.
        """
        position, loaded, done = 0, list[Arrays](), self.parts.done()
        try:
            while position in done:
                (path,) = self.parts.fetch(position, self.cache_dir)
                loaded.append(load_file(path))
                position += len(loaded[-1]["sample_id"])
        except (DataError, SafetensorError, OSError) as error:
            self.warn(f"cannot read stored scores, computing them again: {error}")
            self.parts.delete()
            return 0, []
        return position, loaded

    def commit(self, start: int, arrays: Arrays) -> None:
        (name,) = self.parts.names(start)
        contiguous = {key: np.ascontiguousarray(values) for key, values in arrays.items()}
        self.parts.commit(Part(index=start), {name: save(contiguous)})


Score = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A function that takes a batch on the device and returns outputs by name, such as logits [B, K]."""

KEPT = ("sample_id", "query_id", "label", "gain", "slice", "partition")
"""Arrays of the token shards to store with the scores, as far as they exist, in addition to `query_tokens` [N]."""
_SHORT_S, _LONG_S, _MAX_BATCHES = 1.0, 4.0, 256


@dataclass(frozen=True)
class Scorer:
    """Scores rows on all ranks. This is used by evaluation, by training, and by `trnpipe parity`."""

    backend: Backend
    process_group: ProcessGroup
    stop: StopSignal
    batch_size: int  # Rows per batch and rank. Use the same as in training, so that the graphs are the same.
    save_every_s: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        score: Score,
        rows: RowSource,
        order: HoldoutOrder,
        parts: PartStore | None = None,
        advance: Callable[[int], None] = lambda count: None,
        kept: Callable[[Arrays], Arrays] | None = None,
    ) -> Arrays:
        """Score all rows of a holdout. The ranks exchange their results every few batches.

        Args:
            score: Computes the scores of a batch.
            rows: The rows to read batches from.
            order: Which rows to score, and in what order.
            parts: Where to save intermediate results. If this is None, they are not saved.
            advance: Called with the number of rows that were scored, to show progress.
            kept: Selects the input arrays to return along with the scores (default: KEPT and query_tokens).

        Returns:
            The scores and the selected input arrays, sorted by sample_id. They are returned on rank 0 if `parts` is
            given, and on all ranks otherwise.

        Raises:
            Preempted: On a stop signal.
        """

        def for_scores(arrays: Arrays) -> Arrays:
            query_tokens = (arrays["query"] != rows.pad_id).sum(axis=1, dtype=np.int32)
            return {**{name: arrays[name] for name in KEPT if name in arrays}, "query_tokens": query_tokens}

        kept = kept or for_scores
        is_main, layout = self.process_group.world.is_main, self.process_group.layout
        start, saved = parts.load() if parts and is_main else (0, [])
        start = int(self.process_group.gather(start)[0])
        advance(start)
        in_flight: deque[tuple[Span, int, Arrays]] = deque()

        def batches() -> Iterator[Batch]:
            for span in order.spans(start, self.batch_size * layout.data_size):
                numbers, num_real = span.rank_batch(layout.data_rank, self.batch_size)
                arrays = rows.read(np.full(self.batch_size, span.bucket, dtype=np.int64), numbers, span.bucket)
                in_flight.append((span, num_real, kept(arrays)))
                yield to_tensors(arrays)

        unsaved: list[Arrays] = []
        position = saved_position = start
        size, since = 1, self.clock()
        with self.backend.loader(batches()) as ready:
            results = self._pipelined(score, ready)
            while position < order.total:
                began = self.clock()
                outputs = list(islice(results, size))
                if not outputs:
                    raise RuntimeError(
                        f"only {position} of {order.total} rows were scored, because a loader thread ended early"
                    )
                done = [(*in_flight.popleft(), scores) for scores in outputs]
                local = [  # remove padding rows
                    {name: values[:num_real] for name, values in {**inputs, **scores}.items()}
                    for _, num_real, inputs, scores in done
                ]
                gathered = self.process_group.gather((joined(local), self.clock() - began, self.stop.is_set()))
                count = sum(len(span.rows) for span, _, _, _ in done)
                position += count
                advance(count)
                # All ranks of a tensor-parallel group have scored the same rows, so use the results of only one.
                unsaved += [part for part, _, _ in gathered[:: layout.tensor_size]] if is_main or not parts else []
                stopping = any(stopped for _, _, stopped in gathered)
                due = self.clock() - since >= self.save_every_s and position < order.total
                if parts and is_main and (due or stopping):
                    parts.commit(saved_position, joined(unsaved))
                    saved, unsaved = [*saved, joined(unsaved)], []
                    saved_position, since = position, self.clock()
                if stopping:
                    self.stop.set("another rank")  # does not replace the reason if this rank received a signal itself
                    saved_rows = f"scoring a holdout ({position:,} of {order.total:,} rows are saved)"
                    self.stop.raise_if_set(saved_rows if parts else "evaluating the holdout")
                # Adapt the number of batches between exchanges, so that we can react to a stop signal quickly without
                # spending much time on synchronisation.
                seconds = max(seconds for _, seconds, _ in gathered)
                if seconds < _SHORT_S:
                    size = min(size * 2, _MAX_BATCHES)
                elif seconds > _LONG_S:
                    size = max(1, size // 2)
        return by_sample_id([*saved, *unsaved]) if is_main or not parts else {}

    def _pipelined(self, score: Score, ready: Iterator[Batch]) -> Iterator[Arrays]:
        """Yield scores in host memory.

        The scores of a batch are only copied after the next batch has been started, so that the device stays busy.
        """
        previous: Mapping[str, Tensor] | None = None
        for batch in chain(ready, [None]):
            outputs = None if batch is None else score(batch)
            if previous is not None:
                host = self.backend.to_host(list(previous.values()))
                yield {name: values.numpy() for name, values in zip(previous, host, strict=True)}
            previous = outputs


def joined(parts: list[Arrays]) -> Arrays:
    """Concatenate parts that all have the same arrays."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def by_sample_id(parts: list[Arrays]) -> Arrays:
    arrays = joined(parts)
    ascending = np.argsort(arrays["sample_id"], kind="stable")
    return {name: values[ascending] for name, values in arrays.items()}


# Storage for the results of an evaluation, such as the scores of a model on a holdout.

ARRAYS_FILE, FILE = "arrays.safetensors", "scores.safetensors"


def save_arrays(
    storage: Storage,
    prefix: str,
    kind: str,
    arrays: Mapping[str, npt.NDArray[Any]],
    scratch: Path,
    fields: Mapping[str, JsonValue] | None = None,
    file: str = ARRAYS_FILE,
) -> None:
    """Commit arrays by name, together with `fields`, unless `prefix` already exists.

    Callers must make sure that the prefix identifies the content. If writing is interrupted, readers ignore the
    incomplete files. Raises the errors of `os_errors`.
    """
    if read_manifest(storage, prefix) is not None:
        return
    staging = scratch / "arrays"  # shared by all cycles on this machine
    with os_errors("writing", f"file://{staging}"), atomic.staging_dir(staging) as folder:
        try:
            save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, folder / file)
        except SafetensorError as error:  # this is what safetensors raises if the disk is full
            raise OSError(str(error)) from error
        commit_dir(storage, folder, prefix, kind=kind, fields=fields or {})


def load_arrays(
    storage: Storage, prefix: str, kind: str, cache_dir: Path, file: str = ARRAYS_FILE
) -> tuple[Arrays, Mapping[str, JsonValue]]:
    """Load committed arrays and their fields, and verify checksums. Raises DataError if they are missing or damaged."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != kind:
            raise DataError(f"the folder contains {manifest.kind}")
        return load_file(fetch_dir(storage, prefix, cache_dir) / file), manifest.fields
    except (DataError, SafetensorError, OSError) as error:
        raise _unreadable(storage, prefix, kind, first_line(error)) from error


def _unreadable(storage: Storage, prefix: str, kind: str, reason: str) -> DataError:
    return DataError(
        f"cannot read the {kind} in {storage.uri(prefix)}: {reason}",
        expected=f"the {kind} written by this version of trnpipe evaluate",
        next_command="delete this folder and run trnpipe evaluate again",
    )


KIND = "scores"
SLICE = "slice."
ARRAYS = ("sample_id", "query_id", "label", "gain", "logits")


class ScoreInfo(Record):
    """Metadata of stored scores."""

    retired: ClassVar[Mapping[str, Any]] = {"vector_rows": ...}

    schema_version: Literal[1] = 1
    role: str = Field(description="Role of the model, such as candidate or incumbent")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of the checkpoint's manifest, which identifies its content")
    cycle: str = Field(description="Cycle that trained the checkpoint")
    step: int = Field(description="Optimizer step of the checkpoint")
    split: str = Field(description="train, valid or test")
    backend: str
    device: str = Field(description="Device that the graphs were compiled for, such as xla:CPU")
    precision: str = Field(description="fp32, autocast or bf16")
    data: tuple[str, ...] = Field(description="Fingerprints of the prepared partitions")
    labels: tuple[str, ...] = Field(description="Relevance labels, from least to most relevant")
    label_gains: tuple[float, ...]
    rows: int = Field(ge=0)
    settings_hash: str
    code_version: str


@dataclass(frozen=True)
class ScoreSet:
    """The scores of N rows, sorted by sample_id.

    `arrays` contains sample_id [N] and query_id [N] as int64, label [N] as int32 (-1 for unlabelled rows), gain [N] and
    logits [N, K] as float32, and for each slice column `slice.<column>` [N] as int64, with indices into the names in
    `slices`.
    """

    info: ScoreInfo
    arrays: Arrays
    slices: Mapping[str, tuple[str, ...]]

    @property
    def rows(self) -> ScoredRows:
        """The rows from which metrics are computed. Probabilities are computed in double precision."""
        slices = {name: SliceColumn(self.arrays[SLICE + name], names) for name, names in self.slices.items()}
        return scored_rows(self.arrays, to_probabilities(self.arrays["logits"]), self.info, slices)


class _Description(BaseModel):
    """The fields that are stored in the manifest."""

    info: ScoreInfo
    slices: dict[str, tuple[str, ...]]


def save_scores(storage: Storage, prefix: str, scores: ScoreSet, scratch: Path) -> None:
    """Commit scores under `prefix`, using the local folder `scratch` for staging."""
    fields = _Description(info=scores.info, slices=dict(scores.slices)).model_dump(mode="json")
    save_arrays(storage, prefix, KIND, scores.arrays, scratch, fields, FILE)


def load_scores(storage: Storage, prefix: str, cache_dir: Path) -> ScoreSet:
    """Load committed scores and verify checksums.

    Raises DataError if the scores are missing or damaged, or if they were stored by an incompatible version.
    """
    stored, fields = load_arrays(storage, prefix, KIND, cache_dir, FILE)
    # Ignore embeddings, which earlier versions stored for some rows.
    arrays = {name: array for name, array in stored.items() if not name.startswith("vector.")}
    try:
        description = _Description.model_validate(fields)
    except ValidationError as error:
        raise _unreadable(storage, prefix, KIND, str(error.errors(include_url=False)[0]["loc"])) from error
    return ScoreSet(description.info, arrays, description.slices)


def scored_rows(
    arrays: Arrays, probabilities: Float64s, info: ScoreInfo | TokenSetInfo, slices: Mapping[str, SliceColumn]
) -> ScoredRows:
    query_id, label = arrays["query_id"].astype(np.int64), arrays["label"].astype(np.int64)
    gain = arrays["gain"].astype(np.float64)
    return ScoredRows(query_id, label, gain, probabilities, info.labels, info.label_gains, slices)


def to_probabilities(logits: Float32s | Float64s) -> Float64s:
    """Compute the softmax of logits [N, K]. If a row has a NaN or infinite logit, its probabilities are NaN."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(wide - wide.max(axis=1, keepdims=True))
        probabilities: Float64s = exponentials / exponentials.sum(axis=1, keepdims=True)
    return probabilities


# Metrics on the validation split, which are computed during training.

_DEPTH = 10  # the k of nDCG@k


@dataclass(frozen=True)
class HoldoutFigures:
    """The metrics of a model on a holdout during training.

    `ndcg` is the nDCG@10 when rows are ranked by expected gain, or NaN if no row has a gain. `retrieval_ndcg` is the
    nDCG@10 of a search over the distinct products of the scored rows by cosine similarity. It is None if retrieval was
    not requested, or if no product is relevant. `temperature` is the one that fits these rows best.
    """

    rows: int
    loss: float
    accuracy: float
    macro_f1: float
    positive_f1: float
    ndcg: float
    retrieval_ndcg: float | None = None
    temperature: float = 1.0

    @property
    def combined(self) -> float | None:
        """The mean of macro F1 and retrieval nDCG@10, for users who need a model that is good at both."""
        return None if self.retrieval_ndcg is None else (self.macro_f1 + self.retrieval_ndcg) / 2


Outputs = Callable[[Mapping[str, Tensor]], RelevanceOutputs]
"""A function that takes a batch of B pairs on the device and returns fp32 logits [B, K] and embeddings [B, D]."""


def evaluate_holdout(
    score: Outputs,
    backend: Backend,
    rows: RowSource,
    *,
    label_gains: tuple[float, ...],
    batch_size: int,
    limit: int,
    process_group: ProcessGroup,
    stop: StopSignal,
    search_pad_id: int | None = None,
    temperature: float = 1.0,
) -> HoldoutFigures:
    """Compute the metrics of a model on at most `limit` evenly spaced rows, using all ranks.

    The logits are divided by `temperature`. If `search_pad_id` (the padding token of products) is given, retrieval is
    also evaluated, which takes 8 D bytes of memory per row on every rank. Raises DataError if the validation split is
    empty, and Preempted on a stop signal.
    """
    order = some_rows(rows.sizes, limit)
    if not order.total:
        raise DataError(
            "the valid split is empty",
            expected="rows in the valid split",
            next_command="raise data.valid_fraction or add a split column, and prepare again",
        )

    def kept(arrays: Arrays) -> Arrays:
        rows = {name: arrays[name] for name in ("label", "gain", "query_id", "sample_id")}
        return rows if search_pad_id is None else {**rows, "text": text_hashes(arrays["product"], search_pad_id)}

    def scores(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        outputs = score(batch)
        return {"logits": outputs.logits} if search_pad_id is None else outputs._asdict()

    with progress("scoring the holdout", order.total, "rows") as advance:
        arrays = Scorer(backend, process_group, stop, batch_size).run(scores, rows, order, None, advance, kept)
    return figures(arrays, label_gains, temperature)


def figures(
    joined: dict[str, npt.NDArray[Any]], label_gains: tuple[float, ...], temperature: float = 1.0
) -> HoldoutFigures:
    """Compute metrics from the arrays logits [N, K], label [N], gain [N] and query_id [N].

    Retrieval is also evaluated if there are embeddings (`query` and `product`, [N, D]) and hashes of the products'
    texts (`text`, [N]).
    """
    probabilities = to_probabilities(joined["logits"] / temperature)
    label, predicted = joined["label"].astype(np.int64), probabilities.argmax(axis=1)
    if not (label >= 0).any():
        raise DataError("no labelled rows to score", expected="at least one row with a label in the holdout")
    queries, classes = QueryGroups.of(joined["query_id"]), probabilities.shape[1]
    ranking = Ranking.of(queries, probabilities @ np.array(label_gains))
    by_query = ndcg_by_query(ranking, joined["gain"].astype(np.float64), _DEPTH)
    return HoldoutFigures(
        rows=len(label),
        loss=value_of(log_loss(queries, label, probabilities)),
        accuracy=value_of(accuracy(queries, label, predicted)),
        macro_f1=value_of(label_f1(queries, label, predicted, classes)),
        positive_f1=float(np.nan_to_num(value_of(label_f1(queries, label, predicted, classes, classes - 1)))),
        ndcg=value_of(mean_over_queries(by_query)),
        retrieval_ndcg=_retrieval_ndcg(joined) if "product" in joined else None,
        temperature=fit_temperature(joined["logits"], label),
    )


def _retrieval_ndcg(joined: dict[str, npt.NDArray[Any]]) -> float | None:
    """Compute nDCG@10 over the distinct products.

    Returns None if no query has a product with a gain, or if a vector is not finite.
    """
    gain = joined["gain"].astype(np.float64)
    _, first, item = np.unique(joined["text"], return_index=True, return_inverse=True)
    query_ids, rows = np.unique(joined["query_id"], return_index=True)
    query, product = joined["query"][rows], joined["product"][first]
    if not (np.isfinite(query).all() and np.isfinite(product).all()):
        return None
    query, product = (
        side / np.maximum(np.linalg.norm(side, axis=1, keepdims=True), 1e-12) for side in (query, product)
    )
    nearest = search_vectors(query, [(0, product)], _DEPTH)
    positive = gain > 0
    judged = Judgements(joined["query_id"][positive], item.reshape(-1)[positive].astype(np.int64), gain[positive])
    report = retrieval_report(query_ids, nearest.items, judged, MetricsConfig(retrieval_at=(_DEPTH,)))[1]
    return report.values.get(f"retrieval_ndcg@{_DEPTH}")
