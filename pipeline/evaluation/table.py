"""What a terminal shows of an evaluation: both models side by side, the slices that matter, the verdict. Pure."""

from collections.abc import Iterable, Sequence

from pipeline.core.gate.verdict import GateCheck
from pipeline.core.metrics import MetricReport
from pipeline.core.metrics.names import MetricName
from pipeline.evaluation.report import EvaluationReport, ModelReport

_SLICES_SHOWN = 5
_NOTHING = "-"


def table_lines(report: EvaluationReport) -> list[str]:
    """The table, the slices, the verdict."""
    shown = (_metric_row(report, name) for name in _names(report))
    head = ("metric", "candidate", "incumbent", "difference", _interval_title(report), "gate")
    return [*_aligned([head, *shown]), *_missing(report), *_slice_lines(report), *report.verdict.lines()]


def _names(report: EvaluationReport) -> list[str]:
    """Every metric of either model, in the order of reports."""
    reports = [part for model in _models(report) for part in (model.metrics, model.retrieval) if part is not None]
    rows = [name for part in reports[:1] for name in (*part.values, *part.missing)]
    return list(dict.fromkeys([*rows, *(name for part in reports for name in part.values)]))


def _models(report: EvaluationReport) -> list[ModelReport]:
    return [report.candidate, *([report.incumbent] if report.incumbent else [])]


def _value(model: ModelReport | None, name: str) -> float | None:
    if model is None:
        return None
    part: MetricReport | None = model.retrieval if MetricName.parse(name).of_retrieval else model.metrics
    return part.values.get(name) if part else None


def _metric_row(report: EvaluationReport, name: str) -> tuple[str, ...]:
    ours, theirs = _value(report.candidate, name), _value(report.incumbent, name)
    checks = [check for check in report.verdict.checks if check.metric == name and not check.slice]
    delta = next((check for check in checks if check.low is not None), None)
    return (
        name,
        _number(ours),
        _number(theirs),
        _signed(None if ours is None or theirs is None else ours - theirs),
        _interval(delta),
        _outcome(checks),
    )


def _interval_title(report: EvaluationReport) -> str:
    """Each end holds alone with the one-sided confidence, so both together with less."""
    return f"{2 * report.verdict.confidence - 1:.0%} interval"


def _missing(report: EvaluationReport) -> list[str]:
    """Why a metric is not there; those with one reason on one line."""
    lines = []
    for role, model in (("candidate", report.candidate), ("incumbent", report.incumbent)):
        reasons: dict[str, list[str]] = {}
        for part in (model.metrics, model.retrieval) if model else ():
            for name, reason in part.missing.items() if part else ():
                reasons.setdefault(reason, []).append(name)
        lines += [f"not computed for the {role}: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return lines


def _slice_lines(report: EvaluationReport) -> list[str]:
    """The slices that refuse, and those in which the candidate lost most; without an incumbent, the weakest."""
    checks = [check for check in report.verdict.checks if check.kind == "slice" and check.low is not None]
    if not checks:
        return []
    worst = sorted(checks, key=lambda check: (check.outcome != "fail", -_loss(check)))
    failed = sum(check.outcome == "fail" for check in checks)
    shown = worst[: max(_SLICES_SHOWN, failed)]
    head = ("slice", "metric", "candidate", "incumbent", "difference", "interval", "queries", "gate")
    rows = [
        (
            check.slice,
            check.metric,
            _number(check.candidate),
            _number(check.incumbent),
            _signed(-_loss(check) if not MetricName.parse(check.metric).lower_is_better else _loss(check)),
            _interval(check),
            f"{check.num_queries:,}" if check.num_queries is not None else _NOTHING,
            check.outcome,
        )
        for check in shown
    ]
    title = f"slices: {len(shown)} of {len(checks)} compared, those that lost most"
    return [title, *_aligned([head, *rows])]


def _loss(check: GateCheck) -> float:
    """How much worse the candidate is; negative when it is better."""
    if check.candidate is None or check.incumbent is None:
        return 0.0
    worse = check.incumbent - check.candidate
    return -worse if MetricName.parse(check.metric).lower_is_better else worse


def _outcome(checks: Sequence[GateCheck]) -> str:
    """What the gate made of a metric: `fail` when any check of it fails."""
    found = [check.outcome for check in checks]
    return next((outcome for outcome in ("fail", "warn", "skipped", "pass") if outcome in found), "")


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:+.4f}"


def _interval(check: GateCheck | None) -> str:
    if check is None or check.low is None or check.high is None:
        return ""
    return f"[{check.low:+.4f}, {check.high:+.4f}]"


def _aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns of equal width, two spaces apart: names to the left, figures to the right."""
    table = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    names = {column for column, title in enumerate(table[0]) if title in ("metric", "slice", "gate")}
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column in names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]
