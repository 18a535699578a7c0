"""Prepare: every partition of the input becomes a committed folder of token shards, unless it is there already.

Order: open the input, look at its labels and find or train the tokenizer, name each partition by fingerprint, reuse
what is committed, tokenise the rest chunk by chunk in worker processes, commit a partition when its last chunk is done.
Memory: a chunk (64 MiB of columns at most) per worker, and two in the parent. Killed anywhere and run again, it skips
finished chunks and writes the same bytes.
"""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import ChunkRecord, ChunkTask, EncodeSettings, Staging, encode_chunk
from pipeline.data.config import DataConfig
from pipeline.data.judgements import count_judgements
from pipeline.data.lexical import LEXICAL_NAMES, numeric_names
from pipeline.data.rows import RawBatch, cut_chunks, quarantine_lines
from pipeline.data.sources import Partition, Source, open_source, reading
from pipeline.data.survey import LabelSet, decide_labels, survey
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, given_tokenizer, store_tokenizer, train_in_worker
from pipeline.data.tokens import (
    FORMAT_VERSION,
    QUARANTINE,
    SPLITS,
    CategoricalInfo,
    FileRows,
    QuarantinedRow,
    SliceInfo,
    TokenSetInfo,
)
from pipeline.data.validate import RowRules, merge_names
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import Storage, os_errors
from pipeline.proc.pool import run_tasks
from pipeline.telemetry.events import EventName

Tell = Callable[[RawBatch | None], None]
Emit = Callable[..., object]
"""Writes one event: its name, and its fields by keyword."""
_TOP_REASONS = 3


@dataclass(frozen=True)
class PreparedData:
    """What prepare left in the workspace. Prefixes are keys, in the order of partitions; counts cover all of them.

    `rows` are in shards; they, `rows_bad` and `rows_filtered` are all rows of the input. `vocabulary`: the known one
    that ordered the labels, if it was one. `infos`: what each partition says of itself.
    """

    token_set_prefixes: list[str]
    tokenizer_prefix: str
    tokenizer_fingerprint: str
    reused: int
    prepared: int
    rows: int
    rows_bad: int
    rows_filtered: int
    rows_blank: int
    labels: tuple[str, ...]
    vocabulary: str
    infos: tuple[TokenSetInfo, ...]


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


@dataclass(frozen=True)
class _Context:
    config: DataConfig
    workspace: Storage
    tokenizer: TextTokenizer
    labels: LabelSet
    events: Emit
    stop: StopSignal


@dataclass
class _Work:
    """A partition on its way: chunks announced so far, and those done."""

    partition: Partition
    prefix: str
    settings: EncodeSettings
    staging: Staging
    done: dict[int, ChunkRecord] = field(default_factory=dict)
    read: dict[str, FileCount] = field(default_factory=dict)
    num_chunks: int | None = None


