"""Find the input files below a configured path, determine their formats, and group them by day.

No file is silently ignored. Files that are not read are reported as skipped, and an error is raised if it is unclear
whether a file belongs to the input.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from urllib.parse import unquote, urlsplit

from pipeline.core.errors import DataError
from pipeline.core.fingerprint import fingerprint
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.attributes import SIDES, with_columns
from pipeline.data.readers import Planner, file_version, object_version, read_file, suffix_format
from pipeline.data.rows import READER_VERSION, ColumnPlan, RawBatch, shorten
from pipeline.io.commit import stream_record
from pipeline.io.paths import user_path
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import ObjectStat, Storage, open_parent, open_storage, os_errors
from pipeline.model.config import Attribute

FLAT = "flat"
_MAX_NAMES = 5


@dataclass(frozen=True)
class InputFile:
    """A file to read.

    `content_id` changes when the content of the file changes. `version` is the result of `readers.file_version` and
    changes whenever the file is written.
    """

    key: str
    format: str
    content_id: str
    size_bytes: int = 0
    version: str | None = None


@dataclass(frozen=True)
class Files:
    """The files of a table, each with its format, and the keys of files that are not part of the table."""

    storage: Storage
    entries: tuple[tuple[ObjectStat, str], ...]
    skipped: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise DataError if a file name is not valid UTF-8, because names are stored with the prepared rows."""
        for stat, _ in self.entries:
            try:
                stat.key.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"the name of an input file is not UTF-8: {shorten(stat.key)}",
                    expected="names in UTF-8",
                    next_command="rename it (convmv -f latin1 -t utf8), or move it out of the input",
                ) from error

    @cached_property
    def inputs(self) -> tuple[InputFile, ...]:
        """The files with their content ids.

        The content id of an object on S3 is based on its ETag and size. Local files are hashed (xxh3) because their
        modification times are unreliable. The version of the readers is included as well, because a different version
        may read different rows from the same file.
        """
        storage, inputs = self.storage, list[InputFile]()
        size_bytes = sum(stat.size_bytes for stat, _ in self.entries)
        with progress("checking the input for changes", size_bytes, "bytes") as advance:
            for stat, name in self.entries:
                content = version = object_version(stat)
                if storage.local_path(stat.key) is not None:
                    version = file_version(storage, stat.key)
                    with storage.open_read(stat.key) as file:
                        content = stream_record(file, storage.stop, advance).xxh3_128
                content_id = fingerprint([content, READER_VERSION])
                inputs.append(InputFile(stat.key, name, content_id, stat.size_bytes, version))
        return tuple(inputs)

    def text_attributes(self, attributes: Sequence[Attribute], warn: Callable[[str], object]) -> tuple[Attribute, ...]:
        """Return text attributes with only those columns that exist in the first file that has rows.

        If a column of the products does not exist, `warn` is called with a message.
        """
        texts, names = [each for each in attributes if each.kind == "text"], list[str]()

        def plan(columns: list[str]) -> ColumnPlan:
            names[:] = columns
            return ColumnPlan(())

        if texts:
            next(self.read(lambda uri: plan, 1, "reading column names"), None)
        if missing := [each.product for each in texts if each.product and each.product not in names]:
            warn(f"the catalogue has no column {', '.join(map(repr, missing))}, so titles are used without it")
        found = [{side: getattr(each, side) for side in SIDES if getattr(each, side) in names} for each in texts]
        return tuple(with_columns(text, columns, "text") for text, columns in zip(texts, found, strict=True) if columns)

    def read(
        self, plan: Callable[[str], Planner], num_rows: int, doing: str, versions: Sequence[str | None] = ()
    ) -> Iterator[RawBatch]:
        """Yield batches of at most `num_rows` rows from all files. `plan` maps the URI of a file to its planner.

        Raises TransientError if `versions` are given, and a file has a different version.
        """
        with progress(doing, sum(stat.size_bytes for stat, _ in self.entries), "bytes") as advance:
            for (stat, name), version in zip_longest(self.entries, versions):
                uri = self.storage.uri(stat.key)
                for batch in read_file(self.storage, stat.key, name, plan(uri), num_rows, version):
                    self.storage.stop.raise_if_set(f"reading {uri}")
                    advance(batch.input_bytes)
                    yield batch


