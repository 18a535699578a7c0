"""A cycle while it runs, from its records and the newest events. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.cycle.attempt_time import Moment
from jobs.cycle.ledger import SKEW_MS, CycleLedger
from jobs.cycle.records import Closed, JobRecord, JobState
from jobs.cycle.show import STATUS, status_rows
from jobs.plan.dag import Plan
from pipeline.core.format import format_count, format_duration, usd
from pipeline.telemetry.events import EventName

_SIGNS = {JobState.SUCCEEDED: "✓", JobState.FAILED: "✗", JobState.RUNNING: "●", JobState.STARTING: "●"}


@dataclass(frozen=True)
class LiveJob:
    name: str
    depth: int
    """Jobs in the longest chain before it."""
    sign: str
    state: str
    tries: str
    """`2/3`: the try it is at, and how many it has."""
    ran: str
    doing: str
    """What its newest events tell; of a job that has failed or waits, why."""


@dataclass(frozen=True)
class LiveCycle:
    head: str
    jobs: tuple[LiveJob, ...]
    last: str
    """The newest event."""


def live_cycle(
    plan: Plan,
    records: Sequence[JobRecord],
    moments: Sequence[Moment],
    ledger: CycleLedger,
    *,
    target: str,
    closed: Closed | None,
    now: float,
) -> LiveCycle:
    """The cycle as it is at `now`, in seconds since 1970. `moments`: at least the newest, in order of time."""
    found = {record.name: record for record in records}
    depths = _depths(plan)
    jobs = []
    for spec in plan.jobs:
        record = found.get(spec.name)
        if record is None:
            jobs.append(LiveJob(spec.name, depths[spec.name], "○", "not submitted", "", "", ""))
            continue
        row = dict(zip(STATUS, status_rows([record])[0], strict=True))
        ran, doing = row["ran"], row["why"]
        running = [leaf for leaf in record.leaves() if leaf.state is JobState.RUNNING and leaf.attempts]
        if running:
            started = min(leaf.attempts[-1].started_at or now for leaf in running)
            ran = format_duration(max(0.0, now - started))
            doing = doing_text(spec.stage, [one for one in moments if one.at_ms >= 1000 * started - SKEW_MS])
        sign = "●" if running else _SIGNS.get(record.state, "○")
        tries = f"{row['tries']}/{spec.retry.attempts}" if record.tries() and not record.children else row["tries"]
        jobs.append(LiveJob(spec.name, depths[spec.name], sign, row["state"], tries, ran, doing))
    return LiveCycle(_head(plan, ledger, target, closed, now), tuple(jobs), _last(moments, now))


def doing_text(stage: str, moments: Sequence[Moment]) -> str:
    """What a job that runs is at, from the events since its start: `step 120/2000 | loss 0.6931 | ...`."""
    newest: Mapping[str, Moment] = {moment.name: moment for moment in moments}
    if stage == "train" and (steps := newest.get(EventName.TRAIN_STEPS)):
        started = newest.get(EventName.TRAIN_STARTED)
        of = f"/{started.number('max_steps'):.0f}" if started else ""
        losses = steps.fields.get("losses")
        numbers = [loss for loss in losses if isinstance(loss, int | float)] if isinstance(losses, list) else []
        loss = f"{sum(numbers) / len(numbers):.4f}" if numbers else "-"
        return " | ".join(
            (
                f"step {steps.number('step'):.0f}{of}",
                f"loss {loss}",
                f"{format_count(steps.number('samples_per_s'))} samples/s",
                f"eta {format_duration(steps.number('eta_s'))}",
            )
        )
    if stage == "embed" and (begun := newest.get(EventName.EMBED_STARTED)):
        parts = sum(one.name == EventName.PART_EMBEDDED and one.at_ms >= begun.at_ms for one in moments)
        return f"part {begun.number('done') + parts:.0f}/{begun.number('parts'):.0f}"
    return ""


def plain_lines(view: LiveCycle, before: LiveCycle | None) -> list[str]:
    """What is new since `before`, one line each; everything where there is none."""
    earlier = set(before.jobs) if before else set[LiveJob]()
    known = {(job.name, job.state, job.tries, job.doing) for job in earlier}
    lines = [view.head] if before is None else []
    for job in view.jobs:
        if (job.name, job.state, job.tries, job.doing) not in known:
            lines.append("  ".join(word for word in (job.sign, job.name, job.state, job.tries, job.doing) if word))
    return lines


def _head(plan: Plan, ledger: CycleLedger, target: str, closed: Closed | None, now: float) -> str:
    state = closed.outcome if closed else "under way"
    all_jobs = sum(max(1, job.array_size) for job in plan.jobs)
    words = [f"cycle {ledger.cycle} on {target}: {state}", f"{ledger.succeeded} of {all_jobs} jobs done"]
    end = closed.at if closed else now
    if ledger.began_at is not None:
        words.append(f"for {format_duration(max(0.0, end - ledger.began_at))}")
    if ledger.deadline_at is not None:
        left = ledger.deadline_at - end
        words.append(f"deadline in {format_duration(left)}" if left >= 0 else f"{format_duration(-left)} LATE")
    cost = ledger.total.usd
    return " | ".join([*words, f"{usd(cost)} so far" if cost is not None else "cost unknown"])


def _last(moments: Sequence[Moment], now: float) -> str:
    if not moments:
        return ""
    one = moments[-1]
    stage = one.fields.get("stage")
    name = one.name.replace("_", " ") + (f" ({stage})" if isinstance(stage, str) else "")
    return f"last event: {name}, {format_duration(max(0.0, now - one.at_ms / 1000))} ago"


def _depths(plan: Plan) -> dict[str, int]:
    depths: dict[str, int] = {}
    for job in plan.jobs:  # each after those it depends on
        depths[job.name] = max((1 + depths[one.job] for one in job.depends_on if one.job), default=0)
    return depths
