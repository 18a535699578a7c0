"""Parts on their way into the workspace: the files of one, then a record that proves them.

Nothing is ever written over: the first file under a name stays, whoever made it, and the record describes what is
there. So a worker that was thought dead, and comes back, does no harm, and a part is there once.
"""

import io
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, ValidationError

from pipeline.core.errors import DataError
from pipeline.core.manifest import FileRecord
from pipeline.core.record import Record
from pipeline.core.stop import StopSignal
from pipeline.data.chunks import QuarantinedRow
from pipeline.data.rows import BadRow
from pipeline.embed.output import PartRows, metadata_of, part_files
from pipeline.embed.plan import EmbedPlan, vectors_prefix
from pipeline.io.commit import hash_bytes
from pipeline.io.requests import run_parallel
from pipeline.io.storage import Storage, join_key

NUM_READ_THREADS = 16
_RECORDS_AT_A_TIME = 64
"""Each may hold as many bad rows as are kept of all."""


class PartCounts(Record):
    """What became of the rows of one part, or of all."""

    read: int = Field(0, description="Rows that passed the filter")
    bad: int = Field(0, description="Of them: without a usable id or text")
    embedded: int = 0
    carried: int = Field(0, description="Vectors taken over from the earlier cycle")
    known: int = Field(0, description="Rows whose id was in the earlier cycle, with this text or another")
    truncated: int = Field(0, description="Embedded texts that were cut to the longest length")
    tokens: int = Field(0, description="Of embedded texts, without padding")

    def __add__(self, other: "PartCounts") -> "PartCounts":
        ours, theirs = self.model_dump(), other.model_dump()
        return PartCounts(**{name: ours[name] + theirs[name] for name in ours})


class PartRecord(Record):
    """One finished part."""

    index: int
    rows: int
    files: dict[str, FileRecord]
    id_min: str
    id_max: str
    counts: PartCounts
    reasons: dict[str, int]
    quarantined: tuple[QuarantinedRow, ...]
    seconds: float = Field(description="Of its worker")


@dataclass
class Tally:
    """Counts of a part while it is made; at most `limit` bad rows are kept."""

    limit: int
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    bad: list[BadRow] = field(default_factory=list)

    def add_bad(self, rows: Iterable[BadRow]) -> None:
        for row in rows:
            self.counts["bad"] += row.count
            self.reasons[row.reason] += row.count
            if len(self.bad) < self.limit:
                self.bad.append(row)


def stem_of(index: int) -> str:
    return f"part-{index:05d}"


def records_prefix(plan: EmbedPlan) -> str:
    """Records are those of one plan: an earlier one's prove nothing."""
    return f"cycles/{plan.cycle}/embed/parts-{plan.fingerprint[:16]}"


def commit_part(
    storage: Storage, plan: EmbedPlan, index: int, rows: PartRows, tally: Tally, *, seconds: float
) -> PartRecord:
    """Publish the files of one part, then its record. Raises what storage raises; may be repeated."""
    files = part_files(plan.layout, stem_of(index), rows, plan.metadata)
    there = _put(storage, plan, files)
    low, high = id_range(rows.ids)
    record = PartRecord(
        index=index,
        rows=len(rows.ids),
        files=there,
        id_min=low,
        id_max=high,
        counts=PartCounts(**tally.counts),
        reasons=dict(sorted(tally.reasons.items())),
        quarantined=quarantined(tally.bad),
        seconds=round(seconds, 3),
    )
    key = _record_key(plan, index)
    if not storage.write_if_absent(key, record.model_dump_json().encode()):
        earlier = _load(storage, key)
        if earlier.files == there:
            return earlier
        storage.write_bytes(key, record.model_dump_json().encode())  # its files were taken away
    return record


def _put(storage: Storage, plan: EmbedPlan, files: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write the files that are not there yet; what they hold then. Files of another plan are replaced."""
    keys = {name: join_key(vectors_prefix(plan.cycle), name) for name in files}
    last = list(files)[-1]
    there: dict[str, FileRecord] = {}
    for name, data in files.items():
        if not storage.write_if_absent(keys[name], data):
            found = storage.read_bytes(keys[name])
            if found != data:
                marker = found if name == last else _read_or_empty(storage, keys[last])
                if _plan_of(marker) != plan.fingerprint:
                    storage.write_bytes(keys[name], data)
                else:
                    data = found
        there[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
    return there


def _read_or_empty(storage: Storage, key: str) -> bytes:
    return storage.read_bytes(key) if storage.stat(key) else b""


def _plan_of(data: bytes) -> str:
    """The plan that a file of a part was made for; empty for anything else."""
    try:
        return metadata_of(pq.read_schema(io.BytesIO(data))).get("plan", "")
    except (pa.ArrowException, OSError):
        return ""


def id_range(ids: pa.Array) -> tuple[str, str]:
    """Smallest and largest id as text; empty for no ids."""
    found = pc.min_max(ids)
    return tuple("" if found[end].as_py() is None else str(found[end].as_py()) for end in ("min", "max"))  # type: ignore[return-value]


def quarantined(rows: Iterable[BadRow]) -> tuple[QuarantinedRow, ...]:
    return tuple(QuarantinedRow(file=row.file, row=row.row, reason=row.reason, content=row.content) for row in rows)


def finished_parts(storage: Storage, plan: EmbedPlan) -> set[int]:
    """Indices of parts whose record and files are there; by names alone, one listing each."""
    records = names_in(storage, records_prefix(plan))
    files = names_in(storage, vectors_prefix(plan.cycle)) if records else set()
    return {
        shard.index
        for shard in plan.shards
        if f"{shard.index:05d}.json" in records and files.issuperset(plan.layout.names(stem_of(shard.index)))
    }


def load_records(storage: Storage, plan: EmbedPlan, stop: StopSignal) -> list[PartRecord]:
    """The records of all parts, in order, with the first `plan.quarantine_rows` bad rows of them all.

    Raises KeyNotFound when a record is missing, DataError when one is damaged.
    """
    records: list[PartRecord] = []
    room = plan.quarantine_rows
    for first in range(0, len(plan.shards), _RECORDS_AT_A_TIME):
        for record in run_parallel(
            lambda index: _load(storage, _record_key(plan, index)),
            range(first, min(first + _RECORDS_AT_A_TIME, len(plan.shards))),
            num_threads=NUM_READ_THREADS,
            stop=stop,
            doing="reading the records of the parts",
        ):
            records.append(record.model_copy(update={"quarantined": record.quarantined[:room]}))
            room -= len(records[-1].quarantined)
    return records


def _record_key(plan: EmbedPlan, index: int) -> str:
    return f"{records_prefix(plan)}/{index:05d}.json"


def _load(storage: Storage, key: str) -> PartRecord:
    try:
        return PartRecord.model_validate_json(storage.read_bytes(key))
    except ValidationError as error:
        raise DataError(
            f"{storage.uri(key)} is no record of a part: {error.errors(include_url=False)[0]['msg']}",
            expected="a record written by trnpipe embed",
            next_command="delete it and run trnpipe embed again",
        ) from error


def names_in(storage: Storage, prefix: str) -> set[str]:
    """Names of the files directly in a folder. On disk without the listing's etags, for which it would read them."""
    folder = storage.local_path(prefix)
    if folder is not None:
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    cut = len(join_key(prefix, ""))
    return {stat.key[cut:] for stat in storage.list(prefix)}
