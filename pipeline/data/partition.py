"""A partition on its way to a token set: its name, the parts that prove its chunks, and the account of its rows.

A chunk is published alone: its shards, under their last names in the token set, then its part, which also holds what
the account of the partition needs. So the last step reads no rows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from pipeline.core.errors import DataError
from pipeline.core.manifest import FileRecord
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import PART, SHARDS, ChunkPart, ChunkRecord, EncodeSettings, chunk_name, part_name
from pipeline.data.config import DataConfig
from pipeline.data.judgements import Queries, add_up
from pipeline.data.labels import LabelSet
from pipeline.data.lexical import numeric_names
from pipeline.data.rows import quarantine_lines
from pipeline.data.shards import map_safetensors
from pipeline.data.sources import Partition
from pipeline.data.token_sets import (
    KIND,
    QUARANTINE,
    SPLITS,
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
from pipeline.io.commit import commit_files, hash_bytes, read_manifest
from pipeline.io.storage import KeyNotFound, Storage, join_key, names_in, os_errors, read_record
from pipeline.telemetry.events import EventName

_TOP_REASONS = 3


class FileCount(Record):
    """What the reader of one file gave, counted before any of it is encoded."""

    rows: int
    blank: int
    left_out: int


class FileRead(Record):
    """What a file holds, known once somebody has read to its end."""

    count: FileCount
    num_chunks: int


@dataclass(frozen=True)
class Encoding:
    """What decides how rows are encoded, the same for all partitions."""

    config: DataConfig
    tokenizer: TextTokenizer
    labels: LabelSet


def file_name(number: int) -> str:
    return f"file-{number:05d}.json"


@dataclass(frozen=True)
class NamedPartition:
    """A partition, where its shards belong in the workspace, and where their parts lie beside until all are there.

    `prefix` ends in the fingerprint of all that its bytes depend on. `scratch`: a local folder of this worker.
    """

    partition: Partition
    settings: EncodeSettings
    workspace: Storage
    prefix: str
    scratch: Path

    @property
    def fingerprint(self) -> str:
        return self.prefix.rpartition("/")[2]

    @property
    def parts(self) -> str:
        dataset, _, name = self.prefix.rpartition("/")
        return f"{dataset}/share/{name}"

    def there(self) -> set[str]:
        return names_in(self.workspace, self.parts)

    def note(self, number: int, read: FileRead) -> None:
        """A file was read to its end. Every worker that does so writes the same."""
        self.workspace.write_bytes(join_key(self.parts, file_name(number)), read.model_dump_json().encode())

    def read_of(self, number: int) -> FileRead:
        """Raises KeyNotFound when nobody has read the file to its end, DataError."""
        key = join_key(self.parts, file_name(number))
        again = f"delete {self.workspace.uri(self.parts)} and run trnpipe prepare again"
        found = read_record(self.workspace, key, FileRead, "the count of a file", "trnpipe prepare", next_command=again)
        if found is None:
            raise KeyNotFound(self.workspace.uri(key))
        return found

    def publish(self, name: str, files: Sequence[str]) -> None:
        """The shards of a chunk, then what proves them."""
        shards, part = self.scratch / SHARDS, self.scratch / part_name(name)
        self.workspace.upload_dir(self.prefix, shards, files)
        self.workspace.upload(part, join_key(self.parts, part.name))
        with os_errors("deleting", f"file://{self.scratch}"):
            for path in (*(shards / file for file in files), part):
                path.unlink()


def committed(
    encoding: Encoding, named: NamedPartition, events: Callable[..., object] | None = None
) -> TokenSetInfo | None:
    """What a partition says of itself that is there already. Raises DataError above the share of bad rows."""
    manifest = read_manifest(named.workspace, named.prefix)
    if manifest is None:
        return None
    info = TokenSetInfo.model_validate(manifest.fields)
    refuse_bad_share(encoding.config, info, [], named.workspace)
    if events is not None:
        events(EventName.PARTITION_REUSED, partition=info.partition, prefix=named.prefix, rows=info.rows)
    return info


def commit(encoding: Encoding, named: NamedPartition, events: Callable[..., object]) -> TokenSetInfo | None:
    """What a partition says of itself, once all its parts are there; else None. Raises DataError for too many bad rows.

    Several workers may find so at once: they write the same.
    """
    workspace = named.workspace
    if info := committed(encoding, named):
        workspace.delete_prefix(named.parts)  # made here again, after another worker had taken them away
        return info
    there, numbers = named.there(), range(len(named.partition.files))
    if not all(file_name(number) in there for number in numbers):
        return committed(encoding, named)  # maybe meanwhile, and the parts are gone
    try:
        reads = [named.read_of(number) for number in numbers]
        names = [
            part_name(chunk_name(number, place))
            for number, read in enumerate(reads)
            for place in range(read.num_chunks)
        ]
        if not there.issuperset(names):
            return None
        folder = workspace.local_path(named.parts)
        if folder is None:
            folder = named.scratch / "account"
            workspace.download_dir(named.parts, folder, names)
        found = read_parts(folder, names, encoding.config.quarantine_rows, workspace.stop)
        judged = _judged(folder, names, found, len(encoding.labels.gains), workspace.stop)
    except DataError:
        # Another worker found the same at once, was faster, and took the parts away.
        if info := committed(encoding, named):
            return info
        raise
    records = [part.chunk for part in found]
    counts = {file.key: one.count for file, one in zip(named.partition.files, reads, strict=True)}
    info = _describe(encoding, named, counts, records, judged)
    bad = [row for record in records for row in record.quarantined]
    refuse_bad_share(encoding.config, info, bad, workspace)
    lines = quarantine_lines(bad)
    workspace.write_bytes(join_key(named.prefix, QUARANTINE), lines)
    files = {QUARANTINE: FileRecord(size_bytes=len(lines), xxh3_128=hash_bytes(lines))}
    for part in found:
        files |= part.files
    commit_files(workspace, named.prefix, kind=KIND, fields=info.model_dump(mode="json"), files=files)
    workspace.delete_prefix(named.parts)
    if info.rows_bad:
        events(EventName.ROWS_QUARANTINED, partition=info.partition, rows=info.rows_bad, reasons=info.reasons)
    events(EventName.PARTITION_PREPARED, partition=info.partition, prefix=named.prefix, rows=info.rows)
    return info


def read_parts(folder: Path, names: Sequence[str], room: int, stop: StopSignal) -> list[ChunkPart]:
    """With the first `room` bad rows of them all. Raises DataError for what is no part."""
    parts: list[ChunkPart] = []
    for name in names:
        stop.raise_if_set("reading the parts of a partition")
        try:
            with safe_open(folder / name, framework="np") as file:
                part = ChunkPart.model_validate_json(file.metadata()[PART])
        except Exception as error:  # the library raises its own for a file that is damaged, or gone
            raise DataError(
                f"{folder / name} is no part of a partition: {error}",
                expected="what trnpipe prepare left of a chunk",
                next_command=f"delete {folder} and run trnpipe prepare again",
            ) from error
        bad = part.chunk.quarantined[:room]
        room -= len(bad)
        parts.append(part.model_copy(update={"chunk": part.chunk.model_copy(update={"quarantined": bad})}))
    return parts


def _judged(
    folder: Path, names: Sequence[str], parts: Sequence[ChunkPart], num_labels: int, stop: StopSignal
) -> dict[Split, JudgedSplit]:
    with os_errors("reading", f"file://{folder}"):
        maps = [map_safetensors(folder / name) for name in names]

    def queries(split: Split) -> list[Queries]:
        """Of the parts that have rows of it."""
        found = [arrays for arrays in maps if f"{split}.ids" in arrays]
        return [Queries(*(arrays[f"{split}.{name}"] for name in Queries._fields)) for arrays in found]

    return {
        split: add_up(
            (counts for part in parts for counts in part.judged.get(split, ())),
            queries(split),
            queries("train") if split != "train" else (),
            num_buckets=len(shards[0].rows),
            num_labels=num_labels,
            stop=stop,
        )
        for split, shards in _shards_by_split([part.chunk for part in parts]).items()
    }


# The account that is stored with the shards: what became of the rows.


def _shards_by_split(records: Sequence[ChunkRecord]) -> dict[Split, tuple[ShardInfo, ...]]:
    """In the order of the chunks; only splits that have rows."""
    found = {split: tuple(record.shards[split] for record in records if split in record.shards) for split in SPLITS}
    return {split: shards for split, shards in found.items() if shards}


def _describe(
    encoding: Encoding,
    named: NamedPartition,
    read: Mapping[str, FileCount],
    records: Sequence[ChunkRecord],
    judged: dict[Split, JudgedSplit],
) -> TokenSetInfo:
    """What a partition says of itself. `read`: by file. `records`: of all its chunks, in order."""
    config, labels, tokenizer = encoding.config, encoding.labels, encoding.tokenizer
    reasons = Counter[str]()
    for record in records:
        reasons.update(record.reasons)
    names = merge_names(record.slices for record in records)
    categorical = named.settings.rules.categorical
    without_category: dict[str, int] = {}
    if all(len(record.without_category) == len(categorical) for record in records):  # else of an earlier version
        for place, info in enumerate(categorical):
            without_category[info.column] = sum(record.without_category[place] for record in records)
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
        categorical=categorical,
        splits=_shards_by_split(records),
        rows_read=sum(record.rows_read for record in records),
        rows_bad=sum(record.rows_bad for record in records),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=sum(record.truncated_rows for record in records),
        tokens=sum(record.tokens for record in records),
        slices=tuple(SliceInfo(column=column, names=names.get(column, ())) for column in config.slices),
        files=_account(read, records),
        judged=judged,
        without_category=without_category,
    )


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
