"""What an evaluation found: the record `cycles/<cycle>/evaluate/report.json`, its table, and what pages draw."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.format import aligned, shortened
from pipeline.core.record import Record
from pipeline.evaluate.config import MetricName
from pipeline.evaluate.gate.compare import GateCheck, Side, Verdict
from pipeline.evaluate.metrics.labels import NUM_BINS, SMALLEST
from pipeline.evaluate.metrics.measure import MetricReport, SliceReport
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
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


class GoldenOutcome(Record):
    """A product that search for a query must, or must not, find among the first `top`. Ranks are 0 beyond the list."""

    query: str
    product: str = Field(description="As the file names it: id or title")
    must: bool
    top: int
    candidate: int
    incumbent: int | None = Field(description="None without an incumbent, or without vectors of it")

    def holds(self, rank: int) -> bool:
        return (0 < rank <= self.top) == self.must

    def __str__(self) -> str:
        ranks = [f"at {rank}" if rank else "not found" for rank in (self.candidate, self.incumbent or 0)]
        where = ranks[0] if self.incumbent is None else f"{ranks[0]}, production {ranks[1]}"
        word = "must" if self.must else "must not"
        return f"{self.query!r} {word} find {self.product!r} in the first {self.top} ({where})"


class GoldenReport(Record):
    """What search finds for the golden queries."""

    outcomes: tuple[GoldenOutcome, ...] = ()
    unknown: tuple[str, ...] = Field((), description="Names of no product among those that are searched")
    missing: str = Field("", description="Why nothing was judged")

    @property
    def missed(self) -> list[GoldenOutcome]:
        return [one for one in self.outcomes if not one.holds(one.candidate)]


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
    golden: GoldenReport | None = Field(None, description="None without evaluate.golden")
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
    """Load the report of a cycle, None if there is none. Raises DataError if it cannot be read."""
    key = report_key(cycle)
    return read_record(workspace, key, EvaluationReport, "an evaluation report", f"trnpipe evaluate --cycle {cycle}")


# Lines for a terminal: models and baselines side by side, slices that matter, the verdict.

_SLICES_SHOWN = 5


def table_lines(report: EvaluationReport) -> list[str]:
    baselines, checks = [one for one in report.baselines if not one.missing], report.verdict.checks
    # Each end of an interval holds alone with the one-sided confidence, so both together with less.
    interval = f"{2 * report.verdict.confidence - 1:.0%} interval"
    head = ("metric", "candidate", "incumbent", "difference", interval, *(one.name for one in baselines), "gate")
    table = [head]
    # Every metric of either model, in the order of reports.
    parts = [part for _, model in _roles(report) for part in (model.metrics, model.retrieval) if part]
    names = dict.fromkeys([*parts[0].values, *parts[0].missing, *(name for part in parts for name in part.values)])
    for name in names:
        of_name = [check for check in checks if check.metric == name and not check.slice]
        delta = next((check for check in of_name if check.kind == "delta"), None)
        outcomes = {check.outcome for check in of_name}
        values = [model.figures.get(name) for model in (report.candidate, report.incumbent) if model]
        worst = next((outcome for outcome in ("fail", "warn", "skipped", "pass") if outcome in outcomes), "")
        tools = (_number(one.figures.get(name)) for one in baselines)
        table.append(
            (name, *_compared(values[0], values[1] if len(values) > 1 else None), _interval(delta), *tools, worst)
        )
    return [*_table(table), *_details(report), *_slice_lines(checks), *report.verdict.lines()]


def _roles(report: EvaluationReport) -> list[tuple[str, ModelReport]]:
    return [("candidate", report.candidate), *([("incumbent", report.incumbent)] if report.incumbent else [])]


def _details(report: EvaluationReport) -> list[str]:
    """Return why metrics are missing, then search with narrower vectors and fused with BM25."""
    lines = []
    for role, model in _roles(report):
        reasons: dict[str, list[str]] = {}
        for part in (model.metrics, model.retrieval):
            for name, reason in part.missing.items() if part else ():
                reasons.setdefault(reason, []).append(name)
        lines += [f"not computed for the {role}: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += [f"{one.name} was not scored: {one.missing}" for one in report.baselines if one.missing]
    for role, model in _roles(report):
        lines += [
            f"search of the {role} with vectors cut to {width} dimensions: nDCG {ndcg:.4f}"
            for width, ndcg in model.ndcg_by_width.items()
        ]
    fused = [(role, one) for role, model in _roles(report) for one in model.hybrids]
    if not fused:
        return lines
    columns = [(role, model.retrieval) for role, model in _roles(report)]
    columns += [(one.name, one.retrieval) for one in report.baselines]
    columns += [
        (f"{role} {one.name}{'' if one.weight is None else f' {one.weight:g}'}", one.retrieval) for role, one in fused
    ]
    shown = [(head, part.values) for head, part in columns if part]
    names = dict.fromkeys(name for _, values in shown for name in values)
    rows = ((name, *(_number(values.get(name)) for _, values in shown)) for name in names)
    lines += ["hybrid search: each model fused with BM25", *_table([("metric", *(head for head, _ in shown)), *rows])]
    return [*lines, *dict.fromkeys(one.missing for _, one in fused if one.missing)]


def _slice_lines(checks: Sequence[GateCheck]) -> list[str]:
    """Return the slices that refuse, and those in which the candidate lost most."""
    compared = [check for check in checks if check.kind == "slice" and check.low is not None]
    if not compared:
        return []

    def order(check: GateCheck) -> tuple[bool, float]:
        change = (check.candidate or 0.0) - (check.incumbent or 0.0)
        return check.outcome != "fail", -change if MetricName.parse(check.metric).lower_is_better else change

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
    head = ("slice", "metric", "candidate", "incumbent", "difference", "interval", "queries", "gate")
    return [f"slices: {len(shown)} of {len(compared)} compared, those that lost most", *_table([head, *rows])]


def _compared(ours: float | None, theirs: float | None) -> tuple[str, str, str]:
    difference = None if ours is None or theirs is None else ours - theirs
    return _number(ours), _number(theirs), _number(difference, "+")


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.4f}"


def _interval(check: GateCheck | None) -> str:
    if check is None or check.low is None or check.high is None:
        return ""
    return f"[{check.low:+.4f}, {check.high:+.4f}]"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align names to the left, figures to the right."""
    left = [column for column, title in enumerate(rows[0]) if title in ("metric", "slice", "gate")]
    return [f"  {line}" for line in aligned(rows, left)]


