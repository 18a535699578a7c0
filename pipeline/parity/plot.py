"""A comparison as a picture: the metric, the difference of metric and holdout loss, the difference of every step."""

import io
from collections.abc import Sequence

from pipeline.evaluate.parity import Curve, relative_difference
from pipeline.parity.compare import ParityReport

INSTALL = "pip install 'trnpipe[report]'"
_FLOOR = 1e-9
"""Where a logarithmic axis puts no difference at all."""


def has_matplotlib() -> bool:
    """False when the extra `report` is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def plot_svg(report: ParityReport, a: Curve, b: Curve) -> bytes:
    """An SVG; the same figures give the same bytes. No display is needed."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    pairs = report.compared.evaluations
    steps = [pair.step for pair in pairs]
    figure = Figure(figsize=(13, 4), layout="constrained")
    metric, difference, curve = figure.subplots(1, 3)
    metric.plot(steps, [pair.a for pair in pairs], "o-", label=report.a.name)
    metric.plot(steps, [pair.b for pair in pairs], "x--", label=report.b.name)
    metric.set(title=report.metric, xlabel="step")
    difference.plot(steps, _logarithmic([pair.relative for pair in pairs]), "o-", label=report.metric)
    difference.plot(steps, _logarithmic([pair.loss_relative for pair in pairs]), "x--", label="holdout loss")
    difference.axhline(report.max_difference, color="red", label=f"bar {report.max_difference:.2%}")
    difference.set(title="relative difference at evaluations", xlabel="step", yscale="log")
    for text, left, right in (("loss", a.losses, b.losses), ("gradient norm", a.grad_norms, b.grad_norms)):
        apart = [relative_difference(one, other) for one, other in zip(left, right, strict=True)]
        curve.plot(range(1, len(apart) + 1), _logarithmic(apart), linewidth=0.8, label=text)
    curve.set(title="relative difference of training steps", xlabel="step", yscale="log")
    for axes in (metric, difference, curve):
        axes.grid(alpha=0.3)
        axes.legend(loc="center right")
    figure.suptitle(f"{report.a.name} and {report.b.name}: {'pass' if report.passed else 'FAIL'}")
    file = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "trnpipe"}):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return file.getvalue()


def _logarithmic(values: Sequence[float]) -> list[float]:
    return [max(value, _FLOOR) for value in values]
