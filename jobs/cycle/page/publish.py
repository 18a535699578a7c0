"""Write the report page and data of a cycle, and the index of all cycles, to `reports/` in the workspace.

<cycle>.html, <cycle>.json   the page and data of one cycle. Once it has ended, writing them again does not change them.
index.json, index.html       one row per cycle, in order of submission

Each page is a single file that loads no other resources and runs no scripts. The templates escape all text.
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

from jobs.cycle.costs import AttemptCost
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord
from jobs.cycle.page import charts
from jobs.cycle.page.charts import number
from jobs.cycle.page.gather import HOLDOUT, LOSS, CycleRow, PageData, gather, row_of
from jobs.cycle.tables import DEADLINES, GOODPUT, NO_LOG, attempts_text
from jobs.cycle.verdict import SEARCH, WITHOUT, cost_text, measures, metric_name, reasons
from jobs.plan.cycle import RUN_PREFIX
from jobs.plan.spec import JobPlan
from jobs.settings import JobsConfig
from pipeline.core.errors import DataError
from pipeline.core.format import format_duration, format_percent, usd
from pipeline.core.record import Record
from pipeline.data.token_sets import PartitionDigest
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck
from pipeline.evaluate.report import part_table, table_lines
from pipeline.io.storage import Storage, read_record, update_file

INDEX = "reports/index.json"
INDEX_PAGE = "reports/index.html"
MAX_CYCLES = 2000
"""Maximum number of cycles in the index. If there are more, the oldest are dropped."""
TREND = 20
"""Number of cycles in the trend, including the current one."""
MAX_LANES = 60
_UNITS: dict[str, tuple[str, float, tuple[float, ...]]] = {
    "share of time waiting for data": ("time waiting for data, %", 100, (0, 1)),
    "memory, bytes": ("memory, GiB", 2**-30, (0,)),
    "learning rate": ("learning rate, highest", 1, ()),
}
"""How to draw a training metric: its title, a factor, and values that the vertical axis always includes."""
_HIDDEN = dict.fromkeys(
    [
        *(code for code in range(0xA0) if (code < 0x20 or code >= 0x7F) and code not in (0x09, 0x0A)),
        *(0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF),  # direction marks
        *range(0xD800, 0xE000),  # surrogates
    ],
    "\ufffd",
)


class Index(Record):
    """The index of cycles, with one row per cycle."""

    schema_version: Literal[1] = 1
    cycles: tuple[CycleRow, ...]


def report_key(cycle: str) -> str:
    return f"reports/{cycle}.html"


def data_key(cycle: str) -> str:
    return f"reports/{cycle}.json"


def write_page(
    store: CycleStore, plan: JobPlan, records: Sequence[JobRecord], config: JobsConfig, closed: Closed | None
) -> PageData:
    """Write or overwrite the page of a cycle and return its data.

    `closed` is the end of the cycle, even if it is not on record yet.
    """
    data = gather(store, plan, records, config, closed, without_report=True)
    current = row_of(store, data, closed)
    if not store.cycle.startswith(RUN_PREFIX):  # `trnjobs run` is not part of the trend
        try:
            cycles = add_to_index(store.storage, current)
        except DataError as error:
            data = data.model_copy(update={"unread": (*data.unread, error.seen)})
        else:
            # Only include cycles that were submitted and ended before this one, so that the page does not change later.
            earlier = [row for row in cycles if (row.claimed_at, row.cycle) < (current.claimed_at, current.cycle)]
            until = inf if current.closed_at is None else current.closed_at
            ended = [row for row in earlier if row.closed_at is not None and row.closed_at <= until]
            data = data.model_copy(update={"history": tuple(ended[-(TREND - 1) :])})
            store.storage.write_bytes(INDEX_PAGE, index(cycles).encode())
    store.storage.write_bytes(data_key(store.cycle), data.to_json())
    store.storage.write_bytes(report_key(store.cycle), page(data, current).encode())
    return data


def add_to_index(storage: Storage, row: CycleRow) -> tuple[CycleRow, ...]:
    """Add or replace the row of a cycle in the index, and return all rows, oldest first.

    Raises DataError if the index cannot be read, or TransientError if other processes keep changing it.
    """
    ordered: tuple[CycleRow, ...] = ()

    def added() -> bytes | None:
        nonlocal ordered
        existing = read_index(storage)
        cycles = {other.cycle: other for other in (existing.cycles if existing else ())} | {row.cycle: row}
        ordered = tuple(sorted(cycles.values(), key=lambda other: (other.claimed_at, other.cycle)))[-MAX_CYCLES:]
        return None if existing and existing.cycles == ordered else Index(cycles=ordered).to_json()

    update_file(storage, INDEX, added, f"trnjobs report --cycle {row.cycle}")
    return ordered


def read_index(storage: Storage) -> Index | None:
    """Return the index, or None if it does not exist. Raises DataError if it cannot be read."""
    command = "delete it, then run trnjobs report --cycle for each cycle to add it again"
    return read_record(storage, INDEX, Index, "the index of cycles", "trnjobs report", next_command=command)


# Conversion of the data to HTML.


@cache
def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("jobs.cycle.page", "."),
        autoescape=True,
        extensions=["jinja2.ext.do"],
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"number": number, "duration": format_duration, "usd": usd, "share": format_percent}
    environment.filters |= {"stamp": _stamp, "figure_text": _figure_text, "metric": metric_name, "plural": _plural}
    environment.globals |= {"charts": charts, "ramp": _ramp, "search": SEARCH, "shown_table": shown_columns}
    environment.globals["attempts_text"] = attempts_text
    return environment


def page(data: PageData, own: CycleRow) -> str:
    """Return the HTML page of a cycle. `own` is its row in the index."""
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
            attempts_chart=_attempts_chart(data),
            history=_history_chart((*data.history, own)),
            median_s=lambda stage: _median(row.stage_s.get(stage) if stage else row.machine_s for row in usual),
            median_usd=lambda stage: _median(row.stage_usd.get(stage) if stage else row.usd for row in usual),
            gate_groups=_gate_groups(data),
            table_lines=table_lines,
            part_table=part_table,
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
    """Return the HTML page that lists all cycles, newest first. `rows` are sorted oldest first."""
    ends = [(row.production, end) for row in rows for end in (row.low, row.high)]
    reach = max((abs(end - other) for other, end in ends if other is not None and end is not None), default=1.0)
    chart = _history_chart(rows[-TREND:])
    return visible(
        _templates().get_template("index.html.j2").render(rows=rows, chart=chart, ending=ending, reach=reach)
    )


def _history_chart(rows: Sequence[CycleRow]) -> tuple[Markup, str]:
    """Return a chart of the quality over cycles, and its title.

    The chart shows the search metric and BM25. If no cycle has the search metric, it shows the newest gate metric.
    """
    has_search = any(row.value_of(SEARCH) is not None for row in rows)
    metric = SEARCH if has_search else next((row.metric for row in reversed(rows) if row.metric), "")
    values = [(float(i), value) for i, row in enumerate(rows) if (value := row.value_of(metric)) is not None]
    bm25 = [(float(i), row.bm25) for i, row in enumerate(rows) if has_search and row.bm25 is not None]
    series = [(metric_name(metric), values, "now"), *([("BM25", bm25, "before")] if bm25 else [])]
    hollow = [float(i) for i, row in enumerate(rows) if not row.promoted]
    title = f"{metric_name(metric)} of the last {len(rows)} cycles (hollow: not promoted)"
    if len(values) < 2:
        return Markup(), title
    names, size = [row.cycle for row in rows], (charts.WIDTH, 170.0)
    return charts.line_chart(series, title, size=size, names=names, hollow=hollow), title


def ending(row: CycleRow) -> tuple[str, str]:
    """Return how a cycle ended, as a class in the style sheet and a text to display."""
    if row.promoted and row.outcome == "succeeded":
        return ("without", f"promoted{WITHOUT}") if row.without_comparison else ("promoted", "promoted")
    return row.outcome, "under way" if row.outcome == "open" else row.outcome


def _tiles(data: PageData, usual: Sequence[CycleRow]) -> list[tuple[str, str, str]]:
    """Return the tiles at the top of a page. Each consists of a name, a value and a comparison."""
    metrics, vectors = measures(data.evaluation) if data.evaluation else [], data.vectors
    tiles = []
    for index, measure in enumerate(metrics):
        if index == 0 or measure.metric == SEARCH:
            others = ", ".join(f"{label} {number(value)}" for label, value in measure.others.items())
            comparison = measure.change if measure.change and index == 0 else others
            tiles.append((metric_name(measure.metric), number(measure.candidate), comparison))
    if data.outcome == "refused" and data.evaluation and (production := data.evaluation.incumbent):
        tiles.append(("still in production", production.cycle, f"step {number(production.step)}, with its vectors"))
    elif vectors is not None and vectors.passed:
        is_served = data.promoted and data.outcome == "succeeded"
        counts = f"{number(vectors.counts.embedded)} embedded, {number(vectors.counts.carried)} carried over"
        tiles.append((f"vectors {'served' if is_served else 'verified'}", number(vectors.rows), counts))
    earlier = [format_duration(_median(row.took_s for row in usual)), usd(_median(row.paid_usd for row in usual))]
    median_text = ", ".join(text for text in earlier if text != "-")
    cost = cost_text(data.ledger, data.target) + (f"; median before: {median_text}" if median_text else "")
    return [*tiles, ("time and cost", format_duration(data.ledger.took_s), cost)]


def shown_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Collection[int] = ()
) -> tuple[list[str], list[list[str]], list[int]]:
    """Remove empty columns from a table. Return its head, its rows and the indices of the remaining number columns."""
    kept = [i for i in range(len(rows[0]) if rows else len(head)) if any(row[i] not in ("", "-") for row in rows)]
    return (
        [head[i] for i in kept] if head else [],
        [[row[i] for i in kept] for row in rows],
        [position for position, i in enumerate(kept) if i in numbers],
    )


def visible(text: str) -> str:
    """Replace characters that control a terminal or the direction of text by a visible character."""
    return text.translate(_HIDDEN)


def outcome_sentence(data: PageData) -> str:
    """Return a sentence about how the cycle ended."""
    outcome, evaluated = data.outcome, data.figures.get("evaluate", {})
    if outcome == "open":
        running = ", ".join(job.name for job in data.jobs if job.state in ("STARTING", "RUNNING"))
        return f"Under way: {running} running." if running else "Under way."
    if outcome == "refused":
        failed = sum(check.outcome == "fail" for check in data.evaluation.verdict.checks) if data.evaluation else 0
        why = f"{_plural(failed, 'check')} of the gate failed" if failed else data.reason or "see the log of evaluate"
        return f"Refused: {why}. Production is unchanged."
    if outcome == "failed":
        failed_jobs = ", ".join(job.name for job in data.jobs if job.ending == "failed")
        return f"Failed{f' in {failed_jobs}' if failed_jobs else ''}: {data.why or 'no reason was recorded'}."
    if outcome == "cancelled":
        return f"Cancelled: {data.reason or 'no reason was given'}."
    if data.promoted:
        how = (" by force" if evaluated.get("forced") else "") + (WITHOUT if data.without_comparison else "")
        change = "a new model is in production"
        if data.evaluation and (metrics := measures(data.evaluation)):
            name, value = metric_name(metrics[0].metric), number(metrics[0].candidate)
            change = f"the first model, {name} {value}"
            if (before := metrics[0].others.get("production")) is not None:
                change = f"{name} {value}, previously {number(before)}"
        return f"Promoted{how}: {change}."
    if evaluated.get("nothing_new"):
        return "Nothing new to train on. Production is unchanged."
    return "Passed, but not promoted." if "promoted" in evaluated else "Succeeded."


def _attempts_chart(data: PageData) -> Markup:
    """Draw the attempts over time, in one lane per job. Of an array, only draw the first child and failed children."""
    ledger = data.ledger
    if not ledger.entries or ledger.began_at is None:
        return Markup()
    lanes = defaultdict[str, list[AttemptCost]](list)
    for entry in ledger.entries:
        lanes[entry.job].append(entry)
    notable = {
        name: attempts
        for name, attempts in lanes.items()
        if ":" not in name or name.endswith(":0") or any(attempt.has_failed for attempt in attempts)
    }
    shown = dict(list((notable or lanes).items())[:MAX_LANES])
    due_s = None if ledger.deadline_at is None else ledger.deadline_at - ledger.began_at
    return charts.gantt(shown, round(1000 * ledger.began_at), due_s)


def _gate_groups(data: PageData) -> list[tuple[str, list[GateCheck]]]:
    """Return the comparisons of the gate, grouped under titles. Slices are sorted so that the worst is first."""

    def severity(check: GateCheck) -> tuple[int, float]:
        change = (check.candidate or 0.0) - (check.incumbent or 0.0)
        loss = MetricName.parse(check.metric).loss(change)
        return ("fail", "warn", "pass", "skipped").index(check.outcome), -loss

    checks = data.evaluation.verdict.checks if data.evaluation else ()
    compared = [check for check in checks if check.low is not None and check.high is not None]
    slices = sorted((check for check in compared if check.kind == "slice"), key=severity)
    groups = [("Overall", [check for check in compared if check.kind != "slice"])]
    return [*groups, ("Slices, worst first", slices)]


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _missing_categories(data: PageData) -> list[tuple[str, str, str, str]]:
    """Return a table row per categorical and numeric feature about the rows in which it is missing.

    A row contains the number of such rows, and their fraction in the newest partition and in earlier ones.
    """

    def fraction(partitions: Sequence[PartitionDigest], column: str) -> str:
        rows = sum(sum(partition.rows.values()) for partition in partitions)
        missing = sum(partition.without_category[column] for partition in partitions)
        return format_percent(missing / rows if rows else None)

    result = []
    all_partitions = data.prepared.partitions if data.prepared else ()
    counting = [partition for partition in all_partitions if partition.without_category]
    for column in counting[-1].without_category if counting else ():
        partitions = [partition for partition in counting if column in partition.without_category]
        rows = number(sum(partition.without_category[column] for partition in partitions))
        result.append((column, rows, fraction(partitions[-1:], column), fraction(partitions[:-1], column)))
    return result


def _ramp(index: int, count: int) -> str:
    """Return the style class of the label with this index. Labels are coloured from light to dark."""
    return f"l{round(7 * index / (count - 1)) if count > 1 else 7}"


def _plural(count: int, word: str) -> str:
    more = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{number(count)} {word if count == 1 else more}"


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _figure_text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    return number(value) if isinstance(value, int | float) else str(value)
