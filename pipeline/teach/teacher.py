"""Find the teacher (train.teacher), and compute its vectors or scores on a device.

A checkpoint of trnpipe has vectors. The folder of a sentence-transformers model is imported as such a checkpoint. A
cross-encoder has scores, and runs in `transformers`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from pipeline.checkpoint.store import KIND, Checkpoint, open_checkpoint
from pipeline.compile.identity import embed_plan, open_part_guard
from pipeline.compile.manifest import GraphWatch, Plan
from pipeline.context import StageContext
from pipeline.convert.folder import ImportSource, open_source, read_folder_settings
from pipeline.convert.importing import ImportDefaults, read_model, store_import
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.batch_order import Bucket, locate
from pipeline.core.errors import ConfigError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.optional import missing_package
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import TokenSetInfo
from pipeline.data.tokenizer import TextTokenizer, Tokens, token_windows
from pipeline.embed.engine import Embedder, open_embedder
from pipeline.embed.plan import longest_text
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
            next_command=f"--train.teacher ./{model}" if Path(model).is_dir() else "trnpipe registry list",
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
DOING = "computing vectors or scores of the teacher (finished parts are kept)"


class ScoringTeacher(Protocol):
    """A model that scores pairs. `digest` identifies its results."""

    digest: str
    width: Literal[0]
    name: str

    def scores(self, texts: RowTexts, queries: Int64s, products: Int64s) -> Float32s:
        """Score N pairs of rows by the logit of the best label, or by the only logit of a model without labels."""


class CheckpointTeacher:
    """A model of trnpipe that computes vectors of texts. Its head is not used. `digest` identifies its results."""

    def __init__(self, checkpoint: Checkpoint, digest: str, settings: Settings, ctx: StageContext) -> None:
        """Describe the teacher without loading it. `digest` identifies its weights."""
        state = checkpoint.state
        self.width = state.model.encoder.hidden_size
        self.name = state.origin.uri if state.origin else checkpoint.uri
        applied = (settings.embed.precision, longest_text(settings, checkpoint), settings.embed.chunks)
        self.digest = fingerprint([digest, *applied])
        self.settings, self.inputs = settings.model_copy(update={"model": state.model}), state.inputs
        self._checkpoint, self._ctx = checkpoint, ctx

    def vectors(self, texts: RowTexts, side: str, numbers: Int64s) -> Float32s:
        """Compute the unit vectors of the queries or products of N rows."""
        windows = token_windows(self._tokens(texts, side, numbers), _WINDOW)
        return np.concatenate(list(self._embedder.stream(windows)))

    def _tokens(self, texts: RowTexts, side: str, numbers: Int64s) -> Tokens:
        """Return the tokens of texts for the tokenizer of this teacher."""
        prefix = self.inputs.query_prefix if side == "query" else self.inputs.product_prefix
        same = self._checkpoint.state.tokenizer_fingerprint == texts.info.tokenizer_fingerprint
        if same and prefix == texts.prefix(side):
            return texts.tokens(side, numbers)
        return self._tokenizer.encode([prefix + text for text in texts.decoded(side, numbers)])

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self._checkpoint.tokenizer(), self._checkpoint.uri)

    def graph_plan(self, device: str, world_size: int) -> Plan:
        """Return the plan of the graphs of this teacher, for which the compile stage stores a manifest."""
        settings = self.settings
        return embed_plan(settings.model, settings.embed, settings.compile, self.inputs, device, world_size)

    @cached_property
    def _embedder(self) -> Embedder:
        ctx, settings = self._ctx, self.settings
        backend, watch = open_device(settings.backend, ctx.world), GraphWatch()
        if backend.is_lazy or backend.compiles_steps:
            plan = self.graph_plan(backend.device_name(), ctx.world.world_size)
            watch = open_part_guard(ctx.workspace, plan, backend, settings.compile, ctx.console)
        return open_embedder(self._checkpoint, backend, settings.embed, watch, stop=ctx.stop)


Teacher = CheckpointTeacher | ScoringTeacher


def open_teacher(ref: TeacherRef, buckets: Sequence[Bucket], settings: Settings, ctx: StageContext) -> Teacher:
    """Read and verify the files of the teacher. Raises CheckpointError, ConfigError or DataError."""
    scratch = ctx.scratch / "teacher"
    if not isinstance(ref.source, ImportSource):
        checkpoint = open_checkpoint(*ref.source, scratch)
        return CheckpointTeacher(checkpoint, checkpoint.digest, settings, ctx)
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
    return CheckpointTeacher(checkpoint, checkpoint.state.identity, settings, ctx)
