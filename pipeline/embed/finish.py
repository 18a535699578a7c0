"""The end of a cycle's embedding, by whichever worker finds all parts there: one look over all of them, one marker.

Several workers may come here at once, or again after a kill: all of them come to the same bytes.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import JsonValue

from pipeline import __version__
from pipeline.context import Figure, StageContext, StageResult
from pipeline.core.arrays import Int64s, UInt64s
from pipeline.core.errors import DataError, TransientError
from pipeline.core.format import format_bytes, format_duration
from pipeline.core.manifest import MANIFEST_NAME, FileRecord, Manifest
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.rows import quarantine_lines
from pipeline.data.token_sets import QuarantinedRow
from pipeline.embed.carry_over import HashSpill, RowIndex, index_of, open_earlier, part_and_row, place_of
from pipeline.embed.parts import PartRecord, id_range, load_records, stem_of
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.texts import DUPLICATE_ID
from pipeline.embed.vectors import (
    KIND,
    QUARANTINE,
    PartCounts,
    PartInfo,
    PartRows,
    VectorSet,
    VectorSetInfo,
    part_files,
    vectors_prefix,
)
from pipeline.io.commit import check_sizes, hash_bytes, read_manifest
from pipeline.io.storage import Storage, join_key, names_in
from pipeline.telemetry.console import Console
from pipeline.telemetry.events import EventName

# Ids that are in more than one part. Within a part they are found as rows are read; this is the look over all.

RECORD = np.dtype([("hash", "<u8"), ("place", "<i8")])


def find_duplicates(
    hashes: Iterable[UInt64s],
    ids_of: Callable[[int, Int64s], list[Any]],
    *,
    folder: Path,
    expected: int,
    limit: int,
    stop: StopSignal,
) -> dict[int, Int64s]:
    """Rows, by part, whose id is in an earlier part: the first in the order of the catalogue stays.

    Args:
        hashes: those of the ids of each part, in order.
        ids_of: the ids of some rows of a part; asked only where hashes meet.
        folder: for sorting on disk, in a folder of its own there.
        limit: give up once more rows than these are found; the result then has at least so many.
    Memory: a part's hashes, a file of the spill, and the ids of rows whose hash is not the only one.
    """
    places, found = [np.zeros(0, dtype=np.int64)], 0
    with (
        HashSpill(folder, RECORD, expected) as spill,
        progress("looking for ids in several parts", 2 * expected, "rows") as advance,  # read, then sorted
    ):
        for part, values in enumerate(hashes):
            stop.raise_if_set("looking for ids in several parts")
            advance(len(values))
            records = np.empty(len(values), dtype=RECORD)
            records["hash"], records["place"] = values, place_of(part, np.arange(len(values), dtype=np.int64))
            spill.add(records)
        for records in spill.sorted():
            stop.raise_if_set("looking for ids in several parts")
            advance(len(records))
            starts = np.flatnonzero(np.diff(records["hash"], prepend=~records["hash"][:1]))
            sizes = np.diff(starts, append=len(records))
            places.append(records["place"][np.repeat(sizes > 1, sizes)])
            found += len(records) - len(starts)
            if found > limit:
                break
    parts, rows = part_and_row(_later_ones(np.concatenate(places), ids_of))
    return {part: rows[parts == part] for part in np.unique(parts).tolist()}


def _later_ones(places: Int64s, ids_of: Callable[[int, Int64s], list[Any]]) -> Int64s:
    """Places whose id was at one before them; equal hashes alone prove nothing. In: by hash, then by place."""
    parts, rows = part_and_row(places)
    names = np.empty(len(places), dtype=object)
    for part in np.unique(parts).tolist():
        chosen = np.flatnonzero(parts == part)
        chosen = chosen[np.argsort(rows[chosen])]
        names[chosen] = ids_of(part, rows[chosen])
    later, seen = list[int](), set[Any]()
    for place, name in zip(places.tolist(), names.tolist(), strict=True):
        if name in seen:
            later.append(place)
        seen.add(name)
    return np.array(sorted(later), dtype=np.int64)


_TOP_REASONS = 3


def finish(
    workspace: Storage, plan: EmbedPlan, scratch: Path, stop: StopSignal, *, max_bad_fraction: float
) -> VectorSet:
    """Publish the manifest over all parts, which must be there.

    Ids in several parts are taken out of the later ones, whose files appear under another name. Raises DataError when
    too many rows are bad, or none is good.
    """
    try:
        return _finish(workspace, plan, scratch, stop, max_bad_fraction=max_bad_fraction)
    except (DataError, TransientError):
        manifest = read_manifest(workspace, vectors_prefix(plan.cycle))
        if manifest is None or manifest.kind != KIND:
            raise
        theirs = VectorSet(workspace, vectors_prefix(plan.cycle), manifest)
        if theirs.info.plan != plan.fingerprint:
            raise
        return theirs  # another worker was first, and removed what it had written again while this one read it


def _finish(
    workspace: Storage, plan: EmbedPlan, scratch: Path, stop: StopSignal, *, max_bad_fraction: float
) -> VectorSet:
    prefix = vectors_prefix(plan.cycle)
    records = load_records(workspace, plan)
    draft = VectorSet(workspace, prefix, _manifest(plan, records, PartCounts(), {}, None))
    earlier = open_earlier(workspace, plan.carry_from) if plan.carry_from else None
    limit = int(max_bad_fraction * draft.info.counts.read)
    bad = [*plan.catalogue.unreadable_sample, *(row for record in records for row in record.quarantined)]
    dropped = PartCounts()
    duplicates = find_duplicates(
        (draft.hashes(part)[0] for part in range(len(draft.info.parts))),
        draft.ids_at,
        folder=scratch / "embed",
        expected=draft.info.rows,
        limit=limit,
        stop=stop,
    )
    for index, rows in duplicates.items():
        stop.raise_if_set("taking out duplicate ids")
        file, shown = draft.info.parts[index].files[-1], rows[: max(0, plan.quarantine_rows - len(bad))]
        for row, name in zip(shown.tolist(), draft.ids_at(index, shown), strict=True):
            bad.append(QuarantinedRow(file=file, row=row, reason=DUPLICATE_ID, content={"id": name}))
        dropped += PartCounts(bad=len(rows))
        if earlier is not None:
            _, known = RowIndex(index_of(earlier, scratch, stop)).look_up(draft.hashes(index)[0][rows])
            dropped += PartCounts(known=-int(known.sum()))
        records[index] = _without(draft, plan, records[index], rows)
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
    workspace.write_if_absent(join_key(prefix, MANIFEST_NAME), manifest.to_json())  # or another worker was first
    # Files of parts that were written again, or that an earlier plan left.
    superseded = {name for name in names_in(workspace, prefix) if name.startswith("part-")} - manifest.files.keys()
    workspace.delete(join_key(prefix, name) for name in sorted(superseded))
    return result


def _manifest(
    plan: EmbedPlan, records: list[PartRecord], dropped: PartCounts, files: dict[str, FileRecord], deleted: int | None
) -> Manifest:
    """`dropped`: what to add for rows that were taken out because an earlier part has their id."""
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


def _without(draft: VectorSet, plan: EmbedPlan, record: PartRecord, rows: Int64s) -> PartRecord:
    """Write a part again without some rows, under another name: the first files stay what their record says."""
    kept = np.setdiff1d(np.arange(record.rows, dtype=np.int64), rows)
    vectors, scale = draft.stored(record.index, kept)
    id_hash, text_hash = draft.hashes(record.index)
    names = [batch["id"] for batch in draft.columns(record.index, ["id"])]
    ids = pa.concat_arrays(names).take(kept)
    part = PartRows(ids, vectors, scale, id_hash[kept], text_hash[kept])
    files = part_files(plan.layout, f"{stem_of(record.index)}-unique", part, plan.metadata)
    there: dict[str, FileRecord] = {}
    for name, data in files.items():
        draft.storage.write_bytes(draft.key(name), data)
        there[name] = FileRecord(size_bytes=len(data), xxh3_128=hash_bytes(data))
    low, high = id_range(ids)
    return record.model_copy(update={"rows": len(kept), "files": there, "id_min": low, "id_max": high})


def too_many_bad(bad: int, read: int, reasons: Mapping[str, int], max_bad_fraction: float, sample: str) -> DataError:
    """The one wording for a catalogue that is refused."""
    top = Counter(reasons).most_common(_TOP_REASONS)
    return DataError(
        f"{bad:,} of {read:,} rows of the catalogue are bad"
        + (": " + ", ".join(f"{reason} ({count:,})" for reason, count in top) if top else ""),
        expected=f"at most {max_bad_fraction:.1%} (embed.catalogue.max_bad_fraction), and one good row",
        next_command=f"look at {sample}; repair the catalogue and embed it in a new cycle, or raise"
        " --embed.catalogue.max-bad-fraction",
    )


def tell_end(ctx: StageContext, vectors: VectorSet, result: StageResult) -> None:
    info, counts = vectors.info, vectors.info.counts
    if counts.bad:
        ctx.events.emit(EventName.ROWS_QUARANTINED, rows=counts.bad, reasons=info.reasons)
    bad = f" | {counts.bad:,} bad: " + ", ".join(f"{name} {n:,}" for name, n in info.reasons.items())
    deleted = "" if info.deleted is None else f", {info.deleted:,} deleted"
    chunked = f", {counts.chunked:,} in chunks" if counts.chunked else ""
    Console().info(  # also where another rank than the first was last
        f"embed: {info.rows:,} vectors of {info.layout.dim} x {info.layout.dtype} in {len(info.parts)} parts, "
        f"{format_bytes(vectors.manifest.size_bytes)} | {counts.embedded:,} embedded, {counts.carried:,} carried over"
        f"{deleted}{bad if counts.bad else ''} | {counts.truncated:,} texts cut{chunked} | "
        f"{format_duration((result.finished - result.started).total_seconds())} | "
        f"{ctx.workspace.uri(vectors.prefix)}"
    )


def totals(vectors: VectorSet) -> dict[str, Figure]:
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
