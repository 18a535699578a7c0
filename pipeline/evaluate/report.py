"""The report of an evaluation (`cycles/<cycle>/evaluate/report.json`), its console table, and the score digest."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.format import aligned, shortened
from pipeline.core.record import Record
from pipeline.data.trained_items import TRAINED_ON
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck, GateInput, Verdict
from pipeline.evaluate.metrics.labels import NUM_BINS, SMALLEST
from pipeline.evaluate.metrics.measure import RELEVANT_PRODUCTS, MetricReport, SliceReport
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
from pipeline.io.storage import Storage, read_record


class HybridReport(Record):
    """Results of hybrid search, which fuses the search results of a model with those of BM25."""

    name: Literal["rrf", "weighted"] = Field(description="Reciprocal rank fusion, or a weighted mean of the scores")
    weight: float | None = Field(None, description="Weight of the model's scores in the weighted mean")
    valid_queries: int = Field(0, description="Number of queries of the valid split that the weight was tuned on")
    retrieval: MetricReport | None = None
    missing: str = Field("", description="Reason why there is no result")


class BaselineReport(Record):
    """Results of a baseline."""

    name: Literal["bm25", "boosting"]
    scores: str = Field("", description="Key of its scores in the workspace, which are shared by all cycles")
    metrics: MetricReport | None = Field(None, description="Row metrics")
    retrieval: MetricReport | None = None
    threshold: float | None = Field(None, description="Minimum probability of a match (only with two labels)")
    slices: tuple[SliceReport, ...] = Field((), description="Metrics by which items were trained on")
    missing: str = Field("", description="Reason why the baseline was not scored")
    weak: str = Field("", description="Reason why beating this baseline would prove nothing")

    @property
    def figures(self) -> dict[str, float]:
        """Row and retrieval metrics by name."""
        return {name: value for part in (self.metrics, self.retrieval) if part for name, value in part.values.items()}


class GoldenOutcome(Record):
    """The ranks of a product of a golden query. A rank of 0 means that the product was not retrieved."""

    query: str
    product: str = Field(description="Id or title of the product, as in the file")
    must: bool
    top: int
    candidate: int
    incumbent: int | None = Field(description="Rank with the production model, None if it was not searched")

    def holds(self, rank: int) -> bool:
        return (0 < rank <= self.top) == self.must

    def __str__(self) -> str:
        ranks = [f"at {rank}" if rank else "not found" for rank in (self.candidate, self.incumbent or 0)]
        where = ranks[0] if self.incumbent is None else f"{ranks[0]}, production {ranks[1]}"
        verb = "must" if self.must else "must not"
        return f"{self.query!r} {verb} find {self.product!r} in the top {self.top} ({where})"


class GoldenReport(Record):
    """Results for the golden queries."""

    outcomes: tuple[GoldenOutcome, ...] = ()
    unknown: tuple[str, ...] = Field((), description="Names that do not match any of the searched products")
    missing: str = Field("", description="Reason why the queries were not judged")

    @property
    def missed(self) -> list[GoldenOutcome]:
        return [outcome for outcome in self.outcomes if not outcome.holds(outcome.candidate)]


class ModelReport(Record):
    """Results of one model."""

    retired: ClassVar[Mapping[str, Any]] = {"retrieval_by_width": ...}

    checkpoint: str = Field(description="URI of the checkpoint")
    digest: str
    cycle: str
    step: int
    began_from: str = Field("", description="Published weights that its lineage started from (empty if unknown)")
    scores: str = Field(description="Key of its scores in the workspace")
    metrics: MetricReport
    retrieval: MetricReport | None = Field(description="None if retrieval is not evaluated")
    ndcg_by_width: dict[int, float] = Field(
        {}, description="Retrieval nDCG with truncated vectors, for each of evaluate.retrieval.dimensions"
    )
    hybrids: tuple[HybridReport, ...] = ()
    slices: tuple[SliceReport, ...]
    threshold: float | None = Field(description="Minimum probability of a match (only with two labels)")
    temperature: float = Field(1.0, description="Divisor of the logits, fitted to the validation split")
    ece_before: float | None = Field(None, description="Calibration error without the temperature, None if undefined")

    @property
    def calibration(self) -> str:
        """Describe how the temperature changes the calibration error, or return an empty string if there is none."""
        if self.temperature == 1.0 or self.ece_before is None or "ece" not in self.metrics.values:
            return ""
        return f"{self.metrics.values['ece']:.4f}, {self.ece_before:.4f} without temperature {self.temperature:g}"

    @property
    def figures(self) -> dict[str, float]:
        return self.metrics.values | (self.retrieval.values if self.retrieval else {})


class HoldoutReport(Record):
    """The rows and queries that were scored."""

    split: str
    partitions: tuple[str, ...]
    new_partitions: tuple[str, ...] = Field(description="Partitions that production was not trained on")
    rows: int
    rows_in_split: int = Field(description="Number of rows without the limit evaluate.max_rows")
    queries: int
    leaked_by_id: int = Field(description="Number of queries (see data.split_by) that were trained on, by id")
    leaked_by_text: int = Field(description="Number of other queries that were trained on, by text")
    leak_checked: bool
    unchecked_partitions: tuple[str, ...] = Field(description="Training partitions that could not be checked")
    retrieval_queries: int = 0
    retrieval_items: int = 0
    parts: dict[str, int] = Field(
        {}, description="Number of rows by which of their items were trained on (empty if that was not checked)"
    )


class EvaluationReport(Record):
    """The report of an evaluation, which is stored and shown to users."""

    schema_version: Literal[1] = 1
    cycle: str
    inputs: dict[str, str] = Field(description="Fingerprints of everything that the verdict depends on")
    backend: str
    device: str
    precision: str
    candidate: ModelReport
    incumbent: ModelReport | None
    baselines: tuple[BaselineReport, ...] = ()
    golden: GoldenReport | None = Field(None, description="None if evaluate.golden is not set")
    holdout: HoldoutReport
    verdict: Verdict
    warnings: tuple[str, ...]
    seconds: dict[str, float] = Field(description="Duration of each phase in the attempt that finished")
    settings_hash: str
    code_version: str
    at: datetime = Field(description="UTC")

    def figures(self) -> dict[str, float]:
        """Return the metrics of the candidate, followed by those of all other models with a prefix."""
        others = {"incumbent": self.incumbent.figures} if self.incumbent else {}
        others |= {
            f"hybrid_{hybrid.name}": hybrid.retrieval.values for hybrid in self.candidate.hybrids if hybrid.retrieval
        }
        others |= {baseline.name: baseline.figures for baseline in self.baselines}
        prefixed = {f"{prefix}_{name}": value for prefix, values in others.items() for name, value in values.items()}
        return self.candidate.figures | prefixed


def report_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/report.json"


def store_report(workspace: Storage, report: EvaluationReport) -> None:
    workspace.write_bytes(report_key(report.cycle), report.to_json())


def load_report(workspace: Storage, cycle: str) -> EvaluationReport | None:
    """Load the report of a cycle, or None if it does not exist. Raises DataError if it cannot be read."""
    key = report_key(cycle)
    return read_record(workspace, key, EvaluationReport, "an evaluation report", f"trnpipe evaluate --cycle {cycle}")


# The console output, which has a table of all models and baselines, the worst slices, and the verdict.

_SLICES_SHOWN = 5


def table_lines(report: EvaluationReport) -> list[str]:
    """Format a report for the console."""
    baselines = [baseline for baseline in report.baselines if not baseline.missing]
    checks = report.verdict.checks
    # The confidence level of each bound is one-sided, so that of the interval between them is lower.
    interval = f"{2 * report.verdict.confidence - 1:.0%} interval"
    tools = [baseline.name for baseline in baselines]
    table = [("metric", "candidate", "production", "difference", interval, *tools, "gate")]
    # Include all metrics of both models, in the order in which they are reported.
    parts = [part for _, model in _roles(report) for part in (model.metrics, model.retrieval) if part]
    names = dict.fromkeys([*parts[0].values, *parts[0].missing, *(name for part in parts for name in part.values)])
    for name in names:
        metric_checks = [check for check in checks if check.metric == name and not check.slice]
        delta = next((check for check in metric_checks if check.kind == "delta"), None)
        outcomes = {check.outcome for check in metric_checks}
        values = [model.figures.get(name) for model in (report.candidate, report.incumbent) if model]
        worst = next((outcome for outcome in ("fail", "warn", "skipped", "pass") if outcome in outcomes), "")
        cells = _compared(values[0], values[1] if len(values) > 1 else None)
        others = (_number(baseline.figures.get(name)) for baseline in baselines)
        table.append((name, *cells, _interval(delta), *others, worst))
    counts = ", ".join(f"{part} {rows:,}" for part, rows in report.holdout.parts.items())
    trained = [f"rows by which side was trained on, query or product: {counts}"] if counts else []
    trained += _table(part_table(report))
    return [*_table(table), *_details(report), *trained, *_slice_lines(checks), *report.verdict.lines()]


def _roles(report: EvaluationReport) -> list[tuple[str, ModelReport]]:
    return [("candidate", report.candidate), *([("production", report.incumbent)] if report.incumbent else [])]


def _details(report: EvaluationReport) -> list[str]:
    """Format missing metrics with their reasons, followed by search with truncated vectors and hybrid search."""
    lines = []
    for role, model in _roles(report):
        reasons: dict[str, list[str]] = {}
        for part in (model.metrics, model.retrieval):
            for name, reason in part.missing.items() if part else ():
                reasons.setdefault(reason, []).append(name)
        lines += [f"not computed for {role}: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += [
        f"{baseline.name} was not scored: {baseline.missing}" for baseline in report.baselines if baseline.missing
    ]
    for role, model in _roles(report):
        lines += [
            f"search with {role} vectors truncated to {width} dimensions: nDCG {ndcg:.4f}"
            for width, ndcg in model.ndcg_by_width.items()
        ]
    lines += [
        f"calibration error of {role}: {model.calibration}" for role, model in _roles(report) if model.calibration
    ]
    hybrids = [(role, hybrid) for role, model in _roles(report) for hybrid in model.hybrids]
    if not hybrids:
        return lines
    columns = [(role, model.retrieval) for role, model in _roles(report)]
    columns += [(baseline.name, baseline.retrieval) for baseline in report.baselines]
    columns += [
        (f"{role} {hybrid.name}{'' if hybrid.weight is None else f' {hybrid.weight:g}'}", hybrid.retrieval)
        for role, hybrid in hybrids
    ]
    shown = [(head, part.values) for head, part in columns if part]
    names = dict.fromkeys(name for _, values in shown for name in values)
    rows = ((name, *(_number(values.get(name)) for _, values in shown)) for name in names)
    lines += ["hybrid search: each model fused with BM25", *_table([("metric", *(head for head, _ in shown)), *rows])]
    return [*lines, *dict.fromkeys(hybrid.missing for _, hybrid in hybrids if hybrid.missing)]


def part_table(report: EvaluationReport) -> list[tuple[str, ...]]:
    """Compare all models in the parts of the test split that differ in which of their items were trained on.

    Returns the head and the rows of a table, which is empty if there are no such parts.
    """
    models = [(role, model.slices) for role, model in _roles(report)]
    models += [(baseline.name, baseline.slices) for baseline in report.baselines if baseline.slices]
    slices = [{(part.column, part.value): part.report for part in parts} for _, parts in models]
    table = [("slice", "metric", "rows", "queries", *(role for role, _ in models))]
    for (column, value), part in slices[0].items():
        recall = [name for name in part.values if name.startswith("retrieval_recall@")][-1:]
        names = ["f1" if "f1" in part.values else "macro_f1", "ndcg@10", "retrieval_ndcg@10", *recall]
        is_part = column == RELEVANT_PRODUCTS or (column.endswith(TRAINED_ON) and value in report.holdout.parts)
        for name in (name for name in names if is_part and name in part.values):
            reports = (of_model.get((column, value)) for of_model in slices)
            values = (_number(each.values.get(name) if each else None) for each in reports)
            rows = f"{part.num_rows:,}" if part.num_rows else ""
            table.append((f"{column}={value}", name, rows, f"{part.num_queries:,}", *values))
    return table if len(table) > 1 else []


def _slice_lines(checks: Sequence[GateCheck]) -> list[str]:
    """Format the slices that caused a refusal and those with the largest drops."""
    compared = [check for check in checks if check.kind == "slice" and check.low is not None]
    if not compared:
        return []

    def order(check: GateCheck) -> tuple[bool, float]:
        change = (check.candidate or 0.0) - (check.incumbent or 0.0)
        return check.outcome != "fail", -MetricName.parse(check.metric).loss(change)

    shown = sorted(compared, key=order)[: max(_SLICES_SHOWN, sum(check.outcome == "fail" for check in compared))]
    rows = [
        (
            check.slice,
            check.metric,
            *_compared(check.candidate, check.incumbent),
            _interval(check),
            f"{check.num_queries or 0:,}",
            check.outcome,
        )
        for check in shown
    ]
    head = ("slice", "metric", "candidate", "production", "difference", "interval", "queries", "gate")
    return [f"slices with the largest drops ({len(shown)} of {len(compared)} compared)", *_table([head, *rows])]


def _compared(candidate: float | None, production: float | None) -> tuple[str, str, str]:
    difference = None if candidate is None or production is None else candidate - production
    return _number(candidate), _number(production), _number(difference, "+")


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.4f}"


def _interval(check: GateCheck | None) -> str:
    if check is None or check.low is None or check.high is None:
        return ""
    return f"[{check.low:+.4f}, {check.high:+.4f}]"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table with names aligned to the left and numbers to the right."""
    names = [column for row in rows[:1] for column, title in enumerate(row) if title in ("metric", "slice", "gate")]
    return [f"  {line}" for line in aligned(rows, names)]


