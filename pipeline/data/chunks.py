"""The work of one worker: a chunk of rows becomes one shard per split, and a record that says it is done."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import Field
from safetensors.numpy import save

from pipeline.core.arrays import Int64s
from pipeline.core.batching import Bucket
from pipeline.core.errors import DataError
from pipeline.core.record import Record
from pipeline.data.config import DataConfig
from pipeline.data.judgements import count_judgements
from pipeline.data.lexical import lexical_features, numeric_names
from pipeline.data.rows import (
    BadRow,
    Chunk,
    QuarantinedRow,
    RawBatch,
    product_text,
    quarantine_lines,
    quarantined,
    text_characters,
)
from pipeline.data.sources import Partition
from pipeline.data.survey import LabelSet
from pipeline.data.tokenizer import PairTokens, TextTokenizer, id_dtype, pack, pair_tokens
from pipeline.data.tokens import SPLITS, FileRows, ShardInfo, SliceInfo, Split, TokenSetInfo
from pipeline.data.validate import CleanRows, Names, RowRules, clean, merge_names
from pipeline.io.atomic import write_atomic
from pipeline.io.commit import commit_dir
from pipeline.io.storage import Storage, os_errors

Arrays = dict[str, npt.NDArray[np.generic]]


class ChunkRecord(Record):
    """What a finished chunk left behind. `rows_filtered` are not among `rows_read`."""

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
    slices: Names = Field({}, description="Names of the values, by column")


@dataclass(frozen=True)
class Staging:
    """Where a partition's shards wait for their commit: `files/` becomes the token set, `records/` proves progress."""

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
        """The record of a chunk whose shards are all there, else None."""
        try:
            record = ChunkRecord.model_validate_json(self.record_path(index).read_bytes())
            whole = all((self.files / name).stat().st_size == size for name, size in record.sizes_bytes.items())
        except (OSError, ValueError):  # never written, or torn: do it again
            return None
        return record if whole else None


@dataclass(frozen=True)
class EncodeSettings:
    """How to encode, the same for all chunks of a partition."""

    rules: RowRules
    buckets: tuple[Bucket, ...]
    lexical: bool
    quarantine_rows: int


@dataclass(frozen=True)
class ChunkTask:
    """One chunk to encode; `index` numbers the chunks of a partition."""

    partition: str
    index: int
    chunk: Chunk
    settings: EncodeSettings
    staging: Staging


@dataclass(frozen=True)
class ChunkResult:
    partition: str
    index: int
    record: ChunkRecord


@lru_cache(maxsize=1)
def _tokenizer(data: bytes) -> TextTokenizer:
    return TextTokenizer(data)


def encode_chunk(tokenizer_json: bytes, task: ChunkTask) -> ChunkResult:
    """Validate, tokenise, pack and write; the record comes last and only after the shards are durable."""
    rows, bad, rows_read = clean(task.chunk, task.settings.rules)
    tokenizer = _tokenizer(tokenizer_json)
    pairs = _tokenise(rows, tokenizer, task.settings.buckets)
    numeric = rows.numeric
    if task.settings.lexical:
        numeric = np.concatenate([numeric, lexical_features(rows.query, rows.title)], axis=1)
    shards: dict[Split, ShardInfo] = {}
    sizes: dict[str, int] = {}
    with os_errors("writing", f"file://{task.staging.folder}"):
        for place, split in enumerate(SPLITS):
            index = np.flatnonzero(rows.split == place)
            if not len(index):
                continue
            name = f"{split}-{task.index:05d}.safetensors"
            arrays, counts = shard_arrays(rows, numeric, pairs, index, tokenizer, task.settings.buckets)
            data = save(arrays)
            write_file(task.staging.files / name, data)
            shards[split], sizes[name] = ShardInfo(file=name, rows=counts), len(data)
        record = _record(task, bad, rows_read, pairs, shards, sizes, rows.slices.names)
        write_file(task.staging.record_path(task.index), record.model_dump_json().encode())
    return ChunkResult(task.partition, task.index, record)


def _tokenise(rows: CleanRows, tokenizer: TextTokenizer, buckets: tuple[Bucket, ...]) -> PairTokens:
    limit = text_characters(buckets)
    products = [product_text(title, text, limit) for title, text in zip(rows.title, rows.text, strict=True)]
    queries = [query[:limit] for query in rows.query]
    return pair_tokens(tokenizer.encode(queries), tokenizer.encode(products), buckets)


def shard_arrays(
    rows: CleanRows,
    numeric: npt.NDArray[np.float32],
    pairs: PairTokens,
    index: Int64s,
    tokenizer: TextTokenizer,
    buckets: tuple[Bucket, ...],
) -> tuple[Arrays, tuple[int, ...]]:
    """The tensors of rows `index` (names as in the shard format) and the number of rows in each bucket."""
    arrays: Arrays = {}
    counts = []
    dtype = id_dtype(tokenizer.vocab_size)
    for place, bucket in enumerate(buckets):
        chosen = index[pairs.bucket[index] == place]
        counts.append(len(chosen))
        if not len(chosen):
            continue
        for side, tokens, length in (
            ("query", pairs.query, bucket.query_tokens),
            ("product", pairs.product, bucket.product_tokens),
        ):
            arrays[f"b{place}.{side}"] = pack(
                tokens, chosen, length, pad_id=tokenizer.pad_id, sep_id=tokenizer.sep_id, dtype=dtype
            )
        columns: Arrays = {
            "label": rows.label,
            "gain": rows.gain,
            "numeric": numeric,
            "categorical": rows.categorical,
            "sample_id": rows.sample_id,
            "query_id": rows.query_id,
        }
        if rows.slices.names:
            columns["slice"] = rows.slices.values
        arrays |= {f"b{place}.{name}": np.ascontiguousarray(values[chosen]) for name, values in columns.items()}
    return arrays, tuple(counts)


