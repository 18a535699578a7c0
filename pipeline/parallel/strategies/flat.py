"""Plain data parallelism, where every rank holds the full model with its parameters stored in a few flat vectors.

With flat vectors, the optimizer, the gradient reduction and the gradient norm process a few tensors instead of a
hundred. On XLA, tracing gradient clipping and AdamW takes 65 ms of host time per step for a hundred tensors, but only
2.3 ms for a few flat vectors (`python -m bench --only host_share`). We still split the parameters into several chunks,
because a collective over the full gradient couldn't start until the backward pass has finished, and because vectors
of hundreds of MiB exceed limits of the Neuron compiler (aws-neuron-sdk issue 1118). For comparison, the Neuron wrapper
in torch_xla reduces 50 MB at a time (torch_xla 2.9, _internal/neuron.py).
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
from pipeline.parallel.activations import checkpointed_call, compiled_call
from pipeline.parallel.strategies import FlatVector, ParallelStrategy, Precision, State

_WIDEST = 4  # largest out / in ratio of a feed-forward layer, which is exceeded by embedding tables
ALIGNED = 16  # in elements, see _segments
_FEWEST_SEGMENTS, _LARGEST_SEGMENT = 32, 2**21
_ENCODER = "encoder."
CHUNK_MIB = 32.0
"""Maximum size of a flat vector in MiB (fp32). Each vector is updated and reduced as a whole."""


@dataclass(frozen=True)
class FlatLayout:
    """The layout of named tensors in chunks.

    Parameters with weight decay precede those without. Within each of the two groups, those of the encoder come first.
    """

    chunks: tuple[FlatVector, ...]

    @staticmethod
    def of(module: nn.Module, chunk_mib: float = CHUNK_MIB, *, has_one_rate: bool = False) -> "FlatLayout":
        """Divide the parameters of a module into chunks of at most `chunk_mib` MiB (fp32).

        A segment that exceeds the limit gets a chunk to itself. Tied parameters are not supported.
        `has_one_rate`: whether a chunk may contain parameters of both the encoder and later layers, which is possible
        if they have the same learning rate. This doesn't change the order or the segments.
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
        """Concatenate named tensors into flat fp32 vectors on the CPU."""
        return [
            torch.cat([_flatten(state[name].detach().to("cpu", torch.float32)) for name in chunk.names])
            for chunk in self.chunks
        ]

    def unpack(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return differentiable named views of flat vectors.

        In the backward pass, the gradients of each chunk are concatenated once.
        """
        named: dict[str, Tensor] = {}
        for chunk, flat in zip(self.chunks, flats, strict=True):
            views: tuple[Tensor, ...] = _Views.apply(flat, chunk.shapes)  # type: ignore[no-untyped-call]
            named.update(zip(chunk.names, views, strict=True))
        return named

    def sum_of_squares(self, flats: Sequence[Tensor], *, traced: bool = False) -> Tensor:
        """Compute the sum of squares of all elements.

        Segments are summed first, and in a fixed order, so that the result doesn't depend on the chunk size.
        """
        pairs = zip(self.chunks, flats, strict=True)
        sums = [part.sum() for chunk, flat in pairs for part in torch.split(flat * flat, list(chunk.segments))]
        return torch.stack(sums).sum() if traced else sum(sums[1:], start=sums[0])


Parameter = tuple[str, torch.Size]


def _segments(group: Sequence[Parameter], target: int) -> Iterator[list[Parameter]]:
    """Split parameters into runs of at least `target` elements, except that the last one may be shorter.

    Runs only end at multiples of ALIGNED elements. Splitting elsewhere would change the results in the last bits,
    because PyTorch's fused AdamW uses different instructions for elements that do not fill a vector register
    (aten/src/ATen/native/cpu/FusedAdamKernel.cpp).
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
    """Group consecutive segments into runs of at most `limit` elements. A larger segment forms its own run."""
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
    """Split a vector into views with the given shapes.

    The backward pass concatenates the gradients. By default, autograd would sum up one zero-padded vector per view.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, shapes: tuple[torch.Size, ...]) -> tuple[Tensor, ...]:
        vectors = torch.split(flat, [shape.numel() for shape in shapes])
        return tuple(
            vector.view(shape[1], shape[0]).t() if _is_transposed(shape) else vector.view(shape)
            for vector, shape in zip(vectors, shapes, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return torch.cat([_flatten(grad) for grad in grads]), None


def _is_transposed(shape: Sequence[int]) -> bool:
    """Return whether a matrix is stored transposed, which applies to linear layers with more outputs than inputs.

    On XLA:CPU, computing the gradient is 1.4x faster with shape [in, out]. Embedding tables are not transposed, since
    lookups read their rows.
    """
    return len(shape) == 2 and shape[1] < shape[0] <= _WIDEST * shape[1]


def _flatten(tensor: Tensor) -> Tensor:
    return (tensor.t() if _is_transposed(tensor.shape) else tensor).reshape(-1)


# The forward pass with flat vectors as weights. Training and evaluation share this code so that they trace the same
# graph.


def flat_forward(
    model: RelevanceModel,
    layout: FlatLayout,
    flats: Sequence[Tensor],
    batch: Mapping[str, Tensor],
    *,
    backend: Backend,
    precision: Precision,
) -> RelevanceOutputs:
    """Compute scores and embeddings for a batch, taking the structure from `model` and the weights from `flats`."""
    # torch_xla replays in-place updates for every view of a tensor. We avoid this by creating the views from a copy,
    # which XLA elides.
    if precision == "bf16":
        flats = [flat.to(torch.bfloat16, copy=backend.is_lazy) for flat in flats]
    elif backend.is_lazy:
        flats = [flat.clone() for flat in flats]
    context = backend.autocast(torch.bfloat16) if precision == "autocast" else nullcontext()
    with context:
        outputs: RelevanceOutputs = torch.func.functional_call(model, layout.unpack(flats), (inputs_of(batch),))
    return outputs


def parameters_to_meta(model: RelevanceModel, backend: Backend) -> RelevanceModel:
    """Move the parameters of a model to the meta device and its buffers to the backend's device.

    Only models built by a factory have buffers.
    """
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
    """Strategy that keeps all weights on each rank's device and computes gradients for the masters."""

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
        world_size: int = 1,
        host_mean: HostMean,
        host_gather: HostGather = list,
    ) -> None:
        """Move the weights of `model` to flat vectors on the device.

        `chunk_mib`, `has_one_rate`: see FlatLayout.
        `recompute`: whether to use activation checkpointing for the layers of the encoder.
        `compiled`: whether to compile them. This is not possible together with `recompute`.
        `host_mean`, `host_gather`: collectives for CPU tensors.
        """
        self.backend, self.world_size = backend, world_size
        self._precision: Precision = precision
        self._host_mean, self._host_gather = host_mean, host_gather
        self.layout = FlatLayout.of(model, chunk_mib, has_one_rate=has_one_rate)
        self.parts: Sequence[FlatVector] = self.layout.chunks
        self.size = self.layout.size
        self.weights, self.masters = self._to_device(self.layout.pack(model.state_dict()))
        self.model = parameters_to_meta(model, backend)  # the parameters are stored in the masters
        self.template = self.model.state_dict()
        if recompute:
            if not len(model.encoder.layers):
                raise ConfigError(
                    "train.parallel.recompute units does not support model.factory, whose layers are unknown",
                    expected="recompute none, or shard all, which detects the layers automatically",
                    next_command="--train.parallel.recompute none, or --train.parallel.shard all",
                )
            self.model.encoder.run_layer = partial(checkpointed_call, backend)
        elif compiled:
            self.model.encoder.run_layer = compiled_call(backend)

    def _to_device(self, flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return (weights, masters) on the device."""
        masters = [flat.to(self.backend.device).requires_grad_() for flat in flats]
        return masters, masters

    def forward(self, batch: Mapping[str, Tensor]) -> RelevanceOutputs:
        return flat_forward(
            self.model, self.layout, self.weights, batch, backend=self.backend, precision=self._precision
        )

    def gradient(self, loss: Tensor, *, is_last: bool) -> list[Tensor]:
        """Compute the gradient of each weight in its final form, since a later conversion would be a separate graph."""
        del is_last
        with torch.autograd.set_multithreading_enabled(False):  # the autograd thread would keep gradients alive longer
            return list(torch.autograd.grad(loss, self.weights, materialize_grads=True))

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        return self.backend.gather(tensors, self._host_gather) if self.world_size > 1 else tensors

    def reduce(self, sums: list[Tensor]) -> list[Tensor]:
        """Average the gradients and the loss, which is the last tensor, over ranks in place.

        In a graph, this uses one collective per vector, and the loss is reduced together with the last vector. On the
        host, a single call reduces all tensors.
        """
        if self.world_size == 1:
            return sums
        *chunks, last, loss = sums
        buckets = [*([chunk] for chunk in chunks), [last, loss]] if self.backend.reduces_in_graph else [sums]
        for tensors in buckets:
            self.backend.reduce(tensors, self._host_mean)
        return sums

    def norm(self, grads: Sequence[Tensor]) -> Tensor:
        return torch.sqrt(self.layout.sum_of_squares(grads, traced=self.backend.is_lazy))

    def publish(self) -> None:
        """Do nothing, because the weights are the masters."""

    def snapshot(self, state: State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Copy weights and optimizer state to host memory, synchronizing with the device only once."""
        host = iter(self.backend.to_host([*self.weights, *chain.from_iterable(state.values())]))
        weights = self.layout.unpack(list(islice(host, len(self.weights))))
        parts = {name: list(islice(host, len(tensors))) for name, tensors in state.items()}
        return weights, {name: torch.cat(chunks) if len(chunks) > 1 else chunks[0] for name, chunks in parts.items()}

    @torch.no_grad()
    def restore(self, weights: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None, state: State) -> None:
        moves = self._weight_pairs(self.layout.pack(weights))
        for name, vector in (saved or {}).items():
            moves += zip(state[name], self._split(name, vector, state[name]), strict=True)
        for target, source in moves:
            target.copy_(source.to(target.dtype).to(self.backend.device))
        self.backend.synchronise()

    def _weight_pairs(self, flats: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pair each tensor that holds weights with its new values, which are taken from full chunks."""
        return list(zip(self.weights, flats, strict=True))

    def _split(self, name: str, vector: Tensor, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Split a checkpoint's vector into new values for `tensors`. Raises CheckpointError if sizes don't match."""
        return split_saved(name, vector, [tensor.numel() for tensor in tensors])


def split_saved(name: str, vector: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split a checkpoint's vector into parts of the given sizes. Raises CheckpointError if the total doesn't match."""
    if list(vector.shape) != [sum(sizes)]:
        raise CheckpointError(f"{name} has shape {list(vector.shape)}", expected=f"[{sum(sizes)}] for this model")
    return torch.split(vector, list(sizes))
