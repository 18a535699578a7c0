"""Charts as SVG, from numbers and records. Pure: the same numbers give the same bytes, on every machine.

Text is text, colours are classes of the page's style sheet, and what colour says a shape or a word says too. Every
chart has one sentence for whoever does not see it, and can be reached by keyboard.
"""

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from jobs.cycle.attempt_time import Category
from jobs.cycle.cost_ledger import Entry
from jobs.cycle.page.data import Job, Point, thin
from pipeline.core.format import format_duration
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck

WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
KINDS = {category: f"s-{category.value.replace(' ', '-')}" for category in Category}
"""Classes of the style sheet."""
_HIDDEN = dict.fromkeys(
    [
        *(code for code in range(0xA0) if (code < 0x20 or code >= 0x7F) and code not in (0x09, 0x0A)),
        *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF),  # they turn text around
        *range(0xD800, 0xE000),  # halves of pairs
    ],
    "\ufffd",
)


def escaped(words: str) -> str:
    """A text as markup, also in attributes; characters that control a terminal or the direction of text are shown."""
    return escape(words.translate(_HIDDEN))


def number(value: float | None, digits: int = 4) -> str:
    """`12,345`, `0.8125`, `-`: for people."""
    if value is None or not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 100 else f"{value:.{digits}f}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: steps of 1, 2 or 5 times a power of ten, at most `count` + 1 of them.

    Source: Heckbert, "Nice Numbers for Graph Labels", Graphics Gems (1990).
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `end`; one that lies outside is put at the edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)


@dataclass(frozen=True)
class Series:
    """One line. `kind`: a class of the style sheet; others than the first are dashed there."""

    name: str
    points: Sequence[Point]
    kind: str = "now"


def svg(body: str, height: float, label: str, kind: str, more: str = "") -> str:
    """A chart of the width of the page; `more`: further attributes."""
    role = "group" if "<a " in body else "img"  # what is inside an image cannot be reached
    return (
        f'<svg viewBox="0 0 {WIDTH} {px(height)}" class="chart {kind}" role="{role}" tabindex="0"'
        f' aria-label="{escaped(label)}"{more}>{body}</svg>'
    )


def stroke(kind: str, d: str) -> str:
    return f'<path class="{kind}" d="{d}"/>'


def rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{px(x)}" y="{px(y)}" width="{px(width)}" height="{px(height)}"/>'


def titled(body: str, words: str) -> str:
    """A group with what is shown where the mouse rests on it."""
    return f"<g>{body}<title>{escaped(words)}</title></g>"


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{px(x)}" y="{px(y)}"{where}{named}>{escaped(words)}</text>'


def line_chart(series: Sequence[Series], label: str, *, marks: Sequence[tuple[float, str]] = ()) -> str:
    """Lines over steps, with ticks, a grid and marks. `label`: the sentence for a screen reader.

    `marks`: (step, text) of what happened there.
    """
    shown = [(one, thin([point for point in one.points if math.isfinite(point[1])])) for one in series]
    every = [point for _, points in shown for point in points]
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    height = 190.0
    low, high, bottom = min(ys), max(ys), height - BOTTOM
    room = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    across = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = Scale(low - room, high + room, bottom, TOP)
    body = list(levels(up, ticks(up.low, up.high, 4)))
    for value in ticks(across.low, across.high, 7):
        body.append(text(across(value), height - 8, short_number(value), anchor="middle"))
    body.append(text(LEFT - 5, height - 8, "step", anchor="end", kind="quiet"))
    for step, words in marks:
        if across.low <= step <= across.high:
            body.append(titled(stroke("mark", f"M{px(across(step))} {TOP}V{px(bottom)}"), words))
    for one, points in reversed(shown):  # the first on top
        if points:
            body.append(
                f'<path class="line {one.kind}" data-name="{escaped(one.name)}" transform="scale(.1)"'
                f' d="{line_path((across(x), up(y)) for x, y in points)}"><title>{escaped(one.name)}</title></path>'
            )
    frame = " ".join(f"{v:.8g}" for v in (across.low, across.high, LEFT, WIDTH - RIGHT, up.low, up.high, bottom, TOP))
    return svg("".join(body), height, label, "lines", f' data-frame="{frame}"')


