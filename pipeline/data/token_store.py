"""Prepared partitions opened for reading: checked to fit together, local, memory-mapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipeline.core.buckets import Bucket
from pipeline.core.errors import ConfigError, DataError
from pipeline.data.selection import Partition
from pipeline.data.shards import ShardFile, TokenRows
from pipeline.data.token_set import FORMAT_VERSION, Split, TokenSetInfo
from pipeline.io.commit import fetch_dir, read_manifest
from pipeline.io.storage import Storage


@dataclass(frozen=True)
class TokenSet:
    """One committed partition."""

    prefix: str
    info: TokenSetInfo

    @property
    def partition(self) -> Partition:
        return Partition(self.info.partition, self.info.watermark, self.info.fingerprint)


def read_token_sets(workspace: Storage, prefixes: Sequence[str]) -> list[TokenSet]:
    """What partitions say of themselves. Raises DataError for one not committed, ConfigError when they do not fit."""
    sets: list[TokenSet] = []
    for prefix in prefixes:
        manifest = read_manifest(workspace, prefix)
        if manifest is None or manifest.kind != "tokens":
            raise DataError(
                f"{workspace.uri(prefix)} holds no prepared data",
                expected="the token shards of the prepare stage",
                next_command="trnpipe prepare",
            )
        try:
            sets.append(TokenSet(prefix, TokenSetInfo.model_validate(manifest.fields)))
        except ValidationError as error:
            raise DataError(
                f"{workspace.uri(prefix)} is prepared data of another version: {error.errors()[0]['loc']}",
                expected=f"token shards of format {FORMAT_VERSION}",
                next_command="trnpipe prepare",
            ) from error
    if not sets:
        raise DataError("no prepared partition", expected="at least one", next_command="trnpipe prepare")
    for other in sets[1:]:
        for name in ("tokenizer_fingerprint", "buckets", "labels", "numeric", "categorical", "pad_id", "slice_columns"):
            seen, expected = getattr(other.info, name), getattr(sets[0].info, name)
            if seen != expected:
                raise ConfigError(
                    f"partition {other.info.partition} was prepared with {name} {seen}",
                    expected=f"{expected}, as {sets[0].info.partition}",
                    next_command="trnpipe prepare, with the settings of this run",
                )
    return sets


def open_rows(
    workspace: Storage, sets: Sequence[TokenSet], split: Split, cache_dir: Path, extra: Sequence[str] = ()
) -> TokenRows:
    """The rows of one split over all given partitions; S3 shards are fetched and verified first.

    `extra`: arrays to read beside shards.FIELDS, of shards.EXTRA; `partition` is the place in `sets`.
    """
    shards = []
    for place, token_set in enumerate(sets):
        folder = fetch_dir(workspace, token_set.prefix, cache_dir, deep=False)
        files = token_set.info.splits.get(split, ())
        shards += [ShardFile(folder / shard.file, shard.rows, place) for shard in files]
    buckets = [Bucket.parse(text) for text in sets[0].info.buckets]
    return TokenRows(shards, buckets, sets[0].info.pad_id, extra)
