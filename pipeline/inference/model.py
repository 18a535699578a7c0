"""Inference with a trained model: vectors of texts, scores of pairs, and search."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import torch

from pipeline.backends import Backend, Batch
from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.context import check_workspace, load_result, scratch_folder
from pipeline.core.arrays import Float32s, Float64s, Int64s
from pipeline.core.errors import ConfigError, DataError, NumericError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.encode import bucket_arrays, encode_rows
from pipeline.data.lexical import LEXICAL_NAMES, numeric_names
from pipeline.data.loader import to_tensors
from pipeline.data.rows import CHARACTERS_PER_TOKEN, BadRow, RawBatch, RowChunk, cut_chunks, plan_pairs, to_fields
from pipeline.data.token_sets import TokenSetInfo, read_token_sets, token_set_prefixes
from pipeline.data.tokenizer import TextTokenizer, token_windows
from pipeline.data.validate import CleanRows, RowRules, validate_chunk
from pipeline.embed.engine import Embedder, open_embedder
from pipeline.embed.vectors import VectorSet, find_vectors, shorten_vectors, vectors_prefix
from pipeline.evaluate.score import ScoreProgram, to_probabilities
from pipeline.inference.index import ProductIndex, open_index
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, open_storage
from pipeline.model.hf import from_hf
from pipeline.model.relevance import RelevanceInputs, RelevanceModel
from pipeline.parallel.process_group import open_device
from pipeline.parallel.world import World
from pipeline.registry.checkpoints import CHECKPOINTS, locate
from pipeline.registry.model import Registry, resolve_model_name
from pipeline.settings import Settings, project_files, resolve

Kind = Literal["query", "product"]
Order = Literal["vectors", "words", "hybrid"]
_WINDOW_TEXTS = 16_384
_BATCH_PAIRS = 256
Pair = tuple[str, str] | Mapping[str, object]
"""A query and a product title, or a mapping with these, `text` and the features by column."""


@dataclass(frozen=True)
class PairScores:
    """Scores of N pairs. `labels`: the K grades, least relevant first; `probabilities` [N, K]; `gains` [N] expected."""

    labels: tuple[str, ...]
    probabilities: Float64s
    gains: Float64s

    def __len__(self) -> int:
        return len(self.gains)

    @property
    def grades(self) -> list[str]:
        """Return the most likely grade of each pair [N]."""
        return [self.labels[grade] for grade in self.probabilities.argmax(axis=1).tolist()]


@dataclass(frozen=True)
class Hit:
    """A search result. `ranks`: from 1, by each order in which it is among the best.

    `cosine`: similarity of its vector to the query, None if only its words matched.
    """

    id: Any
    title: str
    cosine: float | None
    ranks: Mapping[Order, int]


class Model:
    """A verified checkpoint on a device, with its vectors of the catalogue, if any. Open one with `load_model`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: Settings,
        workspace: Storage,
        vectors: VectorSet | None,
        stop: StopSignal,
    ) -> None:
        self.checkpoint, self.vectors = checkpoint, vectors
        self._settings, self._workspace, self._stop = settings, workspace, stop

    @property
    def name(self) -> str:
        """Return cycle and step of the checkpoint."""
        return f"{self.checkpoint.state.cycle}/step-{self.checkpoint.state.step}"

    def encode(self, texts: str | Sequence[str], kind: Kind = "query") -> Float32s:
        """Return unit vectors [N, D] of texts (of one text: [D]), as `trnpipe embed` and search make them.

        Raises ConfigError for an unknown kind, DataError for a value that is not text, NumericError, Preempted.
        """
        inputs, limit = self.checkpoint.state.inputs, CHARACTERS_PER_TOKEN * self._embedder.limit
        prefixes = {"query": inputs.query_prefix, "product": inputs.product_prefix}
        if kind not in prefixes:
            raise ConfigError(f"kind {kind!r}", expected=" or ".join(prefixes))
        try:
            prefixed = [
                prefixes[kind] + text.strip()[:limit] for text in ([texts] if isinstance(texts, str) else texts)
            ]
            tokens = self._tokenizer.encode(prefixed)
        except (TypeError, AttributeError) as error:
            raise DataError("a text cannot be written as UTF-8", expected="texts") from error
        blocks = list(self._embedder.stream(token_windows(tokens, _WINDOW_TEXTS)))
        vectors = np.concatenate([np.zeros((0, self._embedder.dim), dtype=np.float32), *blocks])
        self._check(vectors, "vectors")
        return vectors[0] if isinstance(texts, str) else vectors

    def similarity(self, queries: Float32s, products: Float32s) -> Float32s:
        """Return the cosines [N, M] of unit vectors [N, D] and [M, D]."""
        return np.atleast_2d(queries) @ np.atleast_2d(products).T

    def score(self, pairs: Sequence[Pair]) -> PairScores:
        """Score pairs of a query and a product. Raises DataError, naming the first pair that cannot be scored."""
        rows = [
            pair if isinstance(pair, Mapping) else dict(zip(("query", "title"), pair, strict=True)) for pair in pairs
        ]
        config, names = self.row_config, dict.fromkeys(name for row in rows for name in row)
        if not rows:
            labels = self.checkpoint.state.inputs.labels
            return PairScores(labels, np.zeros((0, len(labels))), np.zeros(0))
        plan = plan_pairs(config, list(names), "the pairs")
        columns = {name: pa.array([_cell(row.get(name)) for row in rows]) for name in plan.inputs}
        batch = RawBatch(to_fields(columns, plan), np.arange(len(rows)))
        (chunk,) = cut_chunks("pairs", [batch], len(rows))
        _, scores, bad = self.score_rows(chunk)
        if bad:
            raise DataError(f"pair {bad[0].row}: {bad[0].reason}", expected="a query and a title, and every feature")
        return scores

    def score_rows(self, chunk: RowChunk) -> tuple[CleanRows, PairScores, list[BadRow]]:
        """Score a chunk. Return its usable rows with scores, and the bad rows with reasons."""
        rows, bad, _ = validate_chunk(chunk, RowRules(self.row_config, "flat", (), (), carve_valid=False))
        return rows, self._scored(rows), bad

    def search(self, query: str, top: int = 10, by: Order = "vectors") -> list[Hit]:
        """Return the `top` products of the catalogue, exactly. Raises ConfigError if it was not embedded."""
        if not query.strip() or top < 1 or by not in get_args(Order):
            raise ConfigError(
                f"search for {query!r}, top {top}, by {by!r}",
                expected=f"a query, a top of at least 1, and by {', '.join(get_args(Order))}",
                next_command='trnpipe search "red running shoes"',
            )
        index = self.index
        vector = shorten_vectors(self.encode(query)[None], index.mapped.vectors.shape[1])[0]
        found = index.search(query, vector, top)
        lists: dict[Order, list[int]] = {
            "vectors": found.vectors.items[0].tolist(),
            "words": found.words.items[0].tolist(),
            "hybrid": found.hybrid[0].tolist(),
        }
        cosines = dict(zip(lists["vectors"], found.vectors.scores[0].tolist(), strict=True))
        items = [item for item in lists[by][:top] if item >= 0]
        return [
            Hit(
                name,
                title,
                cosines.get(item),
                {order: items.index(item) + 1 for order, items in lists.items() if item in items},
            )
            for item, (name, title) in zip(items, index.products(items), strict=True)
        ]

    @cached_property
    def index(self) -> ProductIndex:
        """Return the searchable products. The first call on a machine writes them to its cache."""
        if self.vectors is None:
            cycle = self.checkpoint.state.cycle
            raise ConfigError(
                f"the catalogue was not embedded with {self.checkpoint.uri}, so there is nothing to search",
                expected="a model with vectors, which only a promoted model gets automatically",
                next_command=f"trnpipe embed --cycle {cycle} --embed.checkpoint {self.checkpoint.prefix}, which serves"
                f" nothing; then trnpipe search QUERY --cycle {cycle}",
            )
        return open_index(self._workspace, self.vectors, self._stop)

    @cached_property
    def row_config(self) -> DataConfig:
        """Return the data settings of the model, from its training data or else the settings.

        Raises ConfigError if they do not match the model.
        """
        spec, data = self.checkpoint.state.inputs, self._settings.data
        info = _trained_on(self._workspace, self.checkpoint)
        if info is not None:
            is_lexical = info.numeric[-len(LEXICAL_NAMES) :] == LEXICAL_NAMES
            numeric = info.numeric[: -len(LEXICAL_NAMES)] if is_lexical else info.numeric
            columns = [{"column": one.column, "num_ids": one.num_ids} for one in info.categorical]
            found = {"numeric": numeric, "lexical": is_lexical, "categorical": columns, "buckets": info.buckets}
            data = DataConfig.model_validate(data.model_dump() | found)
        known = (numeric_names(data), tuple(feature.num_ids for feature in data.categorical))
        if known != (spec.numeric, spec.categorical_ids):
            raise ConfigError(
                f"the settings name the features {', '.join(known[0])} and {len(known[1])} categories",
                expected=f"{', '.join(spec.numeric)} and {len(spec.categorical_ids)}: those of {self.checkpoint.uri}",
                next_command="the --config that the model was trained with",
            )
        prefixes = {"query_prefix": spec.query_prefix, "product_prefix": spec.product_prefix}
        return data.model_copy(update={**prefixes, "filter": {}, "slices": (), "labels": ()})

    def _check(self, numbers: Float32s | Float64s, what: str) -> None:
        if not np.isfinite(numbers).all():
            raise NumericError(
                f"{self.checkpoint.uri} makes {what} that are NaN or infinite",
                expected="numbers",
                next_command="name another model: --cycle CYCLE",
            )

    @cached_property
    def _backend(self) -> Backend:
        return open_device(self._settings.backend, World())

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.checkpoint.tokenizer(), self.checkpoint.uri)

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self.checkpoint, self._backend, self._settings.embed, stop=self._stop)

    @cached_property
    def _program(self) -> ScoreProgram:
        state = self.checkpoint.state
        if not state.trained_head:
            raise ConfigError(
                f"the scores of {self.checkpoint.uri} were not trained (train.loss.graded_weight 0)",
                expected="a model with trained grades",
                next_command="trnpipe encode or trnpipe search, which need none",
            )
        with torch.device("meta"):  # structure only
            model = RelevanceModel(state.model, state.inputs)
        template = model.state_dict()
        program = ScoreProgram(model, self._backend, self._settings.train.precision)
        program.load(from_hf(self.checkpoint.weights(), template, source=self.checkpoint.uri))
        return program

    def _scored(self, rows: CleanRows) -> PairScores:
        inputs, buckets = self.checkpoint.state.inputs, self.row_config.bucket_shapes
        encoded = encode_rows(rows, self.row_config, self._tokenizer)
        by_bucket = [np.flatnonzero(encoded.bucket == number) for number in range(len(buckets))]
        arrays = bucket_arrays(rows, encoded, by_bucket, self._tokenizer, buckets)
        program, started = self._program, list[Int64s]()

        def batches() -> Iterator[Batch]:
            for number, chosen in enumerate(by_bucket):
                for first in range(0, len(chosen), _BATCH_PAIRS):
                    count = min(_BATCH_PAIRS, len(chosen) - first)
                    started.append(chosen[first : first + count])
                    size = _BATCH_PAIRS if self._backend.is_lazy else count  # static shapes: padded with the first rows
                    places = first + np.resize(np.arange(count), size)
                    of_bucket = {name: arrays[f"b{number}.{name}"][places] for name in RelevanceInputs._fields}
                    tokens = {name: of_bucket[name].astype(np.int32) for name in ("query", "product")}
                    yield to_tensors(of_bucket | tokens)

        logits = np.zeros((len(rows.query), inputs.num_classes), dtype=np.float32)
        with self._backend.loader(batches()) as ready:
            for number, batch in enumerate(ready):
                self._stop.raise_if_set("scoring pairs")
                (found,) = self._backend.to_host([program.outputs(batch).logits])
                logits[started[number]] = found.numpy()[: len(started[number])]
        probabilities = to_probabilities(logits)
        self._check(probabilities, "scores")
        return PairScores(inputs.labels, probabilities, probabilities @ np.array(inputs.label_gains))


