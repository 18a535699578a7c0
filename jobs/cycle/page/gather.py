"""Gather the data for the report page of a cycle, which are also written to `reports/<cycle>.json` for other tools."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, ParamSpec, TypeVar

from pydantic import Field

from jobs.cycle.costs import CycleEvent, CycleLedger, read_cycle_events, read_ledger
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import (
    Closed,
    JobRecord,
    Outcome,
    exit_code,
    failed_task,
    is_skipped,
    preempted_attempts,
    reason_of,
)
from jobs.cycle.page.charts import Point, thin
from jobs.cycle.tables import logs_command, ran_seconds
from jobs.cycle.verdict import SEARCH, measures, reasons
from jobs.plan.spec import JobPlan
from jobs.settings import JobsConfig, differences
from pipeline.context import Figure, load_result
from pipeline.core.errors import DataError, GateRefused
from pipeline.core.format import natural_key
from pipeline.core.record import Record
from pipeline.core.secrets import without_secret
from pipeline.data.token_sets import PrepareDigest
from pipeline.data.token_sets import load_digest as load_prepared
from pipeline.embed.digest import VerifyDigest
from pipeline.embed.digest import load_digest as load_verified
from pipeline.evaluate.report import EvaluationReport, ScoreDigest, load_report
from pipeline.evaluate.report import load_digest as load_scores
from pipeline.health.check import NodeReport, from_json
from pipeline.io.storage import KeyNotFound, Storage
from pipeline.telemetry.events import EventName

STAGES = ("prepare", "health", "compile", "mine", "teach", "train", "evaluate", "embed", "verify")
MAIN_METRICS = (SEARCH, "ndcg@10")
"""Metrics that are stored in the index, so that they can be drawn over all cycles."""
MAX_ANCESTORS = 12
MAX_NOTICES = 200
NOTICES = frozenset(
    {
        EventName.STAGE_FAILED,
        EventName.STAGE_STOPPED,
        EventName.TRAIN_RESUMED,
        EventName.STEP_SKIPPED,
        EventName.ROWS_QUARANTINED,
        EventName.CACHE_REPAIRED,
        EventName.DEADLINE_AT_RISK,
        EventName.CHECKPOINT_FAILED,
        EventName.CHECKPOINT_REJECTED,
    }
)
LOSS = "loss"
_AT_STEPS = {LOSS: "losses", "gradient norm": "grad_norms"}
_AT_REPORTS = {
    "learning rate": "learning_rate",
    "samples a second": "samples_per_s",
    "share of time waiting for data": "data_wait_share",
    "memory, bytes": "memory_bytes",
}
HOLDOUT = "holdout loss"
P = ParamSpec("P")
T = TypeVar("T")


class Job(Record):
    """One job of the plan, with totals over its attempts."""

    name: str
    after: tuple[str, ...]
    state: str = Field(description="Recorded state, or `not submitted`")
    nodes: int
    children: int = Field(description="Number of array children (0: not an array)")
    tries: int
    preempted: int
    ran_s: float | None
    exit_code: int | None
    why: str
    error: str = Field("", description="The error in the log, a few lines (empty: the job did not run and fail)")
    logs: str = Field("", description="Command that shows this log (empty: the job did not run and fail)")
    is_skipped: bool = Field(False, description="Whether it did not run because a dependency did not succeed")

    @property
    def ending(self) -> str:
        """Return the state in lower case. A job in state FAILED is shown as `failed`, `refused` or `not run`."""
        if self.state == "FAILED":
            return "not run" if self.is_skipped else "refused" if self.exit_code == GateRefused.exit_code else "failed"
        return self.state.lower()


class ChartSeries(Record):
    """A training metric over steps, reduced to the points to draw. Steps that were repeated appear only once."""

    name: str
    now: tuple[Point, ...]
    smooth: tuple[Point, ...] = Field((), description="Running mean, for a loss only")
    before: tuple[Point, ...] = Field(
        (), description="The same metric in the cycle that trained the production model (a loss is smoothed)"
    )


class Notice(Record):
    """A notable event, such as a failure."""

    at: float = Field(description="Seconds since 1970")
    event: str
    step: int | None
    text: str


class Training(Record):
    """The training metrics and notable steps of the cycle."""

    curves: tuple[ChartSeries, ...]
    compared: str = Field("", description="Cycle that the `before` curves are from (empty: none)")
    resumed: tuple[int, ...] = Field((), description="Steps at which an attempt resumed")
    skipped: tuple[int, ...] = Field((), description="Steps whose gradients were discarded")


class Lineage(Record):
    """How the model was created: from which checkpoints, with which settings and code."""

    checkpoint: str = Field("", description="Storage prefix of the model of this cycle")
    ancestors: tuple[str, ...] = Field((), description="Checkpoints that the model was trained from, nearest first")
    began_from: str = Field(
        "", description="Published weights that training began from (empty: from scratch, or unknown)"
    )
    settings_hash: str = ""
    code_version: str = ""
    compared: str = Field("", description="Cycle that the settings are compared with")
    changed: tuple[tuple[str, str, str], ...] = Field(
        (), description="Settings that differ: (name, value in the other cycle, value in this cycle) as JSON"
    )


class PostMortemLink(Record):
    """The post-mortem of a failed attempt."""

    job: str
    uri: str


class CycleRow(Record):
    """The row of a cycle in the index, which is also used for the trends of later cycles."""

    cycle: str
    claimed_at: float = Field(description="Seconds since 1970")
    closed_at: float | None = Field(description="None: the cycle was running when this was written")
    target: str = Field("", description="Target of the jobs (empty: not on record)")
    outcome: Outcome | Literal["open"]
    promoted: bool
    without_comparison: bool = Field(False, description="Promoted without a comparison to a production model")
    reason: str
    metric: str = Field("", description="First metric of the gate")
    value: float | None = Field(None, description="Its value for the candidate")
    production: float | None = Field(None, description="Its value for the model in production at that time")
    bm25: float | None = Field(None, description="Value of BM25 for the metric SEARCH")
    metrics: Mapping[str, float] = Field({}, description="Values of MAIN_METRICS for the candidate")
    low: float | None = Field(None, description="Lower bound of the confidence interval of the value")
    high: float | None = None
    took_s: float | None
    machine_s: float
    usd: float | None
    wasted_usd: float | None
    goodput: float | None
    stage_s: Mapping[str, float] = Field(description="Machine seconds by stage")
    stage_usd: Mapping[str, float | None]
    rows: int | None
    drift: float | None = Field(None, description="Only set by earlier versions")

    @property
    def paid_usd(self) -> float | None:
        """Return the cost, or None if it is unknown or the jobs ran on a local machine."""
        return None if self.target == "local" else self.usd

    def value_of(self, metric: str) -> float | None:
        """Return the value of a metric for the candidate, or None if it is not stored."""
        return self.metrics.get(metric, self.value if metric == self.metric else None)


class PageData(Record):
    """All data on the page of a cycle. The results of stages that have not finished are None or empty."""

    schema_version: Literal[1] = 1
    cycle: str
    model: str
    workspace: str
    target: str = Field("", description="Target of the jobs (empty: not on record)")
    reason: str = Field(description="Reason for the outcome")
    ledger: CycleLedger
    jobs: tuple[Job, ...]
    figures: Mapping[str, Mapping[str, Figure]] = Field(description="Figures of the stages that have finished")
    evaluation: EvaluationReport | None
    scores: ScoreDigest | None
    training: Training
    prepared: PrepareDigest | None
    vectors: VerifyDigest | None
    machines: tuple[NodeReport, ...]
    lineage: Lineage
    notices: tuple[Notice, ...] = Field(description=f"The last {MAX_NOTICES} notable events")
    post_mortems: tuple[PostMortemLink, ...]
    unread: tuple[str, ...] = Field(description="Errors of files that could not be read")
    history: tuple[CycleRow, ...] = Field((), description="Earlier cycles, oldest first")

    @property
    def outcome(self) -> str:
        return self.ledger.outcome

    @property
    def promoted(self) -> bool:
        return bool(self.figures.get("evaluate", {}).get("promoted"))

    @property
    def why(self) -> str:
        """Return why the gate refused the model, the error of the first failed job, or the recorded reason."""
        if self.outcome == "refused" and self.evaluation and (lines := reasons(self.evaluation.verdict.checks)):
            return "; ".join(lines)
        errors = (job.error for job in self.jobs if job.error) if self.outcome == "failed" else ()
        return next((error.partition("\n")[0] for error in errors), self.reason)

    @property
    def without_comparison(self) -> bool:
        """Return whether a model was promoted without a comparison."""
        return bool(self.figures.get("evaluate", {}).get("without_comparison"))


def gather(
    store: CycleStore,
    plan: JobPlan,
    records: Sequence[JobRecord],
    config: JobsConfig,
    closed: Closed | None,
    *,
    without_report: bool = False,
) -> PageData:
    """Read the results of all stages. A damaged result is reported in `unread`, and the others are still read.

    `closed` and `without_report` are those of `read_ledger`.
    """
    storage, cycle, unread = store.storage, store.cycle, list[str]()

    def read(default: T, load: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return load(*args, **kwargs)
        except DataError as error:
            unread.append(error.seen)
            return default

    results = {stage: read(None, load_result, storage, cycle, stage) for stage in STAGES}
    figures = {stage: result.figures for stage, result in results.items() if result is not None}
    evaluation = read(None, load_report, storage, cycle)
    scores = read(None, load_scores, storage, cycle)
    if scores and evaluation and scores.candidate.digest != evaluation.candidate.digest:
        scores = None  # these are from an earlier candidate
    events = read_cycle_events(storage, cycle)
    ancestors = read((), _ancestors, storage, cycle)
    compared = evaluation.incumbent.cycle if evaluation and evaluation.incumbent else _cycle_of(ancestors[:1])
    compared = compared if compared != cycle else ""
    settings, before = (
        read({}, _json, storage, f"cycles/{name}/jobs/settings.json") if name else {} for name in (cycle, compared)
    )
    changed = sorted(differences(before, settings)) if before else ()
    recorded = [result for stage in ("evaluate", "train") if (result := results[stage]) is not None]
    nodes = [
        read(None, lambda key: from_json(storage.read_bytes(key), storage.uri(key)), stat.key)
        for stat in storage.list(f"cycles/{cycle}/health")
        if re.search(r"/health/[0-9]+-[^/]*\.json$", stat.key)
    ]
    curves, other = curves_of(events), curves_of(read_cycle_events(storage, compared) if compared else ())
    post_mortems = sorted((stat.key for stat in storage.list(store.key("post-mortem"))), key=natural_key)
    return PageData(
        cycle=cycle,
        target=claim.target if (claim := store.claim()) else "",
        model=json.dumps(settings.get("model_name", "")).strip('"'),
        workspace=storage.root,
        reason=closed.reason if closed else "",
        ledger=read_ledger(store, plan, records, config, closed=closed, without_report=without_report),
        jobs=tuple(jobs_of(plan, records)),
        figures=figures,
        evaluation=evaluation,
        scores=scores,
        training=Training(
            curves=tuple(
                ChartSeries(
                    name=name,
                    now=tuple(thin(points)),
                    smooth=tuple(thin(smoothed(points))) if name == LOSS else (),
                    before=tuple(thin(smoothed(other.get(name, ())) if name == LOSS else other.get(name, ()))),
                )
                for name, points in curves.items()
            ),
            compared=compared if other and curves else "",
            resumed=tuple(int(e.number("step")) for e in events if e.name == EventName.TRAIN_RESUMED),
            skipped=tuple(int(e.number("step")) for e in events if e.name == EventName.STEP_SKIPPED),
        ),
        prepared=read(None, load_prepared, storage, cycle),
        vectors=read(None, load_verified, storage, cycle),
        machines=tuple(sorted((node for node in nodes if node), key=lambda node: (node.node_rank, node.host))),
        lineage=Lineage(
            checkpoint=next((stage.outputs["checkpoint"] for stage in recorded if "checkpoint" in stage.outputs), ""),
            ancestors=ancestors,
            began_from=str(figures.get("train", {}).get("began_from", "")),
            settings_hash=recorded[0].settings_hash if recorded else "",
            code_version=recorded[0].code_version if recorded else "",
            compared=compared if before else "",
            changed=tuple(
                (name, json.dumps(without_secret(name, old)), json.dumps(without_secret(name, new)))
                for name, old, new in changed
            ),
        ),
        notices=tuple(_notices(events))[-MAX_NOTICES:],
        post_mortems=tuple(
            PostMortemLink(job=key.rpartition("/")[2].removesuffix(".json"), uri=storage.uri(key))
            for key in post_mortems
        ),
        unread=tuple(unread),
    )


def jobs_of(plan: JobPlan, records: Iterable[JobRecord]) -> Iterator[Job]:
    """Yield all jobs of a plan, including those that were not submitted."""
    by_name = {record.name: record for record in records}
    for spec in plan.jobs:
        record = by_name.get(spec.name)
        failed = failed_task(record) if record else None
        yield Job(
            name=spec.name,
            after=tuple(needed.job for needed in spec.depends_on),
            state=record.state.value if record else "not submitted",
            nodes=max(1, spec.num_nodes),
            children=spec.array_size,
            tries=len(record.all_attempts()) if record else 0,
            preempted=preempted_attempts(record) if record else 0,
            ran_s=ran_seconds(record) if record else None,
            exit_code=exit_code(record) if record else None,
            why=reason_of(record) if record and record.state.is_failure else "",
            error=failed.attempts[-1].error if failed else "",
            logs=logs_command(failed, plan.workspace, plan.cycle) if failed else "",
            is_skipped=record is not None and is_skipped(record),
        )


def _ancestors(storage: Storage, cycle: str) -> tuple[str, ...]:
    """Return the chain of checkpoints that the model was trained from, nearest first."""
    checkpoints: list[str] = []
    while cycle and len(checkpoints) < MAX_ANCESTORS:
        parent = _json(storage, f"cycles/{cycle}/train/parent.json").get("checkpoint")
        if not isinstance(parent, str) or parent in checkpoints:
            break
        checkpoints.append(parent)
        cycle = _cycle_of([parent])
    return tuple(checkpoints)


def _cycle_of(checkpoints: Sequence[str]) -> str:
    """Return the cycle of the first checkpoint, whose path is `checkpoints/<cycle>/step-<n>`.

    Return an empty string if the path has a different form or there is no checkpoint.
    """
    parts = checkpoints[0].split("/") if checkpoints else []
    return parts[1] if len(parts) == 3 and parts[0] == "checkpoints" else ""


def _json(storage: Storage, key: str) -> dict[str, Any]:
    """Read a JSON object. Return an empty dict if the file does not exist. Raises DataError if it is not JSON."""
    try:
        tree = json.loads(storage.read_bytes(key))
    except KeyNotFound:
        return {}
    except ValueError as error:
        raise DataError(f"{storage.uri(key)} is not JSON: {error}", expected="a file written by a job") from error
    return tree if isinstance(tree, dict) else {}


def _notices(events: Sequence[CycleEvent]) -> Iterator[Notice]:
    for event in events:
        if event.name in NOTICES:
            fields = (f"{name} {json.dumps(value)[:200]}" for name, value in event.fields.items() if name != "step")
            step = int(event.number("step")) if "step" in event.fields else None
            yield Notice(at=event.at_ms / 1000, event=event.name, step=step, text=", ".join(fields)[:500])


def curves_of(events: Sequence[CycleEvent]) -> dict[str, list[Point]]:
    """Return the training curves by metric, as (step, value) points. Repeated steps replace earlier ones."""
    curves: dict[str, list[Point]] = {name: [] for name in (*_AT_STEPS, HOLDOUT, *_AT_REPORTS)}

    def add(name: str, step: int, values: Any) -> None:
        """Add one value per step, the last one at `step`. Skip values that are not numbers, such as "nan"."""
        values = values if isinstance(values, list) else [values]
        steps = range(step - len(values) + 1, step + 1)
        curves[name] += [(at, float(v)) for at, v in zip(steps, values, strict=True) if isinstance(v, int | float)]

    for event in sorted(events, key=lambda event: event.at_ms):
        step = int(event.number("step"))
        if event.name == EventName.TRAIN_STARTED:
            for points in curves.values():
                points[:] = [point for point in points if point[0] <= step]
        elif event.name == EventName.TRAIN_STEPS:
            for name, field in (_AT_STEPS | _AT_REPORTS).items():
                add(name, step, event.fields.get(field))
        elif event.name == EventName.HOLDOUT_EVALUATED and "best" in event.fields:  # not of the candidate
            add(HOLDOUT, step, event.fields.get("loss"))
    return {name: points for name, points in curves.items() if points}


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the running mean over 1/40 of the points. The window is smaller at both ends."""
    sums, half, last = [0.0, *accumulate(value for _, value in points)], len(points) // 80, len(points)
    spans = ((max(0, i - half), min(last, i + half + 1)) for i in range(last))
    return [(x, (sums[end] - sums[start]) / (end - start)) for (x, _), (start, end) in zip(points, spans, strict=True)]