def levels(up: Scale, values: Iterable[float]) -> Iterator[str]:
    """Lines of the grid, with their values."""
    for value in values:
        yield stroke("grid", f"M{LEFT} {px(up(value))}H{WIDTH - RIGHT}")
        yield text(LEFT - 5, up(value) + 3.5, short_number(value), anchor="end")


def short_number(value: float) -> str:
    """`12k`, `3.4M`, `0.05`: for axes."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"


def line_path(points: Iterable[Point]) -> str:
    """Relative moves in tenths of a pixel: few bytes, and exact to a thousandth of the chart's height."""
    whole = [(round(10 * x), round(10 * y)) for x, y in points]
    moves = [f"M{whole[0][0]} {whole[0][1]}"]
    for (x0, y0), (x1, y1) in pairwise(whole):
        down = y1 - y0
        moves.append(f"l{x1 - x0}{'' if down < 0 else ' '}{down}")
    return "".join(moves)


def bar(parts: Sequence[tuple[str, float, str]], whole: float) -> str:
    """One stacked bar of (kind, size, text); `whole`: the size that fills it. It stands in a table, whose cells say
    the numbers.
    """
    x, rects = 0.0, []
    for kind, size, words in parts:
        width = 100 * size / whole if whole else 0.0
        if width > 0.05:
            title = f"<title>{escaped(words)}</title>"
            rects.append(f'<rect class="{kind}" x="{px(x)}" width="{px(width)}" height="10">{title}</rect>')
        x += width
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{"".join(rects)}</svg>'


def gantt(
    lanes: Mapping[str, Sequence[Entry]], began_ms: int, end_s: float, due_s: float | None, explained: Container[str]
) -> str:
    """`end_s`, `due_s`: since the beginning. Failed tries of the jobs in `explained` lead to their post-mortems."""
    left, row = 130.0, 18.0
    bottom = TOP + row * len(lanes)
    last = end_s if due_s is None or due_s >= 2 * end_s else max(end_s, due_s)  # one far ahead is told, not drawn
    across, body = Scale(0, last or 1.0, left, WIDTH - RIGHT), []
    for seconds in time_ticks(last):
        body.append(stroke("grid", f"M{px(across(seconds))} {TOP}V{px(bottom)}"))
        body.append(text(across(seconds), bottom + BOTTOM - 8, time_label(seconds), anchor="middle"))
    for number_, (name, tries) in enumerate(lanes.items()):
        y, tall = TOP + row * number_ + 3, row - 6
        body.append(text(left - 6, y + 9, name, anchor="end"))
        for one in tries:
            at, drawn = (one.start_ms - began_ms) / 1000, ""
            if one.waiting_ms > 0:
                x = across(at - one.waiting_ms / 1000)
                drawn += rect("waiting", x, y, across(at) - x, tall)
            for kind, ms in one.spent_ms.items():
                if ms:
                    drawn += rect(KINDS[kind], across(at), y, max(0.4, across(at + ms / 1000) - across(at)), tall)
                    at += ms / 1000
            if one.has_failed:
                drawn += text(across(at) + 1, y + tall - 1.5, "✕", kind="bad")
            spent = ", ".join(f"{kind} {format_duration(ms / 1000)}" for kind, ms in one.spent_ms.items() if ms)
            words = f"{one.job}, try {one.try_name}: {one.ending}; {spent}"
            drawn = titled(drawn, words)
            if one.has_failed and name in explained:
                drawn = f'<a href="#post-mortems" aria-label="{escaped(words)}">{drawn}</a>'
            body.append(drawn)
    if due_s is not None and due_s <= last:
        body.append(stroke("deadline", f"M{px(across(due_s))} 0V{px(bottom)}"))
        body.append(text(across(due_s) - 3, TOP + 2, "deadline", anchor="end", kind="bad"))
    label = f"Every try over {format_duration(end_s)} since the cycle was submitted"
    return svg("".join(body), bottom + BOTTOM, label, "gantt")


TIME_STEPS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14_400, 28_800, 86_400)


def time_ticks(seconds: float) -> list[float]:
    step = next((one for one in TIME_STEPS if seconds / one <= 8), 86_400 * math.ceil(seconds / 8 / 86_400))
    return [float(i * step) for i in range(int(seconds / step) + 1)]


