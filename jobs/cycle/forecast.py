"""What a cycle will take, from what earlier ones took. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jobs.cycle.job_records import JobRecord, JobState
from jobs.plan.cost import Prices, job_usd, machine_share
from jobs.plan.dag import Plan
from jobs.plan.spec import JobSpec
from pipeline.core.format import aligned, format_count, format_duration, usd
from pipeline.core.machines import usd_per_million


def expected_seconds(history: Iterable[Iterable[JobRecord]]) -> dict[str, float]:
    """Median seconds by job, over the cycles given: of the try that succeeded, of an array the longest child.

    A job that never succeeded is missing.
    """
    seen: dict[str, list[float]] = {}
    for record in (one for records in history for one in records):
        last = [leaf.attempts[-1].seconds for leaf in record.leaves() if leaf.attempts and leaf.state == "SUCCEEDED"]
        known = [seconds for seconds in last if seconds is not None]
        if len(known) == len(record.leaves()):
            seen.setdefault(record.name, []).append(max(known))
    return {name: statistics.median(values) for name, values in seen.items()}


def critical_seconds(plan: Plan, seconds: Mapping[str, float]) -> float | None:
    """From the first job to the end of the last, without waiting for machines; None when one is unknown."""
    ends: dict[str, float] = {}
    for job in plan.jobs:  # each after those it depends on
        if job.name not in seconds:
            return None
        ends[job.name] = seconds[job.name] + max((ends[one.job] for one in job.depends_on), default=0.0)
    return max(ends.values(), default=0.0)


# What embedding costs on one kind of machine and on another, from what was measured or stated. Pure.
#
# A rate is titles embedded in a second of one machine, over the whole of its time: start-up, reading, compiling and
# tries that failed are in it, as they are in the bill. Machines without a type count by the vCPU, as their prices do.

EMBED = "embed"
VCPU = "1 vCPU"


@dataclass(frozen=True)
class EmbedRun:
    """The embedding of one cycle, or its preparing or mining: then `titles` are rows or queries.

    `machine`: an instance type or VCPU.
    """

    cycle: str
    machine: str
    titles: int
    machine_s: float


def counted_on(job: JobSpec) -> tuple[str, float]:
    """The machine by which a job is counted, and how many of them a node of it is: vCPUs where it has no type."""
    needs = job.resources
    return (needs.instance_type, machine_share(job)) if needs.instance_type else (VCPU, needs.vcpus)


def embed_run(cycle: str, job: JobSpec, record: JobRecord, titles: int) -> EmbedRun | None:
    """What an embedding that has succeeded tells; None where it embedded nothing, or not all its times are known."""
    times = [attempt.seconds for attempt in record.tries()]
    seconds = sum(time for time in times if time is not None)
    if record.state is not JobState.SUCCEEDED or None in times or titles < 1 or seconds <= 0:
        return None
    machine, share = counted_on(job)
    return EmbedRun(cycle, machine, titles, seconds * share)


def measured_rate(runs: Sequence[EmbedRun], machine: str) -> tuple[float, str] | None:
    """Units a second on this machine, and in how many cycles that was; None where none ran on it."""
    measured = [run for run in runs if run.machine == machine]
    if not measured:
        return None
    rate = sum(run.titles for run in measured) / sum(run.machine_s for run in measured)
    return rate, f"{len(measured)} cycle{'s' if len(measured) > 1 else ''}, last {measured[-1].cycle}"


def embed_rate_lines(plan: Plan, runs: Sequence[EmbedRun], stated: Mapping[str, float], prices: Prices) -> list[str]:
    """Side by side the machine that this plan embeds on, vCPUs, the machine that it trains on, and those of which a
    rate is known; nothing where nothing is known and there is nothing to compare.

    `runs`: oldest first. `stated`: titles a second by machine, for what was not measured.
    """
    planned, trains_on = (plan.job(name).resources.instance_type or VCPU for name in (EMBED, "train"))
    known = sorted({run.machine for run in runs} | stated.keys())
    machines = dict.fromkeys((planned, VCPU, trains_on, *known))
    if len(machines) == 1 and not known:
        return []
    rows: list[tuple[str, ...]] = [("embed on", "titles/s", "a million titles", "rate")]
    for machine in machines:
        rate, source = stated.get(machine), "no rate known"
        if measured := measured_rate(runs, machine):
            rate, cycles = measured
            source = f"measured in {cycles}"
        elif machine in stated:
            source = f"stated in {'jobs.vcpu_titles_per_s' if machine == VCPU else 'jobs.titles_per_s'}"
        price = prices.of_vcpu() if machine == VCPU else prices.of_machine(machine)
        cost = None if price is None or rate is None else usd_per_million(price, 1_000_000, 1e6 / rate)
        name = f"{machine} (this plan)" if machine == planned else machine
        rows.append((name, format_count(rate), usd(cost), source))
    return aligned(rows, left=(0, 3))


# What the arrays that prepare and mine will take.


@dataclass(frozen=True)
class Amount:
    """The work of one array: `units` rows or queries, so many in a part, and where the number is from."""

    units: int
    per_part: int
    source: str


def array_lines(
    plan: Plan, amounts: Mapping[str, Amount], runs: Mapping[str, Sequence[EmbedRun]], prices: Prices
) -> list[str]:
    """One row an array: its work, parts, the time of each worker, the cost, and the rate that both are from.

    `runs`: by job, what earlier cycles took on any machine, oldest first; only those of the planned one count.
    """
    rows: list[tuple[str, ...]] = [("array", "work", "parts", "workers", "each takes", "cost", "rate")]
    for job in plan.jobs:
        amount = amounts.get(job.name)
        if amount is None:
            continue
        (machine, share), workers = counted_on(job), max(1, job.array_size)
        seconds, source = None, "none measured on this machine"
        if measured := measured_rate(runs.get(job.name, ()), machine):
            rate, cycles = measured
            seconds = amount.units / (rate * share * workers)
            source = f"{rate:,.0f}/s of {machine}, measured in {cycles}"
        rows.append(
            (
                job.name,
                f"{amount.units:,} {amount.source}",
                f"{-(-amount.units // amount.per_part):,}",
                str(workers),
                format_duration(seconds),
                usd(None if seconds is None else job_usd(job, seconds, prices)),
                source,
            )
        )
    return aligned(rows, left=(0, 1, 6)) if len(rows) > 1 else []
