"""Batches of one rank as torch tensors. The state of the loader is the number of the next optimizer step."""

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
from pipeline.model.relevance import GroupInputs, RelevanceInputs


class RowSource(Protocol):
    """Rows by (pool, number). Texts end where padding begins."""

    @property
    def pad_id(self) -> int: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, pools: Int64s, rows: Int64s, bucket: int, fields: Sequence[str] = ()) -> Arrays:
        """Read rows with at least the arrays `fields` (none: all)."""


class GroupSource(Protocol):
    """Groups of one query with products of it by (pool, number), with what GroupedRows.read says."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    def read(self, pools: Int64s, numbers: Int64s, length: int, epoch: int) -> Arrays: ...


@dataclass(frozen=True)
class MicroBatch:
    """What one rank needs for one micro-step, still on the host."""

    position: int
    length: int
    """Number of the length of its rows of tokens."""
    tensors: dict[str, Tensor]
    sample_ids: Int64s
    """Of the slots that hold a judged row."""


def training_batches(
    source: GroupSource, plan: BatchPlan, share: RankSlice, start: int, stop: int
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of optimizer steps `start` <= position < `stop`, `share.accumulation` of each.

    `plan` orders groups. The tensors of G groups of S slots: tokens, positions, segments int32 [G, T], query_key and
    place (of the group in the global batch) int32 [G]; product_key int32 [G S], numeric, categorical, label int32 and
    gain fp32 [G S]. An empty slot has label and gain -1, one with a mined product label -1 and gain 0: it is a
    negative, and no grade of it is known.
    """
    for position in range(start, stop):
        batch = plan.batch(position)
        for micro_step in range(share.accumulation):
            part = rank_slice(plan.batch_size, share.world_size, share.rank, share.accumulation, micro_step)
            arrays = source.read(batch.pools[part], batch.rows[part], batch.bucket, batch.epoch)
            tensors = {name: torch.from_numpy(arrays[name]) for name in GroupInputs._fields}
            tensors |= target_tensors(arrays) | {"place": torch.arange(part.start, part.stop, dtype=torch.int32)}
            yield MicroBatch(position, batch.bucket, tensors, arrays["sample_id"][arrays["is_row"]])


def to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return what a model needs to score rows, with 32-bit integers (64-bit ones are truncated on Neuron)."""
    return {name: torch.from_numpy(arrays[name]) for name in RelevanceInputs._fields}


def target_tensors(arrays: Arrays) -> dict[str, Tensor]:
    """Return the targets of groups, see train/loss.Targets."""
    is_row = arrays["is_row"]
    without = np.where(arrays["is_mined"], 0.0, -1.0)
    return {
        "label": torch.from_numpy(np.where(is_row, arrays["label"], -1).astype(np.int32)),
        "gain": torch.from_numpy(np.where(is_row, arrays["gain"], without).astype(np.float32)),
        "query_key": _key32(arrays["query_key"]),
        "product_key": _key32(arrays["product_key"]),
    }


def _key32(ids: Int64s) -> Tensor:
    """Fold all 64 bits to int32."""
    wide = ids.view(np.uint64)
    return torch.from_numpy((wide ^ (wide >> np.uint64(32))).astype(np.uint32).view(np.int32))


def sample_digest(sample_ids: Int64s) -> int:
    """Return a 64-bit digest of a set of samples, the same in any order; digests of parts add up (mod 2^64)."""
    with np.errstate(over="ignore"):
        return int(mix64(sample_ids.astype(np.uint64)).sum(dtype=np.uint64))
