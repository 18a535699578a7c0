"""Charts as SVG, from numbers. Pure: the same numbers give the same bytes, on every machine.

Text is text, colours are classes of the page's style sheet, and what colour says a shape or a word says too. Every
chart has one sentence for whoever does not see it, and can be reached by keyboard.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 1000
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 8, 24
MAX_POINTS = 600
"""Of one line: about one a pixel."""
Point = tuple[float, float]


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


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """At most `limit` points that keep the first, the last, and the lowest and highest of each stretch."""
    if len(points) <= limit:
        return list(points)
    inner, stretches = points[1:-1], max(1, (limit - 2) // 2)
    kept = [points[0]]
    for i in range(stretches):
        part = inner[i * len(inner) // stretches : (i + 1) * len(inner) // stretches]
        ends = {part.index(choose(part, key=lambda point: point[1])) for choose in (min, max)}
        kept += [part[place] for place in sorted(ends)]
    return [*kept, points[-1]]


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


@dataclass(frozen=True)
class Mark:
    """Something that happened at one place of the horizontal axis."""

    at: float
    text: str


def svg(body: str, height: float, label: str, kind: str, data: Mapping[str, str] | None = None) -> str:
    more = "".join(f' data-{name}="{escaped(value)}"' for name, value in (data or {}).items())
    role = "group" if "<a " in body else "img"  # what is inside an image cannot be reached
    return (
        f'<svg viewBox="0 0 {WIDTH} {_px(height)}" class="chart {kind}" role="{role}" tabindex="0"'
        f' aria-label="{escaped(label)}"{more}>{body}</svg>'
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{_px(x)}" y="{_px(y)}"{where}{named}>{escaped(words)}</text>'


def line_chart(
    series: Sequence[Series], label: str, *, x_name: str = "step", marks: Sequence[Mark] = (), height: float = 190
) -> str:
    """Lines over a common axis, with ticks, a grid and marks. `label`: the sentence for a screen reader."""
    shown = [(one, thin([point for point in one.points if math.isfinite(point[1])])) for one in series]
    every = [point for _, points in shown for point in points]
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    low, high = min(ys), max(ys)
    room = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
    across = Scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    up = Scale(low - room, high + room, height - BOTTOM, TOP)
    body = [_axes(across, up, height, x_name)]
    for mark in marks:
        if across.low <= mark.at <= across.high:
            x = _px(across(mark.at))
            top = f'<path class="mark" d="M{x} {TOP}V{_px(height - BOTTOM)}"/>'
            body.append(f"<g>{top}<title>{escaped(mark.text)}</title></g>")
    for one, points in reversed(shown):  # the first on top
        if points:
            body.append(
                f'<path class="line {one.kind}" data-name="{escaped(one.name)}" transform="scale(.1)"'
                f' d="{_path((across(x), up(y)) for x, y in points)}"><title>{escaped(one.name)}</title></path>'
            )
    frame = (across.low, across.high, LEFT, WIDTH - RIGHT, up.low, up.high, height - BOTTOM, TOP)
    return svg("".join(body), height, label, "lines", {"frame": " ".join(f"{v:.8g}" for v in frame)})


def _axes(across: Scale, up: Scale, height: float, x_name: str) -> str:
    parts = [*_levels(up, ticks(up.low, up.high, 4))]
    for value in ticks(across.low, across.high, 7):
        parts.append(text(across(value), height - 8, short_number(value), anchor="middle"))
    parts.append(text(LEFT - 5, height - 8, x_name, anchor="end", kind="quiet"))
    return "".join(parts)


def _levels(up: Scale, values: Iterable[float]) -> Iterator[str]:
    for value in values:
        yield f'<path class="grid" d="M{LEFT} {_px(up(value))}H{WIDTH - RIGHT}"/>'
        yield text(LEFT - 5, up(value) + 3.5, short_number(value), anchor="end")


def short_number(value: float) -> str:
    """`12k`, `3.4M`, `0.05`: for axes."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if letter == "k" else 1):
            return f"{value / size:g}{letter}"
    return f"{value:.6g}"


