"""Write the output parts of a catalogue, and publish the manifest once all parts are complete.

A part has the rows of a work shard and their vectors. The worker that completes the last part checks all of them and
publishes the manifest. It is safe if several workers do this concurrently, or if one does it again after it was killed,
because they all write the same bytes.
"""

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field, JsonValue

from pipeline import __version__
from pipeline.context import Figure, StageContext, StageResult
from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import DataError, NumericError, TransientError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from pipeline.core.stop import StopSignal
from pipeline.data.rows import quarantine_lines
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.tokenizer import Tokens
from pipeline.embed.carry_over import RowIndex, decode_row, encode_row, open_earlier, open_row_index
from pipeline.embed.catalogue import DUPLICATE_ID, Window
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.vectors import (
    KEYS,
    KIND,
    QUARANTINE,
    PartCounts,
    PartInfo,
    Stored,
    VectorLayout,
    VectorSet,
    VectorSetInfo,
    metadata_of,
    part_files,
    shorten_vectors,
    to_stored,
    vectors_prefix,
)
from pipeline.io.commit import check_sizes, hash_bytes, read_manifest
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage, join_key, list_names
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName


@dataclass
class OpenPart:
    """A part in progress. Rows are added as they are read, and vectors are filled in as they are computed.

    Args:
        capacity: number of rows in the shard, which is an upper bound for the rows of the part.
        quarantine_rows: maximum number of bad rows to keep.
    """

    index: int
    layout: VectorLayout
    capacity: int
    quarantine_rows: int

    def __post_init__(self) -> None:
        self.counts, self.reasons, self.bad = Counter[str](), Counter[str](), list[QuarantinedRow]()
        self.rows, self._tables, self._ids = 0, list[pa.Table](), set[Any]()
        # The operating system allocates this memory only as vectors are written to it.
        self._vectors = np.empty((self.capacity, self.layout.dim), dtype=self.layout.numpy_dtype)
        self._scale = np.empty(self.capacity, dtype=np.float32) if self.layout.has_scale else None

    def add(self, window: Window) -> tuple[Tokens, Int64s]:
        """Add the rows of a window. Return the tokens to embed and the rows of this part that need their vectors."""
        self.counts["read"] += window.rows.num_read
        self._add_bad(window.rows.bad)
        window = self._without_duplicates(window)
        table = window.rows.table
        to_embed = np.flatnonzero(table["source"].to_numpy() < 0)
        self.counts["embedded"] += len(to_embed)
        self.counts["carried"] += len(table) - len(to_embed)
        for name in ("known", "truncated", "chunked"):
            self.counts[name] += pc.sum(table[name]).as_py() or 0
        self.counts["tokens"] += len(window.tokens.ids)
        target = to_embed + self.rows
        self.rows += len(table)
        self._tables.append(table)
        return window.tokens, target

    def fill(self, rows: Int64s, vectors: Float32s) -> None:
        """Shorten vectors [N, D], convert them and store them in rows [N] of this part.

        Raises NumericError if a vector contains NaN or infinity.
        """
        if not np.isfinite(vectors).all():
            bad = rows[~np.isfinite(vectors).all(axis=1)]
            raise NumericError(
                f"{len(bad)} vectors of part {self.index} contain NaN or infinity, the first one in row {bad[0]}",
                expected="finite values",
                next_command="--embed.precision fp32 (if the error persists, training has diverged)",
            )
        self._put(rows, *to_stored(shorten_vectors(vectors, self.layout.dim), self.layout))

    def carry(self, earlier: VectorSet) -> None:
        """Copy the vectors of unchanged rows from an earlier cycle."""
        parts, rows = decode_row(pa.concat_tables(self._tables)["source"].to_numpy())
        for part in np.unique(parts[parts >= 0]).tolist():
            chosen = np.flatnonzero(parts == part)
            self._put(chosen, *earlier.stored(part, rows[chosen]))

    def files(self, stem: str, metadata: Mapping[str, str]) -> tuple[pa.Array, dict[str, bytes]]:
        """Return the ids and the files of this part, which must be complete."""
        rows = pa.concat_tables(self._tables)
        scale = None if self._scale is None else self._scale[: self.rows]
        return rows["id"], part_files(self.layout, stem, rows, self._vectors[: self.rows], scale, metadata)

    def _put(self, rows: Int64s, vectors: Stored, scale: Float32s | None) -> None:
        self._vectors[rows] = vectors
        if self._scale is not None and scale is not None:
            self._scale[rows] = scale

    def _add_bad(self, rows: Sequence[QuarantinedRow]) -> None:
        for row in rows:
            self.counts["bad"] += row.count
            self.reasons[row.reason] += row.count
        self.bad += rows[: self.quarantine_rows - len(self.bad)]

    def _without_duplicates(self, window: Window) -> Window:
        """Drop rows with an id that this part already has, and count them as bad rows."""
        rows, ids = window.rows, window.rows.table["id"].to_pylist()
        new = set(ids)
        if len(new) == len(ids) and self._ids.isdisjoint(new):
            self._ids |= new
            return window
        keep, bad, numbers = np.ones(len(ids), dtype=np.bool_), list[QuarantinedRow](), rows.table["row"].to_pylist()
        for index, name in enumerate(ids):
            if name in self._ids:
                keep[index] = False
                row = numbers[index]
                bad.append(QuarantinedRow(file=rows.file, row=row, reason=DUPLICATE_ID, content={"id": name}))
            self._ids.add(name)
        self._add_bad(bad)
        return window.keep(keep)


