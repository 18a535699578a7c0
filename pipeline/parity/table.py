"""A comparison as lines for a terminal."""

from collections.abc import Iterator

from pipeline.evaluate.parity import ParityCheck
from pipeline.parity.compare import ParityReport


def lines_of(report: ParityReport) -> list[str]:
    """Evaluations side by side, then every figure with its bar, then what to know."""
    return [*_head(report), "", *_evaluations(report), "", *map(_check_line, report.checks), "", *_tail(report)]


def _head(report: ParityReport) -> Iterator[str]:
    scores, curve, a, b = report.compared.scores, report.compared.curve, report.a, report.b
    yield f"parity of A {a.name} ({a.device}) and B {b.name} ({b.device})"
    yield f"checkpoint {report.checkpoint} | {scores.rows:,} holdout rows | {curve.steps:,} steps from it"


def _evaluations(report: ParityReport) -> Iterator[str]:
    a, b, metric = f"A {report.a.name}", f"B {report.b.name}", report.metric
    width = max(12, len(a), len(b), len(metric)) + 2
    yield f"{'':>6}" + "".join(f"{text:>{width}}" for text in (metric, metric, "", "", "loss", "loss", ""))
    yield f"{'step':>6}" + "".join(f"{text:>{width}}" for text in (a, b, "difference", "relative", a, b, "relative"))
    for pair in report.compared.evaluations:
        cells = (
            f"{pair.a:.6f}",
            f"{pair.b:.6f}",
            f"{pair.difference:+.6f}",
            f"{pair.relative:.4%}",
            f"{pair.loss_a:.6f}",
            f"{pair.loss_b:.6f}",
            f"{pair.loss_relative:.4%}",
        )
        yield f"{pair.step:>6}" + "".join(f"{cell:>{width}}" for cell in cells)


def value_text(check: ParityCheck) -> str:
    """A difference in three digits; what should be near one in seven."""
    if check.value is None:
        return "-"
    return f"{check.value:.3g}" if check.comparison == "<=" else f"{check.value:.7g}"


def bound_text(check: ParityCheck) -> str:
    return f"{'at most' if check.comparison == '<=' else 'at least'} {check.bound:g}"


def _check_line(check: ParityCheck) -> str:
    mark = {"pass": "pass", "fail": "FAIL", "skipped": "skip"}[check.outcome]
    return f"  {mark}  {check.text:<62} {value_text(check):>10}  {bound_text(check)}"


def _tail(report: ParityReport) -> Iterator[str]:
    scores, vectors = report.compared.scores, report.compared.vectors
    yield f"  {scores.decisions:,} of {scores.rows:,} rows have another most likely class"
    if vectors:
        yield f"  mean cosine of embeddings {vectors.mean_cosine:.7f} over {vectors.rows:,} pairs of texts"
    yield from (f"  note: {note}" for note in report.notes)
