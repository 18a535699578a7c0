"""The sections of the page about the model: the gate, learning, calibration, errors, retrieval, vectors.

Pure, as jobs/cycle/page/sections.py is.
"""

from collections.abc import Mapping

from jobs.cycle.page.charts import (
    Effect,
    Mark,
    Series,
    escaped,
    forest,
    line_chart,
    number,
    numbers_of,
    reliability,
    stacked_columns,
    table,
)
from jobs.cycle.page.data import HOLDOUT, PageData
from jobs.cycle.page.sections import (
    MAX_EFFECTS,
    MAX_ROWS,
    MAX_TRIES,
    details,
    figure,
    items,
    labels_text,
    left_out,
    rows_of,
    value_text,
)
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import table_lines


def gate(data: PageData) -> str:
    report = data.evaluation
    if report is None:
        return ""
    compared = [check for check in report.verdict.checks if check.low is not None and check.high is not None]
    overall = [check for check in compared if check.kind != "slice"]
    slices = sorted((check for check in compared if check.kind == "slice"), key=_by_harm)
    shown = slices[:MAX_EFFECTS]
    parts = [f"<p>{escaped(report.verdict.lines()[0])}</p>"]
    for title, checks in (("Overall", overall), ("Slices, those that lost most first", shown)):
        if checks:
            label = (
                f"{title}: differences to what is in production or to a simple tool, with intervals and what is allowed"
            )
            chart = forest([_effect(check) for check in checks], label)
            words = "candidate minus the other, above 0 is better unless the metric is an error; ╎ what is allowed"
            rows = [(_name(one), one.outcome, number(one.candidate), _interval(one), one.reason) for one in checks]
            more = details("Numbers", table(("check", "gate", "candidate", "interval", "why"), rows, {2}))
            parts.append(f"<h3>{title}</h3>{figure(chart, words, more)}")
    parts.append(left_out(len(slices) - len(shown), "slices that lost less"))
    others = [(check.outcome, check.reason) for check in report.verdict.checks if check not in compared]
    if others:
        parts.append("<h3>Other checks</h3>" + rows_of(("gate", "what was seen"), sorted(others), (), "checks"))
    parts.append(items(report.warnings))
    lines = table_lines(report)
    text = "\n".join(lines[:MAX_TRIES])
    parts.append(
        details(
            "As the terminal shows it",
            f'<pre tabindex="0">{escaped(text)}</pre>{left_out(len(lines) - MAX_TRIES, "lines")}',
        )
    )
    return "".join(parts)


def _by_harm(check: GateCheck) -> tuple[int, float]:
    """Refusals first, then by how much the candidate lost."""
    gain = 0.0
    if check.candidate is not None and check.incumbent is not None:
        change = check.candidate - check.incumbent
        gain = -change if MetricName.parse(check.metric).lower_is_better else change
    return ("fail", "warn", "pass", "skipped").index(check.outcome), gain


def _name(check: GateCheck) -> str:
    against = f" against {check.baseline}" if check.baseline else ""
    queries = f" ({number(check.num_queries)} queries)" if check.num_queries is not None else ""
    return f"{check.metric}{against}{f' of {check.slice}' if check.slice else ''}{queries}"


def _effect(check: GateCheck) -> Effect:
    other = check.baseline_value if check.baseline else check.incumbent
    change = (check.candidate or 0.0) - (other or 0.0)
    lower = bool(check.metric) and MetricName.parse(check.metric).lower_is_better
    bound = None if check.bound is None else check.bound if lower else -check.bound
    low, high = check.low or 0.0, check.high or 0.0
    words = f"{check.outcome}: {check.reason}; {_interval(check)}"
    return Effect(_name(check), change, low, high, bound, check.outcome, words)


def _interval(check: GateCheck) -> str:
    return f"{check.low:+.4f} to {check.high:+.4f}" if check.low is not None and check.high is not None else "-"


def learned(data: PageData) -> str:
    curves = {curve.name: curve for curve in data.training.curves}
    marks = [Mark(step, f"went on at step {step:,}") for step in data.training.resumed[:MAX_ROWS]]
    marks += [Mark(step, f"step {step:,} was skipped") for step in data.training.skipped[:MAX_ROWS]]
    parts = []
    for name, curve in curves.items():
        if name == HOLDOUT and "loss" in curves:
            continue
        series = [Series(name, curve.now)]
        if name == "loss" and (held := curves.get(HOLDOUT)):
            series.append(Series(HOLDOUT, held.now, "holdout"))
        if curve.before:
            series.append(Series(f"{name} of cycle {data.training.compared}", curve.before, "before"))
        first, last = curve.now[0], curve.now[-1]
        lowest = min(value for _, value in curve.now)
        label = (
            f"{name} {number(first[1])} at step {number(first[0])} to {number(last[1])} at step {number(last[0])},"
            f" lowest {number(lowest)}"
        )
        legend = "".join(f'<span><i class="{one.kind}"></i>{escaped(one.name)}</span>' for one in series)
        head = ("step", *(one.name for one in series))
        rows = details("Numbers", table(head, numbers_of(series, "step"), range(len(head))))
        chart = line_chart(series, label, marks=marks)
        parts.append(figure(chart, f'<span class="key">{legend}</span> {escaped(label)}', rows))
    return "".join(parts)