def names_of(keys: Sequence[str]) -> str:
    """Format the first few keys for use in a message."""
    more = f" and {len(keys) - _MAX_NAMES} more" if len(keys) > _MAX_NAMES else ""
    return ", ".join(map(shorten, keys[:_MAX_NAMES])) + more


# Listing.


@dataclass(frozen=True)
class Listing:
    """The files below a path that may contain rows. `skipped` contains the keys of hidden files and documents."""

    storage: Storage
    stats: tuple[ObjectStat, ...]
    skipped: tuple[str, ...] = ()


_ROWS_SUFFIX = re.compile(r"(?i).*\.(parquet|pq|csv|tsv|jsonl|ndjson|json)(\.gz)?")
_DOCUMENT = re.compile(
    r"(?i)(readme|license|licence|notice|changelog|citation|makefile|sha256sums|md5sums|thumbs\.db|desktop\.ini)(\..*)?"
    r"|.*\.(md|rst|pdf|html?|md5|sha1|sha256|sha512|asc|sig|py|sql|sh|ipynb)"
)


def _is_hidden(part: str) -> bool:
    """Return whether a file or folder is hidden according to Hadoop's rules. `_column=value` is not hidden."""
    return part.startswith(".") or (part.startswith("_") and "=" not in part)


def _may_contain_rows(stat: ObjectStat) -> bool:
    *_, name = parts = stat.key.split("/")
    return not any(map(_is_hidden, parts)) and bool(_ROWS_SUFFIX.fullmatch(name) or not _DOCUMENT.fullmatch(name))


def find_files(path: str, stop: StopSignal, setting: str = "--data.path", retry: RetryPolicy | None = None) -> Listing:
    """List all files below a folder. If `path` is a file, it is the only file in the list.

    Raises DataError if the path does not exist, if it is both a file and a folder, or if it contains broken links. The
    error refers to the `setting` that the path was read from.
    """
    is_local = "://" not in path or path.startswith("file:///")
    local = user_path(path.removeprefix("file://") if is_local else "/")
    with os_errors("checking", path):
        is_folder = local.is_dir() if is_local else not urlsplit(path).path.strip("/")
        is_missing = is_local and not local.exists()
    if is_missing:
        raise DataError(
            f"{path} does not exist",
            expected="an existing file or folder",
            next_command=f"correct {setting}",
        )
    if not is_local and "//" in urlsplit(path).path:
        raise DataError(
            f"{path} contains '//', an empty folder name",
            expected="a parent folder, which includes such keys, or keys without '//'",
            next_command=f"{setting} {re.sub('(?<!:)//+.*', '/', path)}",
        )
    if not is_folder:
        storage, name = open_parent(path, retry=retry or RetryPolicy(), stop=stop)
        stat = storage.stat(name)
        below = [] if is_local else list(islice(open_storage(path, retry=retry, stop=stop).list(""), 1))
        if stat and below and stat.size_bytes and not path.endswith("/"):
            raise DataError(
                f"{path} is both a file and a folder with files such as {path}/{below[0].key}",
                expected="a file or a folder",
                next_command=f"{setting} {path}/ to read the folder, or rename the file to read the file",
            )
        if stat and not below:
            return Listing(storage, (stat,))
    storage = open_storage(path, retry=retry, stop=stop)
    if is_local and (broken := _irregular_files(local)):
        raise DataError(
            f"{len(broken)} name(s) below {path} are not regular files: {names_of(broken)}",
            expected="files, and links to existing files",
            next_command=f"restore the files, or remove everything listed by: find -L {path} ! -type f ! -type d",
        )
    stats = list(storage.list(""))
    candidates = tuple(stat for stat in stats if _may_contain_rows(stat))
    keys = {stat.key for stat in candidates}
    return Listing(storage, candidates, tuple(stat.key for stat in stats if stat.key not in keys))


