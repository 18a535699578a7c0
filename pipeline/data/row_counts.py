"""What became of the rows of a partition: the account that is stored with its shards, whoever encoded them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.data.chunks import ChunkRecord, EncodeSettings
from pipeline.data.config import DataConfig
from pipeline.data.input_files import Partition
from pipeline.data.lexical import numeric_names
from pipeline.data.rows import RawBatch, quarantine_lines
from pipeline.data.survey import LabelSet
from pipeline.data.token_sets import (
    QUARANTINE,
    SPLITS,
    CategoricalInfo,
    FileRows,
    JudgedSplit,
    QuarantinedRow,
    ShardInfo,
    SliceInfo,
    Split,
    TokenSetInfo,
)
from pipeline.data.tokenizer import TextTokenizer
from pipeline.data.validate import merge_names
from pipeline.io.storage import Storage

_TOP_REASONS = 3


class FileCount(Record):
    """What the reader of one file gave, counted before any of it is encoded."""

    rows: int = 0
    blank: int = 0
    left_out: int = 0

    def plus(self, batch: RawBatch) -> "FileCount":
        rows = len(batch.rows) + sum(row.count for row in batch.bad) + batch.left_out
        return FileCount(rows=self.rows + rows, blank=self.blank + batch.blank, left_out=self.left_out + batch.left_out)


@dataclass(frozen=True)
class Encoding:
    """What decides how rows are encoded, the same for all partitions."""

    config: DataConfig
    tokenizer: TextTokenizer
    labels: LabelSet


@dataclass(frozen=True)
class NamedPartition:
    """A partition, and where its shards belong. `prefix` ends in the fingerprint of all that its bytes depend on."""

    partition: Partition
    prefix: str
    settings: EncodeSettings

    @property
    def fingerprint(self) -> str:
        return self.prefix.rsplit("/", 1)[-1]


def shards_by_split(records: Sequence[ChunkRecord]) -> dict[Split, tuple[ShardInfo, ...]]:
    """In the order of the chunks; only splits that have rows."""
    found = {split: tuple(record.shards[split] for record in records if split in record.shards) for split in SPLITS}
    return {split: shards for split, shards in found.items() if shards}


def describe_partition(
    encoding: Encoding,
    named: NamedPartition,
    read: Mapping[str, FileCount],
    records: Sequence[ChunkRecord],
    judged: dict[Split, JudgedSplit],
    texts_of_several_ids: int = 0,
) -> TokenSetInfo:
    """What a partition says of itself. `read`: by file. `records`: of all its chunks, in order."""
    config, labels, tokenizer = encoding.config, encoding.labels, encoding.tokenizer
    reasons = Counter[str]()
    for record in records:
        reasons.update(record.reasons)
    names = merge_names(record.slices for record in records)
    return TokenSetInfo(
        dataset=config.name,
        partition=named.partition.name,
        watermark=named.partition.watermark,
        fingerprint=named.fingerprint,
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        query_prefix=config.query_prefix,
        product_prefix=config.product_prefix,
        buckets=config.buckets,
        labels=tuple(labels.gains),
        label_gains=tuple(labels.gains.values()),
        numeric=numeric_names(config),
        categorical=named.settings.rules.categorical,
        splits=shards_by_split(records),
        rows_read=sum(record.rows_read for record in records),
        rows_bad=sum(record.rows_bad for record in records),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=sum(record.truncated_rows for record in records),
        tokens=sum(record.tokens for record in records),
        slices=tuple(SliceInfo(column=column, names=names.get(column, ())) for column in config.slices),
        files=_account(read, records),
        judged=judged,
        texts_of_several_ids=texts_of_several_ids,
        without_category=_without_category(named.settings.rules.categorical, records),
    )


def first_bad(config: DataConfig, records: Sequence[ChunkRecord]) -> list[QuarantinedRow]:
    """The bad rows that are kept of a partition."""
    return [row for record in records for row in record.quarantined][: config.quarantine_rows]


def refuse_bad_share(config: DataConfig, info: TokenSetInfo, bad: Sequence[QuarantinedRow], workspace: Storage) -> None:
    """Raise DataError with the top reasons when too many rows are bad; the sample is kept where it can be read."""
    if info.rows_bad <= config.max_bad_fraction * info.rows_read:
        return
    key = f"tokens/{config.name}/refused/{info.fingerprint}.jsonl"
    if bad:
        workspace.write_bytes(key, quarantine_lines(bad))
    sample = key if bad else f"tokens/{config.name}/{info.fingerprint}/{QUARANTINE}"
    top = Counter(info.reasons).most_common(_TOP_REASONS)
    place = (f"line {bad[0].line}" if bad[0].line else f"row {bad[0].row}") if bad else ""
    first = f"; the first in {bad[0].file}, {place}: {bad[0].reason}" if bad else ""
    raise DataError(
        f"{info.partition}: {info.rows_bad} of {info.rows_read} rows are bad "
        f"({info.rows_bad / info.rows_read:.1%}): " + ", ".join(f"{reason} ({count})" for reason, count in top) + first,
        expected=f"at most {config.max_bad_fraction:.1%} (data.max_bad_fraction)",
        next_command=f"look at {workspace.uri(sample)}; "
        "repair the input, correct --data.columns / --data.labels, or raise --data.max-bad-fraction",
    )


def _account(read: Mapping[str, FileCount], records: Sequence[ChunkRecord]) -> tuple[FileRows, ...]:
    """What became of the rows of each file. Raises RuntimeError (a bug) when one is neither in a shard nor counted."""
    chunks: dict[str, list[ChunkRecord]] = {file: [] for file in read}
    for record in records:
        chunks[record.file].append(record)
    found: list[FileRows] = []
    for file, count in read.items():
        mine = chunks[file]
        rows = FileRows(
            file=file,
            rows=count.rows,
            good=sum(sum(shard.rows) for record in mine for shard in record.shards.values()),
            bad=sum(record.rows_bad for record in mine),
            filtered=count.left_out + sum(record.rows_filtered for record in mine),
            blank=count.blank,
        )
        if rows.rows != rows.good + rows.bad + rows.filtered:
            raise RuntimeError(
                f"{file}: of {rows.rows} rows {rows.good} are good, {rows.bad} bad and {rows.filtered} filtered out: "
                f"{rows.rows - rows.good - rows.bad - rows.filtered} are lost"
            )
        found.append(rows)
    return tuple(found)


def _without_category(columns: Sequence[CategoricalInfo], records: Sequence[ChunkRecord]) -> dict[str, int]:
    """By column; empty when a chunk was encoded by a version that did not count them."""
    if any(len(record.without_category) != len(columns) for record in records):
        return {}
    return {info.column: sum(record.without_category[i] for record in records) for i, info in enumerate(columns)}
