"""Holdout queries that a model was trained on: by id, and by text when the ids differ. Their scores say too much."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import format_share
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.shards import TokenRows
from pipeline.evaluate.texts import text_hashes
from pipeline.parallel.gang import Gang


@dataclass(frozen=True)
class HoldoutQueries:
    """The queries of a holdout: ids [Q] ascending, and one text hash [Q] of each."""

    ids: Int64s
    texts: UInt64s

    @classmethod
    def of(cls, query_id: Int64s, texts: UInt64s) -> "HoldoutQueries":
        """From rows [N]; of a query with several texts the first counts."""
        ids, first = np.unique(query_id, return_index=True)
        return cls(ids, texts[first])


@dataclass(frozen=True)
class Leak:
    """How many of a holdout's queries occur in training data. `by_text`: under another id."""

    queries: int
    by_id: int
    by_text: int
    unchecked: tuple[str, ...] = ()
    """Partitions the model was trained on that are not prepared any more."""

    @property
    def share(self) -> float:
        return (self.by_id + self.by_text) / max(1, self.queries)

    def text(self) -> str:
        """One line: what was found."""
        found = f"{self.by_id + self.by_text:,} of {self.queries:,} holdout queries ({format_share(self.share)})"
        return f"{found} were trained on ({self.by_id:,} by id, {self.by_text:,} by text)"


def find_leak(
    holdout: HoldoutQueries,
    trained: Iterable[TokenRows],
    gang: Gang,
    stop: StopSignal,
    unchecked: tuple[str, ...] = (),
    num_rows: int | None = None,
) -> Leak:
    """Look for the holdout's queries in the rows of each training set. Ranks share the work. Raises Preempted.

    `num_rows`: of all of them, for the progress.
    """
    ids, texts = np.zeros(len(holdout.ids), dtype=np.bool_), np.zeros(len(holdout.ids), dtype=np.bool_)
    sorted_texts = np.sort(holdout.texts)
    world, block = gang.world, 0
    with progress("looking for holdout queries in the training data", num_rows, "rows") as advance:
        for rows in trained:
            for bucket, numbers in rows.blocks():
                stop.raise_if_set("looking for holdout queries in the training data")
                advance(len(numbers))
                block += 1
                if block % world.world_size != world.rank:
                    continue
                part = rows.read(np.full(len(numbers), bucket), numbers, bucket, ("query", "query_id"))
                ids |= np.isin(holdout.ids, part["query_id"])
                hashes = np.unique(text_hashes(part["query"], rows.pad_id))
                if np.isin(hashes, sorted_texts, assume_unique=False).any():
                    texts |= np.isin(holdout.texts, hashes)
    said = gang.gather((ids, texts))
    ids = np.logical_or.reduce([one for one, _ in said])
    texts = np.logical_or.reduce([one for _, one in said])
    return Leak(len(holdout.ids), int(ids.sum()), int((texts & ~ids).sum()), unchecked)


def judge_leak(leak: Leak, action: Literal["refuse", "warn", "off"], max_share: float) -> str:
    """A warning, or nothing. Raises DataError when more of the holdout was trained on than is allowed."""
    if leak.share > max_share and action == "refuse":
        raise DataError(
            leak.text(),
            expected=f"at most {format_share(max_share)} (evaluate.max_leak_share): they score too well",
            next_command="give the data a split column that keeps queries apart, prepare and train again;"
            " or --evaluate.leak warn",
        )
    return f"{leak.text()}: figures on them are better than they would be on new queries" if leak.share else ""