def _irregular_files(folder: Path) -> list[str]:
    """Return the names of all entries that are not regular files, such as broken links, pipes and sockets."""
    paths = [Path(root, name) for root, _, names in os.walk(folder) for name in names]
    keys = [(path, str(path.relative_to(folder))) for path in paths if not path.is_file()]
    return sorted(key for _, key in keys if not any(map(_is_hidden, key.split("/"))))


def open_files(
    path: str, default_format: str, stop: StopSignal, setting: str = "--data.path", retry: RetryPolicy | None = None
) -> Files:
    """Return the files below a path with their formats.

    Unless it is "auto", `default_format` is used for files without a known suffix. Raises DataError if there are no
    files or if the format of a file is unknown. The error refers to the `setting` that the path was read from.
    """
    return choose_files(find_files(path, stop, setting, retry), default_format, path, setting)


def choose_files(listing: Listing, default_format: str, path: str, setting: str = "--data.path") -> Files:
    """Determine the format of every listed file. Empty files without a known suffix are skipped.

    See `open_files` for the arguments and errors.
    """
    entries, unknown, empty = list[tuple[ObjectStat, str]](), list[str](), list[str]()
    for stat in listing.stats:
        name = suffix_format(stat.key)
        if default_format != "auto" and name in (None, default_format):
            name = default_format
        if name:
            entries.append((stat, name))
        else:
            (unknown if stat.size_bytes else empty).append(stat.key)
    if unknown:
        raise DataError(
            f"{len(unknown)} of {len(listing.stats)} files in {path} have no known suffix: {names_of(unknown)}",
            expected="*.parquet, *.csv, *.tsv or *.jsonl files, optionally with .gz",
            next_command="move them out of the input, convert them, or if only their names are unusual, set"
            f" {setting.rpartition('.')[0] or '--data'}.format csv (or parquet, jsonl)",
        )
    if not entries:
        others = names_of([*empty, *listing.skipped])
        raise DataError(
            f"no input file below {path} (other files: {others or 'none'})",
            expected="*.parquet, *.csv or *.jsonl files with names that do not begin with _ or .",
            next_command=f"correct {setting}, or rename hidden files",
        )
    return Files(listing.storage, tuple(entries), (*listing.skipped, *empty))


# Days.

_DAY = re.compile(r"dt=(\d{4}-\d{2}-\d{2})")
_LIKE_A_DAY = re.compile(
    r"(?i)(?<!\d)(?:19|20)\d\d([-_.]?)(?:0[1-9]|1[0-2])\1(?:[0-2]\d|3[01])(?!\.?\d)"  # 2026-11-19, 20261119
    r"|(?<!\d)[0-3]?\d([-_.])[0-3]?\d\2(?:19|20)\d\d(?!\.?\d)|(?:19|20)\d\d[-_]?w[0-5]\d"  # 19.11.2026, 2026-W47
    r"|(?:^|/)(?:19|20)\d\d/(?:0?[1-9]|1[0-2])(?:/|$)"  # 2026/11
    r"|(?:^|/)(?:dt|ds|date|day|week|year|month|yyyy|yy|mm|dd)="
)
"""Matches folder names that look like a date."""


@dataclass(frozen=True)
class InputPartition:
    """The files of one day (`dt=YYYY-MM-DD`), of one append to an Iceberg table, or of a flat input.

    `extra_ids` are the content ids of additional files that are joined with these files.
    """

    name: str
    files: tuple[InputFile, ...]
    extra_ids: tuple[str, ...] = ()

    @property
    def watermark(self) -> str:
        return self.name.removeprefix("dt=") if self.name != FLAT else ""

    @property
    def content_id(self) -> str:
        """Fingerprint of the contents and names of all files. Names are included because sample ids depend on them."""
        return fingerprint([self.name, [[file.key, file.content_id] for file in self.files], list(self.extra_ids)])


