"""Prepare: every partition of the input becomes a committed folder of token shards, unless it is there already.

Order: open the input, look at its labels and find or train the tokenizer, name each partition by fingerprint, reuse
what is committed, tokenise the rest chunk by chunk in worker processes, commit a partition when its last chunk is done.
Memory: a chunk (64 MiB of columns at most) per process, and two in the parent. Killed anywhere and run again, it skips
finished chunks and writes the same bytes.

Of several workers (an array of jobs) each prepares every n-th partition. They need no coordination, because labels,
tokenizer and names depend on the input and the settings alone. The last one to finish finds all partitions committed.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.encode import ChunkRecord, ChunkTask, Staging, encode_chunk
from pipeline.data.input_files import InputFile, InputPartition
from pipeline.data.judgements import count_judgements
from pipeline.data.lexical import LEXICAL_NAMES, numeric_names
from pipeline.data.rows import RawBatch, cut_chunks, quarantine_lines
from pipeline.data.sources import Source, list_input_objects, open_source, reading_progress
from pipeline.data.survey import LabelSet, TextSample, decide_labels, survey
from pipeline.data.token_sets import (
    FORMAT_VERSION,
    KIND,
    QUARANTINE,
    QUARANTINE_ROWS,
    SPLITS,
    CategoricalInfo,
    FileRows,
    QuarantinedRow,
    SliceInfo,
    TokenSetInfo,
)
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, given_tokenizer, store_tokenizer, train_in_worker
from pipeline.data.validate import RowRules, merge_names
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import Storage, os_errors
from pipeline.proc.pool import run_tasks
from pipeline.telemetry.events import EventName

Emit = Callable[..., object]
"""Writes one event: its name, and its fields by keyword."""
_TOP_REASONS = 3


@dataclass(frozen=True)
class PreparedData:
    """The partitions that are in the workspace, in order. Prefixes are keys.

    `prepared` and `rows_prepared` (good and bad rows) count this run alone. `rows` are in shards; they, `rows_bad` and
    `rows_filtered` are all rows of the input. `missing`: partitions that other workers still prepare. `passed_over`:
    keys of files below the path that are not read.
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
    passed_over: tuple[str, ...]
    input_warnings: tuple[str, ...]


@dataclass(frozen=True)
class Encoding:
    """What decides how rows are encoded, the same for all partitions."""

    config: DataConfig
    tokenizer: TextTokenizer
    labels: LabelSet


@dataclass
class _PartitionWork:
    """A partition to prepare. `prefix` ends in the fingerprint of everything that its bytes depend on.

    `rows`, `blank`: rows and blank lines by file, counted before any of it is encoded. `done`: records of finished
    chunks. `num_chunks`: known once all files are read.
    """

    partition: InputPartition
    prefix: str
    rules: RowRules
    staging: Staging
    rows: dict[str, int] = field(default_factory=dict)
    blank: dict[str, int] = field(default_factory=dict)
    done: dict[int, ChunkRecord] = field(default_factory=dict)
    num_chunks: int | None = None

    def note(self, index: int, record: ChunkRecord) -> None:
        """Keep the record of a finished chunk without its bad rows, which stay in the staging folder."""
        self.done[index] = record.model_copy(update={"quarantined": ()})

    def first_bad(self) -> list[QuarantinedRow]:
        """Return the bad rows to keep, of as few chunks as have so many."""
        found: list[QuarantinedRow] = []
        for index in sorted(self.done):
            if self.done[index].rows_bad and len(found) < QUARANTINE_ROWS:
                text = self.staging.record_path(index).read_bytes()
                found += ChunkRecord.model_validate_json(text).quarantined
        return found[:QUARANTINE_ROWS]