def _cell(value: object) -> str | None:
    """Return a value as text, as a CSV file would have it. Lists are joined."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return None if value is None else str(value)


def _trained_on(workspace: Storage, checkpoint: Checkpoint) -> TokenSetInfo | None:
    """Return the description of the training data of a checkpoint, None if it was deleted."""
    try:
        prepared = load_result(workspace, checkpoint.state.cycle, "prepare")
        prefixes = token_set_prefixes(prepared.outputs) if prepared else ()
        return read_token_sets(workspace, prefixes[-1:])[0].info if prefixes else None
    except DataError:
        return None


def open_model(settings: Settings, workspace: Storage, named: str, cycle: str, stop: StopSignal) -> Model:
    """Open a named checkpoint, that of a cycle with its vectors, or the served pair.

    Raises ConfigError if nothing is served or in production, CheckpointError, DataError.
    """
    check_workspace(workspace)
    scratch, vectors, place = scratch_folder(settings, workspace, os.environ) / "asked", None, named
    if cycle and not named:
        trained = load_result(workspace, cycle, "train")
        if trained and read_manifest(workspace, vectors_prefix(cycle)) is None:  # refused, or not yet embedded
            place = trained.outputs["checkpoint"]
        else:
            vectors = find_vectors(workspace, cycle)
            place = vectors.info.model.place
    elif not named:
        registry = Registry(workspace, resolve_model_name(settings, workspace))
        pair, production = registry.serving(), registry.production()
        if pair is not None:
            vectors, place = find_vectors(workspace, pair.vectors.cycle), pair.checkpoint
        elif production is not None:
            place = production.checkpoint
        else:
            raise ConfigError(
                f"nothing is in production as {registry.model} in {workspace.root}",
                expected="a promoted model, or a cycle or a checkpoint by name",
                next_command="make cycle, or trnjobs submit",
            )
    return Model(open_checkpoint(*locate(place, settings, workspace), scratch), settings, workspace, vectors, stop)


def load_model(model: str = "", *, workspace: str = "", cycle: str = "", backend: str = "cpu") -> Model:
    """Open a model to encode, score and search with.

    Args:
        model: name in the registry of the workspace (default: the only one), to open its served pair, or the path or
            URI of a checkpoint, <workspace>/checkpoints/<cycle>/step-<n>.
        workspace: folder or URI; default: that of the checkpoint, else of the settings.
        cycle: open the vectors and the model of this cycle instead of the served pair.
        backend: device, as the setting `backend`.
    Raises ConfigError, CheckpointError, DataError.
    """
    is_checkpoint = CHECKPOINTS in model
    if is_checkpoint and not workspace:
        workspace = model.rpartition(f"/{CHECKPOINTS}")[0]
    flags = {"--workspace": workspace, "--model-name": "" if is_checkpoint else model, "--backend": backend}
    settings = resolve(
        project_files(Path.cwd()), os.environ, [(flag, value) for flag, value in flags.items() if value]
    ).settings
    stop = StopSignal()
    opened = open_storage(settings.workspace, retry=settings.storage, stop=stop)
    return open_model(settings, opened, model if is_checkpoint else "", cycle, stop)
