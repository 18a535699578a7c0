"""The catalogue that the settings name; what cannot be read by row groups is brought into the workspace once.

That is CSV and JSON lines, and, when no catalogue is named, the distinct products of the data input: of rows with the
same product id the first one counts. Memory: a file's rows, and a byte for each row of the data input.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from pipeline import __version__
from pipeline.context import StageContext
from pipeline.core.arrays import Bools
from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint, hash63
from pipeline.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.config import DataConfig
from pipeline.data.rows import RawBatch, quarantined
from pipeline.data.sources import Files, open_files, open_source, reading
from pipeline.data.tokens import QuarantinedRow
from pipeline.data.validate import filter_mask
from pipeline.embed.carry_over import HashSpill
from pipeline.embed.catalogue import Catalogue, CatalogueColumns, look_at
from pipeline.embed.config import CatalogueConfig
from pipeline.io.commit import hash_bytes, read_manifest
from pipeline.io.storage import Storage, join_key

KIND = "catalogue"
FORMAT_VERSION = 1
FILE_ROWS = 50_000
FILE_BYTES = 4 * 2**20
"""About the size of a file: small enough for local storage to name it by its content."""
_BATCH_ROWS = 4096
_ASSUMED_ROWS = 4_000_000
_SAMPLE_ROWS = 100
_SPILL = np.dtype([("hash", "<u8"), ("other", "<u8"), ("place", "<i8")])
_SCHEMA = pa.schema([("id", pa.large_binary()), ("title", pa.large_binary()), ("text", pa.large_binary())])
COLUMNS = CatalogueColumns(id="id", title="title", text="text")
"""What the columns of a gathered catalogue are called."""

Batches = Callable[[], Iterator[RawBatch]]


class GatheredInfo(Record):
    """The fields of the manifest. Rows that no reader could make out are in no file."""

    rows: int
    unreadable: dict[str, int]
    sample: tuple[QuarantinedRow, ...]


@dataclass(frozen=True)
class Gathered:
    """A committed folder of Parquet files with COLUMNS."""

    prefix: str
    info: GatheredInfo


def gather_products(config: DataConfig, workspace: Storage, *, scratch: Path, stop: StopSignal) -> Gathered:
    """The distinct products of the data input. Raises DataError when it cannot be used."""
    source = open_source(config, scratch=scratch, stop=stop)
    name = fingerprint(
        {
            "format": FORMAT_VERSION,
            "content": [partition.content_id for partition in source.partitions],
            "columns": config.columns.model_dump(include={"product_id", "title", "text"}),
            "filter": dict(config.filter),
            "esci_locale": config.esci_locale,
        }
    )
    files = [file for partition in source.partitions for file in partition.files]

    def products() -> Iterator[RawBatch]:
        with reading("reading products", source, files) as tell:
            for file in files:
                for batch in source.read(file, ["product_id", "title", "text"]):
                    stop.raise_if_set(f"reading {file.key}")
                    tell(batch)
                    yield _as_catalogue(batch, "product_id", config.filter)

    def distinct() -> Iterator[RawBatch]:
        is_first = _first_rows(products(), scratch / "embed" / f"products-{name[:16]}", source.num_rows(), stop)
        start = 0
        for batch in products():
            keep = is_first[start : start + len(batch.rows)]
            start += len(batch.rows)
            yield replace(batch, columns=batch.columns.filter(pa.array(keep)), rows=batch.rows[keep])

    return _gather(workspace, name, distinct)


def gather_rows(columns: CatalogueColumns, files: Files, workspace: Storage) -> Gathered:
    """All rows of files. Raises DataError for a file without the columns."""
    name = fingerprint(
        {
            "format": FORMAT_VERSION,
            "content": [[file.key, file.content_id] for file in files.inputs],
            "columns": columns.model_dump(),
        }
    )

    def rows() -> Iterator[RawBatch]:
        for batch in files.read(lambda uri: partial(columns.plan, file=uri), _BATCH_ROWS, "reading the catalogue"):
            yield _as_catalogue(batch, "id", columns.filter)

    return _gather(workspace, name, rows)


def _as_catalogue(batch: RawBatch, id_field: str, wanted: dict[str, str]) -> RawBatch:
    """Rows with fields id, title, text. A product without an id gets the hash of its title."""
    columns, rows = batch.columns, batch.rows
    if wanted:
        keep = filter_mask(columns, wanted)
        columns, rows = columns.filter(pa.array(keep)), rows[keep]
    nothing = pa.nulls(len(rows), pa.large_binary())
    title = columns["title"]
    text = columns["text"] if "text" in columns.schema.names else nothing
    if id_field in columns.schema.names:
        ids = columns[id_field]
    else:
        hashes = [str(hash63(value.strip())).encode() if value else None for value in title.to_pylist()]
        ids = pa.array(hashes, pa.large_binary())
    return replace(batch, columns=pa.RecordBatch.from_arrays([ids, title, text], schema=_SCHEMA), rows=rows)


def _first_rows(batches: Iterator[RawBatch], folder: Path, num_rows: int | None, stop: StopSignal) -> Bools:
    """Of every row, whether no row before it has its id. Rows without an id are all kept, to be judged."""
    total = 0
    with HashSpill(folder, _SPILL, num_rows or _ASSUMED_ROWS) as spill:
        unnamed: list[int] = []
        for batch in batches:
            ids = batch.columns["id"].to_pylist()
            unnamed += [total + row for row, value in enumerate(ids) if not value]
            records = np.empty(len(ids), dtype=_SPILL)
            records["hash"] = [xxhash.xxh3_64_intdigest(value or b"") for value in ids]
            records["other"] = [xxhash.xxh3_64_intdigest(value or b"", seed=1) for value in ids]
            records["place"] = np.arange(total, total + len(ids))
            spill.add(records)
            total += len(ids)
        is_first = np.zeros(total, dtype=np.bool_)
        for records in spill.sorted():
            stop.raise_if_set("looking for distinct products")
            order = np.lexsort((records["place"], records["other"], records["hash"]))
            same = [records[name][order][1:] == records[name][order][:-1] for name in ("hash", "other")]
            is_new = np.concatenate([[True], ~(same[0] & same[1])])[: len(order)]
            is_first[records["place"][order][is_new]] = True
    is_first[unnamed] = True
    return is_first


def _gather(workspace: Storage, name: str, batches: Batches) -> Gathered:
    """Write the rows unless they are there. Whoever does it comes to the same files, which are never replaced."""
    prefix = f"catalogues/{name}"
    if (there := read_manifest(workspace, prefix)) is not None:
        return Gathered(prefix, GatheredInfo.model_validate(there.fields))
    files: dict[str, FileRecord] = {}
    unreadable = Counter[str]()
    sample: list[QuarantinedRow] = []
    held: list[pa.RecordBatch] = []
    rows = 0

    def put() -> None:
        name = f"part-{len(files):05d}.parquet"
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_batches(held, _SCHEMA), sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        key = join_key(prefix, name)
        if not workspace.write_if_absent(key, data) and workspace.read_bytes(key) != data:
            workspace.write_bytes(key, data)  # of another version
        files[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
        held.clear()

    for batch in batches():
        for bad in batch.bad:
            unreadable[bad.reason] += bad.count
        sample += quarantined(batch.bad[: _SAMPLE_ROWS - len(sample)])
        if held and (
            sum(map(len, held)) + len(batch.columns) > FILE_ROWS
            or sum(one.nbytes for one in held) + batch.columns.nbytes > FILE_BYTES
        ):
            put()
        held.append(batch.columns)
        rows += len(batch.columns)
    if held:
        put()
    info = GatheredInfo(rows=rows, unreadable=dict(sorted(unreadable.items())), sample=tuple(sample))
    fields = info.model_dump(mode="json")
    manifest = Manifest(kind=KIND, created_by=f"trnpipe {__version__}", fields=fields, files=files)
    workspace.write_if_absent(join_key(prefix, MANIFEST_NAME), manifest.to_json())
    return Gathered(prefix, info)


def find_catalogue(config: CatalogueConfig, data: DataConfig, ctx: StageContext) -> Catalogue:
    """The files to read; what is no Parquet is brought into the workspace first. Raises DataError."""
    if config.path is None:
        gathered = gather_products(data, ctx.workspace, scratch=ctx.scratch, stop=ctx.stop)
    else:
        columns = CatalogueColumns(id=config.id, title=config.title, text=config.text, filter=config.filter)
        files = open_files(config.path, config.format, ctx.stop, "--embed.catalogue.path", ctx.settings.storage)
        if all(name == "parquet" for _, name in files.found):
            return look_at(files.storage, [stat for stat, _ in files.found], columns)
        gathered = gather_rows(columns, files, ctx.workspace)
    stats = [stat for stat in ctx.workspace.list(gathered.prefix) if stat.key.endswith(".parquet")]
    if not stats:
        raise DataError(
            f"the catalogue has no row to embed ({sum(gathered.info.unreadable.values())} could not be read)",
            expected="rows with an id and a title",
            next_command="check --embed.catalogue.path (or --data.path) and the filter",
        )
    found = look_at(ctx.workspace, stats, COLUMNS)
    update = {"root": "", "unreadable": gathered.info.unreadable, "unreadable_sample": gathered.info.sample}
    return found.model_copy(update=update)
