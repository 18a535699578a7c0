"""Prepare: every partition of the input becomes a committed folder of token shards, unless it is there already.

Order: open the input, look at its labels and find or train the tokenizer, name each partition by fingerprint, reuse
what is committed, tokenise the rest chunk by chunk in worker processes, commit a partition when its last chunk is done.

Several jobs may share the work, each with a share of the chunks; whoever has the last one of a partition commits it.
Killed anywhere and run again, also with another number of jobs, it encodes only what is missing and writes the same
bytes. Memory: a chunk (64 MiB of columns at most) per process, and two in the parent.
"""

import shutil
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import ChunkTask, EncodeSettings, chunk_name, encode_chunk, part_name
from pipeline.data.config import DataConfig
from pipeline.data.labels import decide_labels
from pipeline.data.lexical import LEXICAL_NAMES
from pipeline.data.partition import Encoding, FileCount, FileRead, NamedPartition, commit, committed, file_name
from pipeline.data.rows import RawBatch, cut_chunks
from pipeline.data.sources import Partition, Source, listed, open_source, reading
from pipeline.data.survey import FileShare, Survey, share_files
from pipeline.data.token_sets import FORMAT_VERSION, CategoricalInfo, TokenSetInfo
from pipeline.data.tokenizer import TextTokenizer, find_tokenizer, given_tokenizer, store_tokenizer, train_in_worker
from pipeline.data.validate import RowRules
from pipeline.io.storage import KeyNotFound, Storage, read_record
from pipeline.proc.pool import run_tasks
from pipeline.telemetry.events import EventName

Tell = Callable[[RawBatch | None], None]
Emit = Callable[..., object]
"""Writes one event: its name, and its fields by keyword."""
Share = tuple[NamedPartition, dict[int, FileShare]]
"""What one worker does of a partition: of its files, by their number."""
_UPLOADS = 4


@dataclass(frozen=True)
class PreparedData:
    """What prepare left in the workspace. Prefixes are keys, in the order of partitions; counts cover all of them.

    `prepared` and `rows_prepared` (good and bad ones) are those of this time. `rows` are in shards; they, `rows_bad`
    and `rows_filtered` are all rows of the input. `splits_digits`: the tokenizer does. `vocabulary`: the known one that
    ordered the labels, if it was one. `infos`: what each partition says of itself.
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


class Todo(Record):
    """The partitions that the workers share, by prefix: those that were not there when the first of them looked."""

    prefixes: tuple[str, ...]


def prepare(
    config: DataConfig,
    workspace: Storage,
    *,
    scratch: Path,
    tokenizer: bytes | None = None,
    events: Emit,
    stop: StopSignal,
) -> PreparedData:
    """Bring the workspace's token sets up to date with the input, alone. See prepare_share()."""
    result = prepare_share(
        config, workspace, worker=0, workers=1, scratch=scratch, tokenizer=tokenizer, events=events, stop=stop
    )
    if isinstance(result, int):
        raise TransientError(
            f"parts of {result} partition(s) are gone",
            expected="no other prepare of this input at the same time",
            next_command="the same command again: it finds what is done",
        )
    return result


