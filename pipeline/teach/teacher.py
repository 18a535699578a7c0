"""Find the teacher (train.teacher), and compute its scores and vectors on a device.

A checkpoint of trnpipe has vectors, and scores if its head was trained on the features of the data. The folder of a
sentence-transformers model is imported as such a checkpoint, without scores. A cross-encoder only has scores, and runs
in `transformers`.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from torch import Tensor

from pipeline.backends import Backend, Batch
from pipeline.checkpoint.store import KIND, Checkpoint, open_checkpoint
from pipeline.compile.identity import evaluation_plan, open_part_guard
from pipeline.compile.manifest import GraphWatch, Plan
from pipeline.context import StageContext
from pipeline.convert.folder import ImportSource, open_source, read_folder_settings
from pipeline.convert.importing import ImportDefaults, read_model, store_import
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.batch_order import Bucket, locate
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.optional import missing_package
from pipeline.data.loader import to_tensors
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import TokenSetInfo
from pipeline.data.tokenizer import TextTokenizer, Tokens, fit_pairs, pack, token_windows
from pipeline.embed.engine import Embedder, open_embedder
from pipeline.embed.plan import longest_text
from pipeline.evaluate.score import ScoreProgram
from pipeline.io import atomic
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, open_storage
from pipeline.model.config import InputSpec, ModelConfig
from pipeline.model.hf import CONFIG, read_config
from pipeline.parallel.process_group import open_device
from pipeline.registry.checkpoints import CHECKPOINTS, production_prefix, read_checkpoint
from pipeline.registry.checkpoints import locate as locate_checkpoint
from pipeline.retrieval.products import decode_tokens, to_tokens
from pipeline.settings import Settings

_CROSS_ENCODER = "ForSequenceClassification"
_SPEC = InputSpec(vocab_size=0, pad_id=0, labels=("0", "1"), label_gains=(0.0, 1.0))


@dataclass(frozen=True)
class TeacherRef:
    """The storage and prefix of a checkpoint, or a foreign folder, and the size of the vectors (0 if it has none)."""

    width: int
    source: tuple[Storage, str] | ImportSource


def find_teacher(settings: Settings, ctx: StageContext) -> TeacherRef | None:
    """Look up the teacher without reading its weights. Returns None if `train.teacher` is not set.

    Raises ConfigError if it is neither a checkpoint nor a supported folder, and CheckpointError if it is damaged.
    """
    name = settings.train.teacher
    if not name:
        return None
    if "/" not in name:
        location = ctx.workspace, _production(name, ctx)
    else:
        location = locate_checkpoint(name, settings, ctx.workspace)
    if name.startswith(CHECKPOINTS) or "/" not in name or _is_checkpoint(*location):
        return TeacherRef(read_checkpoint(*location).state.model.encoder.hidden_size, location)
    source = open_source(name, retry=settings.storage, stop=ctx.stop)
    if source.has(CONFIG) and _is_cross_encoder(source.read(CONFIG)):
        return TeacherRef(0, source)
    folder = read_folder_settings(source, ModelConfig().pooling).folder
    config = read_config(source.read(folder + CONFIG), source.where(folder + CONFIG))
    return TeacherRef(config.size.hidden_size, source)


def _production(model: str, ctx: StageContext) -> str:
    """Return the checkpoint that was in production when this cycle first asked, so that later attempts use the same."""
    key = f"cycles/{ctx.cycle}/teach/{model}.json"
    prefix = production_prefix(ctx.workspace, model)
    if prefix is None:
        raise ConfigError(
            f"train.teacher is {model}, but no model of this name is in production",
            expected="a model in production, a checkpoint, or the path or URI of a folder",
            next_command="trnpipe registry list",
        )
    ctx.workspace.write_if_absent(key, json.dumps({"checkpoint": prefix}).encode())
    return str(json.loads(ctx.workspace.read_bytes(key))["checkpoint"])


def _is_checkpoint(storage: Storage, prefix: str) -> bool:
    manifest = read_manifest(storage, prefix)
    return manifest is not None and manifest.kind == KIND


def _is_cross_encoder(config: bytes) -> bool:
    try:
        names = json.loads(config).get("architectures") or []
    except (ValueError, AttributeError):
        return False
    return any(str(name).endswith(_CROSS_ENCODER) for name in names)


# The texts of training rows. Prepared data only contains tokens, so a teacher with a different tokenizer reads texts
# that were decoded from them, which lose upper case and whatever else the normaliser of the data's tokenizer removes.


@dataclass(frozen=True)
class RowTexts:
    """The texts and features of training rows, which are numbered over all buckets."""

    rows: TokenRows
    info: TokenSetInfo
    tokenizer: bytes

    def read(self, numbers: Int64s, fields: Sequence[str]) -> Arrays:
        return self.rows.read(*locate(self.rows.sizes, numbers), len(self.rows.sizes) - 1, fields)

    def tokens(self, side: str, numbers: Int64s) -> Tokens:
        return to_tokens(self.read(numbers, (side,))[side], self.rows.pad_id)

    def decoded(self, side: str, numbers: Int64s) -> list[str]:
        """Decode the texts of N rows and remove the prefix that was prepended to them."""
        texts, prefix = decode_tokens(self.tokens(side, numbers), self.tokenizer), self.prefix(side)
        if prefix:
            tokens = TextTokenizer(self.tokenizer).encode([prefix])
            prefix = decode_tokens(tokens, self.tokenizer)[0].strip()
        return [text.removeprefix(prefix).strip() for text in texts]

    def prefix(self, side: str) -> str:
        return self.info.query_prefix if side == "query" else self.info.product_prefix


# The two kinds of teachers.

_WINDOW = 512
DOING = "computing scores and vectors of the teacher (finished parts are kept)"


class Teacher(Protocol):
    """A model that scores pairs of rows, and computes vectors if `width` is not 0. `digest` identifies its results."""

    digest: str
    width: int
    name: str

    @property
    def backend(self) -> Backend: ...

    def scores_pairs(self, info: TokenSetInfo, *, mined: bool) -> bool:
        """Return whether the model can score the judged pairs of the data, or the mined pairs."""

    def vectors(self, texts: RowTexts, side: str, numbers: Int64s) -> Float32s:
        """Compute the unit vectors of the queries or products of N rows."""

    def batches(self, texts: RowTexts, queries: Int64s, products: Int64s) -> Iterator[tuple[Int64s, Batch]]:
        """Yield batches of static shapes for N pairs of rows, and the indices of the pairs in each batch."""

    def logits(self, batch: Batch) -> Tensor:
        """Compute the logits [B, K] of a batch on the device."""


def score_pairs(teacher: Teacher, texts: RowTexts, queries: Int64s, products: Int64s, ctx: StageContext) -> Float32s:
    """Score N pairs of rows by the logit of the best label, or by the only logit of a model without labels."""
    scores, started = np.zeros(len(queries), dtype=np.float32), deque[Int64s]()

    def feed() -> Iterator[Batch]:
        for chosen, batch in teacher.batches(texts, queries, products):
            started.append(chosen)
            yield batch

    with teacher.backend.loader(feed()) as ready:
        for batch in ready:
            ctx.stop.raise_if_set(DOING)
            (host,) = teacher.backend.to_host([teacher.logits(batch)])
            chosen, logits = started.popleft(), host.numpy().astype(np.float64)
            best, others = logits[:, -1], logits[:, :-1]
            with np.errstate(invalid="ignore"):  # the caller checks for NaN
                score = best - np.logaddexp.reduce(others, axis=1) if others.shape[1] else best
            scores[chosen] = score[: len(chosen)]
    return scores


class CheckpointTeacher:
    """A teacher that has the architecture of trnpipe."""

    def __init__(
        self, checkpoint: Checkpoint, digest: str, buckets: Sequence[Bucket], settings: Settings, ctx: StageContext
    ) -> None:
        """Describe the teacher without loading it. `digest` identifies its weights."""
        state = checkpoint.state
        self.width = state.model.encoder.hidden_size
        self.name = state.origin.uri if state.origin else checkpoint.uri
        applied = (settings.embed.precision, longest_text(settings, checkpoint), settings.train.precision)
        self.digest = fingerprint([digest, *applied, settings.embed.chunks])
        self.settings, self.inputs = settings.model_copy(update={"model": state.model}), state.inputs
        self.trained_head = state.trained_head
        self._checkpoint, self._buckets, self._ctx = checkpoint, buckets, ctx

    def scores_pairs(self, info: TokenSetInfo, *, mined: bool) -> bool:
        """Return whether the head was trained on the features of the data. Mined pairs do not have any features."""
        ids = tuple(feature.num_ids for feature in info.categorical)
        fits = (self.inputs.numeric, self.inputs.categorical_ids) == (info.numeric, ids)
        return self.trained_head and fits and not (mined and (info.numeric or ids))

    def vectors(self, texts: RowTexts, side: str, numbers: Int64s) -> Float32s:
        windows = token_windows(self._tokens(texts, side, numbers), _WINDOW)
        return np.concatenate(list(self._embedder.stream(windows)))

    def batches(self, texts: RowTexts, queries: Int64s, products: Int64s) -> Iterator[tuple[Int64s, Batch]]:
        tokens = {"query": self._tokens(texts, "query", queries), "product": self._tokens(texts, "product", products)}
        features, tokenizer = texts.read(products, ("numeric", "categorical")), self._tokenizer
        bucket, _, _ = fit_pairs(tokens["query"], tokens["product"], self._buckets)
        size = min(self.settings.train.micro_batch_size, self.settings.train.global_batch_size)
        for number, shape in enumerate(self._buckets):
            lengths = {"query": shape.query_tokens, "product": shape.product_tokens}
            pairs = np.flatnonzero(bucket == number)
            for first in range(0, len(pairs), size):
                chosen = pairs[first : first + size]
                index = np.resize(chosen, size)  # repeats pairs to fill the last batch
                arrays = {name: values[index] for name, values in features.items()}
                for side, length in lengths.items():
                    special = {"pad_id": tokenizer.pad_id, "sep_id": tokenizer.sep_id}
                    arrays[side] = pack(tokens[side], index, length, **special, dtype=np.int32)
                yield chosen, to_tensors(arrays)

    def logits(self, batch: Batch) -> Tensor:
        return self._program.outputs(batch).logits

    def _tokens(self, texts: RowTexts, side: str, numbers: Int64s) -> Tokens:
        """Return the tokens of texts for the tokenizer of this teacher."""
        prefix = self.inputs.query_prefix if side == "query" else self.inputs.product_prefix
        same = self._checkpoint.state.tokenizer_fingerprint == texts.info.tokenizer_fingerprint
        if same and prefix == texts.prefix(side):
            return texts.tokens(side, numbers)
        return self._tokenizer.encode([prefix + text for text in texts.decoded(side, numbers)])

    @cached_property
    def backend(self) -> Backend:
        return open_device(self.settings.backend, self._ctx.world)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._checkpoint.tokenizer(), self._checkpoint.uri)

    def graph_plan(self, device: str) -> Plan:
        """Return the plan of the graphs of this teacher, for which the compile stage stores a manifest."""
        return evaluation_plan(self.settings, self.inputs, self._buckets, self._ctx.world.world_size, device)

    @cached_property
    def _watch(self) -> GraphWatch:
        backend, settings = self.backend, self.settings
        if not (backend.is_lazy or backend.compiles_steps):
            return GraphWatch()
        plan = self.graph_plan(backend.device_name())
        return open_part_guard(self._ctx.workspace, plan, backend, settings.compile, self._ctx.console)

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._checkpoint, self.backend, self.settings.embed, self._watch, stop=self._ctx.stop)

    @cached_property
    def _program(self) -> ScoreProgram:
        train = self.settings.train
        one_rate = train.optimizer.has_one_rate
        return ScoreProgram.of_checkpoint(
            self._checkpoint, self.backend, train.precision, self._watch, has_one_rate=one_rate
        )


def open_teacher(ref: TeacherRef, buckets: Sequence[Bucket], settings: Settings, ctx: StageContext) -> Teacher:
    """Read and verify the files of the teacher. Raises CheckpointError, ConfigError or DataError."""
    scratch = ctx.scratch / "teacher"
    if not isinstance(ref.source, ImportSource):
        checkpoint = open_checkpoint(*ref.source, scratch)
        return CheckpointTeacher(checkpoint, checkpoint.digest, buckets, settings, ctx)
    if not ref.width:
        try:
            from pipeline.teach.cross_encoder import CrossEncoderTeacher
        except ImportError as error:
            raise missing_package("transformers", "a cross-encoder as train.teacher", error) from error
        return CrossEncoderTeacher(ref.source, buckets, settings, ctx)
    # Import the folder into a scratch folder of this machine, as `trnpipe import` would into the workspace.
    local = open_storage(f"file://{scratch}", stop=ctx.stop)
    with atomic.exclusive(ctx.scratch / "teacher.lock", ctx.stop), atomic.staging_dir(ctx.scratch) as staging:
        model = read_model(ref.source, ImportDefaults(ModelConfig(), _SPEC, None, seed=0), staging)
        checkpoint, _ = store_import(local, model, settings_hash="", code_version="", scratch=staging)
    return CheckpointTeacher(checkpoint, checkpoint.state.identity, buckets, settings, ctx)
