"""What other tools take vectors in: one class for each, which writes a piece and reads it back.

The libraries are optional and imported when a form is made; a missing one is told in one line.
"""

import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib import format as npy
from pydantic import JsonValue

from pipeline.core.arrays import Float32s
from pipeline.core.errors import ConfigError, DataError, first_line
from pipeline.core.optional import missing_package
from pipeline.embed.vectors import VectorSet
from pipeline.io.atomic import fsync_path, temp_file

IDS = "ids.arrow"
MATRIX = "vectors.npy"
MAX_FILE_BYTES = 9_000_000
"""Of a bulk request: Amazon OpenSearch takes 10 MiB on its smaller instances."""
MAX_COPY_BYTES = 2**30
TOLERANCE = 2e-3
"""Between a stored number and what an index gives back: fp16 has 11 bits."""


@dataclass(frozen=True)
class Piece:
    """Rows that are written together: `rows` of a part from row `start`; `first` counts over all parts."""

    number: int
    part: int
    start: int
    rows: int
    first: int


@dataclass(frozen=True)
class Rows:
    """N rows: ids [N] and vectors [N, D]; `first` is the number of the first over all parts."""

    first: int
    ids: pa.Array
    vectors: Float32s


class Form(Protocol):
    """`write` leaves a piece written, the same again when it is called again; `check` raises DataError."""

    name: str
    needs_ids: bool
    """It numbers the rows: their ids lie beside it."""
    options: Mapping[str, JsonValue]

    def write(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None: ...
    def check(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None: ...


def open_form(name: str, vectors: VectorSet, index: str = "") -> Form:
    """The form of that name for these vectors; `index` is its table, or the factory string of faiss.

    Raises ConfigError for an unknown name, and for a library that is not installed.
    """
    if name not in FORMS:
        raise ConfigError(
            f"--format {name or 'is not given'}",
            expected=f"one of {', '.join(FORMS)}",
            next_command="trnpipe export vectors -h",
        )
    if index and name not in ("faiss", "opensearch-bulk"):
        raise ConfigError(
            f"--index does not apply to {name}",
            expected="it with faiss or opensearch-bulk",
            next_command="leave it out",
        )
    return FORMS[name](vectors, index)


def _library(name: str, form: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_package(name.partition(".")[0], f"--to {form}", error, otherwise="another --to") from error


def _differs(path: Path, what: str) -> DataError:
    return DataError(
        f"{path}: {what}",
        expected="what was written there",
        next_command="delete that folder and run the command again",
    )


class NpyForm:
    """One matrix of all rows, which NumPy maps; the ids beside it."""

    name, needs_ids = "npy", True

    def __init__(self, vectors: VectorSet, index: str) -> None:
        is_half = vectors.layout.dtype == "fp16"
        self.options: Mapping[str, JsonValue] = {"dtype": "fp16" if is_half else "fp32"}
        self._dtype, self._shape = np.dtype("<f2" if is_half else "<f4"), (vectors.info.rows, vectors.layout.dim)

    def write(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        path = folder / MATRIX
        with path.open("r+b" if path.exists() else "w+b") as file:
            npy.write_array_header_1_0(
                file, {"descr": npy.dtype_to_descr(self._dtype), "fortran_order": False, "shape": self._shape}
            )
            file.seek(piece.first * self._shape[1] * self._dtype.itemsize, os.SEEK_CUR)
            for some in rows:
                file.write(np.ascontiguousarray(some.vectors, dtype=self._dtype).tobytes())
            file.flush()
            os.fsync(file.fileno())

    def check(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        matrix = np.load(folder / MATRIX, mmap_mode="r", allow_pickle=False)
        for some in rows:
            found = matrix[some.first : some.first + len(some.ids)]
            if matrix.shape != self._shape or not np.array_equal(found, some.vectors.astype(self._dtype)):
                raise _differs(folder / MATRIX, f"row {some.first:,} and those after it are not the vectors")


class FaissForm:
    """An index for each piece; faiss.IndexShards searches them as one, by row numbers."""

    name, needs_ids = "faiss", True

    def __init__(self, vectors: VectorSet, index: str) -> None:
        self.options: Mapping[str, JsonValue] = {"index": index or "Flat"}
        self._faiss, self._dim = _library("faiss", self.name), vectors.layout.dim
        if not self._new().is_trained:
            raise ConfigError(
                f"--index {self.options['index']} has to be trained on all vectors",
                expected="one that takes vectors as they come, such as Flat or HNSW32",
                next_command="--format npy, and train it on the mapped matrix",
            )

    def _new(self) -> Any:
        try:
            return self._faiss.index_factory(self._dim, self.options["index"], self._faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise ConfigError(
                f"--index {self.options['index']}: {first_line(error)}",
                expected="a factory string of faiss, such as Flat or HNSW32",
                next_command="give another --index",
            ) from error

    def write(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        index = self._new()
        for some in rows:
            index.add(some.vectors)
        _save(folder / _named(piece, "faiss"), lambda temp: self._faiss.write_index(index, str(temp)))

    def check(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        path = folder / _named(piece, "faiss")
        index = self._faiss.read_index(str(path))
        if index.ntotal != piece.rows:
            raise _differs(path, f"{index.ntotal:,} vectors of {piece.rows:,}")
        for some in rows:
            at = some.first - piece.first
            if not np.allclose(index.reconstruct_n(at, len(some.ids)), some.vectors, atol=TOLERANCE):
                raise _differs(path, f"the vectors from row {some.first:,} are others")


class UsearchForm:
    """An HNSW index for each piece, its keys the row numbers; usearch.index.Indexes searches them as one."""

    name, needs_ids = "usearch", True

    def __init__(self, vectors: VectorSet, index: str) -> None:
        self.options: Mapping[str, JsonValue] = {"dtype": "f16" if vectors.layout.dtype == "fp16" else "f32"}
        self._index, self._dim = _library("usearch.index", self.name).Index, vectors.layout.dim

    def write(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        index = self._index(ndim=self._dim, metric="ip", dtype=self.options["dtype"])
        for some in rows:
            index.add(np.arange(some.first, some.first + len(some.ids), dtype=np.uint64), some.vectors)
        _save(folder / _named(piece, "usearch"), lambda temp: index.save(str(temp)))

    def check(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        path = folder / _named(piece, "usearch")
        index = self._index.restore(str(path), view=True)
        if index is None or len(index) != piece.rows:
            raise _differs(path, f"{0 if index is None else len(index):,} vectors of {piece.rows:,}")
        for some in rows:
            keys = np.arange(some.first, some.first + len(some.ids), dtype=np.uint64)
            if not np.all(index.contains(keys)):
                raise _differs(path, f"keys from {some.first:,} on are missing")
            if not np.allclose(np.asarray(index.get(keys), dtype=np.float32), some.vectors, atol=TOLERANCE):
                raise _differs(path, f"the vectors from key {some.first:,} are others")


class LanceForm:
    """One Lance dataset of id and vector; each piece is one commit of it."""

    name, needs_ids = "lance", False
    options: Mapping[str, JsonValue] = {}

    def __init__(self, vectors: VectorSet, index: str) -> None:
        self._lance = _library("lance", self.name)
        field = vectors.layout.columns(with_vectors=False).field("id")
        self._schema = pa.schema([field, pa.field("vector", pa.list_(pa.float32(), vectors.layout.dim))])

    def write(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        there, place = 0, folder / "vectors.lance"
        if (place / "_versions").is_dir():
            there = self._lance.dataset(str(place)).count_rows()
        if there == piece.first + piece.rows:  # killed after its commit
            return
        if there != piece.first:
            raise _differs(place, f"{there:,} rows, {piece.first:,} were committed")
        table = pa.Table.from_batches([self._batch(some) for some in rows], self._schema)
        self._lance.write_dataset(table, str(place), mode="append" if there else "create")
        for path in place.rglob("*"):
            fsync_path(path)

    def _batch(self, some: Rows) -> pa.RecordBatch:
        flat = pa.array(np.ascontiguousarray(some.vectors, dtype=np.float32).reshape(-1))
        vectors = pa.FixedSizeListArray.from_arrays(flat, type=self._schema.field("vector").type)
        return pa.record_batch([some.ids, vectors], schema=self._schema)

    def check(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        place = folder / "vectors.lance"
        dataset = self._lance.dataset(str(place))
        for some in rows:
            table = dataset.scanner(offset=some.first, limit=len(some.ids), scan_in_order=True).to_table()
            if not table.combine_chunks().to_batches()[0].equals(self._batch(some)):
                raise _differs(place, f"row {some.first:,} and those after it are others")
        if piece.number == 0 and dataset.count_rows() < piece.rows:
            raise _differs(place, f"{dataset.count_rows():,} rows")


class TextForm:
    """Lines of text for a database that reads files; several files a piece where they have a limit."""

    needs_ids = False

    def __init__(
        self,
        name: str,
        options: Mapping[str, JsonValue],
        lines: Callable[[Rows], Iterator[bytes]],
        max_bytes: int,
    ) -> None:
        self.name, self.options, self._lines, self._max = name, options, lines, max_bytes

    def write(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        """Each line goes into the file it fits into; each file appears whole."""
        lines, number = chain.from_iterable(map(self._lines, rows)), 0
        held = next(lines, b"")
        while held:
            with temp_file(folder / self._file(piece, number)) as (file, temp):
                size = 0
                while held and (size == 0 or size + len(held) <= self._max):
                    size += file.write(held)
                    held = next(lines, b"")
                file.flush()
                os.fsync(file.fileno())
                temp.replace(folder / self._file(piece, number))
            number += 1

    def check(self, folder: Path, piece: Piece, rows: Iterable[Rows]) -> None:
        """Line by line what would be written now, and nothing beyond it."""
        found = self._written(folder, piece)
        for some in rows:
            for number, line in enumerate(self._lines(some), some.first):
                if b"".join(islice(found, line.count(b"\n"))) != line:
                    raise _differs(folder / self._file(piece, 0), f"row {number:,} is another, or not there")
        if next(found, b""):
            raise _differs(folder / self._file(piece, 0), "there are lines beyond what was written")

    def _written(self, folder: Path, piece: Piece) -> Iterator[bytes]:
        number = 0
        while (path := folder / self._file(piece, number)).exists():
            with path.open("rb") as file:
                yield from file
            number += 1

    def _file(self, piece: Piece, number: int) -> str:
        return f"piece-{piece.number:05d}-{number:04d}.{'ndjson' if self.name == 'opensearch-bulk' else 'copy'}"


def _opensearch(vectors: VectorSet, index: str) -> TextForm:
    """Bulk requests: each id is the document's, so sending one twice changes nothing."""
    name = index or "products"

    def lines(some: Rows) -> Iterator[bytes]:
        for one, numbers in zip(some.ids.to_pylist(), _numbers(some), strict=True):
            action = json.dumps({"index": {"_index": name, "_id": str(one)}}, ensure_ascii=False)
            yield f'{action}\n{{"id": {json.dumps(one, ensure_ascii=False)}, "vector": [{numbers}]}}\n'.encode()

    return TextForm("opensearch-bulk", {"index": name}, lines, MAX_FILE_BYTES)


_ESCAPED = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})


def _pgvector(vectors: VectorSet, index: str) -> TextForm:
    """PostgreSQL's text format of COPY: id, tab, vector."""

    def lines(some: Rows) -> Iterator[bytes]:
        for one, numbers in zip(some.ids.to_pylist(), _numbers(some), strict=True):
            if "\0" in str(one):
                raise DataError(f"id {one!r} has a zero byte", expected="text that PostgreSQL can hold")
            yield f"{str(one).translate(_ESCAPED)}\t[{numbers}]\n".encode()

    return TextForm("pgvector-copy", {}, lines, MAX_COPY_BYTES)


def _numbers(some: Rows) -> list[str]:
    """The numbers of each vector, comma between them; as few digits as give the same fp32 again."""
    if not np.isfinite(some.vectors).all():
        raise DataError("a vector is not finite", expected="vectors that passed trnpipe embed verify")
    flat = pa.array(np.ascontiguousarray(some.vectors, dtype=np.float32).reshape(-1)).cast(pa.string())
    offsets = pa.array(np.arange(0, some.vectors.size + 1, some.vectors.shape[1], dtype=np.int32))
    joined: list[str] = pc.binary_join(pa.ListArray.from_arrays(offsets, flat), ",").to_pylist()
    return joined


def _named(piece: Piece, suffix: str) -> str:
    return f"piece-{piece.number:05d}.{suffix}"


def _save(path: Path, save: Callable[[Path], object]) -> None:
    """A file that a library writes itself, under its name when it is whole."""
    with temp_file(path) as (_, temp):
        save(temp)
        fsync_path(temp)
        temp.replace(path)
    fsync_path(path.parent)


FORMS: Mapping[str, Callable[[VectorSet, str], Form]] = {
    "faiss": FaissForm,
    "usearch": UsearchForm,
    "lance": LanceForm,
    "npy": NpyForm,
    "opensearch-bulk": _opensearch,
    "pgvector-copy": _pgvector,
}
