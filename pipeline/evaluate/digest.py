"""What pages draw of a model's scores: `cycles/<cycle>/evaluate/digest.json`.

Bins, counts and a bounded number of rows, so that nobody has to read every score again. Of the same scores it is the
same, to the byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.record import Record
from pipeline.evaluate.metrics.labels import SMALLEST
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
from pipeline.io.storage import Storage, read_record

NUM_BINS = 15
"""Of confidence, as of the calibration error (Guo et al., 2017)."""
SCORE_BINS = 20
MAX_CLASSES = 20
"""Of more labels no confusion is drawn."""
MAX_TEXT = 160
"""Characters of a query or a title."""


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


class ScoreDigest(Record):
    schema_version: Literal[1] = 1
    cycle: str
    labels: tuple[str, ...]
    top_gain: float
    candidate: ModelDigest
    incumbent: ModelDigest | None
    queries: tuple[QueryChanges, ...] = Field(description="Of search; empty without an incumbent or without search")
    lost: int | None = Field(description="Rows that were right and are wrong; None without an incumbent")
    won: int | None
    examples: tuple[Example, ...] = Field(description="At most report.examples of each kind; of won half as many")


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/evaluate/digest.json"


def store_digest(workspace: Storage, digest: ScoreDigest) -> None:
    workspace.write_bytes(digest_key(digest.cycle), digest.model_dump_json(indent=1).encode() + b"\n")


def load_digest(workspace: Storage, cycle: str) -> ScoreDigest | None:
    """None when there is none. Raises DataError when it cannot be read."""
    again = f"delete it; trnpipe evaluate --cycle {cycle} writes it when it judges again"
    return read_record(
        workspace, digest_key(cycle), ScoreDigest, "a digest of scores", "trnpipe evaluate", next_command=again
    )


def model_digest(digest: str, rows: ScoredRows) -> ModelDigest:
    labelled = rows.label >= 0
    usable = labelled & ~rows.unusable
    label, probabilities = rows.label[usable], rows.probabilities[usable]
    called, confidence = probabilities.argmax(axis=1), probabilities.max(axis=1, initial=0.0)
    num_labels, edges = len(rows.labels), np.linspace(0.0, 1.0, NUM_BINS + 1)
    place = np.searchsorted(edges[1:-1], confidence)
    counts = np.bincount(place, minlength=NUM_BINS)
    sums = np.bincount(place, weights=confidence, minlength=NUM_BINS)
    hits = np.bincount(place, weights=called == label, minlength=NUM_BINS)
    bins = tuple(
        Bin(
            low=round(float(edges[i]), 4),
            high=round(float(edges[i + 1]), 4),
            rows=int(counts[i]),
            confidence=round(float(sums[i] / counts[i]), 6) if counts[i] else None,
            right=round(float(hits[i] / counts[i]), 6) if counts[i] else None,
        )
        for i in range(NUM_BINS)
    )
    confusion: Sequence[Sequence[int]] = ()
    if num_labels <= MAX_CLASSES:
        pairs = np.bincount(label * num_labels + called, minlength=num_labels**2)
        confusion = pairs.reshape(num_labels, num_labels).tolist()
    top = max(rows.label_gains) or 1.0
    score = np.clip((rows.relevance[usable] / top * SCORE_BINS).astype(np.int64), 0, SCORE_BINS - 1)
    table = np.bincount(label * SCORE_BINS + score, minlength=num_labels * SCORE_BINS)
    return ModelDigest(
        digest=digest,
        rows=int(usable.sum()),
        unusable=int((labelled & rows.unusable).sum()),
        reliability=bins,
        confusion=tuple(tuple(row) for row in confusion),
        scores=tuple(tuple(row) for row in table.reshape(num_labels, SCORE_BINS).tolist()),
    )


def query_changes(ours: PerQuery | None, theirs: PerQuery | None) -> tuple[QueryChanges, ...]:
    """Of each figure that both have, over the queries for which both are defined."""
    if ours is None or theirs is None or not np.array_equal(ours.query_id, theirs.query_id):
        return ()
    found = []
    for name in (name for name in ours.values if name in theirs.values):
        change = ours.values[name] - theirs.values[name]
        change = change[~np.isnan(change)]
        better, worse = int((change > 0).sum()), int((change < 0).sum())
        found.append(QueryChanges(metric=name, better=better, equal=len(change) - better - worse, worse=worse))
    return tuple(found)


@dataclass(frozen=True)
class Changes:
    """Row numbers, the surest first; counts are of all rows, None without an incumbent."""

    worst: tuple[int, ...]
    lost: tuple[int, ...] = ()
    won: tuple[int, ...] = ()
    num_lost: int | None = None
    num_won: int | None = None


def find_changes(ours: ScoredRows, theirs: ScoredRows | None, limit: int) -> Changes:
    """At most `limit` rows of each kind, half as many won ones; of equal ones those that come first."""
    usable = (ours.label >= 0) & ~ours.unusable
    if theirs is not None:
        usable &= ~theirs.unusable
    numbers = np.flatnonzero(usable)
    mine = _true_probability(ours, numbers)
    wrong = _called(ours, numbers) != ours.label[numbers]
    worst = _first(numbers, -np.log(np.maximum(mine, SMALLEST)), wrong, limit)
    if theirs is None:
        return Changes(worst=worst)
    was_wrong = _called(theirs, numbers) != ours.label[numbers]
    moved = np.abs(mine - _true_probability(theirs, numbers))
    lost, won = wrong & ~was_wrong, ~wrong & was_wrong
    return Changes(
        worst=worst,
        lost=_first(numbers, moved, lost, limit),
        won=_first(numbers, moved, won, limit // 2),
        num_lost=int(lost.sum()),
        num_won=int(won.sum()),
    )


def examples_of(
    changes: Changes, ours: ScoredRows, theirs: ScoredRows | None, texts: Mapping[int, tuple[str, str]], limit: int
) -> tuple[Example, ...]:
    """At most `limit` of each kind, half as many won ones, each once. `texts`: query and product by row number."""
    found = []
    by_kind: tuple[tuple[Literal["worst", "lost", "won"], tuple[int, ...], int], ...] = (
        ("worst", changes.worst, limit),
        ("lost", changes.lost, limit),
        ("won", changes.won, limit // 2),
    )
    for kind, numbers, most in by_kind:
        first = {(texts[row], int(ours.label[row])): row for row in reversed(numbers)}
        for row in [row for row in numbers if row in first.values()][:most]:
            label = int(ours.label[row])
            query, product = texts[row]
            found.append(
                Example(
                    kind=kind,
                    query=_short(query),
                    product=_short(product),
                    label=ours.labels[label],
                    candidate=ours.labels[int(ours.probabilities[row].argmax())],
                    candidate_probability=round(float(ours.probabilities[row, label]), 6),
                    incumbent=theirs.labels[int(theirs.probabilities[row].argmax())] if theirs else None,
                    incumbent_probability=round(float(theirs.probabilities[row, label]), 6) if theirs else None,
                )
            )
    return tuple(found)


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _called(rows: ScoredRows, numbers: Int64s) -> Int64s:
    called: Int64s = rows.probabilities[numbers].argmax(axis=1)
    return called


def _true_probability(rows: ScoredRows, numbers: Int64s) -> Float64s:
    chosen: Float64s = rows.probabilities[numbers, rows.label[numbers]]
    return chosen


def _first(numbers: Int64s, size: Float64s, chosen: Bools, limit: int) -> tuple[int, ...]:
    """Those `chosen` with the largest `size`."""
    places = np.flatnonzero(chosen)
    order = np.argsort(-size[places], kind="stable")[:limit]
    return tuple(numbers[places[order]].tolist())