def time_label(seconds: float) -> str:
    if seconds >= 86_400 and seconds % 3600 == 0:
        return f"{seconds / 86_400:g}d"
    if seconds >= 3600:
        hours, rest = divmod(seconds, 3600)
        return f"{hours:g}h" if not rest else f"{hours:g}h{rest / 60:02g}"
    return f"{seconds:g}s" if seconds < 60 or seconds % 60 else f"{seconds / 60:g}m"


def dag(jobs: Sequence[Job]) -> str:
    """Jobs in columns, each after those it waits for."""
    column: dict[str, int] = {}
    for job in jobs:
        column[job.name] = max((column[name] + 1 for name in job.after if name in column), default=0)
    columns = [[name for name in column if column[name] == i] for i in range(max(column.values(), default=-1) + 1)]
    if not columns:
        return ""
    gap, tall = 18.0, 46.0
    wide = (WIDTH - 4 - gap * (len(columns) - 1)) / len(columns)
    height = max(map(len, columns)) * (tall + 8)
    place: dict[str, tuple[float, float]] = {}
    for across, inside in enumerate(columns):
        for down, name in enumerate(inside):
            free = height - len(inside) * (tall + 8)
            place[name] = (2 + across * (wide + gap), 4 + free / 2 + down * (tall + 8))
    body, boxes, states = [], [], []
    for job in jobs:
        x, y = place[job.name]
        for x0, y0 in (place[name] for name in job.after if name in place):
            body.append(stroke("edge", f"M{px(x0 + wide)} {px(y0 + tall / 2)}L{px(x - 1)} {px(y + tall / 2)}"))
        state, tries = job.ending, "1 try" if job.tries == 1 else f"{job.tries} tries"
        states.append(f"{job.name} {state} after {tries}")
        code = f", exit {job.exit_code}" if job.exit_code else ""
        lines = (job.name, state + code, f"{tries}, {format_duration(job.ran_s)}")
        words = "".join(
            text(x + 6, y + 15 + 12 * i, fit(line, wide - 10), kind="" if i else "strong")
            for i, line in enumerate(lines)
        )
        kind = {"succeeded": "good", "failed": "bad", "refused": "bad"}.get(state, "")
        boxes.append(
            f'<g class="box {kind}"><rect x="{px(x)}" y="{px(y)}" width="{px(wide)}" height="{px(tall)}" rx="4"/>'
            f"{words}<title>{escaped(': '.join(lines))}</title></g>"
        )
    label = f"Jobs in the order they wait for each other: {', '.join(states)}"
    return svg("".join((*body, *boxes)), height, label, "dag")


def fit(words: str, width: float) -> str:
    """As many letters as `width` pixels hold."""
    most = max(3, int(width / 6.2))
    return words if len(words) <= most else words[: most - 1] + "…"


SHAPES = {"fail": "M-4-4L4 4M-4 4L4-4", "warn": "M0-5L5 4H-5Z", "skipped": "M-4 0H4", "pass": "M0-4A4 4 0 1 1-.1-4Z"}
"""By outcome of a check."""


