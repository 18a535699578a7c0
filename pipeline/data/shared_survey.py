"""The survey of an input by several workers: each looks at the files of its share, and every worker adds up all.

No worker waits for another, which may be dead: behind its own files it looks at those that are missing. What comes out
is to the bit what one worker finds that reads everything (data/survey.py).
"""

from collections.abc import Iterator, Sequence
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
from pipeline.data.input_files import InputFile
from pipeline.data.rows import RawBatch, text_characters
from pipeline.data.sources import Source, reading_progress
from pipeline.data.survey import FileLabels, LabelCount, Survey, TextSample, fits, survey_file
from pipeline.io.storage import KeyNotFound, Storage, join_key, names_in, read_record

_VERSION = 2
"""Of what a survey says: one of another version is not read. From 2 on without gains outside of 0 to 1."""
_LEVELS = 64
_DENSER = 2
"""Of the texts that may be held, a file keeps this many times its share of the input's bytes. Where a file is denser
still, and would have been thinned too much, it is read again."""


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


class Levels(Record):
    """Rows, and bytes of their texts, by how often two divides their number: what each stride would take."""

    rows: tuple[int, ...] = (0,) * _LEVELS
    sizes_bytes: tuple[int, ...] = (0,) * _LEVELS

    def plus(self, other: "Levels") -> "Levels":
        rows, sizes = zip(self.rows, other.rows, strict=True), zip(self.sizes_bytes, other.sizes_bytes, strict=True)
        return Levels(rows=tuple(map(sum, rows)), sizes_bytes=tuple(map(sum, sizes)))

    def stride(self, limit: int) -> int:
        """The smallest whose sample may be held."""
        level = 0
        while not fits(sum(self.rows[level:]), sum(self.sizes_bytes[level:]), limit):
            level += 1
        return int(2**level)


@dataclass
class _LevelledSample(TextSample):
    """A sample that counts what every stride would have taken."""

    rows: Int64s = field(default_factory=lambda: np.zeros(_LEVELS, dtype=np.int64))
    sizes_bytes: Int64s = field(default_factory=lambda: np.zeros(_LEVELS, dtype=np.int64))

    def add(self, batch: pa.RecordBatch, max_bytes: int) -> None:
        numbers = self.seen + np.arange(batch.num_rows, dtype=np.int64)
        levels = np.full(batch.num_rows, _LEVELS - 1)
        is_some = numbers > 0
        levels[is_some] = np.log2(numbers[is_some] & -numbers[is_some]).astype(np.int64)
        sizes = np.zeros(batch.num_rows, dtype=np.int64)
        for name in self.columns(batch):
            lengths = pc.fill_null(pc.binary_length(batch[name]), 0).to_numpy(zero_copy_only=False)
            sizes += np.minimum(lengths, max_bytes)
        np.add.at(self.rows, levels, 1)
        np.add.at(self.sizes_bytes, levels, sizes)
        super().add(batch, max_bytes)


class _FileSurvey(Record):
    """What one file holds. The sampled texts lie beside, as a table."""

    there: bool
    labels: dict[str, tuple[int, int, float]]
    without_gain: str
    stride: int
    levels: Levels


class _Labels(Record):
    """Those of all files: what stays of a survey."""

    there: bool
    labels: dict[str, tuple[int, int, float]]
    without_gain: str


