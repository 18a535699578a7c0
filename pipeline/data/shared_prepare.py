"""Prepare as one of several workers: each encodes a share of the chunks, and whoever has the last one of a partition
commits it.

A chunk is committed alone: its shards, under their last names in the token set, then its part, which proves them and
holds what the account of the partition needs. So the last step reads no rows, a stop costs the chunks under way, and
another number of workers goes on where the last ones stopped. Bytes are those of a single worker.
"""

import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import save

from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.manifest import FileRecord
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import ChunkRecord, ChunkTask, Staging, chunk_name, encode_chunk
from pipeline.data.config import DataConfig
from pipeline.data.judgements import BucketCounts, Pieces, Queries, add_up, bucket_counts, queries_of
from pipeline.data.prepare import (
    Emit,
    PreparedData,
    Tell,
    committed_info,
    count_rows,
    decide_labels_and_tokenizer,
    name_partitions,
    prepared_data_of,
    tell_prepared,
)
from pipeline.data.row_counts import (
    Encoding,
    FileCount,
    NamedPartition,
    describe_partition,
    first_bad,
    refuse_bad_share,
    shards_by_split,
)
from pipeline.data.rows import cut_chunks, quarantine_lines
from pipeline.data.shards import map_safetensors
from pipeline.data.shared_survey import FileShare, SharedSurvey, share_files
from pipeline.data.sources import Source, list_input_objects, open_source, reading_progress
from pipeline.data.token_sets import KIND, QUARANTINE, JudgedSplit, Split, TokenSetInfo
from pipeline.io.atomic import write_bytes_atomic
from pipeline.io.commit import commit_files, file_record, hash_bytes
from pipeline.io.storage import KeyNotFound, Storage, join_key, names_in, os_errors, read_record
from pipeline.proc.pool import run_tasks

_UPLOADS = 4
_PART = "part"


class ChunkPart(Record):
    """What proves a chunk: in the header of a file that holds the gains of its queries beside."""

    chunk: ChunkRecord
    files: dict[str, FileRecord]
    judged: dict[Split, tuple[BucketCounts, ...]]


class FileRead(Record):
    """What a file holds, known once somebody has read to its end."""

    count: FileCount
    num_chunks: int


