"""Vectors of the queries and products of a mining task, with the encoder of a checkpoint."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pipeline.core.arrays import Float32s
from pipeline.data.tokenizer import Tokens, pieces
from pipeline.mine.task import MiningTask

_WINDOW = 512


class ModelVectors:
    """`embed`: windows of texts to their unit vectors [n, D], in order; those of a window depend on it alone."""

    def __init__(self, task: MiningTask, embed: Callable[[Iterable[Tokens]], Iterator[Float32s]]) -> None:
        self._task, self._embed = task, embed

    def items(self, start: int, stop: int) -> Float32s:
        """[n, D]"""
        return self._vectors(self._task.items(start, stop))

    def queries(self, start: int, stop: int) -> Float32s:
        """[n, D]"""
        return self._vectors(self._task.queries(start, stop))

    def _vectors(self, tokens: Tokens) -> Float32s:
        return np.concatenate(list(self._embed(pieces(tokens, _WINDOW))))
