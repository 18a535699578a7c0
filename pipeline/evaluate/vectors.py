"""Vectors of texts with the encoder of a checkpoint, opened when the first text comes."""

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from pipeline.backends import Backend
from pipeline.checkpoint.store import Checkpoint
from pipeline.compile.watch import GraphWatch
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.embed.config import EmbedConfig
from pipeline.embed.embedder import Embedder, counted, open_embedder
from pipeline.evaluate.holdout_rows import Holdout
from pipeline.evaluate.scores import VectorSample

_WINDOW = 512


class Vectors:
    """Windows of texts to unit vectors [n, D]."""

    def __init__(
        self, checkpoint: Checkpoint, backend: Backend, config: EmbedConfig, watch: GraphWatch, stop: StopSignal
    ) -> None:
        self._checkpoint, self._backend, self._config = checkpoint, backend, config
        self._watch, self._stop = watch, stop

    @cached_property
    def _embedder(self) -> Embedder:
        return open_embedder(self._checkpoint, self._backend, self._config, self._watch, stop=self._stop)

    def __call__(self, windows: Iterable[Tokens]) -> Iterator[npt.NDArray[np.float32]]:
        return self._embedder.stream(windows)

    def sample(self, holdout: Holdout, count: int) -> VectorSample | None:
        """Both embeddings of at most `count` rows of a holdout."""
        if not count:
            return None
        sample_id, query, product = holdout.sample(count)
        windows = [*pieces(query, _WINDOW), *pieces(product, _WINDOW)]
        found = list(counted(self(windows), "embedding a sample", 2 * len(sample_id)))
        half = len(found) // 2
        return VectorSample(sample_id, np.concatenate(found[:half]), np.concatenate(found[half:]))