def prepare(
    config: DataConfig,
    workspace: Storage,
    *,
    scratch: Path,
    tokenizer: bytes | None = None,
    events: Emit,
    stop: StopSignal,
) -> PreparedData:
    """Bring the workspace's token sets up to date with the input.

    Args:
        scratch: a local folder that a rerun finds again; staging for chunks, not needed once prepare has returned.
        tokenizer: tokenizer.json of the model to go on training; `config.tokenizer.path` comes first.
    Raises DataError, ConfigError, TransientError, Preempted.
    """
    source = open_source(config, scratch=scratch, stop=stop)
    labels, text_tokenizer, tokenizer_prefix = _labels_and_tokenizer(
        config, source, workspace, scratch, tokenizer, events, stop
    )
    infos: dict[str, TokenSetInfo] = {}
    works: list[_Work] = []
    prefixes: list[str] = []
    for partition in source.partitions:
        rules = RowRules(
            partition=partition.name,
            labels=tuple(labels.gains),
            label_gains=labels.row_gains,
            numeric=config.numeric,
            categorical=tuple(CategoricalInfo(column=f.column, num_ids=f.num_ids) for f in config.categorical),
            filter=config.filter,
            valid_fraction=config.valid_fraction,
            test_fraction=config.test_fraction,
            carve_valid=bool(source.fixed_labels),
            slices=config.slices,
        )
        name = _token_set_fingerprint(config, partition, rules, text_tokenizer)
        prefixes.append(prefix := f"tokens/{config.name}/{name}")
        staging = Staging(scratch / "tokens" / name)
        manifest = read_manifest(workspace, prefix)
        if manifest is None:
            settings = EncodeSettings(rules, config.bucket_shapes, config.lexical, config.quarantine_rows)
            works.append(_Work(partition, prefix, settings, staging))
            continue
        # What a try killed at the end of its commit left: were the folder ever deleted for damage, these are its files.
        shutil.rmtree(staging.folder, ignore_errors=True)
        infos[prefix] = info = TokenSetInfo.model_validate(manifest.fields)
        _refuse_bad_share(config, info, [], workspace)
        events(EventName.PARTITION_REUSED, partition=partition.name, prefix=prefix, rows=info.rows)
    infos |= _encode_all(_Context(config, workspace, text_tokenizer, labels, events, stop), source, works)
    result = [infos[prefix] for prefix in prefixes]
    if not sum(info.rows for info in result):
        raise DataError(
            f"{config.path or 'the synthetic catalogue'} has no usable rows ({len(result)} partitions read)",
            expected="rows with a query and a title",
            next_command="check --data.path" + (f" and --data.filter {dict(config.filter)}" if config.filter else ""),
        )
    files = [file for info in result for file in info.files]
    return PreparedData(
        token_set_prefixes=prefixes,
        tokenizer_prefix=tokenizer_prefix,
        tokenizer_fingerprint=text_tokenizer.fingerprint,
        reused=len(prefixes) - len(works),
        prepared=len(works),
        rows=sum(info.rows for info in result),
        rows_bad=sum(info.rows_bad for info in result),
        rows_filtered=sum(file.filtered for file in files),
        rows_blank=sum(file.blank for file in files),
        labels=tuple(labels.gains),
        vocabulary=labels.vocabulary,
        infos=tuple(result),
    )


def _labels_and_tokenizer(
    config: DataConfig,
    source: Source,
    workspace: Storage,
    scratch: Path,
    given: bytes | None,
    events: Emit,
    stop: StopSignal,
) -> tuple[LabelSet, TextTokenizer, str]:
    """Both need a look at all rows, unless given; they share one pass."""
    found = given_tokenizer(config, given, stop)
    trained_on = None
    if found is None:
        trained_on = source.partitions
        found = find_tokenizer(config, source, workspace)
    want_labels = not config.labels and not source.fixed_labels
    seen = None
    if want_labels or found is None:
        seen = survey(source, config, want_labels=want_labels, want_sample=found is None, stop=stop)
    labels = decide_labels(config, source, seen)
    if found is None:
        found = train_in_worker(config, list(seen.sample.texts() if seen else ()), stop)
        events(EventName.TOKENIZER_TRAINED, rows=len(seen.sample.held) if seen else 0, fingerprint=found.fingerprint)
    return labels, found, store_tokenizer(config, trained_on, workspace, found, scratch)


def _token_set_fingerprint(config: DataConfig, partition: Partition, rules: RowRules, tokenizer: TextTokenizer) -> str:
    """Everything the bytes of the shards depend on."""
    # Only when set: data prepared before there were slices keeps its name.
    slices = {"slices": list(config.slices)} if config.slices else {}
    return fingerprint(
        {
            **slices,
            "format": FORMAT_VERSION,
            "content": partition.content_id,
            "tokenizer": tokenizer.fingerprint,
            "labels": list(rules.labels),
            "row_gains": list(rules.label_gains),
            "columns": config.columns.model_dump(),
            "esci_locale": config.esci_locale,
            "numeric": list(config.numeric),
            "categorical": [feature.model_dump() for feature in config.categorical],
            "lexical": list(LEXICAL_NAMES) if config.lexical else [],
            "filter": dict(config.filter),
            "fractions": [config.valid_fraction, config.test_fraction],
            "buckets": list(config.buckets),
            "quarantine_rows": config.quarantine_rows,
            "rows_per_chunk": config.rows_per_chunk,
        }
    )


# Tokenise the chunks of all partitions in one stream, and commit each partition as it completes.


