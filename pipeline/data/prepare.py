"""Convert each partition of the input to a token set, a committed folder of token shards.

The prepare stage opens the input, determines the labels, and looks up or trains the tokenizer. Each partition is named
by a fingerprint of everything that its token set depends on, so partitions that have already been committed are reused.
All others are tokenised chunk by chunk in worker processes, and each partition is committed once its last chunk is
finished. A worker process needs enough memory for one chunk (at most 64 MiB of columns), and the parent process needs
enough for two. If the run is interrupted, a rerun skips the finished chunks and produces exactly the same bytes.

With several workers (the tasks of an array job), each worker prepares every n-th partition. The workers do not need to
coordinate, because the labels, the tokenizer and the names depend only on the input and the settings. The last worker
to finish finds all partitions committed.
"""

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.core.batch_order import LONGEST
from pipeline.core.errors import ConfigError, DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.format import shortened
from pipeline.core.stop import StopSignal
from pipeline.data.attributes import like_parent
from pipeline.data.buckets import choose_buckets
from pipeline.data.config import DataConfig
from pipeline.data.encode import ChunkRecord, ChunkTask, Staging, encode_chunk
from pipeline.data.input_files import FLAT, InputFile, InputPartition
from pipeline.data.judgements import count_judgements
from pipeline.data.lexical import LEXICAL_NAMES, numeric_names
from pipeline.data.readers import TO_UTF8
from pipeline.data.rows import RawBatch, cut_chunks, quarantine_lines
from pipeline.data.shards import ShardFile, TokenRows
from pipeline.data.sources import Source, list_input_objects, open_source, reading_progress
from pipeline.data.survey import LabelSet, TextSample, decide_labels, survey
from pipeline.data.token_sets import (
    FORMAT_VERSION,
    KIND,
    QUARANTINE,
    QUARANTINE_ROWS,
    SPLITS,
    FileRows,
    QuarantinedRow,
    SliceInfo,
    TokenSetInfo,
)
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, given_tokenizer, store_tokenizer, train_in_worker
from pipeline.data.validate import UNKNOWN_LABEL, UNKNOWN_SPLIT, RowRules, merge_names
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import Storage, os_errors
from pipeline.model.config import LEXICAL, Attribute
from pipeline.proc.pool import run_tasks
from pipeline.telemetry.events import EventName

Emit = Callable[..., object]  # logs an event, given its name and its fields as keyword arguments
_TOP_REASONS, _SHOWN_CHARACTERS = 3, 200


@dataclass(frozen=True)
class PreparedData:
    """The prepared partitions in the workspace, in order.

    `prepared` and `rows_prepared` (both good and bad rows) only count the partitions that this run has prepared.
    `rows`, `rows_bad` and `rows_filtered` add up to the total number of rows in the input. `missing` is the number of
    partitions that other workers have not committed yet.
    """

    token_set_prefixes: list[str]
    infos: tuple[TokenSetInfo, ...]
    missing: int
    tokenizer_prefix: str
    splits_digits: bool
    reused: int
    prepared: int
    rows_prepared: int
    rows: int
    rows_bad: int
    rows_filtered: int
    rows_blank: int
    labels: tuple[str, ...]
    skipped: tuple[str, ...]
    input_warnings: tuple[str, ...]


@dataclass(frozen=True)
class Encoding:
    """The settings, tokenizer and labels with which the rows of all partitions are encoded."""

    config: DataConfig
    tokenizer: TextTokenizer
    labels: LabelSet


@dataclass
class _PartitionWork:
    """The progress of a partition that is being prepared.

    `rows` and `blank` count the rows and the blank lines that have been read from each file. `done` contains the
    records of all finished chunks. `num_chunks` is None until all files have been read.
    """

    partition: InputPartition
    prefix: str
    rules: RowRules
    staging: Staging
    rows: dict[str, int] = field(default_factory=dict)
    blank: dict[str, int] = field(default_factory=dict)
    done: dict[int, ChunkRecord] = field(default_factory=dict)
    num_chunks: int | None = None

    def add_record(self, index: int, record: ChunkRecord) -> None:
        """Keep the record of a finished chunk. To save memory, its quarantined rows are only kept on disk."""
        self.done[index] = record.model_copy(update={"quarantined": ()})

    def first_bad_rows(self) -> list[QuarantinedRow]:
        """Load the first QUARANTINE_ROWS bad rows, without reading more chunk records than necessary."""
        rows: list[QuarantinedRow] = []
        for index in sorted(self.done):
            if self.done[index].rows_bad and len(rows) < QUARANTINE_ROWS:
                text = self.staging.record_path(index).read_bytes()
                rows += ChunkRecord.model_validate_json(text).quarantined
        return rows[:QUARANTINE_ROWS]


