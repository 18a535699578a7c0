"""What the page of a cycle shows, gathered once: also `reports/<cycle>.json`, for other tools."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, ParamSpec, TypeVar

from pydantic import Field

from jobs.cycle.costs import CycleEvent, CycleLedger, read_cycle_events
from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import Closed, JobRecord, Outcome, exit_code, failed_task, reason_of
from jobs.cycle.page.charts import Point, thin
from jobs.cycle.tables import logs_command, ran_seconds
from jobs.cycle.verdict import SEARCH, measures, reasons
from jobs.plan.spec import JobPlan
from jobs.settings import differences
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

STAGES = ("prepare", "health", "compile", "mine", "train", "evaluate", "embed", "verify")
MAIN_METRICS = (SEARCH, "ndcg@10")
"""Stored for the lines over all cycles."""
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
    """One job of the plan, with all its tries."""

    name: str
    after: tuple[str, ...]
    state: str = Field(description="As on record; not submitted before")
    nodes: int
    children: int = Field(description="Of an array; 0: none")
    tries: int
    ran_s: float | None
    exit_code: int | None
    why: str
    error: str = Field("", description="What the log of a job that failed by itself says, in a few lines")
    logs: str = Field("", description="The command that shows this log; empty: it did not fail by itself")

    @property
    def ending(self) -> str:
        """As on record; a job that was left out because of another one has not failed itself."""
        if self.state == "FAILED":
            return "not run" if not self.tries else "refused" if self.exit_code == GateRefused.exit_code else "failed"
        return self.state.lower()


class ChartSeries(Record):
    """A figure of training over its steps, thinned to what can be drawn; what was done again counts once."""

    name: str
    now: tuple[Point, ...]
    smooth: tuple[Point, ...] = Field((), description="Of a loss: its running mean, thinned too")
    before: tuple[Point, ...] = Field((), description="Of the cycle that trained the model in production, smoothed too")


class Notice(Record):
    """An event that somebody may want to know of."""

    at: float = Field(description="Seconds since 1970")
    event: str
    step: int | None
    text: str


class Training(Record):
    curves: tuple[ChartSeries, ...]
    compared: str = Field("", description="The cycle of the `before` curves; empty: none")
    resumed: tuple[int, ...] = Field((), description="Steps at which a try went on")
    skipped: tuple[int, ...] = Field((), description="Steps whose gradients were not used")


class Lineage(Record):
    checkpoint: str = Field("", description="Prefix of the model of this cycle")
    ancestors: tuple[str, ...] = Field((), description="Checkpoints it was trained from, the nearest first")
    began_from: str = Field("", description="Published weights at the root; empty: scratch, or not known")
    settings_hash: str = ""
    code_version: str = ""
    compared: str = Field("", description="The cycle whose settings are compared")
    changed: tuple[tuple[str, str, str], ...] = Field((), description="(setting, there, here), values as JSON")


class PostMortemLink(Record):
    job: str
    uri: str


class CycleRow(Record):
    """A cycle in one line of the index, and in the trends of later ones."""

    cycle: str
    claimed_at: float = Field(description="Seconds since 1970")
    closed_at: float | None = Field(description="None: under way when this was written")
    target: str = Field("", description="The platform it ran on; empty: not on record")
    outcome: Outcome | Literal["open"]
    promoted: bool
    without_comparison: bool = Field(False, description="Promoted although nothing judged it")
    reason: str
    metric: str = Field("", description="The first that the gate judges")
    value: float | None = Field(None, description="Of the candidate")
    production: float | None = Field(None, description="Of the model that was in production then")
    bm25: float | None = Field(None, description="What BM25 reached in search, by the metric SEARCH")
    metrics: Mapping[str, float] = Field({}, description="Those of MAIN_METRICS that were measured, of the candidate")
    low: float | None = Field(None, description="The interval of the difference to production, put around the value")
    high: float | None = None
    took_s: float | None
    machine_s: float
    usd: float | None
    wasted_usd: float | None
    goodput: float | None
    stage_s: Mapping[str, float] = Field(description="Machine seconds by stage")
    stage_usd: Mapping[str, float | None]
    rows: int | None
    drift: float | None = Field(None, description="Of cycles of earlier versions")

    @property
    def paid_usd(self) -> float | None:
        """Return the cost; None if it is not known or nobody pays for it: a machine of one's own."""
        return None if self.target == "local" else self.usd

    def value_of(self, metric: str) -> float | None:
        """Return the candidate's value of a metric; None if it was not measured or not stored."""
        return self.metrics.get(metric, self.value if metric == self.metric else None)


