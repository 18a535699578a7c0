"""ZeRO-1 for flat vectors, where each rank in a shard group owns a slice of the master weights and moments.

Gradients are reduce-scattered, each rank updates its slices, and the updated weights are then all-gathered. In total,
this has the same communication volume as an all-reduce (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", SC 2020, 5.1). This is the only kind of sharding that we support for Neuron on XLA, where
both collectives are part of the graph.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from pipeline.backends import Backend, HostGather, RankGroup
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.process_group import collective_errors
from pipeline.parallel.strategies import KINDS, Precision, State
from pipeline.parallel.strategies.flat import ALIGNED, CHUNK_MIB, FlatLayout, FlatStrategy, split_saved

LARGEST_BYTES, LARGEST_UNDER_AUTOCAST_BYTES = 130_000_000, 65_000_000
"""Maximum size of a single reduce-scatter or all-gather.

The limit is from neuronx-distributed (trainer/trainer.py): "Bucket cap > 140 MB causes NaN at step 3".
"""


@dataclass(frozen=True)
class GradientBucket:
    """A range of elements of a chunk that is communicated in a single collective.

    The range is padded and split into equal slices, one per rank in the shard group. The length of a slice is a
    multiple of ALIGNED, so that the results of fused AdamW are bitwise identical to updating full chunks. If the size
    of a chunk is not a multiple of ALIGNED, this doesn't hold for its last few elements.
    """

    chunk: int
    start: int
    stop: int
    padding: int
    """Number of zeros that are appended."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def local_slice(self, flat: Tensor, ranks: RankGroup) -> Tensor:
        """Return this rank's slice of `flat`, which contains the elements of this bucket."""
        return F.pad(flat, (0, self.padding)).view(ranks.size, -1)[ranks.index].clone()


