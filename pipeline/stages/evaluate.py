"""The evaluate stage, which compares the candidate with the production model and promotes or refuses it."""

from datetime import UTC, datetime

from pipeline.context import Figure, StageContext, StageResult, store_result
from pipeline.core.errors import ConfigError, GateRefused
from pipeline.data.token_sets import read_token_sets
from pipeline.evaluate.gate.judge import refusal_advice
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
from pipeline.registry.signing import ModelKeys, open_keys
from pipeline.settings import Settings
from pipeline.stages.inputs import load_prepared
from pipeline.telemetry.events import EventName

NAME = "evaluate"
_REASONS_SHOWN = 3


def run(settings: Settings, ctx: StageContext) -> StageResult:
    """Judge the candidate of this cycle, and promote it if it passes.

    If none of the inputs have changed since the last evaluation, its verdict is used again. A refusal is raised as
    GateRefused and leaves the production model unchanged. Raises TrnpipeError.
    """
    started = datetime.now(UTC)
    keys = open_keys(settings, ctx.stop, to_sign=settings.evaluate.promote)  # before hours of evaluation
    sets = read_token_sets(ctx.workspace, load_prepared(ctx).token_sets)
    models = find_models(settings, ctx, sets)
    inputs = models.inputs(settings, ctx, sets)
    earlier = ctx.earlier(NAME)
    if earlier is not None:
        # The earlier result may be for a different model_name, which is not part of the inputs.
        past = read_history(ctx.workspace, settings.model_name) if earlier.figures.get("promoted") else ()
        digest = models.candidate.digest
        promoted = any(entry.digest == digest for entry in production_changes(past))
        # If the candidate has already been promoted, later changes of the production model or the gate do not matter.
        ignored = {"code_version"} | ({"incumbent", "gate"} if promoted else set())
        before, now = ({k: v for k, v in each.items() if k not in ignored} for each in (earlier.inputs, inputs))
        # If the candidate passed but was not promoted, it may have to be promoted now.
        may_promote = settings.evaluate.promote and (models.against_production or bool(settings.evaluate.force_reason))
        if before == now and (promoted or not may_promote):
            outcome = "promoted" if promoted else "passed but not promoted"
            if promoted and digest in rolled_back_digests(past):
                command = f"trnpipe registry promote {models.candidate.prefix} --force REASON"
                outcome = f"promoted and later rolled back (promote it again with {command})"
            ctx.console.info(f"evaluate: already done, {outcome}, see {_report_uri(ctx)}")
            return earlier.model_copy(update={"status": "already_done"})
    stored = load_report(ctx.workspace, ctx.cycle)
    pointer = models.pointer
    if pointer is not None and pointer.digest == models.candidate.digest:
        judged = stored and (stored.candidate.digest, verdict_key(stored.cycle))
        is_valid = models.against_production or (stored is not None and stored.inputs == inputs)
        if earlier is None and stored and is_valid and (pointer.digest, pointer.verdict) == judged:
            # An earlier attempt promoted the candidate because of this report, but was killed before storing a result.
            return _finish(settings, ctx, models, stored, pointer, started)
        if models.against_production:
            ctx.console.info(f"evaluate: nothing to do, the candidate is already in production: {models.candidate.uri}")
            figures: dict[str, Figure] = {"promoted": False, "nothing_new": True, "since": models.candidate.state.cycle}
            outputs = {"checkpoint": models.candidate.prefix}
            result = ctx.finish(NAME, started, inputs=inputs, outputs=outputs, figures=figures)
            return store_result(ctx.workspace, result) if earlier is None and ctx.world.is_main else result
    if settings.evaluate.promote and keys.public and keys.signing is None:
        raise ConfigError(
            "registry.verify_key is set but registry.sign_key is not, so this candidate could not be promoted",
            expected="the private key of one of the public keys in registry.verify_key",
            next_command="--registry.sign-key KEY, or --evaluate.promote false and promote it with the key elsewhere",
        )
    report = stored if stored is not None and stored.inputs == inputs else None
    if report is None:
        report = run_evaluation(settings, ctx, models, sets, inputs)
    if report is None or not ctx.world.is_main:
        return ctx.finish(NAME, started, inputs=inputs, outputs={}, figures={})
    if stored is not report:
        store_report(ctx.workspace, report)
    for line in table_lines(report):
        ctx.console.info(line)
    return _conclude(settings, ctx, models, report, started, keys)


def _report_uri(ctx: StageContext) -> str:
    return ctx.workspace.uri(report_key(ctx.cycle))


def _conclude(
    settings: Settings,
    ctx: StageContext,
    models: Models,
    report: EvaluationReport,
    started: datetime,
    keys: ModelKeys,
) -> StageResult:
    """Store the verdict, promote the candidate or record its refusal, and store the result."""
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
        more = f"; {len(reasons) - _REASONS_SHOWN} more" if len(reasons) > _REASONS_SHOWN else ""
        advice = refusal_advice(report.verdict, from_published_weights=settings.model.init_from is not None)
        raise GateRefused(
            f"{models.candidate.uri} is not promoted: {'; '.join(reasons[:_REASONS_SHOWN])}{more}",
            expected="a candidate that reaches the floors, is not worse than allowed, and is not beaten by a baseline",
            next_command=f"see {_report_uri(ctx)}; {advice}",
        )
    pointer = None
    if settings.evaluate.promote and (models.against_production or forced):
        pointer = promote(
            ctx.workspace,
            settings.model_name,
            candidate,
            expected=models.pointer,
            decision=decision,
            author=author,
            keys=keys,
        )
    return _finish(settings, ctx, models, report, pointer, started)


def _finish(
    settings: Settings,
    ctx: StageContext,
    models: Models,
    report: EvaluationReport,
    pointer: Pointer | None,
    started: datetime,
) -> StageResult:
    """Store the result for a candidate that passed the gate or was forced. `pointer` is None if it was not promoted."""
    info, scores = ctx.console.info, {"candidate_scores": report.candidate.scores}
    info(f"evaluate: report in {_report_uri(ctx)}, scores in {ctx.workspace.uri(report.candidate.scores)}")
    if pointer is not None:
        how = "promoted by force" if pointer.action == "forced" else "promoted"
        how += " WITHOUT a comparison" if report.verdict.without_comparison else ""
        info(f"evaluate: {how}, generation {pointer.generation}: {ctx.workspace.uri(pointer.checkpoint)}")
    elif not settings.evaluate.promote:
        info("evaluate: passed but not promoted, because evaluate.promote is false")
    else:
        production = models.pointer.checkpoint if models.pointer else "none"
        info(
            f"evaluate: passed but not promoted, because evaluate.incumbent is not the production model ({production})"
        )
    if report.incumbent is not None:
        scores["incumbent_scores"] = report.incumbent.scores
    checkpoint = {"checkpoint": models.candidate.prefix} if models.in_workspace else {}
    figures: dict[str, Figure] = {
        "promoted": pointer is not None,
        "forced": pointer is not None and pointer.action == "forced",
        **({"without_comparison": True} if pointer is not None and report.verdict.without_comparison else {}),
        "generation": pointer.generation if pointer else None,
        "rows": report.holdout.rows,
        "queries": report.holdout.queries,
        **report.figures(),
    }
    outputs = checkpoint | {"report": report_key(report.cycle)} | scores
    result = ctx.finish(NAME, started, inputs=report.inputs, outputs=outputs, figures=figures)
    return store_result(ctx.workspace, result) if ctx.world.is_main else result
