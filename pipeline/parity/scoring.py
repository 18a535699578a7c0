"""Scores and embeddings of one checkpoint on one side, with the program and the shapes of training's evaluations."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError
from pipeline.core.order import mix64
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.tokens import Split
from pipeline.evaluate.holdout import HoldoutOrder, choose_rows
from pipeline.evaluate.score import PartStore, Score, ScoreProgram, Scorer
from pipeline.evaluate.scores import ScoreInfo, ScoreSet, VectorSample
from pipeline.io.storage import Storage
from pipeline.model.hf import from_hf
from pipeline.model.ops import choose_forms, unit
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.gang import Gang, open_device
from pipeline.parallel.strategies.flat import FlatLayout, flat_forward
from pipeline.parallel.world import World
from pipeline.parity.record import WORK, Precision
from pipeline.parity.task import SideTask
from pipeline.telemetry.console import Console

SPLIT: Split = "valid"
SCORE_PARTS, VECTOR_PARTS = PARTS = ("scores", "vectors")
"""Where rows lie, below the work of a side, until all are done."""
_SAVE_EVERY_S = 60.0


class PairProgram:
    """Embeddings of batches of pairs, as training computes them."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        precision: Precision,
        weights: Mapping[str, Tensor],
        *,
        chunk_mib: float,
        by_layer: bool,
    ) -> None:
        """Takes the model over: only its structure stays. `weights`: our names, on CPU."""
        choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        self._backend, self._precision = backend, precision
        self._layout = FlatLayout.of(model, chunk_mib, by_layer=by_layer)
        self._model = model.eval().to("meta")
        self._flats = [flat.to(backend.device) for flat in self._layout.pack(weights)]

    @torch.no_grad()
    def vectors(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Query and product embeddings side by side, each of length one: fp32 [B, 2 D] on the device."""
        outputs = flat_forward(
            self._model, self._layout, self._flats, batch, backend=self._backend, precision=self._precision
        )
        both = torch.cat([unit(outputs.query.float()), unit(outputs.product.float())], dim=1)
        self._backend.step_boundary([both])
        return {"logits": both}


@dataclass(frozen=True)
class SideScorer:
    """Scores one checkpoint for one side."""

    task: SideTask
    checkpoint: Checkpoint
    rows: TokenRows
    data: tuple[str, ...]
    """Fingerprints of the partitions the rows are of."""
    place: Storage
    stop: StopSignal
    console: Console

    def run(self) -> ScoreSet:
        """All rows asked for, and the embeddings of some. Raises DataError for an empty holdout, Preempted."""
        queries = [self._column(bucket, "query_id") for bucket in self._buckets]
        order = choose_rows(queries, self.task.settings.parity.rows)
        if not order.total:
            raise DataError(
                "the holdout is empty",
                expected=f"rows in the {SPLIT} split, in queries of at most parity.rows rows",
                next_command="raise data.valid_fraction, or give a split column",
            )
        backend = open_device(self.task.side.backend, World())
        state, precision = self.checkpoint.state, self.task.side.precision
        with torch.device("meta"):
            models = [RelevanceModel(self.task.model, state.inputs) for _ in range(2)]
        weights = from_hf(self.checkpoint.weights(), models[0].state_dict(), source=self.checkpoint.prefix)
        chunk_mib, by_layer = self.task.train.chunk_mib, self.task.train.optimizer.by_layer
        program = ScoreProgram(models[0], backend, precision, self.rows.buckets, chunk_mib=chunk_mib, by_layer=by_layer)
        program.load(weights)

        def logits(batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            return {"logits": program.outputs(batch).logits}

        scored = self._score(backend, logits, order, SCORE_PARTS)
        pairs = PairProgram(models[1], backend, precision, weights, chunk_mib=chunk_mib, by_layer=by_layer)
        embedded = self._score(backend, pairs.vectors, self._sample(order), VECTOR_PARTS)
        return self._score_set(backend, scored, embedded)

    @property
    def _buckets(self) -> range:
        return range(len(self.rows.buckets))

    def _column(self, bucket: int, name: str) -> Int64s:
        size = self.rows.sizes[bucket]
        numbers = np.arange(size, dtype=np.int64)
        if not size:
            return numbers
        return self.rows.read(np.full(size, bucket, dtype=np.int64), numbers, bucket, (name,))[name]

    def _sample(self, order: HoldoutOrder) -> HoldoutOrder:
        """Rows of which embeddings are kept: a function of their ids alone."""
        ids = [self._column(bucket, "sample_id")[order.rows[bucket]] for bucket in self._buckets]
        keys = [mix64(part.astype(np.uint64)) for part in ids]
        wanted = min(self.task.settings.parity.vector_rows, order.total)
        last = np.partition(np.concatenate(keys), wanted - 1)[wanted - 1]
        return HoldoutOrder(tuple(rows[key <= last] for rows, key in zip(order.rows, keys, strict=True)))

    def _score(self, backend: Backend, score: Score, order: HoldoutOrder, name: str) -> Arrays:
        train = self.task.train
        batch_size = min(train.micro_batch_size, train.global_batch_size)
        scorer = Scorer(backend, Gang(World(), timeout_s=1.0), self.stop, batch_size, _SAVE_EVERY_S)
        parts = PartStore(self.place, f"{WORK}/{name}", self.task.scratch / name, self.console.warn)
        with self.console.progress(f"parity: {self.task.side.name} {name}", order.total, "rows") as advance:
            return scorer.run(score, self.rows, order, parts, advance)

    def _score_set(self, backend: Backend, scored: Arrays, embedded: Arrays) -> ScoreSet:
        query, product = np.split(embedded["logits"], 2, axis=1)
        state, side = self.checkpoint.state, self.task.side
        info = ScoreInfo(
            role="parity",
            checkpoint=self.checkpoint.uri,
            digest=self.checkpoint.digest,
            cycle=state.cycle,
            step=state.step,
            split=SPLIT,
            backend=side.backend,
            device=backend.device_name(),
            precision=side.precision,
            data=self.data,
            labels=state.inputs.labels,
            label_gains=state.inputs.label_gains,
            rows=len(scored["sample_id"]),
            vector_rows=len(embedded["sample_id"]),
            settings_hash=self.task.settings_hash,
            code_version=self.task.code_version,
        )
        return ScoreSet(
            info=info,
            sample_id=scored["sample_id"],
            query_id=scored["query_id"],
            label=scored["label"].astype(np.int32),
            gain=scored["gain"],
            logits=scored["logits"],
            vectors=VectorSample(embedded["sample_id"], query, product),
        )
