"""Embed texts as unit vectors.

Texts are processed in windows. While the device computes a batch, the next ones are already prepared, even if they
belong to the next window, so that the device stays busy.
"""

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

# Batch texts within a window. Batches, and therefore vectors, depend only on the texts in the same window.
#
# Several texts can share a row, because they do not attend to each other (see TextEncoder.rows). As a result, a few
# static shapes are enough for any catalogue. For example, padding accounts for only 2.5 % of the tokens if 35,311 real
# titles are packed into rows of 128 and 512 tokens (`python -m bench.embed`).


@dataclass(frozen=True)
class Packing:
    """An assignment of N texts to R rows with static lengths."""

    bucket: Int64s
    """Index of the length of each row [R]. The longest rows are first."""
    row: Int64s
    """Row of each text [N]."""
    start: Int64s
    """Position of the first token of each text in its row [N]."""
    slot: Int64s
    """Index of each text among the texts of its row [N]."""


def pack_rows(lengths: Int64s, row_lengths: Sequence[int], texts_per_row: Sequence[int]) -> Packing:
    """Assign texts to rows by best fit, starting with the longest texts.

    The assignment depends only on how many texts of each length there are, so rows with the same combination of lengths
    are assigned together.

    Args:
        lengths: number of tokens of each text [N], from 1 to the longest row length.
        row_lengths: possible row lengths in ascending order. Each row gets the shortest one that fits its longest text.
        texts_per_row: maximum number of texts in a row of each length.
    """
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= row_lengths[-1]:
        raise ValueError(f"texts of {lengths.min()} to {lengths.max()} tokens do not fit rows of {row_lengths[-1]}")
    order = np.argsort(lengths, kind="stable")
    counts = np.bincount(lengths, minlength=1)
    taken = np.concatenate([[0], np.cumsum(counts)])  # position in `order` of the next unassigned text of each length
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
    """Return the lengths of the texts to put in a row, by repeatedly adding the longest remaining text that fits."""
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


_TOKENS_PER_TEXT = 4  # limits the texts per row. If texts are shorter on average, rows are not completely filled


@dataclass(frozen=True)
class RowShape:
    """The static shape of a batch with `rows` rows of `length` tokens and at most `texts` texts in each row."""

    rows: int
    length: int
    texts: int

    def dummy(self) -> Batch:
        names = ("tokens", "positions", "segments")
        return {name: torch.zeros(self.rows, self.length, dtype=torch.int32) for name in names}


