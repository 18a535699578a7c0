"""Read the data files of an Apache Iceberg table, which requires pyiceberg. Each append is a partition.

`iceberg://catalog/namespace.table` refers to a catalogue that pyiceberg is configured with (`.pyiceberg.yaml`, or
variables such as PYICEBERG_CATALOG__PROD__URI). pyiceberg only reads the catalogue and the metadata of the table. The
Parquet files are read like all other input files.

The metadata of a file contain the snapshot that added it, and the sequence number of that snapshot, even after the
snapshot has expired. The names of the partitions begin with this number, so that they are sorted by time.
"""

from collections.abc import Iterator

from pyiceberg.catalog import load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError, NotInstalledError, RESTError
from pyiceberg.manifest import DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, ancestors_of

from pipeline.core.errors import ConfigError, DataError, TransientError, first_line
from pipeline.core.stop import StopSignal
from pipeline.data.input_files import Files, InputPartition
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import ObjectStat, Storage, open_storage


def list_files(
    path: str, stop: StopSignal, retry: RetryPolicy | None = None
) -> tuple[Storage, dict[str, tuple[ObjectStat, ...]]]:
    """Return the storage of a table, and the files that each append added, in the order of the appends.

    The keys of the dict are the names of the partitions. Raises ConfigError if the path or the catalogue is not valid,
    and DataError if the table does not exist, is empty, or was changed by anything other than appends.
    """
    table = _load_table(path)
    _check_snapshots(table, path)
    storage = open_storage(table.location(), retry=retry, stop=stop)
    added: dict[tuple[int, int], list[ObjectStat]] = {}
    for number, snapshot_id, uri in _data_files(table, path):
        key = uri.removeprefix(table.location().rstrip("/") + "/")
        stat = storage.stat(key) if key != uri else None
        if stat is None:
            raise DataError(
                f"{path}: file {uri} of snapshot {snapshot_id} does not exist below {table.location()}",
                expected="all data files below the location of the table",
                next_command="restore the file, or write the table without write.data.path",
            )
        added.setdefault((number, snapshot_id), []).append(stat)
    if not added:
        raise DataError(f"{path} has no rows", expected="at least one append", next_command="append rows to the table")
    return storage, {
        f"snapshot={number:010d}-{snapshot_id}": tuple(sorted(added[number, snapshot_id], key=lambda stat: stat.key))
        for number, snapshot_id in sorted(added)
    }


def open_partitions(
    path: str, stop: StopSignal, retry: RetryPolicy | None = None
) -> tuple[Storage, tuple[InputPartition, ...]]:
    """Return the storage of a table, and a partition for each append. See `list_files` for errors."""
    storage, added = list_files(path, stop, retry)
    entries = tuple((stat, "parquet") for stats in added.values() for stat in stats)
    files = {file.key: file for file in Files(storage, entries).inputs}
    return storage, tuple(
        InputPartition(name, tuple(files[stat.key] for stat in stats)) for name, stats in added.items()
    )


def _load_table(path: str) -> Table:
    catalog, _, name = path.partition("://")[2].partition("/")
    if not catalog or "." not in name or "/" in name:
        raise ConfigError(
            f"data.path {path} does not name a table",
            expected="iceberg://catalog/namespace.table",
            next_command="correct --data.path",
        )
    try:
        return load_catalog(catalog).load_table(name)
    except (NoSuchNamespaceError, NoSuchTableError) as error:
        raise DataError(
            f"{path} does not exist: {first_line(error)}",
            expected=f"a table {name} in the catalogue {catalog}",
            next_command=f"pyiceberg --catalog {catalog} list, then correct --data.path",
        ) from error
    except (RESTError, OSError) as error:
        raise TransientError(
            f"the Iceberg catalogue {catalog} does not answer: {first_line(error)}",
            expected="a catalogue that can be reached, and valid credentials",
            next_command=f"pyiceberg --catalog {catalog} list",
        ) from error
    except (ImportError, NotInstalledError, ValueError) as error:
        raise ConfigError(
            f"the Iceberg catalogue {catalog} cannot be opened: {first_line(error)}",
            expected=f"PYICEBERG_CATALOG__{catalog.upper()}__URI, or an entry in .pyiceberg.yaml",
            next_command=f"pyiceberg --catalog {catalog} list",
        ) from error


def _check_snapshots(table: Table, path: str) -> None:
    """Raise DataError if a snapshot did not only append rows, or if one of its columns was renamed or replaced."""
    if table.format_version < 2:
        raise DataError(
            f"{path} has format version {table.format_version}, which does not number its snapshots",
            expected="format version 2 or later",
            next_command="set the table property format-version to 2",
        )
    current = {field.field_id: field.name for field in table.schema().fields}
    for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
        operation = snapshot.summary.operation if snapshot.summary else None
        problem = "" if operation is Operation.APPEND else f"is of type {operation.value if operation else 'unknown'}"
        schema = table.schemas().get(snapshot.schema_id) if snapshot.schema_id is not None else None
        for field in schema.fields if schema else ():
            name = current.get(field.field_id)
            if name != field.name and (name is not None or field.name in current.values()):
                problem = problem or f"has a column {field.name!r} that was renamed or replaced later"
        if problem:
            raise DataError(
                f"{path}: snapshot {snapshot.snapshot_id} {problem}",
                expected="snapshots that only append rows, with columns that keep their names",
                next_command="copy the rows to a new table by appends, and set --data.path to it",
            )


def _data_files(table: Table, path: str) -> Iterator[tuple[int, int, str]]:
    """Yield the sequence number and the id of the snapshot that added each file, and the URI of the file."""
    snapshot = table.current_snapshot()
    for manifest in snapshot.manifests(table.io) if snapshot else ():
        for entry in manifest.fetch_manifest_entry(table.io):
            file = entry.data_file
            if file.content is not DataFileContent.DATA or file.file_format is not FileFormat.PARQUET:
                raise DataError(
                    f"{path}: {file.file_path} is of type {file.content.name} in format {file.file_format.value}",
                    expected="data files in Parquet format, and no deleted rows",
                    next_command="copy the rows to a new table by appends, and set --data.path to it",
                )
            yield entry.sequence_number or 0, entry.snapshot_id or 0, file.file_path
