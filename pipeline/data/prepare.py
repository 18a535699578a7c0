"""Prepare: every partition of the input becomes a committed folder of token shards, unless it is there already.

Order: open the input, look at its labels and find or train the tokenizer, name each partition by fingerprint, reuse
what is committed, tokenise the rest chunk by chunk in worker processes, commit a partition when its last chunk is done.
Memory: a chunk (64 MiB of columns at most) per worker, and two in the parent. Killed anywhere and run again, it skips
finished chunks and writes the same bytes.
"""

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import ChunkRecord, ChunkTask, EncodeSettings, Staging, chunk_name, encode_chunk
from pipeline.data.config import DataConfig
from pipeline.data.input_files import InputFile, Partition
from pipeline.data.judgements import count_judgements, count_texts_of_several_ids
from pipeline.data.lexical import LEXICAL_NAMES
from pipeline.data.row_counts import (
    Encoding,
    FileCount,
    NamedPartition,
    describe_partition,
    first_bad,
    refuse_bad_share,
    shards_by_split,
)
from pipeline.data.rows import RawBatch, cut_chunks, quarantine_lines
from pipeline.data.sources import Source, open_source, reading_progress
from pipeline.data.survey import Survey, decide_labels, nothing_kept, survey
from pipeline.data.token_sets import FORMAT_VERSION, KIND, QUARANTINE, CategoricalInfo, TokenSetInfo
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, given_tokenizer, store_tokenizer, train_in_worker
from pipeline.data.validate import RowRules
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_dir, read_manifest
from pipeline.io.storage import Storage, os_errors
from pipeline.proc.pool import run_tasks
from pipeline.telemetry.events import EventName

Tell = Callable[[RawBatch | None], None]
Emit = Callable[..., object]
"""Writes one event: its name, and its fields by keyword."""
Look = Callable[[bool, bool], Survey]


@dataclass(frozen=True)
class PreparedData:
    """What prepare left in the workspace. Prefixes are keys, in the order of partitions; counts cover all of them.

    `prepared` and `rows_prepared` (good and bad ones) are those of this time. `rows` are in shards; they, `rows_bad`
    and `rows_filtered` are all rows of the input. `splits_digits`: the tokenizer does. `vocabulary`: the known one that
    ordered the labels, if it was one. `infos`: what each partition says of itself. `passed_over`: keys of files below
    the path that were not read.
    """

    token_set_prefixes: list[str]
    tokenizer_prefix: str
    tokenizer_fingerprint: str
    splits_digits: bool
    reused: int
    prepared: int
    rows_prepared: int
    rows: int
    rows_bad: int
    rows_filtered: int
    rows_blank: int
    labels: tuple[str, ...]
    vocabulary: str
    infos: tuple[TokenSetInfo, ...]
    passed_over: tuple[str, ...]
    input_warnings: tuple[str, ...]


@dataclass
class _Work:
    """A partition on its way: chunks announced so far, and those done.

    `with_bad`: which of those hold bad rows that may be kept of the partition. Other chunks hold none: memory stays
    bounded.
    """

    named: NamedPartition
    staging: Staging
    done: dict[int, ChunkRecord] = field(default_factory=dict)
    read: dict[str, FileCount] = field(default_factory=dict)
    num_chunks: int | None = None
    with_bad: list[int] = field(default_factory=list)

    def note(self, index: int, record: ChunkRecord) -> None:
        """A chunk is done. Of the bad rows only those are held that are among the first by now."""
        self.done[index] = record
        room, found = self.named.settings.quarantine_rows, sorted({*self.with_bad, index})
        for number in found:
            record = self.done[number]
            bad = record.quarantined[:room]
            room -= len(bad)
            self.done[number] = record.model_copy(update={"quarantined": bad})
        self.with_bad = [number for number in found if self.done[number].quarantined]


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

    def look(want_labels: bool, want_sample: bool) -> Survey:
        return survey(source, config, want_labels=want_labels, want_sample=want_sample, stop=stop)

    encoding, tokenizer_prefix = decide_labels_and_tokenizer(
        config, source, workspace, scratch, tokenizer, look, events, stop
    )
    named = name_partitions(encoding, source)
    infos: dict[str, TokenSetInfo] = {}
    works: list[_Work] = []
    for one in named:
        staging = Staging(scratch / "tokens" / one.fingerprint)
        if (info := committed_info(encoding, one, workspace, events)) is None:
            works.append(_Work(one, staging))
            continue
        # What a try killed at the end of its commit left: were the folder ever deleted for damage, these are its files.
        shutil.rmtree(staging.folder, ignore_errors=True)
        infos[one.prefix] = info
    infos |= _encode_all(encoding, workspace, source, works, events, stop)
    return prepared_data_of(
        encoding, tokenizer_prefix, source, named, infos, prepared=[work.named.prefix for work in works]
    )


