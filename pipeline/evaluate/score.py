"""Score rows with a model, split over ranks and saved on the way; store scores, and measure those of training."""

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
from pipeline.compile.manifest import GraphPosition, GraphWatch
from pipeline.core.arrays import Float32s, Float64s
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import DataError, first_line
from pipeline.core.progress import progress
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.loader import RowSource, to_tensors
from pipeline.data.shards import Arrays
from pipeline.data.token_sets import TokenSetInfo
from pipeline.evaluate.config import MetricsConfig
from pipeline.evaluate.holdout import HoldoutOrder, Span, some_rows
from pipeline.evaluate.metrics.labels import accuracy, label_f1
from pipeline.evaluate.metrics.measure import retrieval_report
from pipeline.evaluate.metrics.ranking import Judgements, Ranking, ndcg_by_query
from pipeline.evaluate.metrics.scored_rows import QueryGroups, ScoredRows, SliceColumn, mean_over_queries, value_of
from pipeline.io import atomic
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest, require_manifest
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage, os_errors
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs
from pipeline.parallel.process_group import ProcessGroup
from pipeline.parallel.strategies import Precision
from pipeline.parallel.strategies.flat import FlatLayout, flat_forward, parameters_to_meta
from pipeline.retrieval.products import text_hashes
from pipeline.retrieval.search import search_vectors

# The scoring program of one device: weights and the forward pass, in the very graphs that training evaluates with.

PHASE = "evaluate"