class PageData(Record):
    """Everything on the page of a cycle. A part that its stage has not left is None or empty."""

    schema_version: Literal[1] = 1
    cycle: str
    model: str
    workspace: str
    target: str = Field("", description="The platform it ran on; empty: not on record")
    reason: str = Field(description="Why the cycle ended as it did")
    ledger: CycleLedger
    jobs: tuple[Job, ...]
    figures: Mapping[str, Mapping[str, Figure]] = Field(description="By stage, of those that have finished")
    evaluation: EvaluationReport | None
    scores: ScoreDigest | None
    training: Training
    prepared: PrepareDigest | None
    vectors: VerifyDigest | None
    machines: tuple[NodeReport, ...]
    lineage: Lineage
    notices: tuple[Notice, ...] = Field(description=f"The last {MAX_NOTICES}")
    post_mortems: tuple[PostMortemLink, ...]
    unread: tuple[str, ...] = Field(description="What could not be read, and why")
    history: tuple[CycleRow, ...] = Field((), description="Cycles before this one, oldest first")

    @property
    def outcome(self) -> str:
        return self.ledger.outcome

    @property
    def promoted(self) -> bool:
        return bool(self.figures.get("evaluate", {}).get("promoted"))

    @property
    def why(self) -> str:
        """In words: why the gate refused the model, what the first failed job says, or the reason on record."""
        if self.outcome == "refused" and self.evaluation and (lines := reasons(self.evaluation.verdict.checks)):
            return "; ".join(lines)
        errors = (job.error for job in self.jobs if job.error) if self.outcome == "failed" else ()
        return next((error.partition("\n")[0] for error in errors), self.reason)

    @property
    def without_comparison(self) -> bool:
        """True if a model was promoted that nothing could be compared with."""
        return bool(self.figures.get("evaluate", {}).get("without_comparison"))


def gather(
    store: CycleStore, plan: JobPlan, ledger: CycleLedger, records: Sequence[JobRecord], closed: Closed | None
) -> PageData:
    """Read what the stages have left. A result that is damaged is told of, and does not hide the others."""
    storage, cycle, unread = store.storage, store.cycle, list[str]()

    def read(otherwise: T, load: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return load(*args, **kwargs)
        except DataError as error:
            unread.append(error.seen)
            return otherwise

    results = {stage: read(None, load_result, storage, cycle, stage) for stage in STAGES}
    figures = {stage: result.figures for stage, result in results.items() if result is not None}
    evaluation = read(None, load_report, storage, cycle)
    scores = read(None, load_scores, storage, cycle)
    if scores and evaluation and scores.candidate.digest != evaluation.candidate.digest:
        scores = None  # of another candidate, that was judged before
    events = read_cycle_events(storage, cycle)
    ancestors = read((), _ancestors, storage, cycle)
    compared = evaluation.incumbent.cycle if evaluation and evaluation.incumbent else _cycle_of(ancestors[:1])
    compared = compared if compared != cycle else ""
    settings, before = (
        read({}, _json, storage, f"cycles/{name}/jobs/settings.json") if name else {} for name in (cycle, compared)
    )
    changed = sorted(differences(before, settings)) if before else ()
    made = [result for stage in ("evaluate", "train") if (result := results[stage]) is not None]
    nodes = [
        read(None, lambda key: from_json(storage.read_bytes(key), storage.uri(key)), stat.key)
        for stat in storage.list(f"cycles/{cycle}/health")
        if re.search(r"/health/[0-9]+-[^/]*\.json$", stat.key)
    ]
    curves, other = curves_of(events), curves_of(read_cycle_events(storage, compared) if compared else ())
    mortems = sorted((stat.key for stat in storage.list(store.key("post-mortem"))), key=natural_key)
    return PageData(
        cycle=cycle,
        target=claim.target if (claim := store.claim()) else "",
        model=json.dumps(settings.get("model_name", "")).strip('"'),
        workspace=storage.root,
        reason=closed.reason if closed else "",
        ledger=ledger,
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
            resumed=tuple(int(m.number("step")) for m in events if m.name == EventName.TRAIN_RESUMED),
            skipped=tuple(int(m.number("step")) for m in events if m.name == EventName.STEP_SKIPPED),
        ),
        prepared=read(None, load_prepared, storage, cycle),
        vectors=read(None, load_verified, storage, cycle),
        machines=tuple(sorted((one for one in nodes if one), key=lambda one: (one.node_rank, one.host))),
        lineage=Lineage(
            checkpoint=next((one.outputs["checkpoint"] for one in made if "checkpoint" in one.outputs), ""),
            ancestors=ancestors,
            began_from=str(figures.get("train", {}).get("began_from", "")),
            settings_hash=made[0].settings_hash if made else "",
            code_version=made[0].code_version if made else "",
            compared=compared if before else "",
            changed=tuple(
                (name, json.dumps(without_secret(name, old)), json.dumps(without_secret(name, new)))
                for name, old, new in changed
            ),
        ),
        notices=tuple(_notices(events))[-MAX_NOTICES:],
        post_mortems=tuple(
            PostMortemLink(job=key.rpartition("/")[2].removesuffix(".json"), uri=storage.uri(key)) for key in mortems
        ),
        unread=tuple(unread),
    )