class PartRecord(Part):
    """The record that is stored for each complete part."""

    rows: int
    id_min: str
    id_max: str
    counts: PartCounts
    reasons: dict[str, int]
    quarantined: tuple[QuarantinedRow, ...]
    seconds: float = Field(description="Time that the worker spent on this part")


def part_stem(index: int) -> str:
    return f"part-{index:05d}"


def records_prefix(plan: EmbedPlan) -> str:
    """Return the prefix of the part records. It contains the fingerprint of the plan."""
    return f"cycles/{plan.cycle}/embed/parts-{plan.fingerprint[:16]}"


def part_store(storage: Storage, plan: EmbedPlan) -> Parts[PartRecord]:
    """Return the store for the parts of a plan. It replaces files that belong to an earlier plan of the same cycle."""

    def is_of_plan(last: bytes) -> bool:
        try:
            return metadata_of(pq.read_schema(io.BytesIO(last))).get("plan") == plan.fingerprint
        except (pa.ArrowException, OSError):
            return False

    return Parts(
        storage,
        records=records_prefix(plan),
        files=vectors_prefix(plan.cycle),
        kind=PartRecord,
        names=lambda index: plan.layout.names(part_stem(index)),
        is_same_work=is_of_plan,
    )


def commit_part(storage: Storage, plan: EmbedPlan, part: OpenPart, *, seconds: float) -> PartRecord:
    """Write the files of a part, then its record. This is idempotent."""
    ids, files = part.files(part_stem(part.index), plan.metadata)
    low, high = id_range(ids)
    record = PartRecord(
        index=part.index,
        rows=len(ids),
        id_min=low,
        id_max=high,
        counts=PartCounts(**part.counts),
        reasons=dict(sorted(part.reasons.items())),
        quarantined=tuple(part.bad),
        seconds=round(seconds, 3),
    )
    return part_store(storage, plan).commit(record, files)


def id_range(ids: pa.Array | pa.ChunkedArray) -> tuple[str, str]:
    """Return the smallest and the largest id as text, or empty strings if there are no ids."""
    bounds = pc.min_max(ids)
    return tuple("" if bounds[end].as_py() is None else str(bounds[end].as_py()) for end in ("min", "max"))  # type: ignore[return-value]


def find_duplicates(vectors: VectorSet, *, limit: int, stop: StopSignal) -> dict[int, Int64s]:
    """Return the rows of each part whose id already occurs earlier in the catalogue.

    Duplicates are detected by their hashes. To rule out collisions, the ids of up to about `limit` such rows are read
    and compared. This takes 40 bytes of memory per row.
    """
    hashes, codes = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
    for part in range(len(vectors.info.parts)):
        stop.raise_if_set("looking for ids in several parts")
        hashes.append(vectors.hashes(part)[0])
        codes.append(encode_row(part, np.arange(len(hashes[-1]), dtype=np.int64)))
    order = np.argsort(np.concatenate(hashes), kind="stable")
    ordered, code = np.concatenate(hashes)[order], np.concatenate(codes)[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))
    sizes = np.diff(starts, append=len(ordered))
    sizes[(np.cumsum(sizes - 1) - (sizes - 1)) > limit] = 1
    parts, rows = decode_row(code[np.repeat(sizes > 1, np.diff(starts, append=len(ordered)))])
    names = np.empty(len(parts), dtype=object)
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        names[chosen] = vectors.ids_at(part, rows[chosen])
    is_duplicate, observed = np.zeros(len(parts), dtype=np.bool_), set[Any]()
    for number, name in enumerate(names.tolist()):  # in the order of hashes, then parts, then rows
        is_duplicate[number] = name in observed
        observed.add(name)
    return {part: np.sort(rows[is_duplicate & (parts == part)]) for part in np.unique(parts[is_duplicate]).tolist()}


