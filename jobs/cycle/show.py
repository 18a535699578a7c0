"""Plans and records as tables, for people. Pure."""

from collections.abc import Mapping, Sequence

from jobs.cycle.attempt_time import SPENT
from jobs.cycle.ledger import CycleLedger, Success, Total
from jobs.cycle.outlook import critical_seconds
from jobs.cycle.records import JobRecord, JobState
from jobs.cycle.states import exit_code, reason_of
from jobs.plan.cost import Prices, job_usd
from jobs.plan.dag import Plan
from jobs.plan.spec import JobSpec
from pipeline.core.format import aligned, format_duration, format_share, usd

_PLAN = ("job", "after", "shape", "vCPU", "MiB", "tries", "limit", "expected", "cost")
STATUS = ("job", "state", "tries", "ran", "exit", "why")


def plan_lines(plan: Plan, seconds: Mapping[str, float], prices: Prices, sla_s: int | None) -> list[str]:
    """One row a job, and what the whole cycle will take as far as earlier ones tell."""
    rows: list[tuple[str, ...]] = [_PLAN, *(_plan_row(job, seconds.get(job.name), prices) for job in plan.jobs)]
    total = critical_seconds(plan, seconds)
    costs = [job_usd(job, seconds[job.name], prices) for job in plan.jobs if job.name in seconds]
    known = [cost for cost in costs if cost is not None]
    lines = [
        f"cycle {plan.cycle} of {plan.pipeline} in {plan.workspace}, plan {plan.plan_id[:12]}",
        *aligned(rows, left=(0, 1, 2)),
    ]
    if not seconds:
        return [*lines, "no earlier cycle to estimate the duration from"]
    cost = usd(sum(known)) if len(known) == len(plan.jobs) else "unknown (jobs.prices, jobs.vcpu_usd_per_hour)"
    lines.append(f"expected {format_duration(total)} from start to end without waiting for machines, {cost}")
    if sla_s is not None and total is not None:
        fits = "within" if total <= sla_s else "LATE for"
        lines.append(f"{fits} the {format_duration(sla_s)} of jobs.sla_s")
    return lines


def shape_text(job: JobSpec) -> str:
    """`4 nodes x 32 ranks`, `array of 8`, `1 node`."""
    ranks = f" x {job.resources.processes_per_node} ranks" if job.resources.processes_per_node > 1 else ""
    if job.array_size:
        return f"array of {job.array_size}{ranks}"
    return f"{max(1, job.num_nodes)} node{'s' if job.num_nodes > 1 else ''}{ranks}"


def status_lines(records: Sequence[JobRecord]) -> list[str]:
    """One row a job; children of an array that failed get rows of their own."""
    return aligned([STATUS, *status_rows(records)], left=(0, 1, 5))


def status_rows(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Cells in the order of STATUS."""
    shown = [(one, *(child for child in one.children if child.state is JobState.FAILED)) for one in records]
    return [_status_row(one) for group in shown for one in group]


def ran_seconds(record: JobRecord) -> float | None:
    """From the start of the first try to the end of the last; None where it has not come to that."""
    starts = [a.started_at for leaf in record.leaves() for a in leaf.attempts if a.started_at is not None]
    ends = [a.stopped_at for leaf in record.leaves() for a in leaf.attempts if a.stopped_at is not None]
    return max(ends) - min(starts) if starts and ends else None


def _plan_row(job: JobSpec, seconds: float | None, prices: Prices) -> tuple[str, ...]:
    return (
        job.name,
        ", ".join(one.job or one.type.value for one in job.depends_on) or "-",
        shape_text(job),
        str(job.resources.vcpus),
        f"{job.resources.memory_mib:,}",
        str(job.retry.attempts),
        format_duration(job.timeout_s),
        format_duration(seconds),
        usd(None if seconds is None else job_usd(job, seconds, prices)),
    )


def _status_row(record: JobRecord) -> tuple[str, ...]:
    state = record.state.value
    if record.children:
        done = sum(child.state is JobState.SUCCEEDED for child in record.children)
        state += f" {done}/{len(record.children)}"
    code = exit_code(record)
    return (
        record.name,
        state,
        str(sum(len(leaf.attempts) for leaf in record.leaves())),
        format_duration(ran_seconds(record)),
        "-" if code is None else str(code),
        _why(record),
    )


def _why(record: JobRecord) -> str:
    """Nothing where all is well."""
    if record.state is JobState.SUCCEEDED:
        return ""
    is_again = record.state is JobState.RUNNABLE and record.attempts and record.status_reason
    return reason_of(record) if record.state is JobState.FAILED or is_again else record.status_reason


# Ledgers as tables for a terminal. Pure.

HEAD = ("stage", "tries", "waiting", *SPENT, "machine time", "goodput", "cost")
DEADLINES = {"met": "deadline met", "missed": "deadline MISSED", "open": "deadline ahead", "none": ""}
GOODPUT = (
    "goodput: machine time of kept productive work (steps, rows, vectors) over all machine time;"
    " waiting in a queue is not in it"
)


def cost_lines(ledger: CycleLedger) -> list[str]:
    """One row a stage, one for the cycle, and a line that sums it up."""
    rows = [HEAD, *(total_row(stage) for stage in ledger.stages()), total_row(ledger.total)]
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
    words = [
        f"{found.cycles_done} of {found.cycles} cycles done ({_rate(found.cycles_done, found.cycles)})",
        f"{found.jobs_done} of {found.jobs} jobs succeeded ({_rate(found.jobs_done, found.jobs)})",
    ]
    if found.deadlines:
        words.append(f"{found.deadlines_met} of {found.deadlines} deadlines met")
    return " | ".join(words)


def total_lines(totals: Sequence[Total]) -> list[str]:
    return aligned([("cycle", *HEAD[1:]), *(total_row(one) for one in totals)])


def total_row(one: Total) -> tuple[str, ...]:
    return (
        one.name,
        str(one.tries),
        format_duration(one.waiting_ms / 1000),
        *(time_text(one.machine_ms[kind]) for kind in SPENT),
        format_duration(one.all_ms / 1000),
        format_share(one.goodput),
        usd(one.usd),
    )


def time_text(ms: int) -> str:
    return format_duration(ms / 1000) if ms else "-"


def _rate(done: int, count: int) -> str:
    return format_share(done / count if count else None)