def buckets_of(layout: FlatLayout, shards: int, largest_bytes: int) -> tuple[GradientBucket, ...]:
    """Split each chunk into as few buckets as possible of at most `largest_bytes` in fp32, including padding."""
    unit = ALIGNED * shards
    limit = max(1, largest_bytes // 4 // unit) * unit
    buckets = []
    for index, size in enumerate(chunk.size for chunk in layout.chunks):
        count = -(-size // limit)
        length = -(-size // (count * unit)) * unit
        for start in range(0, size, length):
            stop = min(start + length, size)
            buckets.append(GradientBucket(index, start, stop, (start - stop) % unit))
    return tuple(buckets)


class Zero1Strategy(FlatStrategy):
    """Strategy that keeps the full weights on every rank, but shards the master weights and moments."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        *,
        precision: Precision,
        chunk_mib: float = CHUNK_MIB,
        has_one_rate: bool = False,
        recompute: bool = False,
        compiled: bool = False,
        shards: RankGroup,
        replicas: RankGroup,
        host_gather: HostGather = list,
        largest_bytes: int = 0,
    ) -> None:
        """Move the weights of `model` to the device and slice the masters.

        `shards`: the group of ranks to shard over. `replicas`: the group of ranks that own the same slices.
        `largest_bytes`: maximum bucket size, where 0 selects the default for the precision.
        """
        self._shards, self._replicas = shards, replicas
        self._weight_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._largest_bytes = largest_bytes or (
            LARGEST_UNDER_AUTOCAST_BYTES if precision == "autocast" else LARGEST_BYTES
        )
        # If collectives run on the host, so does the computation of their inputs, which would otherwise be a separate
        # graph on the device.
        self._uses_host = backend.is_lazy and not backend.reduces_in_graph
        super().__init__(
            model,
            backend,
            precision=precision,
            chunk_mib=chunk_mib,
            has_one_rate=has_one_rate,
            recompute=recompute,
            compiled=compiled,
            world_size=shards.size * replicas.size,
            host_mean=list,
            host_gather=host_gather,
        )

    def _to_device(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and this rank's slices of the masters.

        The masters are sliced on the host, because the offsets would result in a different graph on each rank.
        """
        self.buckets = buckets_of(self.layout, self._shards.size, self._largest_bytes)
        self.parts = [self.layout.chunks[bucket.chunk] for bucket in self.buckets]
        weights = [flat.to(self._weight_dtype).to(self.backend.device).requires_grad_() for flat in flats]
        return weights, [slice_.to(self.backend.device) for slice_ in self._slices(flats)]

    def _slices(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield this rank's slices of full chunks, one per master."""
        for bucket in self.buckets:
            yield bucket.local_slice(flats[bucket.chunk][bucket.start : bucket.stop], self._shards)

    def _join_buckets(self, padded: Iterable[Tensor]) -> Iterator[Tensor]:
        """Remove the padding from buckets and yield their concatenation for each chunk."""
        pairs = zip(self.buckets, padded, strict=True)
        for index in range(len(self.layout.chunks)):
            count = sum(bucket.chunk == index for bucket in self.buckets)
            parts = [tensor[: bucket.size] for bucket, tensor in islice(pairs, count)]
            yield torch.cat(parts) if count > 1 else parts[0]

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        return [grad.float() for grad in super().gradient(loss, is_last=is_last)]

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Average the gradients and the loss over ranks, and return this rank's gradient slices followed by the loss.

        Each bucket requires one reduce-scatter over the shards and, if there are replicas, one all-reduce of the slice.
        """
        *grads, loss = self.backend.to_host(sums) if self._uses_host else sums
        slices, loss = [], loss / self.world_size
        with self._convert_errors("reducing gradients"):
            for bucket in self.buckets:
                padded = F.pad(grads[bucket.chunk][bucket.start : bucket.stop], (0, bucket.padding))
                slices.append(self.backend.reduce_scatter(padded, self._shards, 1.0 / self.world_size))
            if self._replicas.size > 1:
                *slices, loss = [self.backend.all_reduce(tensor, self._replicas) for tensor in (*slices, loss)]
            return [*slices, self.backend.all_reduce(loss, self._shards)]

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Compute the norm from the sums of squares of all slices."""
        slices = self.backend.to_host(grads) if self._uses_host else grads
        square = torch.stack([(slice_ * slice_).sum() for slice_ in slices]).sum()
        with self._convert_errors("summing squares of the gradient"):
            return torch.sqrt(self.backend.all_reduce(square.reshape(1), self._shards)[0])

    @torch.no_grad()
    def publish(self) -> None:
        """Update the weights by gathering the masters of all shards, after converting them to the weights' data type.

        This uses one all-gather per bucket. All buckets are gathered before the first one is copied, because a gather
        on the host has to wait for the device.
        """
        masters = self.backend.to_host(self.masters) if self._uses_host else self.masters
        with self._convert_errors("gathering weights"):
            gathered = [self.backend.all_gather(master.to(self._weight_dtype), self._shards) for master in masters]
        for weight, chunk in zip(self.weights, self._join_buckets(gathered), strict=True):
            weight.copy_(chunk)

    def _convert_errors(self, doing: str) -> AbstractContextManager[None]:
        """Convert errors raised by gloo. Device errors are classified in pipeline/health/device.py instead."""
        return collective_errors(doing) if self.backend.shares_host_memory else nullcontext()

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Gather the named fp32 weights and the optimizer state in host memory on rank 0.

        Returns empty dictionaries on the other ranks. Slices are gathered on the host, which doesn't require device
        memory or an additional graph.
        """
        source = self.weights if self._weight_dtype == torch.float32 else self.masters
        host = iter(self.backend.to_host([*source, *chain.from_iterable(state.values())]))
        flats = list(islice(host, len(source)))
        vectors = {name: list(islice(host, len(tensors))) for name, tensors in state.items()}
        if self._replicas.index > 0:
            return {}, {}
        with collective_errors("gathering the optimizer's state"):
            if source is self.masters:
                flats = [self._gather_on_main(slice_) for slice_ in flats]
            for name in vectors:
                if buckets := self._buckets(name):
                    gathered = [self._gather_on_main(slice_) for slice_ in vectors[name]]
                    vectors[name] = [full[: bucket.size] for bucket, full in zip(buckets, gathered, strict=True)]
        if self._shards.rank > 0:
            return {}, {}
        weights = self.layout.unpack(list(self._join_buckets(flats)) if source is self.masters else flats)
        return weights, {name: torch.cat(tensors) for name, tensors in vectors.items()}

    def _gather_on_main(self, slice_: Tensor) -> Tensor:
        """Gather and concatenate the slices of the shard group on rank 0. Other ranks return their local slice."""
        slices = [torch.empty_like(slice_) for _ in range(self._shards.size)] if self._shards.rank == 0 else []
        dist.gather(slice_.contiguous(), slices or None, dst=0, group=self._shards.process_group)
        return torch.cat(slices) if slices else slice_

    def _buckets(self, name: str) -> list[GradientBucket]:
        """Return the buckets that a vector of the checkpoint covers, or an empty list if its tensors are not sliced."""
        decayed = KINDS.get(name.rpartition(".")[2])
        return [bucket for bucket, part in zip(self.buckets, self.parts, strict=True) if part.decayed == decayed]

    def _weight_pairs(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        masters = zip(self.masters, self._slices(flats), strict=True)
        return [*zip(self.weights, flats, strict=True), *masters]

    def _split(self, name: str, vector: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        buckets = self._buckets(name)
        if not buckets:
            return super()._split(name, vector, tensors)
        parts = split_saved(name, vector, [bucket.size for bucket in buckets])
        return [bucket.local_slice(part, self._shards) for bucket, part in zip(buckets, parts, strict=True)]