# The score digest (`cycles/<cycle>/evaluate/digest.json`), which only contains histograms, counts and a bounded number
# of example rows, so that the report page does not have to read all scores. It is deterministic.

SCORE_BINS = 20
MAX_CLASSES = 20  # maximum number of labels for which to compute a confusion matrix
MAX_TEXT = 160  # maximum number of characters of a query or title
TextsOf = Callable[[Int64s], Mapping[int, tuple[str, str]]]
"""A function that takes row numbers [M] and returns the query and the product of each row, by row number."""


class Bin(Record):
    """A calibration bin with all rows for which the probability of the most probable label is in (low, high]."""

    low: float
    high: float
    rows: int
    confidence: float | None = Field(description="Mean probability, None if the bin is empty")
    right: float | None = Field(description="Accuracy, None if the bin is empty")


class ModelDigest(Record):
    """Score statistics of a model, computed over labelled rows with finite scores."""

    digest: str = Field(description="Digest of the checkpoint")
    rows: int
    unusable: int = Field(description="Number of labelled rows with a NaN or infinite score")
    reliability: tuple[Bin, ...]
    confusion: tuple[tuple[int, ...], ...] = Field(description="Row counts by true label and most probable label")
    scores: tuple[tuple[int, ...], ...] = Field(
        description=f"Histogram of the expected gain for each label, with {SCORE_BINS} equal bins from 0 to top_gain"
    )


