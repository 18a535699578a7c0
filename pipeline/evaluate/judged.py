"""The slices of scored rows that are worth judging. Pure."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from pipeline.evaluate.holdout_rows import PARTITION
from pipeline.evaluate.scored import ScoredRows, SliceColumn

AGE = "age"
NEW, OLD = "new", "old"


def judged_slices(rows: ScoredRows, new_partitions: Collection[str]) -> ScoredRows:
    """Partitions become two slices, new and old to the incumbent; a column with one value for all rows goes."""
    columns = dict(rows.slices)
    partition = columns.pop(PARTITION, None)
    if partition is not None:
        is_new = np.array([name in new_partitions for name in partition.names], dtype=np.bool_)
        # -1, no partition, reads the last entry: it is neither.
        codes = np.append(np.where(is_new, 0, 1), -1)[partition.codes]
        columns.setdefault(AGE, SliceColumn(codes.astype(np.int64), (NEW, OLD)))
    return replace(rows, slices={name: column for name, column in columns.items() if len(np.unique(column.codes)) > 1})
