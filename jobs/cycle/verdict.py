"""Format the verdict on a cycle: its outcome, the quality of the model, and the reasons if the model was refused."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jobs.cycle.costs import CycleLedger
from jobs.cycle.tables import DEADLINES, NO_CHARGE
from pipeline.context import Figure
from pipeline.core.format import aligned, format_duration, usd
from pipeline.embed.digest import VerifyDigest
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import EvaluationReport

SEARCH = "retrieval_ndcg@10"
WITHOUT = " WITHOUT a comparison"
"""Appended to `promoted` if there was nothing to compare the model with."""
_NAMES = {SEARCH: "search nDCG@10", "ndcg@10": "nDCG@10", "macro_f1": "macro F1", "bm25": "BM25"}
_MAX_METRICS, _MAX_REASONS, _WIDTH = 4, 3, 80


class Measure(NamedTuple):
    """The value of a metric for the candidate, and for production and the baselines (`others`, by display name).

    `low` and `high` are the bounds of the confidence interval of the difference between candidate and production.
    """

    metric: str
    candidate: float
    others: Mapping[str, float]
    low: float | None
    high: float | None

    @property
    def change(self) -> str:
        """Return the difference to production with its interval, or an empty string if they were not compared."""
        if self.low is None or self.high is None:
            return ""
        return _change(self.candidate - self.others["production"], self.low, self.high)


def verdict_lines(
    ledger: CycleLedger,
    evaluation: EvaluationReport | None,
    evaluate: Mapping[str, Figure],
    verified: VerifyDigest | None,
    target: str,
) -> list[str]:
    """Return the verdict on a cycle that has ended, its metrics, and the reasons if the model was refused.

    `evaluate` contains the figures of that stage.
    """
    took = "" if ledger.took_s is None else f" in {format_duration(ledger.took_s)}"
    late = f", {DEADLINES['missed']}" if ledger.deadline == "missed" else ""
    verdict = f"{outcome_text(ledger.outcome, evaluate)}{took}{late}"
    lines = [f"cycle {ledger.cycle}: {verdict}, {cost_text(ledger, target)}"]
    keeps_vectors = bool(evaluate.get("nothing_new") and verified and not verified.counts.embedded)
    if evaluate.get("nothing_new"):
        stays = "production and vectors are unchanged" if keeps_vectors else "production is unchanged"
        lines.append(f"  {stays}; to train again: --train.start scratch")
    if evaluation is not None:
        lines += [f"  {line}" for line in _quality(evaluation)]
        if not evaluation.verdict.promote:
            for line in reasons(evaluation.verdict.checks):
                lines += textwrap.wrap(f"  refused: {line}", _WIDTH, subsequent_indent="    ")
    if verified and verified.passed and ledger.outcome == "succeeded" and not keeps_vectors:
        lines.append(f"  {verified.rows:,} vectors embedded and verified")
    return lines


def outcome_text(outcome: str, evaluate: Mapping[str, Figure]) -> str:
    """Return the outcome of a cycle as text to display.

    `evaluate` contains the figures of that stage, which include whether a model was promoted.
    """
    if outcome == "open":
        return "under way"
    if outcome == "succeeded" and evaluate.get("nothing_new"):
        since = evaluate.get("since")
        return f"nothing new{f' since cycle {since}' if since else ''}"
    if outcome != "succeeded" or not evaluate.get("promoted"):
        return outcome
    if evaluate.get("forced"):
        return "promoted by force"
    return f"promoted{WITHOUT if evaluate.get('without_comparison') else ''}"


def cost_text(ledger: CycleLedger, target: str) -> str:
    """Return the cost of a cycle as text to display. A local machine costs nothing."""
    if target == "local":
        return NO_CHARGE
    return "cost unknown" if ledger.total.usd is None else usd(ledger.total.usd)


def measures(evaluation: EvaluationReport) -> list[Measure]:
    """Return the metrics that the gate checked, in its order, followed by the search metric."""
    production, candidate = evaluation.incumbent, evaluation.candidate.figures
    checks = evaluation.verdict.checks
    others = {"production": production.figures} if production else {}
    others |= {metric_name(baseline.name): baseline.figures for baseline in evaluation.baselines}
    deltas = {check.metric: check for check in checks if check.kind == "delta" and not check.slice}
    checked = (check.metric for check in checks if check.metric and not check.slice)
    names = [name for name in dict.fromkeys((*deltas, *checked, SEARCH)) if name in candidate] or list(candidate)[:1]
    result = []
    for name in names:
        values = {label: figures[name] for label, figures in others.items() if name in figures}
        check = deltas.get(name) if "production" in values else None
        low, high = (check.low, check.high) if check else (None, None)
        result.append(Measure(name, candidate[name], values, low, high))
    return result


def _quality(evaluation: EvaluationReport) -> list[str]:
    """Return a table of the main metrics with the values of candidate, production and baselines."""
    shown = measures(evaluation)[:_MAX_METRICS]
    if not shown:
        return []
    labels = list(dict.fromkeys(label for measure in shown for label in measure.others))
    rows, changes = [["", "candidate", *labels]], ["", *(measure.change for measure in shown)]
    for measure in shown:
        values = (measure.candidate, *(measure.others.get(label) for label in labels))
        rows.append([metric_name(measure.metric), *map(_number, values)])
    lines = zip(aligned(rows), changes, strict=True)
    return [f"{line} {change}".rstrip() for line, change in lines]  # with two baselines, this still fits 80 columns


def reasons(checks: Sequence[GateCheck]) -> list[str]:
    """Return the first reasons why a model was refused, with the values that were compared if there are any."""
    failed = [check for check in checks if check.outcome == "fail"]
    lines = list[str]()
    for check in failed[:_MAX_REASONS]:
        against = check.baseline_value if check.baseline else check.incumbent
        if check.candidate is None or against is None or check.low is None or check.high is None:
            lines.append(check.reason)
            continue
        metric = f"{metric_name(check.metric)}{f' of {check.slice}' if check.slice else ''}"
        difference = _change(check.candidate - against, check.low, check.high)
        other = metric_name(check.baseline) or "production"
        lines.append(f"{metric} {_number(check.candidate)}, {other} {_number(against)}, {difference}{_rule(check)}")
    return [*lines, *([f"and {len(failed) - _MAX_REASONS} more"] if len(failed) > _MAX_REASONS else [])]


def _rule(check: GateCheck) -> str:
    """Return what the gate allows, and how many queries would show it, for a check with an interval."""
    if check.bound is None or check.low is None or check.high is None:
        return ""
    best, worst = sorted(map(MetricName.parse(check.metric).loss, (check.low, check.high)))
    worse = f"at least {best:.3f} worse" if best > check.bound else f"could be {worst:.3f} worse"
    takes = check.needed_queries
    more = f"; about {takes:,} test queries are needed, there are {check.num_queries:,}" if takes else ""
    return f": {worse}, {check.bound:.3f} allowed{more}"


def metric_name(name: str) -> str:
    """Return the display name of a metric or a baseline."""
    return _NAMES.get(name, name)


def _change(difference: float, low: float, high: float) -> str:
    return f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
