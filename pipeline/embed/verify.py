"""Checks of committed vectors: whether they are whole, right and those of their catalogue, by what is stored alone.

Files, numbers and ids need the vectors alone; then the catalogue is read again, and a sample of it embedded again.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pyarrow as pa

from pipeline.core.arrays import Float32s, UInt64s
from pipeline.core.errors import DataError
from pipeline.core.format import format_bytes
from pipeline.core.progress import progress
from pipeline.core.stop import StopSignal
from pipeline.data.tokenizer import TextTokenizer, token_windows
from pipeline.embed.catalogue import TextRules, cut_tokens, id_hashes, judge_again, read_shard
from pipeline.embed.digest import VectorCounts, VerifyCheck, VerifyDigest
from pipeline.embed.engine import Embed, with_progress
from pipeline.embed.parts import find_duplicates, id_range
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.vectors import VectorSet, from_stored, metadata_of, shorten_vectors
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage
from pipeline.proc.pool import run_tasks

MAX_NAMED = 3
"""Problems of one check that are named one by one."""
NORM_TOLERANCE = 0.01
"""Largest distance of a stored vector's length from one: int8 comes to 0.003."""
SAMPLE_TEXTS = 256
"""Texts that are embedded again."""
MIN_COSINE = 0.999
"""Lowest cosine between a stored vector and its recomputation: int8 comes to 0.99998."""


def digest_of(checks: Sequence[VerifyCheck], vectors: VectorSet) -> VerifyDigest:
    """Return all checks of one cycle's vectors as a record for pages."""
    info = vectors.info
    sample = next((check for check in checks if check.name == "sample"), None)
    return VerifyDigest(
        cycle=info.cycle,
        passed=all(check.outcome != "fail" for check in checks),
        model_digest=info.model.digest,
        vectors_digest=vectors.manifest.digest,
        previous=info.previous,
        rows=info.rows,
        counts=VectorCounts(
            embedded=info.counts.embedded,
            carried=info.counts.carried,
            new=None if info.carried_from is None else info.rows - info.counts.known,
            gone=info.deleted,
        ),
        recompute_min_cosine=sample.figures.get("min_cosine") if sample else None,
        checks=tuple(checks),
    )


def judge(name: str, problems: Sequence[str], seen: str, figures: dict[str, float] | None = None) -> VerifyCheck:
    """Return a failure that names the first problems, else a pass that says what was checked. JSON has no NaN."""
    kept = {one: value for one, value in (figures or {}).items() if math.isfinite(value)}
    if not problems:
        return VerifyCheck(name=name, outcome="pass", seen=seen, figures=kept)
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return VerifyCheck(name=name, outcome="fail", seen="; ".join(problems[:MAX_NAMED]) + more, figures=kept)


def skipped(name: str, reason: str) -> VerifyCheck:
    return VerifyCheck(name=name, outcome="skipped", seen=reason)


def run_check(name: str, check: Callable[[], VerifyCheck]) -> VerifyCheck:
    """Make a check. A part that cannot be read fails the check that needed it, not the others."""
    try:
        return check()
    except DataError as error:
        return VerifyCheck(name=name, outcome="fail", seen=error.seen)


# Checks that need the vectors alone: files, schema, numbers, ids.

_MAX_DUPLICATES = 1000


def check_files(vectors: VectorSet) -> VerifyCheck:
    """Check sizes and checksums of every file, by reading all bytes."""
    found = verify_dir(vectors.storage, vectors.prefix, deep=True)
    return judge("files", [], f"{len(found.files)} files, {format_bytes(found.size_bytes)}, every byte as written")


