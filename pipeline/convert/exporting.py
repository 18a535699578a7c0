"""A checkpoint as a folder for other tools."""

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import tokenizers
import torch

from pipeline.checkpoint.state import Parent
from pipeline.checkpoint.store import Checkpoint
from pipeline.convert import card
from pipeline.convert.hf_folder import WEIGHTS, write_encoder, write_sentence_settings, write_tokenizer, write_weights
from pipeline.convert.programs import SUFFIXES, Shapes, check_shapes, write_programs
from pipeline.convert.record import FILE, ExportRecord, Format
from pipeline.core.errors import ConfigError
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.model.hf import from_hf
from pipeline.model.relevance import build_model
from pipeline.registry.lineage import Ancestor

STATE_DICT = "model.pt"


@dataclass(frozen=True)
class ExportPlan:
    """What is asked for."""

    format: Format
    max_tokens: int
    shapes: Shapes
    """Of programs; not used by the other formats."""
    model_name: str
    ancestors: tuple[Ancestor, ...]


def check_plan(checkpoint: Checkpoint, plan: ExportPlan) -> None:
    """Raises ConfigError for texts longer than the model has positions for."""
    positions = checkpoint.state.model.max_positions
    if not 3 <= plan.max_tokens <= positions:
        raise ConfigError(
            f"texts of {plan.max_tokens} tokens",
            expected=f"3 to {positions}, which the model has positions for",
            next_command="give --max-tokens",
        )
    if plan.format in SUFFIXES:
        check_shapes(plan.shapes, positions)


def write_export(checkpoint: Checkpoint, plan: ExportPlan, folder: Path, stop: StopSignal) -> ExportRecord:
    """Fill an empty folder. Raises CheckpointError, DataError, OSError, Preempted."""
    state = checkpoint.state
    tokenizer = TextTokenizer(checkpoint.tokenizer(), f"{checkpoint.uri}/tokenizer.json")
    record = ExportRecord(
        format=plan.format,
        checkpoint=Parent(uri=checkpoint.uri, digest=checkpoint.digest, cycle=state.cycle, step=state.step),
        model=state.model,
        inputs=state.inputs,
        max_tokens=plan.max_tokens,
        tokenizer_fingerprint=state.tokenizer_fingerprint,
        watermark=state.watermark,
        partitions=state.partitions,
        settings_hash=state.settings_hash,
        code_version=state.code_version,
        weights=(),
    )
    write_tokenizer(folder, tokenizer, plan.max_tokens)
    stop.raise_if_set("exporting a model")
    record = _write_model(record, checkpoint, plan, folder, stop)
    facts = card.CardFacts(plan.model_name, state, plan.ancestors, _lower_cases(tokenizer))
    (folder / card.FILE).write_text(card.card(record, facts), encoding="utf-8")
    (folder / FILE).write_bytes(record.model_dump_json(indent=1).encode() + b"\n")
    return record


def _write_model(
    record: ExportRecord, checkpoint: Checkpoint, plan: ExportPlan, folder: Path, stop: StopSignal
) -> ExportRecord:
    state, weights = checkpoint.state, checkpoint.weights()
    model = build_model(state.model, state.inputs, seed=0)
    model.load_state_dict(from_hf(weights, model.state_dict(), source=checkpoint.uri))  # every tensor, in its shape
    if plan.format in SUFFIXES:
        with progress("exporting programs", len(plan.shapes.lengths) + len(plan.shapes.buckets), "programs") as done:

            def step() -> None:
                stop.raise_if_set("exporting a program")
                done(1)

            programs = write_programs(folder, model, state.inputs, plan.shapes, plan.format, step=step)
        return record.model_copy(update={"programs": programs})
    if plan.format == "safetensors":
        write_weights(folder / WEIGHTS, weights)
        return record.model_copy(update={"weights": (WEIGHTS,)})
    if plan.format == "torch":
        buffer = BytesIO()  # torch reports a full disk as a RuntimeError
        torch.save({name: tensor.contiguous() for name, tensor in weights.items()}, buffer)
        (folder / STATE_DICT).write_bytes(buffer.getbuffer())
        return record.model_copy(update={"weights": (STATE_DICT,)})
    files = write_encoder(folder, weights, state)
    if plan.format == "sentence-transformers":
        write_sentence_settings(folder, state, plan.max_tokens)
    return record.model_copy(update={"weights": files})


def _lower_cases(tokenizer: TextTokenizer) -> bool:
    normalizer = tokenizers.Tokenizer.from_str(tokenizer.data.decode()).normalizer
    return normalizer is not None and normalizer.normalize_str("A") == "a"
