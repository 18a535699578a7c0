"""Format plans, job records and ledgers as tables for the terminal."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jobs.cycle.costs import SPENT, CycleLedger, Total, critical_seconds, sum_if_known
from jobs.cycle.job_states import (
    JobRecord,
    JobState,
    exit_code,
    failed_task,
    preempted_attempts,
    reason_of,
    shown_state,
    without_error,
)
from jobs.plan.resources import Prices, job_usd
from jobs.plan.spec import JobPlan, JobSpec
from pipeline.core.errors import GateRefused
from pipeline.core.format import aligned, format_duration, format_percent, usd
from pipeline.core.secrets import without_secret

STATUS = ("job", "state", "attempts", "ran", "exit", "why")


def plan_lines(plan: JobPlan, seconds: Mapping[str, float], prices: Prices, sla_s: int | None) -> list[str]:
    """Return a table with one row per job, and the duration and cost that earlier cycles lead us to expect."""
    rows: list[tuple[str, ...]] = [("job", "after", "shape", "vCPU", "MiB", "attempts", "limit", "expected", "cost")]
    costs = [job_usd(job, seconds[job.name], prices) if job.name in seconds else None for job in plan.jobs]
    for job, job_cost in zip(plan.jobs, costs, strict=True):
        after, needs = ", ".join(needed.job for needed in job.depends_on) or "-", job.resources
        sizes = (str(needs.vcpus), f"{needs.memory_mib:,}", str(job.retry.attempts), format_duration(job.timeout_s))
        rows.append((job.name, after, shape_text(job), *sizes, format_duration(seconds.get(job.name)), usd(job_cost)))
    total = critical_seconds(plan, seconds)
    lines = [
        f"cycle {plan.cycle} in {plan.workspace}, plan {plan.plan_id[:12]}",
        *aligned(rows, left=(0, 1, 2)),
    ]
    if not seconds:
        return [*lines, "no earlier cycle to estimate the duration from"]
    cost = sum_if_known(costs)
    new = ", ".join(job.name for job in plan.jobs if job.name not in seconds)
    unknown = f"unknown cost (no earlier run of {new})" if new else "unknown cost (jobs.prices, jobs.vcpu_usd_per_hour)"
    priced = unknown if cost is None else usd(cost)
    lines.append(f"expected {format_duration(total)} from start to end without waiting for machines, {priced}")
    if sla_s is not None and total is not None:
        fits = "within" if total <= sla_s else "LATE for"
        lines.append(f"{fits} the {format_duration(sla_s)} of jobs.sla_s")
    return lines


def shape_text(job: JobSpec) -> str:
    """Return the shape of a job as text, such as `4 nodes x 32 ranks`, `array of 8` or `1 node`."""
    ranks = f" x {job.resources.processes_per_node} ranks" if job.resources.processes_per_node > 1 else ""
    if job.array_size:
        return f"array of {job.array_size}{ranks}"
    return f"{max(1, job.num_nodes)} node{'s' if job.num_nodes > 1 else ''}{ranks}"


def status_lines(records: Sequence[JobRecord]) -> list[str]:
    """Return a table with one row per job and per failed array child. Errors are formatted by `failure_lines`."""
    rows = [(*cells, without_error(why, records)) for *cells, why in status_rows(records)]
    return aligned([STATUS, *rows], left=(0, 1, 5))


def status_rows(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Return the rows of the status table, with cells in the order of STATUS."""
    rows = list[tuple[str, ...]]()
    for job in records:
        for record in (job, *(child for child in job.children if child.state.is_failure)):
            state, code, why = shown_state(record), exit_code(record), record.status_reason
            if record.children:
                done = sum(child.state is JobState.SUCCEEDED for child in record.children)
                state += f" {done}/{len(record.children)}"
            if record.state.is_failure or (record.state is JobState.RUNNABLE and record.attempts and why):
                why = reason_of(record)  # the job has failed, or is waiting for a retry
            attempts = attempts_text(len(record.all_attempts()), preempted_attempts(record))
            ran = format_duration(ran_seconds(record))
            has_succeeded = record.state is JobState.SUCCEEDED
            cells = (record.name, state, attempts, ran, "-" if code is None else str(code))
            rows.append((*cells, "" if has_succeeded else why))
    return rows


def attempts_text(attempts: int, preempted: int) -> str:
    """Return the number of attempts as text, and how many of them were preempted, such as `3 (1 preempted)`."""
    return f"{attempts} ({preempted} preempted)" if preempted else f"{attempts}"


NO_LOG = "its log does not exist or cannot be read"


def failure_lines(records: Sequence[JobRecord], workspace: str, cycle: str, program: str = "trnjobs") -> list[str]:
    """Return the error of each job that ran and failed, and the command that shows its log."""
    lines = list[str]()
    for task in (task for record in records if (task := failed_task(record))):
        is_refusal = exit_code(task) == GateRefused.exit_code
        lines.append(f"{task.name} {'refused the model' if is_refusal else f'failed, attempt {len(task.attempts)}'}:")
        lines += [f"  {line}" for line in task.attempts[-1].error.splitlines() or [NO_LOG]]
        lines.append(f"  log: {logs_command(task, workspace, cycle, program)}")
    return lines


