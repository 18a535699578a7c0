"""The sections of the page, in the order of a reader's questions. Each is empty when it has nothing to say.

Pure: markup from data. Every text of a job or a judgement is escaped where it is set.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from statistics import median

from jobs.cycle.attempt_time import SPENT, Category
from jobs.cycle.cost_ledger import Entry
from jobs.cycle.page.charts import (
    Bar,
    Box,
    Lane,
    Part,
    bar,
    dag,
    escaped,
    gantt,
    heat,
    number,
    spark,
    stacked_columns,
    table,
)
from jobs.cycle.page.data import MEDIAN_OF, CycleRow, Job, PageData, main_metric, median_of
from jobs.cycle.tables import DEADLINES, GOODPUT, money, time_text
from pipeline.core.errors import GateRefused
from pipeline.core.format import format_duration, format_share, usd
from pipeline.data.digest import PartitionDigest
from pipeline.evaluate.report import EvaluationReport

MAX_LANES = 60
MAX_EFFECTS = 40
MAX_TRIES = 100
MAX_NODES = 160
MAX_PARTITIONS = 60
MAX_ROWS = 40
"""Of any other table; what is left out is counted below it, and is in the JSON."""
Reader = Callable[[CycleRow], float | None]
Writer = Callable[[float | None], str]


def sentence(data: PageData) -> str:
    """How the cycle ended, in one line."""
    outcome, evaluated = data.outcome, data.figures.get("evaluate", {})
    failed = ", ".join(job.name for job in data.jobs if _state(job) == "failed")
    if outcome == "open":
        running = ", ".join(job.name for job in data.jobs if job.state in ("STARTING", "RUNNING"))
        return f"Under way: {running} running." if running else "Under way."
    if outcome == "refused":
        return f"Refused: {_reasons(data.evaluation) or data.reason or 'the gate says why'}. Production stays as it is."
    if outcome == "failed":
        return f"Failed{f' in {failed}' if failed else ''}: {data.reason or 'no reason is on record'}."
    if outcome == "cancelled":
        return f"Cancelled: {data.reason or 'no reason was given'}."
    if data.promoted:
        forced = " by force" if evaluated.get("forced") else ""
        return f"Promoted{forced}: {_change(data.evaluation) or 'a new model is in production'}."
    if evaluated.get("nothing_new"):
        return "Nothing new: there was nothing to learn from, and the model in production stays."
    return "Passed, and not promoted." if "promoted" in evaluated else "Succeeded."


def _reasons(report: EvaluationReport | None) -> str:
    failed = [check.reason for check in report.verdict.checks if check.outcome == "fail"] if report else []
    more = f"; and {len(failed) - 2} more" if len(failed) > 2 else ""
    return "; ".join(failed[:2]) + more


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
        f'<p class="sentence">{escaped(sentence(data))}</p><dl class="chips">{items}</dl>'
        f'<p class="quiet">{escaped(data.workspace)}</p>'
    )


def happened(data: PageData) -> str:
    boxes = [
        Box(
            name=job.name,
            state={"succeeded": "good", "failed": "bad", "refused": "bad"}.get(_state(job), ""),
            lines=(
                _state(job) + (f", exit {job.exit_code}" if job.exit_code else ""),
                f"{_times(job.tries)}, {format_duration(job.ran_s)}",
            ),
            after=job.after,
        )
        for job in data.jobs
    ]
    states = ", ".join(f"{job.name} {_state(job)} after {_times(job.tries)}" for job in data.jobs)
    rows = [
        (
            job.name,
            _state(job) + (f" ({job.children} children)" if job.children else ""),
            str(job.nodes),
            str(job.tries),
            format_duration(job.ran_s),
            "-" if job.exit_code is None else str(job.exit_code),
            job.why,
        )
        for job in data.jobs
    ]
    head = ("job", "state", "nodes", "tries", "ran", "exit", "why")
    parts = [dag(boxes, f"Jobs in the order they wait for each other: {states}"), _gantt(data)]
    parts.append(table(head, rows, {2, 3, 4, 5}))
    return "".join(parts)


def _state(job: Job) -> str:
    """As on record; a job that was left out because of another one has not failed itself."""
    if job.state == "FAILED":
        return "not run" if not job.tries else "refused" if job.exit_code == GateRefused.exit_code else "failed"
    return job.state.lower()


def _times(count: int) -> str:
    return "1 try" if count == 1 else f"{count} tries"


def _gantt(data: PageData) -> str:
    ledger = data.ledger
    if not ledger.entries or ledger.began_at is None:
        return ""
    began_ms = round(1000 * ledger.began_at)
    lanes: dict[str, list[Entry]] = {}
    for entry in ledger.entries:
        lanes.setdefault(entry.job, []).append(entry)
    with_failures = {name for name, tries in lanes.items() if any(_failed(one) for one in tries)}
    first = sorted(lanes, key=lambda name: (name not in with_failures and ":" in name, list(lanes).index(name)))
    shown = [name for name in lanes if name in set(first[:MAX_LANES])]
    known = {re.sub(r"-[0-9]+-node[0-9]+(-round-[0-9]+)?$", "", one.job) for one in data.post_mortems}

    def drawn(entry: Entry) -> Bar:
        spent = [Part(_kind(kind), ms / 1000, "") for kind, ms in entry.spent_ms.items() if ms]
        words = ", ".join(f"{kind} {format_duration(ms / 1000)}" for kind, ms in entry.spent_ms.items() if ms)
        failed = _failed(entry)
        has_more = failed and entry.job.replace(":", "-") in known
        return Bar(
            start=(entry.start_ms - began_ms) / 1000,
            waited=entry.waiting_ms / 1000,
            parts=spent,
            text=f"{entry.job}, try {entry.try_name}: {entry.ending}; {words}",
            failed=failed,
            link="post-mortems" if has_more else "",
        )

    end = max(one.start_ms + one.length_ms for one in ledger.entries) - began_ms
    due = None if ledger.deadline_at is None else ledger.deadline_at - ledger.began_at
    chart = gantt(
        [Lane(name, [drawn(one) for one in lanes[name]]) for name in shown],
        end / 1000,
        due,
        f"Every try over {format_duration(end / 1000)} since the cycle was submitted",
    )
    return figure(chart, _key(), left_out(len(lanes) - len(shown), "children that succeeded"))


def _failed(entry: Entry) -> bool:
    return entry.ending not in ("succeeded", "running")


def _kind(category: Category) -> str:
    return f"s-{category.value.replace(' ', '-')}"


def _key() -> str:
    kinds = ((_kind(kind), kind.value) for kind in SPENT)
    marks = (*kinds, ("waiting", Category.WAITING.value))
    return (
        '<span class="key">' + "".join(f'<span><i class="{kind}"></i>{name}</span>' for kind, name in marks) + "</span>"
    )


def cost(data: PageData) -> str:
    if not data.ledger.entries:
        return ""
    totals, history = (*data.ledger.stages(), data.ledger.total), data.history
    whole = max(one.all_ms for one in totals[:-1]) or 1
    rows = []
    for one in totals:
        last = one is totals[-1]
        parts = [
            Part(_kind(kind), ms, f"{kind}: {format_duration(ms / 1000)}") for kind, ms in one.machine_ms.items() if ms
        ]
        usual_s = median_of(history, (lambda row: row.machine_s) if last else _stage_s(one.name))
        usual = median_of(history, (lambda row: row.usd) if last else _stage_usd(one.name))
        rows.append(
            (
                one.name,
                bar(parts, one.all_ms if last else whole),
                str(one.tries),
                format_duration(one.waiting_ms / 1000),
                format_duration(one.all_ms / 1000),
                format_duration(usual_s),
                format_share(one.goodput),
                usd(one.usd),
                usd(usual),
            )
        )
    head = (
        "stage",
        "machine time by what it went into",
        "tries",
        "waiting",
        "time",
        "median",
        "goodput",
        "cost",
        "median",
    )
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
    note = f"median: of the last {min(MEDIAN_OF, len(history))} cycles before. " if history else ""
    return figure(table(head, rows, range(2, 9), raw={1}), f"{_key()} {note}{escaped(GOODPUT)}") + lost


def _stage_s(name: str) -> Reader:
    return lambda row: row.stage_s.get(name)


def _stage_usd(name: str) -> Reader:
    return lambda row: row.stage_usd.get(name)


def prepared(data: PageData) -> str:
    found = data.prepared
    if found is None:
        return ""
    shown = found.partitions[-MAX_PARTITIONS:]
    labelled = all(one.labels for one in shown)
    kinds = [f"l{i % 8}" for i in range(len(found.labels))] if labelled else ["now"]
    groups: list[tuple[str, Sequence[float]]] = []
    for one in shown:
        by_label = [sum(counts) for counts in zip(*one.labels.values(), strict=True)]
        groups.append((one.watermark or one.partition, by_label if labelled else [sum(one.rows.values())]))
    chart = stacked_columns(groups, kinds, "Rows by day and label", x_name="rows")
    head = ("partition", "train", "valid", "test", *found.labels, "bad", "filtered", "truncated")
    rows = [
        (
            one.partition,
            *(number(one.rows.get(split, 0)) for split in ("train", "valid", "test")),
            *(number(sum(counts)) for counts in zip(*one.labels.values(), strict=True)),
            number(one.bad),
            number(one.filtered),
            number(one.truncated),
        )
        for one in shown
        if labelled
    ]
    legend = f'<span class="key">{labels_text(found.labels)}</span>' if labelled else ""
    parts = [figure(chart, legend, details("Numbers", table(head, rows, range(1, len(head)))) if rows else "")]
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
        parts.append(
            "<h3>Features</h3>" + table(("category", "rows without a value", "newest", "before"), without, {1, 2, 3})
        )
    if found.reasons:
        reasons = list(found.reasons.items())[:MAX_ROWS]
        parts.append(
            "<h3>Rows in quarantine</h3>" + table(("reason", "rows"), [(why, number(n)) for why, n in reasons], {1})
        )
        samples = [(one.reason, f"{one.file}:{one.row}", one.content) for one in found.samples][:MAX_ROWS]
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
        earlier, of = sum(one.without_category[column] for one in counted), sum(_usable(one) for one in counted)
        share, usual = rows / _usable(newest) if _usable(newest) else None, earlier / of if of else None
        yield column, number(rows + earlier), format_share(share), format_share(usual)


def _usable(partition: PartitionDigest) -> int:
    return sum(partition.rows.values())


def machines(data: PageData) -> str:
    nodes = data.machines
    if not nodes:
        return ""
    names = list(dict.fromkeys(result.name for node in nodes for result in node.results))
    worst = sorted(nodes, key=lambda node: (-node.verdict, node.node_rank))[:MAX_NODES]
    kept = {id(node) for node in worst}
    shown = [node for node in nodes if id(node) in kept]
    rows = []
    for node in shown:
        found = {result.name: result for result in node.results}
        cells = [
            (found[name].verdict.text, "" if found[name].verdict.text == "pass" else found[name].seen)
            if name in found
            else ("none", "")
            for name in names
        ]
        rows.append((f"{node.node_rank} {node.host}", cells))
    bad = [
        (str(node.node_rank), node.host, result.name, result.verdict.text, result.seen, result.expected)
        for node in nodes
        for result in node.results
        if result.verdict.text != "pass"
    ]
    label = f"{len(nodes)} nodes by {len(names)} checks, {len(bad)} of them not passed"
    parts = [
        figure(
            heat(rows, names, label), f"{escaped(label)}; W: a warning, R: try another machine, F: to be mended first"
        )
    ]
    parts.append(left_out(len(nodes) - len(shown), "nodes that passed"))
    if bad:
        parts.append(rows_of(("node", "host", "check", "verdict", "seen", "expected"), bad, {0}, "findings"))
    measured = list(_measured(data))
    if measured:
        head = ("check", "figure", "lowest", "median", "highest")
        parts.append(details("Figures over all nodes", table(head, measured[:MAX_TRIES], {2, 3, 4})))
    return "".join(parts)


def _measured(data: PageData) -> Iterator[Sequence[str]]:
    values: dict[tuple[str, str], list[float]] = {}
    for node in data.machines:
        for result in node.results:
            values.setdefault((result.name, "seconds"), []).append(result.seconds)
            for name, value in result.figures.items():
                if isinstance(value, int | float):
                    values.setdefault((result.name, name), []).append(float(value))
    for (check, name), found in values.items():
        yield check, name.replace("_", " "), number(min(found)), number(median(found)), number(max(found))


def lineage(data: PageData) -> str:
    found = data.lineage
    if not (found.checkpoint or found.settings_hash):
        return ""
    chain = [one for one in (found.checkpoint, *found.ancestors) if one]
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


def trend(data: PageData, own: CycleRow) -> str:
    rows = (*data.history, own)
    if len(rows) < 2:
        return ""
    kinds: list[tuple[str, Reader, Writer]] = [
        (own.metric or "metric", lambda row: row.value if row.metric == own.metric else None, number),
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


def everything(data: PageData) -> str:
    parts = []
    for stage, figures in data.figures.items():
        if figures:
            shown = [(name, value_text(value)) for name, value in figures.items()]
            parts.append(details(f"Figures of {stage}", table((), shown, {1})))
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
            for entry in sorted(entries, key=lambda one: not _failed(one))[:MAX_TRIES]
        ]
        table_ = table(head, rows, {1, *range(3, len(head) - 1)})
        parts.append(details("Tries", table_ + left_out(len(entries) - MAX_TRIES, "tries")))
    if data.notices:
        rows_ = [
            (stamp(one.at), one.event, "-" if one.step is None else f"{one.step:,}", one.text)
            for one in data.notices[-MAX_ROWS:]
        ]
        table_ = table(("when", "event", "step", "what"), rows_, {2})
        parts.append(
            details("Warnings and failures", table_ + left_out(len(data.notices) - MAX_ROWS, "earlier events"))
        )
    if data.post_mortems:
        lines = items([one.uri for one in data.post_mortems[:MAX_ROWS]])
        more = left_out(len(data.post_mortems) - MAX_ROWS, "post-mortems")
        parts.append(
            f'<div id="post-mortems">{details("Post-mortems of failed tries", lines + more, is_open=True)}</div>'
        )
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


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int], what: str) -> str:
    """A table of the first MAX_ROWS, and how many more `what` there are."""
    return table(head, rows[:MAX_ROWS], numbers) + left_out(len(rows) - MAX_ROWS, what)


def left_out(count: int, what: str) -> str:
    return f'<p class="quiet">And {count:,} {what}, in the JSON beside this page.</p>' if count > 0 else ""


def stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def labels_text(labels: Sequence[str]) -> str:
    return "".join(f'<span><i class="l{i % 8}"></i>{escaped(label)}</span>' for i, label in enumerate(labels))
