"""Read rows from memory-mapped token shards."""

import errno
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.batch_order import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.core.shuffle import mix64

Arrays = dict[str, npt.NDArray[Any]]
_DTYPES = {"U8": np.uint8, "U16": np.uint16, "I16": np.int16, "I32": np.int32, "I64": np.int64, "F32": np.float32}
FIELDS = ("query", "product", "label", "gain", "numeric", "categorical", "sample_id", "query_id")
EXTRA = ("slice", "partition")  # additional arrays for evaluation: int64 [N, S] (see data/validate.py), and int64 [N]
NO_ID = -1  # value of the array `product_id`, int64 [N], in shards of earlier versions
_BLOCK_ROWS = 65_536
_POSITION_SHIFT = np.uint64(32)


def text_hashes(padded: npt.NDArray[np.integer], pad_id: int) -> UInt64s:
    """Hash N texts, given as padded token ids [N, T]. The hash of a text does not depend on the amount of padding."""
    tokens = padded.astype(np.uint64)
    positions = np.arange(padded.shape[1], dtype=np.uint64) << _POSITION_SHIFT
    terms = np.where(padded == pad_id, np.uint64(0), mix64(tokens | positions))
    return mix64(terms.sum(axis=1, dtype=np.uint64))


@dataclass(frozen=True)
class ShardFile:
    """A safetensors file with `rows[b]` rows in bucket b. All of them have the given value in the array `partition`."""

    path: Path
    rows: tuple[int, ...]
    partition: int = 0


def map_safetensors(path: Path) -> Arrays:
    """Memory-map all tensors of a safetensors file as read-only arrays.

    The file consists of the length of its header (8 bytes), the header in JSON, and the data.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    data = np.memmap(path, mode="r", dtype=np.uint8)
    arrays: Arrays = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays[name] = data[start:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


class TokenRows:
    """The rows of one split, which may be stored in any number of shards.

    In each bucket, rows are numbered consecutively, in the order of the shards.
    """

    def __init__(
        self,
        shards: Sequence[ShardFile],
        buckets: Sequence[Bucket],
        pad_id: int,
        extra: Sequence[str] = (),
        selected: Sequence[Int64s] | None = None,
    ) -> None:
        self.buckets = tuple(buckets)
        self.pad_id = pad_id
        self._fields = (*FIELDS, *extra)
        self._shards = tuple(shards)
        counts = np.array([shard.rows for shard in shards], dtype=np.int64).reshape(len(shards), len(self.buckets))
        self._starts = np.vstack([np.zeros((1, len(self.buckets)), dtype=np.int64), np.cumsum(counts, axis=0)])
        self.maps: dict[int, Arrays] = {}
        self._selected = selected

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of rows in each bucket."""
        return tuple(map(len, self._selected)) if self._selected else tuple(int(size) for size in self._starts[-1])

    def select(self, rows: Sequence[Int64s]) -> "TokenRows":
        """Return only the rows with the given numbers in each bucket, which are numbered from 0 again."""
        selected = TokenRows(self._shards, self.buckets, self.pad_id, self._fields[len(FIELDS) :], rows)
        selected.maps = self.maps  # so that no shard is opened twice
        return selected

    def blocks(self) -> Iterator[tuple[int, Int64s]]:
        """Iterate over all rows in order, yielding a bucket and the numbers of a bounded number of its rows."""
        for bucket, size in enumerate(self.sizes):
            for start in range(0, size, _BLOCK_ROWS):
                yield bucket, np.arange(start, min(size, start + _BLOCK_ROWS), dtype=np.int64)

    def read_blocks(self, fields: Sequence[str]) -> Iterator[Arrays]:
        """Yield the given arrays of all rows in order, a bounded number of rows at a time."""
        for bucket, numbers in self.blocks():
            yield self.read(np.full(len(numbers), bucket), numbers, bucket, fields)

    def read(self, pools: Int64s, rows: Int64s, bucket: int, fields: Sequence[str] = ()) -> Arrays:
        """Read N rows, where row i has the number `rows[i]` in bucket `pools[i]`.

        Texts are padded to the shape of `bucket`. Returns an array with N rows, in the order requested, for each of the
        given fields (default: all fields).
        """
        shape = self.buckets[bucket]
        num_tokens = {"query": shape.query_tokens, "product": shape.product_tokens}
        result: Arrays = {}
        for pool in np.unique(pools):
            indices = np.flatnonzero(pools == pool)
            numbers = self._selected[pool][rows[indices]] if self._selected else rows[indices]
            shard_of = np.searchsorted(self._starts[:, pool], numbers, side="right") - 1
            for shard in np.unique(shard_of):
                chosen = indices[shard_of == shard]
                local = numbers[shard_of == shard] - self._starts[shard, pool]
                values: npt.NDArray[Any]
                for field in fields or self._fields:
                    values = self._map(int(shard))[f"b{pool}.{field}"][local]
                    if field not in result and field in num_tokens:
                        result[field] = np.full((len(rows), num_tokens[field]), self.pad_id, dtype=np.int32)
                    elif field not in result:
                        result[field] = np.zeros((len(rows), *values.shape[1:]), dtype=values.dtype)
                    if values.ndim == 2:
                        result[field][chosen, : values.shape[1]] = values
                    else:
                        result[field][chosen] = values
        return result

    def _map(self, shard: int) -> Arrays:
        if shard not in self.maps:
            path, partition = self._shards[shard].path, np.int64(self._shards[shard].partition)
            try:
                arrays = map_safetensors(path)
                for bucket, count in enumerate(self._shards[shard].rows):
                    arrays[f"b{bucket}.partition"] = np.broadcast_to(partition, count)
                    arrays.setdefault(f"b{bucket}.product_id", np.broadcast_to(np.int64(NO_ID), count))
                    for name in (f"b{bucket}.{field}" for field in self._fields if count):
                        if len(arrays[name]) != count:
                            raise ValueError(f"{name} has {len(arrays[name])} rows instead of {count}")
            except (OSError, ValueError, KeyError, struct.error) as error:
                if isinstance(error, OSError) and error.errno == errno.EMFILE:
                    raise ConfigError(
                        f"too many open files after opening {len(self.maps):,} of {len(self._shards):,} token shards",
                        expected="a limit on open files per process that exceeds the number of shards",
                        next_command="ulimit -n 65536, then run the same command again",
                    ) from error
                raise DataError(
                    f"token shard {path} cannot be read: {error}",
                    expected="the file that was committed by the prepare stage",
                    next_command="delete its folder and run trnpipe prepare again",
                ) from error
            self.maps[shard] = arrays
        return self.maps[shard]