def logs_command(task: JobRecord, workspace: str, cycle: str, program: str = "trnjobs") -> str:
    """Return the command that shows the log with the error of a failed job. `workspace` is a URI."""
    command = [program, "logs", task.name, "--workspace", workspace.removeprefix("file://"), "--cycle", cycle]
    node = task.attempts[-1].error_node
    return shlex.join([*command, "--node", str(node)] if node else command)


def ran_seconds(record: JobRecord) -> float | None:
    """Return the seconds from the start of the first attempt to the end of the last, or None if nothing has ended."""
    starts = [attempt.started_at for attempt in record.all_attempts() if attempt.started_at is not None]
    ends = [attempt.stopped_at for attempt in record.all_attempts() if attempt.stopped_at is not None]
    return max(ends) - min(starts) if starts and ends else None


# Ledgers.

HEAD = ("stage", "attempts", "waiting", *SPENT, "machine time", "goodput", "cost")
DEADLINES = {"met": "deadline met", "missed": "deadline MISSED", "open": "deadline ahead", "none": ""}
GOODPUT = (
    "goodput: machine time of productive work that was kept (steps, rows, vectors) divided by all machine time,"
    " without waiting in a queue"
)
NO_CHARGE = "local: no charge"
LOCAL_COST = f"{NO_CHARGE} (costs above are estimates for a different machine, by jobs.vcpu_usd_per_hour)"


def cost_lines(ledger: CycleLedger) -> list[str]:
    """Return a summary line and a table with one row per stage, followed by a row for the whole cycle."""
    rows = [HEAD, *(total_row(stage) for stage in ledger.stages()), total_row(ledger.total)]
    return [summary(ledger), *aligned(rows)]


def summary(ledger: CycleLedger, progress: str = "under way", *, is_local: bool = False) -> str:
    """Return a one-line summary: `cycle first: succeeded in 12m03s, deadline met | 8 of 8 jobs in 9 attempts | ...`."""
    state: str = progress if ledger.outcome == "open" else ledger.outcome
    state += "" if ledger.took_s is None else f" in {format_duration(ledger.took_s)}"
    preempted = f" ({ledger.total.preempted} preempted)" if ledger.total.preempted else ""
    fields = [
        ", ".join(text for text in (f"cycle {ledger.cycle}: {state}", DEADLINES[ledger.deadline]) if text),
        f"{ledger.succeeded} of {ledger.jobs} jobs in {len(ledger.entries)} attempts{preempted}",
        f"goodput {format_percent(ledger.total.goodput)}",
        money(ledger.total, is_local=is_local),
    ]
    return " | ".join(fields)


def money(total: Total, *, is_local: bool = False) -> str:
    """Return the cost as text, including how much of it was wasted."""
    if is_local:
        return NO_CHARGE
    if total.usd is None:
        return "cost unknown (jobs.prices, jobs.vcpu_usd_per_hour)"
    return f"{usd(total.usd)}, {usd(total.wasted_usd)} of it wasted"


def success_line(ledgers: Sequence[CycleLedger]) -> str:
    """Return how many cycles and jobs succeeded and how many deadlines were met.

    A cycle in which the gate refused the model counts as successful.
    """
    ended = [ledger for ledger in ledgers if ledger.outcome != "open"]
    due = [ledger for ledger in ended if ledger.deadline in ("met", "missed")]
    counts = {
        "cycles done": (sum(ledger.outcome in ("succeeded", "refused") for ledger in ended), len(ended)),
        "jobs succeeded": (
            sum(ledger.succeeded for ledger in ended),
            sum(ledger.succeeded + (0 if ledger.outcome == "refused" else ledger.failed) for ledger in ended),
        ),
        "deadlines met": (sum(ledger.deadline == "met" for ledger in due), len(due)),
    }
    return " | ".join(f"{done} of {all_} {label}" for label, (done, all_) in counts.items() if all_)


def total_lines(ledgers: Sequence[CycleLedger]) -> list[str]:
    """Return a summary line per cycle, a table with one row per cycle, and their success rates."""
    rows = [("cycle", *HEAD[1:]), *(total_row(ledger.total) for ledger in ledgers)]
    return [*map(summary, ledgers), *aligned(rows), success_line(ledgers)]


def total_row(total: Total) -> tuple[str, ...]:
    """Return the row of a stage or cycle, with cells in the order of HEAD."""
    times = (format_duration(total.machine_ms[kind] / 1000) if total.machine_ms[kind] else "-" for kind in SPENT)
    waited, machine = format_duration(total.waiting_ms / 1000), format_duration(total.all_ms / 1000)
    tries = attempts_text(total.tries, total.preempted)
    return (total.name, tries, waited, *times, machine, format_percent(total.goodput), usd(total.usd))


# Settings.


def value_text(name: str, value: Any) -> str:
    """Return the value of a setting as text to display, with secrets hidden."""
    shown = without_secret(name, value)
    if isinstance(shown, list) and all(isinstance(item, str) for item in shown):
        return shlex.join(shown)
    return shown if isinstance(shown, str) and shown and shown.isprintable() else json.dumps(shown)
