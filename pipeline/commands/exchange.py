"""`trnpipe import` and `trnpipe export`, which exchange models and vectors with other tools.

`import` converts a model to a checkpoint, which can be used for training and embedding. `export` converts the
production model or a given checkpoint to a folder for other tools. `export vectors` writes the served vectors, or those
of a given cycle, as a single matrix.
"""

import json
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import cast, get_args

import numpy as np

from pipeline.checkpoint.store import Checkpoint
from pipeline.commands import ToolCall
from pipeline.context import StageContext, check_workspace, open_context
from pipeline.convert.exporting import ExportPlan, destination, write_export
from pipeline.convert.folder import Format, open_source
from pipeline.convert.importing import ForeignModel, ImportDefaults, read_model, store_import
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import EXIT_OK, ConfigError, DataError
from pipeline.core.format import format_bytes
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.data.shards import Arrays, TokenRows
from pipeline.data.token_sets import open_rows, read_token_sets
from pipeline.data.tokenizer import TextTokenizer, given_tokenizer
from pipeline.embed.vectors import find_vectors, write_matrix
from pipeline.inference.model import served_vectors
from pipeline.io import atomic
from pipeline.io.paths import user_path
from pipeline.io.storage import open_storage
from pipeline.model.config import PRESETS, ModelConfig
from pipeline.registry.checkpoints import lineage, locate
from pipeline.registry.model import read_pair, resolve_model_name
from pipeline.registry.records import one_line, read_pointer
from pipeline.registry.signing import open_keys, open_signed, sign_folder
from pipeline.settings import Settings
from pipeline.stages.inputs import expected_shapes, find_prepared, shapes_of


