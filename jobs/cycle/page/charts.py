"""Charts as SVG, from numbers and records. Pure: the same numbers give the same bytes, on every machine.

Colours are classes of the page's style sheet, and what colour says a shape or a word says too. Every chart has one
sentence for whoever does not see it, and titles where the mouse rests.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from markupsafe import Markup

from jobs.cycle.ledger import SPENT, Category, Entry
from pipeline.core.format import format_count, format_duration
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck

Point = tuple[float, float]
Series = tuple[str, Sequence[Point], str]
"""Name, points, and a class of the style sheet."""
WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
KINDS = {category: f"s-{category.value.replace(' ', '-')}" for category in SPENT}
"""Classes of the style sheet."""
MAX_POINTS = 600
"""Of one curve: about one a pixel."""
SHAPES = {"fail": "M-4-4L4 4M-4 4L4-4", "warn": "M0-5L5 4H-5Z", "skipped": "M-4 0H4", "pass": "M0-4A4 4 0 1 1-.1-4Z"}
"""By outcome of a check."""
TIME_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 28_800, 86_400)


def number(value: float | None, digits: int = 4) -> str:
    """Return `12,345`, `0.8125`, `-`: for people."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 100 else f"{value:.{digits}f}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten, at most `count` + 1 of them.

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
    """Return a map from values to pixels; a value outside of `low` to `high` is put at the edge."""

    def place(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return start + min(1.0, max(0.0, share)) * (end - start)

    return place


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most `limit` points: the first, the last, and the lowest and highest of each stretch."""
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], max(1, (limit - 2) // 2)
    kept = [points[0]]
    for i in range(stretches):
        part = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        ends = {part.index(choose(part, key=lambda point: point[1])) for choose in (min, max)}
        kept += [part[place] for place in sorted(ends)]
    return [*kept, points[-1]]


def line_chart(
    series: Sequence[Series], label: str, *, marks: Sequence[tuple[float, str]] = (), x_name: str = "step"
) -> Markup:
    """Draw lines with ticks and a grid. `marks`: (x, text) of what happened there."""
    shown = [(name, thin([one for one in points if math.isfinite(one[1])]), kind) for name, points, kind in series]
    every = [point for _, points, _ in shown for point in points]
    if not every:
        return Markup()
    xs, ys, height = [x for x, _ in every], [y for _, y in every], 190.0
    bottom, room = height - BOTTOM, (max(ys) - min(ys)) * 0.04 or abs(max(ys)) * 0.04 or 1.0
    low, high = min(ys) - room, max(ys) + room
    across, up = scale(min(xs), max(xs), LEFT, WIDTH - RIGHT), scale(low, high, bottom, TOP)
    body = _levels(up, ticks(low, high, 4))
    body += [_text(across(x), height - 8, short_number(x), anchor="middle") for x in ticks(min(xs), max(xs), 7)]
    body.append(_text(LEFT - 5, height - 8, x_name, anchor="end", kind="quiet"))
    for x, words in marks:
        if min(xs) <= x <= max(xs):
            body.append(_titled(_path("mark", f"M{_px(across(x))} {TOP}V{_px(bottom)}"), words))
    for name, points, kind in reversed(shown):  # the first on top
        if points:
            body.append(_titled(_line(kind, [(across(x), up(y)) for x, y in points]), name))
    return _svg(body, height, label)


def columns(groups: Sequence[tuple[str, Sequence[float]]], kinds: Sequence[str], label: str, x_name: str) -> Markup:
    """Draw stacked columns: (name, one value for each kind)."""
    if not groups:
        return Markup()
    height, most = 150.0, max(sum(values) for _, values in groups) or 1.0
    up, wide = scale(0, most, height - BOTTOM, TOP), (WIDTH - LEFT - RIGHT) / len(groups)
    body, every = _levels(up, ticks(0, most, 3)), max(1, math.ceil(len(groups) * 62 / (WIDTH - LEFT)))
    for i, (name, values) in enumerate(groups):
        x, done, rects = LEFT + i * wide, 0.0, Markup()
        for kind, value in zip(kinds, values, strict=True):
            if value:
                top = up(done + value)
                rects += _rect(kind, x + 0.5, top, max(0.8, wide - 1), up(done) - top)
            done += value
        body.append(_titled(rects, f"{name}: {number(done)}"))
        if i % every == 0:
            body.append(_text(x + wide / 2, height - 8, fit(name, every * wide), anchor="middle"))
    body.append(_text(WIDTH - RIGHT, TOP + 4, x_name, anchor="end", kind="quiet"))
    return _svg(body, height, label)


def bar(spent: Mapping[Category, int], whole_ms: int) -> Markup:
    """Draw one stacked bar. `whole_ms` fills it. It stands in a table, whose cells give the numbers."""
    x, rects = 0.0, Markup()
    for kind, ms in spent.items():
        width = 100 * ms / whole_ms if whole_ms else 0.0
        if width > 0.05:
            rects += _titled(_rect(KINDS[kind], x, 0, width, 10), f"{kind}: {format_duration(ms / 1000)}")
        x += width
    head = Markup('<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{}</svg>')
    return head.format(rects)


def gantt(lanes: Mapping[str, Sequence[Entry]], began_ms: int, due_s: float | None) -> Markup:
    """Draw every try over time. `due_s`: the deadline since the beginning."""
    end_s = (max(one.start_ms + one.length_ms for tries in lanes.values() for one in tries) - began_ms) / 1000
    left, row = 130.0, 18.0
    bottom = TOP + row * len(lanes)
    last = end_s if due_s is None or due_s >= 2 * end_s else max(end_s, due_s)  # one far ahead is not drawn
    across, body = scale(0, last or 1.0, left, WIDTH - RIGHT), list[Markup]()
    step = next((one for one in TIME_STEPS if last / one <= 8), 86_400 * math.ceil(last / 8 / 86_400))
    for seconds in range(0, int(last) + 1, step):
        body.append(_path("grid", f"M{_px(across(seconds))} {TOP}V{_px(bottom)}"))
        body.append(_text(across(seconds), bottom + BOTTOM - 8, format_duration(seconds), anchor="middle"))
    for index, (name, tries) in enumerate(lanes.items()):
        y, tall = TOP + row * index + 3, row - 6
        body.append(_text(left - 6, y + 9, name, anchor="end"))
        for one in tries:
            at, drawn = (one.start_ms - began_ms) / 1000, Markup()
            if one.waiting_ms > 0:
                x = across(at - one.waiting_ms / 1000)
                drawn += _rect("waiting", x, y, across(at) - x, tall)
            for kind, ms in one.spent_ms.items():
                if ms:
                    drawn += _rect(KINDS[kind], across(at), y, max(0.4, across(at + ms / 1000) - across(at)), tall)
                    at += ms / 1000
            if one.has_failed:
                drawn += _text(across(at) + 1, y + tall - 1.5, "✕", kind="bad")
            spent = ", ".join(f"{kind} {format_duration(ms / 1000)}" for kind, ms in one.spent_ms.items() if ms)
            body.append(_titled(drawn, f"{one.job}, try {one.try_name}: {one.ending}; {spent}"))
    if due_s is not None and due_s <= last:
        body.append(_path("deadline", f"M{_px(across(due_s))} 0V{_px(bottom)}"))
        body.append(_text(across(due_s) - 3, TOP + 2, "deadline", anchor="end", kind="bad"))
    return _svg(body, bottom + BOTTOM, f"Every try over {format_duration(end_s)} since the cycle was submitted")


def forest(checks: Sequence[GateCheck], label: str) -> Markup:
    """Draw a row a check: the difference with its interval, a shape by outcome, and what is allowed. What does not fit
    ends in an arrow.
    """
    left, row = 330.0, 17.0
    ends = sorted(max(abs(one.low or 0.0), abs(one.high or 0.0)) for one in checks)
    reach = max(ends[min(len(ends) - 1, int(0.95 * len(ends)))], *(2 * abs(one.bound or 0.0) for one in checks), 1e-9)
    across, bottom, body = scale(-reach, reach, left, WIDTH - RIGHT - 6), TOP + row * len(checks), list[Markup]()
    for value in ticks(-reach, reach, 6):
        body.append(_path("grid" if value else "zero", f"M{_px(across(value))} {TOP}V{_px(bottom)}"))
        body.append(_text(across(value), bottom + BOTTOM - 8, f"{value:+g}" if value else "0", anchor="middle"))
    for index, one in enumerate(checks):
        y, low, high = TOP + row * (index + 0.5), one.low or 0.0, one.high or 0.0
        drawn = _text(left - 8, y + 4, fit(check_name(one), left - 12), anchor="end")
        drawn += _path("whisker", f"M{_px(across(low))} {_px(y)}H{_px(across(high))}")
        if low < -reach:
            drawn += _path("arrow", f"M{_px(left)} {_px(y)}l6-4v8Z")
        if high > reach:
            drawn += _path("arrow", f"M{_px(across(reach))} {_px(y)}l-6-4v8Z")
        if one.bound is not None:
            lower = bool(one.metric) and MetricName.parse(one.metric).lower_is_better
            drawn += _path("bound", f"M{_px(across(one.bound if lower else -one.bound))} {_px(y - 7)}v14")
        change = (one.candidate or 0.0) - ((one.baseline_value if one.baseline else one.incumbent) or 0.0)
        dot = Markup('<path class="dot {}" transform="translate({} {})" d="{}"/>')
        drawn += dot.format(one.outcome, _px(across(change)), _px(y), SHAPES[one.outcome])
        body.append(_titled(drawn, f"{one.outcome}: {one.reason}; {interval_text(one)}"))
    return _svg(body, bottom + BOTTOM, label)


def check_name(check: GateCheck) -> str:
    against = f" against {check.baseline}" if check.baseline else ""
    queries = f" ({number(check.num_queries)} queries)" if check.num_queries is not None else ""
    return f"{check.metric}{against}{f' of {check.slice}' if check.slice else ''}{queries}"


def interval_text(check: GateCheck) -> str:
    return f"{check.low:+.4f} to {check.high:+.4f}" if check.low is not None and check.high is not None else "-"


def spark(
    values: Sequence[tuple[float | None, bool, str]],
    label: str,
    intervals: Sequence[tuple[float | None, float | None]] = (),
) -> Markup:
    """Draw a small line of (value, whether it counts, text); what does not count is hollow, what is missing a gap.

    `intervals`: (low, high) of each value, drawn if both are known.
    """
    wide, tall = 160.0, 28.0
    known = [(i, value, counts, words) for i, (value, counts, words) in enumerate(values) if value is not None]
    known = [one for one in known if math.isfinite(one[1])]
    spans = [(i, low, high) for i, (low, high) in enumerate(intervals) if low is not None and high is not None]
    if not known:
        return Markup()
    ends = [*(value for _, value, *_ in known), *(end for _, *both in spans for end in both)]
    across, up = scale(0, max(1, len(values) - 1), 5, wide - 5), scale(min(ends), max(ends), tall - 5, 5)
    body = [_path("whisker", f"M{_px(across(i))} {_px(up(low))}V{_px(up(high))}") for i, low, high in spans]
    points = [(across(i), up(value)) for i, value, *_ in known]
    body.append(_line("now", points))
    for (x, y), (_, _, counts, words) in zip(points, known, strict=True):
        circle = Markup('<circle class="{}" cx="{}" cy="{}" r="2.5"/>').format(
            "point now" if counts else "hollow", _px(x), _px(y)
        )
        body.append(_titled(circle, words))
    head = Markup('<svg class="spark" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return head.format(_px(wide), _px(tall), label, Markup().join(body))


def short_number(value: float) -> str:
    """Return `12.0k`, `3.40M`, `0.05`: for axes."""
    return format_count(value) if abs(value) >= 1e4 else f"{value:.6g}"


def fit(words: str, width: float) -> str:
    """Return as many letters as `width` pixels hold."""
    most = max(3, int(width / 6.2))
    return words if len(words) <= most else words[: most - 1] + "…"


# Elements. `Markup.format` escapes every text.


def _svg(body: Iterable[Markup], height: float, label: str) -> Markup:
    head = Markup('<svg viewBox="0 0 {} {}" class="chart" role="img" aria-label="{}">{}</svg>')
    return head.format(WIDTH, _px(height), label, Markup().join(body))


def _levels(up: Callable[[float], float], values: Iterable[float]) -> list[Markup]:
    """Draw the lines of the grid, with their values."""
    found = list[Markup]()
    for value in values:
        found.append(_path("grid", f"M{LEFT} {_px(up(value))}H{WIDTH - RIGHT}"))
        found.append(_text(LEFT - 5, up(value) + 3.5, short_number(value), anchor="end"))
    return found


def _line(kind: str, points: Sequence[Point]) -> Markup:
    """Draw relative moves in tenths of a pixel: few bytes, and exact to a thousandth of the chart's height."""
    whole = [(round(10 * x), round(10 * y)) for x, y in points]
    moves = [f"M{whole[0][0]} {whole[0][1]}"]
    for (x0, y0), (x1, y1) in pairwise(whole):
        moves.append(f"l{x1 - x0}{'' if y1 < y0 else ' '}{y1 - y0}")
    return Markup('<path class="line {}" transform="scale(.1)" d="{}"/>').format(kind, "".join(moves))


def _path(kind: str, d: str) -> Markup:
    return Markup('<path class="{}" d="{}"/>').format(kind, d)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> Markup:
    element = Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"/>')
    return element.format(kind, _px(x), _px(y), _px(width), _px(height))


def _titled(body: Markup, words: str) -> Markup:
    """Group elements, with what is shown where the mouse rests on them."""
    return Markup("<g>{}<title>{}</title></g>").format(body, words)


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> Markup:
    element = Markup('<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>')
    return element.format(_px(x), _px(y), anchor, kind, words)


def _px(value: float) -> str:
    return f"{round(value, 1):g}"
