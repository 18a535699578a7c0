"""Flat vectors with the optimizer's state in slices: each rank of a shard group has masters and moments of its own.

ZeRO-1 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, 5.1): the
gradient is reduced to slices, each rank updates its own, and the new weights are gathered. That moves as many bytes as
an all-reduce. It is the one sharding of the XLA line of Neuron: both collectives stand in the graph.
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
"""Of one reduce-scatter or all-gather. neuronx-distributed has these caps (trainer/trainer.py): "Bucket cap > 140 MB
causes NaN at step 3".
"""


@dataclass(frozen=True)
class GradientBucket:
    """Elements `start` to `stop` of a chunk: what one collective moves, and each rank of a shard group has a slice of.

    Slices are equal and multiples of ALIGNED, so that the fused AdamW gives the bits that it gives over whole chunks
    (but for the last few elements of a chunk that is none).
    """

    chunk: int
    start: int
    stop: int
    padding: int
    """Zeros behind them."""

    @property
    def size(self) -> int:
        return self.stop - self.start

    def cut(self, flat: Tensor, ranks: RankGroup) -> Tensor:
        """Return this rank's slice of its elements."""
        return F.pad(flat, (0, self.padding)).view(ranks.size, -1)[ranks.index].clone()


def buckets_of(layout: FlatLayout, shards: int, largest_bytes: int) -> tuple[GradientBucket, ...]:
    """Cut each chunk, in order, into as few as can be, none larger in fp32 and with its padding."""
    unit = ALIGNED * shards
    limit = max(1, largest_bytes // 4 // unit) * unit
    found = []
    for index, size in enumerate(chunk.size for chunk in layout.chunks):
        count = -(-size // limit)
        length = -(-size // (count * unit)) * unit
        for start in range(0, size, length):
            stop = min(start + length, size)
            found.append(GradientBucket(index, start, stop, (start - stop) % unit))
    return tuple(found)


class Zero1Strategy(FlatStrategy):
    """A Strategy: whole weights on every rank; masters, and with them moments, in slices of buckets."""

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
        """Take the model over. `replicas`: the ranks with the same slices. `largest_bytes`: of a bucket; 0: by
        precision.
        """
        self._shards, self._replicas = shards, replicas
        self._copied_as = torch.bfloat16 if precision == "bf16" else torch.float32
        self._largest_bytes = largest_bytes or (
            LARGEST_UNDER_AUTOCAST_BYTES if precision == "autocast" else LARGEST_BYTES
        )
        # What is exchanged is then computed on the host, too: on the device it would be a graph of its own.
        self._through_host = backend.is_lazy and not backend.reduces_in_graph
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

    def _placed(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Cut slices on the host: in a graph the place of a slice would make it another one on every rank."""
        self.buckets = buckets_of(self.layout, self._shards.size, self._largest_bytes)
        self.parts = [self.layout.chunks[bucket.chunk] for bucket in self.buckets]
        weights = [flat.to(self._copied_as).to(self.backend.device).requires_grad_() for flat in flats]
        return weights, [slice_.to(self.backend.device) for slice_ in self._slices(flats)]

    def _slices(self, flats: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield this rank's of whole chunks, by master."""
        for one in self.buckets:
            yield one.cut(flats[one.chunk][one.start : one.stop], self._shards)

    def _joined(self, wholes: Iterable[Tensor]) -> Iterator[Tensor]:
        """Join padded buckets to chunks."""
        pairs = zip(self.buckets, wholes, strict=True)
        for index in range(len(self.layout.chunks)):
            count = sum(bucket.chunk == index for bucket in self.buckets)
            pieces = [whole[: bucket.size] for bucket, whole in islice(pairs, count)]
            yield torch.cat(pieces) if count > 1 else pieces[0]

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        return [grad.float() for grad in super().gradient(loss, is_last=is_last)]

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Return means over ranks: this rank's slices of the gradient, by master, and the loss.

        One reduce-scatter a bucket over shards, then one all-reduce of its slice over replicas, where there are any.
        """
        *grads, loss = self.backend.to_host(sums) if self._through_host else sums
        slices, loss = [], loss / self.world_size
        with self._exchange("reducing gradients"):
            for one in self.buckets:
                whole = F.pad(grads[one.chunk][one.start : one.stop], (0, one.padding))
                slices.append(self.backend.reduce_scatter(whole, self._shards, 1.0 / self.world_size))
            if self._replicas.size > 1:
                *slices, loss = [self.backend.all_reduce(tensor, self._replicas) for tensor in (*slices, loss)]
            return [*slices, self.backend.all_reduce(loss, self._shards)]

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the norm from the sums of squares of all slices."""
        slices = self.backend.to_host(grads) if self._through_host else grads
        square = torch.stack([(part * part).sum() for part in slices]).sum()
        with self._exchange("summing squares of the gradient"):
            return torch.sqrt(self.backend.all_reduce(square.reshape(1), self._shards)[0])

    @torch.no_grad()
    def publish(self) -> None:
        """Gather the weights from the masters of all shards, in the precision of the copies: one all-gather a bucket.

        All of them before any is copied: through the host each gather ends what is under way on the device.
        """
        masters = self.backend.to_host(self.masters) if self._through_host else self.masters
        with self._exchange("gathering weights"):
            wholes = [self.backend.all_gather(master.to(self._copied_as), self._shards) for master in masters]
        for weight, whole in zip(self.weights, self._joined(wholes), strict=True):
            weight.copy_(whole)

    def _exchange(self, doing: str) -> AbstractContextManager[None]:
        """Take errors of gloo for those of peers; a device's are judged elsewhere (pipeline/health/device.py)."""
        return collective_errors(doing) if self.backend.shares_host_memory else nullcontext()

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy (named weights fp32, optimizer state) to host memory of rank 0, out of the slices of its shard group;
        nothing on other ranks. Through the host: no memory of the device, and no graph of its own.
        """
        source = self.weights if self._copied_as == torch.float32 else self.masters
        host = iter(self.backend.to_host([*source, *chain.from_iterable(state.values())]))
        flats = list(islice(host, len(source)))
        parts = {name: list(islice(host, len(tensors))) for name, tensors in state.items()}
        if self._replicas.index > 0:
            return {}, {}
        with collective_errors("gathering the optimizer's state"):
            if source is self.masters:
                flats = [self._collected(part) for part in flats]
            for name in parts:
                if buckets := self._buckets(name):
                    wholes = [self._collected(part) for part in parts[name]]
                    parts[name] = [whole[: one.size] for one, whole in zip(buckets, wholes, strict=True)]
        if self._shards.rank > 0:
            return {}, {}
        weights = self.layout.unpack(list(self._joined(flats)) if source is self.masters else flats)
        return weights, {name: torch.cat(tensors) for name, tensors in parts.items()}

    def _collected(self, part: Tensor) -> Tensor:
        """Collect the slices of the shard group one after the other, on rank 0."""
        found = [torch.empty_like(part) for _ in range(self._shards.size)] if self._shards.rank == 0 else []
        dist.gather(part.contiguous(), found or None, dst=0, group=self._shards.process_group)
        return torch.cat(found) if found else part

    def _buckets(self, name: str) -> list[GradientBucket]:
        """Return those behind the tensors of a vector in a checkpoint; none where these are no slices."""
        decayed = KINDS.get(name.rpartition(".")[2])
        return [one for one, part in zip(self.buckets, self.parts, strict=True) if part.decayed == decayed]

    def _holders(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        masters = zip(self.masters, self._slices(flats), strict=True)
        return [*zip(self.weights, flats, strict=True), *masters]

    def _held(self, name: str, whole: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        buckets = self._buckets(name)
        if not buckets:
            return super()._held(name, whole, tensors)
        pieces = split_saved(name, whole, [one.size for one in buckets])
        return [one.cut(piece, self._shards) for one, piece in zip(buckets, pieces, strict=True)]