@dataclass(frozen=True)
class SharedSurvey:
    """Called like data/survey.survey, by each of some workers."""

    source: Source
    config: DataConfig
    workspace: Storage
    worker: int
    workers: int
    stop: StopSignal

    def __call__(self, want_labels: bool, want_sample: bool) -> Survey:
        """Raises DataError, Preempted, TransientError too when another worker finishes all and tidies up meanwhile."""
        try:
            return self._survey(want_labels, want_sample)
        except KeyNotFound as error:
            raise TransientError(
                f"{error.seen}, which another worker deleted as it finished",
                expected="what was seen of each file, until all is prepared",
                next_command="the same command again: it finds what is done",
            ) from error

    def _survey(self, want_labels: bool, want_sample: bool) -> Survey:
        if not want_sample and (known := self._known()):
            sample = TextSample(self.config.tokenizer.train_rows)
            return Survey(_counts(known.labels), sample, known.there, known.without_gain)
        folder = join_key(self._prefix, "texts" if want_sample else "labels")
        self._look(folder, want_labels, want_sample)
        labels, levels = FileLabels(), Levels()
        surveys = [self._read(folder, number)[0] for number in range(len(self._files))]
        for one in surveys:
            labels.add(FileLabels(_counts(one.labels), one.there, one.without_gain), self.config.columns.label)
            levels = levels.plus(one.levels)
        if want_labels:
            found = _Labels(there=labels.there, labels=_stored(labels), without_gain=labels.without_gain)
            self.workspace.write_bytes(self._labels_key, found.model_dump_json().encode())
        sample = TextSample(self.config.tokenizer.train_rows)
        if want_sample:
            sample.stride = levels.stride(sample.limit)
            for number, one in enumerate(surveys):
                sample.held += self._texts(folder, number, one, sample.stride)
        return Survey(labels.counts, sample, labels.there, labels.without_gain)

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

    @property
    def _labels_key(self) -> str:
        return join_key(self._prefix, "labels.json")

    def _known(self) -> _Labels | None:
        again = f"delete {self.workspace.uri(self._prefix)} and run trnpipe prepare again"
        return read_record(
            self.workspace, self._labels_key, _Labels, "the labels of an input", "trnpipe prepare", next_command=again
        )

    def _look(self, folder: str, want_labels: bool, want_sample: bool) -> None:
        """At this worker's files, then at those that are still missing."""
        files, sizes = self._files, [max(1, file.size_bytes) for file in self._files]
        shares = share_files(sizes, self.worker, self.workers)
        own = [number for number, share in shares.items() if share.place == 0]
        behind = max(own, default=0)
        others = [*range(behind + 1, len(files)), *range(behind + 1)]
        there = names_in(self.workspace, folder)
        missing = [file for number, file in enumerate(files) if _name(number) not in there]
        with reading_progress("looking at labels and texts", self.source, missing) as tell:
            for number in [*own, *(number for number in others if number not in own)]:
                if _name(number) in there:
                    continue
                if number not in own and _name(number) in (there := names_in(self.workspace, folder)):
                    continue
                share = _DENSER * sizes[number] / sum(sizes)
                limit = int(share * self.config.tokenizer.train_rows)
                sample = _LevelledSample(limit, share, seen=number)
                texts = sample if want_sample else None
                found = survey_file(self.source, self.config, files[number], texts, want_labels, tell, self.stop)
                self.workspace.write_bytes(join_key(folder, _name(number)), _to_bytes(found, sample))

    def _texts(
        self, folder: str, number: int, one: _FileSurvey, stride: int
    ) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Of every `stride`-th row of a file."""
        if one.stride > stride:
            sample = TextSample(sum(one.levels.rows), float("inf"), stride, seen=number)
            survey_file(self.source, self.config, self._files[number], sample, False, _quiet, self.stop)
            yield from sample.held
            return
        _, table = self._read(folder, number)
        numbers, *columns = (column.to_pylist() for column in table.columns)
        for place, row in zip(numbers, zip(*columns, strict=True), strict=True):
            if place % stride == 0:
                yield place, row

    def _read(self, folder: str, number: int) -> tuple[_FileSurvey, pa.Table]:
        """What is stored of one file, and its texts. Raises DataError."""
        key = join_key(folder, _name(number))
        try:
            table = pa.ipc.open_file(pa.py_buffer(self.workspace.read_bytes(key))).read_all()
            return _FileSurvey.model_validate_json(table.schema.metadata[_META]), table
        except (pa.ArrowException, KeyError, TypeError, ValidationError) as error:
            raise DataError(
                f"{self.workspace.uri(key)} is not the survey of a file: {error}",
                expected="what trnpipe prepare left of it",
                next_command=f"delete {self.workspace.uri(self._prefix)} and run trnpipe prepare again",
            ) from error


_META = b"survey"


def _name(number: int) -> str:
    return f"{number:05d}.arrow"


def _quiet(batch: RawBatch) -> None:
    """Not worth a bar of progress."""


def _to_bytes(found: FileLabels, sample: _LevelledSample) -> bytes:
    levels = Levels(rows=tuple(sample.rows.tolist()), sizes_bytes=tuple(sample.sizes_bytes.tolist()))
    record = _FileSurvey(
        there=found.there,
        labels=_stored(found),
        without_gain=found.without_gain,
        stride=sample.stride,
        levels=levels,
    )
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


def _stored(labels: FileLabels) -> dict[str, tuple[int, int, float]]:
    return {name: (count.rows, count.gains, count.gain_sum) for name, count in labels.counts.items()}


def _counts(labels: dict[str, tuple[int, int, float]]) -> dict[str, LabelCount]:
    return {name: LabelCount(*counts) for name, counts in labels.items()}