def group_by_day(files: Sequence[InputFile], path: str, extra_ids: tuple[str, ...] = ()) -> tuple[InputPartition, ...]:
    """Group files by their `dt=YYYY-MM-DD` folder, which may be at any level of the path.

    Returns one partition per day, sorted by date. If the input has no such folders, all files belong to a single
    partition named `flat`. Raises DataError if only some of the files are in a day's folder, or if a folder has an
    invalid date or a date in a different format.
    """
    days: dict[str, list[InputFile]] = {}
    for file in files:
        days.setdefault(_day_of(file.key, path), []).append(file)
    for name in days.keys() - {FLAT}:
        try:
            date.fromisoformat(name.removeprefix("dt="))
        except ValueError as error:
            raise DataError(
                f"{path} has a folder {name}, which is not a valid date: {error}",
                expected="dt=YYYY-MM-DD, because days are trained in order",
                next_command=f"rename {name}",
            ) from error
    if FLAT in days and len(days) > 1:
        raise DataError(
            f"{path} has dt= folders, and also {days[FLAT][0].key} outside of them",
            expected="either dt=YYYY-MM-DD/ folders or a flat folder",
            next_command="move it to a dt= folder",
        )
    return tuple(InputPartition(name, tuple(days[name]), extra_ids) for name in sorted(days))


def _day_of(key: str, path: str) -> str:
    """Return the name of the day's folder that contains a file, or `flat`.

    Raises DataError if the file is below several such folders, or if a folder has a date in a different format.
    """
    folders = key.split("/")[:-1]
    days = {part for part in folders if _DAY.fullmatch(part)}
    if len(days) > 1:
        raise DataError(
            f"{path} has a file {key} below folders of several days",
            expected="one dt=YYYY-MM-DD folder above each file",
            next_command="move it to the folder for its day",
        )
    if not days and _LIKE_A_DAY.search(unquote("/".join(folders))):
        raise DataError(
            f"{path} has a file {key} in a folder that looks like a date",
            expected="folders named dt=YYYY-MM-DD for the days, at any level, and no other dates in folder names",
            next_command="rename the folder of each day to dt=YYYY-MM-DD, or set --data.path to one of them",
        )
    return days.pop() if days else FLAT


_TOOLS = re.compile(r"(^|/)(_temporary|_spark_metadata|_delta_log|__MACOSX|\._|\.(git|hoodie|cache|ipynb_che|hive-))")
_MIN_DUPLICATE_BYTES = 2048  # smaller files may be identical just because they only contain a header


def input_warnings(files: Sequence[InputFile], skipped: Sequence[str], path: str) -> tuple[str, ...]:
    """Return warnings about an input that can be read but may not be the input that the user intended."""
    warnings, keys = list[str](), [file.key for file in files]
    if hidden := [key for key in skipped if _ROWS_SUFFIX.fullmatch(key) and not _TOOLS.search(key)]:
        warnings.append(
            f"{len(hidden)} data file(s) were skipped because names that begin with _ or . are considered hidden:"
            f" {names_of(hidden)}"
        )
    if any(part in ("_delta_log", ".hoodie") for key in skipped for part in key.split("/")):
        warnings.append(
            f"{path} is a Delta or Hudi table. All of its files are read, including rows that have since been updated"
            " or deleted. Use an exported snapshot of the table instead"
        )
    folders = {part for key in keys for part in key.split("/")[:-1] if "=" in part and not _DAY.fullmatch(part)}
    if folders:
        warnings.append(f"folder names are not read as columns: {names_of(sorted(folders))}")
    is_dated = any(_DAY.fullmatch(part) for key in keys for part in key.split("/")[:-1])
    dated_names = [key for key in keys if _LIKE_A_DAY.search(key.rpartition("/")[2])]
    if not is_dated and (_DAY.search(path) or len(dated_names) > 1):
        warnings.append(
            f"{path} is read as undated although file names contain dates. To train only on new days, move the files"
            " into dt=YYYY-MM-DD folders and set --data.path to their parent folder"
        )
    first: dict[str, str] = {}
    large = [file for file in files if file.size_bytes >= _MIN_DUPLICATE_BYTES]
    copies = [(file.key, key) for file in large if (key := first.setdefault(file.content_id, file.key)) != file.key]
    if copies:
        warnings.append(f"{len(copies)} file(s) duplicate another file: {copies[0][0]} equals {copies[0][1]}")
    return tuple(warnings)
