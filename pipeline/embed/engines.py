"""What differs between devices: how texts go to one, and what starts a batch there."""

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from pipeline.backends import Backend, Batch
from pipeline.compile.watch import GraphWatch
from pipeline.core.arrays import Float32s
from pipeline.core.errors import ConfigError
from pipeline.data.tokenizer import Tokens
from pipeline.embed.config import EmbedConfig
from pipeline.embed.flat import FlatEncoder
from pipeline.embed.linear import packs_weights
from pipeline.embed.program import EmbedProgram
from pipeline.embed.windows import HostBatch, flat_batches, row_batches
from pipeline.model.encoder import TextEncoder

Wait = Callable[[], Float32s]
"""Waits for the vectors [n, D] of a batch that was started, in the order of its texts."""
Start = Callable[[Batch, HostBatch], Wait]
_AHEAD = 2
"""Batches that wait behind what the device is at."""


class Engine(Protocol):
    """One device with an encoder."""

    dim: int
    ahead: int
    """Batches to start before the first of them is waited for."""

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        """How texts go to the device."""

    def opened(self) -> AbstractContextManager[Start]:
        """What starts a batch that is on the device."""


class RowEngine:
    """Static shapes: devices that need them, or that run compiled programs best."""

    ahead = _AHEAD

    def __init__(self, encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch) -> None:
        self._program = EmbedProgram(encoder, backend, config, watch)
        self._pad_id, self.dim = encoder.pad_id, encoder.word_embeddings.embedding_dim

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        return row_batches(texts, self._program.shapes, self._pad_id)

    def opened(self) -> AbstractContextManager[Start]:
        return nullcontext(self._start)

    def _start(self, batch: Batch, host: HostBatch) -> Wait:
        arrived = self._program.backend.fetch([self._program.vectors(batch)])
        return lambda: arrived()[0].numpy()[host.places]


class CpuEngine:
    """A CPU: a thread for each core, each at a batch of its own. Two threads at one batch would wait for each other.

    As many as PyTorch would use (OMP_NUM_THREADS); vectors do not depend on it.
    """

    def __init__(self, encoder: TextEncoder, config: EmbedConfig) -> None:
        self._tokens = config.batch_tokens("cpu")
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._encoder = FlatEncoder(encoder, dtype, self._tokens, packed=packs_weights(dtype))
        self._pad_id, self.dim = encoder.pad_id, encoder.word_embeddings.embedding_dim
        self._threads = torch.get_num_threads()
        self.ahead = self._threads + _AHEAD

    def batches(self, texts: Tokens) -> Iterator[HostBatch]:
        return flat_batches(texts, self._tokens, self._pad_id)

    @contextmanager
    def opened(self) -> Iterator[Start]:
        before = torch.get_num_threads()
        pool = ThreadPoolExecutor(self._threads, "embed", initializer=torch.set_num_threads, initargs=(1,))

        def start(batch: Batch, host: HostBatch) -> Wait:
            return pool.submit(self._vectors, batch, host).result

        try:
            yield start
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)  # what a thread sets is the limit of MKL in all of them

    def _vectors(self, batch: Batch, host: HostBatch) -> Float32s:
        vectors: Float32s = self._encoder(batch["ids"], host.lengths.tolist()).numpy()
        return vectors


def open_engine(encoder: TextEncoder, backend: Backend, config: EmbedConfig, watch: GraphWatch) -> Engine:
    """The engine of a device. Takes the encoder over. Raises ConfigError when what compiles for it is not there."""
    if backend.name == "cpu":
        return CpuEngine(encoder, config)
    if backend.name == "cuda" and config.compiled and not any(map(shutil.which, ("cc", "gcc", "clang"))):
        raise ConfigError(
            "no C compiler, which torch.compile needs for its launchers",
            expected="cc, gcc or clang on the path",
            next_command="--no-embed.compiled, which is slower, or install gcc",
        )
    return RowEngine(encoder, backend, config, watch)
