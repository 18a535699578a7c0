"""Embed texts as unit vectors, window by window, while keeping the device busy across windows."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.backends import Backend, Batch
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.identity import embed_plan, open_part_guard
from pipeline.compile.manifest import GraphPosition, GraphWatch
from pipeline.context import StageContext
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, Tokens, take
from pipeline.embed.catalogue import chunk_tokens, cut_tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.unpadded import FlatEncoder, supports_packed_weights
from pipeline.model.encoder import BertEncoder, TextEncoder
from pipeline.model.hf import from_hf
from pipeline.model.ops import choose_forms
from pipeline.model.relevance import RelevanceModel
from pipeline.parallel.process_group import open_device
from pipeline.settings import Settings

# Batching of a window of tokens. Batches, and therefore vectors, depend only on the window.
#
# Texts of a row do not attend to each other (TextEncoder.rows). So a few static shapes fit any catalogue with little
# padding: 2.5 % of the tokens of 35,311 real titles in rows of 128 or 512 (`python -m bench.embed`).


@dataclass(frozen=True)
class Packing:
    """An assignment of N texts to R rows of static lengths.

    `bucket` [R]: index of each row's length, the longest rows first. `row`, `start` and `slot` [N]: the row of each
    text, its first token and its number in the row.
    """

    bucket: Int64s
    row: Int64s
    start: Int64s
    slot: Int64s


def pack_rows(lengths: Int64s, row_lengths: Sequence[int], texts_per_row: Sequence[int]) -> Packing:
    """Assign texts to rows by best fit, the longest first.

    Args:
        lengths: tokens of each text [N], each at least 1 and at most the longest row.
        row_lengths: ascending. A row has the shortest length that fits its longest text.
        texts_per_row: maximum texts in a row of each length.
    Only the number of texts of each length matters, so identical rows are assigned together.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= row_lengths[-1]:
        raise ValueError(f"texts of {lengths.min()} to {lengths.max()} tokens do not fit rows of {row_lengths[-1]}")
    order = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=1)
    taken = np.concatenate([[0], np.cumsum(counts)])  # first text of each length in `order` that has no row yet
    row, start, slot = (np.zeros(len(lengths), dtype=np.int64) for _ in range(3))
    bucket: list[Int64s] = []
    num_rows = 0
    while counts.any():
        kind = int(np.searchsorted(row_lengths, np.flatnonzero(counts)[-1]))
        pattern = _fill(counts, row_lengths[kind], texts_per_row[kind])
        sizes, repeats = np.unique(pattern, return_counts=True)
        num_identical = int((counts[sizes] // repeats).min())
        offset = 0
        for number, size in enumerate(pattern):
            texts = order[taken[size] : taken[size] + num_identical]
            row[texts], start[texts], slot[texts] = num_rows + np.arange(num_identical), offset, number
            taken[size] += num_identical
            counts[size] -= num_identical
            offset += size
        bucket.append(np.full(num_identical, kind, dtype=np.int64))
        num_rows += num_identical
    return Packing(np.concatenate(bucket) if bucket else np.zeros(0, dtype=np.int64), row, start, slot)


def _fill(counts: Int64s, space: int, max_texts: int) -> list[int]:
    """Return the lengths of the texts of one row: repeatedly the longest remaining text that fits."""
    remaining, pattern = counts.copy(), list[int]()
    while space and len(pattern) < max_texts:
        fitting = np.flatnonzero(remaining[: space + 1])
        if not len(fitting):
            break
        size = int(fitting[-1])
        num = min(int(remaining[size]), space // size, max_texts - len(pattern))
        pattern += [size] * num
        remaining[size] -= num
        space -= num * size
    return pattern


_TOKENS_PER_TEXT = 4  # rows of texts that are shorter on average are not filled


@dataclass(frozen=True)
class RowShape:
    """One static shape: `rows` rows of `length` tokens, each of at most `texts` texts."""

    rows: int
    length: int
    texts: int

    def dummy(self) -> Batch:
        names = ("tokens", "positions", "segments")
        return {name: torch.zeros(self.rows, self.length, dtype=torch.int32) for name in names}


def row_shapes(buckets: Sequence[int], tokens: int, *, packed: bool = True) -> tuple[RowShape, ...]:
    """Return the shape of each bucket, with at most `tokens` tokens. Unless `packed`, a row has one text."""
    tokens_per_text = _TOKENS_PER_TEXT if packed else tokens
    return tuple(RowShape(tokens // length, length, max(1, length // tokens_per_text)) for length in buckets)


_TOKENS_MULTIPLE = 64
"""Batches without static shape are padded to a multiple of this, because kernels are built per number of tokens."""


@dataclass(frozen=True)
class HostBatch:
    """One batch before it is sent to the device, with n texts in batch order.

    `texts` [n]: index of each text in the window. `outputs` [n]: index of its vector in the output of the device.
    `lengths` [n]: its number of tokens.
    """

    tensors: Batch
    texts: Int64s
    outputs: Int64s
    lengths: Int64s

    @property
    def num_slots(self) -> int:
        """Number of tokens of the batch, padding included."""
        return next(iter(self.tensors.values())).numel()


def distinct_texts(window: Tokens, limit: int, sep_id: int) -> tuple[Tokens, Int64s]:
    """Return the distinct texts, cut to `limit` tokens, and the index of each text of the window among them.

    One in eight of 35,311 real offers has the same title as another.
    """
    tokens = cut_tokens(window, limit, sep_id) if window.lengths.max(initial=0) > limit else window
    data, numbers = tokens.ids.tobytes(), dict[bytes, int]()
    bounds = (tokens.offsets * tokens.ids.itemsize).tolist()
    inverse = np.fromiter(
        (numbers.setdefault(data[start:end], len(numbers)) for start, end in pairwise(bounds)),
        dtype=np.int64,
        count=len(bounds) - 1,
    )
    if len(numbers) == len(inverse):
        return tokens, inverse
    return take(tokens, np.unique(inverse, return_index=True)[1]), inverse


def row_batches(tokens: Tokens, shapes: Sequence[RowShape], pad_id: int) -> Iterator[HostBatch]:
    """Yield batches of static shapes, several texts per row. The last batch of a shape is padded with empty rows."""
    lengths = tokens.lengths
    packing = pack_rows(lengths, [shape.length for shape in shapes], [shape.texts for shape in shapes])
    order = np.argsort(packing.row, kind="stable")
    for kind, shape in enumerate(shapes):
        rows = np.flatnonzero(packing.bucket == kind)
        for first in range(0, len(rows), shape.rows):
            low, high = rows[first], rows[min(first + shape.rows, len(rows)) - 1]
            texts = order[
                np.searchsorted(packing.row, low, sorter=order) : np.searchsorted(
                    packing.row, high, side="right", sorter=order
                )
            ]
            row, size = packing.row[texts] - low, lengths[texts]
            ends = np.cumsum(size)
            positions = np.arange(ends[-1]) - np.repeat(ends - size, size)  # 0, 1, 2, ... within each text
            target = np.repeat(row * shape.length + packing.start[texts], size) + positions
            batch: Batch = {}
            for name, empty, values in (
                ("tokens", pad_id, take(tokens, texts).ids),
                ("positions", 0, positions),
                ("segments", 0, np.repeat(packing.slot[texts] + 1, size)),
            ):
                flat = np.full(shape.rows * shape.length, empty, dtype=np.int32)
                flat[target] = values
                batch[name] = torch.from_numpy(flat.reshape(shape.rows, shape.length))
            yield HostBatch(batch, texts, row * shape.texts + packing.slot[texts], size)


def flat_batches(tokens: Tokens, budget: int, pad_id: int) -> Iterator[HostBatch]:
    """Yield batches `ids` [S] without padding between texts, of at most `budget` tokens or one text, longest first."""
    lengths = tokens.lengths
    order = np.argsort(-lengths, kind="stable")
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        offset = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, offset + budget, side="right")))
        texts, first = order[first:last], last
        ids = take(tokens, texts).ids
        padded = np.full(-(-len(ids) // _TOKENS_MULTIPLE) * _TOKENS_MULTIPLE, pad_id, dtype=np.int32)
        padded[: len(ids)] = ids
        yield HostBatch({"ids": torch.from_numpy(padded)}, texts, np.arange(len(texts)), lengths[texts])


# Device-specific code: how texts are batched and how a batch is computed, with static shapes or on a CPU.

PHASE = "embed"


Wait = Callable[[], Float32s]
"""Waits for the vectors [n, D] of a started batch, in the order of its texts."""
Start = Callable[[Batch, HostBatch], Wait]
_AHEAD = 2
"""Batches queued in addition to the one that the device computes."""


class EmbeddingEngine(Protocol):
    """One device with an encoder."""

    dim: int
    ahead: int
    """Batches to start before waiting for the first of them."""

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        """Yield texts as batches for the device."""

    def start_batches(self) -> AbstractContextManager[Start]:
        """Return a context manager that yields the function to start a batch on the device."""


class RowEncoder(nn.Module):
    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Return the vectors of TextEncoder.rows, fp32 [R * texts, D]."""
        return self.encoder.rows(tokens, positions, segments, texts).flatten(0, 1)


class EmbedProgram:
    """The engine of devices that need static shapes or run compiled programs best. Takes over the encoder."""

    ahead = _AHEAD

    def __init__(
        self, encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch | None = None
    ) -> None:
        choose_forms(encoder, traced=backend.is_lazy, sums_by_matmul=backend.sums_by_matmul)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        module = RowEncoder(encoder).eval().requires_grad_(False).to(dtype).to(backend.device)
        compiled = config.compiled and backend.can_compile
        forward = backend.compiled(module) if compiled else module
        self._forward = cast(Callable[[Tensor, Tensor, Tensor, int], Tensor], forward)
        self.backend = backend
        self.shapes = row_shapes(config.buckets, config.batch_tokens(backend.default_tokens), packed=encoder.packs_rows)
        self._texts_per_row = {shape.length: shape.texts for shape in self.shapes}
        self._watch: GraphWatch = watch or GraphWatch()
        self._pad_id, self.dim = encoder.pad_id, encoder.width
        backend.step_boundary(list(module.parameters()))

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        return row_batches(texts, self.shapes, self._pad_id)

    def start_batches(self) -> AbstractContextManager[Start]:
        return nullcontext(self._start)

    def _start(self, batch: Batch, host: HostBatch) -> Wait:
        wait = self.backend.fetch([self.vectors(batch)])
        return lambda: wait()[0].numpy()[host.outputs]

    @torch.no_grad()
    def vectors(self, batch: Batch) -> Tensor:
        """Compute unnormalised vectors, fp32 [rows * texts, D], of a batch with one of `shapes`, on the device."""
        rows, length = batch["tokens"].shape
        texts = self._texts_per_row[length]
        vectors = self._forward(batch["tokens"], batch["positions"], batch["segments"], texts)
        position = GraphPosition(PHASE, str(length), rows)
        self._watch.before(position, [vectors])
        self.backend.step_boundary([vectors])
        self._watch.after(position)
        return vectors


class CpuEngine:
    """The engine of a CPU: one batch per thread, because threads that share a batch wait for each other.

    Uses PyTorch's number of threads (OMP_NUM_THREADS). Vectors do not depend on it.
    """

    def __init__(self, encoder: BertEncoder, backend: Backend, config: EmbedConfig) -> None:
        self._tokens = config.batch_tokens(backend.default_tokens)
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._encoder = FlatEncoder(encoder, dtype, self._tokens, packed=supports_packed_weights(dtype))
        self._pad_id, self.dim = encoder.pad_id, encoder.width
        self._threads = torch.get_num_threads()
        self.ahead = self._threads + _AHEAD

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        return flat_batches(texts, self._tokens, self._pad_id)

    @contextmanager
    def start_batches(self) -> Iterator[Start]:
        num_threads = torch.get_num_threads()
        pool = ThreadPoolExecutor(self._threads, "embed", initializer=torch.set_num_threads, initargs=(1,))

        def start(batch: Batch, host: HostBatch) -> Wait:
            return pool.submit(self._vectors, batch, host).result

        try:
            yield start
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(num_threads)  # the threads of the pool changed MKL's limit for the whole process

    def _vectors(self, batch: Batch, host: HostBatch) -> Float32s:
        vectors: Float32s = self._encoder(batch["ids"], host.lengths.tolist()).numpy()
        return vectors


def open_engine(encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch) -> EmbeddingEngine:
    """Return the engine of a device. Takes over the encoder. Raises ConfigError if the device's compiler is missing."""
    if backend.shares_host_memory and not backend.is_lazy and isinstance(encoder, BertEncoder):
        return CpuEngine(encoder, backend, config)
    return EmbedProgram(encoder, backend, config, watch)


# Windows of texts to vectors.

_TINY = np.float32(1e-12)


@dataclass
class EmbedFigures:
    texts: int = 0
    tokens: int = 0
    """Computed tokens without padding. Equal texts of a window are computed once."""
    padded_tokens: int = 0
    """Computed padding tokens."""
    seconds: float = 0.0
    """Time in `stream`."""
    idle_s: float = 0.0
    """Time in which no batch was started, because input was missing or vectors were being consumed. An upper bound of
    the device's idle time."""

    @property
    def padding_share(self) -> float:
        """Padding as a fraction of all computed tokens."""
        return self.padded_tokens / max(1, self.padded_tokens + self.tokens)

    @property
    def idle_share(self) -> float:
        return self.idle_s / self.seconds if self.seconds else 0.0


Embed = Callable[[Iterable[Tokens]], Iterator[Float32s]]
"""Converts windows of texts to unit vectors [n, D], in order."""


@dataclass
class _Window:
    """A window in progress: `vectors` [distinct texts, D], and the index of each of its texts among them."""

    inverse: Int64s
    first: Int64s | None
    """Index of each text's first chunk, or None if no text is chunked. `vectors` and `sizes` are those of chunks."""
    sizes: Int64s
    vectors: Float32s
    pending_batches: int

    def pool_chunks(self) -> Float32s:
        """Return unnormalised vectors of the distinct texts, which are the token-weighted means of their chunks."""
        if self.first is None:
            return self.vectors
        weights = self.sizes.astype(np.float32)
        counts = np.diff(self.first, append=len(self.vectors))
        sums = np.add.reduceat(self.vectors * weights[:, None], self.first)
        means = sums / np.add.reduceat(weights, self.first)[:, None]
        return np.where((counts > 1)[:, None], means, self.vectors[self.first])


class Embedder:
    """Embeds windows of texts as unit vectors, which depend only on their window.

    Args:
        limit: maximum tokens of a text. Longer texts are cut and end with `sep_id`.
        chunk: maximum tokens read at a time. The vector of a longer text is the token-weighted mean of its chunks.
        stop: checked at every batch.
    """

    def __init__(
        self,
        engine: EmbeddingEngine,
        backend: Backend,
        *,
        limit: int,
        sep_id: int,
        stop: StopSignal,
        chunk: int | None = None,
    ) -> None:
        self._engine, self._backend, self._stop = engine, backend, stop
        self.limit, self._sep_id, self._chunk = limit, sep_id, chunk or limit
        self.dim = engine.dim
        self.figures = EmbedFigures()

    def stream(self, windows: Iterable[Tokens]) -> Iterator[Float32s]:
        """Yield fp32 [N, D] for each window, in the order of its texts.

        Windows are read in the thread of the backend's loader, some batches ahead. Raises Preempted.
        """
        figures, last = self.figures, time.monotonic()
        open_windows, loading = deque[_Window](), deque[tuple[_Window, HostBatch]]()  # appended by the loader's thread
        started = deque[tuple[_Window, HostBatch, Wait]]()

        def lap() -> None:
            nonlocal last
            now = time.monotonic()
            figures.seconds, last = figures.seconds + now - last, now

        @contextmanager
        def idle() -> Iterator[None]:
            began = time.monotonic()
            yield
            figures.idle_s += time.monotonic() - began
            lap()

        def finish_batch() -> Iterator[Float32s]:
            """Wait for the oldest started batch. Yield the windows that it completes."""
            window, host, wait = started.popleft()
            window.vectors[host.texts] = wait()
            window.pending_batches -= 1
            tokens = int(host.lengths.sum())
            figures.tokens += tokens
            figures.padded_tokens += host.num_slots - tokens
            lap()
            return complete()

        def complete() -> Iterator[Float32s]:
            """Yield complete windows, in order."""
            while open_windows and not open_windows[0].pending_batches:
                window = open_windows.popleft()
                figures.texts += len(window.inverse)
                with idle():
                    vectors = window.pool_chunks()
                    vectors /= np.maximum(np.sqrt(np.einsum("nd,nd->n", vectors, vectors)), _TINY)[:, None]
                    yield vectors if len(vectors) == len(window.inverse) else vectors[window.inverse]

        feed = self._feed(windows, open_windows, loading)
        with self._engine.start_batches() as start, self._backend.loader(feed) as ready:
            while True:
                with idle():
                    batch = next(ready, None)
                if batch is None:
                    break
                self._stop.raise_if_set("embedding")
                window, host = loading.popleft()
                started.append((window, host, start(batch, host)))
                if len(started) > self._engine.ahead:
                    yield from finish_batch()
            while started:
                self._stop.raise_if_set("embedding")
                yield from finish_batch()
            if loading:
                raise RuntimeError(f"{len(loading)} batches were lost: the loader thread ended early")
            yield from complete()

    def _feed(
        self, windows: Iterable[Tokens], open_windows: deque[_Window], loading: deque[tuple[_Window, HostBatch]]
    ) -> Iterator[Batch]:
        for tokens in windows:
            chunks, inverse = distinct_texts(tokens, self.limit, self._sep_id)
            first = None
            if chunks.lengths.max(initial=0) > self._chunk:
                chunks, first = chunk_tokens(chunks, self._chunk, self._sep_id)
            batches = list(self._engine.batches(chunks))
            vectors = np.empty((len(chunks.lengths), self.dim), dtype=np.float32)
            window = _Window(inverse, first, chunks.lengths, vectors, len(batches))
            open_windows.append(window)
            for host in batches:
                loading.append((window, host))
                yield host.tensors


def with_progress(vectors: Iterable[Float32s], doing: str, texts: int) -> Iterator[Float32s]:
    """Yield vectors of windows and show the progress. `texts`: the total number of texts."""
    with progress(doing, texts, "texts") as advance:
        for window in vectors:
            advance(len(window))
            yield window


def open_embedder(
    checkpoint: Checkpoint,
    backend: Backend,
    config: EmbedConfig,
    watch: GraphWatch | None = None,
    *,
    stop: StopSignal | None = None,
) -> Embedder:
    """Load the encoder of a verified checkpoint onto a device. Raises CheckpointError if its weights do not match."""
    state = checkpoint.state
    with torch.device("meta"):
        model = RelevanceModel(state.model, state.inputs)
    weights = from_hf(checkpoint.weights(), model.state_dict(), source=checkpoint.uri)
    model.load_state_dict(weights, assign=True)
    return Embedder(
        open_engine(model.encoder, backend, config, watch or GraphWatch()),
        backend,
        limit=config.text_limit(state.max_tokens, state.model.max_positions),
        chunk=config.chunk_limit(state.max_tokens, state.model.max_positions),
        sep_id=TextTokenizer(checkpoint.tokenizer(), checkpoint.uri).sep_id,
        stop=stop or StopSignal(),
    )


def open_device_embedder(settings: Settings, ctx: StageContext, checkpoint: Checkpoint) -> Embedder:
    """Open this rank's device and load the model onto it. Graphs are checked against the workspace's manifests."""
    backend, watch = open_device(settings.backend, ctx.world), None
    if backend.is_lazy or backend.compiles_steps:
        state, device = checkpoint.state, backend.device_name()
        plan = embed_plan(state.model, settings.embed, settings.compile, state.inputs, device, ctx.world.world_size)
        watch = open_part_guard(ctx.workspace, plan, backend, settings.compile, ctx.console)
    return open_embedder(checkpoint, backend, settings.embed, watch, stop=ctx.stop)