class ScoreProgram:
    """Scores and embeddings of batches. No gradient; a model of the same shape takes the same graphs."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        precision: Precision,
        watch: GraphWatch | None = None,
        *,
        has_one_rate: bool = False,
    ) -> None:
        """Takes the model over: only its structure stays. Load weights before scoring.

        `has_one_rate`: as the optimizer in training, whose graphs it shares.
        """
        choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        self.backend, self._precision = backend, precision
        self._layout = FlatLayout.of(model, has_one_rate=has_one_rate)
        self._model = parameters_to_meta(model.eval(), backend)
        self._watch: GraphWatch = watch or GraphWatch()
        self._flats: list[Tensor] = []
        self._forward = step_program(backend, self._computed)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights (our names and shapes, any dtype, on CPU) on the device."""
        self._flats = [flat.to(self.backend.device) for flat in self._layout.pack(weights)]

    def _computed(self, flats: list[Tensor], batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        return flat_forward(self._model, self._layout, flats, batch, backend=self.backend, precision=self._precision)

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Logits over relevance classes [B, K] and embeddings [B, D], fp32, on the device."""
        (rows, query_tokens), product_tokens = batch["query"].shape, batch["product"].shape[1]
        found = self._forward(self._flats, batch)
        outputs = RelevanceOutputs(*(tensor.float() for tensor in found))
        del found  # what is alive at the end of a graph is an output of it
        place = GraphPosition(PHASE, Bucket(query_tokens, product_tokens).name, rows)
        self._watch.before(place, outputs)
        self.backend.step_boundary(outputs)
        self._watch.after(place)
        return outputs


@dataclass(frozen=True)
class PartStore:
    """Scored rows of one model on one holdout, stored part by part, so that a killed evaluation continues.

    A part is named by the position in the holdout's order of its first row.
    """

    parts: Parts[Part]
    cache_dir: Path
    warn: Callable[[str], None]

    @classmethod
    def open(cls, storage: Storage, prefix: str, scratch: Path, warn: Callable[[str], None]) -> "PartStore":
        parts = Parts(storage, f"{prefix}/done", prefix, Part, lambda start: (f"{start:012d}.safetensors",))
        return cls(parts, scratch / "parts", warn)

    def load(self) -> tuple[int, list[Arrays]]:
        """Return the position to continue from, and the arrays of the rows before it. A damaged part loses all."""
        place, found, done = 0, list[Arrays](), self.parts.done()
        try:
            while place in done:
                (path,) = self.parts.fetch(place, self.cache_dir)
                found.append(load_file(path))
                place += len(found[-1]["sample_id"])
        except (DataError, SafetensorError, OSError) as error:
            self.warn(f"scores are computed again: {error}")
            self.parts.delete()
            return 0, []
        return place, found

    def commit(self, start: int, arrays: Arrays) -> None:
        (name,) = self.parts.names(start)
        whole = {key: np.ascontiguousarray(values) for key, values in arrays.items()}
        self.parts.commit(Part(index=start), {name: save(whole)})


Score = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""A batch on the device to what is kept of it, by name, such as logits [B, K]: on the device too."""

KEPT = ("sample_id", "query_id", "label", "gain", "slice", "partition")
"""Arrays of the token shards that go into scores, if they exist; `query_tokens` [N] is counted as well."""
_SHORT_S, _LONG_S, _MOST_BATCHES = 1.0, 4.0, 256


@dataclass(frozen=True)
class Scorer:
    """Where and how rows are scored: by an evaluation, while a model is trained, and on each side of a comparison."""

    backend: Backend
    process_group: ProcessGroup
    stop: StopSignal
    batch_size: int
    """Rows of one batch on one rank: that of training, so that the graphs are the same."""
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
        """Return what `kept` takes of every row (KEPT and query_tokens) and its scores, by ascending sample_id.

        Ranks exchange results after every few batches. With `parts` rank 0 saves them and alone gets the arrays;
        without, nothing is saved and all ranks get them. Raises Preempted when any rank is told to stop.
        """

        def for_scores(arrays: Arrays) -> Arrays:
            query_tokens = (arrays["query"] != rows.pad_id).sum(axis=1, dtype=np.int32)
            return {**{name: arrays[name] for name in KEPT if name in arrays}, "query_tokens": query_tokens}

        kept = kept or for_scores
        is_main, layout = self.process_group.world.is_main, self.process_group.layout
        start, held = parts.load() if parts and is_main else (0, [])
        start = int(self.process_group.gather(start)[0])
        advance(start)
        under_way: deque[tuple[Span, int, Arrays]] = deque()

        def batches() -> Iterator[Batch]:
            for span in order.spans(start, self.batch_size * layout.data_size):
                numbers, num_real = span.share(layout.data_rank, self.batch_size)
                arrays = rows.read(np.full(self.batch_size, span.bucket, dtype=np.int64), numbers, span.bucket)
                under_way.append((span, num_real, kept(arrays)))
                yield to_tensors(arrays)

        fresh: list[Arrays] = []
        place = saved = start
        size, since = 1, self.clock()
        with self.backend.loader(batches()) as ready:
            results = self._one_behind(score, ready)
            while place < order.total:
                began = self.clock()
                found = list(islice(results, size))
                if not found:
                    raise RuntimeError(f"scored {place} of {order.total} rows: a loader thread ended early")
                done = [(*under_way.popleft(), host) for host in found]
                mine = [  # without the rows that fill a batch
                    {name: values[:num_real] for name, values in {**of_rows, **scores}.items()}
                    for _, num_real, of_rows, scores in done
                ]
                gathered = self.process_group.gather((joined(mine), self.clock() - began, self.stop.is_set()))
                count = sum(len(span.rows) for span, _, _, _ in done)
                place += count
                advance(count)
                # Tensor peers scored the same rows.
                fresh += [part for part, _, _ in gathered[:: layout.tensor_size]] if is_main or not parts else []
                stopping = any(stopped for _, _, stopped in gathered)
                due = self.clock() - since >= self.save_every_s and place < order.total
                if parts and is_main and (due or stopping):
                    parts.commit(saved, joined(fresh))
                    held, fresh, saved, since = [*held, joined(fresh)], [], place, self.clock()
                if stopping:
                    self.stop.set("another rank")  # keeps the reason of our own signal, if there was one
                    saved_rows = f"scoring a holdout; {place:,} of {order.total:,} rows are saved"
                    self.stop.raise_if_set(saved_rows if parts else "evaluating the holdout")
                # Ranks meet after few enough batches to stop soon, and enough not to wait for each other all the time.
                seconds = max(seconds for _, seconds, _ in gathered)
                if seconds < _SHORT_S:
                    size = min(size * 2, _MOST_BATCHES)
                elif seconds > _LONG_S:
                    size = max(1, size // 2)
        return by_sample_id([*held, *fresh]) if is_main or not parts else {}

    def _one_behind(self, score: Score, ready: Iterator[Batch]) -> Iterator[Arrays]:
        """Scores on the host. A batch is fetched when the next one is under way: the device does not wait."""
        before: Mapping[str, Tensor] | None = None
        for batch in chain(ready, [None]):
            outputs = None if batch is None else score(batch)
            if before is not None:
                host = self.backend.to_host(list(before.values()))
                yield {name: values.numpy() for name, values in zip(before, host, strict=True)}
            before = outputs


def joined(parts: list[Arrays]) -> Arrays:
    """Parts one after the other; all hold the same arrays."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def by_sample_id(parts: list[Arrays]) -> Arrays:
    every = joined(parts)
    ascending = np.argsort(every["sample_id"], kind="stable")
    return {name: values[ascending] for name, values in every.items()}


# Arrays that an evaluation computed, above all the scores of one model on one holdout.

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
    """Commit arrays by name, with `fields`, unless they exist: `prefix` names all that decides them.

    A writer killed at any byte leaves nothing that is read. Raises the errors of a disk.
    """
    if read_manifest(storage, prefix) is not None:
        return
    home = scratch / "arrays"  # the cycles of a machine share it
    with os_errors("writing", f"file://{home}"), atomic.staging_dir(home) as folder:
        try:
            save_file({name: np.ascontiguousarray(values) for name, values in arrays.items()}, folder / file)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        commit_dir(storage, folder, prefix, kind=kind, fields=fields or {})


def load_arrays(
    storage: Storage, prefix: str, kind: str, cache_dir: Path, file: str = ARRAYS_FILE
) -> tuple[Arrays, Mapping[str, JsonValue]]:
    """Load committed arrays, every byte verified, and their fields. Raises DataError."""
    try:
        manifest = require_manifest(storage, prefix)
        if manifest.kind != kind:
            raise DataError(f"it is of kind {manifest.kind}")
        return load_file(fetch_dir(storage, prefix, cache_dir) / file), manifest.fields
    except (DataError, SafetensorError, OSError) as error:
        raise _bad(storage, prefix, kind, first_line(error)) from error


def _bad(storage: Storage, prefix: str, kind: str, seen: str) -> DataError:
    return DataError(
        f"{storage.uri(prefix)} holds no {kind}: {seen}",
        expected="what this version of trnpipe evaluate writes",
        next_command="delete that folder and run trnpipe evaluate again",
    )


KIND = "scores"
SLICE = "slice."
ARRAYS = ("sample_id", "query_id", "label", "gain", "logits")


class ScoreInfo(Record):
    """Where scores come from."""

    retired: ClassVar[Mapping[str, Any]] = {"vector_rows": ...}

    schema_version: Literal[1] = 1
    role: str = Field(description="candidate, incumbent, or what else the model was scored as")
    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str = Field(description="Digest of its manifest: names its content")
    cycle: str = Field(description="The cycle that trained it")
    step: int = Field(description="Its optimizer step")
    split: str = Field(description="train, valid or test")
    backend: str
    device: str = Field(description="What graphs are compiled for, such as xla:CPU")
    precision: str = Field(description="fp32, autocast or bf16")
    data: tuple[str, ...] = Field(description="Fingerprints of the prepared partitions")
    labels: tuple[str, ...] = Field(description="Relevance classes, from least to most relevant")
    label_gains: tuple[float, ...]
    rows: int = Field(ge=0)
    settings_hash: str
    code_version: str


@dataclass(frozen=True)
class ScoreSet:
    """N rows in ascending order of sample_id.

    `arrays`: sample_id, query_id int64 [N]; label int32 [N], -1 without one; gain float32 [N]; logits float32 [N, K];
    `slice.<column>` int64 [N], codes into the names of `slices`.
    """

    info: ScoreInfo
    arrays: Arrays
    slices: Mapping[str, tuple[str, ...]]

    @property
    def rows(self) -> ScoredRows:
        """What metrics read: the softmax over the classes in double precision."""
        slices = {name: SliceColumn(self.arrays[SLICE + name], names) for name, names in self.slices.items()}
        return scored_rows(self.arrays, to_probabilities(self.arrays["logits"]), self.info, slices)


class _Description(BaseModel):
    """The fields of the manifest."""

    info: ScoreInfo
    slices: dict[str, tuple[str, ...]]


def save_scores(storage: Storage, prefix: str, scores: ScoreSet, scratch: Path) -> None:
    """Commit scores under `prefix`; `scratch` is a local folder for staging."""
    fields = _Description(info=scores.info, slices=dict(scores.slices)).model_dump(mode="json")
    save_arrays(storage, prefix, KIND, scores.arrays, scratch, fields, FILE)


def load_scores(storage: Storage, prefix: str, cache_dir: Path) -> ScoreSet:
    """Load committed scores, every byte verified. Raises DataError if they are missing or of another version."""
    stored, fields = load_arrays(storage, prefix, KIND, cache_dir, FILE)
    # Earlier versions also stored the embeddings of some rows.
    arrays = {name: array for name, array in stored.items() if not name.startswith("vector.")}
    try:
        found = _Description.model_validate(fields)
    except ValidationError as error:
        raise _bad(storage, prefix, KIND, str(error.errors(include_url=False)[0]["loc"])) from error
    return ScoreSet(found.info, arrays, found.slices)


def scored_rows(
    arrays: Arrays, probabilities: Float64s, info: ScoreInfo | TokenSetInfo, slices: Mapping[str, SliceColumn]
) -> ScoredRows:
    query_id, label = arrays["query_id"].astype(np.int64), arrays["label"].astype(np.int64)
    gain = arrays["gain"].astype(np.float64)
    return ScoredRows(query_id, label, gain, probabilities, info.labels, info.label_gains, slices)


def to_probabilities(logits: Float32s) -> Float64s:
    """Return the softmax of [N, K], NaN in a row with a logit that is not finite."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        raised = np.exp(wide - wide.max(axis=1, keepdims=True))
        probabilities: Float64s = raised / raised.sum(axis=1, keepdims=True)
    return probabilities


# What a model reaches on a holdout while it is trained.

_DEPTH = 10
"""Of the ranked lists: nDCG@10."""


@dataclass(frozen=True)
class HoldoutFigures:
    """What a model reaches on a holdout. `ndcg` is at 10, by expected gain; NaN without gains.

    `retrieval_ndcg` is at 10 too: every query searched, by the cosine of embeddings, in the distinct products of the
    rows that were scored; None where that was not asked for, or nothing is relevant.
    """

    rows: int
    loss: float
    accuracy: float
    macro_f1: float
    positive_f1: float
    ndcg: float
    retrieval_ndcg: float | None = None

    @property
    def combined(self) -> float | None:
        """One figure for a model that is to be good at both: the mean of macro F1 and retrieval nDCG@10."""
        return None if self.retrieval_ndcg is None else (self.macro_f1 + self.retrieval_ndcg) / 2


Outputs = Callable[[Mapping[str, Tensor]], RelevanceOutputs]
"""A batch of B pairs on the device to logits [B, K] and embeddings [B, D], fp32 on the device."""


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
) -> HoldoutFigures:
    """Score at most `limit` rows, spread evenly, on all ranks. Raises DataError for an empty holdout, Preempted.

    `search_pad_id`: when given, also search; product tokens are padded with it. Memory: 8 D bytes a row on every rank.
    """
    order = some_rows(rows.sizes, limit)
    if not order.total:
        raise DataError(
            "the holdout is empty",
            expected="rows in the valid split",
            next_command="raise data.valid_fraction, or give a split column",
        )

    def kept(arrays: Arrays) -> Arrays:
        rows_of = {name: arrays[name] for name in ("label", "gain", "query_id", "sample_id")}
        return rows_of if search_pad_id is None else {**rows_of, "text": text_hashes(arrays["product"], search_pad_id)}

    def wanted(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        outputs = score(batch)
        return {"logits": outputs.logits} if search_pad_id is None else outputs._asdict()

    with progress("scoring the holdout", order.total, "rows") as advance:
        arrays = Scorer(backend, process_group, stop, batch_size).run(wanted, rows, order, None, advance, kept)
    return figures(arrays, label_gains)


def figures(joined: dict[str, npt.NDArray[Any]], label_gains: tuple[float, ...]) -> HoldoutFigures:
    """Figures from gathered arrays: logits [N, K], label, gain, query_id, all [N].

    With retrieval also embeddings `query` and `product` [N, D], and `text` [N], equal for equal products.
    """
    probabilities = to_probabilities(joined["logits"])
    label, predicted = joined["label"].astype(np.int64), probabilities.argmax(axis=1)
    chosen = probabilities[label >= 0, label[label >= 0]]
    if not len(chosen):
        raise DataError("no labelled rows to score", expected="at least one row with a label in the holdout")
    queries, classes = QueryGroups.of(joined["query_id"]), probabilities.shape[1]
    ranking = Ranking.of(queries, probabilities @ np.array(label_gains))
    by_query = ndcg_by_query(ranking, joined["gain"].astype(np.float64), _DEPTH)
    return HoldoutFigures(
        rows=len(label),
        loss=float(-np.log(np.maximum(chosen, 1e-30)).mean()),
        accuracy=value_of(accuracy(queries, label, predicted)),
        macro_f1=value_of(label_f1(queries, label, predicted, classes)),
        positive_f1=float(np.nan_to_num(value_of(label_f1(queries, label, predicted, classes, classes - 1)))),
        ndcg=value_of(mean_over_queries(by_query)),
        retrieval_ndcg=_retrieval_ndcg(joined) if "product" in joined else None,
    )


def _retrieval_ndcg(joined: dict[str, npt.NDArray[Any]]) -> float | None:
    """nDCG@10 of each query among the distinct products; None when no query has a gain, or a vector is not finite."""
    gain = joined["gain"].astype(np.float64)
    _, first, item = np.unique(joined["text"], return_index=True, return_inverse=True)
    asked, rows = np.unique(joined["query_id"], return_index=True)
    query, product = joined["query"][rows], joined["product"][first]
    if not (np.isfinite(query).all() and np.isfinite(product).all()):
        return None
    query, product = (
        side / np.maximum(np.linalg.norm(side, axis=1, keepdims=True), 1e-12) for side in (query, product)
    )
    nearest = search_vectors(query, [(0, product)], _DEPTH)
    positive = gain > 0
    judged = Judgements(joined["query_id"][positive], item.reshape(-1)[positive].astype(np.int64), gain[positive])
    report = retrieval_report(asked, nearest.items, judged, MetricsConfig(retrieval_at=(_DEPTH,)))[1]
    return report.values.get(f"retrieval_ndcg@{_DEPTH}")