_TOP_REASONS = 3


def finish(
    workspace: Storage, plan: EmbedPlan, scratch: Path, stop: StopSignal, *, max_bad_fraction: float
) -> VectorSet:
    """Publish the manifest. All parts must be complete.

    If an id occurs in several parts, it is removed from all but the first. Raises DataError if too many rows are bad or
    if there is no usable row at all.
    """
    try:
        return _finish(workspace, plan, scratch, stop, max_bad_fraction=max_bad_fraction)
    except (DataError, TransientError):
        manifest = read_manifest(workspace, vectors_prefix(plan.cycle))
        if manifest is None or manifest.kind != KIND:
            raise
        published = VectorSet(workspace, vectors_prefix(plan.cycle), manifest)
        if published.info.plan != plan.fingerprint:
            raise
        return published  # another worker published it first, and removed superseded files while this one read them


def _finish(
    workspace: Storage, plan: EmbedPlan, scratch: Path, stop: StopSignal, *, max_bad_fraction: float
) -> VectorSet:
    prefix = vectors_prefix(plan.cycle)
    records, bad = list[PartRecord](), list(plan.catalogue.unreadable_sample)
    for record in part_store(workspace, plan).read_all(range(len(plan.shards))):
        bad += record.quarantined[: max(0, plan.quarantine_rows - len(bad))]
        records.append(record.model_copy(update={"quarantined": ()}))
    draft = VectorSet(workspace, prefix, _manifest(plan, records, PartCounts(), {}, None))
    earlier = open_earlier(workspace, plan.carry_from) if plan.carry_from else None
    limit = int(max_bad_fraction * draft.info.counts.read)
    dropped = PartCounts()
    for index, rows in find_duplicates(draft, limit=limit, stop=stop).items():
        stop.raise_if_set("removing duplicate ids")
        file, shown = draft.info.parts[index].files[-1], rows[: max(0, plan.quarantine_rows - len(bad))]
        for row, name in zip(shown.tolist(), draft.ids_at(index, shown), strict=True):
            bad.append(QuarantinedRow(file=file, row=row, reason=DUPLICATE_ID, content={"id": name}))
        dropped += PartCounts(bad=len(rows))
        if earlier is not None:
            _, exists = RowIndex(open_row_index(earlier, scratch, stop)).look_up(draft.hashes(index)[0][rows])
            dropped += PartCounts(known=-int(exists.sum()))
        records[index] = _remove_rows(draft, plan, records[index], rows)
    deleted = None
    if earlier is not None:
        deleted = earlier.info.rows - draft.info.counts.known - dropped.known
    quarantine = quarantine_lines(bad[: plan.quarantine_rows])
    files = {QUARANTINE: FileRecord(size_bytes=len(quarantine), xxh3_128=hash_bytes(quarantine))}
    manifest = _manifest(plan, records, dropped, files, deleted)
    result = VectorSet(workspace, prefix, manifest)
    counts = result.info.counts
    if not result.info.rows or counts.bad > max_bad_fraction * counts.read:
        key = f"cycles/{plan.cycle}/embed/refused.jsonl"
        workspace.write_bytes(key, quarantine)
        raise too_many_bad(counts.bad, counts.read, result.info.reasons, max_bad_fraction, workspace.uri(key))
    workspace.write_bytes(join_key(prefix, QUARANTINE), quarantine)
    check_sizes(workspace, prefix, manifest)
    workspace.write_if_absent(join_key(prefix, MANIFEST_NAME), manifest.to_json())  # unless another worker was faster
    delete_superseded(result)
    return result


def delete_superseded(vectors: VectorSet) -> None:
    """Delete the original files of parts without their duplicates, and the files of an earlier plan."""
    names = list_names(vectors.storage, vectors.prefix)
    superseded = {name for name in names if name.startswith("part-")} - vectors.manifest.files.keys()
    vectors.storage.delete(join_key(vectors.prefix, name) for name in sorted(superseded))


