"""Draw charts as SVG. The output is deterministic, so the same numbers always result in the same bytes.

Colours are classes in the style sheet of the page. Everything that is shown by a colour is also shown by a shape or a
text. Each chart has a label for screen readers, and its elements have tooltips.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup

from jobs.cycle.costs import SPENT, AttemptCost, Category
from jobs.cycle.verdict import metric_name
from pipeline.core.errors import GateRefused
from pipeline.core.format import format_count, format_duration, shortened
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck

Point = tuple[float, float]
Series = tuple[str, Sequence[Point], str]
"""A line in a chart: its name, its points, and its class in the style sheet."""
WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
KINDS = {category: f"s-{category.value.replace(' ', '-')}" for category in SPENT}
"""The class in the style sheet for each category of time."""
MAX_POINTS = 600
"""Maximum number of points of one curve, which is about one per pixel."""
MAX_DOTS = 20
"""Maximum number of points of a line that is drawn with dots."""
SHAPES = {"fail": "M-4-4L4 4M-4 4L4-4", "warn": "M0-5L5 4H-5Z", "skipped": "M-4 0H4", "pass": "M0-4A4 4 0 1 1-.1-4Z"}
"""SVG paths of the shapes for the outcomes of a check."""
TIME_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 28_800, 86_400)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for display with three significant digits, such as `12,345`, `0.812` or `-`."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.{digits}g}".rstrip(".")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return at most `count` + 1 round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten.

    Source: Heckbert, "Nice Numbers for Graph Labels", Graphics Gems (1990).
    """
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return a function that maps values to pixels. Values below `low` or above `high` are clipped."""

    def position(value: float) -> float:
        fraction = (value - low) / (high - low) if high > low else 0.5
        return start + min(1.0, max(0.0, fraction)) * (end - start)

    return position


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Reduce a curve to at most `limit` points: the first, the last, and the lowest and highest of each section."""
    if len(points) <= limit:
        return list(points)
    inner, sections = points[1:-1], max(1, (limit - 2) // 2)
    kept = [points[0]]
    for i in range(sections):
        part = inner[i * len(inner) // sections : (i + 1) * len(inner) // sections]
        ends = {part.index(choose(part, key=lambda point: point[1])) for choose in (min, max)}
        kept += [part[index] for index in sorted(ends)]
    return [*kept, points[-1]]


def line_chart(
    series: Sequence[Series],
    label: str,
    *,
    marks: Sequence[tuple[float, str]] = (),
    x_name: str = "step",
    size: tuple[float, float] = (WIDTH, 190.0),
    span: Sequence[float] = (),
    names: Sequence[str] = (),
    hollow: Collection[float] = (),
) -> Markup:
    """Draw a line chart. If there are several lines, they are labelled at their ends. Short lines are drawn with dots.

    `marks` are vertical lines as (x, text), and `span` contains values that the vertical axis always includes. `names`
    are labels for x = 0, 1, ... to show instead of numbers. Dots at the values of x in `hollow` are not filled.
    """
    shown = [(name, thin([p for p in points if math.isfinite(p[1])]), kind) for name, points, kind in series]
    every = [point for _, points, _ in shown for point in points]
    if not every:
        return Markup()
    named = [(points[-1][1], name, kind) for name, points, kind in shown if name and points]
    (width, height), xs = size, [x for x, _ in every]
    right = width - (RIGHT if len(named) < 2 else min(180.0, 14 + 7 * max(len(name) for _, name, _ in named)))
    ys = [*(y for _, y in every), *span]
    bottom, room = height - BOTTOM, (max(ys) - min(ys)) * 0.04 or abs(max(ys)) * 0.04 or 1.0
    low, high = (min(ys), max(ys)) if span else (min(ys) - room, max(ys) + room)
    across, up = scale(min(xs), max(xs), LEFT, right), scale(low, high, bottom, TOP)
    body = _levels(up, ticks(low, high, max(3, int(height / 40))), right)
    most = max(2, int((right - LEFT) / 110))
    step = max(1, math.ceil(len(names) / most))
    labels = [(float(x), fit(names[x], (right - LEFT) / most)) for x in range(0, len(names), step)]
    labels = labels or [(x, short_number(x)) for x in ticks(min(xs), max(xs), most)]
    body += [_text(across(x), height - 8, text, anchor="middle") for x, text in labels]
    if not names:
        body.append(_text(LEFT - 5, height - 8, x_name, anchor="end", kind="quiet"))
    for x, text in marks:
        if min(xs) <= x <= max(xs):
            body.append(_titled(_path("mark", f"M{_px(across(x))} {TOP}V{_px(bottom)}"), text))
    for name, points, kind in reversed(shown):  # so that the first line is on top
        if points:
            drawn = _line(kind, [(across(x), up(y)) for x, y in points])
            for x, y in points if len(points) <= MAX_DOTS else ():
                drawn += _dot("hollow" if x in hollow and kind == "now" else kind, across(x), up(y), number(y))
            body.append(_titled(drawn, name))
    if len(named) > 1:
        for y, (_, name, kind) in zip(_apart([up(value) for value, *_ in named], bottom), named, strict=True):
            body.append(_text(right + 6, y + 3.5, fit(name, 176), kind=kind))
    return _svg(body, height, label, width)


def _apart(ys: Sequence[float], bottom: float) -> list[float]:
    """Move the positions of labels apart so that they do not overlap, with the last one not below `bottom`."""
    order, placed = sorted(range(len(ys)), key=ys.__getitem__), list(ys)
    for above, below in pairwise(order):
        placed[below] = max(placed[below], placed[above] + 13)
    over = max(0.0, max(placed) - bottom)
    return [y - over for y in placed]


def columns(
    groups: Sequence[tuple[str, Sequence[float]]], kinds: Sequence[str], label: str, size: tuple[float, float]
) -> Markup:
    """Draw a chart of stacked columns. Each group consists of a name and one value per kind."""
    if not groups:
        return Markup()
    (width, height), most = size, max(sum(values) for _, values in groups) or 1.0
    up, wide = scale(0, most, height - BOTTOM, TOP), (width - LEFT - RIGHT) / len(groups)
    body, every = _levels(up, ticks(0, most, 3), width - RIGHT), max(1, math.ceil(len(groups) * 62 / (width - LEFT)))
    for i, (name, values) in enumerate(groups):
        x, done, rects = LEFT + i * wide, 0.0, Markup()
        for kind, value in zip(kinds, values, strict=True):
            if value:
                top = up(done + value)
                rects += _rect(kind, x + 0.5, top, max(0.8, min(60.0, wide - 1)), up(done) - top)
            done += value
        body.append(_titled(rects, f"{name}: {number(done)}"))
        if i % every == 0:
            body.append(_text(x + min(30.0, wide / 2), height - 8, fit(name, every * wide), anchor="middle"))
    return _svg(body, height, label, width)


def bars(rows: Sequence[tuple[str, float, str]], label: str, width: float) -> Markup:
    """Draw a chart of horizontal bars. Each row consists of a name, a value and a class in the style sheet."""
    left, tall = 150.0, 24.0
    across, body = scale(0, max((value for _, value, _ in rows), default=1.0), 0, width - left - 50), list[Markup]()
    for i, (name, value, kind) in enumerate(rows):
        y = TOP + i * tall
        body.append(_text(left - 8, y + 12, fit(name, left - 12), anchor="end"))
        body.append(_rect(kind, left, y, max(1.0, across(value)), tall - 8))
        body.append(_text(left + across(value) + 5, y + 12, number(value)))
    return _svg(body, TOP + len(rows) * tall, label, width) if rows else Markup()


def difference(value: float, low: float, high: float, reach: float) -> Markup:
    """Draw a difference with its interval on a small bar from -`reach` to `reach`."""
    across = scale(-reach, reach, 4, 116)
    kind = "pass" if low > 0 else "fail" if high < 0 else "skipped"
    body = _path("zero", "M60 1V13") + _path("whisker", f"M{_px(across(low))} 7H{_px(across(high))}")
    body += _shape(kind, across(value), 7)
    return Markup('<svg class="delta" viewBox="0 0 120 14" aria-hidden="true">{}</svg>').format(body)


def bar(spent: Mapping[Category, int], full_ms: int) -> Markup:
    """Draw a stacked bar for a table cell. `full_ms` is the time that fills the whole bar."""
    x, rects = 0.0, Markup()
    for kind, ms in spent.items():
        width = 100 * ms / full_ms if full_ms else 0.0
        if width > 0.05:
            rects += _titled(_rect(KINDS[kind], x, 0, width, 10), f"{kind}: {format_duration(ms / 1000)}")
        x += width
    head = Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>')
    return head.format(rects)


def gantt(lanes: Mapping[str, Sequence[AttemptCost]], began_ms: int, due_s: float | None) -> Markup:
    """Draw the attempts of every job over time, with the final state of the job.

    `due_s` is the deadline, in seconds from the start.
    """
    ends_ms = [attempt.start_ms + attempt.length_ms for attempts in lanes.values() for attempt in attempts]
    end_s = (max(ends_ms) - began_ms) / 1000
    left, row = 180.0, 18.0
    bottom = TOP + row * len(lanes)
    last = end_s if due_s is None or due_s >= 2 * end_s else max(end_s, due_s)  # a distant deadline is not drawn
    across, body = scale(0, last or 1.0, left, WIDTH - RIGHT), list[Markup]()
    step = next((size for size in TIME_STEPS if last / size <= 8), 86_400 * math.ceil(last / 8 / 86_400))
    for seconds in range(0, int(last) + 1, step):
        body.append(_path("grid", f"M{_px(across(seconds))} {TOP}V{_px(bottom)}"))
        body.append(_text(across(seconds), bottom + BOTTOM - 8, format_duration(seconds), anchor="middle"))
    for index, (name, attempts) in enumerate(lanes.items()):
        y, tall = TOP + row * index + 3, row - 6
        is_refusal = attempts[-1].ending.startswith(f"exit {GateRefused.exit_code}")
        state = "refused" if is_refusal else "failed" if attempts[-1].has_failed else attempts[-1].ending
        body.append(_text(left - 6, y + 9, f"{fit(name, left - 80)} {state}", anchor="end"))
        for attempt in attempts:
            at, drawn = (attempt.start_ms - began_ms) / 1000, Markup()
            if attempt.waiting_ms > 0:
                x = across(at - attempt.waiting_ms / 1000)
                drawn += _rect("waiting", x, y, across(at) - x, tall)
            for kind, ms in attempt.spent_ms.items():
                if ms:
                    drawn += _rect(KINDS[kind], across(at), y, max(0.4, across(at + ms / 1000) - across(at)), tall)
                    at += ms / 1000
            if attempt.has_failed:
                drawn += _text(across(at) + 1, y + tall - 1.5, "✕", kind="bad")
            spent = ", ".join(f"{kind} {format_duration(ms / 1000)}" for kind, ms in attempt.spent_ms.items() if ms)
            body.append(_titled(drawn, f"{attempt.job}, attempt {attempt.attempt_name}: {attempt.ending}; {spent}"))
    if due_s is not None and due_s <= last:
        body.append(_path("deadline", f"M{_px(across(due_s))} 0V{_px(bottom)}"))
        body.append(_text(across(due_s) - 3, TOP + 2, "deadline", anchor="end", kind="bad"))
    return _svg(body, bottom + BOTTOM, f"Every attempt over {format_duration(end_s)} since the cycle was submitted")


def forest(checks: Sequence[GateCheck], label: str, width: float) -> Markup:
    """Draw the difference of each check with its confidence interval and allowed drop. A shape shows the outcome."""
    left, right, row = 0.38 * width, width - 56, 18.0
    ends = sorted(max(abs(check.low or 0.0), abs(check.high or 0.0)) for check in checks)
    reach = max(
        ends[min(len(ends) - 1, int(0.95 * len(ends)))], *(2 * abs(check.bound or 0.0) for check in checks), 1e-9
    )
    across, bottom, body = scale(-reach, reach, left, right), TOP + row * len(checks), list[Markup]()
    for value in ticks(-reach, reach, 6):
        body.append(_path("grid" if value else "zero", f"M{_px(across(value))} {TOP}V{_px(bottom)}"))
        body.append(_text(across(value), bottom + BOTTOM - 8, f"{value:+g}" if value else "0", anchor="middle"))
    for index, check in enumerate(checks):
        y, low, high = TOP + row * (index + 0.5), check.low or 0.0, check.high or 0.0
        drawn = _text(left - 8, y + 4, fit(check_name(check), left - 12), anchor="end")
        drawn += _path("whisker", f"M{_px(across(low))} {_px(y)}H{_px(across(high))}")
        if low < -reach:
            drawn += _path("arrow", f"M{_px(left)} {_px(y)}l6-4v8Z")
        if high > reach:
            drawn += _path("arrow", f"M{_px(across(reach))} {_px(y)}l-6-4v8Z")
        if check.bound is not None:
            lower = bool(check.metric) and MetricName.parse(check.metric).lower_is_better
            drawn += _path("bound", f"M{_px(across(check.bound if lower else -check.bound))} {_px(y - 7)}v14")
        change = (check.candidate or 0.0) - ((check.baseline_value if check.baseline else check.incumbent) or 0.0)
        drawn += _shape(check.outcome, across(change), y) + _text(right + 8, y + 4, f"{change:+.3f}")
        body.append(_titled(drawn, f"{check.outcome}: {check.reason}; {interval_text(check)}"))
    return _svg(body, bottom + BOTTOM, label, width)


def check_name(check: GateCheck) -> str:
    against = f" against {metric_name(check.baseline)}" if check.baseline else ""
    return f"{metric_name(check.metric)}{against}{f' of {check.slice}' if check.slice else ''}"


def interval_text(check: GateCheck) -> str:
    return f"{check.low:+.3f} to {check.high:+.3f}" if check.low is not None and check.high is not None else "-"


def short_number(value: float) -> str:
    """Format a number for the labels of an axis, such as `12.0k`, `3.40M` or `0.05`."""
    return format_count(value) if abs(value) >= 1e4 else f"{value:.6g}"


def fit(text: str, width: float) -> str:
    """Shorten a text to fit into `width` pixels."""
    return shortened(text, max(3, int(width / 6.2)))


# SVG elements. `Markup.format` escapes all text.


def _svg(body: Iterable[Markup], height: float, label: str, width: float = WIDTH) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" class="chart{}" role="img" aria-label="{}">{}</svg>')
    return head.format(_px(width), _px(height), " broad" if width == WIDTH else "", label, Markup().join(body))


def _levels(up: Callable[[float], float], values: Iterable[float], right: float) -> list[Markup]:
    elements = list[Markup]()
    for value in values:
        elements.append(_path("grid", f"M{LEFT} {_px(up(value))}H{_px(right)}"))
        elements.append(_text(LEFT - 5, up(value) + 3.5, short_number(value), anchor="end"))
    return elements


def _line(kind: str, points: Sequence[Point]) -> Markup:
    """Draw a line. It is encoded as relative moves in tenths of a pixel, which takes few bytes."""
    tenths = [(round(10 * x), round(10 * y)) for x, y in points]
    moves = [f"M{tenths[0][0]} {tenths[0][1]}"]
    for (x0, y0), (x1, y1) in pairwise(tenths):
        moves.append(f"l{x1 - x0}{'' if y1 < y0 else ' '}{y1 - y0}")
    return Markup('<path class="line {}" transform="scale(.1)" d="{}"/>').format(kind, "".join(moves))


def _path(kind: str, d: str) -> Markup:
    return Markup('<path class="{}" d="{}"/>').format(kind, d)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    element = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
    return element.format(kind, _px(x), _px(y), _px(width), _px(height))


def _shape(outcome: str, x: float, y: float) -> Markup:
    shape = Markup('<path class="dot {}" transform="translate({} {})" d="{}"/>')
    return shape.format(outcome, _px(x), _px(y), SHAPES[outcome])


def _dot(kind: str, x: float, y: float, title: str) -> Markup:
    circle = Markup('<circle class="{}" cx="{}" cy="{}" r="2.5"/>').format(kind, _px(x), _px(y))
    return _titled(circle, title)


def _titled(body: Markup, title: str) -> Markup:
    return Markup("<g>{}<title>{}</title></g>").format(body, title)


def _text(x: float, y: float, text: str, *, anchor: str = "start", kind: str = "") -> Markup:
    element = Markup('<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>')
    return element.format(_px(x), _px(y), anchor, kind, text)


def _px(value: float) -> str:
    return f"{round(value, 1):g}"
