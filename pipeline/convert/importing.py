"""A model of another tool as a checkpoint of the workspace, as if a run had saved it at step 0.

It is read and checked from a Hugging Face folder, an export of trnpipe, or a bare file of weights.
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
    """What a source without a head of ours does not tell, from the settings or the data of the cycle."""

    model: ModelConfig
    spec: InputSpec
    """Classes and features; vocabulary and padding are the tokenizer's."""
    tokenizer: TextTokenizer | None
    """For a bare file."""
    seed: int
    """Of a fresh head."""

    def spec_for(self, tokenizer: TextTokenizer, **prefixes: str) -> InputSpec:
        changes = {"vocab_size": tokenizer.vocab_size, "pad_id": tokenizer.pad_id}
        return self.spec.model_copy(update={**changes, **{name: text for name, text in prefixes.items() if text}})


@dataclass(frozen=True)
class ForeignModel:
    """A whole relevance model. `weights`: our names, fp32 on the CPU."""

    config: ModelConfig
    spec: InputSpec
    weights: Mapping[str, Tensor]
    tokenizer: TextTokenizer
    origin: Origin
    max_tokens: int | None = None
    new_head: int | None = None
    """Seed of interactions and head when they are new; None when they came with it."""
    notes: tuple[str, ...] = ()
    record: ExportRecord | None = None
    """Of a folder that trnpipe exported."""


def read_model(source: ImportSource, given: ImportDefaults, scratch: Path) -> ForeignModel:
    """Read and check everything. `scratch`: for files that are not local.

    Raises CheckpointError naming a tensor or file that does not fit, ConfigError naming an architecture or a setting,
    DataError for a tokenizer.
    """
    if source.file:
        return _bare_file(source, given, scratch)
    if source.has(EXPORT_FILE):
        return _own_export(source, scratch)
    if given.model.factory is not None:
        raise ConfigError(
            f"{source.uri} to be imported with model.factory {given.model.factory}",
            expected="an export of trnpipe, or a folder of an encoder known here and no model.factory",
            next_command=f"trnpipe train --model.init-from {source.uri}, which takes the weights of such a module",
        )
    return _folder(source, given, scratch)


def _folder(source: ImportSource, given: ImportDefaults, scratch: Path) -> ForeignModel:
    there = read_folder_settings(source, given.model.pooling)
    where = source.where(there.folder + CONFIG)
    described = read_config(source.read(there.folder + CONFIG), where)
    size = described.size.model_dump()
    preset = next((name for name, known in PRESETS.items() if known == described.size), "")
    sizes = {"preset": preset, **dict.fromkeys(size)} if preset else size
    fields: dict[str, Any] = given.model.model_dump() | sizes | described.fields()
    try:
        config = ModelConfig.model_validate({**fields, "init_from": None, "pooling": there.pooling})
    except (ValidationError, ConfigError) as error:
        raise ConfigError(f"{where}: {first_line(error)}", expected="the sizes of an encoder") from error
    tokenizer, longest, notes = read_tokenizer(source, there.folder, lowercase=there.lowercase)
    spec = given.spec_for(tokenizer, query_prefix=there.query_prefix, product_prefix=there.product_prefix)
    if described.model_type != "bert" and spec.pad_id != described.pad_token_id:
        raise ConfigError(
            f"{where} has pad_token_id {described.pad_token_id}, its tokenizer {spec.pad_id}",
            expected="one number: positions of the model count from it",
            next_command="copy the tokenizer that belongs to the model",
        )
    name = there.folder + find_weights(source.storage, join_key(source.folder, there.folder).strip("/"))
    # Tables are often filled up to a round number. One that is larger than config.json says is refused.
    if (spare := described.vocab_size - spec.vocab_size) > 0:
        notes.append(f"{spare} embeddings that no token has are left out")
    loaded, model_type = load_tensors(source.local(name, scratch), source.where(name)), described.model_type
    model = with_encoder(
        loaded, source.where(name), config, spec, given.seed, model_type=model_type, same_vocabulary=spare > 0
    )
    return ForeignModel(
        config=config,
        spec=spec,
        weights=model.state_dict(),
        tokenizer=tokenizer,
        max_tokens=min(there.max_tokens or longest or config.max_positions, config.max_positions),
        origin=Origin(uri=source.uri, format=there.format, fingerprint=source.fingerprint),
        new_head=given.seed,
        notes=(*notes, *there.notes),
    )


