"""Ledgers as tables for a terminal. Pure."""

from collections.abc import Sequence

from jobs.core.attempt_time import SPENT
from jobs.core.ledger import CycleLedger, Success, Total
from jobs.core.table import aligned, usd
from pipeline.core.format import format_duration, format_share

HEAD = ("stage", "tries", "waiting", *SPENT, "machine time", "goodput", "cost")
DEADLINES = {"met": "deadline met", "missed": "deadline MISSED", "open": "deadline ahead", "none": ""}
GOODPUT = (
    "goodput: machine time of kept productive work (steps, rows, vectors) over all machine time;"
    " waiting in a queue is not in it"
)


def cost_lines(ledger: CycleLedger) -> list[str]:
    """One row a stage, one for the cycle, and a line that sums it up."""
    rows = [HEAD, *(_row(stage) for stage in ledger.stages()), _row(ledger.total)]
    return [summary(ledger), *aligned(rows)]


def summary(ledger: CycleLedger) -> str:
    """`cycle 2026-11-20: succeeded in 12m03s, deadline met | 8 of 8 jobs in 9 tries | goodput 61% | $0.12, ...`"""
    took = None if ledger.began_at is None or ledger.ended_at is None else ledger.ended_at - ledger.began_at
    state = ("under way" if ledger.outcome == "open" else ledger.outcome) + (
        "" if took is None else f" in {format_duration(took)}"
    )
    words = [
        ", ".join(word for word in (f"cycle {ledger.cycle}: {state}", DEADLINES[ledger.deadline]) if word),
        f"{ledger.succeeded} of {ledger.jobs} jobs in {len(ledger.entries)} tries",
        f"goodput {format_share(ledger.total.goodput)}",
        money(ledger.total),
    ]
    return " | ".join(words)


def money(one: Total) -> str:
    """What it cost, and what of it was wasted."""
    if one.usd is None:
        return "cost unknown (jobs.prices, jobs.vcpu_usd_per_hour)"
    return f"{usd(one.usd)}, {usd(one.wasted_usd)} of it wasted"


def success_line(found: Success) -> str:
    """Over several cycles."""
    words = [
        f"{found.cycles_done} of {found.cycles} cycles done ({_rate(found.cycles_done, found.cycles)})",
        f"{found.jobs_done} of {found.jobs} jobs succeeded ({_rate(found.jobs_done, found.jobs)})",
    ]
    if found.deadlines:
        words.append(f"{found.deadlines_met} of {found.deadlines} deadlines met")
    return " | ".join(words)


def total_lines(totals: Sequence[Total]) -> list[str]:
    """Cycles side by side."""
    return aligned([("cycle", *HEAD[1:]), *(_row(one) for one in totals)])


def _row(one: Total) -> tuple[str, ...]:
    return (
        one.name,
        str(one.tries),
        format_duration(one.waiting_ms / 1000),
        *(_time(one.machine_ms[kind]) for kind in SPENT),
        format_duration(one.all_ms / 1000),
        format_share(one.goodput),
        usd(one.usd),
    )


def _time(ms: int) -> str:
    return format_duration(ms / 1000) if ms else "-"


def _rate(done: int, count: int) -> str:
    return format_share(done / count if count else None)