def _path(points: Iterable[Point]) -> str:
    """Relative moves in tenths of a pixel: few bytes, and exact to a thousandth of the chart's height."""
    whole = [(round(10 * x), round(10 * y)) for x, y in points]
    moves = [f"M{whole[0][0]} {whole[0][1]}"]
    for (x0, y0), (x1, y1) in pairwise(whole):
        down = y1 - y0
        moves.append(f"l{x1 - x0}{'' if down < 0 else ' '}{down}")
    return "".join(moves)


@dataclass(frozen=True)
class Part:
    """A piece of a bar."""

    kind: str
    size: float
    text: str


def bar(parts: Sequence[Part], whole: float) -> str:
    """One stacked bar; `whole`: the size that fills it. It stands in a table, whose cells say the numbers."""
    x, rects = 0.0, []
    for part in parts:
        width = 100 * part.size / whole if whole else 0.0
        if width > 0.05:
            rects.append(
                f'<rect class="{part.kind}" x="{_px(x)}" width="{_px(width)}" height="10"><title>{escaped(part.text)}'
                "</title></rect>"
            )
        x += width
    return f'<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">{"".join(rects)}</svg>'


@dataclass(frozen=True)
class Bar:
    """One try of a job. Seconds since the cycle began; `waited` lies before `start`."""

    start: float
    waited: float
    parts: Sequence[Part]
    text: str
    failed: bool = False
    link: str = ""
    """The place in this page that tells more."""


@dataclass(frozen=True)
class Lane:
    name: str
    bars: Sequence[Bar]


def gantt(lanes: Sequence[Lane], end: float, deadline: float | None, label: str) -> str:
    """Lanes over time; `end`, `deadline`: seconds since the beginning."""
    left, row = 130.0, 18.0
    height = TOP + row * len(lanes) + BOTTOM
    last = max(end, deadline or 0.0) if (deadline or 0.0) < 2 * end else end  # one far ahead is told, not drawn
    across, body = Scale(0, last or 1.0, left, WIDTH - RIGHT), []
    for seconds in time_ticks(last):
        x = across(seconds)
        body.append(f'<path class="grid" d="M{_px(x)} {TOP}V{_px(height - BOTTOM)}"/>')
        body.append(text(x, height - 8, time_label(seconds), anchor="middle"))
    for number_, lane in enumerate(lanes):
        y = TOP + row * number_
        body.append(text(left - 6, y + 12, lane.name, anchor="end"))
        body += [_try(one, y + 3, row - 6, across) for one in lane.bars]
    if deadline is not None and deadline <= last:
        body.append(f'<path class="deadline" d="M{_px(across(deadline))} 0V{_px(height - BOTTOM)}"/>')
        body.append(text(across(deadline) - 3, TOP + 2, "deadline", anchor="end", kind="bad"))
    return svg("".join(body), height, label, "gantt")


def _try(one: Bar, y: float, height: float, across: Scale) -> str:
    rects, at = [], one.start
    if one.waited > 0:
        x, width = across(one.start - one.waited), across(one.start) - across(one.start - one.waited)
        rects.append(f'<rect class="waiting" x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"/>')
    for part in one.parts:
        x, width = across(at), max(0.4, across(at + part.size) - across(at))
        rects.append(
            f'<rect class="{part.kind}" x="{_px(x)}" y="{_px(y)}" width="{_px(width)}" height="{_px(height)}"/>'
        )
        at += part.size
    if one.failed:
        rects.append(text(across(at) + 1, y + height - 1.5, "✕", kind="bad"))
    body = f"<g>{''.join(rects)}<title>{escaped(one.text)}</title></g>"
    return f'<a href="#{escaped(one.link)}" aria-label="{escaped(one.text)}">{body}</a>' if one.link else body


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


@dataclass(frozen=True)
class Box:
    name: str
    state: str
    """good, bad, or nothing."""
    lines: Sequence[str]
    after: Sequence[str]
    link: str = ""