def prepare(
    config: DataConfig,
    workspace: Storage,
    *,
    scratch: Path,
    tokenizer: bytes | None = None,
    worker: int = 0,
    events: Emit,
    stop: StopSignal,
) -> PreparedData:
    """Bring the workspace's token sets up to date with the input.

    Args:
        scratch: a local folder that a rerun finds again; staging for chunks, not needed once prepare has returned.
        tokenizer: tokenizer.json of the parent model; `config.tokenizer.path` takes precedence.
        worker: which of `config.workers` this is.
    Raises DataError, ConfigError, Preempted, and TransientError, also if workers have seen different inputs.
    """
    listed = list_input_objects(config, stop) if config.workers > 1 else frozenset()
    source = open_source(config, scratch=scratch, stop=stop)
    scratch = scratch / f"worker-{worker}" if config.workers > 1 else scratch  # they may share a machine
    encoding, tokenizer_prefix = _labels_and_tokenizer(config, source, workspace, scratch, tokenizer, events, stop)
    infos: dict[str, TokenSetInfo] = {}
    works, prefixes = list[_PartitionWork](), list[str]()
    for number, partition in enumerate(source.partitions):
        prefix, rules = name_partition(encoding, partition, carve_valid=bool(source.fixed_labels))
        prefixes.append(prefix)
        staging = Staging(scratch / "tokens" / prefix.rpartition("/")[2])
        if info := _committed(encoding, prefix, workspace):
            events(EventName.PARTITION_REUSED, partition=info.partition, prefix=prefix, rows=info.rows)
            # An attempt killed at the end of its commit has left these. They would prove files that are gone if the
            # token set were ever deleted for damage.
            shutil.rmtree(staging.folder, ignore_errors=True)
            infos[prefix] = info
        elif number % config.workers == worker:
            works.append(_PartitionWork(partition, prefix, rules, staging))
    infos |= (prepared := _encode_all(encoding, workspace, source, works, events, stop))
    for prefix in prefixes:
        if prefix not in infos and (info := _committed(encoding, prefix, workspace)):  # by another worker
            infos[prefix] = info
    if len(infos) < len(prefixes) and list_input_objects(config, stop) != listed:
        raise TransientError(
            f"{config.path} has changed since worker {worker} of {config.workers} looked at it",
            expected="one input for all workers",
            next_command="the same command again: it finds what is done and prepares the rest",
        )
    there = {prefix: infos[prefix] for prefix in prefixes if prefix in infos}
    files = [file for info in there.values() for file in info.files]
    if len(there) == len(prefixes) and not sum(info.rows for info in there.values()):
        source_name = config.path or "the synthetic catalogue"
        if sum(file.rows for file in files) == sum(file.filtered for file in files) > 0:
            wanted = " and ".join(f"{column}={value}" for column, value in config.filter.items())
            raise DataError(
                f"no row of {source_name} has {wanted}",
                expected="values that occur in these columns, as they are written there",
                next_command="correct --data.filter",
            )
        raise DataError(
            f"{source_name} has no usable rows ({len(there)} partitions read)",
            expected="rows with a query and a title",
            next_command="check --data.path and --data.filter",
        )
    return PreparedData(
        token_set_prefixes=[*there],
        infos=tuple(there.values()),
        missing=len(prefixes) - len(there),
        tokenizer_prefix=tokenizer_prefix,
        splits_digits=encoding.tokenizer.splits_digits,
        reused=len(there) - len(prepared),
        prepared=len(prepared),
        rows_prepared=sum(info.rows + info.rows_bad for info in prepared.values()),
        rows=sum(info.rows for info in there.values()),
        rows_bad=sum(info.rows_bad for info in there.values()),
        rows_filtered=sum(file.filtered for file in files),
        rows_blank=sum(file.blank for file in files),
        labels=tuple(encoding.labels.gains),
        passed_over=source.passed_over,
        input_warnings=source.warnings,
    )


def _committed(encoding: Encoding, prefix: str, workspace: Storage) -> TokenSetInfo | None:
    """Return the account of a committed partition. Raises DataError if too many of its rows are bad."""
    manifest = read_manifest(workspace, prefix)
    if manifest is None:
        return None
    info = TokenSetInfo.model_validate(manifest.fields)
    _refuse_bad_share(encoding.config, info, [], workspace)
    return info


# What decides the bytes of the shards, and the names of partitions that follow from it.