def _manifest(
    plan: EmbedPlan, records: list[PartRecord], dropped: PartCounts, files: dict[str, FileRecord], deleted: int | None
) -> Manifest:
    """Build the manifest. `dropped` adjusts the counts for the duplicate rows that were removed."""
    reasons = Counter(plan.catalogue.unreadable) + Counter({DUPLICATE_ID: dropped.bad})
    unreadable = sum(plan.catalogue.unreadable.values())
    counts = dropped + PartCounts(read=unreadable, bad=unreadable)
    for record in records:
        reasons.update(record.reasons)
    info = VectorSetInfo(
        cycle=plan.cycle,
        generation=plan.generation,
        plan=plan.fingerprint,
        catalogue=plan.catalogue.digest,
        model=plan.model,
        made_by=plan.made_by,
        layout=plan.layout,
        rows=sum(record.rows for record in records),
        counts=sum((record.counts for record in records), counts),
        reasons=dict(sorted(reasons.items())),
        carried_from=plan.carry_from.cycle if plan.carry_from else None,
        deleted=deleted,
        previous=plan.previous.cycle if plan.previous else None,
        parts=tuple(
            PartInfo(files=tuple(record.files), rows=record.rows, id_min=record.id_min, id_max=record.id_max)
            for record in records
        ),
    )
    fields: dict[str, JsonValue] = info.model_dump(mode="json")
    for record in records:
        files = files | record.files
    return Manifest(kind=KIND, created_by=f"trnpipe {__version__}", fields=fields, files=files)


def _remove_rows(draft: VectorSet, plan: EmbedPlan, record: PartRecord, rows: Int64s) -> PartRecord:
    """Write a copy of a part without the given rows.

    The copy has a different name, so that the original files still match their record.
    """
    kept = np.setdiff1d(np.arange(record.rows, dtype=np.int64), rows)
    vectors, scale = draft.stored(record.index, kept)
    part = draft.columns(record.index, KEYS).take(pa.array(kept))
    stem = f"{part_stem(record.index)}-unique"
    files = part_files(plan.layout, stem, part, vectors, scale, plan.metadata)
    written: dict[str, FileRecord] = {}
    for name, data in files.items():
        draft.storage.write_bytes(draft.key(name), data)
        written[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
    low, high = id_range(part["id"])
    return record.model_copy(update={"rows": len(kept), "files": written, "id_min": low, "id_max": high})


def too_many_bad(bad: int, read: int, reasons: Mapping[str, int], max_bad_fraction: float, sample: str) -> DataError:
    """Return the error to raise if a catalogue has too many bad rows."""
    top = Counter(reasons).most_common(_TOP_REASONS)
    return DataError(
        f"{bad:,} of {read:,} rows of the catalogue are bad"
        + (": " + ", ".join(f"{reason} ({count:,})" for reason, count in top) if top else ""),
        expected=f"at most {max_bad_fraction:.1%} (embed.catalogue.max_bad_fraction), and at least one good row",
        next_command=f"inspect the samples in {sample}, then fix the catalogue and embed it in a new cycle, or raise"
        " --embed.catalogue.max-bad-fraction",
    )


def report_totals(ctx: StageContext, vectors: VectorSet, result: StageResult) -> None:
    """Print the totals of the whole catalogue, and emit an event if rows were quarantined."""
    info, counts = vectors.info, vectors.info.counts
    if counts.bad:
        ctx.events.emit(EventName.ROWS_QUARANTINED, rows=counts.bad, reasons=info.reasons)
    bad = f" | {counts.bad:,} bad: " + ", ".join(f"{name} {n:,}" for name, n in info.reasons.items())
    deleted = "" if info.deleted is None else f", {info.deleted:,} deleted"
    chunked = f", {counts.chunked:,} in chunks" if counts.chunked else ""
    Console().info(  # not ctx.console, because the rank that finishes last may not be rank 0
        f"embed: {info.rows:,} vectors of {info.layout.dim} x {info.layout.dtype} in {len(info.parts)} parts, "
        f"{format_bytes(vectors.manifest.size_bytes)} | {counts.embedded:,} embedded, {counts.carried:,} carried over"
        f"{deleted}{bad if counts.bad else ''} | {counts.truncated:,} texts cut{chunked} | "
        f"{format_duration((result.finished - result.started).total_seconds())} | "
        f"{ctx.workspace.uri(vectors.prefix)}"
    )


def totals(vectors: VectorSet) -> dict[str, Figure]:
    """Return the metrics of the whole catalogue."""
    info = vectors.info
    counts: dict[str, Figure] = {f"rows_{name}": value for name, value in info.counts if name != "tokens"}
    return {
        "rows": info.rows,
        **counts,
        "rows_deleted": info.deleted,
        "tokens": info.counts.tokens,
        "parts": len(info.parts),
        "size_bytes": vectors.manifest.size_bytes,
    }
