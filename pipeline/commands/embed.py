"""`trnpipe embed verify`, which verifies that the vectors of a cycle are complete, correct and match the catalogue.

If they pass all checks and their model is in production, the vectors are served (see registry/model.py).
"""

import sys
from collections.abc import Iterator
from datetime import UTC, datetime

from pipeline.backends import open_host
from pipeline.commands import ToolCall
from pipeline.context import StageContext, check_workspace, open_context, store_result, with_backend
from pipeline.core.errors import EXIT_OK, DataError
from pipeline.core.progress import Say, use_display
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.embed.config import max_chunk_tokens
from pipeline.embed.digest import VerifyCheck, digest_key
from pipeline.embed.engine import open_embedder
from pipeline.embed.plan import catalogue_storage, open_pinned, pinned_plan
from pipeline.embed.vectors import VectorSet, find_vectors
from pipeline.embed.verify import (
    SampleText,
    check_catalogue,
    check_files,
    check_numbers,
    check_sample,
    check_unique,
    make_digest,
    run_check,
    skipped_check,
)
from pipeline.io.storage import open_storage
from pipeline.registry.model import DeployedPair, Vectors, serve_verified_pair
from pipeline.registry.records import Author, current_user
from pipeline.registry.signing import open_keys
from pipeline.settings import Settings
from pipeline.telemetry.console import Console

NAME = "verify"


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Verify the vectors of the cycle, and serve them if possible. Raises DataError if a check fails."""
    # With --json, only JSON must be written to stdout.
    console = Console(stream=sys.stderr if "--json" in call.switches else None)
    check_workspace(open_storage(settings.workspace, retry=settings.storage, stop=stop))
    with open_context(settings, stop, command_line=(NAME,)) as ctx, use_display(console.progress):
        started, settings = datetime.now(UTC), with_backend(settings, ctx, NAME)
        vectors = find_vectors(ctx.workspace, ctx.cycle)
        checks: list[VerifyCheck] = []
        for check in _checks(settings, ctx, vectors):
            checks.append(check)
            if "--json" not in call.switches:
                say(check.line())
        digest, key = make_digest(checks, vectors), digest_key(ctx.cycle)
        ctx.workspace.write_bytes(key, digest.to_json())
        if "--json" in call.switches:
            say(digest.model_dump_json(indent=1, include={"cycle", "rows", "checks"}))
        if not digest.passed:
            raise DataError(
                f"the vectors of cycle {digest.cycle} failed verification: "
                + "; ".join(f"{check.name}: {check.seen}" for check in checks if check.outcome == "fail"),
                expected="all checks to pass",
                next_command=f"delete {vectors.storage.uri(vectors.prefix)} and embed again, or embed in a new cycle",
            )
        console.info(_serve(ctx, vectors))
        result = ctx.finish(
            NAME,
            started,
            inputs={"vectors": digest.vectors_digest, "checkpoint": digest.model_digest},
            outputs={"embeddings": vectors.prefix, "digest": key},
            figures={"rows": digest.rows}
            | {f"rows_{name}": value for name, value in digest.counts}
            | {f"{check.name}_{name}": value for check in checks for name, value in check.figures.items()}
            | {"checks_skipped": ", ".join(check.name for check in checks if check.outcome == "skipped")},
        )
        store_result(ctx.workspace, result)
    return EXIT_OK


def _serve(ctx: StageContext, vectors: VectorSet) -> str:
    """Serve the vectors if their model is in production, and return a status message."""
    info = vectors.info
    pair = DeployedPair(
        model=info.model.name,
        checkpoint=info.model.place,
        digest=info.model.digest,
        vectors=Vectors(
            cycle=info.cycle,
            digest=vectors.manifest.digest,
            generation=info.generation,
            rows=info.rows,
            dim=info.layout.dim,
        ),
        author=Author(
            by=current_user(), cycle=ctx.cycle, settings_hash=ctx.settings_hash, code_version=ctx.code_version
        ),
    )
    return f"verify: {serve_verified_pair(ctx.workspace, pair, open_keys(ctx.settings, ctx.stop))}"


def _checks(settings: Settings, ctx: StageContext, vectors: VectorSet) -> Iterator[VerifyCheck]:
    """Run all checks, beginning with the cheapest, and yield their results.

    Texts for the sample check are collected while the catalogue check reads the catalogue.
    """
    picked: list[SampleText] = []

    def catalogue() -> VerifyCheck:
        plan = pinned_plan(ctx.workspace, ctx.cycle)
        if plan is None or plan.fingerprint != vectors.info.plan:
            return skipped_check(
                "catalogue", "the plan of these vectors no longer exists, so it is unknown which catalogue was embedded"
            )
        storage, num_workers = catalogue_storage(plan, settings, ctx), settings.data.num_workers
        check, texts = check_catalogue(vectors, plan, storage, ctx.stop, num_workers=num_workers)
        picked.extend(texts)
        return check

    def sample() -> VerifyCheck:
        if not picked:
            return skipped_check("sample", "no texts were sampled, because the catalogue was not read")
        checkpoint = open_pinned(vectors.info.model, settings, ctx)
        made_by = vectors.info.made_by
        max_tokens, chunks = int(str(made_by["max_tokens"])), int(str(made_by.get("chunks", 1)))
        chunk = max_chunk_tokens(max_tokens, chunks)
        buckets = (*(length for length in settings.embed.buckets if length < chunk), chunk)
        as_made = {"precision": "fp32", "chunks": chunks, "buckets": buckets, "tokens_per_batch": 0}
        fp32 = settings.embed.model_copy(update=as_made)
        return check_sample(
            vectors,
            picked,
            TextTokenizer(checkpoint.tokenizer()),
            open_embedder(checkpoint, open_host(), fp32, stop=ctx.stop).stream,
            prefix=checkpoint.state.inputs.product_prefix,
            max_tokens=max_tokens,
        )

    yield run_check("files", lambda: check_files(vectors))
    yield run_check("numbers", lambda: check_numbers(vectors, ctx.stop))
    yield run_check("unique", lambda: check_unique(vectors, ctx.stop))
    yield run_check("catalogue", catalogue)
    yield run_check("sample", sample)
