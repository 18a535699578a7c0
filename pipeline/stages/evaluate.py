"""The evaluate stage: the candidate against the model in production, a verdict, and promotion or refusal."""

from datetime import UTC, datetime

from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import GateRefused
from pipeline.data.token_sets import read_token_sets
from pipeline.evaluate.gate.judge import way_out
from pipeline.evaluate.models import Models, find_models
from pipeline.evaluate.report import EvaluationReport, load_report, report_key, store_report, table_lines
from pipeline.evaluate.run import run_evaluation
from pipeline.registry.promote import promote, record_refusal, rolled_back_digests
from pipeline.registry.records import (
    Author,
    Pointer,
    current_user,
    production_changes,
    read_history,
    store_verdict,
    verdict_key,
)
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared
from pipeline.telemetry.events import EventName

NAME = "evaluate"
_REASONS_SHOWN = 3


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Judge this cycle's candidate and act on it, or say that it is done already. Raises TrnpipeError.

    A refusal is remembered: the same question is refused again without new work. Production then stays as it is.
    """
    started = datetime.now(UTC)
    sets = read_token_sets(ctx.workspace, load_prepared(ctx).token_sets)
    models = find_models(settings, ctx, sets)
    inputs = models.inputs(settings, ctx, sets)
    earlier = ctx.earlier(NAME)
    if earlier is not None:
        # Perhaps under another model_name, which is no part of the inputs.
        past = read_history(ctx.workspace, settings.model_name) if earlier.figures.get("promoted") else ()
        digest = models.candidate.digest
        promoted = any(entry.digest == digest for entry in production_changes(past))
        # The same question was answered and acted on. What was promoted is the incumbent now, or has been.
        loose = {"code_version"} | ({"incumbent", "gate"} if promoted else set())
        before, now = ({k: v for k, v in one.items() if k not in loose} for one in (earlier.inputs, inputs))
        # It passed, was not promoted, and now should be.
        wanted = settings.evaluate.promote and (models.against_production or bool(settings.evaluate.force_reason))
        if before == now and (promoted or not wanted):
            standing = "promoted" if promoted else "passed, and not promoted"
            if promoted and digest in rolled_back_digests(past):
                again = f"trnpipe registry promote {models.candidate.prefix} --force REASON puts it there again"
                standing = f"promoted, and rolled back since ({again})"
            ctx.console.info(f"evaluate: done already; {standing}, figures in {_report_uri(ctx)}")
            return earlier.model_copy(update={"status": "already_done"})
    known = load_report(ctx.workspace, ctx.cycle)
    pointer = models.pointer
    if pointer is not None and pointer.digest == models.candidate.digest:
        judged = known and (known.candidate.digest, verdict_key(known.cycle))
        asked = models.against_production or (known is not None and known.inputs == inputs)
        if earlier is None and known and asked and (pointer.digest, pointer.verdict) == judged:
            # In production because of this report: killed just before the result.
            return _finish(settings, ctx, models, known, pointer, started)
        if models.against_production:
            ctx.console.info(f"evaluate: nothing new, the candidate is the model in production: {models.candidate.uri}")
            nothing: dict[str, Figure] = {"promoted": False, "nothing_new": True, "since": models.candidate.state.cycle}
            outputs = {"checkpoint": models.candidate.prefix}
            result = ctx.finish(NAME, started, inputs=inputs, outputs=outputs, figures=nothing)
            return store_result(ctx.workspace, result) if earlier is None and ctx.world.is_main else result
    report = known if known is not None and known.inputs == inputs else None
    if report is None:
        report = run_evaluation(settings, ctx, models, sets, inputs)
    if report is None or not ctx.world.is_main:
        return ctx.finish(NAME, started, inputs=inputs, outputs={}, figures={})
    if known is not report:
        store_report(ctx.workspace, report)
    for line in table_lines(report):
        ctx.console.info(line)
    return _conclude(settings, ctx, models, report, started)


def _report_uri(ctx: StageContext) -> str:
    return ctx.workspace.uri(report_key(ctx.cycle))


def _conclude(
    settings: Settings, ctx: StageContext, models: Models, report: EvaluationReport, started: datetime
) -> StageResult:
    """Act on a verdict: it is stored first, then production changes or the refusal is written down, then the result."""
    stored = models.verdict(settings, ctx, report)
    if models.in_workspace:
        store_verdict(ctx.workspace, stored)
    forced, candidate, reasons = settings.evaluate.force_reason.strip(), stored.candidate.checkpoint, stored.reasons
    decision = stored.decision().model_copy(update={"forced": forced})
    author = Author(by=current_user(), cycle=ctx.cycle, settings_hash=ctx.settings_hash, code_version=ctx.code_version)
    fields = {"promote": stored.promote, "forced": bool(forced), "candidate": candidate, "reasons": list(reasons)}
    ctx.events.emit(EventName.GATE_JUDGED, **fields)
    if not stored.promote and not forced:
        if models.in_workspace and models.against_production:
            record_refusal(ctx.workspace, settings.model_name, candidate, decision, author)
        more = f"; and {len(reasons) - _REASONS_SHOWN} more" if len(reasons) > _REASONS_SHOWN else ""
        raise GateRefused(
            f"{models.candidate.uri} is not promoted: {'; '.join(reasons[:_REASONS_SHOWN])}{more}",
            expected="a candidate that reaches the floors, is not worse than allowed, and beaten by no baseline"
            " (gate.*)",
            next_command=f"look at {_report_uri(ctx)}; {way_out(report.verdict)}",
        )
    pointer = None
    if settings.evaluate.promote and (models.against_production or forced):
        name, expected = settings.model_name, models.pointer
        pointer = promote(ctx.workspace, name, candidate, expected=expected, decision=decision, author=author)
    return _finish(settings, ctx, models, report, pointer, started)


def _finish(
    settings: Settings,
    ctx: StageContext,
    models: Models,
    report: EvaluationReport,
    pointer: Pointer | None,
    started: datetime,
) -> StageResult:
    """Finish the result of a candidate that passed, or was forced; `pointer` if it was promoted."""
    info, scores = ctx.console.info, {"candidate_scores": report.candidate.scores}
    info(f"evaluate: figures in {_report_uri(ctx)}, scores in {ctx.workspace.uri(report.candidate.scores)}")
    if pointer is not None:
        how = "promoted by force" if pointer.action == "forced" else "promoted"
        how += " WITHOUT a comparison" if report.verdict.without_comparison else ""
        info(f"evaluate: {how}, generation {pointer.generation}: {ctx.workspace.uri(pointer.checkpoint)}")
    elif not settings.evaluate.promote:
        info("evaluate: passed, and not promoted (evaluate.promote)")
    else:
        production = models.pointer.checkpoint if models.pointer else "nothing"
        why = f"it was not held against production, {production} (evaluate.incumbent)"
        info(f"evaluate: passed, and not promoted: {why}")
    if report.incumbent is not None:
        scores["incumbent_scores"] = report.incumbent.scores
    place = {"checkpoint": models.candidate.prefix} if models.in_workspace else {}
    figures: dict[str, Figure] = {
        "promoted": pointer is not None,
        "forced": pointer is not None and pointer.action == "forced",
        **({"without_comparison": True} if pointer is not None and report.verdict.without_comparison else {}),
        "generation": pointer.generation if pointer else None,
        "rows": report.holdout.rows,
        "queries": report.holdout.queries,
        **report.figures(),
    }
    outputs = place | {"report": report_key(report.cycle)} | scores
    result = ctx.finish(NAME, started, inputs=report.inputs, outputs=outputs, figures=figures)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result
