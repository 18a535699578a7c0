"""Determine which parts of a holdout were trained on, and whether any of it should not have been."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import format_percent
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.config import SplitBy
from pipeline.data.shards import NO_ID, TokenRows, text_hashes
from pipeline.data.tokenizer import pack
from pipeline.data.trained_items import FIELDS, PARTS, TRAINED_ON, TrainedItems
from pipeline.evaluate.config import MAX_LEAK_SHARE, MetricsConfig
from pipeline.evaluate.holdout import Holdout, own_column
from pipeline.evaluate.metrics.measure import SliceReport, retrieval_slices, slice_reports
from pipeline.evaluate.metrics.scored_rows import PerQuery, ScoredRows, SliceColumn
from pipeline.evaluate.report import RELEVANT_PRODUCTS
from pipeline.evaluate.retrieval import WINDOW_ROWS, RetrievalTask
from pipeline.parallel.process_group import ProcessGroup

# Leaked items are those by which the splits were made, so that no holdout item should also be in the training data.
_LEAKED: dict[SplitBy, str] = {"query": "queries", "product": "products", "both": "pairs"}


@dataclass(frozen=True)
class Leak:
    """The number of holdout queries (or products or pairs, depending on `split_by`) that were trained on.

    `by_id` are those with the same id, and `by_text` those with the same text but a different id. A pair is trained on
    if both of its texts are. `unchecked` are training partitions that could not be checked, because they are no longer
    in the workspace.
    """

    queries: int
    by_id: int
    by_text: int
    unchecked: tuple[str, ...] = ()
    split_by: SplitBy = "query"

    @property
    def fraction(self) -> float:
        return (self.by_id + self.by_text) / max(1, self.queries)

    def text(self) -> str:
        return (
            f"{self.by_id + self.by_text:,} of {self.queries:,} test {_LEAKED[self.split_by]}"
            f" ({format_percent(self.fraction)}) were trained on ({self.by_id:,} by id, {self.by_text:,} by text)"
        )


def mark_trained(
    items: TrainedItems,
    trained: Iterable[TokenRows],
    process_group: ProcessGroup,
    stop: StopSignal,
    num_rows: int | None = None,
) -> None:
    """Mark the items of a holdout that occur in the training rows.

    Each rank reads a part of the rows, and the marks are the same on all ranks. `num_rows` is the total number of
    training rows, which is only used to show progress. Raises Preempted on a stop signal.
    """
    world, block = process_group.world, 0
    with progress("checking for leaked queries", num_rows, "rows") as advance:
        for rows in trained:
            for bucket, numbers in rows.blocks():
                stop.raise_if_set("checking for leaked queries")
                advance(len(numbers))
                block += 1
                if block % world.world_size == world.rank:
                    pools = np.full(len(numbers), bucket)
                    items.mark(rows.read(pools, numbers, bucket, FIELDS[:-1]), rows.pad_id)
    for mask, masks in zip(items.masks, zip(*process_group.gather(items.masks), strict=True), strict=True):
        mask[:] = np.logical_or.reduce(masks)


def find_leak(items: TrainedItems, split_by: SplitBy = "query", unchecked: tuple[str, ...] = ()) -> Leak:
    """Count the items that no model may be trained on, because the splits were made by them, but that are marked."""
    rows = items.rows
    if split_by == "both":
        by_text = items.texts.look_up(rows["query"]) & items.texts.look_up(rows["product"])
        return Leak(len(by_text), 0, int(by_text.sum()), unchecked, split_by)
    if split_by == "product":
        first = items.first_of_products
        by_id = items.product_ids.look_up(rows["product_id"][first])
        by_text = items.texts.look_up(rows["product"][first]) & (rows["product_id"][first] == NO_ID)
    else:
        ids, first = np.unique(rows["query_id"], return_index=True)
        by_id, by_text = items.query_ids.look_up(ids), items.queries.look_up(rows["query"][first])
    return Leak(len(first), int(by_id.sum()), int((by_text & ~by_id).sum()), unchecked, split_by)


def refuse_leak(leak: Leak) -> None:
    """Raise DataError if the leaked fraction exceeds MAX_LEAK_SHARE."""
    if leak.fraction > MAX_LEAK_SHARE:
        remedy = "prepare and train again with --train.start scratch"
        if leak.split_by == "query":
            remedy = "add a split column that keeps each query in one split, then prepare and train again"
        raise DataError(
            leak.text(),
            expected=f"at most {format_percent(MAX_LEAK_SHARE)}, because metrics on these {_LEAKED[leak.split_by]} are"
            " too optimistic",
            next_command=f"{remedy}, or use --evaluate.leak warn",
        )


def leak_warnings(leak: Leak | None) -> list[str]:
    """Return warnings about queries that are leaked or could not be checked. `leak` is None if the check is off."""
    if leak is None:
        return ["test queries were not checked against the training data, because evaluate.leak is off"]
    new = f"new {_LEAKED[leak.split_by]}"
    warnings = [f"{leak.text()}, so metrics are better than they would be on {new}"] if leak.fraction else []
    if leak.unchecked:
        warnings.append(
            f"{len(leak.unchecked)} training partition(s) could not be checked for test queries, because they are no"
            " longer in the workspace"
        )
    return warnings


# The parts of a holdout, by which of its items were trained on.


def relevant_texts(
    task: RetrievalTask, holdout: Holdout, metrics: MetricsConfig, sep_id: int
) -> tuple[Int64s, UInt64s]:
    """Return the query id [J] and a hash [J] of the item's text for each pair of a query and an item relevant to it.

    Texts are truncated like those of prepared products.
    """
    judged, length, pad_id = task.queries.judged, holdout.rows.buckets[-1].product_tokens, holdout.rows.pad_id
    pairs = (judged.gain >= judged.relevant_gain(metrics)) & (judged.item_id >= 0)
    items, index = np.unique(judged.item_id[pairs], return_inverse=True)
    windows, hashes = set((items // WINDOW_ROWS).tolist()), np.zeros(len(items), dtype=np.uint64)
    for first, tokens in task.items(windows.__contains__):
        here = slice(*np.searchsorted(items, [first, first + len(tokens.lengths)]))
        padded = pack(tokens, items[here] - first, length, pad_id=pad_id, sep_id=sep_id, dtype=np.int32)
        hashes[here] = text_hashes(padded, pad_id)
    return judged.query_id[pairs], hashes[index]


@dataclass(frozen=True)
class TrainedParts:
    """The parts of a holdout.

    Attributes:
        rows: The slice column by which side of each row was trained on, if there is more than one part. Rows are in
            ascending order of their sample ids.
        queries: The slice column by whether any relevant item of each retrieval query was trained on, if there is more
            than one part.
        counts: The number of rows in each part (empty if this was not checked).
    """

    rows: dict[str, SliceColumn] = field(default_factory=dict)
    queries: SliceColumn | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(
        items: TrainedItems, holdout: Holdout, task: RetrievalTask | None, relevant: tuple[Int64s, UInt64s]
    ) -> "TrainedParts":
        """Divide the holdout after all training rows are marked. `relevant` must be part of the texts of `items`.

        Queries are divided by the texts of their relevant items. A query without any is in no part.
        """
        codes = items.parts[np.argsort(items.rows["sample_id"], kind="stable")]
        counts = dict(zip(PARTS, np.bincount(codes, minlength=len(PARTS)).tolist(), strict=True))
        name, queries = own_column(TRAINED_ON, holdout.sets[0].info.slice_columns), None
        if task is not None:
            ids, (query_id, texts) = task.queries.ids, relevant
            is_trained = np.isin(ids, query_id[items.texts.look_up(texts)])
            by_query = np.where(is_trained, 0, np.where(np.isin(ids, query_id), 1, -1))
            if {0, 1}.issubset(by_query.tolist()):
                queries = SliceColumn(by_query, ("seen", "new"))
        several = sum(count > 0 for count in counts.values()) > 1
        return TrainedParts({name: SliceColumn(codes, PARTS)} if several else {}, queries, counts)

    def reports(
        self, rows: ScoredRows | None, config: MetricsConfig, threshold: float | None, per_query: PerQuery | None
    ) -> tuple[SliceReport, ...]:
        """Compute the metrics of every slice of `rows`, and those of retrieval in every part."""
        slices = () if rows is None else slice_reports(rows, config, threshold)
        if per_query is None or self.queries is None:
            return slices
        return (*slices, *retrieval_slices(per_query, RELEVANT_PRODUCTS, self.queries))
