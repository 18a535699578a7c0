"""Encode chunks of rows in worker processes.

Each chunk is validated, tokenised and packed into one shard per split. Once all of its shards have been written, a
record with its row counts marks the chunk as finished.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import Field
from safetensors.numpy import save

from pipeline.core.arrays import Bools, Float32s, Int64s
from pipeline.core.batch_order import Bucket
from pipeline.core.record import Record
from pipeline.data.config import DataConfig
from pipeline.data.lexical import lexical_features
from pipeline.data.rows import RowChunk, product_text, text_characters
from pipeline.data.shards import Arrays
from pipeline.data.token_sets import QUARANTINE_ROWS, SPLITS, QuarantinedRow, ShardInfo, Split
from pipeline.data.tokenizer import TextTokenizer, Tokens, fit_pairs, id_dtype, pack
from pipeline.data.validate import CleanRows, Names, RowRules, validate_chunk
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.storage import os_errors


class ChunkRecord(Record):
    """The row counts of a finished chunk. Note that `rows_read` does not include `rows_filtered`."""

    file: str
    rows_filtered: int
    rows_read: int
    rows_bad: int
    reasons: dict[str, int]
    truncated_rows: int
    tokens: int
    shards: dict[Split, ShardInfo]
    sizes_bytes: dict[str, int]
    quarantined: tuple[QuarantinedRow, ...]
    slices: Names = Field({}, description="Names of the slice values, by column")
    without_category: tuple[int, ...] = Field(
        (), description="Number of usable rows without a value, for each categorical column"
    )
    without_number: tuple[int, ...] = Field(
        (), description="Number of usable rows without a value, for each numeric feature that may be missing"
    )


@dataclass(frozen=True)
class Staging:
    """The staging folder of a partition.

    The shards in `files/` are committed as the token set, and `records/` keeps track of the finished chunks.
    """

    folder: Path

    @property
    def files(self) -> Path:
        return self.folder / "files"

    def record_path(self, index: int) -> Path:
        return self.folder / "records" / f"{index:05d}.json"

    def create(self) -> None:
        with os_errors("writing", f"file://{self.folder}"):
            self.files.mkdir(parents=True, exist_ok=True)
            (self.folder / "records").mkdir(exist_ok=True)

    def finished(self, index: int) -> ChunkRecord | None:
        """Return the record of a chunk if all of its shards are complete, otherwise None."""
        try:
            record = ChunkRecord.model_validate_json(self.record_path(index).read_bytes())
            is_complete = all((self.files / name).stat().st_size == size for name, size in record.sizes_bytes.items())
        except (OSError, ValueError):  # missing or truncated, so the chunk is encoded again
            return None
        return record if is_complete else None


@dataclass(frozen=True)
class ChunkTask:
    """A chunk to encode, with its index in the partition and the name that its shard files share."""

    index: int
    name: str
    chunk: RowChunk
    rules: RowRules
    staging: Staging


_tokenizer = lru_cache(maxsize=1)(TextTokenizer)


def encode_chunk(tokenizer_json: bytes, task: ChunkTask) -> tuple[str, int, ChunkRecord]:
    """Encode a chunk, write its shards, and finally write its record.

    Returns the name of the partition, the index of the chunk, and the record.
    """
    config, tokenizer = task.rules.config, _tokenizer(tokenizer_json)
    rows, bad, rows_read = validate_chunk(task.chunk, task.rules)
    encoded = encode_rows(rows, config, tokenizer)
    shards: dict[Split, ShardInfo] = {}
    sizes: dict[str, int] = {}
    reasons = Counter[str]()
    for row in bad:
        reasons[row.reason] += row.count
    with os_errors("writing", f"file://{task.staging.folder}"):
        for split_index, split in enumerate(SPLITS):
            index = np.flatnonzero(rows.split == split_index)
            if not len(index):
                continue
            name = f"{split}-{task.name}.safetensors"
            by_bucket = [index[encoded.bucket[index] == number] for number in range(len(config.buckets))]
            arrays = bucket_arrays(rows, encoded, by_bucket, tokenizer, config.bucket_shapes)
            data = save(arrays)
            write_bytes_atomic(task.staging.files / name, data)
            shards[split], sizes[name] = ShardInfo(file=name, rows=tuple(map(len, by_bucket))), len(data)
        record = ChunkRecord(
            file=task.chunk.file,
            rows_filtered=task.chunk.num_rows - rows_read,
            rows_read=rows_read,
            rows_bad=reasons.total(),
            reasons=dict(sorted(reasons.items())),
            truncated_rows=int(encoded.truncated.sum()),
            tokens=int(encoded.num_tokens.sum()),
            shards=shards,
            sizes_bytes=sizes,
            quarantined=tuple(bad[:QUARANTINE_ROWS]),
            slices=rows.slices.names,
            without_category=tuple((rows.categorical == 0).sum(axis=0).tolist()),
            without_number=tuple(np.isnan(rows.numeric).sum(axis=0).tolist()),
        )
        write_bytes_atomic(task.staging.record_path(task.index), record.model_dump_json().encode())
    return task.rules.partition, task.index, record


@dataclass(frozen=True)
class EncodedRows:
    """N encoded rows, where `num_tokens` [N] counts the tokens of both texts after truncation to the row's bucket."""

    queries: Tokens
    products: Tokens
    numeric: Float32s
    bucket: Int64s
    truncated: Bools
    num_tokens: Int64s