def prepare_share(
    config: DataConfig,
    workspace: Storage,
    *,
    worker: int,
    workers: int,
    scratch: Path,
    tokenizer: bytes | None = None,
    events: Emit,
    stop: StopSignal,
) -> PreparedData | int:
    """Do the share of `worker` of `workers`; all that is prepared, or how many partitions the others still work on.

    Args:
        scratch: a local folder for what is not published yet, not needed once prepare has returned.
        tokenizer: tokenizer.json of the model to go on training; `config.tokenizer.path` comes first.
    Raises DataError, ConfigError, Preempted; TransientError too when the others have something to finish and the input
    has changed: those that started later share another whole, of which this worker's part would be missing.
    """
    scratch = scratch / "prepare" / f"worker-{worker}"
    files = listed(config, stop)
    source = open_source(config, scratch=scratch, stop=stop)
    survey = Survey(source, config, workspace, worker, workers, stop)
    encoding, tokenizer_prefix = decide(config, source, workspace, scratch, tokenizer, survey, events, stop)
    named = name_partitions(encoding, source, workspace, scratch / "parts")
    # What all workers find is told once.
    tell = events if worker == 0 else None
    infos = {one.prefix: info for one in named if (info := committed(encoding, one, tell))}
    _tidy_up(workspace, [one for one in named if one.prefix in infos])
    plan = f"tokens/{config.name}/share/{fingerprint([one.prefix for one in named])}.json"
    todo = _agree(workspace, plan, [one.prefix for one in named if one.prefix not in infos])
    shares = _shares([one for one in named if one.prefix in todo], worker, workers)
    shares = [(one, share) for one, share in shares if one.prefix not in infos]
    infos |= _encode(encoding, source, shares, events, stop)
    for one in named:
        if one.prefix not in infos and (info := commit(encoding, one, events)):
            infos[one.prefix] = info
    if missing := len(named) - len(infos):
        if listed(config, stop) != files:
            raise TransientError(
                f"{config.path} has changed since worker {worker} of {workers} looked at it",
                expected="one input for all workers: those that started later share what lies there now",
                next_command="the same command again: it finds what is done, and shares the rest with them",
            )
        return missing
    result = gather(encoding, tokenizer_prefix, named, infos, prepared=todo)
    workspace.delete([plan])
    survey.delete()
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def gather(
    encoding: Encoding,
    tokenizer_prefix: str,
    named: Sequence[NamedPartition],
    infos: Mapping[str, TokenSetInfo],
    *,
    prepared: Collection[str],
) -> PreparedData:
    """What all partitions are together, by what each says of itself. Raises DataError when none has a usable row."""
    config, result = encoding.config, [infos[one.prefix] for one in named]
    if not sum(info.rows for info in result):
        raise DataError(
            f"{config.path or 'the synthetic catalogue'} has no usable rows ({len(result)} partitions read)",
            expected="rows with a query and a title",
            next_command="check --data.path" + (f" and --data.filter {dict(config.filter)}" if config.filter else ""),
        )
    files = [file for info in result for file in info.files]
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
    )


# What decides the bytes of the shards, and the names of partitions that follow from it.


def decide(
    config: DataConfig,
    source: Source,
    workspace: Storage,
    scratch: Path,
    given: bytes | None,
    survey: Survey,
    events: Emit,
    stop: StopSignal,
) -> tuple[Encoding, str]:
    """Labels and tokenizer, and the prefix of the tokenizer. Unless given, both need a look at all rows, the same."""
    found = given_tokenizer(config, given, stop)
    if found is not None and config.tokenizer.path is not None and config.tokenizer.split_digits:
        found = found.with_split_digits()
    trained_on = None
    if found is None:
        trained_on = source.partitions
        found = find_tokenizer(config, source, workspace)
    want_labels = not config.labels and not source.fixed_labels
    labels, sample = survey.look(want_labels, found is None) if want_labels or found is None else (None, None)
    label_set = decide_labels(config, source, labels)
    if found is None:  # unless another worker has trained it meanwhile
        found = find_tokenizer(config, source, workspace)
    if found is None:
        found = train_in_worker(config, list(sample.texts() if sample else ()), stop)
        events(EventName.TOKENIZER_TRAINED, rows=len(sample.held) if sample else 0, fingerprint=found.fingerprint)
    return Encoding(config, found, label_set), store_tokenizer(config, trained_on, workspace, found, scratch)


def name_partitions(encoding: Encoding, source: Source, workspace: Storage, scratch: Path) -> list[NamedPartition]:
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
        prefix = f"tokens/{config.name}/{name}"
        named.append(NamedPartition(partition, settings, workspace, prefix, scratch / name))
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


# What is shared by all workers, and the share of one: of each file, all chunks or every n-th.


def _tidy_up(workspace: Storage, whole: Sequence[NamedPartition]) -> None:
    """Take away what a try killed at the end of its commit left of the parts of whole partitions.

    Were a partition ever deleted for damage, they would prove files that are gone.
    """
    folder = whole[0].parts.rpartition("/")[0] if whole else ""  # the one of a dataset
    left = set(workspace.list_dirs(folder)) if whole else set()
    for one in whole:
        if one.fingerprint in left:
            workspace.delete_prefix(one.parts)


def _agree(workspace: Storage, key: str, missing: Sequence[str]) -> frozenset[str]:
    """What is shared, agreed upon by the first worker that looks: the shares of all must be of the same whole.

    `missing`: prefixes that are not committed. One that a plan of earlier workers lacks is added to it.
    """
    while missing:
        if workspace.write_if_absent(key, Todo(prefixes=tuple(missing)).model_dump_json().encode()):
            break
        stat = workspace.stat(key)
        known = read_record(workspace, key, Todo, "a list of partitions", "trnpipe prepare")
        if stat is None or known is None:
            continue
        together = frozenset(known.prefixes) | frozenset(missing)
        new = Todo(prefixes=tuple(sorted(together))).model_dump_json().encode()
        if len(together) == len(known.prefixes) or workspace.write_if_match(key, new, stat.etag):
            return together
    return frozenset(missing)


