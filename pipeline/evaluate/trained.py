"""Determine which parts of a holdout were trained on, and whether any of it should not have been."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import format_percent
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.config import SplitBy
from pipeline.data.shards import TokenRows, text_hashes
from pipeline.data.token_sets import open_rows, read_token_sets
from pipeline.data.tokenizer import pack
from pipeline.data.trained_items import FIELDS, PARTS, TRAINED_ON, TrainedItems
from pipeline.evaluate.config import MAX_LEAK_SHARE, MetricsConfig
from pipeline.evaluate.holdout import Holdout, own_column
from pipeline.evaluate.metrics.scored_rows import SliceColumn
from pipeline.evaluate.models import Models
from pipeline.evaluate.retrieval import WINDOW_ROWS, ModelSearch, RetrievalTask
from pipeline.io.commit import read_manifest
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
                    items.mark(rows.read(pools, numbers, bucket, FIELDS), rows.pad_id)
    gathered = process_group.gather([keys.trained for keys in items.keys])
    for keys, masks in zip(items.keys, zip(*gathered, strict=True), strict=True):
        keys.trained = np.logical_or.reduce(masks)


def find_leak(items: TrainedItems, split_by: SplitBy = "query", unchecked: tuple[str, ...] = ()) -> Leak:
    """Count the items by which the splits were made, but that are marked."""
    rows, products = items.rows, items.product_ids
    if split_by == "product":
        return Leak(len(products.values), int(products.trained.sum()), 0, unchecked, split_by)
    if split_by == "both":
        by_text = items.texts.look_up(rows["query"]) & items.texts.look_up(rows["product"])
        return Leak(len(by_text), 0, int(by_text.sum()), unchecked, split_by)
    first = np.unique(rows["query_id"], return_index=True)[1]
    by_id, by_text = items.query_ids.trained, items.queries.look_up(rows["query"][first])
    return Leak(len(first), int(by_id.sum()), int((by_text & ~by_id).sum()), unchecked)


def refuse_leak(leak: Leak) -> None:
    """Raise DataError if the leaked fraction exceeds MAX_LEAK_SHARE."""
    if leak.fraction > MAX_LEAK_SHARE:
        raise DataError(
            leak.text(),
            expected=f"at most {format_percent(MAX_LEAK_SHARE)}, because metrics on these {_LEAKED[leak.split_by]} are"
            " too optimistic",
            next_command="add a split column that keeps each query in one split (or train from scratch after a change"
            " of data.split_by), then prepare and train again, or use --evaluate.leak warn",
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


def relevant_texts(task: RetrievalTask | None, holdout: Holdout, metrics: MetricsConfig) -> tuple[Int64s, UInt64s]:
    """Return the query id [J] and a hash [J] of the item's text for each pair of a query and an item relevant to it.

    Texts are truncated like those of prepared products.
    """
    if task is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint64)
    judged, length, pad_id = task.queries.judged, holdout.rows.buckets[-1].product_tokens, holdout.rows.pad_id
    pairs = (judged.gain >= judged.relevant_gain(metrics)) & (judged.item_id >= 0)
    items, index = np.unique(judged.item_id[pairs], return_inverse=True)
    windows, hashes = set((items // WINDOW_ROWS).tolist()), np.zeros(len(items), dtype=np.uint64)
    for first, tokens in task.items(windows.__contains__):
        here = slice(*np.searchsorted(items, [first, first + len(tokens.lengths)]))
        sep_id = int(tokens.ids[-1])  # every text ends with this token
        padded = pack(tokens, items[here] - first, length, pad_id=pad_id, sep_id=sep_id, dtype=np.int32)
        hashes[here] = text_hashes(padded, pad_id)
    return judged.query_id[pairs], hashes[index]


class TrainedParts(NamedTuple):
    """The parts of a holdout, which are empty if they were not checked.

    `rows` is the slice column by which side of a row was trained on, for rows in ascending order of their sample ids,
    and `counts` has the number of rows in each part. `queries` is the slice column by whether the text of any relevant
    item of a retrieval query was trained on.
    """

    rows: Mapping[str, SliceColumn] = MappingProxyType({})
    counts: Mapping[str, int] = MappingProxyType({})
    queries: SliceColumn | None = None


def check_trained(
    models: Models, search: ModelSearch, warn: Callable[[str], object]
) -> tuple[Leak | None, TrainedParts]:
    """Determine which parts of the holdout one of the models was trained on, and check it for leaks.

    Only training data that is still in the workspace can be checked. Raises DataError if too many items are leaked.
    """
    settings, ctx, holdout = search.settings, search.ctx, search.holdout
    config, workspace = settings.evaluate, ctx.workspace
    if config.leak == "off":
        return None, TrainedParts()
    trained: dict[str, str] = {}
    for model in (models.candidate, models.compared):
        if model is not None:
            trained |= model.state.also_seen | {digest: name for name, digest in model.state.partitions.items()}
    prefixes = {digest: f"tokens/{settings.data.name}/{digest}" for digest in sorted(trained)}
    prepared = [digest for digest, prefix in prefixes.items() if read_manifest(workspace, prefix) is not None]
    unchecked = tuple(sorted(name for digest, name in trained.items() if digest not in prepared))
    # Read the token sets one by one, because they may not be compatible with each other.
    sets = [read_token_sets(workspace, [prefixes[digest]])[0] for digest in prepared]
    total = sum(sum(shard.rows) for token_set in sets for shard in token_set.info.splits.get("train", ()))
    rows = (open_rows(workspace, [token_set], "train", ctx.scratch / "tokens") for token_set in sets)
    task = search.task if config.retrieval.enabled and not isinstance(search.task, str) else None
    query_id, texts = relevant_texts(task, holdout, search.metrics)
    items = TrainedItems(holdout.blocks(FIELDS), holdout.rows.pad_id, texts)
    mark_trained(items, rows, search.process_group, ctx.stop, total)
    leak = find_leak(items, holdout.sets[0].info.split_by, unchecked)
    if config.leak == "refuse":
        refuse_leak(leak)
    for warning in leak_warnings(leak):
        warn(warning)
    codes = items.parts[np.argsort(items.rows["sample_id"], kind="stable")]
    counts = dict(zip(PARTS, np.bincount(codes, minlength=len(PARTS)).tolist(), strict=True))
    columns = {own_column(TRAINED_ON, holdout.sets[0].info.slice_columns): SliceColumn(codes, PARTS)}
    if task is None:
        return leak, TrainedParts(columns, counts)
    ids, is_seen = task.queries.ids, items.texts.look_up(texts)
    by_query = np.where(np.isin(ids, query_id[is_seen]), 0, np.where(np.isin(ids, query_id), 1, -1))
    return leak, TrainedParts(columns, counts, SliceColumn(by_query, ("seen", "new")))