def tokenize_pairs(
    config: DataConfig, tokenizer: TextTokenizer, queries: Sequence[str], titles: Sequence[str], texts: Sequence[str]
) -> tuple[Tokens, Tokens]:
    """Tokenise the queries and the products of N rows, without truncating them to a bucket."""
    limit = text_characters(config.bucket_shapes)
    products = (product_text(title, text, limit) for title, text in zip(titles, texts, strict=True))
    return (
        tokenizer.encode([config.query_prefix + query[:limit] for query in queries]),
        tokenizer.encode([config.product_prefix + product for product in products]),
    )


def encode_rows(rows: CleanRows, config: DataConfig, tokenizer: TextTokenizer) -> EncodedRows:
    """Tokenise valid rows, assign each row to a bucket, and append the lexical features to the numeric features."""
    queries, products = tokenize_pairs(config, tokenizer, rows.query, rows.title, rows.text)
    bucket, truncated, num_tokens = fit_pairs(queries, products, config.bucket_shapes)
    numeric = rows.numeric
    if config.lexical:
        numeric = np.concatenate([numeric, lexical_features(rows.query, rows.title)], axis=1)
    return EncodedRows(queries, products, numeric, bucket, truncated, num_tokens)


def bucket_arrays(
    rows: CleanRows,
    encoded: EncodedRows,
    by_bucket: Sequence[Int64s],
    tokenizer: TextTokenizer,
    buckets: Sequence[Bucket],
) -> Arrays:
    """Return the named tensors of a shard, given the row indices of each bucket."""
    columns: Arrays = {
        "label": rows.label,
        "gain": rows.gain,
        "numeric": encoded.numeric,
        "categorical": rows.categorical,
        "sample_id": rows.sample_id,
        "query_id": rows.query_id,
        "product_id": rows.product_id,
    }
    if rows.slices.names:
        columns["slice"] = rows.slices.values
    pad_id, sep_id, dtype = tokenizer.pad_id, tokenizer.sep_id, id_dtype(tokenizer.vocab_size)
    arrays: Arrays = {}
    for number, (bucket, chosen) in enumerate(zip(buckets, by_bucket, strict=True)):
        if not len(chosen):
            continue
        sides = (
            ("query", encoded.queries, bucket.query_tokens),
            ("product", encoded.products, bucket.product_tokens),
        )
        for side, tokens, length in sides:
            arrays[f"b{number}.{side}"] = pack(tokens, chosen, length, pad_id=pad_id, sep_id=sep_id, dtype=dtype)
        arrays |= {f"b{number}.{name}": np.ascontiguousarray(values[chosen]) for name, values in columns.items()}
    return arrays