def check_numbers(vectors: VectorSet, stop: StopSignal) -> VerifyCheck:
    """Check schema and metadata, rows, ids with their hashes and ranges; finite vectors of length one."""
    problems: list[str] = []
    worst, differ, texts_differ = 0.0, False, False
    first: tuple[Float32s, UInt64s] | None = None
    if (rows := sum(part.rows for part in vectors.info.parts)) != vectors.info.rows:
        problems.append(f"its parts have {rows:,} rows, the manifest says {vectors.info.rows:,}")
    with progress("verifying vectors", vectors.info.rows, "rows") as advance:
        for part, info in enumerate(vectors.info.parts):
            name, schema = info.files[-1], vectors.schema(part)
            expected = vectors.layout.columns(with_vectors=vectors.layout.format == "parquet")
            if [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in expected]:
                problems.append(f"{name}: columns {schema.names}, expected {expected.names}")
                continue
            metadata = metadata_of(schema)
            for field, value in {"plan": vectors.info.plan, "checkpoint_digest": vectors.info.model.digest}.items():
                if (found := metadata.get(field)) != value:
                    problems.append(f"{name}: its {field} is {found}, that of the manifest {value}")
            ids: list[pa.Array] = []
            for batch, values in vectors.blocks(part):
                stop.raise_if_set("verifying vectors")
                names = batch["id"].to_pylist()
                with np.errstate(invalid="ignore"):
                    distance = np.nan_to_num(np.abs(np.linalg.norm(values.astype(np.float64), axis=1) - 1.0))
                worst = max(worst, float(distance.max(initial=0.0)))
                infinite, far = ~np.isfinite(values).all(axis=1), distance > NORM_TOLERANCE
                for bad, what in ((infinite, "are not finite"), (far, "are not of length one")):
                    if bad.any():
                        others = int(bad.sum()) - 1
                        problems.append(f"{name}: the vector of {names[bad.argmax()]!r} and {others} others {what}")
                if (wrong := id_hashes(names) != batch["id_hash"].to_numpy()).any():
                    problems.append(f"{name}: the hash of id {names[wrong.argmax()]!r} is wrong")
                texts = batch["text_hash"].to_numpy()
                first = first or (values[:1].copy(), texts[:1].copy())
                differ = differ or bool((values != first[0]).any())
                texts_differ = texts_differ or bool((texts != first[1]).any())
                ids.append(batch["id"])
                advance(len(batch))
            rows = sum(map(len, ids))
            if rows != info.rows:
                problems.append(f"{name}: {rows:,} rows, its manifest says {info.rows:,}")
            elif rows and id_range(pa.concat_arrays(ids)) != (info.id_min, info.id_max):
                problems.append(f"{name}: its ids are not from {info.id_min!r} to {info.id_max!r}")
    if texts_differ and not differ:
        problems.append(f"all {vectors.info.rows:,} vectors are the same, their texts are not")
    seen = f"{vectors.info.rows:,} vectors finite, length at most {worst:.1e} from 1"
    return judge("numbers", problems, seen, {"max_norm_distance": worst})


def check_unique(vectors: VectorSet, stop: StopSignal) -> VerifyCheck:
    """Check that no id is in two rows, of one part or of several."""
    found = find_duplicates(vectors, limit=_MAX_DUPLICATES, stop=stop)
    problems = [
        f"{len(rows)} ids of {vectors.info.parts[part].files[-1]} are there before, such as"
        f" {vectors.ids_at(part, rows[:1])[0]!r}"
        for part, rows in found.items()
    ]
    return judge("unique", problems, f"{vectors.info.rows:,} ids, each once")


# The catalogue read again: every id with its text is in its part, in order, and nothing else is.


@dataclass(frozen=True)
class Picked:
    """A text, and where its vector is."""

    part: int
    row: int
    text: str


