"""What an evaluation found, as one record: `cycles/<cycle>/evaluate/report.json`."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.format import aligned
from pipeline.core.record import Record
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck, Verdict
from pipeline.evaluate.metrics.measure import MetricReport, SliceReport
from pipeline.io.storage import Storage, read_record


class HybridReport(Record):
    """Search of a model fused with that of BM25."""

    name: Literal["rrf", "weighted"] = Field(description="By reciprocal ranks, or by a weighted mean of scores")
    weight: float | None = Field(None, description="Of the vectors, the rest of BM25; of the weighted fusion only")
    valid_queries: int = Field(0, description="Queries of the valid split from which the weight was chosen")
    retrieval: MetricReport | None = None
    missing: str = Field("", description="Why there is none")


class BaselineReport(Record):
    """A simple tool on the holdout."""

    name: Literal["bm25", "boosting"]
    scores: str = Field("", description="Key of its scores in the workspace; it is shared by cycles")
    metrics: MetricReport | None = Field(None, description="Of rows")
    retrieval: MetricReport | None = None
    threshold: float | None = Field(None, description="As of a model")
    missing: str = Field("", description="Why it was not scored")
    weak: str = Field("", description="Why it is no proof to beat it")

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of rows or of retrieval by name."""
        return {name: value for part in (self.metrics, self.retrieval) if part for name, value in part.values.items()}


class ModelReport(Record):
    """One model on the holdout."""

    retired: ClassVar[Mapping[str, Any]] = {"retrieval_by_width": ...}

    checkpoint: str = Field(description="URI")
    digest: str
    cycle: str
    step: int
    began_from: str = Field("", description="Published weights that its lineage began from; empty: scratch, or unknown")
    scores: str = Field(description="Key of its scores in the workspace")
    metrics: MetricReport
    retrieval: MetricReport | None = Field(description="None when retrieval is not evaluated")
    ndcg_by_width: dict[int, float] = Field(
        {},
        description="nDCG of retrieval with vectors cut to so many leading dimensions (evaluate.retrieval.dimensions)",
    )
    hybrids: tuple[HybridReport, ...] = ()
    slices: tuple[SliceReport, ...]
    threshold: float | None = Field(description="Probability from which a row is called a match; of two classes only")

    @property
    def figures(self) -> dict[str, float]:
        return self.metrics.values | (self.retrieval.values if self.retrieval else {})


class HoldoutReport(Record):
    """What was scored."""

    split: str
    partitions: tuple[str, ...]
    new_partitions: tuple[str, ...] = Field(description="Those the incumbent was not trained on")
    rows: int
    rows_in_split: int = Field(description="Before evaluate.max_rows")
    queries: int
    leaked_by_id: int = Field(description="Queries that were trained on")
    leaked_by_text: int = Field(description="Further ones whose text was trained on under another id")
    leak_checked: bool
    unchecked_partitions: tuple[str, ...] = Field(description="Trained on, and not prepared any more")
    retrieval_queries: int = 0
    retrieval_items: int = 0


class EvaluationReport(Record):
    """All figures of one evaluation."""

    schema_version: Literal[1] = 1
    cycle: str
    inputs: dict[str, str] = Field(description="What was judged by what: fingerprints by name")
    backend: str
    device: str
    precision: str
    candidate: ModelReport
    incumbent: ModelReport | None
    baselines: tuple[BaselineReport, ...] = ()
    holdout: HoldoutReport
    verdict: Verdict
    warnings: tuple[str, ...]
    seconds: dict[str, float] = Field(description="By part of the work, of the attempt that finished it")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def figures(self) -> dict[str, float]:
        """Metrics of the candidate by name; those of the others with a prefix."""
        others = {"incumbent": self.incumbent.figures} if self.incumbent else {}
        others |= {f"hybrid_{one.name}": one.retrieval.values for one in self.candidate.hybrids if one.retrieval}
        others |= {one.name: one.figures for one in self.baselines}
        theirs = {f"{who}_{name}": value for who, found in others.items() for name, value in found.items()}
        return self.candidate.figures | theirs


def report_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/report.json"


def store_report(workspace: Storage, report: EvaluationReport) -> None:
    workspace.write_bytes(report_key(report.cycle), report.model_dump_json(indent=1).encode() + b"\n")


def load_report(workspace: Storage, cycle: str) -> EvaluationReport | None:
    """The report of a cycle; None when there is none. Raises DataError when it cannot be read."""
    key = report_key(cycle)
    return read_record(workspace, key, EvaluationReport, "an evaluation report", f"trnpipe evaluate --cycle {cycle}")


# What a terminal shows of an evaluation: models and baselines side by side, slices that matter, the verdict. Pure.

_SLICES_SHOWN = 5
_NOTHING = "-"


