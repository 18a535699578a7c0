"""The sections of the page, in the order of a reader's questions. Each is empty when it has nothing to say.

Pure: markup from data. Every text of a job or a judgement is escaped where it is set.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from statistics import median

from jobs.cycle.attempt_time import SPENT, Category
from jobs.cycle.cost_ledger import Entry
from jobs.cycle.page.charts import KINDS, bar, dag, escaped, gantt, heat, number, spark, table
from jobs.cycle.page.data import MEDIAN_OF, WITHOUT, CycleRow, PageData, main_metric
from jobs.cycle.tables import DEADLINES, GOODPUT, NO_LOG, money, time_text
from pipeline.core.format import format_duration, format_share, usd
from pipeline.evaluate.report import EvaluationReport

MAX_LANES = 60
MAX_TRIES = 100
MAX_NODES = 160
MAX_ROWS = 40
"""Of any other table; what is left out is counted below it, and is in the JSON."""


def outcome_sentence(data: PageData) -> str:
    """How the cycle ended, in one line."""
    outcome, evaluated = data.outcome, data.figures.get("evaluate", {})
    failed = ", ".join(job.name for job in data.jobs if job.ending == "failed")
    if outcome == "open":
        running = ", ".join(job.name for job in data.jobs if job.state in ("STARTING", "RUNNING"))
        return f"Under way: {running} running." if running else "Under way."
    if outcome == "refused":
        checks = data.evaluation.verdict.checks if data.evaluation else ()
        reasons = [check.reason for check in checks if check.outcome == "fail"]
        why = "; ".join(reasons[:2]) + (f"; and {len(reasons) - 2} more" if len(reasons) > 2 else "")
        return f"Refused: {why or data.reason or 'the gate says why'}. Production stays as it is."
    if outcome == "failed":
        return f"Failed{f' in {failed}' if failed else ''}: {data.reason or 'no reason is on record'}."
    if outcome == "cancelled":
        return f"Cancelled: {data.reason or 'no reason was given'}."
    if data.promoted:
        how = (" by force" if evaluated.get("forced") else "") + (WITHOUT if data.without_comparison else "")
        return f"Promoted{how}: {_change(data.evaluation) or 'a new model is in production'}."
    if evaluated.get("nothing_new"):
        return "Nothing new: there was nothing to learn from, and the model in production stays."
    return "Passed, and not promoted." if "promoted" in evaluated else "Succeeded."


def _change(report: EvaluationReport | None) -> str:
    """`retrieval_ndcg@10 0.7662 (0.7571 in production before)`."""
    if report is None:
        return ""
    check = next((one for one in report.verdict.checks if one.kind == "delta" and one.candidate is not None), None)
    if check is not None:
        return f"{check.metric} {number(check.candidate)}, before {number(check.incumbent)}"
    name, value, *_ = main_metric(report)
    return f"the first model, {name} {number(value)}" if name else ""


def banner(data: PageData) -> str:
    ledger, total = data.ledger, data.ledger.total
    days = [one.watermark for one in data.prepared.partitions if one.watermark] if data.prepared else []
    generation = data.figures.get("evaluate", {}).get("generation")
    due = f" ({stamp(ledger.deadline_at)})" if ledger.deadline_at else ""
    chips = {
        "model": data.model,
        "generation": str(generation) if generation else "",
        "data until": max(days, default=""),
        "submitted": stamp(ledger.began_at) if ledger.began_at else "",
        "took": format_duration(ledger.took_s),
        "cost": money(total),
        "goodput": format_share(total.goodput),
        "deadline": DEADLINES[ledger.deadline].removeprefix("deadline ") + due,
        "jobs": f"{ledger.succeeded} of {ledger.jobs} succeeded, {len(ledger.entries)} tries",
    }
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escaped(value)}</dd></div>" for name, value in chips.items() if value.strip(" -")
    )
    outcome = "under way" if data.outcome == "open" else data.outcome
    return (
        f'<h1>Cycle {escaped(data.cycle)}: <span class="{data.outcome}">{outcome}</span></h1>'
        f'<p class="sentence">{escaped(outcome_sentence(data))}</p>{_errors(data)}<dl class="chips">{items}</dl>'
        f'<p class="quiet">{escaped(data.workspace)}</p>'
    )


def _errors(data: PageData) -> str:
    """What the logs of failed jobs say, each with the command that shows the whole of it."""
    return "".join(
        f"<figure><pre>{escaped_lines(job.error or NO_LOG)}</pre><figcaption>{escaped(job.name)}:"
        f" <code>{escaped(job.logs)}</code></figcaption></figure>"
        for job in data.jobs
        if job.logs
    )


def escaped_lines(text: str) -> str:
    """A text of several lines as markup."""
    return "\n".join(map(escaped, text.splitlines()))


def jobs_section(data: PageData) -> str:
    children = {job.name: f" ({job.children} children)" if job.children else "" for job in data.jobs}
    rows = [(job.name, job.ending + children[job.name], str(job.nodes), *job.cells) for job in data.jobs]
    head = ("job", "state", "nodes", "tries", "ran", "exit", "why")
    return dag(data.jobs) + _tries(data) + table(head, rows, {2, 3, 4, 5})


def _tries(data: PageData) -> str:
    """Every try over time: a lane for each job and each child of an array."""
    ledger = data.ledger
    if not ledger.entries or ledger.began_at is None:
        return ""
    lanes: dict[str, list[Entry]] = {}
    for entry in ledger.entries:
        lanes.setdefault(entry.job, []).append(entry)
    with_failures = {name for name, tries in lanes.items() if any(one.has_failed for one in tries)}
    first = sorted(lanes, key=lambda name: (name not in with_failures and ":" in name, list(lanes).index(name)))
    shown = {name: tries for name, tries in lanes.items() if name in set(first[:MAX_LANES])}
    known = {re.sub(r"-[0-9]+-node[0-9]+(-round-[0-9]+)?$", "", one.job) for one in data.post_mortems}
    began_ms = round(1000 * ledger.began_at)
    end_s = (max(one.start_ms + one.length_ms for one in ledger.entries) - began_ms) / 1000
    due_s = None if ledger.deadline_at is None else ledger.deadline_at - ledger.began_at
    chart = gantt(shown, began_ms, end_s, due_s, {name for name in shown if name.replace(":", "-") in known})
    return figure(chart, _key(), left_out(len(lanes) - len(shown), "children that succeeded"))


def _key() -> str:
    marks = (*((KINDS[kind], kind.value) for kind in SPENT), ("waiting", Category.WAITING.value))
    spans = "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in marks)
    return f'<span class="key">{spans}</span>'


def cost_section(data: PageData) -> str:
    if not data.ledger.entries:
        return ""
    totals = (*data.ledger.stages(), data.ledger.total)
    usual = [row for row in data.history[-MEDIAN_OF:] if row.outcome != "cancelled"]
    whole = max(one.all_ms for one in totals[:-1]) or 1
    rows = []
    for one in totals:
        last = one is totals[-1]
        parts = [
            (KINDS[kind], ms, f"{kind}: {format_duration(ms / 1000)}") for kind, ms in one.machine_ms.items() if ms
        ]
        rows.append(
            (
                one.name,
                bar(parts, one.all_ms if last else whole),
                str(one.tries),
                format_duration(one.waiting_ms / 1000),
                format_duration(one.all_ms / 1000),
                format_duration(_median(row.machine_s if last else row.stage_s.get(one.name) for row in usual)),
                format_share(one.goodput),
                usd(one.usd),
                usd(_median(row.usd if last else row.stage_usd.get(one.name) for row in usual)),
            )
        )
    times = ("tries", "waiting", "time", "median", "goodput", "cost", "median")
    head = ("stage", "machine time by what it went into", *times)
    wasted = [
        (
            entry.job,
            entry.try_name,
            time_text(entry.nodes * entry.spent_ms[Category.WASTED]),
            usd(None if entry.usd is None else entry.usd * entry.spent_ms[Category.WASTED] / entry.length_ms),
            entry.ending,
        )
        for entry in data.ledger.entries
        if entry.spent_ms[Category.WASTED]
    ]
    lost = ""
    if wasted:
        columns = ("job", "try", "machine time", "cost", "ended")
        lost = "<h3>Wasted by failures</h3>" + rows_of(columns, wasted, {1, 2, 3}, "tries")
    note = f"median: of the last {min(MEDIAN_OF, len(data.history))} cycles before. " if data.history else ""
    return figure(table(head, rows, range(2, 9), raw={1}), f"{_key()} {note}{escaped(GOODPUT)}") + lost


def _median(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def machines_section(data: PageData) -> str:
    nodes = data.machines
    if not nodes:
        return ""
    names = list(dict.fromkeys(result.name for node in nodes for result in node.results))
    worst = sorted(nodes, key=lambda node: (-node.verdict, node.node_rank))[:MAX_NODES]
    kept = {id(node) for node in worst}
    rows, bad, values = [], [], dict[tuple[str, str], list[float]]()
    for node in nodes:
        cells = dict.fromkeys(names, ("none", ""))
        for result in node.results:
            verdict = result.verdict.text
            cells[result.name] = (verdict, "" if verdict == "pass" else result.seen)
            if verdict != "pass":
                bad.append((str(node.node_rank), node.host, result.name, verdict, result.seen, result.expected))
            for name, value in (("seconds", result.seconds), *result.figures.items()):
                if isinstance(value, int | float):
                    values.setdefault((result.name, name.replace("_", " ")), []).append(float(value))
        if id(node) in kept:
            rows.append((f"{node.node_rank} {node.host}", list(cells.values())))
    label = f"{len(nodes)} nodes by {len(names)} checks, {len(bad)} of them not passed"
    meaning = f"{escaped(label)}; W: a warning, R: try another machine, F: to be mended first"
    parts = [figure(heat(rows, names, label), meaning), left_out(len(nodes) - len(rows), "nodes that passed")]
    if bad:
        parts.append(rows_of(("node", "host", "check", "verdict", "seen", "expected"), bad, {0}, "findings"))
    measured = [(*names, *map(number, (min(found), median(found), max(found)))) for names, found in values.items()]
    head = ("check", "figure", "lowest", "median", "highest")
    parts.append(details("Figures over all nodes", table(head, measured[:MAX_TRIES], {2, 3, 4})) if measured else "")
    return "".join(parts)


def lineage_section(data: PageData) -> str:
    found = data.lineage
    if not (found.checkpoint or found.settings_hash):
        return ""
    chain = [one for one in (found.checkpoint, *found.ancestors, found.began_from) if one]
    rows = [
        ("model", " ← ".join(dict.fromkeys(chain)) or "-"),
        ("settings", found.settings_hash),
        ("code", found.code_version),
        ("data", f"{len(data.prepared.partitions)} partitions" if data.prepared else "-"),
    ]
    parts = [table((), rows)]
    if found.compared:
        parts.append(f"<h3>Settings that differ from cycle {escaped(found.compared)}</h3>")
        changed = [(name, before[:200], now[:200]) for name, before, now in found.changed]
        parts.append(rows_of(("setting", "there", "here"), changed, (), "settings") if changed else "<p>None.</p>")
    return "".join(parts)


def trend_section(data: PageData, own: CycleRow) -> str:
    rows = (*data.history, own)
    if len(rows) < 2:
        return ""
    kinds: list[tuple[str, Callable[[CycleRow], float | None], Callable[[float | None], str]]] = [
        (own.metric or "metric", lambda row: row.value_of(own.metric), number),
        ("cost", lambda row: row.usd, usd),
        ("took", lambda row: row.took_s, format_duration),
        ("goodput", lambda row: row.goodput, format_share),
        ("rows", lambda row: row.rows, number),
        ("mean cosine to the vectors before", lambda row: row.drift, number),
    ]
    lines = []
    for name, value, words in kinds:
        points = [
            (value(row), row.promoted or not row.metric, f"{row.cycle}, {row.outcome}: {words(value(row))}")
            for row in rows
        ]
        known = [point for point, *_ in points if point is not None]
        if known:
            of_metric = [(row.low, row.high) if row.metric == own.metric else (None, None) for row in rows]
            spans = of_metric if name == own.metric else ()
            drawn = spark(points, f"{name} over {len(rows)} cycles, last {words(known[-1])}", spans)
            lines.append((name, drawn, words(min(known)), words(median(known)), words(max(known)), words(value(own))))
    head = ("figure", f"the last {len(rows)} cycles", "lowest", "median", "highest", "this cycle")
    note = (
        '<p class="quiet">Hollow: a cycle whose model was not promoted. Whiskers: the interval of the difference to the'
        " model in production then.</p>"
    )
    return table(head, lines, range(2, 6), raw={1}) + note if lines else ""


def details_section(data: PageData) -> str:
    parts = []
    for stage, figures in data.figures.items():
        if figures:
            named = [(name, value_text(value)) for name, value in figures.items()]
            parts.append(details(f"Figures of {stage}", table((), named, {1})))
    entries = data.ledger.entries
    if entries:
        head = ("job", "try", "started", "nodes", "waited", *SPENT, "cost", "ended")
        rows = [
            (
                entry.job,
                entry.try_name,
                stamp(entry.start_ms / 1000),
                str(entry.nodes),
                format_duration(entry.waiting_ms / 1000),
                *(time_text(entry.spent_ms[kind]) for kind in SPENT),
                usd(entry.usd),
                entry.ending,
            )
            for entry in sorted(entries, key=lambda one: not one.has_failed)
        ]
        parts.append(details("Tries", rows_of(head, rows, {1, *range(3, len(head) - 1)}, "tries", MAX_TRIES)))
    if data.notices:
        newest = [
            (stamp(one.at), one.event, "-" if one.step is None else f"{one.step:,}", one.text)
            for one in data.notices[-MAX_ROWS:]
        ]
        told = table(("when", "event", "step", "what"), newest, {2})
        told += left_out(len(data.notices) - MAX_ROWS, "earlier events")
        parts.append(details("Warnings and failures", told))
    if data.post_mortems:
        lines = items([one.uri for one in data.post_mortems[:MAX_ROWS]])
        more = left_out(len(data.post_mortems) - MAX_ROWS, "post-mortems")
        shown = details("Post-mortems of failed tries", lines + more, is_open=True)
        parts.append(f'<div id="post-mortems">{shown}</div>')
    if data.unread:
        parts.append("<h3>Could not be read</h3>" + items(data.unread[:MAX_ROWS]))
    return "".join(parts)


def value_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return number(value) if isinstance(value, int | float) else str(value)


def figure(chart: str, caption: str, more: str = "") -> str:
    """`caption`, `more`: markup."""
    return f"<figure>{chart}<figcaption>{caption}</figcaption>{more}</figure>" if chart else more


def details(title: str, body: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escaped(title)}</summary>{body}</details>"


def items(lines: Iterable[str]) -> str:
    found = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<ul>{found}</ul>" if found else ""


def rows_of(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int], what: str, most: int = MAX_ROWS
) -> str:
    """A table of the first `most`, and how many more `what` there are."""
    return table(head, rows[:most], numbers) + left_out(len(rows) - most, what)


def left_out(count: int, what: str) -> str:
    return f'<p class="quiet">And {count:,} {what}, in the JSON beside this page.</p>' if count > 0 else ""


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