def check_catalogue(
    vectors: VectorSet, plan: EmbedPlan, catalogue: Storage, stop: StopSignal, *, num_workers: int
) -> tuple[VerifyCheck, list[Picked]]:
    """Hold the parts against the catalogue, read by `num_workers` processes. Return some of its texts too.

    Raises DataError if the catalogue has changed.
    """
    step = np.uint64(max(1, vectors.info.rows // SAMPLE_TEXTS))
    rules = TextRules(b"", plan.max_tokens, plan.layout.id_type, tuple(plan.catalogue.columns.filter.items()))
    bad = read = sum(plan.catalogue.unreadable.values())
    missing, problems, picked = [np.zeros(0, dtype=np.uint64)], list[str](), list[Picked]()
    raws = (raw for shard in plan.shards for raw in read_shard(plan.catalogue, catalogue, shard, plan.window_rows))
    doing = "reading the catalogue again"
    judged = run_tasks(judge_again, (rules, step), raws, num_workers=num_workers, stop=stop, doing=doing, in_order=True)
    with closing(judged) as windows, progress(doing, plan.catalogue.rows, "rows") as advance:
        for shard in plan.shards:
            tables, sample = list[pa.Table](), dict[int, str]()
            for rows in windows:
                advance(rows.num_rows)
                read += rows.num_read
                bad += len(rows.bad)
                tables.append(rows.table.select(["id_hash", "text_hash"]))
                hashes = rows.table["id_hash"].to_numpy()
                for one, text in zip(hashes[hashes % step == 0].tolist(), rows.texts, strict=True):
                    sample.setdefault(one, text)
                if rows.is_last:
                    break
            ids, texts = (column.to_numpy() for column in pa.concat_tables(tables).columns)
            first = np.sort(np.unique(ids, return_index=True)[1])  # of ids that are twice in the shard the first counts
            bad += len(ids) - len(first)
            ids, texts = ids[first], texts[first]
            found_ids, found_texts = vectors.hashes(shard.index)
            for row in np.flatnonzero(found_ids % step == 0).tolist():
                if text := sample.get(int(found_ids[row]), ""):
                    picked.append(Picked(shard.index, row, text))
            there, name = np.isin(ids, found_ids), vectors.info.parts[shard.index].files[-1]
            missing.append(ids[~there])
            if not np.array_equal(ids[there], found_ids):
                extra = int((~np.isin(found_ids, ids)).sum())
                problems.append(f"{name}: {extra:,} ids are not in the catalogue" if extra else f"{name}: other order")
            elif changed := int((texts[there] != found_texts).sum()):
                problems.append(f"{name}: {changed:,} vectors are of another text")
    lost = np.concatenate(missing)
    in_other = np.zeros(len(lost), dtype=np.bool_)  # duplicates that were taken out: their part lacks them
    for part in range(len(vectors.info.parts) if len(lost) else 0):
        in_other |= np.isin(lost, vectors.hashes(part)[0])
    elsewhere = int(in_other.sum())
    bad += elsewhere
    if len(lost) > elsewhere:
        problems.append(f"{len(lost) - elsewhere:,} ids of the catalogue have no vector")
    counts = vectors.info.counts
    if (read, bad) != (counts.read, counts.bad):
        problems.append(f"{read:,} rows read and {bad:,} bad, the manifest says {counts.read:,} and {counts.bad:,}")
    seen = f"{read - bad:,} ids with their texts, {bad:,} bad rows, as in the catalogue"
    return judge("catalogue", problems, seen), picked[: 2 * SAMPLE_TEXTS]


# Stored vectors against the same texts embedded again, in fp32 on the CPU, whatever device made them.

_WINDOW = 64


def check_sample(
    vectors: VectorSet,
    picked: Sequence[Picked],
    tokenizer: TextTokenizer,
    embed: Embed,
    *,
    prefix: str,
    max_tokens: int,
) -> VerifyCheck:
    """Check the smallest cosine between a stored vector and the one computed now."""
    stored = []
    for part, members in groupby(picked, lambda one: one.part):
        rows = np.array([one.row for one in members], dtype=np.int64)
        stored.append(from_stored(*vectors.stored(part, rows)))
    tokens = cut_tokens(tokenizer.encode([prefix + one.text for one in picked]), max_tokens, tokenizer.sep_id)
    windows = token_windows(tokens, _WINDOW)
    fresh = np.concatenate(list(with_progress(embed(windows), "embedding a sample", len(picked))))
    fresh, found = shorten_vectors(fresh, vectors.layout.dim), np.concatenate(stored)
    lengths = np.linalg.norm(fresh, axis=1) * np.linalg.norm(found, axis=1)
    cosines = ((fresh * found).sum(axis=1) / np.maximum(lengths, 1e-12)).clip(-1.0, 1.0)
    least = int(cosines.argmin())
    seen = f"{len(picked)} texts embedded again in fp32 on the CPU, cosine at least {cosines[least]:.6f}"
    problems = [
        f"the vector of {picked[row].text[:60]!r} has cosine {cosines[row]:.4f} to its recomputation"
        for row in np.flatnonzero(~(cosines >= MIN_COSINE)).tolist()
    ]
    return judge("sample", problems, seen, {"min_cosine": float(cosines[least])})
