"""`trnpipe embed verify`: are a cycle's vectors whole, right and those of its catalogue; exit 65 when they are not."""

import sys
from collections.abc import Callable
from functools import partial

from pipeline.backends import open_host
from pipeline.command_table import ToolCall
from pipeline.context import StageContext, open_context
from pipeline.core.errors import EXIT_OK, DataError
from pipeline.core.progress import Say, shown_on
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer
from pipeline.embed.engine import open_embedder
from pipeline.embed.plan import catalogue_storage, open_pinned, pinned_plan
from pipeline.embed.vectors import VectorSet, open_vectors
from pipeline.embed.verify import (
    Check,
    Picked,
    VerifyReport,
    check_ann,
    check_catalogue,
    check_drift,
    check_files,
    check_numbers,
    check_sample,
    check_unique,
    guarded,
    judge_processes,
    skipped,
)
from pipeline.settings import Settings
from pipeline.telemetry.console import Console


def run(settings: Settings, stop: StopSignal, say: Say, call: ToolCall) -> int:
    """Verify the vectors of the cycle. Raises DataError naming what is wrong."""
    # With --json stdout is for machines.
    console = Console(stream=sys.stderr if "--json" in call.switches else None)
    with open_context(settings, stop) as ctx, shown_on(console.progress):
        vectors = open_vectors(ctx.workspace, ctx.cycle)
        checks: list[Check] = []
        for check in _checks(settings, ctx, vectors):
            checks.append(found := check())
            if "--json" not in call.switches:
                say(found.line())
    report = VerifyReport(cycle=vectors.info.cycle, rows=vectors.info.rows, checks=tuple(checks))
    if "--json" in call.switches:
        say(report.model_dump_json(indent=1))
    if report.failed:
        raise DataError(
            f"the vectors of cycle {report.cycle} are not as they should be: "
            + "; ".join(f"{check.name}: {check.seen}" for check in report.failed),
            expected="every check to pass",
            next_command=f"delete {vectors.storage.uri(vectors.prefix)} and embed again, or embed in a new cycle",
        )
    return EXIT_OK


def _checks(settings: Settings, ctx: StageContext, vectors: VectorSet) -> list[Callable[[], Check]]:
    """The cheap ones first; the sample is picked while the catalogue is read."""
    config = settings.embed.verify
    picked: list[Picked] = []

    def catalogue() -> Check:
        if not config.catalogue:
            return skipped("catalogue", "embed.verify.catalogue is off")
        plan = pinned_plan(ctx.workspace, ctx.cycle)
        if plan is None or plan.fingerprint != vectors.info.plan:
            return skipped("catalogue", "the plan of these vectors is gone, and with it what the catalogue was")
        check, found = check_catalogue(
            vectors,
            plan,
            catalogue_storage(plan, settings, ctx),
            sample=config.sample,
            judged=judge_processes(settings.embed.tokenise_processes, ctx.stop),
        )
        picked.extend(found)
        return check

    def sample() -> Check:
        if not picked:
            return skipped("sample", "no text was picked: the catalogue was not read, or embed.verify.sample is 0")
        checkpoint = open_pinned(vectors.info.model, settings, ctx)
        fp32 = settings.embed.model_copy(update={"precision": "fp32"})
        return check_sample(
            vectors,
            picked,
            TextTokenizer(checkpoint.tokenizer()),
            open_embedder(checkpoint, open_host(), fp32, stop=ctx.stop).stream,
            max_tokens=int(str(vectors.info.made_by["max_tokens"])),
            min_cosine=config.min_cosine,
        )

    def previous() -> Check:
        name = vectors.info.previous
        if name is None:
            return skipped("drift", "there was no finished cycle before")
        if not ctx.workspace.stat(f"embeddings/{name}/MANIFEST.json"):
            return skipped("drift", f"the vectors of cycle {name} are gone")
        return check_drift(vectors, open_vectors(ctx.workspace, name), ctx.scratch, config.min_drift_cosine, ctx.stop)

    checks: dict[str, Callable[[], Check]] = {
        "files": lambda: check_files(vectors),
        "numbers": lambda: check_numbers(vectors, config.norm_tolerance, ctx.stop),
        "unique": lambda: check_unique(vectors, ctx.scratch, ctx.stop),
        "catalogue": catalogue,
        "sample": sample,
        "drift": previous,
        "ann": lambda: check_ann(
            vectors,
            rows=config.ann_rows,
            queries=config.ann_queries,
            min_recall=config.min_recall,
            stop=ctx.stop,
        ),
    }
    return [partial(guarded, name, check) for name, check in checks.items()]
