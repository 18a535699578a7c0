"""Scores of one model on a holdout: static shapes, split over ranks, saved on the way, kept in the cycle."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from pipeline.backends import Backend, Batch
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.plan import evaluation_plan, open_part_guard
from pipeline.compile.watch import GraphWatch, NoWatch, Place
from pipeline.context import StageContext
from pipeline.core.batching import Bucket
from pipeline.core.errors import CheckpointError, DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.manifest import MANIFEST_NAME
from pipeline.core.stop import StopSignal
from pipeline.data.loader import to_tensors
from pipeline.data.shards import TokenRows
from pipeline.data.tokens import spec_of
from pipeline.evaluate.holdout_rows import Holdout, HoldoutOrder, Span
from pipeline.evaluate.retrieval import Vectors
from pipeline.evaluate.scores import ScoreInfo, ScoreSet, load_scores, save_scores, stage_arrays
from pipeline.io.commit import commit_dir, fetch_dir, read_manifest
from pipeline.io.storage import Storage
from pipeline.model.config import ModelConfig
from pipeline.model.flat import FlatLayout, Precision, flat_forward
from pipeline.model.hf import from_hf
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs
from pipeline.parallel.gang import Gang
from pipeline.settings import Settings

# The scoring program of one device: weights and the forward pass, in the very graphs that training evaluates with.

PHASE = "evaluate"


class ScoreProgram:
    """Scores and embeddings of batches. No gradient; a model of the same shape takes the same graphs."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        precision: Precision,
        buckets: Sequence[Bucket],
        watch: GraphWatch | None = None,
        *,
        chunk_mib: float,
        by_layer: bool = False,
    ) -> None:
        """Takes the model over: only its structure stays. Load weights before scoring.

        `chunk_mib`, `by_layer`: as in training.
        """
        choose_forms(model, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        self.backend, self._precision = backend, precision
        self._layout = FlatLayout.of(model, chunk_mib, by_layer=by_layer)
        self._model = model.eval().to("meta")
        self._shapes = {(bucket.query_tokens, bucket.product_tokens) for bucket in buckets}
        self._watch: GraphWatch = watch or NoWatch()
        self._flats: list[Tensor] = []

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Put weights (our names, any dtype, on CPU) on the device. Raises CheckpointError for other shapes."""
        for chunk in self._layout.chunks:
            for name, shape in zip(chunk.names, chunk.shapes, strict=True):
                if name not in weights or weights[name].shape != shape:
                    seen = list(weights[name].shape) if name in weights else "missing"
                    raise CheckpointError(f"{name} is {seen}", expected=f"{list(shape)} for this model")
        self._flats = [flat.to(self.backend.device) for flat in self._layout.pack(weights)]

    def scores(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Of `outputs` the logits."""
        return self.outputs(batch).logits

    @torch.no_grad()
    def outputs(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        """Logits over relevance classes [B, K] and embeddings [B, D], fp32, on the device."""
        rows, query_tokens = batch["query"].shape
        shape = (query_tokens, batch["product"].shape[1])
        if shape not in self._shapes:
            known = ", ".join(f"{query}x{product}" for query, product in sorted(self._shapes))
            raise DataError(f"a batch of {shape[0]}x{shape[1]} tokens", expected=f"one of the buckets {known}")
        found = flat_forward(
            self._model, self._layout, self._flats, batch, backend=self.backend, precision=self._precision
        )
        outputs = RelevanceOutputs(*(tensor.float() for tensor in found))
        del found  # what is alive at the end of a graph is an output of it
        place = Place(PHASE, Bucket(*shape).name, rows)
        self._watch.before(place, lambda: self.backend.hlo_text(outputs))
        self.backend.step_boundary(outputs)
        self._watch.after(place)
        return outputs


# Scored rows on their way to a score set: committed part by part, so that a killed evaluation goes on.
#
# A part holds the rows from place `start` to place `stop` of the holdout's order.

KIND = "score part"
FILE = "part.safetensors"

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class PartStore:
    """The parts of one model on one holdout, below `prefix`."""

    storage: Storage
    prefix: str
    scratch: Path
    warn: Callable[[str], None]

    def load(self) -> tuple[int, list[Arrays]]:
        """The place to go on from, and the arrays of all rows before it. A damaged part and those after it are lost."""
        place, found = 0, list[Arrays]()
        for name in self.storage.list_dirs(f"{self.prefix}/"):
            prefix = f"{self.prefix}/{name}"
            try:
                manifest = read_manifest(self.storage, prefix)
                if manifest is None or manifest.kind != KIND or manifest.fields.get("start") != place:
                    break
                stop = manifest.fields.get("stop")
                arrays = load_file(fetch_dir(self.storage, prefix, self.scratch / "parts") / FILE)
                if not isinstance(stop, int) or {len(values) for values in arrays.values()} != {stop - place}:
                    raise DataError(f"{self.storage.uri(prefix)} does not hold the rows it says it does")
            except (DataError, SafetensorError, OSError) as error:
                self.warn(f"scores from row {place:,} on are computed again: {error}")
                break
            found.append(arrays)
            place = stop
        return place, found

    def commit(self, start: int, arrays: Arrays) -> None:
        """Publish the rows from `start` on."""
        stop = start + len(next(iter(arrays.values())))
        folder = self.scratch / "part"
        stage_arrays(folder, FILE, arrays)
        prefix = f"{self.prefix}/{start:012d}"
        commit_dir(self.storage, folder, prefix, kind=KIND, fields={"start": start, "stop": stop})

    def clear(self) -> None:
        """Remove all parts, markers first: they are in a score set now."""
        keys = [f"{self.prefix}/{name}/{MANIFEST_NAME}" for name in self.storage.list_dirs(f"{self.prefix}/")]
        self.storage.delete(keys)
        self.storage.delete_prefix(f"{self.prefix}/")


Score = Callable[[Mapping[str, Tensor]], Tensor]
"""A batch on the device to logits [B, K] on the device."""

KEPT = ("sample_id", "query_id", "label", "gain", "slice", "partition")
"""Arrays of the token shards that go into scores, where there are any; `query_tokens` [N] is counted beside."""
_SHORT_S, _LONG_S, _MOST_BATCHES = 1.0, 4.0, 256


@dataclass(frozen=True)
class Scorer:
    """Where and how rows are scored."""

    backend: Backend
    gang: Gang
    stop: StopSignal
    batch_size: int
    """Rows of one batch on one rank: that of training, so that the graphs are the same."""
    save_every_s: float
    clock: Callable[[], float] = time.monotonic

    def run(
        self,
        score: Score,
        rows: TokenRows,
        order: HoldoutOrder,
        parts: PartStore,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Arrays:
        """Arrays of all rows, by ascending sample_id, on rank 0 (nothing on the others): KEPT, query_tokens, logits.

        Ranks meet after every few batches; the first one keeps what is done. Raises Preempted, with the rows so far
        committed, when any rank is told to stop.
        """
        is_main = self.gang.world.is_main
        start, held = parts.load() if is_main else (0, [])
        start = int(self.gang.gather(start)[0])
        advance(start)
        world_size = self.gang.world.world_size
        spans: deque[Span] = deque()

        def batches() -> Iterator[Batch]:
            for span in order.spans(start, self.batch_size * world_size):
                numbers, _ = span.share(self.gang.world.rank, self.batch_size)
                arrays = rows.read(np.full(self.batch_size, span.bucket, dtype=np.int64), numbers, span.bucket)
                spans.append(span)
                kept.append(_kept(arrays, rows.pad_id))
                yield to_tensors(arrays)

        kept: deque[Arrays] = deque()
        fresh: list[Arrays] = []
        place = saved = start
        size, since = 1, self.clock()
        with self.backend.loader(batches()) as ready:
            results = _one_behind(score, self.backend, ready)
            while place < order.total:
                began = self.clock()
                logits = list(islice(results, size))
                if not logits:
                    raise RuntimeError(f"scored {place} of {order.total} rows: a loader thread ended early")
                done = [(spans.popleft(), kept.popleft(), host) for host in logits]
                mine = joined([self._real(*one) for one in done])
                said = self.gang.gather((mine, self.clock() - began, self.stop.is_set()))
                count = sum(len(span.rows) for span, _, _ in done)
                place += count
                advance(count)
                fresh += [part for part, _, _ in said] if is_main else []
                stopping = any(stopped for _, _, stopped in said)
                due = self.clock() - since >= self.save_every_s and place < order.total
                if is_main and (due or stopping):
                    parts.commit(saved, joined(fresh))
                    held, fresh, saved, since = [*held, joined(fresh)], [], place, self.clock()
                if stopping:
                    self.stop.set("another rank")  # keeps the reason of our own signal, if there was one
                    self.stop.raise_if_set(f"scoring a holdout; {place:,} of {order.total:,} rows are saved")
                size = _next_size(size, max(seconds for _, seconds, _ in said))
        if not is_main:
            return {}
        every = joined([*held, *fresh])
        ascending = np.argsort(every["sample_id"], kind="stable")
        return {name: values[ascending] for name, values in every.items()}

    def _real(self, span: Span, kept: Arrays, logits: npt.NDArray[np.float32]) -> Arrays:
        """Without the rows that fill a batch."""
        _, count = span.share(self.gang.world.rank, self.batch_size)
        return {name: values[:count] for name, values in {**kept, "logits": logits}.items()}


def joined(parts: list[Arrays]) -> Arrays:
    """Parts one after the other; all hold the same arrays."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _kept(arrays: Arrays, pad_id: int) -> Arrays:
    kept = {name: arrays[name] for name in KEPT if name in arrays}
    return {**kept, "query_tokens": (arrays["query"] != pad_id).sum(axis=1, dtype=np.int32)}


def _one_behind(score: Score, backend: Backend, ready: Iterator[Batch]) -> Iterator[npt.NDArray[Any]]:
    """Logits on the host. A batch is fetched when the next one is under way, so that the device does not wait."""
    before: Tensor | None = None
    for batch in ready:
        logits = score(batch)
        if before is not None:
            yield backend.to_host([before])[0].numpy()
        before = logits
    if before is not None:
        yield backend.to_host([before])[0].numpy()


def _next_size(size: int, seconds: float) -> int:
    """Batches until ranks meet again: few enough to stop soon, enough not to wait for each other all the time."""
    if seconds < _SHORT_S:
        return min(size * 2, _MOST_BATCHES)
    return max(1, size // 2) if seconds > _LONG_S else size


# Scores of a model on a holdout, kept in the cycle: found there, or computed on all ranks.


@dataclass
class ModelScorer:
    """Scores one model after the other; models of one architecture share a program and its graphs."""

    settings: Settings
    ctx: StageContext
    backend: Backend
    gang: Gang
    _watches: dict[str, GraphWatch] = field(default_factory=dict)
    _programs: dict[str, ScoreProgram] = field(default_factory=dict)

    def run(
        self, role: str, checkpoint: Checkpoint, holdout: Holdout, vectors: Vectors, vector_rows: int
    ) -> tuple[ScoreSet | None, str]:
        """Scores on rank 0 (None elsewhere), and the key they lie under. Raises Preempted with what is done saved."""
        ctx = self.ctx
        key = self._key(checkpoint, holdout, vector_rows)
        if self.gang.gather(ctx.world.is_main and read_manifest(ctx.workspace, key) is not None)[0]:
            return load_scores(ctx.workspace, key, ctx.scratch / "scores") if ctx.world.is_main else None, key
        program = self._loaded(checkpoint, holdout)
        train = self.settings.train
        scorer = Scorer(
            self.backend,
            self.gang,
            ctx.stop,
            min(train.micro_batch_size, train.global_batch_size),  # as in training: the same graphs
            self.settings.evaluate.save_every_s,
        )
        parts = PartStore(ctx.workspace_after_stop, key.replace("/scores/", "/parts/"), ctx.scratch, ctx.console.warn)
        with ctx.console.progress(f"{role}, split {holdout.split}", holdout.order.total, "rows") as advance:
            arrays = scorer.run(program.scores, holdout.rows, holdout.order, parts, advance)
        if not ctx.world.is_main:
            return None, key
        sample = vectors.sample(holdout, vector_rows)
        scores = ScoreSet(
            info=self._info(role, checkpoint, holdout, 0 if sample is None else len(sample.sample_id)),
            sample_id=arrays["sample_id"],
            query_id=arrays["query_id"],
            label=arrays["label"].astype(np.int32),
            gain=arrays["gain"],
            logits=arrays["logits"],
            slices=holdout.slices(arrays, self.settings.evaluate.query_tokens),
            vectors=sample,
        )
        save_scores(ctx.workspace, key, scores, ctx.scratch)
        parts.clear()
        return scores, key

    def vectors(self, checkpoint: Checkpoint, holdout: Holdout) -> Vectors:
        """The encoder of a model, with its graphs watched."""
        watch = self._watch(checkpoint, holdout)
        return Vectors(checkpoint, self.backend, self.settings.embed, watch, self.ctx.stop)

    def _loaded(self, checkpoint: Checkpoint, holdout: Holdout) -> ScoreProgram:
        """The program of this architecture, with the weights of this model."""
        state = checkpoint.state
        with torch.device("meta"):  # structure only
            model = RelevanceModel(state.model, state.inputs)
        template = model.state_dict()
        name = _architecture(state.model)
        if name not in self._programs:
            self._programs[name] = ScoreProgram(
                model,
                self.backend,
                self.settings.train.precision,
                holdout.rows.buckets,
                self._watch(checkpoint, holdout),
                chunk_mib=self.settings.train.chunk_mib,
                by_layer=self.settings.train.optimizer.by_layer,
            )
        self._programs[name].load(from_hf(checkpoint.weights(), template, source=checkpoint.prefix))
        return self._programs[name]

    def _watch(self, checkpoint: Checkpoint, holdout: Holdout) -> GraphWatch:
        """What holds graphs against the manifest of training with these settings and this architecture."""
        if not self.backend.is_lazy:
            return NoWatch()
        name = _architecture(checkpoint.state.model)
        if name not in self._watches:
            dropout = self.settings.model.dropout  # of no effect here, but part of the plan of training
            model = checkpoint.state.model.model_copy(update={"dropout": dropout})
            trained = self.settings.model_copy(update={"model": model})
            spec, world_size = spec_of(holdout.sets[0].info), self.ctx.world.world_size
            device = self.backend.device_name()
            plan = evaluation_plan(trained, spec, holdout.rows.buckets, world_size, device)
            self._watches[name] = open_part_guard(
                self.ctx.workspace, plan, self.backend, self.settings.compile, self.ctx.console
            )
        return self._watches[name]

    def _key(self, checkpoint: Checkpoint, holdout: Holdout, vector_rows: int) -> str:
        """Named by all that decides the scores, so that another attempt finds those of the same question only."""
        config = self.settings.evaluate
        decides = fingerprint(
            {
                "holdout": holdout.name,
                "query_tokens": list(config.query_tokens),
                "vectors": [vector_rows, self.settings.embed.precision],
                "precision": self.settings.train.precision,
                "device": self.backend.device_name(),
            }
        )
        name = f"{holdout.split}-{checkpoint.digest[:16]}-{decides[:8]}"
        return f"cycles/{self.ctx.cycle}/evaluate/scores/{name}"

    def _info(self, role: str, checkpoint: Checkpoint, holdout: Holdout, vector_rows: int) -> ScoreInfo:
        state, info = checkpoint.state, holdout.sets[0].info
        return ScoreInfo(
            role=role,
            checkpoint=checkpoint.uri,
            digest=checkpoint.digest,
            cycle=state.cycle,
            step=state.step,
            split=holdout.split,
            backend=self.backend.name,
            device=self.backend.device_name(),
            precision=self.settings.train.precision,
            data=tuple(token_set.info.fingerprint for token_set in holdout.sets),
            labels=info.labels,
            label_gains=info.label_gains,
            rows=holdout.order.total,
            vector_rows=vector_rows,
            settings_hash=self.ctx.settings_hash,
            code_version=self.ctx.code_version,
        )


def _architecture(model: ModelConfig) -> str:
    """Models of one name have the same parameters and graphs."""
    shape = model.model_dump(mode="json", exclude={"preset", "dropout", "init_from"})
    return fingerprint({**shape, **model.encoder.model_dump()})
