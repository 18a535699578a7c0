"""One pass over a few columns, before the work: a sample of texts for the tokenizer, and which classes there are.

Each of several workers looks at the files of its share, and adds up those of all. No worker waits for another, which
may be dead: behind its own files it looks at those that are missing. What comes out is the same to the bit for any
number of workers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from pipeline.core.arrays import Int64s
from pipeline.core.errors import DataError, TransientError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.labels import LabelCount, Labels, add_counts, count_labels
from pipeline.data.rows import FILTER, RawBatch, text_characters
from pipeline.data.sources import InputFile, Source, reading
from pipeline.data.validate import filter_mask
from pipeline.io.storage import KeyNotFound, Storage, join_key, names_in, read_record

SAMPLE_BYTES = 128 * 2**20
"""Text held for the tokenizer at most; in Python objects and with the copy for the trainer about five times that."""
_TEXT_FIELDS = ("query", "title", "text")
_LEVELS = 64
_DENSER = 2
"""Of the texts that may be held, a file keeps this many times its share of the input's bytes. Where a file is denser
still, and would have been thinned too much, it is read again."""
_VERSION = 2
"""Of what a survey says: one of another version is not read. From 2 on without gains outside of 0 to 1."""
_META = b"survey"


def _fits(rows: int, size_bytes: int, limit: int, share: float = 1.0) -> bool:
    """Whether a sample of so many rows may be held."""
    return rows <= max(1, limit) and (size_bytes <= share * SAMPLE_BYTES or rows <= 1)


@dataclass
class TextSample:
    """Every `stride`-th row; the stride doubles whenever the sample outgrows its limits: an even spread in one pass.

    At most `limit` rows and this `share` of SAMPLE_BYTES are held. Where several files are sampled, the n-th begins at
    row n: which rows are taken of a file does not depend on those before it, and of small files not all are.
    `level_rows` and `level_bytes` say what every stride would have taken: rows, and bytes of their texts, by how often
    two divides their number.
    """

    limit: int
    share: float = 1.0
    stride: int = 1
    seen: int = 0
    held_bytes: int = 0
    held: list[tuple[int, tuple[bytes, ...]]] = field(default_factory=list)
    level_rows: Int64s = field(default_factory=lambda: np.zeros(_LEVELS, dtype=np.int64))
    level_bytes: Int64s = field(default_factory=lambda: np.zeros(_LEVELS, dtype=np.int64))

    def add(self, batch: pa.RecordBatch, max_bytes: int) -> None:
        """Texts are cut to `max_bytes`."""
        texts = batch.select([name for name in _TEXT_FIELDS if name in batch.schema.names])
        numbers = self.seen + np.arange(batch.num_rows, dtype=np.int64)
        self.seen += batch.num_rows
        levels, is_some = np.full(batch.num_rows, _LEVELS - 1), numbers > 0
        levels[is_some] = np.log2(numbers[is_some] & -numbers[is_some]).astype(np.int64)
        sizes = np.zeros(batch.num_rows, dtype=np.int64)
        for column in texts.columns:
            sizes += np.minimum(pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False), max_bytes)
        np.add.at(self.level_rows, levels, 1)
        np.add.at(self.level_bytes, levels, sizes)
        chosen = np.flatnonzero(numbers % self.stride == 0)
        columns = [pc.binary_slice(column, 0, max_bytes).to_pylist() for column in texts.take(pa.array(chosen)).columns]
        rows = (tuple(value or b"" for value in row) for row in zip(*columns, strict=True))
        self.held += zip(numbers[chosen].tolist(), rows, strict=True)
        self.held_bytes += int(sizes[chosen].sum())
        while not _fits(len(self.held), self.held_bytes, self.limit, self.share):
            self.stride *= 2
            self.held = [item for item in self.held if item[0] % self.stride == 0]
            self.held_bytes = sum(len(value) for _, row in self.held for value in row)

    def texts(self) -> Iterator[str]:
        """All texts of the sampled rows; bytes that are not UTF-8 are left out."""
        for _, row in self.held:
            for value in row:
                if value:
                    yield value.decode("utf-8", "ignore")


# The share of one worker: of each file, all chunks or every n-th.


@dataclass(frozen=True)
class FileShare:
    """The chunks of a file that one of `of` workers does: every `of`-th, from number `place` on."""

    place: int
    of: int

    def has(self, chunk: int) -> bool:
        return chunk % self.of == self.place

    def chunks(self, num_chunks: int) -> range:
        return range(self.place, num_chunks, self.of)


def share_files(sizes_bytes: Sequence[int], worker: int, workers: int) -> dict[int, FileShare]:
    """The share of a worker: a run of files, by number, as long in bytes as that of any other.

    A file that several runs touch is read by each of their workers, who take turns in its chunks.
    """
    weights = [max(1, size) for size in sizes_bytes]
    total, start, mine = sum(weights), 0, dict[int, FileShare]()
    for number, weight in enumerate(weights):
        first, last = start * workers // total, ((start + weight) * workers - 1) // total
        if first <= worker <= last:
            mine[number] = FileShare(worker - first, last - first + 1)
        start += weight
    return mine


# What is stored of each file, and the sum of all.


class _Levels(Record):
    """See TextSample."""

    rows: tuple[int, ...]
    sizes_bytes: tuple[int, ...]


class _FileSurvey(Labels):
    """What one file holds. The sampled texts lie beside, as a table."""

    stride: int
    levels: _Levels


@dataclass(frozen=True)
class Survey:
    """Of an input, by one of some workers."""

    source: Source
    config: DataConfig
    workspace: Storage
    worker: int
    workers: int
    stop: StopSignal

    def look(self, want_labels: bool, want_sample: bool) -> tuple[Labels, TextSample]:
        """What is wanted and nothing else: the labels of all files, and texts of them.

        Raises DataError (missing columns, far too many labels), Preempted, TransientError too when another worker
        finishes all and tidies up meanwhile.
        """
        key, sample = join_key(self._prefix, "labels.json"), TextSample(self.config.tokenizer.train_rows)
        again = f"delete {self.workspace.uri(self._prefix)} and run trnpipe prepare again"
        what = "the labels of an input"
        if not want_sample and (
            known := read_record(self.workspace, key, Labels, what, "trnpipe prepare", next_command=again)
        ):
            return known, sample
        folder = join_key(self._prefix, "texts" if want_sample else "labels")
        self._look_at_files(folder, want_labels, want_sample)
        surveys = [self._read(folder, number)[0] for number in range(len(self._files))]
        counts: dict[str, LabelCount] = {}
        for one in surveys:
            add_counts(counts, one.labels, self.config.columns.label)
        labels = Labels(
            there=any(one.there for one in surveys),
            labels=counts,
            without_gain=next((one.without_gain for one in surveys if one.without_gain), ""),
        )
        if want_labels:
            self.workspace.write_bytes(key, labels.model_dump_json().encode())
        if want_sample:
            rows = np.sum([one.levels.rows for one in surveys], axis=0)
            sizes = np.sum([one.levels.sizes_bytes for one in surveys], axis=0)
            level = 0
            while not _fits(rows[level:].sum(), sizes[level:].sum(), sample.limit):
                level += 1
            sample.stride = 2**level  # the smallest whose sample may be held
            for number, one in enumerate(surveys):
                sample.held += self._texts(folder, number, one, sample.stride)
        return labels, sample

    def delete(self) -> None:
        """What was kept of each file; the labels of all stay, for a worker that comes late."""
        for name in ("texts", "labels"):
            self.workspace.delete_prefix(join_key(self._prefix, name))

    @cached_property
    def _files(self) -> list[InputFile]:
        return [file for partition in self.source.partitions for file in partition.files]

    @cached_property
    def _prefix(self) -> str:
        """Of this very input, read in this very way."""
        config = self.config
        name = fingerprint(
            {
                "version": _VERSION,
                "content": [partition.content_id for partition in self.source.partitions],
                "columns": config.columns.model_dump(),
                "labels": list(config.labels),
                "filter": dict(config.filter),
                "esci_locale": config.esci_locale,
                "rows_per_chunk": config.rows_per_chunk,
                "characters": text_characters(config.bucket_shapes),
                "train_rows": config.tokenizer.train_rows,
            }
        )
        return f"tokens/{config.name}/share/survey-{name}"

    def _look_at_files(self, folder: str, want_labels: bool, want_sample: bool) -> None:
        """At this worker's, then at those that are still missing."""
        files, sizes = self._files, [max(1, file.size_bytes) for file in self._files]
        shares = share_files(sizes, self.worker, self.workers)
        own = [number for number, share in shares.items() if share.place == 0]
        behind = max(own, default=0)
        others = [*range(behind + 1, len(files)), *range(behind + 1)]
        there = names_in(self.workspace, folder)
        missing = [file for number, file in enumerate(files) if _name(number) not in there]
        with reading("looking at labels and texts", self.source, missing) as tell:
            for number in [*own, *(number for number in others if number not in own)]:
                if _name(number) in there:
                    continue
                if number not in own and _name(number) in (there := names_in(self.workspace, folder)):
                    continue
                share = _DENSER * sizes[number] / sum(sizes)
                sample = TextSample(int(share * self.config.tokenizer.train_rows), share, seen=number)
                labels = self._look_at(files[number], sample if want_sample else None, want_labels, tell)
                self.workspace.write_bytes(join_key(folder, _name(number)), _to_bytes(labels, sample))

    def _look_at(
        self, file: InputFile, sample: TextSample | None, want_labels: bool, tell: Callable[[RawBatch], None]
    ) -> Labels:
        """Read what is wanted of one file; texts go into `sample`. Raises DataError."""
        config = self.config
        fields = (["label", "gain"] if want_labels else []) + (list(_TEXT_FIELDS) if sample is not None else [])
        max_bytes = 4 * text_characters(config.bucket_shapes)
        there, counts, without_gain = False, dict[str, LabelCount](), ""
        for raw in self.source.read(file, [*fields, *(FILTER + column for column in config.filter)]):
            self.stop.raise_if_set(f"reading {file.key}")
            tell(raw)
            batch = raw.columns
            if config.filter:
                batch = batch.filter(pa.array(filter_mask(batch, config.filter)))
            if want_labels and "label" in batch.schema.names:
                there = True
                count_labels(counts, batch, config.columns.label)
                if batch.num_rows and "gain" not in batch.schema.names:
                    without_gain = file.key
            if sample is not None:
                sample.add(batch, max_bytes)
        return Labels(there=there, labels=counts, without_gain=without_gain)

    def _texts(
        self, folder: str, number: int, one: _FileSurvey, stride: int
    ) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Of every `stride`-th row of a file."""
        if one.stride > stride:
            sample = TextSample(sum(one.levels.rows), float("inf"), stride, seen=number)
            self._look_at(self._files[number], sample, False, lambda batch: None)  # not worth a bar of progress
            yield from sample.held
            return
        _, table = self._read(folder, number)
        numbers, *columns = (column.to_pylist() for column in table.columns)
        for place, row in zip(numbers, zip(*columns, strict=True), strict=True):
            if place % stride == 0:
                yield place, row

    def _read(self, folder: str, number: int) -> tuple[_FileSurvey, pa.Table]:
        """What is stored of one file, and its texts. Raises DataError, TransientError when it is gone."""
        key = join_key(folder, _name(number))
        try:
            table = pa.ipc.open_file(pa.py_buffer(self.workspace.read_bytes(key))).read_all()
            return _FileSurvey.model_validate_json(table.schema.metadata[_META]), table
        except KeyNotFound as error:
            raise TransientError(
                f"{error.seen}, which another worker deleted as it finished",
                expected="what was seen of each file, until all is prepared",
                next_command="the same command again: it finds what is done",
            ) from error
        except (pa.ArrowException, KeyError, TypeError, ValidationError) as error:
            raise DataError(
                f"{self.workspace.uri(key)} is not the survey of a file: {error}",
                expected="what trnpipe prepare left of it",
                next_command=f"delete {self.workspace.uri(self._prefix)} and run trnpipe prepare again",
            ) from error


def _name(number: int) -> str:
    return f"{number:05d}.arrow"


def _to_bytes(labels: Labels, sample: TextSample) -> bytes:
    levels = _Levels(rows=tuple(sample.level_rows.tolist()), sizes_bytes=tuple(sample.level_bytes.tolist()))
    record = _FileSurvey(**dict(labels), stride=sample.stride, levels=levels)
    texts = [pa.array(column, pa.large_binary()) for column in zip(*(row for _, row in sample.held), strict=True)]
    arrays = [pa.array([number for number, _ in sample.held], pa.int64()), *texts]
    schema = pa.schema(
        [pa.field(str(place), array.type) for place, array in enumerate(arrays)],
        metadata={_META: record.model_dump_json()},
    )
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
    return bytes(sink.getvalue().to_pybytes())
