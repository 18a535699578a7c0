"""`trnpipe import PATH`: a model of other tools becomes a checkpoint of the workspace, to train on or to embed with."""

import json
import shlex
from collections.abc import Iterator

from pipeline.checkpoint.store import Checkpoint
from pipeline.commands import ToolCall
from pipeline.context import StageContext, open_context
from pipeline.convert.importing import ForeignModel, Given, read_model, store_import
from pipeline.convert.source import open_source
from pipeline.core.errors import EXIT_OK
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, given_tokenizer
from pipeline.io import atomic
from pipeline.model.config import PRESETS, ModelConfig
from pipeline.registry.records import one_line
from pipeline.settings import Settings
from pipeline.stages.inputs import expected_shapes, find_prepared, shapes_of


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Import one model. Raises ConfigError, CheckpointError, DataError, TransientError, Preempted."""
    with open_context(settings, stop) as ctx, atomic.staging_dir(ctx.scratch) as scratch:
        source = open_source(call.arguments[0], retry=settings.storage, stop=stop)
        given, assumed = _given(settings, ctx, for_file=bool(source.file))
        model = read_model(source, given, scratch)
        with atomic.exclusive(ctx.scratch / "import.lock", stop):  # two at once would commit the same folder
            checkpoint, already = store_import(
                ctx.workspace, model, settings_hash=ctx.settings_hash, code_version=ctx.code_version, scratch=scratch
            )
        for line in _lines(settings, model, checkpoint, assumed if model.new_head is not None else "", already):
            say(line[: len(line) - len(line.lstrip())] + one_line(line))
    return EXIT_OK


def _given(settings: Settings, ctx: StageContext, *, for_file: bool) -> tuple[Given, str]:
    """Classes and features of the prepared data of this cycle, else of the settings; and what was assumed."""
    prepared = find_prepared(ctx)
    tokenizer = None
    if prepared is None:
        shapes, known = expected_shapes(settings), bool(settings.data.labels)
        assumed = "" if known else "nothing is prepared and data.labels is empty, so the classes are assumed; "
    else:
        shapes, assumed = shapes_of(settings, ctx, lambda _: None), ""
    if for_file:
        tokenizer = given_tokenizer(settings.data, None, ctx.stop)
        if tokenizer is None and prepared is not None:
            key = f"{prepared.tokenizer}/tokenizer.json"
            tokenizer = TextTokenizer(ctx.workspace.read_bytes(key), ctx.workspace.uri(key))
    return Given(settings.model, shapes.spec, tokenizer, settings.train.seed), assumed


def _lines(
    settings: Settings, model: ForeignModel, checkpoint: Checkpoint, assumed: str, already: bool
) -> Iterator[str]:
    state, spec = checkpoint.state, model.spec
    size = state.model.encoder
    yield f"import: {model.origin.format} {model.origin.uri}"
    shape = f"{size.num_layers} x {size.hidden_size}, {size.num_heads} heads"
    yield (
        f"  encoder {state.model.factory or shape}, {spec.vocab_size:,} tokens, "
        f"{state.model.pooling} pooling, texts to {state.max_tokens or state.model.max_positions} tokens"
    )
    classes = ", ".join(f"{label}: {gain:.3g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    features = f"{len(spec.numeric)} numeric and {len(spec.categorical_ids)} categorical features"
    head = "came with it" if model.new_head is None else f"new, from seed {model.new_head}"
    yield f"  head of {spec.num_classes} classes ({classes}), {features}: {head}"
    for note in model.notes:
        yield f"  note: {note}"
    if assumed:
        yield f"  note: {assumed}embedding needs none; to train on, give --data.labels or prepare the cycle first"
    yield f"{'imported already' if already else 'committed'}: {checkpoint.uri}"
    prefixes = {name: getattr(spec, name) for name in ("query_prefix", "product_prefix")}
    prepare = "".join(
        f" --data.{name.replace('_', '-')} {shlex.quote(text)}"
        for name, text in prefixes.items()
        if text != getattr(settings.data, name)
    )
    flags = "".join(f" {flag}" for flag in _model_flags(settings.model, state.model))
    yield f"next: trnpipe prepare{prepare}, then trnpipe train, with --train.start {checkpoint.uri}{flags}"


def _model_flags(ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
    """Flags that give the settings the shape of the imported model."""
    wanted = theirs.model_dump(mode="json", exclude={"init_from", "dropout"})
    have = ours.model_dump(mode="json")
    if theirs.encoder == PRESETS[theirs.preset]:
        wanted = {name: value for name, value in wanted.items() if name not in theirs.encoder.model_dump()}
        have |= {} if ours.encoder == theirs.encoder else {"preset": ""}
    else:
        del wanted["preset"]
    for name, value in wanted.items():
        if have[name] != value:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            text = shlex.quote(json.dumps(value)) if isinstance(value, dict) else text
            yield f"--model.{name.replace('_', '-')} {text}"
