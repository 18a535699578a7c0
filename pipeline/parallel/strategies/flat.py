"""Plain data parallel: a whole model on every rank, its parameters a few flat vectors, viewed as named tensors.

Why: an optimizer, a gradient reduction or a norm over a few tensors instead of a hundred. Tracing clipping and AdamW
over a hundred tensors costs 65 ms of host time a step on XLA; over a few flat vectors it is 2.3 ms (`python -m bench
--only host_share`). A few and not two: a collective of the whole gradient cannot start before backward has ended, and
vectors of hundreds of MiB meet limits of the Neuron compiler (aws-neuron-sdk issue 1118); its own wrapper reduces 50 MB
at once (torch_xla 2.9, _internal/neuron.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.backends import Backend, HostGather, HostMean
from pipeline.core.errors import CheckpointError, ConfigError
from pipeline.model.relevance import RelevanceModel, RelevanceOutputs, inputs_of
from pipeline.parallel.activations import recomputed
from pipeline.parallel.strategies import FlatVector, ParallelStrategy, Precision, State

_WIDEST = 4  # out / in of a feed-forward layer; embedding tables are taller
ALIGNED = 16  # elements; see _segments
_FEWEST_SEGMENTS, _LARGEST_SEGMENT = 32, 2**21
_ENCODER = "encoder."
CHUNK_MIB = 32.0
"""Most MiB (fp32) of parameters in one vector: of one update, and one reduction over ranks."""


@dataclass(frozen=True)
class FlatLayout:
    """Where each named tensor lies: chunks of decayed parameters, then those of the others; the encoder's first."""

    chunks: tuple[FlatVector, ...]

    @staticmethod
    def of(module: nn.Module, chunk_mib: float = CHUNK_MIB, *, has_one_rate: bool = False) -> "FlatLayout":
        """Lay a module's parameters in chunks of at most `chunk_mib` (fp32), or one segment where that is larger.

        `has_one_rate`: a chunk may hold parameters of the encoder and of what stands behind it, in the same order and
        the same segments. Tied parameters are not supported.
        """
        named = [(name, parameter.shape) for name, parameter in module.named_parameters()]
        limit = int(chunk_mib * 2**20 / 4)
        target = min(_LARGEST_SEGMENT, sum(shape.numel() for _, shape in named) // _FEWEST_SEGMENTS)
        chunks: list[FlatVector] = []
        for decayed in (True, False):
            groups = {}
            for encoder in (True, False):
                group = [p for p in named if (len(p[1]) > 1, p[0].startswith(_ENCODER)) == (decayed, encoder)]
                groups[encoder] = list(_segments(group, target))
            if has_one_rate and sum(map(_size, groups[True])) % ALIGNED == 0:
                groups = {True: groups[True] + groups[False]}
            for encoder, segments in groups.items():
                for run in _runs(segments, limit):
                    names, shapes = zip(*chain.from_iterable(run), strict=True)
                    chunks.append(FlatVector(decayed, encoder, names, shapes, tuple(map(_size, run))))
        return FlatLayout(tuple(chunks))

    @property
    def size(self) -> int:
        return sum(chunk.size for chunk in self.chunks)

    def pack(self, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Turn named tensors into flat ones, fp32 on CPU."""
        return [
            torch.cat([_flatten(state[name].detach().to("cpu", torch.float32)) for name in chunk.names])
            for chunk in self.chunks
        ]

    def unpack(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Turn flat tensors into named views, differentiable: the gradient comes back as one concatenation a chunk."""
        named: dict[str, Tensor] = {}
        for chunk, flat in zip(self.chunks, flats, strict=True):
            views: tuple[Tensor, ...] = _Views.apply(flat, chunk.shapes)  # type: ignore[no-untyped-call]
            named.update(zip(chunk.names, views, strict=True))
        return named

    def sum_of_squares(self, flats: Sequence[Tensor], *, traced: bool = False) -> Tensor:
        """Sum the squares of all elements, by segment and in order: the same bits whatever the chunks."""
        pairs = zip(self.chunks, flats, strict=True)
        sums = [part.sum() for chunk, flat in pairs for part in torch.split(flat * flat, list(chunk.segments))]
        return torch.stack(sums).sum() if traced else sum(sums[1:], start=sums[0])


Parameter = tuple[str, torch.Size]


def _segments(group: Sequence[Parameter], target: int) -> Iterator[list[Parameter]]:
    """Yield runs of `target` elements or more (the last may be shorter), cut at multiples of ALIGNED elements only.

    PyTorch's fused AdamW computes what is left over of a vector register with other instructions, and so other last
    bits (aten/src/ATen/native/cpu/FusedAdamKernel.cpp): a cut elsewhere would change them.
    """
    run: list[Parameter] = []
    for parameter, end in zip(group, accumulate(shape.numel() for _, shape in group), strict=True):
        run.append(parameter)
        if _size(run) >= target and end % ALIGNED == 0:
            yield run
            run = []
    if run:
        yield run


def _runs(segments: Iterable[list[Parameter]], limit: int) -> Iterator[list[list[Parameter]]]:
    """Yield runs of whole segments of at most `limit` elements, or one."""
    run: list[list[Parameter]] = []
    for segment in segments:
        if run and sum(map(_size, run)) + _size(segment) > limit:
            yield run
            run = []
        run.append(segment)
    if run:
        yield run


def _size(parameters: Sequence[Parameter]) -> int:
    return sum(shape.numel() for _, shape in parameters)


class _Views(torch.autograd.Function):
    """Split a vector into shaped views; backward concatenates (the built-in backward would add padded full vectors)."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, shapes: tuple[torch.Size, ...]) -> tuple[Tensor, ...]:
        pieces = torch.split(flat, [shape.numel() for shape in shapes])
        return tuple(
            piece.view(shape[1], shape[0]).t() if _is_transposed(shape) else piece.view(shape)
            for piece, shape in zip(pieces, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat([_flatten(grad) for grad in grads]), None


def _is_transposed(shape: Sequence[int]) -> bool:
    """Return whether a matrix lies transposed: a layer that widens, [out, in] with out > in.

    Its gradient is computed 1.4x faster as [in, out] on XLA:CPU. Embedding tables are read by row and stay as they are.
    """
    return len(shape) == 2 and shape[1] < shape[0] <= _WIDEST * shape[1]


def _flatten(tensor: Tensor) -> Tensor:
    return (tensor.t() if _is_transposed(tensor.shape) else tensor).reshape(-1)


# The forward pass of a model whose weights are flat vectors: one text for training and evaluation, so one graph.


def flat_forward(
    model: RelevanceModel,
    layout: FlatLayout,
    flats: Sequence[Tensor],
    batch: Mapping[str, Tensor],
    *,
    backend: Backend,
    precision: Precision,
) -> RelevanceOutputs:
    """Compute scores and embeddings of one batch. `model` lends its structure, `flats` are the weights."""
    # Views of what is updated in place are replayed for every view; views of a copy, which XLA elides, are not.
    if precision == "bf16":
        flats = [flat.to(torch.bfloat16, copy=backend.is_lazy) for flat in flats]
    elif backend.is_lazy:
        flats = [flat.clone() for flat in flats]
    context = backend.autocast(torch.bfloat16) if precision == "autocast" else nullcontext()
    with context:
        outputs: RelevanceOutputs = torch.func.functional_call(model, layout.unpack(flats), (inputs_of(batch),))
    return outputs


def structure(model: RelevanceModel, backend: Backend) -> RelevanceModel:
    """Return the model itself, its parameters on the meta device; buffers, which a factory's module may have, stay."""
    buffers = [
        (child, name, buffer.to(backend.device))
        for child in model.modules()
        for name, buffer in child.named_buffers(recurse=False)
    ]
    model.to("meta")
    for child, name, buffer in buffers:
        setattr(child, name, buffer)
    return model


# The strategy.


class FlatStrategy(ParallelStrategy):
    """A Strategy: all weights of one model on this rank's device; gradients are taken of the masters."""

    def __init__(
        self,
        model: RelevanceModel,
        backend: Backend,
        *,
        precision: Precision,
        chunk_mib: float = CHUNK_MIB,
        has_one_rate: bool = False,
        recompute: bool = False,
        world_size: int = 1,
        host_mean: HostMean,
        host_gather: HostGather = list,
    ) -> None:
        """Take the model over. `chunk_mib`, `has_one_rate`: see FlatLayout; `host_*`: over ranks, of CPU tensors.

        `recompute`: of the encoder's layers only the inputs are kept for backward.
        """
        self.backend, self.world_size = backend, world_size
        self._precision: Precision = precision
        self._host_mean, self._host_gather = host_mean, host_gather
        self.layout = FlatLayout.of(model, chunk_mib, has_one_rate=has_one_rate)
        self.parts: Sequence[FlatVector] = self.layout.chunks
        self.size = self.layout.size
        self.weights, self.masters = self._placed(self.layout.pack(model.state_dict()))
        self.model = structure(model, backend)  # its parameters are the masters
        self.template = self.model.state_dict()
        if recompute:
            if not len(model.encoder.layers):
                raise ConfigError(
                    "train.parallel.recompute units with model.factory, whose layers have no names here",
                    expected="recompute none, or parameters in shards, whose program finds layers by itself",
                    next_command="--train.parallel.recompute none, or --train.parallel.shard all",
                )
            self.model.encoder.run_layer = partial(recomputed, backend)

    def _placed(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return (weights, masters) on the device."""
        masters = [flat.to(self.backend.device).requires_grad_() for flat in flats]
        return masters, masters

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        return flat_forward(
            self.model, self.layout, self.weights, batch, backend=self.backend, precision=self._precision
        )

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Return that of each weight, in the form that is reduced: anything later is a graph more."""
        del is_last
        with torch.autograd.set_multithreading_enabled(False):  # the engine's thread keeps gradients a little longer
            return list(torch.autograd.grad(loss, self.weights, materialize_grads=True))

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.backend.gather(tensors, self._host_gather) if self.world_size > 1 else tensors

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Take means over ranks, in place, of a gradient by master and the loss after it.

        In the graph it is one collective for each vector, the loss with the last; through the host one for all.
        """
        if self.world_size == 1:
            return sums
        *chunks, last, loss = sums
        together = [*([chunk] for chunk in chunks), [last, loss]] if self.backend.reduces_in_graph else [sums]
        for tensors in together:
            self.backend.reduce(tensors, self._host_mean)
        return sums

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        return torch.sqrt(self.layout.sum_of_squares(grads, traced=self.backend.is_lazy))

    def publish(self) -> None:
        """Do nothing: the weights are the masters."""

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy with one synchronisation."""
        host = iter(self.backend.to_host([*self.weights, *chain.from_iterable(state.values())]))
        weights = self.layout.unpack(list(islice(host, len(self.weights))))
        parts = {name: list(islice(host, len(tensors))) for name, tensors in state.items()}
        return weights, {name: torch.cat(chunks) if len(chunks) > 1 else chunks[0] for name, chunks in parts.items()}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        moves = self._holders(self.layout.pack(weights))
        for name, whole in (saved or {}).items():
            moves += zip(state[name], self._held(name, whole, state[name]), strict=True)
        for ours, incoming in moves:
            ours.copy_(incoming.to(ours.dtype).to(self.backend.device))
        self.backend.synchronise()

    def _holders(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pair the tensors that hold weights with what they are to hold of whole chunks."""
        return list(zip(self.weights, flats, strict=True))

    def _held(self, name: str, whole: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return what `tensors` hold of a vector of a checkpoint. Raises CheckpointError for another size."""
        return split_saved(name, whole, [tensor.numel() for tensor in tensors])


def split_saved(name: str, whole: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split a vector of a checkpoint. Raises CheckpointError for another size."""
    if list(whole.shape) != [sum(sizes)]:
        raise CheckpointError(f"{name} has {list(whole.shape)} elements", expected=f"[{sum(sizes)}] for this model")
    return torch.split(whole, list(sizes))
