"""Write the page of a cycle, its data and the index of all cycles: `reports/`.

<cycle>.html, <cycle>.json   of one cycle; of one that has ended the same, byte for byte, whenever and by whomever made
index.json, index.html       one line a cycle, in the order in which they were submitted

The page is one file that asks for nothing and runs nothing. The templates escape every text.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from math import inf
from statistics import median
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jobs.cycle.costs import AttemptCost, read_ledger
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord
from jobs.cycle.page import charts
from jobs.cycle.page.charts import number
from jobs.cycle.page.gather import HOLDOUT, LOSS, CycleRow, PageData, gather, row_of
from jobs.cycle.tables import DEADLINES, GOODPUT, NO_LOG
from jobs.cycle.verdict import SEARCH, WITHOUT, cost_text, measures, metric_name, reasons
from jobs.plan.cycle import RUN_PREFIX
from jobs.plan.spec import JobPlan
from jobs.settings import JobsConfig
from pipeline.core.errors import DataError, TransientError
from pipeline.core.format import format_duration, format_percent, usd
from pipeline.core.record import Record
from pipeline.data.token_sets import PartitionDigest
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import table_lines
from pipeline.io.storage import Storage, read_record

INDEX = "reports/index.json"
INDEX_PAGE = "reports/index.html"
MAX_CYCLES = 2000
"""Of the index; those that were submitted first go."""
TREND = 20
"""Cycles of the trend, this one included."""
MAX_LANES = 60
_TRIES = 20
_UNITS: dict[str, tuple[str, float, tuple[float, ...]]] = {
    "share of time waiting for data": ("time waiting for data, %", 100, (0, 1)),
    "memory, bytes": ("memory, GiB", 2**-30, (0,)),
    "learning rate": ("learning rate, highest", 1, ()),
}
"""How a figure of training is drawn: its title, a factor, and what its axis holds in any case."""
_HIDDEN = dict.fromkeys(
    [
        *(code for code in range(0xA0) if (code < 0x20 or code >= 0x7F) and code not in (0x09, 0x0A)),
        *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF),  # they turn text around
        *range(0xD800, 0xE000),  # halves of pairs
    ],
    "\ufffd",
)


class Index(Record):
    schema_version: Literal[1] = 1
    cycles: tuple[CycleRow, ...]


def report_key(cycle: str) -> str:
    return f"reports/{cycle}.html"


def data_key(cycle: str) -> str:
    return f"reports/{cycle}.json"


def write_page(
    store: CycleStore, plan: JobPlan, records: Sequence[JobRecord], config: JobsConfig, closed: Closed | None
) -> PageData:
    """Write the page over an earlier one; return what it shows. `closed`: the end, on record or not yet."""
    ledger = read_ledger(store, plan, records, config, closed=closed, without_report=True)
    data = gather(store, plan, ledger, records, closed)
    own = row_of(store, data, closed)
    if not store.cycle.startswith(RUN_PREFIX):  # what is no cycle is in no trend
        try:
            cycles = add_to_index(store.storage, own)
        except DataError as error:
            data = data.model_copy(update={"unread": (*data.unread, error.seen)})
        else:
            # Cycles that were submitted before this one and had ended when it did, so that its page stays as it is.
            earlier = [row for row in cycles if (row.claimed_at, row.cycle) < (own.claimed_at, own.cycle)]
            until = inf if own.closed_at is None else own.closed_at
            ended = [row for row in earlier if row.closed_at is not None and row.closed_at <= until]
            data = data.model_copy(update={"history": tuple(ended[-(TREND - 1) :])})
            store.storage.write_bytes(INDEX_PAGE, index(cycles).encode())
    store.storage.write_bytes(data_key(store.cycle), data.model_dump_json(indent=1).encode() + b"\n")
    store.storage.write_bytes(report_key(store.cycle), page(data, own).encode())
    return data


def add_to_index(storage: Storage, own: CycleRow) -> tuple[CycleRow, ...]:
    """Return all cycles with this one in its place, the oldest first. Raises DataError for an unreadable index."""
    for _ in range(_TRIES):
        stat = storage.stat(INDEX)
        known = read_index(storage)
        cycles = {row.cycle: row for row in (known.cycles if known else ())} | {own.cycle: own}
        ordered = tuple(sorted(cycles.values(), key=lambda row: (row.claimed_at, row.cycle)))[-MAX_CYCLES:]
        if known and known.cycles == ordered:
            return ordered
        text = Index(cycles=ordered).model_dump_json(indent=1).encode() + b"\n"
        if storage.write_if_match(INDEX, text, stat.etag) if stat else storage.write_if_absent(INDEX, text):
            return ordered
    raise TransientError(
        f"{storage.uri(INDEX)} changed {_TRIES} times while a line was added to it",
        next_command=f"trnjobs report --cycle {own.cycle}",
    )


def read_index(storage: Storage) -> Index | None:
    """Return None when there is none. Raises DataError when it cannot be read."""
    again = "delete it; trnjobs report --cycle puts each cycle into it again"
    return read_record(storage, INDEX, Index, "the index of cycles", "trnjobs report", next_command=again)


# From data to HTML.


@cache
def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("jobs.cycle.page", "."),
        autoescape=True,
        extensions=["jinja2.ext.do"],
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters |= {"number": number, "duration": format_duration, "usd": usd, "share": format_percent}
    made.filters |= {"stamp": _stamp, "figure_text": _figure_text, "metric": metric_name, "plural": _plural}
    made.globals |= {"charts": charts, "ramp": _ramp, "search": SEARCH, "shown_table": shown_columns}
    return made


def page(data: PageData, own: CycleRow) -> str:
    """Return the page of a cycle; `own`: its line in the index."""
    usual = [row for row in data.history[-10:] if row.outcome != "cancelled"]
    text = (
        _templates()
        .get_template("page.html.j2")
        .render(
            data=data,
            sentence=outcome_sentence(data),
            ending=ending(own),
            tiles=_tiles(data, usual),
            reasons=reasons(data.evaluation.verdict.checks) if data.evaluation and data.outcome == "refused" else (),
            tries_chart=_tries_chart(data),
            history=_history_chart((*data.history, own)),
            median_s=lambda stage: _median(row.stage_s.get(stage) if stage else row.machine_s for row in usual),
            median_usd=lambda stage: _median(row.stage_usd.get(stage) if stage else row.usd for row in usual),
            gate_groups=_gate_groups(data),
            table_lines=table_lines,
            loss_name=LOSS,
            holdout_name=HOLDOUT,
            units=_UNITS,
            missing_categories=_missing_categories(data),
            deadlines=DEADLINES,
            goodput_note=GOODPUT,
            no_log=NO_LOG,
        )
    )
    return visible(text)


def index(rows: Sequence[CycleRow]) -> str:
    """Return the page of all cycles, the newest first; `rows`: the oldest first."""
    ends = [(row.production, end) for row in rows for end in (row.low, row.high)]
    reach = max((abs(end - other) for other, end in ends if other is not None and end is not None), default=1.0)
    chart = _history_chart(rows[-TREND:])
    return visible(
        _templates().get_template("index.html.j2").render(rows=rows, chart=chart, ending=ending, reach=reach)
    )


def _history_chart(rows: Sequence[CycleRow]) -> tuple[Markup, str]:
    """Return a line of search beside BM25 over cycles, or of another metric of all of them; and its title."""
    searched = any(row.value_of(SEARCH) is not None for row in rows)
    metric = SEARCH if searched else next((row.metric for row in reversed(rows) if row.metric), "")
    ours = [(float(i), value) for i, row in enumerate(rows) if (value := row.value_of(metric)) is not None]
    words = [(float(i), row.bm25) for i, row in enumerate(rows) if searched and row.bm25 is not None]
    series = [(metric_name(metric), ours, "now"), *([("BM25", words, "before")] if words else [])]
    hollow = [float(i) for i, row in enumerate(rows) if not row.promoted]
    title = f"{metric_name(metric)} of the last {len(rows)} cycles; hollow: not promoted"
    if len(ours) < 2:
        return Markup(), title
    names, size = [row.cycle for row in rows], (charts.WIDTH, 170.0)
    return charts.line_chart(series, title, size=size, names=names, hollow=hollow), title


def ending(row: CycleRow) -> tuple[str, str]:
    """Return how a cycle ended: a class of the style sheet, and in words."""
    if row.promoted and row.outcome == "succeeded":
        return ("without", f"promoted{WITHOUT}") if row.without_comparison else ("promoted", "promoted")
    return row.outcome, "under way" if row.outcome == "open" else row.outcome


def _tiles(data: PageData, usual: Sequence[CycleRow]) -> list[tuple[str, str, str]]:
    """Return what the head of a page shows large: name, value, and what it is beside."""
    found, vectors = measures(data.evaluation) if data.evaluation else [], data.vectors
    tiles = []
    for place, one in enumerate(found):
        if place == 0 or one.metric == SEARCH:
            others = ", ".join(f"{who} {number(value)}" for who, value in one.others.items())
            beside = one.change if one.change and place == 0 else others
            tiles.append((metric_name(one.metric), number(one.candidate), beside))
    if data.outcome == "refused" and data.evaluation and (known := data.evaluation.incumbent):
        tiles.append(("still in production", known.cycle, f"step {number(known.step)}, with its vectors"))
    elif vectors is not None and vectors.passed:
        served = data.promoted and data.outcome == "succeeded"
        how = f"{number(vectors.counts.embedded)} embedded, {number(vectors.counts.carried)} carried over"
        tiles.append((f"vectors {'served' if served else 'verified'}", number(vectors.rows), how))
    earlier = [format_duration(_median(row.took_s for row in usual)), usd(_median(row.paid_usd for row in usual))]
    before = ", ".join(word for word in earlier if word != "-")
    cost = cost_text(data.ledger, data.target) + (f"; median before: {before}" if before else "")
    return [*tiles, ("time and cost", format_duration(data.ledger.took_s), cost)]


def shown_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()
) -> tuple[list[str], list[list[str]], list[int]]:
    """Return a table without the columns that hold nothing, and those of its columns that are numbers."""
    kept = [i for i in range(len(rows[0]) if rows else len(head)) if any(row[i] not in ("", "-") for row in rows)]
    return (
        [head[i] for i in kept] if head else [],
        [[row[i] for i in kept] for row in rows],
        [place for place, i in enumerate(kept) if i in numbers],
    )


def visible(text: str) -> str:
    """Return a text in which characters that control a terminal or the direction of text are shown."""
    return text.translate(_HIDDEN)


def outcome_sentence(data: PageData) -> str:
    """Return how the cycle ended, in one line."""
    outcome, evaluated = data.outcome, data.figures.get("evaluate", {})
    if outcome == "open":
        running = ", ".join(job.name for job in data.jobs if job.state in ("STARTING", "RUNNING"))
        return f"Under way: {running} running." if running else "Under way."
    if outcome == "refused":
        failed = sum(one.outcome == "fail" for one in data.evaluation.verdict.checks) if data.evaluation else 0
        why = f"{_plural(failed, 'check')} of the gate failed" if failed else data.reason or "the gate says why"
        return f"Refused: {why}. Production stays as it is."
    if outcome == "failed":
        failed_jobs = ", ".join(job.name for job in data.jobs if job.ending == "failed")
        return f"Failed{f' in {failed_jobs}' if failed_jobs else ''}: {data.why or 'no reason is on record'}."
    if outcome == "cancelled":
        return f"Cancelled: {data.reason or 'no reason was given'}."
    if data.promoted:
        how = (" by force" if evaluated.get("forced") else "") + (WITHOUT if data.without_comparison else "")
        change = "a new model is in production"
        if data.evaluation and (found := measures(data.evaluation)):
            name, value = metric_name(found[0].metric), number(found[0].candidate)
            change = f"the first model, {name} {value}"
            if (before := found[0].others.get("production")) is not None:
                change = f"{name} {value}, in production before {number(before)}"
        return f"Promoted{how}: {change}."
    if evaluated.get("nothing_new"):
        return "Nothing new: there was nothing to learn from, and the model in production stays."
    return "Passed, and not promoted." if "promoted" in evaluated else "Succeeded."


def _tries_chart(data: PageData) -> Markup:
    """Draw tries over time: a lane for each job, for the first child of an array, and for each child that failed."""
    ledger = data.ledger
    if not ledger.entries or ledger.began_at is None:
        return Markup()
    lanes = defaultdict[str, list[AttemptCost]](list)
    for entry in ledger.entries:
        lanes[entry.job].append(entry)
    notable = {
        name: tries
        for name, tries in lanes.items()
        if ":" not in name or name.endswith(":0") or any(one.has_failed for one in tries)
    }
    shown = dict(list((notable or lanes).items())[:MAX_LANES])
    due_s = None if ledger.deadline_at is None else ledger.deadline_at - ledger.began_at
    return charts.gantt(shown, round(1000 * ledger.began_at), due_s)


def _gate_groups(data: PageData) -> list[tuple[str, list[GateCheck]]]:
    """Return the comparisons of the gate under their titles; slices by how much the candidate lost."""

    def harm(check: GateCheck) -> tuple[int, float]:
        change = (check.candidate or 0.0) - (check.incumbent or 0.0)
        gain = -change if MetricName.parse(check.metric).lower_is_better else change
        return ("fail", "warn", "pass", "skipped").index(check.outcome), gain

    checks = data.evaluation.verdict.checks if data.evaluation else ()
    compared = [check for check in checks if check.low is not None and check.high is not None]
    slices = sorted((check for check in compared if check.kind == "slice"), key=harm)
    groups = [("Overall", [check for check in compared if check.kind != "slice"])]
    return [*groups, ("Slices, worst first", slices)]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _missing_categories(data: PageData) -> list[tuple[str, str, str, str]]:
    """Return for each categorical column the rows without a value, their share in the newest partition, and before."""

    def share(partitions: Sequence[PartitionDigest], column: str) -> str:
        rows = sum(sum(one.rows.values()) for one in partitions)
        return format_percent(sum(one.without_category[column] for one in partitions) / rows if rows else None)

    found = []
    counting = [one for one in data.prepared.partitions if one.without_category] if data.prepared else []
    for column in counting[-1].without_category if counting else ():
        known = [one for one in counting if column in one.without_category]
        rows = number(sum(one.without_category[column] for one in known))
        found.append((column, rows, share(known[-1:], column), share(known[:-1], column)))
    return found


def _ramp(place: int, of: int) -> str:
    """Return the class of a label: of ordered labels the first is the lightest, the last the darkest."""
    return f"l{round(7 * place / (of - 1)) if of > 1 else 7}"


def _plural(count: int, word: str) -> str:
    """Return `1 node`, `2 nodes`, `3 queries`."""
    more = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{number(count)} {word if count == 1 else more}"


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _figure_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return number(value) if isinstance(value, int | float) else str(value)