def committed_info(encoding: Encoding, named: NamedPartition, workspace: Storage, events: Emit) -> TokenSetInfo | None:
    """What a partition says of itself that is there already. Raises DataError above the share of bad rows."""
    manifest = read_manifest(workspace, named.prefix)
    if manifest is None:
        return None
    info = TokenSetInfo.model_validate(manifest.fields)
    refuse_bad_share(encoding.config, info, [], workspace)
    events(EventName.PARTITION_REUSED, partition=info.partition, prefix=named.prefix, rows=info.rows)
    return info


def prepared_data_of(
    encoding: Encoding,
    tokenizer_prefix: str,
    source: Source,
    named: Sequence[NamedPartition],
    infos: Mapping[str, TokenSetInfo],
    *,
    prepared: Collection[str],
) -> PreparedData:
    """What all partitions are together, by what each says of itself. Raises DataError when none has a usable row."""
    config, result = encoding.config, [infos[one.prefix] for one in named]
    files = [file for info in result for file in info.files]
    if not sum(info.rows for info in result):
        if sum(file.rows for file in files) == sum(file.filtered for file in files) > 0:
            raise nothing_kept(config)
        raise DataError(
            f"{config.path or 'the synthetic catalogue'} has no usable rows ({len(result)} partitions read)",
            expected="rows with a query and a title",
            next_command="check --data.path" + (f" and --data.filter {dict(config.filter)}" if config.filter else ""),
        )
    return PreparedData(
        token_set_prefixes=[one.prefix for one in named],
        tokenizer_prefix=tokenizer_prefix,
        tokenizer_fingerprint=encoding.tokenizer.fingerprint,
        splits_digits=encoding.tokenizer.splits_digits,
        reused=len(named) - len(prepared),
        prepared=len(prepared),
        rows_prepared=sum(infos[prefix].rows + infos[prefix].rows_bad for prefix in prepared),
        rows=sum(info.rows for info in result),
        rows_bad=sum(info.rows_bad for info in result),
        rows_filtered=sum(file.filtered for file in files),
        rows_blank=sum(file.blank for file in files),
        labels=tuple(encoding.labels.gains),
        vocabulary=encoding.labels.vocabulary,
        infos=tuple(result),
        passed_over=source.passed_over,
        input_warnings=source.warnings,
    )


# What decides the bytes of the shards, and the names of partitions that follow from it.


def decide_labels_and_tokenizer(
    config: DataConfig,
    source: Source,
    workspace: Storage,
    scratch: Path,
    given: bytes | None,
    look: Look,
    events: Emit,
    stop: StopSignal,
) -> tuple[Encoding, str]:
    """Labels and tokenizer, and the prefix of the tokenizer. Both need a look at all rows, unless given; they share it.

    `look`: the survey of all rows, given whether labels and whether texts are wanted.
    """
    found = given_tokenizer(config, given, stop)
    if found is not None and config.tokenizer.path is not None and config.tokenizer.split_digits:
        found = found.with_split_digits()
    trained_on = None
    if found is None:
        trained_on = source.partitions
        found = find_tokenizer(config, source, workspace)
    want_labels = not config.labels and not source.fixed_labels
    seen = look(want_labels, found is None) if want_labels or found is None else None
    labels = decide_labels(config, source, seen)
    if found is None:  # unless another worker has trained it meanwhile
        found = find_tokenizer(config, source, workspace)
    if found is None:
        found = train_in_worker(config, list(seen.sample.texts() if seen else ()), stop)
        events(EventName.TOKENIZER_TRAINED, rows=len(seen.sample.held) if seen else 0, fingerprint=found.fingerprint)
    return Encoding(config, found, labels), store_tokenizer(config, trained_on, workspace, found, scratch)


