"""Inference with a trained model, which can encode texts, score pairs, and search the catalogue."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa

from pipeline.backends import Backend, Batch
from pipeline.checkpoint.store import Checkpoint
from pipeline.context import check_workspace, load_result, scratch_folder
from pipeline.core.arrays import Float32s, Float64s, Int64s
from pipeline.core.errors import CheckpointError, ConfigError, DataError, NumericError
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.encode import bucket_arrays, encode_rows
from pipeline.data.lexical import LEXICAL_NAMES, numeric_names
from pipeline.data.loader import to_tensors
from pipeline.data.rows import CHARACTERS_PER_TOKEN, RawBatch, RowChunk, cut_chunks, plan_columns, to_fields
from pipeline.data.token_sets import QuarantinedRow, TokenSetInfo, read_token_sets, token_set_prefixes
from pipeline.data.tokenizer import TextTokenizer, token_windows
from pipeline.data.validate import CleanRows, RowRules, validate_chunk
from pipeline.embed.engine import Embedder, open_embedder
from pipeline.embed.vectors import VectorSet, find_vectors, shorten_vectors, vectors_prefix
from pipeline.evaluate.score import ScoreProgram, to_probabilities
from pipeline.inference.index import ProductIndex, open_index
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, open_storage
from pipeline.model.relevance import RelevanceInputs
from pipeline.parallel.process_group import open_device
from pipeline.parallel.world import World
from pipeline.registry.checkpoints import CHECKPOINTS, locate
from pipeline.registry.model import DeployedPair, Registry, resolve_model_name
from pipeline.registry.signing import open_signed
from pipeline.retrieval.search import fuse_by_rank
from pipeline.settings import Settings, project_files, resolve

Kind = Literal["query", "product"]
Order = Literal["vectors", "words", "hybrid"]
_WINDOW_TEXTS = 16_384
_BATCH_PAIRS = 256
_PAIR = ("query", "title")
_MISSING = {"nan", "NaT", "<NA>"}  # as text, of numbers and of pandas
Pair = tuple[str, str] | Mapping[str, object]
"""A query and a product title, or a mapping from column names to values, which can include `text` and features."""


@dataclass(frozen=True)
class PairScores:
    """The scores of N pairs."""

    labels: tuple[str, ...]
    """The K grades, starting with the least relevant."""
    probabilities: Float64s
    """The probability of each grade, of shape [N, K]."""
    gains: Float64s
    """The expected gain of each pair, of shape [N]."""

    def __len__(self) -> int:
        return len(self.gains)

    @property
    def grades(self) -> list[str]:
        """Return the most probable grade of each pair."""
        return [self.labels[grade] for grade in self.probabilities.argmax(axis=1).tolist()]


@dataclass(frozen=True)
class Hit:
    """A search result."""

    id: Any
    title: str
    cosine: float | None
    """The similarity to the query, or None if the product was only found by its words."""
    ranks: Mapping[Order, int]
    """The rank (starting at 1) by each order that has this product among its top results."""


class Model:
    """A model for inference, loaded from a verified checkpoint. Use `load_model` to create one.

    If the catalogue was embedded with this checkpoint, the model can also search it.
    """

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
        """Return the cycle and step of the checkpoint."""
        return f"{self.checkpoint.state.cycle}/step-{self.checkpoint.state.step}"

    def encode(self, texts: str | Sequence[str], kind: Kind = "query") -> Float32s:
        """Encode texts as unit vectors, in the same way as `trnpipe embed` and `trnpipe search`.

        Returns an array of shape [N, D], or [D] for a single text. Raises ConfigError for an unknown kind, DataError if
        a value is not a text, NumericError if a vector is not finite, and Preempted.
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
            raise DataError("a value is not a text that can be encoded as UTF-8", expected="texts") from error
        blocks = list(self._embedder.stream(token_windows(tokens, _WINDOW_TEXTS)))
        vectors = np.concatenate([np.zeros((0, self._embedder.dim), dtype=np.float32), *blocks])
        self._check(vectors, "vectors")
        return vectors[0] if isinstance(texts, str) else vectors

    def similarity(self, queries: Float32s, products: Float32s) -> Float32s:
        """Compute the cosine similarities of shape [N, M] between unit vectors of shape [N, D] and [M, D]."""
        return np.atleast_2d(queries) @ np.atleast_2d(products).T

    def score(self, pairs: Sequence[Pair]) -> PairScores:
        """Score pairs of a query and a product. Raises DataError if a pair is not valid."""
        rows = list[Mapping[str, object]]()
        for index, pair in enumerate(pairs):
            if not isinstance(pair, Mapping) and (isinstance(pair, str) or len(pair) != len(_PAIR)):
                raise DataError(
                    f"pair {index} is {pair!r}",
                    expected="a query and a title, or a mapping of columns to values",
                    next_command="score([(QUERY, TITLE), ...])",
                )
            rows.append(pair if isinstance(pair, Mapping) else dict(zip(_PAIR, pair, strict=True)))
        config, names = self.row_config, dict.fromkeys(name for row in rows for name in row)
        if not rows:
            labels = self.checkpoint.state.inputs.labels
            return PairScores(labels, np.zeros((0, len(labels))), np.zeros(0))
        plan = plan_columns(config, list(names), "the pairs", judged=False)
        columns = {name: pa.array([_cell(row.get(name)) for row in rows]) for name in plan.inputs}
        batch = RawBatch(to_fields(columns, plan), np.arange(len(rows)))
        (chunk,) = cut_chunks("pairs", [batch], len(rows))
        _, scores, bad = self.score_rows(chunk)
        if bad:
            raise DataError(
                f"pair {bad[0].row}: {bad[0].reason}", expected="a query, a title and all features of the model"
            )
        return scores

    def score_rows(self, chunk: RowChunk) -> tuple[CleanRows, PairScores, list[QuarantinedRow]]:
        """Score a chunk of rows. Returns its valid rows with their scores, and the bad rows with a reason for each."""
        rows, bad, _ = validate_chunk(chunk, RowRules(self.row_config, "flat", (), (), carve_valid=False))
        return rows, self._scored(rows), bad

    def search(self, query: str, top: int = 10, by: Order = "vectors") -> list[Hit]:
        """Return the top products for a query from an exact search of the catalogue.

        Raises ConfigError if the catalogue was not embedded with this model.
        """
        if not query.strip() or top < 1 or by not in get_args(Order):
            raise ConfigError(
                f"search for {query!r}, top {top}, by {by!r}",
                expected=f"a query, a top of at least 1, and by {', '.join(get_args(Order))}",
                next_command='trnpipe search "red running shoes"',
            )
        index = self.index
        vector = shorten_vectors(self.encode(query)[None], index.mapped.vectors.shape[1])[0]
        results = index.search(query, vector, top)
        lists: dict[Order, list[int]] = {
            "vectors": results.vectors.items[0].tolist(),
            "words": results.words.items[0].tolist(),
            "hybrid": fuse_by_rank(*results)[0].tolist(),
        }
        cosines = dict(zip(lists["vectors"], results.vectors.scores[0].tolist(), strict=True))
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
        """Return the search index of the catalogue. It is built and cached by the first call on a machine."""
        if self.vectors is None:
            cycle = self.checkpoint.state.cycle
            raise ConfigError(
                f"the catalogue was not embedded with {self.checkpoint.uri}, so there is nothing to search",
                expected="a model with vectors, which a cycle creates if it promotes its model",
                next_command=f"trnpipe embed --cycle {cycle} --embed.checkpoint {self.checkpoint.prefix}, and then"
                f" trnpipe search QUERY --cycle {cycle} (to serve the vectors of a production model: trnpipe embed, and"
                " then trnpipe embed verify)",
            )
        return open_index(self._workspace, self.vectors, self._stop)

    @cached_property
    def row_config(self) -> DataConfig:
        """Return the data settings with which to read rows for the model.

        The features are those of its training data. If that data was deleted, this falls back to the current settings,
        and raises ConfigError if they don't match the model.
        """
        spec, data = self.checkpoint.state.inputs, self._settings.data
        info = _trained_on(self._workspace, self.checkpoint)
        if info is not None:
            is_lexical = info.numeric[-len(LEXICAL_NAMES) :] == LEXICAL_NAMES
            computed = {*LEXICAL_NAMES, *(name for attribute in spec.attributes for name in attribute.features)}
            numeric = tuple(name for name in info.numeric if name not in computed)
            trained = {"numeric": numeric, "lexical": is_lexical, "categorical": info.categorical}
            data = DataConfig.model_validate(data.model_dump() | trained | {"buckets": info.buckets})
        data = data.model_copy(update={"attributes": spec.attributes})
        numeric, num_ids = numeric_names(data), tuple(feature.num_ids for feature in data.categorical)
        if (numeric, num_ids) != (spec.numeric, spec.categorical_ids):
            raise ConfigError(
                f"the settings list the features {', '.join(numeric)} and {len(num_ids)} categories",
                expected=f"{', '.join(spec.numeric)} and {len(spec.categorical_ids)}, as in {self.checkpoint.uri}",
                next_command="use the same --config as for training the model",
            )
        prefixes = {"query_prefix": spec.query_prefix, "product_prefix": spec.product_prefix}
        return data.model_copy(update={**prefixes, "filter": {}, "slices": (), "labels": ()})

    def _check(self, numbers: Float32s | Float64s, what: str) -> None:
        if not np.isfinite(numbers).all():
            raise NumericError(
                f"{self.checkpoint.uri} computes {what} that are NaN or infinite",
                expected="finite numbers",
                next_command="use a different model with --cycle CYCLE",
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
        if not self.checkpoint.state.trained_head:
            raise ConfigError(
                f"{self.checkpoint.uri} was not trained to score pairs (train.loss.graded_weight is 0)",
                expected="a model with a trained relevance head",
                next_command="trnpipe encode or trnpipe search, which don't need one",
            )
        return ScoreProgram.of_checkpoint(self.checkpoint, self._backend, self._settings.train.precision)

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
                    size = _BATCH_PAIRS if self._backend.is_lazy else count  # for static shapes, repeat the rows
                    indices = first + np.resize(np.arange(count), size)
                    columns = {name: arrays[f"b{number}.{name}"][indices] for name in RelevanceInputs._fields}
                    tokens = {name: columns[name].astype(np.int32) for name in ("query", "product")}
                    yield to_tensors(columns | tokens)

        logits = np.zeros((len(rows.query), inputs.num_classes), dtype=np.float32)
        with self._backend.loader(batches()) as ready:
            for number, batch in enumerate(ready):
                self._stop.raise_if_set("scoring pairs")
                (scored,) = self._backend.to_host([program.outputs(batch).logits])
                logits[started[number]] = scored.numpy()[: len(started[number])]
        probabilities = to_probabilities(logits / self.checkpoint.state.temperature)
        self._check(probabilities, "scores")
        return PairScores(inputs.labels, probabilities, probabilities @ np.array(inputs.label_gains))


def _cell(value: object) -> str | None:
    """Convert a value to text as in a CSV file. Items of a list are joined by spaces. NaN and pandas.NA are missing."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return None if value is None or (not isinstance(value, str) and str(value) in _MISSING) else str(value)


def _trained_on(workspace: Storage, checkpoint: Checkpoint) -> TokenSetInfo | None:
    """Return the description of a checkpoint's training data, or None if that data was deleted."""
    try:
        prepared = load_result(workspace, checkpoint.state.cycle, "prepare")
        prefixes = token_set_prefixes(prepared.outputs) if prepared else ()
        return read_token_sets(workspace, prefixes[-1:])[0].info if prefixes else None
    except DataError:
        return None


def open_model(settings: Settings, workspace: Storage, named: str, cycle: str, stop: StopSignal) -> Model:
    """Open a model for inference.

    This is the checkpoint `named`, the model of `cycle` with its vectors, or by default the served pair. Raises
    ConfigError if there is no model to open, CheckpointError, and DataError.
    """
    check_workspace(workspace)
    scratch, vectors = scratch_folder(settings, workspace, os.environ) / "asked", None
    location, digest = named, ""
    if cycle and not named:
        trained = load_result(workspace, cycle, "train")
        if trained and read_manifest(workspace, vectors_prefix(cycle)) is None:  # refused, or not yet embedded
            location = trained.outputs["checkpoint"]
        else:
            vectors = find_vectors(workspace, cycle)
            location, digest = vectors.info.model.place, vectors.info.model.digest
    elif not named:
        registry = Registry(workspace, resolve_model_name(settings, workspace))
        pair, production = registry.serving(), registry.production()
        if pair is not None:
            vectors = served_vectors(workspace, pair)
            location, digest = pair.checkpoint, pair.digest
        elif production is not None:
            location, digest = production.checkpoint, production.digest
        else:
            raise ConfigError(
                f"{registry.model} has no model in production in {workspace.root}",
                expected="a promoted model, unless a cycle or a checkpoint is specified",
                next_command="make cycle, or trnjobs submit",
            )
    checkpoint = open_signed(*locate(location, settings, workspace), scratch, settings, digest=digest)
    return Model(checkpoint, settings, workspace, vectors, stop)


def served_vectors(workspace: Storage, pair: DeployedPair) -> VectorSet:
    """Find the vectors of a deployed pair. Raises CheckpointError if these have been replaced since."""
    vectors = find_vectors(workspace, pair.vectors.cycle)
    if vectors.manifest.digest != pair.vectors.digest:
        raise CheckpointError(
            f"{workspace.uri(vectors.prefix)} has digest {vectors.manifest.digest}",
            expected=f"{pair.vectors.digest}, as recorded in the registry",
            next_command="trnpipe serving rollback --reason TEXT",
        )
    return vectors


def load_model(model: str = "", *, workspace: str = "", cycle: str = "", backend: str = "cpu") -> Model:
    """Load a model to encode texts, score pairs and search the catalogue with.

    Args:
        model: the name of a model in the registry, whose served pair is loaded, or the path or URI of a checkpoint,
            <workspace>/checkpoints/<cycle>/step-<n>. May be omitted if the registry has only one model.
        workspace: folder or URI of the workspace (default: that of the checkpoint or of the settings).
        cycle: load the model and the vectors of this cycle instead of the served pair.
        backend: the device to run on, like the setting `backend`.

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
