"""ZeRO-1 over flat vectors: each rank of a shard group has slices of the master weights and moments.

The gradient is reduce-scattered, each rank updates its slices, and the new weights are all-gathered, which moves as
many bytes as an all-reduce (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020, 5.1). It is the only sharding supported for Neuron on XLA, where both collectives are part of the graph.
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
"""Maximum size of one reduce-scatter or all-gather, as in neuronx-distributed (trainer/trainer.py): "Bucket cap > 140
MB causes NaN at step 3".
"""


@dataclass(frozen=True)
class GradientBucket:
    """Elements `start` to `stop` of a chunk, moved by one collective and sliced over the ranks of a shard group.

    Slices are equal and multiples of ALIGNED, so that the fused AdamW is bit-identical to one over full chunks (except
    for the last few elements of a chunk that is not a multiple).
    """

    chunk: int
    start: int
    stop: int
    padding: int
    """Number of zeros appended to the elements."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def local_slice(self, flat: Tensor, ranks: RankGroup) -> Tensor:
        """Return this rank's slice of the bucket's elements `flat`."""
        return F.pad(flat, (0, self.padding)).view(ranks.size, -1)[ranks.index].clone()


def buckets_of(layout: FlatLayout, shards: int, largest_bytes: int) -> tuple[GradientBucket, ...]:
    """Split each chunk, in order, into as few buckets as possible of at most `largest_bytes` in fp32 with padding."""
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
    """A strategy with full weights on every rank, and master weights and moments in slices of buckets."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        *,
        precision: Precision,
        chunk_mib: float = CHUNK_MIB,
        has_one_rate: bool = False,
        recompute: bool = False,
        shards: RankGroup,
        replicas: RankGroup,
        host_gather: HostGather = list,
        largest_bytes: int = 0,
    ) -> None:
        """Take over the weights of `model`. `replicas`: ranks with equal slices. `largest_bytes`: 0: by precision."""
        self._shards, self._replicas = shards, replicas
        self._weight_dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        self._largest_bytes = largest_bytes or (
            LARGEST_UNDER_AUTOCAST_BYTES if precision == "autocast" else LARGEST_BYTES
        )
        # Collectives on the host also compute their inputs on the host, which would be a separate graph on the device.
        self._uses_host = backend.is_lazy and not backend.reduces_in_graph
        super().__init__(
            model,
            backend,
            precision=precision,
            chunk_mib=chunk_mib,
            has_one_rate=has_one_rate,
            recompute=recompute,
            world_size=shards.size * replicas.size,
            host_mean=list,
            host_gather=host_gather,
        )

    def _to_device(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return (weights, slices of masters), sliced on the host because offsets in a graph would differ by rank."""
        self.buckets = buckets_of(self.layout, self._shards.size, self._largest_bytes)
        self.parts = [self.layout.chunks[bucket.chunk] for bucket in self.buckets]
        weights = [flat.to(self._weight_dtype).to(self.backend.device).requires_grad_() for flat in flats]
        return weights, [slice_.to(self.backend.device) for slice_ in self._slices(flats)]

    def _slices(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield this rank's slices of full chunks, by master."""
        for bucket in self.buckets:
            yield bucket.local_slice(flats[bucket.chunk][bucket.start : bucket.stop], self._shards)

    def _join_buckets(self, padded: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield chunks, each the concatenation of its padded buckets without their padding."""
        pairs = zip(self.buckets, padded, strict=True)
        for index in range(len(self.layout.chunks)):
            count = sum(bucket.chunk == index for bucket in self.buckets)
            parts = [tensor[: bucket.size] for bucket, tensor in islice(pairs, count)]
            yield torch.cat(parts) if count > 1 else parts[0]

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        return [grad.float() for grad in super().gradient(loss, is_last=is_last)]

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Return means over ranks of this rank's slices of the gradient, by master, and of the loss.

        Each bucket takes one reduce-scatter over shards, then one all-reduce of the slice over replicas, if any.
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
        """Return the norm from the sums of squares of all slices."""
        slices = self.backend.to_host(grads) if self._uses_host else grads
        square = torch.stack([(slice_ * slice_).sum() for slice_ in slices]).sum()
        with self._convert_errors("summing squares of the gradient"):
            return torch.sqrt(self.backend.all_reduce(square.reshape(1), self._shards)[0])

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the weights from the masters of all shards, with one all-gather per bucket in the weights' precision.

        All buckets are gathered before the first is copied, because a gather on the host waits for the device.
        """
        masters = self.backend.to_host(self.masters) if self._uses_host else self.masters
        with self._convert_errors("gathering weights"):
            gathered = [self.backend.all_gather(master.to(self._weight_dtype), self._shards) for master in masters]
        for weight, chunk in zip(self.weights, self._join_buckets(gathered), strict=True):
            weight.copy_(chunk)

    def _convert_errors(self, doing: str) -> AbstractContextManager[None]:
        """Convert errors of gloo to those of other ranks. pipeline/health/device.py classifies errors of devices."""
        return collective_errors(doing) if self.backend.shares_host_memory else nullcontext()

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy (named fp32 weights, optimizer state) to host memory of rank 0 and return nothing on other ranks.

        Slices are gathered on the host, which needs no device memory and no additional graph.
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
        """Concatenate the slices of the shard group on rank 0, and return the local slice on other ranks."""
        slices = [torch.empty_like(slice_) for _ in range(self._shards.size)] if self._shards.rank == 0 else []
        dist.gather(slice_.contiguous(), slices or None, dst=0, group=self._shards.process_group)
        return torch.cat(slices) if slices else slice_

    def _buckets(self, name: str) -> list[GradientBucket]:
        """Return the buckets of a checkpoint's vector, empty if its tensors are not sliced."""
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
