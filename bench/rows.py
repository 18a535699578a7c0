"""Rows made up in memory, for benches of which the text does not matter, only shapes and the share of padding."""

from collections.abc import Sequence

import numpy as np

from pipeline.core.arrays import Int64s
from pipeline.core.batch_order import Bucket
from pipeline.data.shards import Arrays
from pipeline.model.config import InputSpec

PAD_ID, FIRST_ID = 0, 5
NUMERIC = ("overlap", "jaccard", "digits", "length")


def input_spec(vocab_size: int) -> InputSpec:
    """Three classes and four numbers a pair."""
    return InputSpec(
        vocab_size=vocab_size,
        pad_id=PAD_ID,
        labels=("irrelevant", "related", "exact"),
        label_gains=(0.0, 0.5, 1.0),
        numeric=NUMERIC,
    )


class RandomRows:
    """A RowSource of one bucket. Texts fill `least` to all of it (mean 3/4), the rest is padding."""

    def __init__(self, spec: InputSpec, bucket: Bucket, rows: int, seed: int = 3, *, least: float = 0.5) -> None:
        random = np.random.default_rng(seed)
        labels = random.integers(0, spec.num_classes, rows)
        self.buckets, self.pad_id = (bucket,), spec.pad_id
        self.arrays: Arrays = {
            "query": _texts(random, rows, bucket.query_tokens, spec.vocab_size, least),
            "product": _texts(random, rows, bucket.product_tokens, spec.vocab_size, least),
            "label": labels.astype(np.int16),
            "gain": np.array(spec.label_gains, dtype=np.float32)[labels],
            "numeric": random.random((rows, len(spec.numeric)), dtype=np.float32),
            "categorical": np.zeros((rows, 0), dtype=np.int32),
            "sample_id": np.arange(rows, dtype=np.int64),
            "query_id": np.arange(rows, dtype=np.int64) // 4,
        }

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.arrays["label"]),)

    def read(self, pools: Int64s, rows: Int64s, bucket: int, fields: Sequence[str] = ()) -> Arrays:
        del pools, bucket, fields  # there is one bucket
        return {name: values[rows] for name, values in self.arrays.items()}


def _texts(
    random: np.random.Generator, rows: int, tokens: int, vocab_size: int, least: float
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    ids = random.integers(FIRST_ID, vocab_size, (rows, tokens), dtype=np.int32)
    lengths = random.integers(int(least * tokens), tokens + 1, (rows, 1))
    return np.where(np.arange(tokens) < lengths, ids, np.int32(PAD_ID)).astype(np.int32)
