"""The report of a cycle: one HTML page, without scripts and with nothing from elsewhere, every text escaped."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from jobs.config import JobsConfig
from jobs.cycle.attempt_time import SPENT, Category, Moment
from jobs.cycle.ledger import CycleLedger, Entry, read_ledger, read_moments
from jobs.cycle.records import Closed, JobRecord
from jobs.cycle.show import DEADLINES, GOODPUT, STATUS, money, status_rows, time_text, total_row
from jobs.cycle.store import CycleStore
from jobs.plan.dag import Plan
from pipeline.context import Figure, load_result
from pipeline.core.errors import DataError
from pipeline.core.format import format_duration, format_share, usd
from pipeline.evaluate.report import EvaluationReport, load_report, table_lines
from pipeline.telemetry.events import EventName

STAGES = ("prepare", "health", "compile", "mine", "train", "evaluate", "embed")


@dataclass(frozen=True)
class CycleReport:
    ledger: CycleLedger
    records: tuple[JobRecord, ...]
    evaluation: EvaluationReport | None
    figures: Mapping[str, Mapping[str, Figure]]
    """By stage, of those that have finished."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss) of the steps that were kept."""
    post_mortems: tuple[str, ...]
    """URIs."""
    workspace: str
    reason: str = ""
    """Why the cycle ended as it did, in one line."""
    unread: tuple[str, ...] = ()
    """What could not be read, and why."""


def report_key(cycle: str) -> str:
    return f"reports/{cycle}.html"


def gather(store: CycleStore, ledger: CycleLedger, records: Sequence[JobRecord], *, reason: str = "") -> CycleReport:
    """Read what the stages have left. A result that is damaged is told of, and does not hide the others."""
    storage, cycle, unread = store.storage, store.cycle, list[str]()
    evaluation, figures = None, dict[str, Mapping[str, Figure]]()
    try:
        evaluation = load_report(storage, cycle)
    except DataError as error:
        unread.append(error.seen)
    for stage in STAGES:
        try:
            if (result := load_result(storage, cycle, stage)) is not None:
                figures[stage] = result.figures
        except DataError as error:
            unread.append(error.seen)
    return CycleReport(
        ledger=ledger,
        records=tuple(records),
        evaluation=evaluation,
        figures=figures,
        losses=losses_of(read_moments(storage, cycle)),
        post_mortems=tuple(storage.uri(stat.key) for stat in storage.list(store.key("post-mortem"))),
        workspace=storage.root,
        reason=reason,
        unread=tuple(unread),
    )


def losses_of(moments: Sequence[Moment]) -> tuple[tuple[int, float], ...]:
    """(step, mean loss) of each report of steps; what was done again replaces what it repeats."""
    kept: list[tuple[int, float]] = []
    for moment in sorted(moments, key=lambda one: one.at_ms):
        if moment.name == EventName.TRAIN_STARTED:
            kept = [point for point in kept if point[0] <= moment.number("step")]
        losses = moment.fields.get("losses")
        if moment.name == EventName.TRAIN_STEPS and isinstance(losses, list):
            numbers = [float(loss) for loss in losses if isinstance(loss, int | float)]
            if numbers:
                kept.append((int(moment.number("step")), sum(numbers) / len(numbers)))
    return tuple(kept)


