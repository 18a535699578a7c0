"""Plans and records as tables, for people. Pure."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jobs.cycle.costs import SPENT, CycleLedger, Total, critical_seconds, sum_if_known
from jobs.cycle.job_states import JobRecord, JobState, exit_code, failed_task, reason_of, shown_state, without_error
from jobs.plan.resources import Prices, job_usd
from jobs.plan.spec import JobPlan, JobSpec
from pipeline.core.errors import GateRefused
from pipeline.core.format import aligned, format_duration, format_percent, usd
from pipeline.core.secrets import HIDDEN, is_secret, without_secret

STATUS = ("job", "state", "tries", "ran", "exit", "why")


def plan_lines(plan: JobPlan, seconds: Mapping[str, float], prices: Prices, sla_s: int | None) -> list[str]:
    """Return one row a job, and what the whole cycle will take as far as earlier ones tell."""
    rows: list[tuple[str, ...]] = [("job", "after", "shape", "vCPU", "MiB", "tries", "limit", "expected", "cost")]
    costs = [job_usd(job, seconds[job.name], prices) if job.name in seconds else None for job in plan.jobs]
    for job, job_cost in zip(plan.jobs, costs, strict=True):
        after, needs = ", ".join(one.job for one in job.depends_on) or "-", job.resources
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
    priced = "unknown (jobs.prices, jobs.vcpu_usd_per_hour)" if cost is None else usd(cost)
    lines.append(f"expected {format_duration(total)} from start to end without waiting for machines, {priced}")
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
    """Return one row a job; children of an array that failed get rows of their own. Errors are in failure_lines."""
    rows = [(*cells, without_error(why, records)) for *cells, why in status_rows(records)]
    return aligned([STATUS, *rows], left=(0, 1, 5))


def status_rows(records: Sequence[JobRecord]) -> list[tuple[str, ...]]:
    """Cells in the order of STATUS."""
    rows = list[tuple[str, ...]]()
    for job in records:
        for record in (job, *(child for child in job.children if child.state.is_failure)):
            state, code, why = shown_state(record), exit_code(record), record.status_reason
            if record.children:
                done = sum(child.state is JobState.SUCCEEDED for child in record.children)
                state += f" {done}/{len(record.children)}"
            if record.state.is_failure or (record.state is JobState.RUNNABLE and record.attempts and why):
                why = reason_of(record)  # it failed, or is tried again
            tries, ran = str(len(record.all_attempts())), format_duration(ran_seconds(record))
            is_well = record.state is JobState.SUCCEEDED
            rows.append((record.name, state, tries, ran, "-" if code is None else str(code), "" if is_well else why))
    return rows


NO_LOG = "its log is gone or cannot be read"


def failure_lines(records: Sequence[JobRecord], workspace: str, cycle: str, program: str = "trnjobs") -> list[str]:
    """Return the error of each job that failed by itself, and the command that shows its whole log."""
    lines = list[str]()
    for task in (task for record in records if (task := failed_task(record))):
        refused = exit_code(task) == GateRefused.exit_code
        what = "refused the model" if refused else f"failed, attempt {len(task.attempts)}"
        lines.append(f"{task.name} {what}:")
        lines += [f"  {line}" for line in task.attempts[-1].error.splitlines() or [NO_LOG]]
        lines.append(f"  log: {logs_command(task, workspace, cycle, program)}")
    return lines


def logs_command(task: JobRecord, workspace: str, cycle: str, program: str = "trnjobs") -> str:
    """Return the command that shows the log from which the error of a failed job was taken. `workspace`: its URI."""
    words = [program, "logs", task.name, "--workspace", workspace.removeprefix("file://"), "--cycle", cycle]
    node = task.attempts[-1].error_node
    return shlex.join([*words, "--node", str(node)] if node else words)


def ran_seconds(record: JobRecord) -> float | None:
    """From the start of the first try to the end of the last; None where it has not come to that."""
    starts = [attempt.started_at for attempt in record.all_attempts() if attempt.started_at is not None]
    ends = [attempt.stopped_at for attempt in record.all_attempts() if attempt.stopped_at is not None]
    return max(ends) - min(starts) if starts and ends else None


# Ledgers as tables for a terminal. Pure.

HEAD = ("stage", "tries", "waiting", *SPENT, "machine time", "goodput", "cost")
DEADLINES = {"met": "deadline met", "missed": "deadline MISSED", "open": "deadline ahead", "none": ""}
GOODPUT = (
    "goodput: machine time of kept productive work (steps, rows, vectors) over all machine time;"
    " waiting in a queue is not in it"
)
LOCAL_COST = "local: no charge; a cost above is that of another machine, by jobs.vcpu_usd_per_hour"


def cost_lines(ledger: CycleLedger) -> list[str]:
    """Return one row a stage, one for the cycle, and a line that sums it up."""
    rows = [HEAD, *(total_row(stage) for stage in ledger.stages()), total_row(ledger.total)]
    return [summary(ledger), *aligned(rows)]


def summary(ledger: CycleLedger, standing: str = "under way") -> str:
    """`cycle 2026-11-20: succeeded in 12m03s, deadline met | 8 of 8 jobs in 9 tries | goodput 61% | $0.12, ...`"""
    state: str = standing if ledger.outcome == "open" else ledger.outcome
    state += "" if ledger.took_s is None else f" in {format_duration(ledger.took_s)}"
    words = [
        ", ".join(word for word in (f"cycle {ledger.cycle}: {state}", DEADLINES[ledger.deadline]) if word),
        f"{ledger.succeeded} of {ledger.jobs} jobs in {len(ledger.entries)} tries",
        f"goodput {format_percent(ledger.total.goodput)}",
        money(ledger.total),
    ]
    return " | ".join(words)


def money(one: Total) -> str:
    """Return what it cost, and what of it was wasted."""
    if one.usd is None:
        return "cost unknown (jobs.prices, jobs.vcpu_usd_per_hour)"
    return f"{usd(one.usd)}, {usd(one.wasted_usd)} of it wasted"


def success_line(ledgers: Sequence[CycleLedger]) -> str:
    """Return how many cycles and jobs have succeeded, and deadlines were met.

    A refusal by the gate is a success of the cycle, and the jobs that it leaves out do not count.
    """
    ended = [one for one in ledgers if one.outcome != "open"]
    due = [one for one in ended if one.deadline in ("met", "missed")]
    counts = {
        "cycles done": (sum(one.outcome in ("succeeded", "refused") for one in ended), len(ended)),
        "jobs succeeded": (
            sum(one.succeeded for one in ended),
            sum(one.succeeded + (0 if one.outcome == "refused" else one.failed) for one in ended),
        ),
        "deadlines met": (sum(one.deadline == "met" for one in due), len(due)),
    }
    return " | ".join(f"{done} of {all_} {what}" for what, (done, all_) in counts.items() if all_)


def total_lines(ledgers: Sequence[CycleLedger]) -> list[str]:
    """Several cycles: each summed up, a row each, and their success rate."""
    rows = [("cycle", *HEAD[1:]), *(total_row(one.total) for one in ledgers)]
    return [*map(summary, ledgers), *aligned(rows), success_line(ledgers)]


def total_row(one: Total) -> tuple[str, ...]:
    times = (format_duration(one.machine_ms[kind] / 1000) if one.machine_ms[kind] else "-" for kind in SPENT)
    waited, whole = format_duration(one.waiting_ms / 1000), format_duration(one.all_ms / 1000)
    return (one.name, str(one.tries), waited, *times, whole, format_percent(one.goodput), usd(one.usd))


# Settings.


def value_text(name: str, value: Any) -> str:
    """Return the value of a setting for people, without secrets."""
    shown = without_secret(name, value)
    if isinstance(shown, list) and all(isinstance(one, str) for one in shown):
        return shlex.join(_without_secret_flags(shown))
    return shown if isinstance(shown, str) and shown and shown.isprintable() else json.dumps(shown)


def _without_secret_flags(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command with the values of `--api-key` and the like hidden."""
    is_hidden = False
    for word in words:
        name, equals, _ = word.partition("=")
        yield HIDDEN if is_hidden else f"{name}={HIDDEN}" if equals and is_secret(name) else word
        is_hidden = word.startswith("-") and not equals and is_secret(word)
