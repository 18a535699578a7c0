"""What pages draw of a model's scores: `cycles/<cycle>/evaluate/digest.json`.

Bins, counts and a bounded number of rows, so that nobody has to read every score again. Of the same scores it is the
same, to the byte.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from pipeline.core.arrays import Bools, Float64s, Int64s
from pipeline.core.record import Record
from pipeline.evaluate.metrics.labels import NUM_BINS, SMALLEST
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows
from pipeline.io.storage import Storage, read_record

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


def load_digest(workspace: Storage, cycle: str) -> ScoreDigest | None:
    """Load the digest of a cycle, None if there is none. Raises DataError if it cannot be read."""
    writer = f"trnpipe evaluate --cycle {cycle}"
    return read_record(workspace, digest_key(cycle), ScoreDigest, "a digest of scores", writer)


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
    texts_of: Callable[[Int64s], Mapping[int, tuple[str, str]]],
) -> tuple[tuple[Example, ...], int | None, int | None]:
    """Find the rows that are most surely wrong or changed; count those lost and won, None without an incumbent.

    At most `limit` of each kind, half as many won ones, each text once; of equal ones those that come first.
    `texts_of`: query and product of rows [M] of `ours` by their number.
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
            query, product = (text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…" for text in texts[row])
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