def table_lines(report: EvaluationReport) -> list[str]:
    baselines = [one for one in report.baselines if not one.missing]
    # Each end of an interval holds alone with the one-sided confidence, so both together with less.
    interval = f"{2 * report.verdict.confidence - 1:.0%} interval"
    tools = (one.name for one in baselines)
    table = [("metric", "candidate", "incumbent", "difference", interval, *tools, "gate")]
    # Every metric of either model, in the order of reports.
    reports = [part for _, model in _roles(report) for part in (model.metrics, model.retrieval) if part is not None]
    names = [name for part in reports[:1] for name in (*part.values, *part.missing)]
    for name in dict.fromkeys([*names, *(name for part in reports for name in part.values)]):
        ours = report.candidate.figures.get(name)
        theirs = report.incumbent.figures.get(name) if report.incumbent else None
        checks = [check for check in report.verdict.checks if check.metric == name and not check.slice]
        delta = next((check for check in checks if check.kind == "delta"), None)
        found = [check.outcome for check in checks]
        table.append(
            (
                name,
                _number(ours),
                _number(theirs),
                _number(_difference(ours, theirs), "+"),
                _interval(delta),
                *(_number(one.figures.get(name)) for one in baselines),
                next((outcome for outcome in ("fail", "warn", "skipped", "pass") if outcome in found), ""),
            )
        )
    details = [*_missing(report), *_width_lines(report), *_hybrid_lines(report), *_slice_lines(report)]
    return [*_table(table), *details, *report.verdict.lines()]


def _roles(report: EvaluationReport) -> list[tuple[str, ModelReport]]:
    return [("candidate", report.candidate), *([("incumbent", report.incumbent)] if report.incumbent else [])]


def _missing(report: EvaluationReport) -> list[str]:
    """Why a metric is not there; those with one reason on one line."""
    lines = []
    for role, model in _roles(report):
        reasons: dict[str, list[str]] = {}
        for part in (model.metrics, model.retrieval):
            for name, reason in part.missing.items() if part else ():
                reasons.setdefault(reason, []).append(name)
        lines += [f"not computed for the {role}: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    return [*lines, *(f"{one.name} was not scored: {one.missing}" for one in report.baselines if one.missing)]


def _width_lines(report: EvaluationReport) -> list[str]:
    return [
        f"search of the {role} with vectors cut to {width} dimensions: nDCG {ndcg:.4f}"
        for role, model in _roles(report)
        for width, ndcg in model.ndcg_by_width.items()
    ]


def _hybrid_lines(report: EvaluationReport) -> list[str]:
    """Search of each model fused with BM25, beside both alone."""
    fused = [(role, one) for role, model in _roles(report) for one in model.hybrids]
    if not fused:
        return []
    columns = [(role, model.retrieval.values) for role, model in _roles(report) if model.retrieval]
    columns += [(one.name, one.retrieval.values) for one in report.baselines if one.retrieval]
    for role, one in fused:
        if one.retrieval:
            weight = "" if one.weight is None else f" {one.weight:g}"
            columns.append((f"{role} {one.name}{weight}", one.retrieval.values))
    missing = dict.fromkeys(one.missing for _, one in fused if one.missing)
    return [*_beside("hybrid search: each model fused with BM25", columns), *missing]


def _beside(title: str, columns: Sequence[tuple[str, Mapping[str, float]]]) -> list[str]:
    names = dict.fromkeys(name for _, values in columns for name in values)
    rows = ((name, *(_number(values.get(name)) for _, values in columns)) for name in names)
    return [title, *_table([("metric", *(head for head, _ in columns)), *rows])]


def _slice_lines(report: EvaluationReport) -> list[str]:
    """The slices that refuse, and those in which the candidate lost most; without an incumbent, the weakest."""
    checks = [check for check in report.verdict.checks if check.kind == "slice" and check.low is not None]
    if not checks:
        return []

    def order(check: GateCheck) -> tuple[bool, float]:
        change = _difference(check.candidate, check.incumbent) or 0.0
        return check.outcome != "fail", -change if MetricName.parse(check.metric).lower_is_better else change

    worst = sorted(checks, key=order)
    failed = sum(check.outcome == "fail" for check in checks)
    shown = worst[: max(_SLICES_SHOWN, failed)]
    head = ("slice", "metric", "candidate", "incumbent", "difference", "interval", "queries", "gate")
    rows = [
        (
            check.slice,
            check.metric,
            _number(check.candidate),
            _number(check.incumbent),
            _number(_difference(check.candidate, check.incumbent), "+"),
            _interval(check),
            f"{check.num_queries:,}" if check.num_queries is not None else _NOTHING,
            check.outcome,
        )
        for check in shown
    ]
    title = f"slices: {len(shown)} of {len(checks)} compared, those that lost most"
    return [title, *_table([head, *rows])]


def _difference(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours - theirs


def _number(value: float | None, sign: str = "") -> str:
    return _NOTHING if value is None else f"{value:{sign}.4f}"


def _interval(check: GateCheck | None) -> str:
    if check is None or check.low is None or check.high is None:
        return ""
    return f"[{check.low:+.4f}, {check.high:+.4f}]"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, figures to the right."""
    left = [column for column, title in enumerate(rows[0]) if title in ("metric", "slice", "gate")]
    return [f"  {line}" for line in aligned(rows, left)]