# What pages draw of a model's scores: `cycles/<cycle>/evaluate/digest.json`. Bins, counts and a bounded number of rows,
# so that nobody has to read every score again. Of the same scores it is the same, to the byte.

SCORE_BINS = 20
MAX_CLASSES = 20
"""Of more labels no confusion is drawn."""
MAX_TEXT = 160
"""Characters of a query or a title."""
TextsOf = Callable[[Int64s], Mapping[int, tuple[str, str]]]
"""Query and product of rows [M] by their number."""


class Bin(Record):
    """Rows whose most probable label has a probability in (low, high]."""

    low: float
    high: float
    rows: int
    confidence: float | None = Field(description="Mean of that probability; None in an empty bin")
    right: float | None = Field(description="Share of rows of which it is the true label")


class ModelDigest(Record):
    """Scores of one model on the labelled rows of the holdout; rows with a NaN or infinite score are left out."""

    digest: str = Field(description="Of its checkpoint")
    rows: int
    unusable: int = Field(description="Labelled rows that are left out")
    reliability: tuple[Bin, ...]
    confusion: tuple[tuple[int, ...], ...] = Field(description="Rows by true label (first) and most probable label")
    scores: tuple[tuple[int, ...], ...] = Field(
        description=f"For each label its rows by expected gain, in {SCORE_BINS} bins of equal width from 0 to top_gain"
    )


class Example(Record):
    """One row that a model is wrong about, or that changed against the incumbent."""

    kind: Literal["worst", "lost", "won"] = Field(
        description="worst: the true label is least probable; lost: right before and wrong now; won: the other way"
    )
    query: str
    product: str
    label: str
    candidate: str = Field(description="Most probable label")
    candidate_probability: float = Field(description="Of the true label")
    incumbent: str | None = None
    incumbent_probability: float | None = None


class QueryChanges(Record):
    """Queries by whether the candidate does better than the incumbent."""

    metric: str
    better: int
    equal: int
    worse: int


class FoundProduct(Record):
    text: str
    gain: float | None = Field(description="As it was judged for the query; None: nobody judged it")


class MovedQuery(Record):
    """A query whose search results are better or worse than those of the incumbent."""

    query: str
    before: float = Field(description="The metric with the incumbent")
    now: float
    found_before: tuple[FoundProduct, ...] = Field(description="The first products, the best first")
    found_now: tuple[FoundProduct, ...]

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
    queries: tuple[QueryChanges, ...] = Field(description="Of search; empty without an incumbent or without search")
    moved_by: str = Field("", description="The metric of `moved`")
    moved: tuple[MovedQuery, ...] = Field((), description="Queries that won most, then those that lost most")
    lost: int | None = Field(description="Rows that were right and are wrong; None without an incumbent")
    won: int | None
    examples: tuple[Example, ...] = Field(description="At most report.examples of each kind; of won half as many")


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/digest.json"


