"""Parts: the rows of one work shard with their vectors, and the record of what became of them."""

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from pipeline.core.arrays import Float32s, Int64s
from pipeline.core.errors import NumericError
from pipeline.data.rows import BadRow, quarantined
from pipeline.data.token_sets import QuarantinedRow
from pipeline.data.tokenizer import Tokens
from pipeline.embed.carry_over import take_over
from pipeline.embed.catalogue import ID_TYPES
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.texts import DUPLICATE_ID, Window
from pipeline.embed.vectors import (
    PartCounts,
    PartRows,
    Stored,
    VectorLayout,
    VectorSet,
    metadata_of,
    part_files,
    shorten_vectors,
    to_stored,
    vectors_prefix,
)
from pipeline.io.parts import Part, Parts
from pipeline.io.storage import Storage


@dataclass
class OpenPart:
    """Rows of one work shard while the part is made: rows come in as they are read, vectors as the device gives them.

    Args:
        room: rows of the shard, of which some may turn out bad.
        quarantine_rows: bad rows kept at most.
    """

    index: int
    layout: VectorLayout
    room: int
    quarantine_rows: int

    def __post_init__(self) -> None:
        self.counts, self.reasons, self.bad = Counter[str](), Counter[str](), list[BadRow]()
        self.rows, self._windows, self._seen = 0, list[Window](), set[Any]()
        # Memory is taken as rows are filled in.
        self._vectors = np.empty((self.room, self.layout.dim), dtype=self.layout.numpy_dtype)
        self._scale = np.empty(self.room, dtype=np.float32) if self.layout.has_scale else None

    def add(self, window: Window) -> tuple[Tokens, Int64s]:
        """Take rows in; the tokens to embed, and the row of this part that each of their vectors belongs to."""
        self.counts["read"] += window.rows.num_read
        self._add_bad(window.rows.bad)
        window = self._without_duplicates(window)
        fresh = np.flatnonzero(window.place < 0)
        self.counts["embedded"] += len(fresh)
        self.counts["carried"] += len(window.place) - len(fresh)
        self.counts["known"] += int(window.known.sum())
        self.counts["truncated"] += int(window.truncated.sum())
        self.counts["chunked"] += int(window.chunked.sum())
        self.counts["tokens"] += len(window.tokens.ids)
        target = fresh + self.rows
        self.rows += len(window.place)
        self._windows.append(window)
        return window.tokens, target

    def fill(self, rows: Int64s, vectors: Float32s) -> None:
        """Vectors [N, D] of rows [N], cut and converted. Raises NumericError for what is no number."""
        if not np.isfinite(vectors).all():
            bad = rows[~np.isfinite(vectors).all(axis=1)]
            raise NumericError(
                f"{len(bad)} vectors of part {self.index} hold NaN or infinity, the first in row {bad[0]}",
                expected="finite numbers",
                next_command="--embed.precision fp32; if it stays, the checkpoint has diverged",
            )
        self._put(rows, *to_stored(shorten_vectors(vectors, self.layout.dim), self.layout))

    def carry(self, earlier: VectorSet) -> None:
        """Take the vectors over that an earlier cycle has."""
        place = np.concatenate([np.zeros(0, dtype=np.int64), *(window.place for window in self._windows)])
        if len(taken := np.flatnonzero(place >= 0)):
            self._put(taken, *take_over(earlier, place[taken]))

    def finished(self) -> PartRows:
        """All rows, once every vector is in."""
        rows, empty = [window.rows for window in self._windows], np.zeros(0, dtype=np.uint64)
        return PartRows(
            ids=pa.concat_arrays([pa.array([], ID_TYPES[self.layout.id_type]), *(one.ids for one in rows)]),
            vectors=self._vectors[: self.rows],
            scale=None if self._scale is None else self._scale[: self.rows],
            id_hash=np.concatenate([empty, *(one.id_hash for one in rows)]),
            text_hash=np.concatenate([empty, *(one.text_hash for one in rows)]),
        )

    def _put(self, rows: Int64s, vectors: Stored, scale: Float32s | None) -> None:
        self._vectors[rows] = vectors
        if self._scale is not None and scale is not None:
            self._scale[rows] = scale

    def _add_bad(self, rows: Sequence[BadRow]) -> None:
        for row in rows:
            self.counts["bad"] += row.count
            self.reasons[row.reason] += row.count
        self.bad += rows[: self.quarantine_rows - len(self.bad)]

    def _without_duplicates(self, window: Window) -> Window:
        """Rows whose id has not been in this part; the others are bad rows."""
        rows = window.rows
        ids = rows.ids.to_pylist()
        new = set(ids)
        if len(new) == len(ids) and self._seen.isdisjoint(new):
            self._seen |= new
            return window
        keep, bad = np.ones(len(ids), dtype=np.bool_), list[BadRow]()
        for place, name in enumerate(ids):
            if name in self._seen:
                keep[place] = False
                bad.append(BadRow(rows.file, int(rows.rows[place]), DUPLICATE_ID, {"id": name}))
            self._seen.add(name)
        self._add_bad(bad)
        return window.keep(keep)


class PartRecord(Part):
    """One finished part."""

    rows: int
    id_min: str
    id_max: str
    counts: PartCounts
    reasons: dict[str, int]
    quarantined: tuple[QuarantinedRow, ...]
    seconds: float = Field(description="Of its worker")


def stem_of(index: int) -> str:
    return f"part-{index:05d}"


def records_prefix(plan: EmbedPlan) -> str:
    """Records are those of one plan: an earlier one's prove nothing."""
    return f"cycles/{plan.cycle}/embed/parts-{plan.fingerprint[:16]}"


def parts_of(storage: Storage, plan: EmbedPlan) -> Parts[PartRecord]:
    """Return the store of the parts of a plan. Files of an earlier plan of the cycle are replaced."""

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
        names=lambda index: plan.layout.names(stem_of(index)),
        is_ours=is_of_plan,
    )


def commit_part(storage: Storage, plan: EmbedPlan, part: OpenPart, *, seconds: float) -> PartRecord:
    """Publish the files of one part, then its record. Raises what storage raises; may be repeated."""
    rows = part.finished()
    low, high = id_range(rows.ids)
    record = PartRecord(
        index=part.index,
        rows=len(rows.ids),
        id_min=low,
        id_max=high,
        counts=PartCounts(**part.counts),
        reasons=dict(sorted(part.reasons.items())),
        quarantined=quarantined(part.bad),
        seconds=round(seconds, 3),
    )
    files = part_files(plan.layout, stem_of(part.index), rows, plan.metadata)
    return parts_of(storage, plan).commit(record, files)


def id_range(ids: pa.Array) -> tuple[str, str]:
    """Smallest and largest id as text; empty for no ids."""
    found = pc.min_max(ids)
    return tuple("" if found[end].as_py() is None else str(found[end].as_py()) for end in ("min", "max"))  # type: ignore[return-value]


def load_records(storage: Storage, plan: EmbedPlan) -> list[PartRecord]:
    """Return the records of all parts, in order, with the first `plan.quarantine_rows` bad rows of them all.

    Raises TransientError when a record is missing, DataError when one is damaged.
    """
    records: list[PartRecord] = []
    room = plan.quarantine_rows
    for record in parts_of(storage, plan).read_all(range(len(plan.shards))):
        records.append(record.model_copy(update={"quarantined": record.quarantined[:room]}))
        room -= len(records[-1].quarantined)
    return records