def _own_export(source: ImportSource, scratch: Path) -> ForeignModel:
    record, where = source.json(EXPORT_FILE, ExportRecord), source.where(EXPORT_FILE)

    def refused(seen: str, expected: str) -> CheckpointError:
        return CheckpointError(
            seen, expected=expected, next_command="export the checkpoint again with --format safetensors"
        )

    if record.schema_version != SCHEMA_VERSION or not record.weights:
        seen = f"schema {record.schema_version}" if record.weights else f"program only ({record.format})"
        raise refused(f"{where}: {seen}", f"weights, in schema {SCHEMA_VERSION}")
    tokenizer = TextTokenizer(source.read(TOKENIZER, TOKENIZER_BYTES), source.where(TOKENIZER))
    if tokenizer.vocab_size != record.inputs.vocab_size:
        raise refused(
            f"{source.where(TOKENIZER)} has {tokenizer.vocab_size} tokens",
            f"{record.inputs.vocab_size}, as the model was trained with",
        )
    weights: dict[str, Tensor] = {}
    for name in record.weights:
        weights |= load_tensors(source.local(name, scratch), source.where(name))
    weights = as_bert(weights, record.family, record.inputs.pad_id, source=source.uri)
    config = record.model.model_copy(update={"init_from": None})
    # Every layer has a tensor at least. A record of a million layers must not be built to find that out.
    sizes = (config.mlp_sizes, config.feature_sizes, record.inputs.categorical_ids)
    if (layers := config.encoder.num_layers + sum(map(len, sizes))) > len(weights):
        raise refused(f"{where} tells of {layers} layers, its files of {len(weights)} tensors", "the files beside it")
    return ForeignModel(
        config=config,
        spec=record.inputs,
        weights=model_from_hf(weights, template_of(config, record.inputs), source=source.uri),
        tokenizer=tokenizer,
        max_tokens=record.max_tokens,
        origin=Origin(uri=source.uri, format=f"trnpipe {record.format}", fingerprint=source.fingerprint),
        record=record,
    )


def _bare_file(source: ImportSource, given: ImportDefaults, scratch: Path) -> ForeignModel:
    """Read weights whose sizes are those of the settings; the tensors must fit them to the last."""
    if given.tokenizer is None:
        raise ConfigError(
            f"{source.uri} has no tokenizer",
            expected="the tokenizer.json that belongs to the weights",
            next_command="--data.tokenizer.path FILE, or prepare the cycle's data with it first",
        )
    spec, config = given.spec_for(given.tokenizer), given.model.model_copy(update={"init_from": None})
    loaded = load_tensors(source.local(source.file, scratch), source.uri)
    named = without_wrappers(loaded)
    has_head = any(name.startswith(HEAD_PARTS) for name in named)
    if has_head:
        weights = model_from_hf(named, template_of(config, spec), source=source.uri)
    else:
        architecture = config.architecture
        weights = with_encoder(loaded, source.uri, config, spec, given.seed, model_type=architecture).state_dict()
    return ForeignModel(
        config=config,
        spec=spec,
        weights=weights,
        tokenizer=given.tokenizer,
        origin=Origin(uri=source.uri, format="file of weights", fingerprint=source.fingerprint),
        new_head=None if has_head else given.seed,
        notes=("sizes and pooling are those of the model settings",),
    )


def store_import(
    workspace: Storage, model: ForeignModel, *, settings_hash: str, code_version: str, scratch: Path
) -> tuple[Checkpoint, bool]:
    """Return the verified checkpoint, and whether it was there already. `scratch`: an empty folder of one's own."""
    parts = {  # what decides the checkpoint, by name
        "origin": fingerprint(model.origin.fingerprint),
        "tokenizer": fingerprint(model.tokenizer.fingerprint),
        "model": fingerprint(model.config.used_fields()),
        "inputs": fingerprint(model.spec.used_fields()),
        "max_tokens": fingerprint(model.max_tokens),
        "new_head": fingerprint(model.new_head),
    }
    # Stands for a cycle: of the folder or file, and of the content, so that no two imports meet.
    last = re.sub(r"[^A-Za-z0-9_-]+", "-", model.origin.uri.rstrip("/").rpartition("/")[2]).strip("-")
    name = f"import-{last[:40] or 'model'}-{fingerprint(parts)[:8]}"
    prefix, record = prefix_of(name, 0), model.record
    try:
        return open_checkpoint(workspace, prefix, scratch / "verified"), True
    except CheckpointError:  # not there, or damaged: it is written (again)
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
    described = hf_config(model.config, model.spec)
    snapshot = Snapshot(state, to_hf(model.weights), {}, described, model.tokenizer.data)  # no moments
    commit_snapshot(workspace, snapshot, scratch / "saving")
    return open_checkpoint(workspace, prefix, scratch / "verified"), False
