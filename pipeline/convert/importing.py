"""Import a model of a different tool.

The model is stored in the workspace as if a training run had saved it as a checkpoint at step 0. The source can be a
Hugging Face folder, a folder written by `trnpipe export`, or a single weights file.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from pipeline.checkpoint.save import Snapshot, commit_snapshot
from pipeline.checkpoint.store import Checkpoint, Origin, TrainState, open_checkpoint, prefix_of
from pipeline.convert.folder import (
    EXPORT_FILE,
    SCHEMA_VERSION,
    TOKENIZER,
    TOKENIZER_BYTES,
    ExportRecord,
    ImportSource,
    read_folder_settings,
    read_tokenizer,
)
from pipeline.core.errors import CheckpointError, ConfigError, first_line
from pipeline.core.fingerprint import fingerprint
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.storage import Storage, join_key
from pipeline.model.config import PRESETS, InputSpec, ModelConfig
from pipeline.model.hf import CONFIG, HEAD_PARTS, as_bert, hf_config, model_from_hf, read_config, to_hf
from pipeline.model.weights import find_weights, load_tensors, template_of, with_encoder, without_wrappers


@dataclass(frozen=True)
class ImportDefaults:
    """Values from the settings or the data of the cycle, which are used for everything that the source lacks."""

    model: ModelConfig
    spec: InputSpec
    """Classes and features of the model. The vocabulary and padding are overridden by the tokenizer."""
    tokenizer: TextTokenizer | None
    """Tokenizer to use for a single weights file."""
    seed: int
    """Random seed for the initial weights of a new head."""

    def spec_for(self, tokenizer: TextTokenizer, **prefixes: str) -> InputSpec:
        changes = {"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad_id}
        return self.spec.model_copy(update={**changes, **{name: text for name, text in prefixes.items() if text}})


@dataclass(frozen=True)
class ForeignModel:
    """A complete relevance model that was read from the files of a different tool or of an export."""

    config: ModelConfig
    spec: InputSpec
    weights: Mapping[str, Tensor]
    """Tensors in fp32 on the CPU, by trnpipe's parameter names."""
    tokenizer: TextTokenizer
    origin: Origin
    max_tokens: int | None = None
    new_head: int | None = None
    """Random seed of the interactions and the head if they are new, or None if they were imported."""
    notes: tuple[str, ...] = ()
    record: ExportRecord | None = None
    """The record of the export if the source is an export of trnpipe."""


def read_model(source: ImportSource, defaults: ImportDefaults, scratch: Path) -> ForeignModel:
    """Read and validate a model. Files are downloaded to `scratch` if necessary.

    Raises CheckpointError if a tensor or file is invalid, ConfigError if a setting is not supported, and DataError if
    the tokenizer is invalid.
    """
    if source.file:
        return _read_weights_file(source, defaults, scratch)
    if source.has(EXPORT_FILE):
        return _read_export(source, scratch)
    if defaults.model.factory is not None:
        raise ConfigError(
            f"{source.uri} cannot be imported with model.factory {defaults.model.factory}",
            expected="an export of trnpipe, or a folder of a supported encoder without model.factory",
            next_command=f"trnpipe train --model.init-from {source.uri}, which loads the weights into your own module",
        )
    return _read_folder(source, defaults, scratch)