COLOURS = {
    Category.START_UP: "#9aa5b1",
    Category.COMPILE: "#b08fc7",
    Category.DATA_WAIT: "#e5b25d",
    Category.PRODUCTIVE: "#4c9f70",
    Category.CHECKPOINT: "#5b8fd9",
    Category.EVALUATION: "#56b7b2",
    Category.WASTED: "#cf5c4a",
}
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #1f2933 }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #e4e7eb; vertical-align: top }
td.n, th.n { text-align: right } pre { background: #f5f7fa; padding: 1em; overflow-x: auto }
.bar { display: flex; height: 14px; width: 100%; min-width: 240px; background: #f5f7fa }
.key span { display: inline-block; width: 10px; height: 10px; margin: 0 .3em 0 1em }
.FAILED, .failed, .missed { color: #b3261e; font-weight: 600 } .SUCCEEDED, .succeeded, .met { color: #2e7d4f }
svg { background: #f5f7fa } .quiet { color: #616e7c }
"""
CHART_W, CHART_H = 900, 220


def page(report: CycleReport) -> str:
    ledger = report.ledger
    outcome = "under way" if ledger.outcome == "open" else ledger.outcome
    parts = [
        f"<h1>Cycle {escape(ledger.cycle)}: <span class={ledger.outcome}>{outcome}</span></h1>",
        f'<p class="quiet">{escape(report.workspace)}</p>',
        _facts(ledger, report.reason),
    ]
    sections = {  # one with nothing to show is left out
        "Jobs": _table(STATUS, status_rows(report.records), numbers={2, 3, 4}),
        "Time and money": _time(ledger),
        "Verdict": _verdict(report.evaluation) if report.evaluation else "",
        "Training": _chart(report.losses),
        "Figures": "".join(_figures(stage, values) for stage, values in report.figures.items() if values),
        "Tries": _tries(ledger.entries),
        "Post-mortems": _list(report.post_mortems),
        "Could not be read": _list(report.unread),
    }
    parts += (f"<h2>{title}</h2>{body}" for title, body in sections.items() if body)
    head = f'<meta charset="utf-8"><title>Cycle {escape(ledger.cycle)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _facts(ledger: CycleLedger, reason: str) -> str:
    took = None if ledger.began_at is None or ledger.ended_at is None else ledger.ended_at - ledger.began_at
    due = ledger.deadline_at
    rows = [
        *([("why", reason)] if reason else []),
        ("submitted", _stamp(ledger.began_at)),
        ("took", format_duration(took)),
        ("deadline", DEADLINES[ledger.deadline] + (f" ({_stamp(due)})" if due else "") or "none"),
        ("jobs", f"{ledger.succeeded} of {ledger.jobs} succeeded, {len(ledger.entries)} tries"),
        ("goodput", format_share(ledger.total.goodput)),
        ("cost", money(ledger.total)),
    ]
    return _table([], rows) + f'<p class="quiet">{escape(GOODPUT)}</p>'


def _time(ledger: CycleLedger) -> str:
    if not ledger.entries:
        return ""
    keys = "".join(f'<span style="background:{COLOURS[kind]}"></span>{escape(kind)}' for kind in SPENT)
    words = ("stage", "", "tries", "waiting", "time", "goodput", "cost")
    rows = ["".join(f"<th{_n(i > 1)}>{escape(word)}</th>" for i, word in enumerate(words))]
    for one in (*ledger.stages(), ledger.total):
        name, tries, waiting, *_, time, goodput, cost = total_row(one)
        numbers = "".join(f'<td class="n">{escape(cell)}</td>' for cell in (tries, waiting, time, goodput, cost))
        bar = "".join(
            f'<div title="{escape(kind)}: {format_duration(ms / 1000)}" '
            f'style="width:{100 * ms / one.all_ms:.2f}%;background:{COLOURS[kind]}"></div>'
            for kind, ms in one.machine_ms.items()
            if ms
        )
        rows.append(f'<td>{escape(name)}</td><td style="width:45%"><div class="bar">{bar}</div></td>{numbers}')
    return f'<p class="key">{keys}</p><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table>'


def _verdict(evaluation: EvaluationReport) -> str:
    lines = "\n".join(table_lines(evaluation))
    return f"<pre>{escape(lines)}</pre>{_list(evaluation.warnings)}"


def _figures(stage: str, figures: Mapping[str, Figure]) -> str:
    rows = []
    for name, value in figures.items():
        text = str(value)
        if isinstance(value, bool) or value is None:
            text = {True: "yes", False: "no", None: "-"}[value]
        elif isinstance(value, int | float):
            text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
        rows.append((name, text))
    return f"<h3>{escape(stage)}</h3>{_table([], rows, numbers={1})}"


def _tries(entries: Sequence[Entry]) -> str:
    head = ("job", "try", "started", "nodes", "waited", *SPENT, "cost", "ended")
    rows = [
        (
            entry.job,
            str(entry.attempt),
            _stamp(entry.start_ms / 1000),
            str(entry.nodes),
            format_duration(entry.waiting_ms / 1000),
            *(time_text(entry.spent_ms[kind]) for kind in SPENT),
            usd(entry.usd),
            entry.ending,
        )
        for entry in entries
    ]
    return _table(head, rows, numbers={1, *range(3, len(head) - 1)}) if rows else ""


def _chart(losses: Sequence[tuple[int, float]]) -> str:
    if len(losses) < 2:
        return ""
    steps, values = [step for step, _ in losses], [loss for _, loss in losses]
    low, high = min(values), max(values)
    width, height = max(1, steps[-1] - steps[0]), (high - low) or 1.0
    points = " ".join(
        f"{10 + (CHART_W - 20) * (step - steps[0]) / width:.1f},{10 + (CHART_H - 20) * (high - loss) / height:.1f}"
        for step, loss in losses
    )
    line = f'<polyline points="{points}" fill="none" stroke="{COLOURS[Category.PRODUCTIVE]}" stroke-width="2"/>'
    caption = f"loss {values[0]:.4f} at step {steps[0]:,} to {values[-1]:.4f} at step {steps[-1]:,}, lowest {low:.4f}"
    return (
        f'<svg viewBox="0 0 {CHART_W} {CHART_H}" width="100%" role="img" aria-label="{caption}">{line}</svg>'
        f'<p class="quiet">{caption}</p>'
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    lines = ["".join(f"<th{_n(i in numbers)}>{escape(word)}</th>" for i, word in enumerate(head))] if head else []
    for row in rows:
        line = ""
        for i, word in enumerate(row):
            state = word.partition(" ")[0]  # states of jobs have a colour
            colour = f' class="{state}"' if state in ("FAILED", "SUCCEEDED") else ""
            line += f"<td{_n(i in numbers)}{colour}>{escape(word)}</td>"
        lines.append(line)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _n(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _stamp(seconds: float | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# The page of a cycle, made of what its workspace holds and put there.


def write_page(
    store: CycleStore, plan: Plan, records: Sequence[JobRecord], config: JobsConfig, closed: Closed | None
) -> CycleReport:
    """Write reports/<cycle>.html, over an earlier one; what it shows. `closed`: the end, on record or not yet.

    Of a cycle that has ended it is the same, byte for byte, whenever and by whomever it is made.
    """
    ledger = read_ledger(store, plan, records, config, closed=closed, without_report=True)
    report = gather(store, ledger, records, reason=closed.reason if closed else "")
    store.storage.write_bytes(report_key(store.cycle), page(report).encode())
    return report