def row_of(store: CycleStore, data: PageData, closed: Closed | None) -> CycleRow:
    """Return the row of a cycle for the index."""
    claim, ledger, total = store.claim(), data.ledger, data.ledger.total
    metrics = measures(data.evaluation) if data.evaluation else []
    main, production = (metrics[0], metrics[0].others.get("production")) if metrics else (None, None)
    low, high = (main.low, main.high) if main and production is not None else (None, None)
    rows = data.figures.get("prepare", {}).get("rows")
    figures = data.evaluation.candidate.figures if data.evaluation else {}
    return CycleRow(
        cycle=data.cycle,
        claimed_at=claim.claimed_at if claim else 0.0,
        closed_at=closed.at if closed else None,
        target=data.target,
        outcome=ledger.outcome,
        promoted=data.promoted,
        without_comparison=data.without_comparison,
        reason=data.why[:500],
        metric=main.metric if main else "",
        value=main.candidate if main else None,
        production=production,
        bm25=next((measure.others.get("BM25") for measure in metrics if measure.metric == SEARCH), None),
        metrics={name: figures[name] for name in MAIN_METRICS if name in figures},
        low=None if low is None or production is None else production + low,
        high=None if high is None or production is None else production + high,
        took_s=ledger.took_s,
        machine_s=total.all_ms / 1000,
        usd=total.usd,
        wasted_usd=total.wasted_usd,
        goodput=total.goodput,
        stage_s={stage.name: stage.all_ms / 1000 for stage in ledger.stages()},
        stage_usd={stage.name: stage.usd for stage in ledger.stages()},
        rows=rows if isinstance(rows, int) else None,
    )
