"""The sections of the page about data and model: the gate, training, calibration, errors, retrieval, vectors, data.

Pure, as jobs/cycle/page/sections.py is.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from jobs.cycle.page.charts import (
    Series,
    check_name,
    escaped,
    forest,
    interval_text,
    line_chart,
    number,
    reliability,
    stacked_columns,
    table,
)
from jobs.cycle.page.data import HOLDOUT, PageData
from jobs.cycle.page.sections import MAX_ROWS, MAX_TRIES, details, figure, items, left_out, rows_of, value_text
from pipeline.core.format import format_share
from pipeline.data.digest import PartitionDigest
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import table_lines

MAX_EFFECTS = 40
MAX_PARTITIONS = 60
MAX_POINTS = 12
"""Of a curve, in the table under it."""


def gate_section(data: PageData) -> str:
    report = data.evaluation
    if report is None:
        return ""
    compared = [check for check in report.verdict.checks if check.low is not None and check.high is not None]
    overall = [check for check in compared if check.kind != "slice"]
    slices = sorted((check for check in compared if check.kind == "slice"), key=_by_harm)
    parts = [f"<p>{escaped(report.verdict.lines()[0])}</p>"]
    for title, checks in (("Overall", overall), ("Slices, those that lost most first", slices[:MAX_EFFECTS])):
        if checks:
            label = (
                f"{title}: differences to what is in production or to a simple tool, with intervals and what is allowed"
            )
            words = "candidate minus the other, above 0 is better unless the metric is an error; ╎ what is allowed"
            rows = [
                (check_name(one), one.outcome, number(one.candidate), interval_text(one), one.reason) for one in checks
            ]
            more = _numbers(("check", "gate", "candidate", "interval", "why"), rows, {2})
            parts.append(f"<h3>{title}</h3>{figure(forest(checks, label), words, more)}")
    parts.append(left_out(len(slices) - MAX_EFFECTS, "slices that lost less"))
    others = [(check.outcome, check.reason) for check in report.verdict.checks if check not in compared]
    if others:
        parts.append("<h3>Other checks</h3>" + rows_of(("gate", "what was seen"), sorted(others), (), "checks"))
    parts.append(items(report.warnings))
    lines = table_lines(report)
    shown = escaped("\n".join(lines[:MAX_TRIES]))
    shown = f'<pre tabindex="0">{shown}</pre>' + left_out(len(lines) - MAX_TRIES, "lines")
    parts.append(details("As the terminal shows it", shown))
    return "".join(parts)


def _numbers(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] | None = None) -> str:
    """The table under a chart; `numbers`: as in `table`, all but the first column where they are not given."""
    return details("Numbers", table(head, rows, range(1, len(head)) if numbers is None else numbers))


def _by_harm(check: GateCheck) -> tuple[int, float]:
    """Refusals first, then by how much the candidate lost."""
    gain = 0.0
    if check.candidate is not None and check.incumbent is not None:
        change = check.candidate - check.incumbent
        gain = -change if MetricName.parse(check.metric).lower_is_better else change
    return ("fail", "warn", "pass", "skipped").index(check.outcome), gain


def training_section(data: PageData) -> str:
    curves = {curve.name: curve for curve in data.training.curves}
    marks = [(step, f"went on at step {step:,}") for step in data.training.resumed[:MAX_ROWS]]
    marks += [(step, f"step {step:,} was skipped") for step in data.training.skipped[:MAX_ROWS]]
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
        others = [dict(one.points) for one in series[1:]]
        some = curve.now[:: max(1, math.ceil(len(curve.now) / MAX_POINTS))]
        numbers = [tuple(map(number, (x, y, *(found.get(x) for found in others)))) for x, y in some]
        rows = _numbers(head, numbers, range(len(head)))
        chart = line_chart(series, label, marks=marks)
        parts.append(figure(chart, f'<span class="key">{legend}</span> {escaped(label)}', rows))
    return "".join(parts)


def calibration_section(data: PageData) -> str:
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
        (f"{bins[0].low:.2f} to {bins[0].high:.2f}", *(number(n) for b in bins for n in (b.rows, b.right)))
        for bins in zip(*(one.reliability for _, _, one in models), strict=True)
    ]
    chart = reliability(
        points, "Share of right rows by the confidence of the model; on the diagonal it is as right as it is sure"
    )
    words = "on the diagonal it is as often right as it says; circles by their rows"
    parts = [figure(chart, f'<span class="key">{legend}</span> {words}', _numbers(head, rows))]
    if found.candidate.confusion:
        cells = [(label, *map(number, row)) for label, row in zip(found.labels, found.candidate.confusion, strict=True)]
        parts.append("<h3>Labels: judged (rows) and most probable (columns)</h3>")
        parts.append(table(("judged", *found.labels), cells, range(1, len(found.labels) + 1)))
    kinds = [f"l{i % 8}" for i in range(len(found.labels))]
    bins = len(found.candidate.scores[0]) if found.candidate.scores else 0
    width = found.top_gain / bins if bins else 0.0
    groups = [(f"{i * width:.2f}", [row[i] for row in found.candidate.scores]) for i in range(bins)]
    chart = stacked_columns(groups, kinds, "Rows by the score of the candidate and their label", x_name="score")
    parts.append(figure(chart, f'<span class="key">{_labels(found.labels)}</span> rows by expected gain'))
    return "".join(parts)


WORDS = {
    "worst": "Worst: the true label is least probable",
    "lost": "Were right with the model in production, and are wrong now",
    "won": "Were wrong, and are right now",
}


def errors_section(data: PageData) -> str:
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


def retrieval_section(data: PageData) -> str:
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


def vectors_section(data: PageData) -> str:
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
    for name in ("tokens_per_s", "padding_share"):
        if name in figures:
            rows.append((name.replace("_", " "), value_text(figures[name])))
    parts = [table((), rows, {1})]
    if found.drift:
        edges = found.drift.edges
        groups = [(f"{edge:.2f}", [float(count)]) for edge, count in zip(edges, found.drift.counts, strict=False)]
        chart = stacked_columns(groups, ("now",), f"Cosines to the vectors of cycle {found.previous}", x_name="cosine")
        words = f"cosines between both cycles' vectors of the same ids, {escaped(found.previous or '')}"
        parts.append(figure(chart, words))
    checks = [(check.outcome, check.name, check.seen) for check in found.checks]
    parts.append(table(("verify", "check", "what was seen"), checks))
    return "".join(parts)


def data_section(data: PageData) -> str:
    found = data.prepared
    if found is None:
        return ""
    shown = found.partitions[-MAX_PARTITIONS:]
    labelled = all(one.labels for one in shown)
    kinds = [f"l{i % 8}" for i in range(len(found.labels))] if labelled else ["now"]
    groups: list[tuple[str, Sequence[float]]] = []
    rows = []
    for one in shown:
        by_label, split_rows = [sum(counts) for counts in zip(*one.labels.values(), strict=True)], one.rows
        groups.append((one.watermark or one.partition, by_label if labelled else [sum(split_rows.values())]))
        splits = (split_rows.get(split, 0) for split in ("train", "valid", "test"))
        rows.append((one.partition, *map(number, (*splits, *by_label, one.bad, one.filtered, one.truncated))))
    chart = stacked_columns(groups, kinds, "Rows by day and label", x_name="rows")
    head = ("partition", "train", "valid", "test", *found.labels, "bad", "filtered", "truncated")
    legend = f'<span class="key">{_labels(found.labels)}</span>' if labelled else ""
    parts = [figure(chart, legend, _numbers(head, rows) if labelled and rows else "")]
    parts.append(left_out(len(found.partitions) - len(shown), "older partitions"))
    sizes = [sum(counts) for counts in zip(*(one.bucket_rows for one in found.partitions), strict=True)]
    total, cut = sum(sizes), sum(one.truncated for one in found.partitions)
    buckets = [
        (name, number(size), format_share(size / total if total else None))
        for name, size in zip(found.buckets, sizes, strict=True)
    ]
    parts.append("<h3>Lengths</h3>" + table(("query x product tokens, at most", "rows", "share"), buckets, {1, 2}))
    parts.append(f"<p>{number(cut)} rows ({format_share(cut / total if total else None)}) were cut to fit.</p>")
    figures = data.figures.get("train", {})
    new, replayed = (figures.get(name) for name in ("groups_new", "groups_replayed"))
    if isinstance(new, int) and isinstance(replayed, int) and new + replayed:
        share = format_share(replayed / (new + replayed))
        parts.append(
            f"<p>Trained on {number(new)} groups of new partitions and {number(replayed)} of earlier ones"
            f" ({share} replayed).</p>"
        )
    without = list(_without_category(found.partitions))
    if without:
        head = ("category", "rows without a value", "newest", "before")
        parts.append("<h3>Features</h3>" + table(head, without, {1, 2, 3}))
    if found.reasons:
        reasons = [(why, number(rows)) for why, rows in list(found.reasons.items())[:MAX_ROWS]]
        parts.append("<h3>Rows in quarantine</h3>" + table(("reason", "rows"), reasons, {1}))
        samples = [(one.reason, f"{one.file}:{one.row}", one.text) for one in found.samples][:MAX_ROWS]
        parts.append(details("Samples", table(("reason", "where", "content"), samples)) if samples else "")
    return "".join(parts)


def _without_category(partitions: Sequence[PartitionDigest]) -> Iterator[Sequence[str]]:
    """Of each column: rows, their share in the newest partition, and in those before it."""
    counting = [one for one in partitions if one.without_category]
    if not counting:
        return
    *before, newest = counting
    for column, rows in newest.without_category.items():
        counted = [one for one in before if column in one.without_category]
        earlier = sum(one.without_category[column] for one in counted)
        usable, of = sum(newest.rows.values()), sum(sum(one.rows.values()) for one in counted)
        share, usual = rows / usable if usable else None, earlier / of if of else None
        yield column, number(rows + earlier), format_share(share), format_share(usual)


def _labels(labels: Sequence[str]) -> str:
    return "".join(f'<span><i class="l{i % 8}"></i>{escaped(label)}</span>' for i, label in enumerate(labels))