def run_import(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Import a model. Raises ConfigError, CheckpointError, DataError, TransientError, Preempted."""
    with open_context(settings, stop) as ctx, atomic.staging_dir(ctx.scratch) as scratch:
        keys = open_keys(settings, stop).public
        source = open_source(call.arguments[0], retry=settings.storage, stop=stop, keys=keys)
        defaults, are_known = _import_defaults(settings, ctx, for_file=bool(source.file))
        model = read_model(source, defaults, scratch)
        with atomic.exclusive(ctx.scratch / "import.lock", stop):  # concurrent imports would commit the same folder
            checkpoint, already = store_import(
                ctx.workspace, model, settings_hash=ctx.settings_hash, code_version=ctx.code_version, scratch=scratch
            )
    say(one_line(f"import: {model.origin.format} {model.origin.uri}"))
    for line in _import_lines(model, checkpoint.state.max_tokens, are_known=are_known):
        say(f"  {one_line(line)}")
    say(f"{'imported already' if already else 'committed'}: {checkpoint.uri}")
    say(one_line(_next(settings, model, checkpoint)))
    return EXIT_OK


def _import_defaults(settings: Settings, ctx: StageContext, *, for_file: bool) -> tuple[ImportDefaults, bool]:
    """Return defaults for properties that the imported model doesn't specify, such as its classes and features.

    They are those of the prepared data, or of the settings if nothing was prepared. The second return value is False if
    the classes are only assumed.
    """
    prepared, tokenizer = find_prepared(ctx), None
    shapes = shapes_of(settings, ctx, lambda _: None) if prepared else expected_shapes(settings)
    if for_file:
        tokenizer = given_tokenizer(settings.data, None, ctx.stop)
        if tokenizer is None and prepared:
            key = f"{prepared.tokenizer}/tokenizer.json"
            tokenizer = TextTokenizer(ctx.workspace.read_bytes(key), ctx.workspace.uri(key))
    are_known = bool(prepared or settings.data.labels)
    return ImportDefaults(settings.model, shapes.spec, tokenizer, settings.train.seed), are_known


def _import_lines(model: ForeignModel, max_tokens: int | None, *, are_known: bool) -> Iterator[str]:
    config, spec = model.config, model.spec
    size = f"{config.encoder.num_layers} x {config.encoder.hidden_size}, {config.encoder.num_heads} heads"
    yield (
        f"encoder {config.factory or size}, {spec.vocab_size:,} tokens, {config.pooling} pooling,"
        f" texts of up to {max_tokens or config.max_positions} tokens"
    )
    classes = ", ".join(f"{label}: {gain:.3g}" for label, gain in zip(spec.labels, spec.label_gains, strict=True))
    features = f"{len(spec.numeric)} numeric and {len(spec.categorical_ids)} categorical features"
    head = "imported" if model.new_head is None else f"new, from seed {model.new_head}"
    yield f"head of {spec.num_classes} classes ({classes}), {features}: {head}"
    yield from (f"note: {note}" for note in model.notes)
    if model.new_head is not None and not are_known:
        yield (
            "note: the classes are assumed, because no data was prepared and data.labels is empty. This does not"
            " affect embedding. Before training, set --data.labels or prepare the cycle"
        )


def _next(settings: Settings, model: ForeignModel, checkpoint: Checkpoint) -> str:
    """Return the commands to train the imported model, including flags for its architecture."""
    spec, data = model.spec, settings.data
    prefixes = {"query-prefix": spec.query_prefix, "product-prefix": spec.product_prefix}
    current = {"query-prefix": data.query_prefix, "product-prefix": data.product_prefix}
    prepare = "".join(f" --data.{name} {shlex.quote(text)}" for name, text in prefixes.items() if text != current[name])
    flags = "".join(f" --model.{flag}" for flag in _model_flags(settings.model, checkpoint.state.model))
    return f"next: trnpipe prepare{prepare}, then trnpipe train, with --train.start {checkpoint.uri}{flags}"


def _model_flags(current: ModelConfig, imported: ModelConfig) -> Iterator[str]:
    required = imported.model_dump(mode="json", exclude={"init_from", "dropout"})
    have = current.model_dump(mode="json")
    if imported.encoder == PRESETS[imported.preset]:
        required = {name: value for name, value in required.items() if name not in imported.encoder.model_dump()}
        have |= {} if current.encoder == imported.encoder else {"preset": ""}
    else:
        del required["preset"]
    for name, value in required.items():
        if have[name] != value:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            text = shlex.quote(json.dumps(value)) if isinstance(value, dict) else text
            yield f"{name.replace('_', '-')} {text}"


# Export.

OUT, FORMAT, TOKENS, BUCKET, BATCH_SIZE = "--out", "--format", "--max-tokens", "--bucket", "--batch-size"
SIGN = "--sign"
_SAMPLE_ROWS = 64
MOST = 65_536
"""Maximum number of tokens per text and of texts per batch."""


def run_export(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Export a checkpoint, or vectors. Raises ConfigError, CheckpointError, DataError, TransientError, Preempted."""
    if call.action == "vectors":
        return _export_vectors(settings, stop, say, call)
    format_, formats = call.options.get(FORMAT, "sentence-transformers"), get_args(Format)
    problem = "" if call.options.get(OUT) else f"{OUT} is not set"
    if format_ not in formats:
        problem = f"{FORMAT} {format_}"
    elif format_ != "torchscript" and (idle := sorted({BUCKET, BATCH_SIZE} & call.options.keys())):
        problem = f"{idle[0]} does not apply to format {format_}"
    elif SIGN in call.switches and not settings.registry.sign_key:
        problem = f"{SIGN} has no key, because registry.sign_key is empty"
    if problem:
        raise ConfigError(
            problem,
            expected=f"{OUT} DIR and {FORMAT} {', '.join(formats)}. {BUCKET} and {BATCH_SIZE} require torchscript",
            next_command="trnpipe export --help",
        )
    keys = open_keys(settings, stop, to_sign=SIGN in call.switches)
    if not call.arguments or "://" not in call.arguments[0]:
        check_workspace(open_storage(settings.workspace, retry=settings.storage, stop=stop))
    with open_context(settings, stop) as ctx, atomic.staging_dir(ctx.scratch) as scratch:
        checkpoint, prefix = _checkpoint(settings, ctx, call)
        plan = _plan(settings, ctx, checkpoint, prefix, call)
        fields = {"checkpoint": checkpoint.uri, "digest": checkpoint.digest, "format": format_}
        retry, out = settings.storage, call.options[OUT]
        with destination(out, retry=retry, stop=stop, scratch=scratch, fields=dict(fields)) as new:
            record = write_export(checkpoint, plan, new, stop)
            sign_folder(new, keys)
            size_bytes = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        say(f"export: {checkpoint.uri} as {format_}, texts of up to {record.max_tokens} tokens")
        say(f"committed: {out}, {format_bytes(size_bytes)} (see its README.md for how to load it)")
    return EXIT_OK


def _checkpoint(settings: Settings, ctx: StageContext, call: ToolCall) -> tuple[Checkpoint, str]:
    """Open the given checkpoint, or the promoted one by default.

    Also returns its prefix in the workspace, which is empty if it is stored elsewhere. Raises ConfigError if no
    checkpoint is promoted, and CheckpointError.
    """
    cache_dir = ctx.scratch / "exported"
    if call.arguments:
        storage, prefix = locate(call.arguments[0], settings, ctx.workspace)
        return open_signed(storage, prefix, cache_dir, settings), prefix if storage is ctx.workspace else ""
    model = resolve_model_name(settings, ctx.workspace)
    stored = read_pointer(ctx.workspace, model)
    if stored is None:
        raise ConfigError(
            f"{model} has no promoted checkpoint in {ctx.workspace.root}",
            expected="a model in production, unless a checkpoint is specified",
            next_command="trnpipe export checkpoints/<cycle>/step-<n> --out DIR",
        )
    promoted = stored[0]
    checkpoint = open_signed(ctx.workspace, promoted.checkpoint, cache_dir, settings, digest=promoted.digest)
    return checkpoint, promoted.checkpoint


def _plan(settings: Settings, ctx: StageContext, checkpoint: Checkpoint, prefix: str, call: ToolCall) -> ExportPlan:
    state, format_ = checkpoint.state, cast(Format, call.options.get(FORMAT, "sentence-transformers"))
    # Use the buckets of the training data, or those to expect if that data was deleted.
    buckets, rows = expected_shapes(settings).buckets, None
    with suppress(DataError):
        if prepared := find_prepared(replace(ctx, cycle=state.cycle)):
            sets = read_token_sets(ctx.workspace, prepared.token_sets[:1])
            buckets = tuple(map(Bucket.parse, sets[0].info.buckets))
            if format_ == "onnx":  # only one partition, because partitions on S3 are downloaded
                rows = _sample_rows(open_rows(ctx.workspace, sets, "train", ctx.scratch / "exported"))
    longest = max(buckets, key=lambda bucket: (bucket.product_tokens, bucket.query_tokens))
    default = state.max_tokens or min(max(longest.query_tokens, longest.product_tokens), state.model.max_positions)
    return ExportPlan(
        format=format_,
        max_tokens=call.number(TOKENS, default, MOST),
        model_name=settings.model_name,
        ancestors=lineage(ctx.workspace, prefix) if prefix else (),  # lineage is only recorded in the same workspace
        bucket=Bucket.parse(call.options[BUCKET]) if BUCKET in call.options else longest,
        batch_size=call.number(BATCH_SIZE, 1, MOST),
        rows=rows,
    )


def _sample_rows(rows: TokenRows) -> Arrays | None:
    """Return the first rows of the largest bucket, or None if there are no rows."""
    bucket = max((number for number, size in enumerate(rows.sizes) if size), default=None)
    if bucket is None:
        return None
    count = min(rows.sizes[bucket], _SAMPLE_ROWS)
    # Repeat a single row, because torch.export does not support a dynamic dimension of size one.
    numbers = np.resize(np.arange(count, dtype=np.int64), max(2, count))
    return rows.read(np.full(len(numbers), bucket), numbers, bucket, ("query", "product", "numeric", "categorical"))


def _export_vectors(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Export the served vectors, or those of a given cycle, as a matrix with ids."""
    out = call.options.get(OUT, "")
    if not out or "://" in out:
        raise ConfigError(
            f"{OUT} {out or 'is not set'}",
            expected="a local folder, because the matrix is written through a memory map",
            next_command=f"use {OUT} DIR, and copy the folder afterwards",
        )
    check_workspace(open_storage(settings.workspace, retry=settings.storage, stop=stop))
    with open_context(settings, stop) as ctx:
        served = None if call.arguments else read_pair(ctx.workspace, resolve_model_name(settings, ctx.workspace))
        if not call.arguments and served is None:
            raise ConfigError(
                f"{settings.model_name} has no served vectors in {ctx.workspace.root}",
                expected="vectors that passed trnpipe embed verify, unless a cycle is specified",
                next_command=f"trnpipe export vectors CYCLE {OUT} DIR",
            )
        vectors = served_vectors(ctx.workspace, served[0]) if served else find_vectors(ctx.workspace, call.arguments[0])
        done = write_matrix(vectors, user_path(out), stop)
    say(f"export: {vectors.info.rows:,} vectors of cycle {vectors.info.cycle}, embedded by {vectors.info.model.place}")
    say(f"committed: {out}, {format_bytes(done.size_bytes)} (open it with trnpipe.open_vectors)")
    return EXIT_OK