class Example(Record):
    """A row that the candidate gets wrong, or that only one of the two models gets right."""

    kind: Literal["worst", "lost", "won"] = Field(
        description="worst (largest errors of the candidate), lost (only production is right), or won (only the"
        " candidate is right)"
    )
    query: str
    product: str
    label: str
    candidate: str = Field(description="Most probable label")
    candidate_probability: float = Field(description="Probability of the true label")
    incumbent: str | None = None
    incumbent_probability: float | None = None


class QueryChanges(Record):
    """The number of queries on which the candidate is better than, equal to or worse than production."""

    metric: str
    better: int
    equal: int
    worse: int


class FoundProduct(Record):
    """A search result of a query."""

    text: str
    gain: float | None = Field(description="Gain of the product for the query, None if not judged")


class MovedQuery(Record):
    """A query for which the candidate returns better or worse search results than production."""

    query: str
    before: float = Field(description="Metric of the production model")
    now: float = Field(description="Metric of the candidate")
    found_before: tuple[FoundProduct, ...] = Field(description="Top results of the production model, best first")
    found_now: tuple[FoundProduct, ...] = Field(description="Top results of the candidate, best first")

    @property
    def lost(self) -> bool:
        return self.now < self.before


class ScoreDigest(Record):
    schema_version: Literal[1] = 1
    cycle: str
    labels: tuple[str, ...]
    top_gain: float
    candidate: ModelDigest
    incumbent: ModelDigest | None
    queries: tuple[QueryChanges, ...] = Field(description="Changes by retrieval metric, if both models were searched")
    moved_by: str = Field("", description="Metric by which `moved` is sorted")
    moved: tuple[MovedQuery, ...] = Field((), description="Queries with the largest gains, then the largest losses")
    lost: int | None = Field(description="Number of rows that only production gets right, None without production")
    won: int | None = Field(description="Number of rows that only the candidate gets right, None without production")
    examples: tuple[Example, ...] = Field(description="Up to report.examples rows of each kind, half as many of won")


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/digest.json"


