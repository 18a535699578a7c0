"""The end of a partition: add up its chunks, account for every row, refuse it when too many are bad, commit it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.core.errors import DataError
from pipeline.data.chunks import ChunkRecord, EncodeSettings, QuarantinedRow, Staging, write_file
from pipeline.data.config import DataConfig
from pipeline.data.judgements import count_judgements
from pipeline.data.labels import LabelSet
from pipeline.data.lexical import numeric_names
from pipeline.data.partitions import Partition
from pipeline.data.rows import RawBatch
from pipeline.data.slices import merge_names
from pipeline.data.token_set import SPLITS, FileRows, SliceInfo, TokenSetInfo
from pipeline.data.tokenizer import TextTokenizer
from pipeline.io.commit import commit_dir
from pipeline.io.errors import os_errors
from pipeline.io.storage import Storage

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


def quarantine_lines(rows: Sequence[QuarantinedRow]) -> bytes:
    """One JSON line per row."""
    return b"".join(row.model_dump_json().encode() + b"\n" for row in rows)


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