def prepare(
    config: DataConfig,
    workspace: Storage,
    *,
    scratch: Path,
    tokenizer: bytes | None = None,
    attributes: Sequence[Attribute] = (),
    longest: int = LONGEST,
    products: int = 4,
    worker: int = 0,
    events: Emit,
    stop: StopSignal,
    retry: RetryPolicy | None = None,
) -> PreparedData:
    """Prepare all partitions of the input that do not have a token set in the workspace yet.

    Args:
        scratch: Local folder for staged chunks. A rerun must use the same folder to be able to skip finished chunks.
        tokenizer: The tokenizer.json of the parent model. `config.tokenizer.path` takes precedence.
        attributes: The attributes of the parent model, whose columns and kinds are used unless they are configured.
        longest: The maximum number of tokens per text if `config.buckets` is empty and none were chosen before.
        products: The number of products in a training row, for which buckets are chosen.
        worker: Index of this worker, below `config.workers`.
        retry: How requests for the input are retried.

    Raises DataError if the input is unusable or has too many bad rows, ConfigError if the tokenizer does not exist,
    Preempted if a stop is requested, and TransientError if the input changes while it is being read.
    """
    config = config.model_copy(update={"attributes": like_parent(config.attributes, attributes)})
    listed = list_input_objects(config, stop, retry) if config.workers > 1 else frozenset()
    source = open_source(config, scratch=scratch, stop=stop, retry=retry)
    scratch = scratch / f"worker-{worker}" if config.workers > 1 else scratch  # workers may share a machine
    encoding, tokenizer_prefix = _surveyed(config, source, workspace, scratch, tokenizer, events, stop)
    config, source = encoding.config, replace(source, config=encoding.config)
    if not config.buckets:  # set them only now, because the vocabulary must not depend on which run chooses them
        buckets = choose_buckets(config, source, workspace, encoding.tokenizer, longest, products, stop)
        encoding = replace(encoding, config=config.model_copy(update={"buckets": buckets}))
    infos: dict[str, TokenSetInfo] = {}
    works, prefixes = list[_PartitionWork](), list[str]()
    for number, partition in enumerate(source.partitions):
        prefix, rules = name_partition(encoding, partition, carve_valid=bool(source.fixed_labels))
        prefixes.append(prefix)
        staging = Staging(scratch / "tokens" / prefix.rpartition("/")[2])
        if info := _committed(encoding, prefix, workspace):
            events(EventName.PARTITION_REUSED, partition=info.partition, prefix=prefix, rows=info.rows)
            # If an earlier attempt was killed right after its commit, its chunk records still exist. They have to be
            # removed, because they would mark the chunks as finished even after the token set has been deleted.
            shutil.rmtree(staging.folder, ignore_errors=True)
            infos[prefix] = info
        elif number % config.workers == worker:
            works.append(_PartitionWork(partition, prefix, rules, staging))
    infos |= (prepared := _encode_all(encoding, workspace, source, works, events, stop))
    for prefix in prefixes:
        if prefix not in infos and (info := _committed(encoding, prefix, workspace)):  # committed by another worker
            infos[prefix] = info
    if len(infos) < len(prefixes) and list_input_objects(config, stop, retry) != listed:
        raise TransientError(
            f"{config.path} has changed since worker {worker} of {config.workers} listed it",
            expected="an input that does not change until all workers have finished",
            next_command="run the same command again to prepare the remaining partitions",
        )
    available = {prefix: infos[prefix] for prefix in prefixes if prefix in infos}
    files = [file for info in available.values() for file in info.files]
    if len(available) == len(prefixes) and not sum(info.rows for info in available.values()):
        source_name = config.path or "the synthetic catalogue"
        if sum(file.rows for file in files) == sum(file.filtered for file in files) > 0:
            condition = " and ".join(f"{column}={value}" for column, value in config.filter.items())
            raise DataError(
                f"no row of {source_name} has {condition}",
                expected="values that occur in these columns, spelled the same way",
                next_command="correct --data.filter",
            )
        raise DataError(
            f"{source_name} has no usable rows ({len(available)} partitions read)",
            expected="rows with a query and a title",
            next_command="check --data.path and --data.filter",
        )
    return PreparedData(
        token_set_prefixes=[*available],
        infos=tuple(available.values()),
        missing=len(prefixes) - len(available),
        tokenizer_prefix=tokenizer_prefix,
        splits_digits=encoding.tokenizer.splits_digits,
        reused=len(available) - len(prepared),
        prepared=len(prepared),
        rows_prepared=sum(info.rows + info.rows_bad for info in prepared.values()),
        rows=sum(info.rows for info in available.values()),
        rows_bad=sum(info.rows_bad for info in available.values()),
        rows_filtered=sum(file.filtered for file in files),
        rows_blank=sum(file.blank for file in files),
        labels=tuple(encoding.labels.gains),
        skipped=source.skipped,
        input_warnings=source.warnings,
    )