def trusted(data: PageData) -> str:
    found = data.scores
    if found is None:
        return ""
    models = [("now", "candidate", found.candidate)]
    models += [("before", "in production", found.incumbent)] if found.incumbent else []
    points = [
        (
            kind,
            [
                (b.confidence, b.right, b.rows)
                for b in one.reliability
                if b.confidence is not None and b.right is not None
            ],
        )
        for kind, _, one in models
    ]
    legend = "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name, _ in models)
    head = ("confidence", *(f"{what}, {name}" for _, name, _ in models for what in ("rows", "right")))
    rows = [
        (f"{first.low:.2f} to {first.high:.2f}", *(word for b in bins for word in (number(b.rows), number(b.right))))
        for bins in zip(*(one.reliability for _, _, one in models), strict=True)
        for first in bins[:1]
    ]
    chart = reliability(
        points, "Share of right rows by the confidence of the model; on the diagonal it is as right as it is sure"
    )
    parts = [
        figure(
            chart,
            f'<span class="key">{legend}</span> on the diagonal it is as often right as it says; circles by their rows',
            details("Numbers", table(head, rows, range(1, len(head)))),
        )
    ]
    if found.candidate.confusion:
        cells = [(label, *map(number, row)) for label, row in zip(found.labels, found.candidate.confusion, strict=True)]
        parts.append("<h3>Labels: judged (rows) and most probable (columns)</h3>")
        parts.append(table(("judged", *found.labels), cells, range(1, len(found.labels) + 1)))
    kinds = [f"l{i % 8}" for i in range(len(found.labels))]
    bins = len(found.candidate.scores[0]) if found.candidate.scores else 0
    width = found.top_gain / bins if bins else 0.0
    groups = [(f"{i * width:.2f}", [row[i] for row in found.candidate.scores]) for i in range(bins)]
    chart = stacked_columns(groups, kinds, "Rows by the score of the candidate and their label", x_name="score")
    parts.append(figure(chart, f'<span class="key">{labels_text(found.labels)}</span> rows by expected gain'))
    return "".join(parts)


WORDS = {
    "worst": "Worst: the true label is least probable",
    "lost": "Were right with the model in production, and are wrong now",
    "won": "Were wrong, and are right now",
}


def wrong(data: PageData) -> str:
    found = data.scores
    if found is None or not (found.examples or found.lost is not None):
        return ""
    parts = []
    if found.lost is not None:
        parts.append(
            f"<p>{number(found.lost)} rows were right before and are wrong now, {number(found.won)} the other way.</p>"
        )
    for kind, title in WORDS.items():
        rows = [
            (
                one.query,
                one.product,
                one.label,
                f"{one.candidate} ({one.candidate_probability:.3f})",
                "-" if one.incumbent is None else f"{one.incumbent} ({one.incumbent_probability or 0.0:.3f})",
            )
            for one in found.examples
            if one.kind == kind
        ]
        if rows:
            head = ("query", "product", "judged", "candidate", "in production")
            parts.append(f"<h3>{title}</h3>{table(head, rows)}")
    if found.examples:
        parts.append(
            '<p class="quiet">In brackets: the probability of the judged label. report.examples = 0 shows no texts.</p>'
        )
    return "".join(parts)


def finds(data: PageData) -> str:
    report = data.evaluation
    if report is None or report.candidate.retrieval is None:
        return ""
    others: list[tuple[str, Mapping[str, float]]] = [("candidate", report.candidate.retrieval.values)]
    if report.incumbent and report.incumbent.retrieval:
        others.append(("in production", report.incumbent.retrieval.values))
    others += [(one.name, one.retrieval.values) for one in report.baselines if one.retrieval]
    others += [(f"with BM25 ({one.name})", one.retrieval.values) for one in report.candidate.hybrids if one.retrieval]
    names = dict.fromkeys(name for _, values in others for name in values)
    rows = [(name, *(number(values.get(name)) for _, values in others)) for name in names]
    holdout = report.holdout
    parts = [
        table(("metric", *(name for name, _ in others)), rows, range(1, len(others) + 1)),
        f'<p class="quiet">{holdout.retrieval_queries:,} queries in {holdout.retrieval_items:,} products.</p>',
    ]
    if data.scores and data.scores.queries:
        changes = [
            (one.metric, number(one.better), number(one.equal), number(one.worse)) for one in data.scores.queries
        ]
        parts.append("<h3>Queries against the model in production</h3>")
        parts.append(table(("metric", "better", "equal", "worse"), changes[:MAX_ROWS], {1, 2, 3}))
    return "".join(parts)


def vectors(data: PageData) -> str:
    found = data.vectors
    if found is None:
        return ""
    counts, figures = found.counts, data.figures.get("embed", {})
    rows = [
        ("vectors", number(found.rows)),
        ("embedded, carried over", f"{number(counts.embedded)}, {number(counts.carried)}"),
        ("new ids, gone ids", f"{number(counts.new)}, {number(counts.gone)}"),
        ("mean cosine to the cycle before", number(found.mean_cosine)),
        ("share of vectors that moved", number(found.moved_share)),
        ("least cosine to vectors embedded again", number(found.recompute_min_cosine, 6)),
    ]
    rows += [
        (name.replace("_", " "), value_text(figures[name]))
        for name in ("tokens_per_s", "padding_share")
        if name in figures
    ]
    parts = [table((), rows, {1})]
    if found.drift:
        edges = found.drift.edges
        groups = [(f"{edge:.2f}", [float(count)]) for edge, count in zip(edges, found.drift.counts, strict=False)]
        chart = stacked_columns(groups, ("now",), f"Cosines to the vectors of cycle {found.previous}", x_name="cosine")
        parts.append(
            figure(chart, f"cosines between both cycles' vectors of the same ids, {escaped(found.previous or '')}")
        )
    checks = [(check.outcome, check.name, check.seen) for check in found.checks]
    parts.append(table(("verify", "check", "what was seen"), checks))
    return "".join(parts)