def dag(boxes: Sequence[Box], label: str) -> str:
    """Jobs in columns, each after those it waits for."""
    column: dict[str, int] = {}
    for box in boxes:
        column[box.name] = max((column[name] + 1 for name in box.after if name in column), default=0)
    columns = [[box for box in boxes if column[box.name] == i] for i in range(max(column.values(), default=-1) + 1)]
    if not columns:
        return ""
    gap, tall = 18.0, 46.0
    wide = (WIDTH - 4 - gap * (len(columns) - 1)) / len(columns)
    height = max(map(len, columns)) * (tall + 8)
    place: dict[str, Point] = {}
    for across, inside in enumerate(columns):
        for down, box in enumerate(inside):
            free = height - len(inside) * (tall + 8)
            place[box.name] = (2 + across * (wide + gap), 4 + free / 2 + down * (tall + 8))
    body = []
    for box in boxes:
        x, y = place[box.name]
        for name in (name for name in box.after if name in place):
            x0, y0 = place[name]
            body.append(
                f'<path class="edge" d="M{_px(x0 + wide)} {_px(y0 + tall / 2)}L{_px(x - 1)} {_px(y + tall / 2)}"/>'
            )
    for box in boxes:
        x, y = place[box.name]
        words = "".join(
            text(x + 6, y + 15 + 12 * i, _fit(line, wide - 10), kind="" if i else "strong")
            for i, line in enumerate((box.name, *box.lines))
        )
        inner = (
            f'<g class="box {box.state}"><rect x="{_px(x)}" y="{_px(y)}" width="{_px(wide)}" height="{_px(tall)}"'
            f' rx="4"/>{words}<title>{escaped(": ".join((box.name, *box.lines)))}</title></g>'
        )
        body.append(f'<a href="#{escaped(box.link)}">{inner}</a>' if box.link else inner)
    return svg("".join(body), height, label, "dag")


def _fit(words: str, width: float, letter: float = 6.2) -> str:
    most = max(3, int(width / letter))
    return words if len(words) <= most else words[: most - 1] + "…"


@dataclass(frozen=True)
class Effect:
    """A difference with its interval, [low, high], against what is allowed (None: nothing is)."""

    name: str
    value: float
    low: float
    high: float
    bound: float | None
    outcome: str
    """fail, warn, skipped or pass."""
    text: str


SHAPES = {"fail": "M-4-4L4 4M-4 4L4-4", "warn": "M0-5L5 4H-5Z", "skipped": "M-4 0H4", "pass": "M0-4A4 4 0 1 1-.1-4Z"}


def forest(effects: Sequence[Effect], label: str) -> str:
    """A row an effect: its interval, a shape by outcome, and the bound; what does not fit ends in an arrow."""
    left, row = 330.0, 17.0
    ends = sorted(max(abs(one.low), abs(one.high)) for one in effects)
    if not ends:
        return ""
    reach = max(ends[min(len(ends) - 1, int(0.95 * len(ends)))], *(2 * abs(one.bound or 0.0) for one in effects), 1e-9)
    across, height = Scale(-reach, reach, left, WIDTH - RIGHT - 6), TOP + row * len(effects) + BOTTOM
    body = []
    for value in ticks(-reach, reach, 6):
        x = across(value)
        body.append(f'<path class="{"zero" if value == 0 else "grid"}" d="M{_px(x)} {TOP}V{_px(height - BOTTOM)}"/>')
        body.append(text(x, height - 8, f"{value:+g}" if value else "0", anchor="middle"))
    for number_, one in enumerate(effects):
        y = TOP + row * (number_ + 0.5)
        parts = [
            text(left - 8, y + 4, _fit(one.name, left - 12), anchor="end"),
            f'<path class="whisker" d="M{_px(across(one.low))} {_px(y)}H{_px(across(one.high))}"/>',
        ]
        if one.low < -reach:
            parts.append(f'<path class="arrow" d="M{_px(left)} {_px(y)}l6-4v8Z"/>')
        if one.high > reach:
            parts.append(f'<path class="arrow" d="M{_px(across(reach))} {_px(y)}l-6-4v8Z"/>')
        if one.bound is not None:
            parts.append(f'<path class="bound" d="M{_px(across(one.bound))} {_px(y - 7)}v14"/>')
        shape = SHAPES.get(one.outcome, SHAPES["skipped"])
        parts.append(
            f'<path class="dot {one.outcome}" transform="translate({_px(across(one.value))} {_px(y)})" d="{shape}"/>'
        )
        body.append(f"<g>{''.join(parts)}<title>{escaped(one.text)}</title></g>")
    return svg("".join(body), height, label, "forest")