def _shares(named: Sequence[NamedPartition], worker: int, workers: int) -> list[Share]:
    """Of partitions of which a worker has something to do."""
    files = [(one, number) for one in named for number in range(len(one.partition.files))]
    sizes = [one.partition.files[number].size_bytes for one, number in files]
    shares: dict[str, Share] = {}
    for place, share in share_files(sizes, worker, workers).items():
        one, number = files[place]
        shares.setdefault(one.prefix, (one, {}))[1][number] = share
    return list(shares.values())


# Tokenise the chunks of all partitions in one stream, and commit each partition as it completes.


def _encode(
    encoding: Encoding, source: Source, shares: Sequence[Share], events: Emit, stop: StopSignal
) -> dict[str, TokenSetInfo]:
    """Encode and publish the chunks of a share that nobody has published; returns what is whole by then, by prefix."""
    files = [named.partition.files[number] for named, share in shares for number in share]
    if not files:
        return {}
    by_name = {named.partition.name: named for named, _ in shares}
    under_way, read, infos = Counter[str](), set[str](), dict[str, TokenSetInfo]()
    uploads, pending = ThreadPoolExecutor(_UPLOADS, "upload"), deque[tuple[str, Future[None]]]()

    def tasks(tell: Tell) -> Iterator[ChunkTask]:
        for named, share in shares:
            name = named.partition.name
            for task in _tasks(encoding.config, source, named, share, tell, stop):
                under_way[name] += 1
                yield task
            read.add(name)

    def finish(most: int) -> None:
        """Uploads, until at most so many are under way."""
        while len(pending) > most or (pending and pending[0][1].done()):
            name, future = pending.popleft()
            future.result()
            under_way[name] -= 1
            if name in read and not under_way[name] and (info := commit(encoding, by_name[name], events)):
                infos[by_name[name].prefix] = info

    try:
        with reading("tokenising", source, files) as tell:  # workers are at most a chunk each behind
            results = run_tasks(
                encode_chunk,
                encoding.tokenizer.data,
                tasks(tell),
                num_workers=encoding.config.num_workers,
                stop=stop,
                doing="preparing data",
                waiting=lambda: tell(None),
            )
            with closing(results):
                for partition, chunk, shards in results:
                    pending.append((partition, uploads.submit(by_name[partition].publish, chunk, shards)))
                    finish(2 * _UPLOADS)
        finish(0)
    finally:
        uploads.shutdown(cancel_futures=True)
    return infos


def _tasks(
    config: DataConfig,
    source: Source,
    named: NamedPartition,
    share: Mapping[int, FileShare],
    tell: Tell,
    stop: StopSignal,
) -> Iterator[ChunkTask]:
    """The chunks of a share that are not there yet. A file of which all are there is not read."""
    partition, there = named.partition, named.there()
    for number, mine in share.items():
        if file_name(number) in there:
            try:
                num_chunks = named.read_of(number).num_chunks
            except KeyNotFound:  # another worker has committed the partition meanwhile, and tidied up
                continue
            if all(part_name(chunk_name(number, place)) in there for place in mine.chunks(num_chunks)):
                continue
        file, counts, num_chunks = partition.files[number], list[FileCount](), 0
        batches = count_rows(source.read(file), counts.append, tell)
        for place, chunk in enumerate(cut_chunks(file.key, batches, config.rows_per_chunk)):
            stop.raise_if_set("preparing data")
            name, num_chunks = chunk_name(number, place), place + 1
            if mine.has(place) and part_name(name) not in there:
                yield ChunkTask(partition.name, name, chunk, named.settings, named.scratch)
        named.note(number, FileRead(count=counts[0], num_chunks=num_chunks))


def count_rows(batches: Iterable[RawBatch], counted: Callable[[FileCount], None], tell: Tell) -> Iterator[RawBatch]:
    """The batches of one file; behind the last one `counted` is told what there was in it."""
    rows = blank = left_out = 0
    for batch in batches:
        rows += len(batch.rows) + sum(row.count for row in batch.bad) + batch.left_out
        blank += batch.blank
        left_out += batch.left_out
        tell(batch)
        yield batch
    counted(FileCount(rows=rows, blank=blank, left_out=left_out))