def jobs_of(plan: JobPlan, records: Iterable[JobRecord]) -> Iterator[Job]:
    """Yield the jobs of a plan, whether they were submitted or not."""
    found = {record.name: record for record in records}
    for spec in plan.jobs:
        record = found.get(spec.name)
        failed = failed_task(record) if record else None
        yield Job(
            name=spec.name,
            after=tuple(one.job for one in spec.depends_on),
            state=record.state.value if record else "not submitted",
            nodes=max(1, spec.num_nodes),
            children=spec.array_size,
            tries=len(record.all_attempts()) if record else 0,
            ran_s=ran_seconds(record) if record else None,
            exit_code=exit_code(record) if record else None,
            why=reason_of(record) if record and record.state.is_failure else "",
            error=failed.attempts[-1].error if failed else "",
            logs=logs_command(failed, plan.workspace, plan.cycle) if failed else "",
        )


def _ancestors(storage: Storage, cycle: str) -> tuple[str, ...]:
    """Return checkpoints by what each cycle pinned as the model it starts from."""
    found: list[str] = []
    while cycle and len(found) < MAX_ANCESTORS:
        parent = _json(storage, f"cycles/{cycle}/train/parent.json").get("checkpoint")
        if not isinstance(parent, str) or parent in found:
            break
        found.append(parent)
        cycle = _cycle_of([parent])
    return tuple(found)


def _cycle_of(checkpoints: Sequence[str]) -> str:
    """Return the cycle that made checkpoints/<cycle>/step-<n>; empty for another place, and for none."""
    words = checkpoints[0].split("/") if checkpoints else []
    return words[1] if len(words) == 3 and words[0] == "checkpoints" else ""


def _json(storage: Storage, key: str) -> dict[str, Any]:
    """Return a JSON object; empty if there is none. Raises DataError."""
    try:
        tree = json.loads(storage.read_bytes(key))
    except KeyNotFound:
        return {}
    except ValueError as error:
        raise DataError(f"{storage.uri(key)} is no JSON: {error}", expected="what a job wrote there") from error
    return tree if isinstance(tree, dict) else {}


def _notices(events: Sequence[CycleEvent]) -> Iterator[Notice]:
    for moment in events:
        if moment.name in NOTICES:
            words = (f"{name} {json.dumps(value)[:200]}" for name, value in moment.fields.items() if name != "step")
            step = int(moment.number("step")) if "step" in moment.fields else None
            yield Notice(at=moment.at_ms / 1000, event=moment.name, step=step, text=", ".join(words)[:500])


def curves_of(events: Sequence[CycleEvent]) -> dict[str, list[Point]]:
    """Return points (step, value) by the name of the figure; what was done again replaces what it repeats."""
    found: dict[str, list[Point]] = {name: [] for name in (*_AT_STEPS, HOLDOUT, *_AT_REPORTS)}

    def add(name: str, step: int, values: Any) -> None:
        """Add numbers at the steps up to `step`; other values, such as "nan", are left out."""
        values = values if isinstance(values, list) else [values]
        steps = range(step - len(values) + 1, step + 1)
        found[name] += [(at, float(v)) for at, v in zip(steps, values, strict=True) if isinstance(v, int | float)]

    for moment in sorted(events, key=lambda one: one.at_ms):
        step = int(moment.number("step"))
        if moment.name == EventName.TRAIN_STARTED:
            for points in found.values():
                points[:] = [point for point in points if point[0] <= step]
        elif moment.name == EventName.TRAIN_STEPS:
            for name, field in (_AT_STEPS | _AT_REPORTS).items():
                add(name, step, moment.fields.get(field))
        elif moment.name == EventName.HOLDOUT_EVALUATED and moment.fields.get("split") == "valid":
            add(HOLDOUT, step, moment.fields.get("loss"))
    return {name: points for name, points in found.items() if points}


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Return the mean of each point and those around it, a fortieth of all of them; fewer at both ends."""
    sums, half, last = [0.0, *accumulate(value for _, value in points)], len(points) // 80, len(points)
    spans = ((max(0, i - half), min(last, i + half + 1)) for i in range(last))
    return [(x, (sums[end] - sums[start]) / (end - start)) for (x, _), (start, end) in zip(points, spans, strict=True)]


def row_of(store: CycleStore, data: PageData, closed: Closed | None) -> CycleRow:
    claim, ledger, total = store.claim(), data.ledger, data.ledger.total
    found = measures(data.evaluation) if data.evaluation else []
    main, production = (found[0], found[0].others.get("production")) if found else (None, None)
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
        bm25=next((one.others.get("BM25") for one in found if one.metric == SEARCH), None),
        metrics={name: figures[name] for name in MAIN_METRICS if name in figures},
        low=None if low is None or production is None else production + low,
        high=None if high is None or production is None else production + high,
        took_s=ledger.took_s,
        machine_s=total.all_ms / 1000,
        usd=total.usd,
        wasted_usd=total.wasted_usd,
        goodput=total.goodput,
        stage_s={one.name: one.all_ms / 1000 for one in ledger.stages()},
        stage_usd={one.name: one.usd for one in ledger.stages()},
        rows=rows if isinstance(rows, int) else None,
    )