def forest(checks: Sequence[GateCheck], label: str) -> str:
    """A row a check: the difference with its interval, a shape by outcome, and what is allowed; what does not fit ends
    in an arrow.
    """
    left, row = 330.0, 17.0
    ends = sorted(max(abs(one.low or 0.0), abs(one.high or 0.0)) for one in checks)
    reach = max(ends[min(len(ends) - 1, int(0.95 * len(ends)))], *(2 * abs(one.bound or 0.0) for one in checks), 1e-9)
    across, bottom = Scale(-reach, reach, left, WIDTH - RIGHT - 6), TOP + row * len(checks)
    body = []
    for value in ticks(-reach, reach, 6):
        body.append(stroke("grid" if value else "zero", f"M{px(across(value))} {TOP}V{px(bottom)}"))
        body.append(text(across(value), bottom + BOTTOM - 8, f"{value:+g}" if value else "0", anchor="middle"))
    for number_, one in enumerate(checks):
        y, low, high = TOP + row * (number_ + 0.5), one.low or 0.0, one.high or 0.0
        drawn = text(left - 8, y + 4, fit(check_name(one), left - 12), anchor="end")
        drawn += stroke("whisker", f"M{px(across(low))} {px(y)}H{px(across(high))}")
        if low < -reach:
            drawn += stroke("arrow", f"M{px(left)} {px(y)}l6-4v8Z")
        if high > reach:
            drawn += stroke("arrow", f"M{px(across(reach))} {px(y)}l-6-4v8Z")
        if one.bound is not None:
            lower = bool(one.metric) and MetricName.parse(one.metric).lower_is_better
            drawn += stroke("bound", f"M{px(across(one.bound if lower else -one.bound))} {px(y - 7)}v14")
        change = (one.candidate or 0.0) - ((one.baseline_value if one.baseline else one.incumbent) or 0.0)
        at, shape = f"translate({px(across(change))} {px(y)})", SHAPES[one.outcome]
        drawn += f'<path class="dot {one.outcome}" transform="{at}" d="{shape}"/>'
        body.append(titled(drawn, f"{one.outcome}: {one.reason}; {interval_text(one)}"))
    return svg("".join(body), bottom + BOTTOM, label, "forest")


def check_name(check: GateCheck) -> str:
    against = f" against {check.baseline}" if check.baseline else ""
    queries = f" ({number(check.num_queries)} queries)" if check.num_queries is not None else ""
    return f"{check.metric}{against}{f' of {check.slice}' if check.slice else ''}{queries}"


def interval_text(check: GateCheck) -> str:
    return f"{check.low:+.4f} to {check.high:+.4f}" if check.low is not None and check.high is not None else "-"


def stacked_columns(
    groups: Sequence[tuple[str, Sequence[float]]], kinds: Sequence[str], label: str, *, x_name: str
) -> str:
    """Stacked columns: (name, one value for each kind)."""
    if not groups:
        return ""
    height = 150.0
    most = max(sum(values) for _, values in groups) or 1.0
    up, wide = Scale(0, most, height - BOTTOM, TOP), (WIDTH - LEFT - RIGHT) / len(groups)
    body = [*levels(up, ticks(0, most, 3))]
    every = max(1, math.ceil(len(groups) * 62 / (WIDTH - LEFT)))
    for i, (name, values) in enumerate(groups):
        x, done, rects = LEFT + i * wide, 0.0, ""
        for kind, value in zip(kinds, values, strict=True):
            if value:
                top = up(done + value)
                rects += rect(kind, x + 0.5, top, max(0.8, wide - 1), up(done) - top)
            done += value
        body.append(titled(rects, f"{name}: {number(done)}"))
        if i % every == 0:
            body.append(text(x + wide / 2, height - 8, fit(name, every * wide), anchor="middle"))
    body.append(text(WIDTH - RIGHT, TOP + 4, x_name, anchor="end", kind="quiet"))
    return svg("".join(body), height, label, "columns")


def reliability(series: Sequence[tuple[str, Sequence[tuple[float, float, int]]]], label: str) -> str:
    """Share of right rows over confidence, with the diagonal: (kind, [(confidence, right, rows)])."""
    size, left = 230.0, 380.0
    across, up = Scale(0, 1, left, left + size), Scale(0, 1, TOP + size, TOP)
    body = []
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        body.append(stroke("grid", f"M{px(left)} {px(up(value))}h{px(size)}"))
        body.append(text(left - 5, up(value) + 3.5, f"{value:g}", anchor="end"))
        body.append(text(across(value), TOP + size + 14, f"{value:g}", anchor="middle"))
    body.append(stroke("zero", f"M{px(across(0))} {px(up(0))}L{px(across(1))} {px(up(1))}"))
    most = max((rows for _, points in series for *_, rows in points), default=1) or 1
    for kind, points in reversed(series):
        for confidence, right, rows in points:
            radius = 2 + 7 * math.sqrt(rows / most)
            body.append(
                f'<circle class="point {kind}" cx="{px(across(confidence))}" cy="{px(up(right))}" r="{px(radius)}">'
                f"<title>{number(rows)} rows: confidence {confidence:.3f}, right {right:.3f}</title></circle>"
            )
    body.append(text(across(0.5), TOP + size + 28, "mean confidence", anchor="middle", kind="quiet"))
    body.append(text(left - 34, up(0.5), "right", anchor="end", kind="quiet"))
    return svg("".join(body), size + 46, label, "reliability")