def _committed(encoding: Encoding, prefix: str, workspace: Storage) -> TokenSetInfo | None:
    """Read the metadata of a token set. Returns None if it has not been committed.

    Raises DataError if too many rows of the partition are bad.
    """
    manifest = read_manifest(workspace, prefix)
    if manifest is None:
        return None
    info = TokenSetInfo.model_validate(manifest.fields)
    _check_bad_fraction(encoding.config, info, [], workspace)
    return info


# Labels, tokenizer, and partition names.


def _surveyed(
    config: DataConfig,
    source: Source,
    workspace: Storage,
    scratch: Path,
    parent_tokenizer: bytes | None,
    events: Emit,
    stop: StopSignal,
) -> tuple[Encoding, str]:
    """Determine the labels, the attributes and the tokenizer, and store the tokenizer in the workspace.

    Labels and attributes that are not configured have to be read from the data, and a new tokenizer has to be trained
    on it. In each case this reads the entire input. Returns the encoding and the prefix at which its tokenizer is
    stored. Raises ConfigError if two numeric features have the same name.
    """
    tokenizer = given_tokenizer(config, parent_tokenizer, stop)
    if tokenizer is not None and config.tokenizer.path is not None and config.tokenizer.split_digits:
        tokenizer = tokenizer.with_split_digits()
    trained_on = source.partitions if tokenizer is None else None
    tokenizer = tokenizer or find_tokenizer(config, source, workspace)
    needs_labels = not config.labels and not source.fixed_labels
    surveyed = None
    if needs_labels or tokenizer is None or any(None in each.model_dump().values() for each in config.attributes):
        surveyed = survey(source, config, want_labels=needs_labels, want_sample=tokenizer is None, stop=stop)
    labels = decide_labels(config, source.fixed_labels, surveyed)
    if surveyed is not None:
        config = config.model_copy(update={"attributes": surveyed.attributes.resolve(config.attributes)})
    if duplicates := [name for name, count in Counter(numeric_names(config)).items() if count > 1]:
        raise ConfigError(
            f"data.numeric and data.attributes have two features {', '.join(map(repr, duplicates))}",
            expected="each name once",
            next_command="remove the column from --data.numeric, or rename the attribute",
        )
    if tokenizer is None:
        sample = surveyed.sample if surveyed else TextSample()
        tokenizer = train_in_worker(config, list(sample.texts()), stop)
        events(EventName.TOKENIZER_TRAINED, rows=len(sample.rows), fingerprint=tokenizer.fingerprint)
    return Encoding(config, tokenizer, labels), store_tokenizer(config, trained_on, workspace, tokenizer, scratch)


def name_partition(encoding: Encoding, partition: InputPartition, *, carve_valid: bool) -> tuple[str, RowRules]:
    """Return the prefix of a partition's token set, and the rules by which its rows are validated.

    The prefix contains a fingerprint of everything that the bytes of the token set depend on.
    """
    config, labels = encoding.config, encoding.labels
    rules = RowRules(config, partition.name, tuple(labels.gains), labels.row_gains, carve_valid)
    newer = config.model_dump(mode="json", include={"slices", "query_prefix", "product_prefix", "attributes"})
    name = fingerprint(
        {
            # Omit defaults so that data prepared before these settings were introduced keeps its name.
            **{name: value for name, value in newer.items() if value},
            **({"split_by": config.split_by} if config.split_by != "query" else {}),
            "format": FORMAT_VERSION,
            "content": partition.content_id,
            "tokenizer": encoding.tokenizer.fingerprint,
            "labels": list(rules.labels),
            "row_gains": list(rules.label_gains),
            "columns": config.columns.model_dump(),
            "esci_locale": None,  # a setting that has been removed
            "numeric": list(config.numeric),
            "categorical": [feature.model_dump() for feature in config.categorical],
            "lexical": list(LEXICAL_NAMES) if config.lexical else [],
            "filter": dict(config.filter),
            "fractions": [config.valid_fraction, config.test_fraction],
            "buckets": list(config.buckets),
            "quarantine_rows": QUARANTINE_ROWS,
            "rows_per_chunk": config.rows_per_chunk,
        }
    )
    return f"tokens/{config.name}/{name}", rules


