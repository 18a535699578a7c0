"""The verdict on a cycle in a few lines: what became of it, how good the model is, why it was refused. Pure."""

from collections.abc import Mapping, Sequence

from jobs.cycle.ledger import CycleLedger
from jobs.cycle.tables import DEADLINES
from pipeline.context import Figure
from pipeline.core.format import aligned, format_duration, usd
from pipeline.embed.digest import VerifyDigest
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import EvaluationReport

SEARCH = "retrieval_ndcg@10"
_NAMES = {SEARCH: "search nDCG@10", "ndcg@10": "nDCG@10", "macro_f1": "macro F1", "bm25": "BM25"}
_MOST_METRICS, _MOST_REASONS = 4, 3


def verdict_lines(
    ledger: CycleLedger,
    evaluation: EvaluationReport | None,
    evaluate: Mapping[str, Figure],
    verified: VerifyDigest | None,
    target: str,
) -> list[str]:
    """Return the verdict of a cycle that has ended, its metrics, and why it was refused. `evaluate`: its figures."""
    took = "" if ledger.took_s is None else f" in {format_duration(ledger.took_s)}"
    late = f", {DEADLINES['missed']}" if ledger.deadline == "missed" else ""
    verdict = f"{_verdict(ledger, evaluation, evaluate)}{took}{late}"
    lines = [f"cycle {ledger.cycle}: {verdict}, {cost_text(ledger, target)}"]
    if evaluation is not None:
        lines += [f"  {line}" for line in _quality(evaluation)]
        if not evaluation.verdict.promote:
            lines += [f"  refused: {line}" for line in _reasons(evaluation.verdict.checks)]
    if verified is not None and verified.passed and ledger.outcome == "succeeded":
        lines.append(f"  {verified.rows:,} vectors embedded and verified")
    return lines


def _verdict(ledger: CycleLedger, evaluation: EvaluationReport | None, evaluate: Mapping[str, Figure]) -> str:
    if ledger.outcome == "open":
        return "under way"
    if ledger.outcome != "succeeded" or not evaluate.get("promoted"):
        return ledger.outcome
    if evaluate.get("forced"):
        return "promoted by force"
    without = evaluation is not None and evaluation.verdict.without_comparison
    return "promoted WITHOUT a comparison" if without else "promoted"


def cost_text(ledger: CycleLedger, target: str) -> str:
    """Return what a cycle cost; a machine of one's own costs nothing."""
    if target == "local":
        return "local: no charge"
    return "cost unknown" if ledger.total.usd is None else usd(ledger.total.usd)


def _quality(evaluation: EvaluationReport) -> list[str]:
    """Return a table of the main metrics: the candidate beside production and baselines, with the difference."""
    production, baselines = evaluation.incumbent, [one for one in evaluation.baselines if one.figures]
    deltas = {check.metric: check for check in evaluation.verdict.checks if check.kind == "delta" and not check.slice}
    judged = (check.metric for check in evaluation.verdict.checks if check.metric and not check.slice)
    names = [name for name in dict.fromkeys((*deltas, *judged, SEARCH)) if name in evaluation.candidate.figures]
    if not names:
        return []
    rows = [
        [
            "",
            "candidate",
            *(["production"] if production else []),
            *(_NAMES.get(one.name, one.name) for one in baselines),
            "",
        ]
    ]
    for name in names[:_MOST_METRICS]:
        others = [*([production.figures] if production else []), *(one.figures for one in baselines)]
        change, check = "", deltas.get(name)
        if check is not None and check.low is not None and check.high is not None and check.incumbent is not None:
            difference = evaluation.candidate.figures[name] - check.incumbent
            change = f"{difference:+.3f} [{check.low:+.3f}, {check.high:+.3f}]"
        cells = [_number(figures.get(name)) for figures in (evaluation.candidate.figures, *others)]
        rows.append([_NAMES.get(name, name), *cells, change])
    lines = aligned([row[:-1] for row in rows])
    return [
        f"{line} {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True)
    ]  # 80 columns with two baselines


def _reasons(checks: Sequence[GateCheck]) -> list[str]:
    failed = [check for check in checks if check.outcome == "fail"]
    lines = list[str]()
    for check in failed[:_MOST_REASONS]:
        against = check.baseline_value if check.baseline else check.incumbent
        if check.candidate is None or against is None or check.low is None or check.high is None:
            lines.append(check.reason)
            continue
        where = f"{_NAMES.get(check.metric, check.metric)}{f' of {check.slice}' if check.slice else ''}"
        difference = f"{check.candidate - against:+.3f} [{check.low:+.3f}, {check.high:+.3f}]"
        who = _NAMES.get(check.baseline, check.baseline) or "production"
        lines.append(f"{where} {_number(check.candidate)}, {who} {_number(against)}, {difference}")
    return [*lines, *([f"and {len(failed) - _MOST_REASONS} more"] if len(failed) > _MOST_REASONS else [])]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
