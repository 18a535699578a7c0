"""Reading the catalogue again: every id with its text is in its part, in order, and nothing else is."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from pipeline.core.arrays import Float32s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import format_bytes
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, pieces
from pipeline.embed.carry import index_of, take_over
from pipeline.embed.catalogue import WorkShard
from pipeline.embed.engine import counted
from pipeline.embed.finish import find_duplicates
from pipeline.embed.flow import TextEmbedder
from pipeline.embed.index import RowIndex
from pipeline.embed.output import from_stored, metadata_of, shorten_vectors
from pipeline.embed.parts import id_range
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.reading import CatalogueReader, RawWindow
from pipeline.embed.texts import cut_tokens, id_hashes, judge_rows
from pipeline.embed.vector_set import VectorSet, ids_at
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage
from pipeline.proc.pool import WorkerPool

# What a verification found.

MAX_NAMED = 3
"""Problems of one check that are told one by one."""


class Check(BaseModel):
    """One question and its answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    outcome: Literal["pass", "fail", "skipped"]
    seen: str
    figures: dict[str, float] = {}

    def line(self) -> str:
        """`pass     files      5 files, 1.2 MiB`"""
        return f"{self.outcome:<8} {self.name:<10} {self.seen}"


class VerifyReport(BaseModel):
    """All checks of one cycle's vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cycle: str
    rows: int
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.outcome == "fail")


def judge(name: str, problems: list[str], seen: str, figures: dict[str, float] | None = None) -> Check:
    """A failure that names the first problems, else a pass that says what was looked at."""
    if not problems:
        return Check(name=name, outcome="pass", seen=seen, figures=figures or {})
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return Check(name=name, outcome="fail", seen="; ".join(problems[:MAX_NAMED]) + more, figures=figures or {})


def skipped(name: str, reason: str) -> Check:
    return Check(name=name, outcome="skipped", seen=reason)


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """A part that cannot be read fails the check that needed it, not all the others."""
    try:
        return check()
    except DataError as error:
        return Check(name=name, outcome="fail", seen=error.seen)


# Checks that need the vectors alone: files, schema, numbers, ids.

_MAX_DUPLICATES = 1000


def check_files(vectors: VectorSet) -> Check:
    """Sizes and checksums of every file, by reading all bytes."""
    manifest = verify_dir(vectors.storage, vectors.prefix, deep=True)
    return judge(
        "files", [], f"{len(manifest.files)} files, {format_bytes(manifest.size_bytes)}, every byte as written"
    )


def check_numbers(vectors: VectorSet, norm_tolerance: float, stop: StopSignal) -> Check:
    """Schema and metadata, rows, ids with their hashes and ranges; finite vectors of length one."""
    problems: list[str] = []
    worst = 0.0
    with progress("verifying vectors", vectors.info.rows, "rows") as advance:
        for part, info in enumerate(vectors.info.parts):
            name = info.files[-1]
            problems += [f"{name}: {problem}" for problem in _schema_problems(vectors, part)]
            ids: list[pa.Array] = []
            for batch, values in vectors.blocks(part):
                stop.raise_if_set("verifying vectors")
                distance, found = _block_problems(batch, values, norm_tolerance)
                worst = max(worst, distance)
                problems += [f"{name}: {problem}" for problem in found]
                ids.append(batch["id"])
                advance(len(batch))
            rows = sum(map(len, ids))
            if rows != info.rows:
                problems.append(f"{name}: {rows:,} rows, its manifest says {info.rows:,}")
            elif rows and id_range(pa.concat_arrays(ids)) != (info.id_min, info.id_max):
                problems.append(f"{name}: its ids are not from {info.id_min!r} to {info.id_max!r}")
    seen = f"{vectors.info.rows:,} vectors finite, length at most {worst:.1e} from 1"
    return judge("numbers", problems, seen, {"max_norm_distance": worst})


def _schema_problems(vectors: VectorSet, part: int) -> list[str]:
    schema = vectors.schema(part)
    expected = vectors.layout.columns(with_vectors=vectors.layout.format == "parquet")
    problems = []
    if [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in expected]:
        problems.append(f"columns {schema.names}, expected {expected.names}")
    metadata = metadata_of(schema)
    for name, value in {"plan": vectors.info.plan, "checkpoint_digest": vectors.info.model.digest}.items():
        if metadata.get(name) != value:
            problems.append(f"its {name} is {metadata.get(name)}, that of the manifest {value}")
    return problems


def _block_problems(batch: pa.RecordBatch, values: Float32s, norm_tolerance: float) -> tuple[float, list[str]]:
    """Largest distance of a length from one, and what is wrong."""
    ids, problems = batch["id"].to_pylist(), []
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        problems.append(f"the vector of {ids[bad[0]]!r} and {len(bad) - 1} others are not finite")
    with np.errstate(invalid="ignore"):
        distance = np.nan_to_num(np.abs(np.linalg.norm(values.astype(np.float64), axis=1) - 1.0))
    far = np.flatnonzero(distance > norm_tolerance)
    if len(far):
        problems.append(f"the vector of {ids[far[0]]!r} and {len(far) - 1} others are not of length one")
    wrong = np.flatnonzero(id_hashes(ids) != batch["id_hash"].to_numpy())
    if len(wrong):
        problems.append(f"the hash of id {ids[wrong[0]]!r} is wrong")
    return float(distance.max(initial=0.0)), problems


def check_unique(vectors: VectorSet, scratch: Path, stop: StopSignal) -> Check:
    """No id is in two rows, of one part or of several."""
    problems: list[str] = []
    parts = range(len(vectors.info.parts))
    for part in parts:
        hashes = vectors.hashes(part)[0]
        if len(np.unique(hashes)) != len(hashes):
            problems.append(f"{vectors.info.parts[part].files[-1]} has an id twice")
    found = find_duplicates(
        (vectors.hashes(part)[0] for part in parts),
        lambda part, rows: ids_at(vectors, part, rows),
        folder=scratch / "embed" / f"verify-{vectors.info.plan[:16]}",
        expected=vectors.info.rows,
        limit=_MAX_DUPLICATES,
        stop=stop,
    )
    for part, rows in found.items():
        name = ids_at(vectors, part, rows[:1])[0]
        problems.append(f"{len(rows)} ids of {vectors.info.parts[part].files[-1]} are there before, such as {name!r}")
    return judge("unique", problems, f"{vectors.info.rows:,} ids, each once")


# How vectors have moved since an earlier cycle.

SAMPLE_ROWS = 100_000
"""Common rows whose vectors are compared; which ids are common is looked up for all."""
_SAME = 0.9999


def check_drift(
    vectors: VectorSet, previous: VectorSet, scratch: Path, min_cosine: float | None, stop: StopSignal
) -> Check:
    """Ids in common with an earlier cycle, the mean cosine of their vectors, and the share of those that moved."""
    name = previous.info.cycle
    if previous.layout.dim != vectors.layout.dim:
        return skipped("drift", f"cycle {name} has {previous.layout.dim} dimensions, this one {vectors.layout.dim}")
    index = RowIndex(index_of(previous, scratch, stop))
    step = np.uint64(max(1, vectors.info.rows // SAMPLE_ROWS))
    common = 0
    cosines: list[Float32s] = []
    with progress("comparing with the previous cycle", vectors.info.rows, "rows") as advance:
        for part in range(len(vectors.info.parts)):
            stop.raise_if_set("comparing with the previous cycle")
            hashes = vectors.hashes(part)[0]
            place = index.find(hashes)
            common += int((place >= 0).sum())
            rows = np.flatnonzero((place >= 0) & (hashes % step == 0))
            ours, theirs = from_stored(*vectors.stored(part, rows)), from_stored(*take_over(previous, place[rows]))
            cosines.append(cosine(ours, theirs))
            advance(len(hashes))
    found = np.concatenate(cosines)
    added, gone = vectors.info.rows - common, previous.info.rows - common
    ids = f"{common:,} ids in common with cycle {name}, {added:,} new, {gone:,} gone"
    if not len(found):
        return judge("drift", [], ids)
    mean, moved = float(found.mean()), float((found < _SAME).mean())
    seen = f"{ids}; mean cosine {mean:.4f}, {moved:.1%} of the vectors moved"
    too_far = [f"{seen}; expected at least {min_cosine}"] if min_cosine is not None and mean < min_cosine else []
    return judge("drift", too_far, seen, {"mean_cosine": mean, "moved_share": moved, "common_ids": common})


def cosine(left: Float32s, right: Float32s) -> Float32s:
    """Of two vectors in each row [N, D]."""
    lengths = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    found: Float32s = ((left * right).sum(axis=1) / np.maximum(lengths, 1e-12)).astype(np.float32)
    return found.clip(-1.0, 1.0)


# Whether an approximate index over the stored vectors still finds what exact search finds.

NEIGHBOURS = 10
_BATCH = 1000


def check_ann(vectors: VectorSet, *, rows: int, queries: int, min_recall: float, stop: StopSignal) -> Check:
    """Recall@10 of a usearch (HNSW) index with its default settings, over a sample spread by the ids' hashes."""
    if not queries:
        return skipped("ann", "embed.verify.ann_queries is 0")
    if importlib.util.find_spec("usearch") is None:
        return skipped("ann", "usearch is not installed: pip install 'trnpipe[ann]'")
    from usearch.index import Index

    values = _sample(vectors, rows, stop)
    if len(values) <= NEIGHBOURS:
        return skipped("ann", f"{len(values)} vectors, more than {NEIGHBOURS} are needed")
    index = Index(ndim=values.shape[1], metric="ip", dtype="f32")
    with progress("building an ANN index", len(values), "vectors") as advance:
        for start in range(0, len(values), _BATCH):
            stop.raise_if_set("building an ANN index")
            part = values[start : start + _BATCH]
            index.add(np.arange(start, start + len(part)), part)
            advance(len(part))
    asked = values[:: max(1, len(values) // queries)][:queries]
    exact = np.argpartition(-(asked @ values.T), NEIGHBOURS, axis=1)[:, :NEIGHBOURS]
    found = np.asarray(index.search(asked, NEIGHBOURS).keys).reshape(len(asked), -1)
    hits = sum(len(set(a) & set(b)) for a, b in zip(exact.tolist(), found.tolist(), strict=True))
    recall = hits / exact.size
    seen = f"recall@{NEIGHBOURS} {recall:.3f} of {len(asked)} vectors among {len(values):,}"
    return judge(
        "ann", [f"{seen}; expected at least {min_recall}"] if recall < min_recall else [], seen, {"recall": recall}
    )


def _sample(vectors: VectorSet, rows: int, stop: StopSignal) -> Float32s:
    step = np.uint64(max(1, vectors.info.rows // rows))
    held = [np.zeros((0, vectors.layout.dim), dtype=np.float32)]
    with progress("sampling vectors", vectors.info.rows, "rows") as advance:
        for part in range(len(vectors.info.parts)):
            for batch, values in vectors.blocks(part):
                stop.raise_if_set("sampling vectors")
                held.append(values[batch["id_hash"].to_numpy() % step == 0])
                advance(len(batch))
    return np.concatenate(held)


_MAX_MISSING = 100_000


@dataclass(frozen=True)
class Picked:
    """A text of the sample."""

    part: int
    id_hash: int
    text: str


@dataclass(frozen=True)
class _Task:
    shard: WorkShard
    raw: RawWindow


@dataclass(frozen=True)
class _Answer:
    """Usable rows of a window."""

    shard: WorkShard
    id_hash: UInt64s
    text_hash: UInt64s
    num_rows: int
    """Those that the filter leaves out included."""
    num_read: int
    num_bad: int
    picked: tuple[Picked, ...]


@dataclass
class _Expected:
    """What one part must hold."""

    index: int
    id_hash: list[UInt64s] = field(default_factory=list)
    text_hash: list[UInt64s] = field(default_factory=list)

    def arrays(self) -> tuple[UInt64s, UInt64s]:
        """Of ids that are twice in the shard the first counts."""
        ids, texts = np.concatenate(self.id_hash), np.concatenate(self.text_hash)
        first = np.sort(np.unique(ids, return_index=True)[1])
        return ids[first], texts[first]


Context = tuple[EmbedPlan, int]
"""The plan, and the step of the sample."""


class Workers(Protocol):
    """What runs the tasks, in order."""

    def run_in_order(self, tasks: Iterator[_Task]) -> Iterator[_Answer]: ...


OpenWorkers = Callable[[Context], AbstractContextManager[Workers]]


def judge_processes(num_workers: int, stop: StopSignal) -> OpenWorkers:
    """Worker processes, one per core for 0."""
    return lambda context: WorkerPool[Context, _Task, _Answer](
        judge_again, context, num_workers=num_workers, stop=stop, doing="reading the catalogue again"
    )


def judge_again(context: Context, task: _Task) -> _Answer:
    """Run in a worker process. Every row whose hash is a multiple of the step is in the sample."""
    plan, step = context
    rows = judge_rows(task.raw, plan.layout.id_type, plan.catalogue.columns.filter, plan.max_tokens)
    chosen = np.flatnonzero(rows.id_hash % np.uint64(step) == 0).tolist() if step else []
    picked = tuple(Picked(task.shard.index, int(rows.id_hash[row]), rows.texts[row]) for row in chosen)
    num_rows = len(task.raw.batch())
    return _Answer(task.shard, rows.id_hash, rows.text_hash, num_rows, rows.num_read, len(rows.bad), picked)


def check_catalogue(
    vectors: VectorSet, plan: EmbedPlan, catalogue: Storage, *, sample: int, workers: OpenWorkers
) -> tuple[Check, list[Picked]]:
    """Hold the parts against the catalogue; also about `sample` of its texts. Raises DataError when it has changed."""
    step = max(1, vectors.info.rows // sample) if sample else 0
    compare = _Comparison(vectors)
    picked: list[Picked] = []
    open_part: _Expected | None = None
    with (
        CatalogueReader(plan.catalogue, catalogue, plan.window_rows) as reader,
        workers((plan, step)) as pool,
        progress("reading the catalogue again", plan.catalogue.rows, "rows") as advance,
    ):
        for done in pool.run_in_order(_tasks(plan, reader)):
            advance(done.num_rows)
            if open_part is not None and open_part.index != done.shard.index:
                compare.part(open_part)
                open_part = None
            open_part = open_part or _Expected(done.shard.index)
            open_part.id_hash.append(done.id_hash)
            open_part.text_hash.append(done.text_hash)
            compare.num_read += done.num_read
            compare.num_bad += done.num_bad
            picked += done.picked
    if open_part is not None:
        compare.part(open_part)
    return compare.result(plan), picked[: 2 * sample]


def _tasks(plan: EmbedPlan, reader: CatalogueReader) -> Iterator[_Task]:
    for shard in plan.shards:
        for raw in reader.read(shard):
            yield _Task(shard, raw)


class _Comparison:
    """Adds up what differs."""

    def __init__(self, vectors: VectorSet) -> None:
        self._vectors = vectors
        self._missing: list[UInt64s] = []
        self._problems: list[str] = []
        self.num_read = self.num_bad = 0

    def part(self, expected: _Expected) -> None:
        ids, texts = expected.arrays()
        found_ids, found_texts = self._vectors.hashes(expected.index)
        there = np.isin(ids, found_ids)
        self.num_bad += sum(map(len, expected.id_hash)) - len(ids)
        name = self._vectors.info.parts[expected.index].files[-1]
        if not there.all():
            self._missing.append(ids[~there])  # an earlier part may have them
        if not np.array_equal(ids[there], found_ids):
            extra = int((~np.isin(found_ids, ids)).sum())
            self._problems.append(
                f"{name}: {extra:,} ids are not in the catalogue" if extra else f"{name}: other order"
            )
        elif changed := int((texts[there] != found_texts).sum()):
            self._problems.append(f"{name}: {changed:,} vectors are of another text")

    def result(self, plan: EmbedPlan) -> Check:
        counts, problems = self._vectors.info.counts, self._problems
        elsewhere = self._found_elsewhere()
        total = sum(map(len, self._missing))
        if total > elsewhere:
            problems.append(f"{total - elsewhere:,} ids of the catalogue have no vector")
        unreadable = sum(plan.catalogue.unreadable.values())
        read, bad = self.num_read + unreadable, self.num_bad + elsewhere + unreadable
        if (read, bad) != (counts.read, counts.bad):
            problems.append(f"{read:,} rows read and {bad:,} bad, the manifest says {counts.read:,} and {counts.bad:,}")
        return judge(
            "catalogue", problems, f"{read - bad:,} ids with their texts, {bad:,} bad rows, as in the catalogue"
        )

    def _found_elsewhere(self) -> int:
        """How many of the missing ids are in another part: duplicates that were taken out."""
        missing = np.concatenate([np.zeros(0, dtype=np.uint64), *self._missing])[:_MAX_MISSING]
        if not len(missing):
            return 0
        found = np.zeros(len(missing), dtype=np.bool_)
        for part in range(len(self._vectors.info.parts)):
            found |= np.isin(missing, self._vectors.hashes(part)[0])
        return int(found.sum())


# Stored vectors against the same texts embedded again, in fp32 on the CPU, whatever device made them.

_WINDOW = 64


def check_sample(
    vectors: VectorSet,
    picked: Sequence[Picked],
    tokenizer: TextTokenizer,
    embedder: TextEmbedder,
    *,
    max_tokens: int,
    min_cosine: float,
) -> Check:
    """The smallest cosine between a stored vector and the one made now."""
    there: list[Picked] = []
    stored = []
    for part in sorted({one.part for one in picked}):
        hashes = vectors.hashes(part)[0]
        order = np.argsort(hashes)
        mine = [one for one in picked if one.part == part]
        wanted = np.array([one.id_hash for one in mine], dtype=np.uint64)
        at = np.minimum(np.searchsorted(hashes, wanted, sorter=order), max(0, len(hashes) - 1))
        found = hashes[order[at]] == wanted if len(hashes) else np.zeros(len(mine), dtype=np.bool_)
        there += [one for one, is_there in zip(mine, found.tolist(), strict=True) if is_there]
        stored.append(from_stored(*vectors.stored(part, order[at[found]])))
    if not there:
        return skipped("sample", "no text was picked")
    tokens = cut_tokens(tokenizer.encode([one.text for one in there]), max_tokens, tokenizer.sep_id)
    fresh = np.concatenate(list(counted(embedder.stream(pieces(tokens, _WINDOW)), "embedding a sample", len(there))))
    cosines = cosine(shorten_vectors(fresh, vectors.layout.dim), np.concatenate(stored))
    least = int(cosines.argmin())
    seen = f"{len(there)} texts embedded again in fp32 on the CPU, cosine at least {cosines[least]:.6f}"
    problems = [
        f"the vector of {there[row].text[:60]!r} has cosine {cosines[row]:.4f} to its recomputation"
        for row in np.flatnonzero(~(cosines >= min_cosine)).tolist()
    ]
    return judge("sample", problems, seen, {"min_cosine": float(cosines[least])})
