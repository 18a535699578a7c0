"""What the arrays that prepare and mine will take, from what earlier cycles took. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.cycle.outlook import VCPU, EmbedRun
from jobs.plan.cost import Prices, job_usd, machine_share
from jobs.plan.dag import Plan
from pipeline.core.format import aligned, format_duration, usd


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
        needs = job.resources
        machine = needs.instance_type or VCPU
        measured = [run for run in runs.get(job.name, ()) if run.machine == machine]
        seconds, source = None, "none measured on this machine"
        workers = max(1, job.array_size)
        if measured:
            rate = sum(run.titles for run in measured) / sum(run.machine_s for run in measured)
            share = machine_share(needs) if needs.instance_type else needs.vcpus
            seconds = amount.units / (rate * share * workers)
            cycles = "1 cycle" if len(measured) == 1 else f"{len(measured)} cycles"
            source = f"{rate:,.0f}/s of {machine}, measured in {cycles}, last {measured[-1].cycle}"
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