def _encode_all(context: _Context, source: Source, works: list[_Work]) -> dict[str, TokenSetInfo]:
    by_name = {work.partition.name: work for work in works}
    waiting, infos = list(works), dict[str, TokenSetInfo]()

    def commit_complete() -> None:
        for work in [work for work in waiting if work.num_chunks == len(work.done)]:
            infos[work.prefix] = _commit(context, work)
            waiting.remove(work)

    files = [file for work in works for file in work.partition.files]
    if not files:
        return {}
    with reading("tokenising", source, files) as tell:  # workers are at most a chunk each behind
        results = run_tasks(
            encode_chunk,
            context.tokenizer.data,
            _tasks(context, source, works, tell),
            num_workers=context.config.num_workers,
            stop=context.stop,
            doing="preparing data",
            waiting=lambda: tell(None),
        )
        with closing(results):
            for partition, index, record in results:
                by_name[partition].done[index] = record
                commit_complete()
    commit_complete()
    return infos


def _tasks(context: _Context, source: Source, works: list[_Work], tell: Tell) -> Iterator[ChunkTask]:
    """The chunks that still have to be encoded; those a killed run finished are noted as done."""
    for work in works:
        work.staging.create()
        index = 0
        for file in work.partition.files:
            work.read[file.key] = count = FileCount()
            batches = _counted(source.read(file), count, tell)
            for chunk in cut_chunks(file.key, batches, context.config.rows_per_chunk):
                context.stop.raise_if_set("preparing data")
                if record := work.staging.finished(index):
                    work.done[index] = record
                else:
                    yield ChunkTask(work.partition.name, index, chunk, work.settings, work.staging)
                index += 1
        work.num_chunks = index


def _counted(batches: Iterable[RawBatch], count: FileCount, tell: Tell) -> Iterator[RawBatch]:
    for batch in batches:
        count.add(batch)
        tell(batch)
        yield batch


def _account(read: Mapping[str, FileCount], records: Sequence[ChunkRecord]) -> tuple[FileRows, ...]:
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


def _without_category(columns: Sequence[CategoricalInfo], records: Sequence[ChunkRecord]) -> dict[str, int]:
    """By column; empty when a chunk was encoded by a version that did not count them."""
    if any(len(record.without_category) != len(columns) for record in records):
        return {}
    return {info.column: sum(record.without_category[i] for record in records) for i, info in enumerate(columns)}


def _commit(context: _Context, work: _Work) -> TokenSetInfo:
    """Publish the shards of all chunks with their manifest. Raises DataError above the share of bad rows."""
    config, workspace, labels, tokenizer = context.config, context.workspace, context.labels, context.tokenizer
    records, staging = [work.done[index] for index in range(len(work.done))], work.staging
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
        partition=work.partition.name,
        watermark=work.partition.watermark,
        fingerprint=work.prefix.rsplit("/", 1)[-1],
        tokenizer_fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        pad_id=tokenizer.pad_id,
        buckets=config.buckets,
        labels=tuple(labels.gains),
        label_gains=tuple(labels.gains.values()),
        numeric=numeric_names(config),
        categorical=work.settings.rules.categorical,
        splits=splits,
        rows_read=sum(record.rows_read for record in records),
        rows_bad=sum(record.rows_bad for record in records),
        reasons=dict(sorted(reasons.items())),
        truncated_rows=sum(record.truncated_rows for record in records),
        tokens=sum(record.tokens for record in records),
        slices=tuple(SliceInfo(column=column, names=names.get(column, ())) for column in config.slices),
        files=_account(work.read, records),
        judged=judged,
        without_category=_without_category(work.settings.rules.categorical, records),
    )
    bad = [row for record in records for row in record.quarantined][: config.quarantine_rows]
    _refuse_bad_share(config, info, bad, workspace)
    with os_errors("writing", f"file://{staging.files}"):
        write_bytes_atomic(staging.files / QUARANTINE, quarantine_lines(bad))
    commit_dir(workspace, staging.files, work.prefix, kind="tokens", fields=info.model_dump(mode="json"))
    shutil.rmtree(staging.folder, ignore_errors=True)
    if info.rows_bad:
        context.events(EventName.ROWS_QUARANTINED, partition=info.partition, rows=info.rows_bad, reasons=info.reasons)
    context.events(EventName.PARTITION_PREPARED, partition=info.partition, prefix=work.prefix, rows=info.rows)
    return info


def _refuse_bad_share(
    config: DataConfig, info: TokenSetInfo, bad: Sequence[QuarantinedRow], workspace: Storage
) -> None:
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