def load_digest(workspace: Storage, cycle: str) -> ScoreDigest | None:
    """Load the digest of a cycle, or None if it does not exist. Raises DataError if it cannot be read."""
    writer = f"trnpipe evaluate --cycle {cycle}"
    return read_record(workspace, digest_key(cycle), ScoreDigest, "a score digest", writer)


def score_digest(
    cycle: str,
    models: Sequence[tuple[str, GateInput]],
    limit: int,
    texts_of: TextsOf,
    moved_by: str,
    moved: Sequence[MovedQuery],
) -> ScoreDigest:
    """Build the score digest, including examples (see `find_examples`) and the queries that changed most (`moved`).

    `models` are the checkpoint digest and the results of the candidate, followed by those of the production model, if
    there is one. If the relevance head of the production model is untrained, only search results are compared.
    """
    (digest, candidate), *others = models
    compared = [(other_digest, result.rows) for other_digest, result in others if not result.rows.meaningless]
    examples, lost, won = find_examples(candidate.rows, compared[0][1] if compared else None, limit, texts_of)
    return ScoreDigest(
        cycle=cycle,
        labels=candidate.rows.labels,
        top_gain=max(candidate.rows.label_gains),
        candidate=model_digest(digest, candidate.rows),
        incumbent=model_digest(*compared[0]) if compared else None,
        queries=query_changes(candidate.retrieval, others[0][1].retrieval) if others else (),
        moved_by=moved_by if moved else "",
        moved=tuple(moved),
        lost=lost,
        won=won,
        examples=examples,
    )


