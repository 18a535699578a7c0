"""`trnpipe export`: the promoted model, or a named checkpoint, as a folder for other tools; `vectors`: as one matrix.

What is exported without a name is what is in production, or served.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from pipeline.checkpoint.store import Checkpoint, open_checkpoint
from pipeline.commands import ToolCall
from pipeline.commands.registry import check_flags, readable_model
from pipeline.context import StageContext, open_context
from pipeline.convert.exporting import ExportPlan, check_plan, destination, write_export
from pipeline.convert.source import Format
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import EXIT_OK, CheckpointError, ConfigError
from pipeline.core.format import format_bytes
from pipeline.core.progress import Say
from pipeline.core.stop import StopSignal
from pipeline.data.token_sets import read_token_sets
from pipeline.embed.vectors import find_vectors, write_matrix
from pipeline.io import atomic
from pipeline.io.paths import user_path
from pipeline.model.hf import FAMILIES
from pipeline.registry.checkpoints import lineage, locate
from pipeline.registry.records import read_pointer
from pipeline.registry.serving import read_pair
from pipeline.settings import Settings
from pipeline.stages.inputs import find_prepared

OUT, FORMAT, BUCKET, BATCH_SIZE, FAMILY = "--out", "--format", "--bucket", "--batch-size", "--family"
FORMATS: tuple[Format, ...] = get_args(Format)
MOST = 65_536
"""Tokens of a text, and texts of a batch."""


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Export one checkpoint, or vectors. Raises ConfigError, CheckpointError, DataError, TransientError, Preempted."""
    if call.action == "vectors":
        return _export_vectors(settings, stop, say, call)
    check_flags(call, "export", frozenset({OUT, FORMAT, "--max-tokens", BUCKET, BATCH_SIZE, FAMILY}))
    out, asked, family = call.options.get(OUT, ""), call.options.get(FORMAT, FORMATS[0]), call.options.get(FAMILY)
    if not out:
        raise ConfigError(
            "no folder to export to is given", expected=f"{OUT} DIR", next_command="trnpipe export --help"
        )
    format_ = next((known for known in FORMATS if known == asked), None)
    if format_ is None:
        raise ConfigError(
            f"{FORMAT} {asked}", expected=f"one of {', '.join(FORMATS)}", next_command=f"give another {FORMAT}"
        )
    if family is not None and (family not in FAMILIES or format_ != FORMATS[0]):
        raise ConfigError(
            f"family {family!r} in format {format_}",
            expected=f"one of {', '.join(FAMILIES)}, for format {FORMATS[0]}",
            next_command=f"give another {FAMILY}, or leave it out",
        )
    idle = [name for name in (BUCKET, BATCH_SIZE) if name in call.options and format_ != "torchscript"]
    if idle:
        raise ConfigError(
            f"{idle[0]} does not apply to format {format_}",
            expected="it with torchscript",
            next_command=f"leave {idle[0]} out",
        )
    with open_context(settings, stop) as ctx, atomic.staging_dir(ctx.scratch) as scratch:
        checkpoint, prefix = _checkpoint(settings, ctx, call, ctx.scratch / "exported")
        plan = _plan(settings, ctx, checkpoint, prefix, format_, call)
        check_plan(checkpoint, plan)
        fields = {"checkpoint": checkpoint.uri, "digest": checkpoint.digest, "format": format_}
        with destination(out, retry=settings.storage, stop=stop, scratch=scratch, fields=dict(fields)) as new:
            record = write_export(checkpoint, plan, new, stop)
            size_bytes = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        say(f"export: {checkpoint.uri} as {format_}, texts to {record.max_tokens} tokens")
        say(f"committed: {out}, {format_bytes(size_bytes)}; its README.md tells how to load it")
    return EXIT_OK