def stacked_columns(
    groups: Sequence[tuple[str, Sequence[float]]], kinds: Sequence[str], label: str, *, x_name: str
) -> str:
    """Stacked columns: (name, one value for each kind)."""
    if not groups:
        return ""
    height = 150.0
    most = max(sum(values) for _, values in groups) or 1.0
    up, wide = Scale(0, most, height - BOTTOM, TOP), (WIDTH - LEFT - RIGHT) / len(groups)
    body = [*_levels(up, ticks(0, most, 3))]
    every = max(1, math.ceil(len(groups) * 62 / (WIDTH - LEFT)))
    for i, (name, values) in enumerate(groups):
        x, done = LEFT + i * wide, 0.0
        rects = []
        for kind, value in zip(kinds, values, strict=True):
            if value:
                y0, y1 = up(done + value), up(done)
                rects.append(
                    f'<rect class="{kind}" x="{_px(x + 0.5)}" y="{_px(y0)}" width="{_px(max(0.8, wide - 1))}"'
                    f' height="{_px(y1 - y0)}"/>'
                )
            done += value
        body.append(f"<g>{''.join(rects)}<title>{escaped(name)}: {escaped(number(done))}</title></g>")
        if i % every == 0:
            body.append(text(x + wide / 2, height - 8, _fit(name, every * wide), anchor="middle"))
    body.append(text(WIDTH - RIGHT, TOP + 4, x_name, anchor="end", kind="quiet"))
    return svg("".join(body), height, label, "columns")


def reliability(series: Sequence[tuple[str, Sequence[tuple[float, float, int]]]], label: str) -> str:
    """Share of right rows over confidence, with the diagonal: (kind, [(confidence, right, rows)])."""
    size, left = 230.0, 380.0
    across, up = Scale(0, 1, left, left + size), Scale(0, 1, TOP + size, TOP)
    body = []
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        body.append(f'<path class="grid" d="M{_px(left)} {_px(up(value))}h{_px(size)}"/>')
        body.append(text(left - 5, up(value) + 3.5, f"{value:g}", anchor="end"))
        body.append(text(across(value), TOP + size + 14, f"{value:g}", anchor="middle"))
    body.append(f'<path class="zero" d="M{_px(across(0))} {_px(up(0))}L{_px(across(1))} {_px(up(1))}"/>')
    most = max((rows for _, points in series for *_, rows in points), default=1) or 1
    for kind, points in reversed(series):
        for confidence, right, rows in points:
            radius = 2 + 7 * math.sqrt(rows / most)
            body.append(
                f'<circle class="point {kind}" cx="{_px(across(confidence))}" cy="{_px(up(right))}" r="{_px(radius)}">'
                f"<title>{number(rows)} rows: confidence {confidence:.3f}, right {right:.3f}</title></circle>"
            )
    body.append(text(across(0.5), TOP + size + 28, "mean confidence", anchor="middle", kind="quiet"))
    body.append(text(left - 34, up(0.5), "right", anchor="end", kind="quiet"))
    return svg("".join(body), size + 46, label, "reliability")