def heat(rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], heads: Sequence[str], label: str) -> str:
    """A matrix: (name, [(kind, text)]); a letter stands in cells of other kinds than pass."""
    left, top, cell = 160.0, 74.0, 14.0
    wide = min(46.0, (WIDTH - left - RIGHT) / max(1, len(heads)))
    height = top + cell * len(rows) + 6
    body = [
        f'<text transform="translate({px(left + wide * (i + 0.6))} {px(top - 5)}) rotate(-45)">'
        f"{escaped(fit(head, 90))}</text>"
        for i, head in enumerate(heads)
    ]
    for y, (name, cells) in enumerate(rows):
        down = top + cell * y
        body.append(text(left - 6, down + 10.5, fit(name, left - 8), anchor="end"))
        body.append(stroke("v-pass", f"M{px(left)} {px(down + 0.5)}h{px(wide * len(cells))}v13H{px(left)}"))
        for x, (kind, words) in enumerate(cells):
            if kind == "pass":
                continue
            drawn = rect(f"v-{kind}", left + wide * x, down + 0.5, wide, cell - 1)
            if kind != "none":
                drawn += text(left + wide * (x + 0.5), down + 10.5, kind[:1].upper(), anchor="middle", kind="on")
            body.append(titled(drawn, words) if words else f"<g>{drawn}</g>")
    lines = "".join(f"M{px(left + wide * i)} {px(top)}V{px(height - 6)}" for i in range(1, len(heads)))
    body.append(stroke("rule", lines))
    return svg("".join(body), height, label, "heat")


def spark(
    values: Sequence[tuple[float | None, bool, str]],
    label: str,
    intervals: Sequence[tuple[float | None, float | None]] = (),
) -> str:
    """A small line of (value, whether it counts, text); what does not count is hollow, what is missing a gap.

    `intervals`: (low, high) of each value, drawn where both are known.
    """
    wide, tall = 160.0, 28.0
    known = [
        (i, value, counts, words)
        for i, (value, counts, words) in enumerate(values)
        if value is not None and math.isfinite(value)
    ]
    if not known:
        return ""
    spans = [
        (i, low, high)
        for i, (low, high) in enumerate(intervals)
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    ]
    ends = [*(value for _, value, *_ in known), *(end for _, *both in spans for end in both)]
    across, up = Scale(0, max(1, len(values) - 1), 5, wide - 5), Scale(min(ends), max(ends), tall - 5, 5)
    body = [stroke("whisker", f"M{px(across(i))} {px(up(low))}V{px(up(high))}") for i, low, high in spans]
    points = [(across(i), up(value)) for i, value, *_ in known]
    body.append(f'<path class="line now" transform="scale(.1)" d="{line_path(points)}"/>')
    for (x, y), (_, _, counts, words) in zip(points, known, strict=True):
        kind, title = "point now" if counts else "hollow", f"<title>{escaped(words)}</title>"
        body.append(f'<circle class="{kind}" cx="{px(x)}" cy="{px(y)}" r="2.5">{title}</circle>')
    frame = f'<svg class="spark" viewBox="0 0 {px(wide)} {px(tall)}" role="img" tabindex="0"'
    return f'{frame} aria-label="{escaped(label)}">{"".join(body)}</svg>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), *, raw: Iterable[int] = ()
) -> str:
    """Text cells, escaped; `numbers`: columns set to the right; `raw`: columns that hold markup made here."""
    kinds, made = dict.fromkeys(numbers, " class=n"), set(raw)
    heads = "".join(f"<th{kinds.get(i, '')} scope=col>{escaped(word)}</th>" for i, word in enumerate(head))
    lines = []
    for row in rows:
        cells = (f"<td{kinds.get(i, '')}>{word if i in made else escaped(word)}</td>" for i, word in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    first = f"<thead><tr>{heads}</tr></thead>" if head else ""
    return f'<div class="wide" tabindex="0"><table>{first}<tbody>{"".join(lines)}</tbody></table></div>'


def px(value: float) -> str:
    return f"{round(value, 1):g}"
