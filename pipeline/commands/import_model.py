"""`trnpipe import PATH`: a model of other tools becomes a checkpoint of the workspace, to train on or to embed with."""

import json
import shlex
from collections.abc import Iterator

from pipeline.checkpoint.store import Checkpoint
from pipeline.commands import ToolCall
from pipeline.context import StageContext, open_context
from pipeline.convert.folder import open_source
from pipeline.convert.importing import ForeignModel, Given, read_model, store_import
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
        given, are_known = _given(settings, ctx, for_file=bool(source.file))
        model = read_model(source, given, scratch)
        with atomic.exclusive(ctx.scratch / "import.lock", stop):  # two at once would commit the same folder
            checkpoint, already = store_import(
                ctx.workspace, model, settings_hash=ctx.settings_hash, code_version=ctx.code_version, scratch=scratch
            )
    say(one_line(f"import: {model.origin.format} {model.origin.uri}"))
    for line in _lines(model, checkpoint.state.max_tokens, are_known=are_known):
        say(f"  {one_line(line)}")
    say(f"{'imported already' if already else 'committed'}: {checkpoint.uri}")
    say(one_line(_next(settings, model, checkpoint)))
    return EXIT_OK


def _given(settings: Settings, ctx: StageContext, *, for_file: bool) -> tuple[Given, bool]:
    """Return classes and features of the prepared data, else of the settings; and whether either names them."""
    prepared, tokenizer = find_prepared(ctx), None
    shapes = shapes_of(settings, ctx, lambda _: None) if prepared else expected_shapes(settings)
    if for_file:
        tokenizer = given_tokenizer(settings.data, None, ctx.stop)
        if tokenizer is None and prepared:
            key = f"{prepared.tokenizer}/tokenizer.json"
            tokenizer = TextTokenizer(ctx.workspace.read_bytes(key), ctx.workspace.uri(key))
    are_known = bool(prepared or settings.data.labels)
    return Given(settings.model, shapes.spec, tokenizer, settings.train.seed), are_known


def _lines(model: ForeignModel, max_tokens: int | None, *, are_known: bool) -> Iterator[str]:
    config, spec = model.config, model.spec
    size = f"{config.encoder.num_layers} x {config.encoder.hidden_size}, {config.encoder.num_heads} heads"
    yield (
        f"encoder {config.factory or size}, {spec.vocab_size:,} tokens, {config.pooling} pooling,"
        f" texts to {max_tokens or config.max_positions} tokens"
    )
    classes = ", ".join(f"{label}: {gain:.3g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    features = f"{len(spec.numeric)} numeric and {len(spec.categorical_ids)} categorical features"
    head = "came with it" if model.new_head is None else f"new, from seed {model.new_head}"
    yield f"head of {spec.num_classes} classes ({classes}), {features}: {head}"
    yield from (f"note: {note}" for note in model.notes)
    if model.new_head is not None and not are_known:
        yield (
            "note: nothing is prepared and data.labels is empty, so the classes are assumed; embedding needs none; to"
            " train on, give --data.labels or prepare the cycle first"
        )


def _next(settings: Settings, model: ForeignModel, checkpoint: Checkpoint) -> str:
    """Return the commands that train on, with the flags that give the settings the shape of the imported model."""
    spec, data = model.spec, settings.data
    prefixes = {"query-prefix": spec.query_prefix, "product-prefix": spec.product_prefix}
    known = {"query-prefix": data.query_prefix, "product-prefix": data.product_prefix}
    prepare = "".join(f" --data.{name} {shlex.quote(text)}" for name, text in prefixes.items() if text != known[name])
    flags = "".join(f" --model.{flag}" for flag in _model_flags(settings.model, checkpoint.state.model))
    return f"next: trnpipe prepare{prepare}, then trnpipe train, with --train.start {checkpoint.uri}{flags}"


def _model_flags(ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
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
            yield f"{name.replace('_', '-')} {text}"
