"""Choose the buckets of a dataset from the lengths of its texts.

The choice is stored in the workspace and is kept even if later texts are longer or shorter. Otherwise, all partitions
would have to be prepared again, and all graphs compiled again, whenever the data drifts.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Literal

import numpy as np
import pyarrow as pa
from pydantic import Field

from pipeline.core.batch_order import Bucket, fit_buckets
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.encode import encode_rows
from pipeline.data.rows import RawBatch, RowChunk, cut_chunks
from pipeline.data.sources import Source, reading_progress
from pipeline.data.survey import LabelSet
from pipeline.data.token_sets import KIND
from pipeline.data.tokenizer import TextTokenizer
from pipeline.data.validate import RowRules, validate_chunk
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage, read_record

_SAMPLE_ROWS, _SAMPLE_BYTES = 20_000, 64 * 2**20
_MAX_FILES, _MAX_ROWS = 500, 2_000_000
"""Maximum number of files and of rows to read for the sample. Each file is read from its beginning."""


class PinnedBuckets(Record):
    """The buckets of a dataset, stored as tokens/<dataset>/buckets.json when they are chosen."""

    schema_version: Literal[1] = 1
    buckets: tuple[str, ...]
    rows: int = Field(0, description="Number of rows whose texts were measured (0: not chosen from texts)")


def known_buckets(config: DataConfig, workspace: Storage, parent: tuple[str, ...]) -> PinnedBuckets | None:
    """Return the buckets of a dataset, or None if they still have to be chosen.

    In order of precedence, these are the configured ones, those that the parent model was trained with, those pinned
    for the dataset, and those of its prepared partitions (which earlier versions did not pin).
    """
    if config.buckets:
        return PinnedBuckets(buckets=config.buckets)
    pinned = _read(config, workspace)
    if parent and (pinned is None or pinned.buckets != parent):
        return PinnedBuckets(buckets=parent)
    if pinned is not None:
        return pinned
    folder = f"tokens/{config.name}"
    counts = Counter(buckets_of(workspace, f"{folder}/{name}") for name in workspace.list_dirs(folder))
    del counts[()]
    return PinnedBuckets(buckets=max(counts, key=lambda each: (counts[each], each))) if counts else None


def buckets_of(workspace: Storage, prefix: str) -> tuple[str, ...]:
    """Read the buckets of a prepared partition. Returns an empty tuple if it has not been committed."""
    manifest = read_manifest(workspace, prefix)
    buckets = manifest.fields["buckets"] if manifest is not None and manifest.kind == KIND else None
    return tuple(map(str, buckets)) if isinstance(buckets, list) else ()


def pin_buckets(
    config: DataConfig,
    source: Source,
    tokenizer: TextTokenizer,
    labels: LabelSet,
    workspace: Storage,
    longest: int,
    stop: StopSignal,
) -> PinnedBuckets:
    """Choose buckets of at most `longest` tokens from a sample of the rows, and pin them.

    If several workers pin buckets at the same time, the first one wins. They are not pinned if no row is usable.
    """
    rules = RowRules(config, "flat", tuple(labels.gains), labels.row_gains, carve_valid=False)
    query, product = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for chunk in _sample(source, stop):
        encoded = encode_rows(validate_chunk(chunk, rules)[0], config, tokenizer)
        query.append(encoded.queries.lengths)
        product.append(encoded.products.lengths)
    rows = sum(map(len, query))
    if not rows:
        return PinnedBuckets(buckets=(Bucket(longest, longest).name,))
    chosen = fit_buckets(np.concatenate(query), np.concatenate(product), longest)
    pinned = PinnedBuckets(buckets=tuple(bucket.name for bucket in chosen), rows=rows)
    workspace.write_if_absent(_key(config), pinned.model_dump_json().encode() + b"\n")
    return _read(config, workspace) or pinned


def _key(config: DataConfig) -> str:
    return f"tokens/{config.name}/buckets.json"


def _read(config: DataConfig, workspace: Storage) -> PinnedBuckets | None:
    return read_record(workspace, _key(config), PinnedBuckets, "a record of pinned buckets", "trnpipe prepare")


def _sample(source: Source, stop: StopSignal) -> Iterator[RowChunk]:
    """Read every `stride`-th row of evenly spaced files. The stride is doubled whenever the sample is too large.

    The sample only depends on the input, so that all workers of an array choose the same buckets.
    """
    files = source.files[:: -(-len(source.files) // _MAX_FILES) or 1]
    sample, size, stride = list[tuple[int, RawBatch]](), 0.0, 1
    with reading_progress("measuring texts", files) as advance:
        for number, file in enumerate(files):
            for batch in source.read(file):
                stop.raise_if_set(f"reading {file.key}")
                advance(batch)
                sample.append((number, _thin(batch, number, stride)))
                size += _size(sample[-1][1])
                while size > 1 and stride < _MAX_ROWS:
                    stride *= 2
                    sample = [(index, _thin(each, index, stride)) for index, each in sample]
                    size = sum(_size(each) for _, each in sample)
                if len(batch.rows) and batch.rows[-1] * len(files) >= _MAX_ROWS:
                    break
    for number, group in groupby(sample, key=lambda item: item[0]):
        yield from cut_chunks(files[number].key, (batch for _, batch in group), _SAMPLE_ROWS)


def _thin(batch: RawBatch, offset: int, stride: int) -> RawBatch:
    is_kept = (offset + batch.rows) % stride == 0
    return RawBatch(batch.columns.filter(pa.array(is_kept)), batch.rows[is_kept])


def _size(batch: RawBatch) -> float:
    """Return the fraction of the maximum size of a sample that a batch takes up."""
    return max(len(batch.rows) / _SAMPLE_ROWS, int(batch.columns.nbytes) / _SAMPLE_BYTES)