def _record(
    task: ChunkTask,
    bad: list[BadRow],
    rows_read: int,
    pairs: PairTokens,
    shards: dict[Split, ShardInfo],
    sizes: dict[str, int],
    slices: Names,
) -> ChunkRecord:
    reasons = Counter[str]()
    for row in bad:
        reasons[row.reason] += row.count
    return ChunkRecord(
        file=task.chunk.file,
        rows_filtered=task.chunk.num_rows - rows_read,
        rows_read=rows_read,
        rows_bad=reasons.total(),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=int(pairs.truncated.sum()),
        tokens=int(pairs.num_tokens.sum()),
        shards=shards,
        sizes_bytes=sizes,
        quarantined=quarantined(bad[: task.settings.quarantine_rows]),
        slices=slices,
    )


def write_file(path: Path, data: bytes) -> None:
    """Write a staged file so that it is there whole, or not at all, whatever is killed."""

    def fill(file: BinaryIO) -> None:
        file.write(data)

    write_atomic(path, fill)


# The end of a partition: add up its chunks, account for every row, refuse it when too many are bad, commit it.

QUARANTINE = "quarantine.jsonl"
_TOP_REASONS = 3


@dataclass
class FileCount:
    """What the reader of one file gave, counted before any of it is encoded."""

    rows: int = 0
    blank: int = 0
    left_out: int = 0

    def add(self, batch: RawBatch) -> None:
        self.rows += len(batch.rows) + sum(row.count for row in batch.bad) + batch.left_out
        self.blank += batch.blank
        self.left_out += batch.left_out


def account(read: Mapping[str, FileCount], records: Sequence[ChunkRecord]) -> tuple[FileRows, ...]:
    """What became of the rows of each file. Raises RuntimeError (a bug) when one is neither in a shard nor counted."""
    found: dict[str, FileRows] = {}
    for file, count in read.items():
        mine = [record for record in records if record.file == file]
        found[file] = rows = FileRows(
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
    return tuple(found.values())


def commit_partition(
    config: DataConfig,
    workspace: Storage,
    prefix: str,
    partition: Partition,
    staging: Staging,
    records: Sequence[ChunkRecord],
    read: Mapping[str, FileCount],
    settings: EncodeSettings,
    tokenizer: TextTokenizer,
    labels: LabelSet,
) -> TokenSetInfo:
    """Publish the shards of all chunks with their manifest. Raises DataError above the share of bad rows."""
    reasons = Counter[str]()
    for record in records:
        reasons.update(record.reasons)
    names = merge_names(record.slices for record in records)
    splits = {
        split: shards
        for split in SPLITS
        if (shards := tuple(record.shards[split] for record in records if split in record.shards))
    }
    with os_errors("reading", f"file://{staging.files}"):
        judged = count_judgements(staging.files, splits, len(labels.gains), workspace.stop)
    info = TokenSetInfo(
        dataset=config.name,
        partition=partition.name,
        watermark=partition.watermark,
        fingerprint=prefix.rsplit("/", 1)[-1],
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        buckets=config.buckets,
        labels=tuple(labels.gains),
        label_gains=tuple(labels.gains.values()),
        numeric=numeric_names(config),
        categorical=settings.rules.categorical,
        splits=splits,
        rows_read=sum(record.rows_read for record in records),
        rows_bad=sum(record.rows_bad for record in records),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=sum(record.truncated_rows for record in records),
        tokens=sum(record.tokens for record in records),
        slices=tuple(SliceInfo(column=column, names=names.get(column, ())) for column in settings.rules.slices),
        files=account(read, records),
        judged=judged,
    )
    bad = [row for record in records for row in record.quarantined][: config.quarantine_rows]
    refuse_bad_share(config, info, bad, workspace)
    with os_errors("writing", f"file://{staging.files}"):
        write_file(staging.files / QUARANTINE, quarantine_lines(bad))
    commit_dir(workspace, staging.files, prefix, kind="tokens", fields=info.model_dump(mode="json"))
    return info


def refuse_bad_share(config: DataConfig, info: TokenSetInfo, bad: Sequence[QuarantinedRow], workspace: Storage) -> None:
    """Raise DataError with the top reasons when too many rows are bad; the sample is kept where it can be read."""
    if info.rows_bad <= config.max_bad_fraction * info.rows_read:
        return
    key = f"tokens/{config.name}/refused/{info.fingerprint}.jsonl"
    if bad:
        workspace.write_bytes(key, quarantine_lines(bad))
    sample = key if bad else f"tokens/{config.name}/{info.fingerprint}/{QUARANTINE}"
    top = Counter(info.reasons).most_common(_TOP_REASONS)
    raise DataError(
        f"{info.partition}: {info.rows_bad} of {info.rows_read} rows are bad "
        f"({info.rows_bad / info.rows_read:.1%}): " + ", ".join(f"{reason} ({count})" for reason, count in top),
        expected=f"at most {config.max_bad_fraction:.1%} (data.max_bad_fraction)",
        next_command=f"look at {workspace.uri(sample)}; "
        "repair the input, correct --data.columns / --data.labels, or raise --data.max-bad-fraction",
    )