def model_digest(digest: str, rows: ScoredRows) -> ModelDigest:
    """Compute the calibration bins, the confusion matrix and the score histograms of a model."""
    labelled = rows.label >= 0
    usable = labelled & ~rows.unusable
    label, probabilities = rows.label[usable], rows.probabilities[usable]
    predicted, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1, initial=0.0)
    num_labels, edges = len(rows.labels), np.linspace(0.0, 1.0, NUM_BINS + 1)
    in_bin = np.searchsorted(edges[1:-1], confidence)
    counts = np.bincount(in_bin, minlength=NUM_BINS)
    columns = [np.round(edges[:-1], 4), np.round(edges[1:], 4), counts]
    for values in (confidence, predicted == label):
        sums = np.bincount(in_bin, weights=values, minlength=NUM_BINS)
        columns.append(np.round(sums / np.maximum(counts, 1), 6))
    pairs = np.bincount(label * num_labels + predicted, minlength=num_labels**2).reshape(num_labels, num_labels)
    top = max(rows.label_gains) or 1.0
    score = np.clip((rows.relevance[usable] / top * SCORE_BINS).astype(np.int64), 0, SCORE_BINS - 1)
    table = np.bincount(label * SCORE_BINS + score, minlength=num_labels * SCORE_BINS).reshape(num_labels, SCORE_BINS)
    return ModelDigest(
        digest=digest,
        rows=int(usable.sum()),
        unusable=int((labelled & rows.unusable).sum()),
        reliability=tuple(
            Bin(low=low, high=high, rows=size, confidence=mean if size else None, right=right if size else None)
            for low, high, size, mean, right in zip(*(column.tolist() for column in columns), strict=True)
        ),
        confusion=tuple(map(tuple, pairs.tolist())) if num_labels <= MAX_CLASSES else (),
        scores=tuple(map(tuple, table.tolist())),
    )