def heat(rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], heads: Sequence[str], label: str) -> str:
    """A matrix: (name, [(kind, text)]); a letter stands in cells of other kinds than pass."""
    left, cell = 160.0, 14.0
    wide = min(46.0, (WIDTH - left - RIGHT) / max(1, len(heads)))
    top = 74.0
    height = top + cell * len(rows) + 6
    body = [
        f'<text transform="translate({_px(left + wide * (i + 0.6))} {_px(top - 5)}) rotate(-45)">'
        f"{escaped(_fit(head, 90))}</text>"
        for i, head in enumerate(heads)
    ]
    for y, (name, cells) in enumerate(rows):
        down = top + cell * y
        body.append(text(left - 6, down + 10.5, _fit(name, left - 8), anchor="end"))
        body.append(
            f'<path class="v-pass" d="M{_px(left)} {_px(down + 0.5)}h{_px(wide * len(cells))}v13H{_px(left)}"/>'
        )
        for x, (kind, words) in enumerate(cells):
            if kind == "pass":
                continue
            at = f'x="{_px(left + wide * x)}" y="{_px(down + 0.5)}" width="{_px(wide)}" height="{_px(cell - 1)}"'
            letter = text(left + wide * (x + 0.5), down + 10.5, kind[:1].upper(), anchor="middle", kind="on")
            title = f"<title>{escaped(words)}</title>" if words else ""
            body.append(f'<g><rect class="v-{kind}" {at}/>{letter if kind != "none" else ""}{title}</g>')
    lines = "".join(f"M{_px(left + wide * i)} {_px(top)}V{_px(height - 6)}" for i in range(1, len(heads)))
    body.append(f'<path class="rule" d="{lines}"/>')
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
    known = [value for value, *_ in values if value is not None and math.isfinite(value)]
    if not known:
        return ""
    spans = [
        (i, low, high)
        for i, (low, high) in enumerate(intervals)
        if low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    ]
    known += [end for _, *ends in spans for end in ends]
    across, up = Scale(0, max(1, len(values) - 1), 5, wide - 5), Scale(min(known), max(known), tall - 5, 5)
    points = [(across(i), up(v)) for i, (v, *_) in enumerate(values) if v is not None and math.isfinite(v)]
    body = [f'<path class="whisker" d="M{_px(across(i))} {_px(up(low))}V{_px(up(high))}"/>' for i, low, high in spans]
    body.append(f'<path class="line now" transform="scale(.1)" d="{_path(points)}"/>')
    for i, (value, counts, words) in enumerate(values):
        if value is not None and math.isfinite(value):
            body.append(
                f'<circle class="{"point now" if counts else "hollow"}" cx="{_px(across(i))}" cy="{_px(up(value))}"'
                f' r="2.5"><title>{escaped(words)}</title></circle>'
            )
    frame = f'<svg class="spark" viewBox="0 0 {_px(wide)} {_px(tall)}" role="img" tabindex="0"'
    return f'{frame} aria-label="{escaped(label)}">{"".join(body)}</svg>'


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), *, raw: Iterable[int] = ()
) -> str:
    """Text cells, escaped; `numbers`: columns set to the right; `raw`: columns that hold markup made here."""
    right, made = set(numbers), set(raw)
    lines = (
        ["".join(f"<th{_n(i in right)} scope=col>{escaped(word)}</th>" for i, word in enumerate(head))] if head else []
    )
    first = f"<thead><tr>{lines[0]}</tr></thead>" if head else ""
    body = [
        "".join(f"<td{_n(i in right)}>{word if i in made else escaped(word)}</td>" for i, word in enumerate(row))
        for row in rows
    ]
    filled = "".join(f"<tr>{line}</tr>" for line in body)
    return f'<div class="wide" tabindex="0"><table>{first}<tbody>{filled}</tbody></table></div>'


def numbers_of(series: Sequence[Series], x_name: str, most: int = 12) -> Iterator[Sequence[str]]:
    """At most `most` rows of (place, a value of each series), for the table under a chart."""
    first = series[0].points
    step = max(1, math.ceil(len(first) / most))
    others = [dict(one.points) for one in series[1:]]
    for x, y in first[::step]:
        yield (number(x), number(y), *(number(found.get(x)) for found in others))


def _n(right: bool) -> str:
    return " class=n" if right else ""


def _px(value: float) -> str:
    return f"{round(value, 1):g}"