def name_partitions(encoding: Encoding, source: Source) -> list[NamedPartition]:
    """Every partition of the input, in order, with the name that its shards have or will have."""
    config, labels, named = encoding.config, encoding.labels, list[NamedPartition]()
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
        name = _token_set_fingerprint(config, partition, rules, encoding.tokenizer)
        settings = EncodeSettings(
            rules=rules,
            buckets=config.bucket_shapes,
            lexical=config.lexical,
            query_prefix=config.query_prefix,
            product_prefix=config.product_prefix,
            quarantine_rows=config.quarantine_rows,
        )
        named.append(NamedPartition(partition, f"tokens/{config.name}/{name}", settings))
    return named


def _token_set_fingerprint(config: DataConfig, partition: Partition, rules: RowRules, tokenizer: TextTokenizer) -> str:
    """Everything the bytes of the shards depend on."""
    # Only when set: data prepared before there were such settings keeps its name.
    prefixes = {"query_prefix": config.query_prefix, "product_prefix": config.product_prefix}
    later = {"slices": list(config.slices), **prefixes}
    return fingerprint(
        {
            **{name: value for name, value in later.items() if value},
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


def _encode_all(
    encoding: Encoding, workspace: Storage, source: Source, works: list[_Work], events: Emit, stop: StopSignal
) -> dict[str, TokenSetInfo]:
    by_name = {work.named.partition.name: work for work in works}
    waiting, infos = list(works), dict[str, TokenSetInfo]()

    def commit_complete() -> None:
        for work in [work for work in waiting if work.num_chunks == len(work.done)]:
            infos[work.named.prefix] = _commit(encoding, workspace, work, events)
            waiting.remove(work)
            work.done.clear()

    files = [file for work in works for file in work.named.partition.files]
    if not files:
        return {}
    with reading_progress("tokenising", source, files) as tell:  # workers are at most a chunk each behind
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


def _tasks(config: DataConfig, source: Source, works: list[_Work], tell: Tell, stop: StopSignal) -> Iterator[ChunkTask]:
    """The chunks that still have to be encoded; those a killed run finished are noted as done."""
    for work in works:
        work.staging.create()
        partition, index = work.named.partition, 0
        for number, file in enumerate(partition.files):

            def counted(count: FileCount, file: InputFile = file, work: _Work = work) -> None:
                work.read[file.key] = count

            batches = count_rows(source.read(file), counted, tell)
            for place, chunk in enumerate(cut_chunks(file.key, batches, config.rows_per_chunk)):
                stop.raise_if_set("preparing data")
                if record := work.staging.finished(index):
                    work.note(index, record)
                else:
                    name = chunk_name(number, place)
                    yield ChunkTask(partition.name, index, name, chunk, work.named.settings, work.staging)
                index += 1
        work.num_chunks = index


def count_rows(batches: Iterable[RawBatch], counted: Callable[[FileCount], None], tell: Tell) -> Iterator[RawBatch]:
    """The batches of one file; behind the last one `counted` is told what there was in it."""
    count = FileCount()
    for batch in batches:
        count = count.plus(batch)
        tell(batch)
        yield batch
    counted(count)


def _commit(encoding: Encoding, workspace: Storage, work: _Work, events: Emit) -> TokenSetInfo:
    """Publish the shards of all chunks with their manifest. Raises DataError above the share of bad rows."""
    records, staging = [work.done[index] for index in range(len(work.done))], work.staging
    with os_errors("reading", f"file://{staging.files}"):
        num_labels = len(encoding.labels.gains)
        shards = shards_by_split(records)
        judged = count_judgements(staging.files, shards, num_labels, workspace.stop)
        ambiguous = count_texts_of_several_ids(staging.files, shards, encoding.tokenizer.pad_id, workspace.stop)
    info = describe_partition(encoding, work.named, work.read, records, judged, ambiguous)
    bad = first_bad(encoding.config, records)
    refuse_bad_share(encoding.config, info, bad, workspace)
    with os_errors("writing", f"file://{staging.files}"):
        write_bytes_atomic(staging.files / QUARANTINE, quarantine_lines(bad))
    commit_dir(workspace, staging.files, work.named.prefix, kind=KIND, fields=info.model_dump(mode="json"))
    shutil.rmtree(staging.folder, ignore_errors=True)
    tell_prepared(work.named, info, events)
    return info


def tell_prepared(named: NamedPartition, info: TokenSetInfo, events: Emit) -> None:
    if info.rows_bad:
        events(EventName.ROWS_QUARANTINED, partition=info.partition, rows=info.rows_bad, reasons=info.reasons)
    events(EventName.PARTITION_PREPARED, partition=info.partition, prefix=named.prefix, rows=info.rows)
