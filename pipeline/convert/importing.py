"""Import a model of another tool as a checkpoint of the workspace, as if a run had saved it at step 0.

The source is a Hugging Face folder, an export of trnpipe, or a single file of weights.
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
    """Values from the settings or the data of the cycle for a source without a trnpipe head."""

    model: ModelConfig
    spec: InputSpec
    """Classes and features. Vocabulary and padding are taken from the tokenizer."""
    tokenizer: TextTokenizer | None
    """Tokenizer of a single weights file."""
    seed: int
    """Seed of a new head."""

    def spec_for(self, tokenizer: TextTokenizer, **prefixes: str) -> InputSpec:
        changes = {"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad_id}
        return self.spec.model_copy(update={**changes, **{name: text for name, text in prefixes.items() if text}})


@dataclass(frozen=True)
class ForeignModel:
    """A complete relevance model. `weights`: in trnpipe's names, fp32 on the CPU."""

    config: ModelConfig
    spec: InputSpec
    weights: Mapping[str, Tensor]
    tokenizer: TextTokenizer
    origin: Origin
    max_tokens: int | None = None
    new_head: int | None = None
    """Seed of the interactions and the head if they are new, None if they were imported."""
    notes: tuple[str, ...] = ()
    record: ExportRecord | None = None
    """The record of a trnpipe export."""


def read_model(source: ImportSource, defaults: ImportDefaults, scratch: Path) -> ForeignModel:
    """Read and validate a model. `scratch`: folder for downloads.

    Raises CheckpointError for an invalid tensor or file, ConfigError for an unsupported setting, DataError for an
    invalid tokenizer.
    """
    if source.file:
        return _read_weights_file(source, defaults, scratch)
    if source.has(EXPORT_FILE):
        return _read_export(source, scratch)
    if defaults.model.factory is not None:
        raise ConfigError(
            f"{source.uri} cannot be imported with model.factory {defaults.model.factory}",
            expected="an export of trnpipe, or a folder of a supported encoder without model.factory",
            next_command=f"trnpipe train --model.init-from {source.uri}, which loads the weights into such a module",
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
            expected="the same id in both, because the model's positions start from it",
            next_command="copy the tokenizer that belongs to the model",
        )
    name = settings.folder + find_weights(source.storage, join_key(source.folder, settings.folder).strip("/"))
    # Tables are often padded to a round number of rows. One with more rows than config.json has is an error.
    if (spare := hf.vocab_size - spec.vocab_size) > 0:
        notes.append(f"{spare} embeddings without a token are left out")
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
        seen = f"schema {record.schema_version}" if record.weights else f"program only ({record.format})"
        raise invalid(f"{where}: {seen}", f"weights, in schema {SCHEMA_VERSION}")
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
    # Every layer has at least one tensor. Checked before a model of a million layers would be built.
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
    """Read weights, all of which must have the sizes in the settings."""
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
        notes=("sizes and pooling are taken from the model settings",),
    )


def store_import(
    workspace: Storage, model: ForeignModel, *, settings_hash: str, code_version: str, scratch: Path
) -> tuple[Checkpoint, bool]:
    """Return the verified checkpoint, and whether it already existed. `scratch`: an empty folder for this call."""
    parts = {  # everything that determines the checkpoint, by name
        "origin": fingerprint(model.origin.fingerprint),
        "tokenizer": fingerprint(model.tokenizer.fingerprint),
        "model": fingerprint(model.config.used_fields()),
        "inputs": fingerprint(model.spec.used_fields()),
        "max_tokens": fingerprint(model.max_tokens),
        "new_head": fingerprint(model.new_head),
    }
    # The name of the cycle contains the folder or file and a hash of the content, so that imports never collide.
    last = re.sub(r"[^A-Za-z0-9_-]+", "-", model.origin.uri.rstrip("/").rpartition("/")[2]).strip("-")
    name = f"import-{last[:40] or 'model'}-{fingerprint(parts)[:8]}"
    prefix, record = prefix_of(name, 0), model.record
    try:
        return open_checkpoint(workspace, prefix, scratch / "verified"), True
    except CheckpointError:  # missing or damaged, so it is written
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
