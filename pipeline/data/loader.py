"""Load the training batches of one rank as tensors.

The loader is stateless apart from the number of the next optimizer step, so training can resume at any step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import BatchPlan, RankSlice, rank_slice
from pipeline.core.shuffle import mix64
from pipeline.data.shards import Arrays
from pipeline.data.taught import TAUGHT
from pipeline.model.relevance import MISSING, GroupInputs, RelevanceInputs


class RowSource(Protocol):
    """A source of rows, identified by pool and row number. Texts end at the first padding token."""

    @property
    def pad_id(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, pools: Int64s, rows: Int64s, bucket: int, fields: Sequence[str] = ()) -> Arrays:
        """Read rows. The result contains at least the requested arrays (default: all)."""


class GroupSource(Protocol):
    """A source of groups, identified by pool and group number.

    A group consists of a query and several of its products. See `GroupedRows.read` for details.
    """

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int) -> Arrays: ...


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of one rank for one micro-step, in host memory.

    `position` is the optimizer step, `length` is the index of the sequence length, and `sample_ids` contains the ids of
    all judged rows in the micro-batch.
    """

    position: int
    length: int
    tensors: dict[str, Tensor]
    sample_ids: Int64s


def training_batches(
    source: GroupSource, plan: BatchPlan, share: RankSlice, start: int, stop: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one rank for the optimizer steps from `start` to `stop` (exclusive).

    Each step has `share.accumulation` micro-batches, and `plan` determines the order of the groups. A micro-batch of
    G groups with S slots each contains the following tensors:

    - tokens, positions and segments: int32 [G, T]
    - query_key and place (the index of the group in the global batch): int32 [G]
    - product_key and label: int32 [G S]
    - gain: fp32 [G S]
    - numeric and categorical: [G S, features]
    - with a teacher, teacher_score and teacher_mask: fp32 [G S], teacher_query: fp32 [G, D], teacher_product [G S, D]

    Empty slots have label -1 and gain -1. Mined products have label -1 and gain 0, because they are treated as
    negatives although they have no grade.
    """
    for position in range(start, stop):
        batch = plan.batch(position)
        for micro_step in range(share.accumulation):
            part = rank_slice(plan.batch_size, share.world_size, share.rank, share.accumulation, micro_step)
            arrays = source.read(batch.pools[part], batch.rows[part], batch.bucket, batch.epoch)
            tensors = _inputs(arrays, GroupInputs._fields)
            tensors |= {name: torch.from_numpy(arrays[name]) for name in TAUGHT if name in arrays}
            tensors |= target_tensors(arrays) | {"place": torch.arange(part.start, part.stop, dtype=torch.int32)}
            yield MicroBatch(position, batch.bucket, tensors, arrays["sample_id"][arrays["is_row"]])


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return the model inputs for scoring rows. Integers are 32-bit because Neuron truncates 64-bit integers."""
    return _inputs(arrays, RelevanceInputs._fields)


def _inputs(arrays: Arrays, names: Sequence[str]) -> dict[str, Tensor]:
    """Return tensors in which NaN, a missing number, is replaced by MISSING."""
    present = np.where(np.isnan(arrays["numeric"]), np.float32(MISSING), arrays["numeric"])
    return {name: torch.from_numpy(present if name == "numeric" else arrays[name]) for name in names}


def target_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return the training targets of a batch of groups. See `train/loss.Targets` for their meaning."""
    is_row = arrays["is_row"]
    unjudged_gain = np.where(arrays["is_mined"], 0.0, -1.0)
    return {
        "label": torch.from_numpy(np.where(is_row, arrays["label"], -1).astype(np.int32)),
        "gain": torch.from_numpy(np.where(is_row, arrays["gain"], unjudged_gain).astype(np.float32)),
        "query_key": _key32(arrays["query_key"]),
        "product_key": _key32(arrays["product_key"]),
    }


def _key32(ids: Int64s) -> Tensor:
    """Hash 64-bit ids to int32 by folding their upper and lower halves."""
    wide = ids.view(np.uint64)
    return torch.from_numpy((wide ^ (wide >> np.uint64(32))).astype(np.uint32).view(np.int32))


def sample_digest(sample_ids: Int64s) -> int:
    """Compute a 64-bit digest of a set of samples.

    The digest does not depend on the order of the samples. The digests of disjoint sets can be added (mod 2^64).
    """
    with np.errstate(over="ignore"):
        return int(mix64(sample_ids.astype(np.uint64)).sum(dtype=np.uint64))