# Tokenise the chunks of all partitions as a single stream, and commit each partition once it is complete.


def _encode_all(
    encoding: Encoding, workspace: Storage, source: Source, works: list[_PartitionWork], events: Emit, stop: StopSignal
) -> dict[str, TokenSetInfo]:
    by_name = {work.partition.name: work for work in works}
    pending, infos = list(works), dict[str, TokenSetInfo]()

    def commit_complete() -> None:
        for work in [work for work in pending if work.num_chunks == len(work.done)]:
            infos[work.prefix] = _commit(encoding, workspace, work, events)
            pending.remove(work)
            work.done.clear()

    files = [file for work in works for file in work.partition.files]
    if not files:
        return {}
    with reading_progress("tokenising", files) as advance:  # at most one chunk per worker ahead of the actual progress
        results = run_tasks(
            encode_chunk,
            encoding.tokenizer.data,
            _tasks(encoding.config, source, works, advance, stop),
            num_workers=encoding.config.num_workers,
            stop=stop,
            doing="preparing data",
            waiting=lambda: advance(None),
        )
        with closing(results):
            for partition, index, record in results:
                by_name[partition].add_record(index, record)
                commit_complete()
    commit_complete()
    return infos


def _tasks(
    config: DataConfig,
    source: Source,
    works: list[_PartitionWork],
    advance: Callable[[RawBatch | None], None],
    stop: StopSignal,
) -> Iterator[ChunkTask]:
    """Yield the chunks that remain to be encoded.

    If a chunk was already finished by an earlier attempt, its record is added to the partition instead.
    """

    def counted(work: _PartitionWork, file: InputFile) -> Iterator[RawBatch]:
        for batch in source.read(file):
            work.rows[file.key] += batch.rows_read
            work.blank[file.key] += batch.blank
            advance(batch)
            yield batch

    for work in works:
        work.staging.create()
        index = 0
        for number, file in enumerate(work.partition.files):
            work.rows[file.key] = work.blank[file.key] = 0
            for position, chunk in enumerate(cut_chunks(file.key, counted(work, file), config.rows_per_chunk)):
                stop.raise_if_set("preparing data")
                if record := work.staging.finished(index):
                    work.add_record(index, record)
                else:
                    yield ChunkTask(index, f"{number:05d}-{position:05d}", chunk, work.rules, work.staging)
                index += 1
        work.num_chunks = index


def _commit(encoding: Encoding, workspace: Storage, work: _PartitionWork, events: Emit) -> TokenSetInfo:
    """Commit the shards of a partition to the workspace. Raises DataError if too many rows are bad."""
    staging = work.staging
    with os_errors("reading", f"file://{staging.files}"):
        info, bad = _describe(encoding, work, workspace.stop), work.first_bad_rows()
    _check_bad_fraction(encoding.config, info, bad, workspace)
    with os_errors("writing", f"file://{staging.files}"):
        write_bytes_atomic(staging.files / QUARANTINE, quarantine_lines(bad))
    commit_dir(workspace, staging.files, work.prefix, kind=KIND, fields=info.model_dump(mode="json"))
    shutil.rmtree(staging.folder, ignore_errors=True)
    if info.rows_bad:
        events(EventName.ROWS_QUARANTINED, partition=info.partition, rows=info.rows_bad, reasons=info.reasons)
    events(EventName.PARTITION_PREPARED, partition=info.partition, prefix=work.prefix, rows=info.rows)
    return info


# The metadata of a token set.