def row_shapes(buckets: Sequence[int], tokens: int, *, packed: bool = True) -> tuple[RowShape, ...]:
    """Return a batch shape of at most `tokens` tokens for each bucket. Unless `packed`, each row has a single text."""
    tokens_per_text = _TOKENS_PER_TEXT if packed else tokens
    return tuple(RowShape(tokens // length, length, max(1, length // tokens_per_text)) for length in buckets)


_TOKENS_MULTIPLE = 64
"""Batches without a static shape are padded to a multiple of this, because a kernel is built per number of tokens."""


@dataclass(frozen=True)
class HostBatch:
    """A batch of n texts that has not been sent to the device yet."""

    tensors: Batch
    texts: Int64s
    """Index of each text in the window [n]."""
    outputs: Int64s
    """Index of the vector of each text in the output of the device [n]."""
    lengths: Int64s
    """Number of tokens of each text [n]."""

    @property
    def num_slots(self) -> int:
        """Number of tokens in the batch, including padding."""
        return next(iter(self.tensors.values())).numel()


def distinct_texts(window: Tokens, limit: int, sep_id: int) -> tuple[Tokens, Int64s]:
    """Return the distinct texts, truncated to `limit` tokens, and the index of each text of the window among them.

    Duplicates are common. For example, one in eight of 35,311 real offers has the same title as another offer.
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
    """Pack several texts into each row and yield batches of static shapes.

    The last batch of each shape is padded with empty rows.
    """
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
            positions = np.arange(ends[-1]) - np.repeat(ends - size, size)  # 0, 1, 2, ... for each text
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
    """Concatenate texts, longest first, and yield batches of at most `budget` tokens (or a single text)."""
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


# The engines determine how texts are batched and computed on a device, either with static shapes or on a CPU.

PHASE = "embed"


Wait = Callable[[], Float32s]
"""Waits for a started batch and returns its vectors [n, D], in the order of its texts."""
Start = Callable[[Batch, HostBatch], Wait]
_AHEAD = 2
"""Number of batches to queue in addition to the one that the device is computing."""


class EmbeddingEngine(Protocol):
    """Computes batches of texts with an encoder on one device."""

    dim: int
    ahead: int
    """Number of batches to start before waiting for the first of them."""

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        """Divide texts into batches for the device."""

    def start_batches(self) -> AbstractContextManager[Start]:
        """Return a context manager that yields a function to start a batch on the device."""


class RowEncoder(nn.Module):
    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, positions: Tensor, segments: Tensor, texts: int) -> Tensor:
        """Call TextEncoder.rows and flatten the result to fp32 [R * texts, D]."""
        return self.encoder.rows(tokens, positions, segments, texts).flatten(0, 1)


class EmbedProgram:
    """The engine for devices that require static shapes or benefit from compilation. Takes ownership of the encoder."""

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
        """Compute the unnormalised vectors of a batch on the device. The batch must have one of `shapes`.

        Returns fp32 [rows * texts, D].
        """
        rows, length = batch["tokens"].shape
        texts = self._texts_per_row[length]
        vectors = self._forward(batch["tokens"], batch["positions"], batch["segments"], texts)
        position = GraphPosition(PHASE, str(length), rows)
        self._watch.before(position, [vectors])
        self.backend.step_boundary([vectors])
        self._watch.after(position)
        return vectors


class CpuEngine:
    """The engine for CPUs, which computes a separate batch in each thread.

    This is faster than computing one batch with all threads, because these would have to wait for each other. The
    number of threads is that of PyTorch (OMP_NUM_THREADS) and does not affect the vectors.
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
            torch.set_num_threads(num_threads)  # the pool's initializer changes MKL's limit for the whole process

    def _vectors(self, batch: Batch, host: HostBatch) -> Float32s:
        vectors: Float32s = self._encoder(batch["ids"], host.lengths.tolist()).numpy()
        return vectors


def open_engine(encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch) -> EmbeddingEngine:
    """Return the engine for a device. Takes ownership of the encoder. Raises ConfigError if a compiler is missing."""
    if backend.shares_host_memory and not backend.is_lazy and isinstance(encoder, BertEncoder):
        return CpuEngine(encoder, backend, config)
    return EmbedProgram(encoder, backend, config, watch)


# The embedder converts windows of texts to vectors.

_TINY = np.float32(1e-12)


@dataclass
class EmbedFigures:
    texts: int = 0
    tokens: int = 0
    """Number of computed tokens, excluding padding. Duplicate texts in a window are computed only once."""
    padded_tokens: int = 0
    """Number of computed padding tokens."""
    seconds: float = 0.0
    """Time spent in `stream`."""
    idle_s: float = 0.0
    """Time spent waiting for input or for the consumer of the vectors, during which no batch is started. This is an
    upper bound for the idle time of the device."""

    @property
    def padding_share(self) -> float:
        """Fraction of the computed tokens that are padding."""
        return self.padded_tokens / max(1, self.padded_tokens + self.tokens)

    @property
    def idle_share(self) -> float:
        return self.idle_s / self.seconds if self.seconds else 0.0


Embed = Callable[[Iterable[Tokens]], Iterator[Float32s]]
"""Converts windows of texts to unit vectors [n, D] and yields them in the same order."""


@dataclass
class _Window:
    """A window for which some batches have not been computed yet."""

    inverse: Int64s
    """Index of each text among the distinct texts."""
    first: Int64s | None
    """Index of the first chunk of each distinct text, or None if no text is split into chunks."""
    sizes: Int64s
    """Number of tokens of each chunk."""
    vectors: Float32s
    """Vectors of the chunks [chunks, D]."""
    pending_batches: int

    def pool_chunks(self) -> Float32s:
        """Return the unnormalised vector of each distinct text, which is the token-weighted mean of its chunks."""
        if self.first is None:
            return self.vectors
        weights = self.sizes.astype(np.float32)
        counts = np.diff(self.first, append=len(self.vectors))
        sums = np.add.reduceat(self.vectors * weights[:, None], self.first)
        means = sums / np.add.reduceat(weights, self.first)[:, None]
        return np.where((counts > 1)[:, None], means, self.vectors[self.first])


class Embedder:
    """Embeds windows of texts as unit vectors. A vector depends only on the window that contains its text.

    Args:
        limit: maximum number of tokens of a text. Longer texts are truncated and end with `sep_id`.
        chunk: maximum number of tokens that the encoder reads at a time. A longer text is split into chunks, and its
            vector is the token-weighted mean of the chunk vectors.
        stop: stop signal, which is checked for every batch.
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
        """Yield the vectors of each window as fp32 [N, D], in the order of its texts.

        Windows are read a few batches ahead, in the thread of the backend's loader. Raises Preempted.
        """
        figures, last = self.figures, time.monotonic()
        # The loader's thread appends to these two queues.
        open_windows, loading = deque[_Window](), deque[tuple[_Window, HostBatch]]()
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
            """Wait for the oldest batch that was started, and yield the windows that it completes."""
            window, host, wait = started.popleft()
            window.vectors[host.texts] = wait()
            window.pending_batches -= 1
            tokens = int(host.lengths.sum())
            figures.tokens += tokens
            figures.padded_tokens += host.num_slots - tokens
            lap()
            return complete()

        def complete() -> Iterator[Float32s]:
            """Yield the windows for which all batches have been computed, in order."""
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
                raise RuntimeError(f"{len(loading)} batches were lost, because the loader thread ended early")
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
    """Yield the vectors of each window while displaying the progress. `texts` is the total number of texts."""
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
    """Load the encoder of a verified checkpoint onto a device.

    Raises CheckpointError if the weights do not match the model.
    """
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
    """Open the device of this rank and load the model onto it.

    On a device that compiles graphs, each graph is checked against the manifests in the workspace.
    """
    backend, watch = open_device(settings.backend, ctx.world), None
    if slow := backend.precision_warning("embed.precision", settings.embed.precision):
        ctx.console.warn(slow)
    if backend.is_lazy or backend.compiles_steps:
        state, device = checkpoint.state, backend.device_name()
        plan = embed_plan(state.model, settings.embed, settings.compile, state.inputs, device, ctx.world.world_size)
        watch = open_part_guard(ctx.workspace, plan, backend, settings.compile, ctx.console)
    return open_embedder(checkpoint, backend, settings.embed, watch, stop=ctx.stop)