def _labels_and_tokenizer(
    config: DataConfig,
    source: Source,
    workspace: Storage,
    scratch: Path,
    given: bytes | None,
    events: Emit,
    stop: StopSignal,
) -> tuple[Encoding, str]:
    """Return labels and tokenizer, and the prefix of the tokenizer. Unless given, both need one look at all rows."""
    found = given_tokenizer(config, given, stop)
    if found is not None and config.tokenizer.path is not None and config.tokenizer.split_digits:
        found = found.with_split_digits()
    trained_on = source.partitions if found is None else None
    found = found or find_tokenizer(config, source, workspace)
    want_labels = not config.labels and not source.fixed_labels
    seen = None
    if want_labels or found is None:
        seen = survey(source, config, want_labels=want_labels, want_sample=found is None, stop=stop)
    labels = decide_labels(config, source.fixed_labels, seen)
    if found is None:
        sample = seen.sample if seen else TextSample()
        found = train_in_worker(config, list(sample.texts()), stop)
        events(EventName.TOKENIZER_TRAINED, rows=len(sample.held), fingerprint=found.fingerprint)
    return Encoding(config, found, labels), store_tokenizer(config, trained_on, workspace, found, scratch)


def name_partition(encoding: Encoding, partition: InputPartition, *, carve_valid: bool) -> tuple[str, RowRules]:
    """Return the prefix of a partition's token set, which names all that its bytes depend on, and its rules."""
    config, labels = encoding.config, encoding.labels
    rules = RowRules(config, partition.name, tuple(labels.gains), labels.row_gains, carve_valid)
    later = config.model_dump(mode="json", include={"slices", "query_prefix", "product_prefix"})
    name = fingerprint(
        {
            **{name: value for name, value in later.items() if value},  # so data prepared before them keeps its name
            "format": FORMAT_VERSION,
            "content": partition.content_id,
            "tokenizer": encoding.tokenizer.fingerprint,
            "labels": list(rules.labels),
            "row_gains": list(rules.label_gains),
            "columns": config.columns.model_dump(),
            "esci_locale": None,  # a setting of earlier versions
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


# Tokenise the chunks of all partitions in one stream, and commit each partition as it completes.


def _encode_all(
    encoding: Encoding, workspace: Storage, source: Source, works: list[_PartitionWork], events: Emit, stop: StopSignal
) -> dict[str, TokenSetInfo]:
    by_name = {work.partition.name: work for work in works}
    waiting, infos = list(works), dict[str, TokenSetInfo]()

    def commit_complete() -> None:
        for work in [work for work in waiting if work.num_chunks == len(work.done)]:
            infos[work.prefix] = _commit(encoding, workspace, work, events)
            waiting.remove(work)
            work.done.clear()

    files = [file for work in works for file in work.partition.files]
    if not files:
        return {}
    with reading_progress("tokenising", files) as tell:  # workers are at most a chunk each behind
        results = run_tasks(
            encode_chunk,
            encoding.tokenizer.data,
            _tasks(encoding.config, source, works, tell, stop),
            num_workers=encoding.config.num_workers,
            stop=stop,
            doing="preparing data",
            waiting=lambda: tell(None),
        )
        with closing(results):
            for partition, index, record in results:
                by_name[partition].note(index, record)
                commit_complete()
    commit_complete()
    return infos


def _tasks(
    config: DataConfig,
    source: Source,
    works: list[_PartitionWork],
    tell: Callable[[RawBatch | None], None],
    stop: StopSignal,
) -> Iterator[ChunkTask]:
    """Yield the chunks that still have to be encoded; those that a killed run has finished are noted as done."""

    def counted(work: _PartitionWork, file: InputFile) -> Iterator[RawBatch]:
        for batch in source.read(file):
            work.rows[file.key] += batch.rows_read
            work.blank[file.key] += batch.blank
            tell(batch)
            yield batch

    for work in works:
        work.staging.create()
        index = 0
        for number, file in enumerate(work.partition.files):
            work.rows[file.key] = work.blank[file.key] = 0
            for place, chunk in enumerate(cut_chunks(file.key, counted(work, file), config.rows_per_chunk)):
                stop.raise_if_set("preparing data")
                if record := work.staging.finished(index):
                    work.note(index, record)
                else:
                    yield ChunkTask(index, f"{number:05d}-{place:05d}", chunk, work.rules, work.staging)
                index += 1
        work.num_chunks = index


def _commit(encoding: Encoding, workspace: Storage, work: _PartitionWork, events: Emit) -> TokenSetInfo:
    """Publish the shards of all chunks with their manifest. Raises DataError if too many rows are bad."""
    staging = work.staging
    with os_errors("reading", f"file://{staging.files}"):
        info, bad = _describe(encoding, work, workspace.stop), work.first_bad()
    _refuse_bad_share(encoding.config, info, bad, workspace)
    with os_errors("writing", f"file://{staging.files}"):
        write_bytes_atomic(staging.files / QUARANTINE, quarantine_lines(bad))
    commit_dir(workspace, staging.files, work.prefix, kind=KIND, fields=info.model_dump(mode="json"))
    shutil.rmtree(staging.folder, ignore_errors=True)
    if info.rows_bad:
        events(EventName.ROWS_QUARANTINED, partition=info.partition, rows=info.rows_bad, reasons=info.reasons)
    events(EventName.PARTITION_PREPARED, partition=info.partition, prefix=work.prefix, rows=info.rows)
    return info


# The account of the rows that is stored with the shards.


def _describe(encoding: Encoding, work: _PartitionWork, stop: StopSignal) -> TokenSetInfo:
    config, labels, tokenizer = encoding.config, encoding.labels, encoding.tokenizer
    records = [work.done[index] for index in sorted(work.done)]
    categorical = tuple(CategoricalInfo(column=one.column, num_ids=one.num_ids) for one in config.categorical)
    by_split = {split: tuple(one.shards[split] for one in records if split in one.shards) for split in SPLITS}
    shards = {split: infos for split, infos in by_split.items() if infos}
    reasons = sum((Counter(record.reasons) for record in records), Counter[str]())
    names = merge_names(record.slices for record in records)
    is_counted = all(len(record.without_category) == len(categorical) for record in records)
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
        buckets=config.buckets,
        labels=tuple(labels.gains),
        label_gains=tuple(labels.gains.values()),
        numeric=numeric_names(config),
        categorical=categorical,
        splits=shards,
        rows_read=sum(record.rows_read for record in records),
        rows_bad=sum(record.rows_bad for record in records),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=sum(record.truncated_rows for record in records),
        tokens=sum(record.tokens for record in records),
        slices=tuple(SliceInfo(column=column, names=names.get(column, ())) for column in config.slices),
        files=tuple(_file_rows(work, file, records) for file in work.rows),
        judged=count_judgements(work.staging.files, shards, len(labels.gains), stop),
        without_category={
            info.column: sum(record.without_category[i] for record in records)
            for i, info in enumerate(categorical if is_counted else ())
        },
    )


def _file_rows(work: _PartitionWork, file: str, records: Sequence[ChunkRecord]) -> FileRows:
    """Account for every row of a file. Raises RuntimeError (a bug) if one is neither in a shard nor counted."""
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
            f"{file}: of {rows.rows} rows {rows.good} are good, {rows.bad} bad and {rows.filtered} filtered out: "
            f"{lost} are lost"
        )
    return rows