def _read_folder(source: ImportSource, defaults: ImportDefaults, scratch: Path) -> ForeignModel:
    settings = read_folder_settings(source, defaults.model.pooling)
    where = source.where(settings.folder + CONFIG)
    hf = read_config(source.read(settings.folder + CONFIG), where)
    size = hf.size.model_dump()
    preset = next((name for name, preset_size in PRESETS.items() if preset_size == hf.size), "")
    sizes = {"preset": preset, **dict.fromkeys(size)} if preset else size
    fields: dict[str, Any] = defaults.model.model_dump() | sizes | hf.fields()
    try:
        config = ModelConfig.model_validate({**fields, "init_from": None, "pooling": settings.pooling})
    except (ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {first_line(error)}", expected="the sizes of an encoder") from error
    tokenizer, max_tokens, notes = read_tokenizer(source, settings.folder, lowercase=settings.lowercase)
    spec = defaults.spec_for(tokenizer, query_prefix=settings.query_prefix, product_prefix=settings.product_prefix)
    if hf.model_type != "bert" and spec.pad_id != hf.pad_token_id:
        raise ConfigError(
            f"{where} has pad_token_id {hf.pad_token_id}, but its tokenizer has {spec.pad_id}",
            expected="the same id in both, because position ids start after it",
            next_command="copy the tokenizer that belongs to the model",
        )
    name = settings.folder + find_weights(source.storage, join_key(source.folder, settings.folder).strip("/"))
    # Embedding tables are often padded to a round number of rows. The padding rows are dropped. However, it is an error
    # if a table has more rows than config.json specifies.
    if (spare := hf.vocab_size - spec.vocab_size) > 0:
        notes.append(f"dropped {spare} embeddings that have no token")
    loaded, model_type = load_tensors(source.local(name, scratch), source.where(name)), hf.model_type
    model = with_encoder(
        loaded, source.where(name), config, spec, defaults.seed, model_type=model_type, same_vocabulary=spare > 0
    )
    return ForeignModel(
        config=config,
        spec=spec,
        weights=model.state_dict(),
        tokenizer=tokenizer,
        max_tokens=min(settings.max_tokens or max_tokens or config.max_positions, config.max_positions),
        origin=Origin(uri=source.uri, format=settings.format, fingerprint=source.fingerprint),
        new_head=defaults.seed,
        notes=(*notes, *settings.notes),
    )


def _read_export(source: ImportSource, scratch: Path) -> ForeignModel:
    record, where = source.json(EXPORT_FILE, ExportRecord), source.where(EXPORT_FILE)

    def invalid(seen: str, expected: str) -> CheckpointError:
        return CheckpointError(
            seen, expected=expected, next_command="export the checkpoint again with --format safetensors"
        )

    if record.schema_version != SCHEMA_VERSION or not record.weights:
        seen = f"schema {record.schema_version}" if record.weights else f"only a program ({record.format})"
        raise invalid(f"{where} has {seen}", f"an export with weights and schema {SCHEMA_VERSION}")
    tokenizer = TextTokenizer(source.read(TOKENIZER, TOKENIZER_BYTES), source.where(TOKENIZER))
    if tokenizer.vocab_size != record.inputs.vocab_size:
        raise invalid(
            f"{source.where(TOKENIZER)} has {tokenizer.vocab_size} tokens",
            f"the {record.inputs.vocab_size} tokens that the model was trained with",
        )
    weights: dict[str, Tensor] = {}
    for name in record.weights:
        weights |= load_tensors(source.local(name, scratch), source.where(name))
    weights = as_bert(weights, record.family, record.inputs.pad_id, source=source.uri)
    config = record.model.model_copy(update={"init_from": None})
    # Every layer has at least one tensor. This is checked first to avoid building a model with a million layers.
    sizes = (config.mlp_sizes, config.feature_sizes, record.inputs.categorical_ids)
    if (layers := config.encoder.num_layers + sum(map(len, sizes))) > len(weights):
        raise invalid(f"{where} has {layers} layers, but its files have only {len(weights)} tensors", "matching files")
    return ForeignModel(
        config=config,
        spec=record.inputs,
        weights=model_from_hf(weights, template_of(config, record.inputs), source=source.uri),
        tokenizer=tokenizer,
        max_tokens=record.max_tokens,
        origin=Origin(uri=source.uri, format=f"trnpipe {record.format}", fingerprint=source.fingerprint),
        record=record,
    )


def _read_weights_file(source: ImportSource, defaults: ImportDefaults, scratch: Path) -> ForeignModel:
    """Read a single weights file. All tensors must have the sizes that are configured in the settings."""
    if defaults.tokenizer is None:
        raise ConfigError(
            f"{source.uri} has no tokenizer",
            expected="the tokenizer.json that belongs to the weights",
            next_command="--data.tokenizer.path FILE, or prepare the cycle's data with it first",
        )
    spec, config = defaults.spec_for(defaults.tokenizer), defaults.model.model_copy(update={"init_from": None})
    loaded = load_tensors(source.local(source.file, scratch), source.uri)
    named = without_wrappers(loaded)
    has_head = any(name.startswith(HEAD_PARTS) for name in named)
    if has_head:
        weights = model_from_hf(named, template_of(config, spec), source=source.uri)
    else:
        architecture = config.architecture
        weights = with_encoder(loaded, source.uri, config, spec, defaults.seed, model_type=architecture).state_dict()
    return ForeignModel(
        config=config,
        spec=spec,
        weights=weights,
        tokenizer=defaults.tokenizer,
        origin=Origin(uri=source.uri, format="file of weights", fingerprint=source.fingerprint),
        new_head=None if has_head else defaults.seed,
        notes=("using the sizes and pooling of the model settings",),
    )


def store_import(
    workspace: Storage, model: ForeignModel, *, settings_hash: str, code_version: str, scratch: Path
) -> tuple[Checkpoint, bool]:
    """Store a model as a checkpoint, unless it was imported before.

    Returns the verified checkpoint and whether it already existed. `scratch` must be an empty folder.
    """
    parts = {  # fingerprints of everything that determines the checkpoint
        "origin": fingerprint(model.origin.fingerprint),
        "tokenizer": fingerprint(model.tokenizer.fingerprint),
        "model": fingerprint(model.config.used_fields()),
        "inputs": fingerprint(model.spec.used_fields()),
        "max_tokens": fingerprint(model.max_tokens),
        "new_head": fingerprint(model.new_head),
    }
    # The cycle name contains the name of the source and a hash of its content, so that different imports never collide.
    last = re.sub(r"[^A-Za-z0-9_-]+", "-", model.origin.uri.rstrip("/").rpartition("/")[2]).strip("-")
    name = f"import-{last[:40] or 'model'}-{fingerprint(parts)[:8]}"
    prefix, record = prefix_of(name, 0), model.record
    try:
        return open_checkpoint(workspace, prefix, scratch / "verified"), True
    except CheckpointError:  # the checkpoint is missing or damaged, so write it below
        pass
    state = TrainState(
        cycle=name,
        step=0,
        max_steps=0,
        identity=fingerprint(parts),
        identity_parts=parts,
        model=model.config,
        inputs=model.spec,
        tokenizer_fingerprint=model.tokenizer.fingerprint,
        watermark=record.watermark if record else "",
        partitions=record.partitions if record else {},
        also_seen=record.also_seen if record else {},
        published=record.published if record else None,
        parent=record.checkpoint if record else None,
        best=None,
        origin=model.origin,
        max_tokens=model.max_tokens,
        trained_head=model.new_head is None and (record is None or record.trained_head),
        settings_hash=settings_hash,
        code_version=code_version,
    )
    config = hf_config(model.config, model.spec)
    snapshot = Snapshot(state, to_hf(model.weights), {}, config, model.tokenizer.data)  # no optimizer moments
    commit_snapshot(workspace, snapshot, scratch / "saving")
    return open_checkpoint(workspace, prefix, scratch / "verified"), False