def _describe(encoding: Encoding, work: _PartitionWork, stop: StopSignal) -> TokenSetInfo:
    config, labels, tokenizer = encoding.config, encoding.labels, encoding.tokenizer
    records = [work.done[index] for index in sorted(work.done)]
    by_split = {split: tuple(r.shards[split] for r in records if split in r.shards) for split in SPLITS}
    shards = {split: infos for split, infos in by_split.items() if infos}
    reasons = sum((Counter(record.reasons) for record in records), Counter[str]())
    names = merge_names(record.slices for record in records)
    buckets = config.bucket_shapes
    staged = {
        split: TokenRows([ShardFile(work.staging.files / s.file, s.rows) for s in infos], buckets, tokenizer.pad_id)
        for split, infos in shards.items()
    }
    optional = [name for name in numeric_names(config) if not name.startswith(LEXICAL)]
    are_counted = all(len(record.without_category) == len(config.categorical) for record in records)
    are_counted &= all(len(record.without_number) == len(optional) for record in records)
    return TokenSetInfo(
        dataset=config.name,
        partition=work.partition.name,
        watermark=work.partition.watermark,
        fingerprint=work.prefix.rpartition("/")[2],
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        query_prefix=config.query_prefix,
        product_prefix=config.product_prefix,
        split_by="query" if work.rules.carve_valid else config.split_by,  # a given test split has other queries
        buckets=config.buckets,
        labels=tuple(labels.gains),
        label_gains=tuple(labels.gains.values()),
        numeric=numeric_names(config),
        attributes=config.attributes,
        categorical=config.categorical,
        splits=shards,
        rows_read=sum(record.rows_read for record in records),
        rows_bad=sum(record.rows_bad for record in records),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=sum(record.truncated_rows for record in records),
        tokens=sum(record.tokens for record in records),
        slices=tuple(SliceInfo(column=column, names=names.get(column, ())) for column in config.slices),
        files=tuple(_file_rows(work, file, records) for file in work.rows),
        judged=count_judgements(staged, len(labels.gains), stop),
        without_category={
            info.column: sum(record.without_category[i] for record in records)
            for i, info in enumerate(config.categorical if are_counted else ())
        },
        without_number={
            name: sum(record.without_number[i] for record in records)
            for i, name in enumerate(optional if are_counted else ())
        },
    )


def _file_rows(work: _PartitionWork, file: str, records: Sequence[ChunkRecord]) -> FileRows:
    """Count the good, bad and filtered rows of a file.

    Raises RuntimeError if the counts do not add up to the number of rows read, which would be a bug.
    """
    records = [record for record in records if record.file == file]
    rows = FileRows(
        file=file,
        rows=work.rows[file],
        good=sum(sum(shard.rows) for record in records for shard in record.shards.values()),
        bad=sum(record.rows_bad for record in records),
        filtered=sum(record.rows_filtered for record in records),
        blank=work.blank[file],
    )
    if lost := rows.rows - rows.good - rows.bad - rows.filtered:
        raise RuntimeError(
            f"{file}: {lost} of {rows.rows} rows are unaccounted for"
            f" ({rows.good} good, {rows.bad} bad, {rows.filtered} filtered)"
        )
    return rows


def _check_bad_fraction(
    config: DataConfig, info: TokenSetInfo, bad: Sequence[QuarantinedRow], workspace: Storage
) -> None:
    """Raise DataError if too many rows are bad.

    The `bad` rows are stored in the workspace first so that they can be inspected. The error lists the most frequent
    reasons.
    """
    if info.rows_bad <= config.max_bad_fraction * info.rows_read:
        return
    sample, first = f"tokens/{config.name}/{info.fingerprint}/{QUARANTINE}", ""
    if bad:
        sample = f"tokens/{config.name}/refused/{info.fingerprint}.jsonl"
        workspace.write_bytes(sample, quarantine_lines(bad))
        position = f"line {bad[0].line}" if bad[0].line else f"row {bad[0].row}"
        content = bad[0].content if isinstance(bad[0].content, str) else json.dumps(bad[0].content, ensure_ascii=False)
        first = f" (first: {bad[0].file}, {position}: {bad[0].reason}: {shortened(content, _SHOWN_CHARACTERS)})"
    top = ", ".join(f"{reason} ({count})" for reason, count in Counter(info.reasons).most_common(_TOP_REASONS))
    remedy, expected = "fix the input, correct --data.columns / --data.labels", list[str]()
    if any(reason.startswith("feature ") for reason in info.reasons):
        remedy = "write a number or nothing in each row, take the column out of --data.numeric or --data.attributes"
    if UNKNOWN_LABEL in info.reasons:
        expected.append(f"the labels {', '.join(info.labels)} (data.labels)")
    if UNKNOWN_SPLIT in info.reasons:
        expected.append("the splits train, valid and test")
    if any(reason.endswith("not UTF-8") for reason in info.reasons):
        remedy = f"convert the files with {TO_UTF8}"
    raise DataError(
        f"{'' if info.partition == FLAT else f'{info.partition}: '}{info.rows_bad} of {info.rows_read} rows are bad"
        f" ({info.rows_bad / info.rows_read:.1%}): {top}{first}",
        expected=", ".join([f"at most {config.max_bad_fraction:.1%} (data.max_bad_fraction)", *expected]),
        next_command=f"look at the bad rows in {workspace.uri(sample)}, then {remedy},"
        " or leave them out with a higher --data.max-bad-fraction",
    )