def _refuse_bad_share(
    config: DataConfig, info: TokenSetInfo, bad: Sequence[QuarantinedRow], workspace: Storage
) -> None:
    """Raise DataError with the top reasons if too many rows are bad; the sample is kept where it can be read."""
    if info.rows_bad <= config.max_bad_fraction * info.rows_read:
        return
    sample, first = f"tokens/{config.name}/{info.fingerprint}/{QUARANTINE}", ""
    if bad:
        sample = f"tokens/{config.name}/refused/{info.fingerprint}.jsonl"
        workspace.write_bytes(sample, quarantine_lines(bad))
        place = f"line {bad[0].line}" if bad[0].line else f"row {bad[0].row}"
        first = f"; the first in {bad[0].file}, {place}: {bad[0].reason}"
    top = ", ".join(f"{reason} ({count})" for reason, count in Counter(info.reasons).most_common(_TOP_REASONS))
    remedy = "repair the input, correct --data.columns / --data.labels"
    if any(reason.startswith("feature ") for reason in info.reasons):
        remedy = "write 0 or another default where a number is missing, take the column out of --data.numeric"
    raise DataError(
        f"{info.partition}: {info.rows_bad} of {info.rows_read} rows are bad "
        f"({info.rows_bad / info.rows_read:.1%}): {top}{first}",
        expected=f"at most {config.max_bad_fraction:.1%} (data.max_bad_fraction)",
        next_command=f"look at {workspace.uri(sample)}; {remedy},"
        " or leave these rows out with a higher --data.max-bad-fraction",
    )
