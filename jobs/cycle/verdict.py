"""The verdict on a cycle in a few lines: what became of it, how good the model is, why it was refused. Pure."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jobs.cycle.costs import CycleLedger
from jobs.cycle.tables import DEADLINES
from pipeline.context import Figure
from pipeline.core.format import aligned, format_duration, usd
from pipeline.embed.digest import VerifyDigest
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import EvaluationReport

SEARCH = "retrieval_ndcg@10"
WITHOUT = " WITHOUT a comparison"
"""Follows `promoted` if nothing judged the model."""
_NAMES = {SEARCH: "search nDCG@10", "ndcg@10": "nDCG@10", "macro_f1": "macro F1", "bm25": "BM25"}
_MOST_METRICS, _MOST_REASONS, _WIDTH = 4, 3, 80


class Measure(NamedTuple):
    """A metric of the candidate beside those of `others`: production and baselines by the names people know.

    `low`, `high`: the interval of the difference to production.
    """

    metric: str
    candidate: float
    others: Mapping[str, float]
    low: float | None
    high: float | None

    @property
    def change(self) -> str:
        """Return the difference to production with its interval, empty if none was judged."""
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
    """Return the verdict of a cycle that has ended, its metrics, and why it was refused. `evaluate`: its figures."""
    took = "" if ledger.took_s is None else f" in {format_duration(ledger.took_s)}"
    late = f", {DEADLINES['missed']}" if ledger.deadline == "missed" else ""
    verdict = f"{outcome_words(ledger.outcome, evaluate)}{took}{late}"
    lines = [f"cycle {ledger.cycle}: {verdict}, {cost_text(ledger, target)}"]
    keeps_vectors = bool(evaluate.get("nothing_new") and verified and not verified.counts.embedded)
    if evaluate.get("nothing_new"):
        stays = "production and vectors stay" if keeps_vectors else "production stays"
        lines.append(f"  {stays}; to train again: --train.start scratch")
    if evaluation is not None:
        lines += [f"  {line}" for line in _quality(evaluation)]
        if not evaluation.verdict.promote:
            for line in reasons(evaluation.verdict.checks):
                lines += textwrap.wrap(f"  refused: {line}", _WIDTH, subsequent_indent="    ")
    if verified and verified.passed and ledger.outcome == "succeeded" and not keeps_vectors:
        lines.append(f"  {verified.rows:,} vectors embedded and verified")
    return lines


def outcome_words(outcome: str, evaluate: Mapping[str, Figure]) -> str:
    """Return how a cycle ended. `evaluate`: figures of that stage, which tell whether a model was promoted."""
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
    """Return what a cycle cost; a machine of one's own costs nothing."""
    if target == "local":
        return "local: no charge"
    return "cost unknown" if ledger.total.usd is None else usd(ledger.total.usd)


def measures(evaluation: EvaluationReport) -> list[Measure]:
    """Return the metrics that the gate judged, the first one first, and that of search."""
    known, found, checks = evaluation.incumbent, evaluation.candidate.figures, evaluation.verdict.checks
    others = {"production": known.figures} if known else {}
    others |= {metric_name(one.name): one.figures for one in evaluation.baselines}
    deltas = {check.metric: check for check in checks if check.kind == "delta" and not check.slice}
    judged = (check.metric for check in checks if check.metric and not check.slice)
    names = [name for name in dict.fromkeys((*deltas, *judged, SEARCH)) if name in found] or list(found)[:1]
    made = []
    for name in names:
        beside = {who: figures[name] for who, figures in others.items() if name in figures}
        check = deltas.get(name) if "production" in beside else None
        low, high = (check.low, check.high) if check else (None, None)
        made.append(Measure(name, found[name], beside, low, high))
    return made


def _quality(evaluation: EvaluationReport) -> list[str]:
    """Return a table of the main metrics: the candidate beside production and baselines, with the difference."""
    shown = measures(evaluation)[:_MOST_METRICS]
    if not shown:
        return []
    whos = list(dict.fromkeys(who for one in shown for who in one.others))
    rows, changes = [["", "candidate", *whos]], ["", *(one.change for one in shown)]
    for one in shown:
        values = (one.candidate, *(one.others.get(who) for who in whos))
        rows.append([metric_name(one.metric), *map(_number, values)])
    lines = zip(aligned(rows), changes, strict=True)
    return [f"{line} {change}".rstrip() for line, change in lines]  # 80 columns with two baselines


def reasons(checks: Sequence[GateCheck]) -> list[str]:
    """Return why a model was refused, in numbers where the check has them; the first few reasons."""
    failed = [check for check in checks if check.outcome == "fail"]
    lines = list[str]()
    for check in failed[:_MOST_REASONS]:
        against = check.baseline_value if check.baseline else check.incumbent
        if check.candidate is None or against is None or check.low is None or check.high is None:
            lines.append(check.reason)
            continue
        where = f"{metric_name(check.metric)}{f' of {check.slice}' if check.slice else ''}"
        difference = _change(check.candidate - against, check.low, check.high)
        who = metric_name(check.baseline) or "production"
        lines.append(f"{where} {_number(check.candidate)}, {who} {_number(against)}, {difference}{_rule(check)}")
    return [*lines, *([f"and {len(failed) - _MOST_REASONS} more"] if len(failed) > _MOST_REASONS else [])]


def _rule(check: GateCheck) -> str:
    """Return what the gate allows, and how many queries would show it, for a check with an interval."""
    if check.bound is None or check.low is None or check.high is None:
        return ""
    worst, best = -check.low, -check.high
    if MetricName.parse(check.metric).lower_is_better:
        worst, best = check.high, check.low
    worse = f"at least {best:.3f} worse" if best > check.bound else f"could be {worst:.3f} worse"
    takes = check.needed_queries
    more = f"; about {takes:,} test queries are needed, there are {check.num_queries:,}" if takes else ""
    return f": {worse}, {check.bound:.3f} allowed{more}"


def metric_name(name: str) -> str:
    """Return what people call a metric or a baseline."""
    return _NAMES.get(name, name)


def _change(difference: float, low: float, high: float) -> str:
    return f"{difference:+.3f} [{low:+.3f}, {high:+.3f}]"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