def _checkpoint(settings: Settings, ctx: StageContext, call: ToolCall, cache_dir: Path) -> tuple[Checkpoint, str]:
    """The one named, else the promoted one; and its prefix in the workspace, '' for one of another place.

    Raises ConfigError where nothing is promoted, CheckpointError.
    """
    if call.arguments:
        storage, prefix = locate(call.arguments[0], settings, ctx.workspace)
        return open_checkpoint(storage, prefix, cache_dir), prefix if storage is ctx.workspace else ""
    model = readable_model(settings, ctx.workspace)
    found = read_pointer(ctx.workspace, model)
    if found is None:
        raise ConfigError(
            f"nothing is promoted as {model} in {ctx.workspace.root}",
            expected="a model in production, or a checkpoint by name",
            next_command="trnpipe export checkpoints/<cycle>/step-<n> --out DIR",
        )
    pointer, _ = found
    checkpoint = open_checkpoint(ctx.workspace, pointer.checkpoint, cache_dir)
    if checkpoint.digest != pointer.digest:
        raise CheckpointError(
            f"{checkpoint.uri} has digest {checkpoint.digest}",
            expected=f"{pointer.digest}, as it was promoted",
            next_command="trnpipe registry rollback --reason TEXT",
        )
    return checkpoint, pointer.checkpoint


def _plan(
    settings: Settings, ctx: StageContext, checkpoint: Checkpoint, prefix: str, format_: Format, call: ToolCall
) -> ExportPlan:
    state = checkpoint.state
    # Those of the data that the checkpoint was trained on, while it is there; else of the settings.
    prepared = find_prepared(replace(ctx, cycle=state.cycle))
    if prepared is None:
        buckets = settings.data.bucket_shapes
    else:
        token_sets = read_token_sets(ctx.workspace, prepared.token_sets)
        buckets = tuple(Bucket.parse(text) for text in token_sets[0].info.buckets)
    longest = max(buckets, key=lambda bucket: (bucket.product_tokens, bucket.query_tokens))
    known = state.max_tokens or min(max(longest.query_tokens, longest.product_tokens), state.model.max_positions)
    return ExportPlan(
        format=format_,
        max_tokens=call.number("--max-tokens", known, MOST),
        model_name=settings.model_name,
        ancestors=lineage(ctx.workspace, prefix) if prefix else (),  # those of another workspace are there
        family=cast(Any, call.options.get(FAMILY, state.model.architecture)),  # run() has looked at it
        bucket=Bucket.parse(call.options[BUCKET]) if BUCKET in call.options else longest,
        batch_size=call.number(BATCH_SIZE, 1, MOST),
    )


def _export_vectors(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Write the served vectors, or those of a cycle, as one matrix with the ids beside it."""
    check_flags(call, "export", frozenset({OUT}))
    out = call.options.get(OUT, "")
    if not out or "://" in out:
        raise ConfigError(
            f"{OUT} {out or 'is not given'}",
            expected="a local folder: the matrix is memory-mapped there",
            next_command=f"{OUT} DIR, and copy it from there",
        )
    with open_context(settings, stop) as ctx:
        cycle = call.arguments[0] if call.arguments else ""
        served = None if cycle else read_pair(ctx.workspace, readable_model(settings, ctx.workspace))
        if not cycle and served is None:
            raise ConfigError(
                f"nothing is served of {settings.model_name} in {ctx.workspace.root}",
                expected="a pair that trnpipe embed verify has let be served, or a cycle by name",
                next_command=f"trnpipe export vectors CYCLE {OUT} DIR",
            )
        vectors = find_vectors(ctx.workspace, served[0].vectors.cycle if served else cycle)
        if served and vectors.manifest.digest != served[0].vectors.digest:
            raise CheckpointError(
                f"{ctx.workspace.uri(vectors.prefix)} has digest {vectors.manifest.digest}",
                expected=f"{served[0].vectors.digest}, which is served",
                next_command="trnpipe serving rollback --reason TEXT",
            )
        done = write_matrix(vectors, user_path(out), stop)
    say(f"export: {vectors.info.rows:,} vectors of cycle {vectors.info.cycle}, made with {vectors.info.model.place}")
    say(f"committed: {out}, {format_bytes(done.size_bytes)}; open it with trnpipe.open_vectors")
    return EXIT_OK