def query_changes(candidate: PerQuery | None, production: PerQuery | None) -> tuple[QueryChanges, ...]:
    """Count the queries that got better or worse, for each metric that is available for both models."""
    if candidate is None or production is None or not np.array_equal(candidate.query_id, production.query_id):
        return ()
    before = production.values
    changes = {name: now - before[name] for name, now in candidate.values.items() if name in before}
    return tuple(
        QueryChanges(
            metric=name, better=int((change > 0).sum()), equal=int((change == 0).sum()), worse=int((change < 0).sum())
        )
        for name, change in changes.items()
    )


def find_examples(
    candidate: ScoredRows, production: ScoredRows | None, limit: int, texts_of: TextsOf
) -> tuple[tuple[Example, ...], int | None, int | None]:
    """Choose the rows with the largest errors and the largest changes as examples, without duplicate texts.

    There are at most `limit` examples of each kind (half as many for `won`). Also returns the numbers of rows that were
    lost and won, which are None if there is no production model.
    """
    usable = (candidate.label >= 0) & ~candidate.unusable
    if production is not None:
        usable &= ~production.unusable
    numbers = np.flatnonzero(usable)
    label, index = candidate.label[numbers], np.arange(len(numbers))
    probabilities = candidate.probabilities[numbers]
    true_probability, wrong = probabilities[index, label], probabilities.argmax(axis=1) != label
    kinds: list[tuple[Literal["worst", "lost", "won"], Float64s, Bools, int]]
    kinds = [("worst", -np.log(np.maximum(true_probability, SMALLEST)), wrong, limit)]
    num_lost = num_won = None
    if production is not None:
        before = production.probabilities[numbers]
        was_wrong, moved = before.argmax(axis=1) != label, np.abs(true_probability - before[index, label])
        lost, won = wrong & ~was_wrong, ~wrong & was_wrong
        num_lost, num_won = int(lost.sum()), int(won.sum())
        kinds += [("lost", moved, lost, limit), ("won", moved, won, limit // 2)]
    # Choose three times as many rows as needed, because some of them may have the same texts.
    chosen = []
    for kind, magnitude, mask, max_count in kinds:
        indices = np.flatnonzero(mask)
        largest = indices[np.argsort(-magnitude[indices], kind="stable")[: 3 * max_count]]
        chosen.append((kind, numbers[largest], max_count))
    texts = texts_of(np.unique(np.concatenate([rows for _, rows, _ in chosen])))
    examples = []
    for kind, rows, max_count in chosen:
        unique = {(texts[row], int(candidate.label[row])): row for row in reversed(rows.tolist())}
        for row in [row for row in rows.tolist() if row in unique.values()][:max_count]:
            own = int(candidate.label[row])
            query, product = (shortened(text, MAX_TEXT) for text in texts[row])
            examples.append(
                Example(
                    kind=kind,
                    query=query,
                    product=product,
                    label=candidate.labels[own],
                    candidate=candidate.labels[int(candidate.probabilities[row].argmax())],
                    candidate_probability=round(float(candidate.probabilities[row, own]), 6),
                    incumbent=production.labels[int(production.probabilities[row].argmax())] if production else None,
                    incumbent_probability=round(float(production.probabilities[row, own]), 6) if production else None,
                )
            )
    return tuple(examples), num_lost, num_won