class Todo(Record):
    """The partitions that the workers share, by prefix: those that were not there when the first of them looked."""

    prefixes: tuple[str, ...]


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

    Arguments and errors are those of prepare(). Raises TransientError too when the others have something to finish and
    the input has changed: those that started later share another whole, of which this worker's part would be missing.
    """
    scratch = scratch / "prepare" / f"worker-{worker}"
    files = list_input_objects(config, stop)
    source = open_source(config, scratch=scratch, stop=stop)
    look = SharedSurvey(source, config, workspace, worker, workers, stop)
    tell = events if worker == 0 else _untold  # what all of them find is told once
    encoding, tokenizer_prefix = decide_labels_and_tokenizer(
        config, source, workspace, scratch, tokenizer, look, events, stop
    )
    named = name_partitions(encoding, source)
    infos = {one.prefix: info for one in named if (info := committed_info(encoding, one, workspace, tell))}
    _tidy_up(workspace, [one for one in named if one.prefix in infos])
    plan = _Plan(config, workspace, named)
    todo = plan.agree([one.prefix for one in named if one.prefix not in infos])
    shares = _shares([one for one in named if one.prefix in todo], worker, workers)
    _encode(encoding, workspace, source, [one for one in shares if one.named.prefix not in infos], scratch, stop)
    for one in named:
        if one.prefix not in infos and (info := _commit(encoding, workspace, one, scratch, events)):
            infos[one.prefix] = info
    if missing := len(named) - len(infos):
        if list_input_objects(config, stop) != files:
            raise TransientError(
                f"{config.path} has changed since worker {worker} of {workers} looked at it",
                expected="one input for all workers: those that started later share what lies there now",
                next_command="the same command again: it finds what is done, and shares the rest with them",
            )
        return missing
    result = prepared_data_of(encoding, tokenizer_prefix, source, named, infos, prepared=todo)
    plan.delete()
    look.delete()
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def _untold(*_: object, **__: object) -> None:
    """An event that another worker writes."""


@dataclass(frozen=True)
class _Plan:
    """What is shared, agreed upon by the first worker that looks: the shares of all must be of the same whole."""

    config: DataConfig
    workspace: Storage
    named: Sequence[NamedPartition]

    @property
    def _key(self) -> str:
        name = fingerprint([one.prefix for one in self.named])
        return f"tokens/{self.config.name}/share/{name}.json"

    def agree(self, missing: Sequence[str]) -> frozenset[str]:
        """`missing`: prefixes that are not committed. One that a plan of earlier workers lacks is added to it."""
        if not missing:
            return frozenset()
        while True:
            if self.workspace.write_if_absent(self._key, Todo(prefixes=tuple(missing)).model_dump_json().encode()):
                return frozenset(missing)
            stat, known = self.workspace.stat(self._key), self._read()
            if stat is None or known is None:
                continue
            together = frozenset(known.prefixes) | frozenset(missing)
            new = Todo(prefixes=tuple(sorted(together)))
            if len(together) == len(known.prefixes) or self.workspace.write_if_match(
                self._key, new.model_dump_json().encode(), stat.etag
            ):
                return together

    def delete(self) -> None:
        self.workspace.delete([self._key])

    def _read(self) -> Todo | None:
        return read_record(self.workspace, self._key, Todo, "a list of partitions", "trnpipe prepare")


# The share of one worker: of each file, all chunks or every n-th.


@dataclass(frozen=True)
class _Share:
    """What one worker does of a partition: `files` by their number in it."""

    named: NamedPartition
    files: Mapping[int, FileShare]


def _shares(named: Sequence[NamedPartition], worker: int, workers: int) -> list[_Share]:
    """Partitions of which the worker has something to do."""
    files = [(one, number) for one in named for number in range(len(one.partition.files))]
    mine = share_files([one.partition.files[number].size_bytes for one, number in files], worker, workers)
    shares: dict[str, dict[int, FileShare]] = {}
    for place, share in mine.items():
        one, number = files[place]
        shares.setdefault(one.prefix, {})[number] = share
    return [_Share(one, shares[one.prefix]) for one in named if one.prefix in shares]


def _tidy_up(workspace: Storage, whole: Sequence[NamedPartition]) -> None:
    """Take away what a try killed at the end of its commit left of the parts of whole partitions.

    Were a partition ever deleted for damage, they would prove files that are gone.
    """
    every = [_Parts(workspace, one) for one in whole]
    left = set(workspace.list_dirs(every[0].folder)) if every else set()  # the one of a dataset
    for parts in every:
        if parts.named.fingerprint in left:
            workspace.delete_prefix(parts.prefix)


@dataclass(frozen=True)
class _Parts:
    """The parts of one partition, beside the token sets."""

    workspace: Storage
    named: NamedPartition

    @cached_property
    def folder(self) -> str:
        return f"{self.named.prefix.rpartition('/')[0]}/share"

    @cached_property
    def prefix(self) -> str:
        return f"{self.folder}/{self.named.fingerprint}"

    def there(self) -> set[str]:
        return names_in(self.workspace, self.prefix)

    def note(self, number: int, read: FileRead) -> None:
        """A file was read to its end. Every worker that does so writes the same."""
        self.workspace.write_bytes(join_key(self.prefix, file_name(number)), read.model_dump_json().encode())

    def read_of(self, number: int) -> FileRead:
        """Raises KeyNotFound when nobody has read the file to its end, DataError."""
        key = join_key(self.prefix, file_name(number))
        again = f"delete {self.workspace.uri(self.prefix)} and run trnpipe prepare again"
        found = read_record(self.workspace, key, FileRead, "the count of a file", "trnpipe prepare", next_command=again)
        if found is None:
            raise KeyNotFound(self.workspace.uri(key))
        return found

    def publish(self, staging: Staging, name: str, files: Sequence[str]) -> None:
        """The shards of a chunk, then what proves them."""
        self.workspace.upload_dir(self.named.prefix, staging.files, files)
        self.workspace.upload(staging.folder / part_name(name), join_key(self.prefix, part_name(name)))
        with os_errors("deleting", f"file://{staging.folder}"):
            for path in (*(staging.files / file for file in files), staging.folder / part_name(name)):
                path.unlink()


def file_name(number: int) -> str:
    return f"file-{number:05d}.json"


def part_name(chunk: str) -> str:
    return f"{chunk}.safetensors"


def _encode(
    encoding: Encoding,
    workspace: Storage,
    source: Source,
    shares: Sequence[_Share],
    scratch: Path,
    stop: StopSignal,
) -> None:
    """Encode and publish the chunks of a share that nobody has published. Raises what prepare() raises."""
    files = [share.named.partition.files[number] for share in shares for number in share.files]
    if not files:
        return
    parts = {share.named.partition.name: _Parts(workspace, share.named) for share in shares}
    stagings = {share.named.partition.name: Staging(scratch / "parts" / share.named.fingerprint) for share in shares}
    uploads, pending = ThreadPoolExecutor(_UPLOADS, "upload"), deque[Future[None]]()
    try:
        with reading_progress("tokenising", source, files) as tell:
            results = run_tasks(
                encode_part,
                encoding.tokenizer.data,
                _tasks(encoding.config, source, shares, parts, stagings, tell, stop),
                num_workers=encoding.config.num_workers,
                stop=stop,
                doing="preparing data",
                waiting=lambda: tell(None),
            )
            with closing(results):
                for partition, name, shards in results:
                    pending.append(uploads.submit(parts[partition].publish, stagings[partition], name, shards))
                    while len(pending) > 2 * _UPLOADS or (pending and pending[0].done()):
                        pending.popleft().result()
        for future in pending:
            future.result()
    finally:
        uploads.shutdown(cancel_futures=True)


def _tasks(
    config: DataConfig,
    source: Source,
    shares: Sequence[_Share],
    parts: Mapping[str, _Parts],
    stagings: Mapping[str, Staging],
    tell: Tell,
    stop: StopSignal,
) -> Iterator[ChunkTask]:
    """The chunks of a share that are not there yet. A file of which all are there is not read."""
    index = count()
    for share in shares:
        partition = share.named.partition
        of_partition, staging = parts[partition.name], stagings[partition.name]
        there = of_partition.there()
        staging.create()
        for number, mine in share.files.items():
            if file_name(number) in there:
                try:
                    num_chunks = of_partition.read_of(number).num_chunks
                except KeyNotFound:  # another worker has committed the partition meanwhile, and tidied up
                    continue
                if all(part_name(chunk_name(number, place)) in there for place in mine.chunks(num_chunks)):
                    continue
            file, counts, chunks = partition.files[number], list[FileCount](), 0
            batches = count_rows(source.read(file), counts.append, tell)
            for place, chunk in enumerate(cut_chunks(file.key, batches, config.rows_per_chunk)):
                stop.raise_if_set("preparing data")
                name, chunks = chunk_name(number, place), place + 1
                if mine.has(place) and part_name(name) not in there:
                    yield ChunkTask(partition.name, next(index), name, chunk, share.named.settings, staging)
            of_partition.note(number, FileRead(count=counts[0], num_chunks=chunks))


def encode_part(tokenizer_json: bytes, task: ChunkTask) -> tuple[str, str, tuple[str, ...]]:
    """Encode a chunk, and write beside its shards the part that proves them. In a worker process.

    Returns the names of the partition, the chunk and its shards.
    """
    _, _, record = encode_chunk(tokenizer_json, task)
    num_labels, staging = len(task.settings.rules.labels), task.staging
    arrays: dict[str, Any] = {}
    judged: dict[Split, tuple[BucketCounts, ...]] = {}
    with os_errors("reading", f"file://{staging.files}"):
        for split, shard in record.shards.items():
            judged[split] = tuple(bucket_counts(staging.files, [shard], num_labels, StopSignal()))
            columns = queries_of(staging.files, shard, StopSignal())
            arrays |= {f"{split}.{name}": column for name, column in zip(Queries._fields, columns, strict=True)}
        files = {name: file_record(staging.files / name) for name in record.sizes_bytes}
    part = ChunkPart(chunk=record, files=files, judged=judged)
    with os_errors("writing", f"file://{staging.folder}"):
        data = save(arrays, metadata={_PART: part.model_dump_json()})
        write_bytes_atomic(staging.folder / part_name(task.name), data)
        staging.record_path(task.index).unlink()
    return task.partition, task.name, tuple(files)


# A partition whose parts are all there becomes a token set.


def _commit(
    encoding: Encoding, workspace: Storage, named: NamedPartition, scratch: Path, events: Emit
) -> TokenSetInfo | None:
    """What a partition says of itself, once all its parts are there; else None. Raises DataError for too many bad rows.

    Several workers may find so at once: they write the same.
    """
    parts, stop = _Parts(workspace, named), workspace.stop
    if info := committed_info(encoding, named, workspace, _untold):
        workspace.delete_prefix(parts.prefix)  # made here again, after another worker had taken them away
        return info
    there, numbers = parts.there(), range(len(named.partition.files))
    if not all(file_name(number) in there for number in numbers):
        return committed_info(encoding, named, workspace, _untold)  # by another worker since, who took the parts away
    try:
        reads = [parts.read_of(number) for number in numbers]
        names = [
            part_name(chunk_name(number, place))
            for number, read in enumerate(reads)
            for place in range(read.num_chunks)
        ]
        if not there.issuperset(names):
            return committed_info(encoding, named, workspace, _untold)
        folder = workspace.local_path(parts.prefix) or scratch / "account" / named.fingerprint
        if workspace.local_path(parts.prefix) is None:
            workspace.download_dir(parts.prefix, folder, names)
        found = _read_parts(folder, names, encoding.config.quarantine_rows, stop)
        judged = _judged(folder, names, found, len(encoding.labels.gains), stop)
    except DataError:
        # Another worker found the same at once, was faster, and took the parts away.
        if info := committed_info(encoding, named, workspace, _untold):
            return info
        raise
    records = [part.chunk for part in found]
    read = {file.key: one.count for file, one in zip(named.partition.files, reads, strict=True)}
    info = describe_partition(encoding, named, read, records, judged)
    bad = first_bad(encoding.config, records)
    refuse_bad_share(encoding.config, info, bad, workspace)
    lines = quarantine_lines(bad)
    workspace.write_bytes(join_key(named.prefix, QUARANTINE), lines)
    files = {QUARANTINE: FileRecord(size_bytes=len(lines), xxh3_128=hash_bytes(lines))}
    for part in found:
        files |= part.files
    commit_files(workspace, named.prefix, kind=KIND, fields=info.model_dump(mode="json"), files=files)
    workspace.delete_prefix(parts.prefix)
    tell_prepared(named, info, events)
    return info


def _read_parts(folder: Path, names: Sequence[str], room: int, stop: StopSignal) -> list[ChunkPart]:
    """With the first `room` bad rows of them all. Raises DataError for what is no part."""
    parts: list[ChunkPart] = []
    for name in names:
        stop.raise_if_set("reading the parts of a partition")
        try:
            with safe_open(folder / name, framework="np") as file:
                part = ChunkPart.model_validate_json(file.metadata()[_PART])
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
    judged: dict[Split, JudgedSplit] = {}
    with os_errors("reading", f"file://{folder}"):
        maps = [map_safetensors(folder / name) for name in names]
        for split, shards in shards_by_split([part.chunk for part in parts]).items():
            judged[split] = add_up(
                (counts for part in parts for counts in part.judged.get(split, ())),
                _queries_of(maps, split, stop),
                trained=_queries_of(maps if split != "train" else (), "train", stop),
                num_queries=sum(len(arrays[f"{split}.ids"]) for arrays in maps if f"{split}.ids" in arrays),
                num_buckets=len(shards[0].rows),
                num_labels=num_labels,
            )
    return judged


def _queries_of(maps: Sequence[Mapping[str, Any]], split: Split, stop: StopSignal) -> Pieces:
    """Of the parts that have rows of it."""

    def pieces(first: int, last: int) -> Iterator[Queries]:
        for arrays in maps:
            if f"{split}.ids" not in arrays:
                continue
            stop.raise_if_set("counting judgements")
            ids, low, high = (arrays[f"{split}.{name}"] for name in Queries._fields)
            start, end = ids.searchsorted(first), ids.searchsorted(last, side="right")
            yield Queries(ids[start:end], low[start:end], high[start:end])

    return pieces