def load_digest(workspace: Storage, cycle: str) -> ScoreDigest | None:
    """Load the digest of a cycle, None if there is none. Raises DataError if it cannot be read."""
    writer = f"trnpipe evaluate --cycle {cycle}"
    return read_record(workspace, digest_key(cycle), ScoreDigest, "a digest of scores", writer)


def score_digest(
    cycle: str,
    models: Sequence[tuple[str, Side]],
    limit: int,
    texts_of: TextsOf,
    moved_by: str,
    moved: Sequence[MovedQuery],
) -> ScoreDigest:
    """Return what pages draw of the scores of the candidate and, after it, the incumbent, each with its digest.

    An incumbent whose scores mean nothing is compared by search alone. `limit`, `texts_of`: see `find_examples`.
    """
    (digest, ours), *others = models
    compared = [(mark, side.rows) for mark, side in others if not side.rows.meaningless]
    examples, lost, won = find_examples(ours.rows, compared[0][1] if compared else None, limit, texts_of)
    return ScoreDigest(
        cycle=cycle,
        labels=ours.rows.labels,
        top_gain=max(ours.rows.label_gains),
        candidate=model_digest(digest, ours.rows),
        incumbent=model_digest(*compared[0]) if compared else None,
        queries=query_changes(ours.retrieval, others[0][1].retrieval) if others else (),
        moved_by=moved_by if moved else "",
        moved=tuple(moved),
        lost=lost,
        won=won,
        examples=examples,
    )


def model_digest(digest: str, rows: ScoredRows) -> ModelDigest:
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


def query_changes(ours: PerQuery | None, theirs: PerQuery | None) -> tuple[QueryChanges, ...]:
    """Compare each figure that both have, over the queries for which both are defined."""
    if ours is None or theirs is None or not np.array_equal(ours.query_id, theirs.query_id):
        return ()
    changes = {name: values - theirs.values[name] for name, values in ours.values.items() if name in theirs.values}
    return tuple(
        QueryChanges(
            metric=name, better=int((change > 0).sum()), equal=int((change == 0).sum()), worse=int((change < 0).sum())
        )
        for name, change in changes.items()
    )


def find_examples(
    ours: ScoredRows,
    theirs: ScoredRows | None,
    limit: int,
    texts_of: TextsOf,
) -> tuple[tuple[Example, ...], int | None, int | None]:
    """Find the rows that are most surely wrong or changed; count those lost and won, None without an incumbent.

    At most `limit` of each kind, half as many won ones, each text once; of equal ones those that come first.
    """
    usable = (ours.label >= 0) & ~ours.unusable
    if theirs is not None:
        usable &= ~theirs.unusable
    numbers = np.flatnonzero(usable)
    label, every = ours.label[numbers], np.arange(len(numbers))
    probabilities = ours.probabilities[numbers]
    of_label, wrong = probabilities[every, label], probabilities.argmax(axis=1) != label
    kinds: list[tuple[Literal["worst", "lost", "won"], Float64s, Bools, int]]
    kinds = [("worst", -np.log(np.maximum(of_label, SMALLEST)), wrong, limit)]
    num_lost = num_won = None
    if theirs is not None:
        before = theirs.probabilities[numbers]
        was_wrong, moved = before.argmax(axis=1) != label, np.abs(of_label - before[every, label])
        lost, won = wrong & ~was_wrong, ~wrong & was_wrong
        num_lost, num_won = int(lost.sum()), int(won.sum())
        kinds += [("lost", moved, lost, limit), ("won", moved, won, limit // 2)]
    # Three times as many, as data may hold a row several times.
    chosen = []
    for kind, size, mask, most in kinds:
        indices = np.flatnonzero(mask)
        largest = indices[np.argsort(-size[indices], kind="stable")[: 3 * most]]
        chosen.append((kind, numbers[largest], most))
    texts = texts_of(np.unique(np.concatenate([rows for _, rows, _ in chosen])))
    examples = []
    for kind, rows, most in chosen:
        first = {(texts[row], int(ours.label[row])): row for row in reversed(rows.tolist())}
        for row in [row for row in rows.tolist() if row in first.values()][:most]:
            own = int(ours.label[row])
            query, product = (shortened(text, MAX_TEXT) for text in texts[row])
            examples.append(
                Example(
                    kind=kind,
                    query=query,
                    product=product,
                    label=ours.labels[own],
                    candidate=ours.labels[int(ours.probabilities[row].argmax())],
                    candidate_probability=round(float(ours.probabilities[row, own]), 6),
                    incumbent=theirs.labels[int(theirs.probabilities[row].argmax())] if theirs else None,
                    incumbent_probability=round(float(theirs.probabilities[row, own]), 6) if theirs else None,
                )
            )
    return tuple(examples), num_lost, num_won
