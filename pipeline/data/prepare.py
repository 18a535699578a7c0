"""Prepare: every partition of the input becomes a committed folder of token shards, unless it is there already.

Order: open the input, look at its labels and find or train the tokenizer, name each partition by fingerprint, reuse
what is committed, tokenise the rest chunk by chunk in worker processes, commit a partition when its last chunk is done.
Memory: a chunk (64 MiB of columns at most) per worker, and two in the parent. Killed anywhere and run again, it skips
finished chunks and writes the same bytes.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import (
    ChunkRecord,
    ChunkTask,
    EncodeSettings,
    FileCount,
    Staging,
    commit_partition,
    encode_chunk,
    refuse_bad_share,
)
from pipeline.data.config import DataConfig
from pipeline.data.lexical import LEXICAL_NAMES
from pipeline.data.rows import RawBatch, cut_chunks
from pipeline.data.sources import Partition, Source, open_source, reading
from pipeline.data.survey import LabelSet, decide_labels, survey
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, given_tokenizer, store_tokenizer, train_in_worker
from pipeline.data.tokens import FORMAT_VERSION, CategoricalInfo, TokenSetInfo
from pipeline.data.validate import RowRules
from pipeline.io.commit import read_manifest
from pipeline.io.storage import Storage
from pipeline.proc.pool import run_tasks
from pipeline.telemetry.events import EventName

Tell = Callable[[RawBatch | None], None]


class Emit(Protocol):
    """Writes one event."""

    def __call__(self, name: EventName, /, **fields: object) -> object: ...


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
class _Work:
    """A partition on its way: chunks announced so far, and those done."""

    partition: Partition
    prefix: str
    staging: Staging
    done: dict[int, ChunkRecord] = field(default_factory=dict)
    read: dict[str, FileCount] = field(default_factory=dict)
    num_chunks: int | None = None

    @property
    def is_complete(self) -> bool:
        return self.num_chunks == len(self.done)


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
    settings = _encode_settings(config, source, labels)
    infos: dict[str, TokenSetInfo] = {}
    works: list[_Work] = []
    prefixes: list[str] = []
    for partition in source.partitions:
        name = _token_set_fingerprint(config, partition, settings[partition.name], text_tokenizer)
        prefixes.append(prefix := f"tokens/{config.name}/{name}")
        staging = Staging(scratch / "tokens" / name)
        manifest = read_manifest(workspace, prefix)
        if manifest is None:
            works.append(_Work(partition, prefix, staging))
            continue
        # What a try killed at the end of its commit left: were the folder ever deleted for damage, these are its files.
        shutil.rmtree(staging.folder, ignore_errors=True)
        infos[prefix] = info = TokenSetInfo.model_validate(manifest.fields)
        refuse_bad_share(config, info, [], workspace)
        events(EventName.PARTITION_REUSED, partition=partition.name, prefix=prefix, rows=info.rows)
    infos |= _encode_all(_Context(config, workspace, text_tokenizer, labels, events, stop), source, works, settings)
    result = [infos[prefix] for prefix in prefixes]
    if not sum(info.rows for info in result):
        raise DataError(
            f"{config.path or 'the synthetic catalogue'} has no usable rows ({len(result)} partitions read)",
            expected="rows with a query and a title",
            next_command="check --data.path" + (f" and --data.filter {dict(config.filter)}" if config.filter else ""),
        )
    return PreparedData(
        prefixes,
        tokenizer_prefix,
        text_tokenizer.fingerprint,
        len(prefixes) - len(works),
        len(works),
        sum(info.rows for info in result),
        sum(info.rows_bad for info in result),
        sum(file.filtered for info in result for file in info.files),
        sum(file.blank for info in result for file in info.files),
        tuple(labels.gains),
        labels.vocabulary,
        tuple(result),
    )


@dataclass(frozen=True)
class _Context:
    config: DataConfig
    workspace: Storage
    tokenizer: TextTokenizer
    labels: LabelSet
    events: Emit
    stop: StopSignal


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


def _encode_settings(config: DataConfig, source: Source, labels: LabelSet) -> dict[str, EncodeSettings]:
    """How to encode each partition; only the name differs."""
    categorical = tuple(CategoricalInfo(column=f.column, num_ids=f.num_ids) for f in config.categorical)
    return {
        partition.name: EncodeSettings(
            RowRules(
                partition.name,
                tuple(labels.gains),
                labels.row_gains,
                config.numeric,
                categorical,
                config.filter,
                config.valid_fraction,
                config.test_fraction,
                carve_valid=bool(source.fixed_labels),
                slices=config.slices,
            ),
            config.bucket_shapes,
            config.lexical,
            config.quarantine_rows,
        )
        for partition in source.partitions
    }


def _token_set_fingerprint(
    config: DataConfig, partition: Partition, settings: EncodeSettings, tokenizer: TextTokenizer
) -> str:
    """Everything the bytes of the shards depend on."""
    rules = settings.rules
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


def _encode_all(
    context: _Context, source: Source, works: list[_Work], settings: dict[str, EncodeSettings]
) -> dict[str, TokenSetInfo]:
    """Tokenise the chunks of all partitions in one stream, and commit each partition as it completes."""
    if not works:
        return {}
    by_name = {work.partition.name: work for work in works}
    waiting, infos = list(works), dict[str, TokenSetInfo]()
    files = [file for work in works for file in work.partition.files]
    with reading("tokenising", source, files) as tell:  # workers are at most a chunk each behind
        results = run_tasks(
            encode_chunk,
            context.tokenizer.data,
            _tasks(context, source, works, settings, tell),
            num_workers=context.config.num_workers,
            stop=context.stop,
            doing="preparing data",
            waiting=lambda: tell(None),
        )
        for result in results:
            by_name[result.partition].done[result.index] = result.record
            waiting = _commit_complete(context, waiting, settings, infos)
    _commit_complete(context, waiting, settings, infos)
    return infos


def _tasks(
    context: _Context, source: Source, works: list[_Work], settings: dict[str, EncodeSettings], tell: Tell
) -> Iterator[ChunkTask]:
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
                    yield ChunkTask(work.partition.name, index, chunk, settings[work.partition.name], work.staging)
                index += 1
        work.num_chunks = index


def _counted(batches: Iterable[RawBatch], count: FileCount, tell: Tell) -> Iterator[RawBatch]:
    for batch in batches:
        count.add(batch)
        tell(batch)
        yield batch


def _commit_complete(
    context: _Context, waiting: list[_Work], settings: dict[str, EncodeSettings], infos: dict[str, TokenSetInfo]
) -> list[_Work]:
    """Commit what is complete; returns the rest."""
    rest = []
    for work in waiting:
        if not work.is_complete:
            rest.append(work)
            continue
        records = [work.done[index] for index in range(len(work.done))]
        infos[work.prefix] = info = commit_partition(
            context.config,
            context.workspace,
            work.prefix,
            work.partition,
            work.staging,
            records,
            work.read,
            settings[work.partition.name],
            context.tokenizer,
            context.labels,
        )
        shutil.rmtree(work.staging.folder, ignore_errors=True)
        if info.rows_bad:
            context.events(
                EventName.ROWS_QUARANTINED, partition=work.partition.name, rows=info.rows_bad, reasons=info.reasons
            )
        context.events(EventName.PARTITION_PREPARED, partition=work.partition.name, prefix=work.prefix, rows=info.rows)
    return rest
