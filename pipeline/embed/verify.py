"""Verify that committed vectors are complete, correct and consistent with their catalogue.

Some checks only read the vectors themselves. Others compare them with the catalogue, or embed a sample of the texts
again and compare the results.
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
from pipeline.embed.catalogue import TextRules, cut_tokens, id_hashes, read_shard, validate_sample
from pipeline.embed.digest import VectorCounts, VerifyCheck, VerifyDigest
from pipeline.embed.engine import Embed, with_progress
from pipeline.embed.parts import find_duplicates, id_range
from pipeline.embed.plan import EmbedPlan
from pipeline.embed.vectors import VectorSet, from_stored, metadata_of, shorten_vectors
from pipeline.io.commit import verify_dir
from pipeline.io.storage import Storage
from pipeline.proc.pool import run_tasks

MAX_NAMED = 3
"""Maximum number of problems to list for each check."""
NORM_TOLERANCE = 0.01
"""Maximum difference between the norm of a stored vector and 1. With the data type int8, it is up to 0.003."""
SAMPLE_TEXTS = 256
"""Number of texts to embed again."""
MIN_COSINE = 0.999
"""Minimum cosine between a stored and a recomputed vector. With the data type int8, it is at least 0.99998."""


def make_digest(checks: Sequence[VerifyCheck], vectors: VectorSet) -> VerifyDigest:
    """Build the record of all checks for the report pages."""
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


def check_result(name: str, problems: Sequence[str], seen: str, figures: dict[str, float] | None = None) -> VerifyCheck:
    """Return the result of a check, which has failed if there are problems and passed otherwise.

    Figures that are not finite are dropped, because JSON cannot represent them.
    """
    finite = {figure: value for figure, value in (figures or {}).items() if math.isfinite(value)}
    if not problems:
        return VerifyCheck(name=name, outcome="pass", seen=seen, figures=finite)
    more = f"; and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
    return VerifyCheck(name=name, outcome="fail", seen="; ".join(problems[:MAX_NAMED]) + more, figures=finite)


def skipped_check(name: str, reason: str) -> VerifyCheck:
    return VerifyCheck(name=name, outcome="skipped", seen=reason)


def run_check(name: str, check: Callable[[], VerifyCheck]) -> VerifyCheck:
    """Run a check. If a part cannot be read, only the checks that need this part fail."""
    try:
        return check()
    except DataError as error:
        return VerifyCheck(name=name, outcome="fail", seen=error.seen)


# Checks that only read the vectors.

_MAX_DUPLICATES = 1000


def check_files(vectors: VectorSet) -> VerifyCheck:
    """Check the size and the checksum of every file."""
    manifest = verify_dir(vectors.storage, vectors.prefix, deep=True)
    return check_result(
        "files", [], f"{len(manifest.files)} files, {format_bytes(manifest.size_bytes)}, checksums match"
    )


def check_numbers(vectors: VectorSet, stop: StopSignal) -> VerifyCheck:
    """Check that every vector is finite and has length 1, and that schemas, row counts and ids match the manifest."""
    problems: list[str] = []
    max_distance, vectors_differ, texts_differ = 0.0, False, False
    first: tuple[Float32s, UInt64s] | None = None
    if (rows := sum(part.rows for part in vectors.info.parts)) != vectors.info.rows:
        problems.append(f"the parts have {rows:,} rows, but the manifest has {vectors.info.rows:,}")
    with progress("verifying vectors", vectors.info.rows, "rows") as advance:
        for part, info in enumerate(vectors.info.parts):
            name, schema = info.files[-1], vectors.schema(part)
            expected = vectors.layout.columns(with_vectors=vectors.layout.format == "parquet")
            if [(f.name, f.type) for f in schema] != [(f.name, f.type) for f in expected]:
                problems.append(f"{name}: columns {schema.names}, expected {expected.names}")
                continue
            metadata = metadata_of(schema)
            for field, value in {"plan": vectors.info.plan, "checkpoint_digest": vectors.info.model.digest}.items():
                if (stored := metadata.get(field)) != value:
                    problems.append(f"{name}: {field} is {stored}, but the manifest has {value}")
            ids: list[pa.Array] = []
            for batch, values in vectors.blocks(part):
                stop.raise_if_set("verifying vectors")
                names = batch["id"].to_pylist()
                with np.errstate(invalid="ignore"):
                    distance = np.nan_to_num(np.abs(np.linalg.norm(values.astype(np.float64), axis=1) - 1.0))
                max_distance = max(max_distance, float(distance.max(initial=0.0)))
                not_finite, not_unit = ~np.isfinite(values).all(axis=1), distance > NORM_TOLERANCE
                for bad, problem in ((not_finite, "are not finite"), (not_unit, "do not have length 1")):
                    if bad.any():
                        others = int(bad.sum()) - 1
                        problems.append(f"{name}: the vector of {names[bad.argmax()]!r} and {others} others {problem}")
                if (wrong := id_hashes(names) != batch["id_hash"].to_numpy()).any():
                    problems.append(f"{name}: the hash of id {names[wrong.argmax()]!r} is wrong")
                texts = batch["text_hash"].to_numpy()
                first = first or (values[:1].copy(), texts[:1].copy())
                vectors_differ = vectors_differ or bool((values != first[0]).any())
                texts_differ = texts_differ or bool((texts != first[1]).any())
                ids.append(batch["id"])
                advance(len(batch))
            rows = sum(map(len, ids))
            if rows != info.rows:
                problems.append(f"{name}: the file has {rows:,} rows, but the manifest has {info.rows:,}")
            elif rows and id_range(pa.concat_arrays(ids)) != (info.id_min, info.id_max):
                problems.append(f"{name}: the ids are not between {info.id_min!r} and {info.id_max!r}")
    if texts_differ and not vectors_differ:
        problems.append(f"all {vectors.info.rows:,} vectors are equal, even though their texts differ")
    seen = f"all {vectors.info.rows:,} vectors are finite, lengths within {max_distance:.1e} of 1"
    return check_result("numbers", problems, seen, {"max_norm_distance": max_distance})


def check_unique(vectors: VectorSet, stop: StopSignal) -> VerifyCheck:
    """Check that all ids are unique, across all parts."""
    duplicates = find_duplicates(vectors, limit=_MAX_DUPLICATES, stop=stop)
    problems = [
        f"{len(rows)} ids of {vectors.info.parts[part].files[-1]} are duplicates, such as"
        f" {vectors.ids_at(part, rows[:1])[0]!r}"
        for part, rows in duplicates.items()
    ]
    return check_result("unique", problems, f"{vectors.info.rows:,} unique ids")


# Compare the vectors with the catalogue. Each part must have exactly the ids and texts of its shard, in the same order.


@dataclass(frozen=True)
class SampleText:
    """A text of the catalogue, and the part and row that contain its vector."""

    part: int
    row: int
    text: str


def check_catalogue(
    vectors: VectorSet, plan: EmbedPlan, catalogue: Storage, stop: StopSignal, *, num_workers: int
) -> tuple[VerifyCheck, list[SampleText]]:
    """Compare the parts with the catalogue, and return the result and a sample of texts for `check_sample`.

    Raises DataError if the catalogue has changed.
    """
    step = np.uint64(max(1, vectors.info.rows // SAMPLE_TEXTS))
    rules = TextRules(b"", plan.max_tokens, plan.layout.id_type, tuple(plan.catalogue.columns.filter.items()))
    bad = read = sum(plan.catalogue.unreadable.values())
    missing, problems, samples = [np.zeros(0, dtype=np.uint64)], list[str](), list[SampleText]()
    raws = (raw for shard in plan.shards for raw in read_shard(plan.catalogue, catalogue, shard, plan.window_rows))
    doing = "reading the catalogue again"
    tasks = run_tasks(
        validate_sample, (rules, step), raws, num_workers=num_workers, stop=stop, doing=doing, in_order=True
    )
    with closing(tasks) as windows, progress(doing, plan.catalogue.rows, "rows") as advance:
        for shard in plan.shards:
            tables, text_by_hash = list[pa.Table](), dict[int, str]()
            for rows in windows:
                advance(rows.num_rows)
                read += rows.num_read
                bad += len(rows.bad)
                tables.append(rows.table.select(["id_hash", "text_hash"]))
                hashes = rows.table["id_hash"].to_numpy()
                for id_hash, text in zip(hashes[hashes % step == 0].tolist(), rows.texts, strict=True):
                    text_by_hash.setdefault(id_hash, text)
                if rows.is_last:
                    break
            ids, texts = (column.to_numpy() for column in pa.concat_tables(tables).columns)
            first = np.sort(np.unique(ids, return_index=True)[1])  # a part keeps only the first row of each id
            bad += len(ids) - len(first)
            ids, texts = ids[first], texts[first]
            stored_ids, stored_texts = vectors.hashes(shard.index)
            for row in np.flatnonzero(stored_ids % step == 0).tolist():
                if text := text_by_hash.get(int(stored_ids[row]), ""):
                    samples.append(SampleText(shard.index, row, text))
            is_stored, name = np.isin(ids, stored_ids), vectors.info.parts[shard.index].files[-1]
            missing.append(ids[~is_stored])
            if not np.array_equal(ids[is_stored], stored_ids):
                extra = int((~np.isin(stored_ids, ids)).sum())
                problems.append(
                    f"{name}: {extra:,} ids are not in the catalogue" if extra else f"{name}: the ids are out of order"
                )
            elif changed := int((texts[is_stored] != stored_texts).sum()):
                problems.append(f"{name}: {changed:,} vectors belong to a different text")
    lost = np.concatenate(missing)
    in_other = np.zeros(len(lost), dtype=np.bool_)  # ids that were removed because another part also has them
    for part in range(len(vectors.info.parts) if len(lost) else 0):
        in_other |= np.isin(lost, vectors.hashes(part)[0])
    num_duplicates = int(in_other.sum())
    bad += num_duplicates
    if len(lost) > num_duplicates:
        problems.append(f"{len(lost) - num_duplicates:,} ids of the catalogue have no vector")
    counts = vectors.info.counts
    if (read, bad) != (counts.read, counts.bad):
        problems.append(
            f"the catalogue has {read:,} rows, {bad:,} of them bad, but the manifest has {counts.read:,} and"
            f" {counts.bad:,}"
        )
    seen = f"{read - bad:,} ids with their texts and {bad:,} bad rows match the catalogue"
    return check_result("catalogue", problems, seen), samples[: 2 * SAMPLE_TEXTS]


# Embed a sample of the texts again, in fp32 on the CPU, and compare the results with the stored vectors.

_WINDOW = 64


def check_sample(
    vectors: VectorSet,
    samples: Sequence[SampleText],
    tokenizer: TextTokenizer,
    embed: Embed,
    *,
    prefix: str,
    max_tokens: int,
) -> VerifyCheck:
    """Check that the stored vectors of a sample are close to the recomputed ones."""
    blocks = []
    for part, members in groupby(samples, lambda sample: sample.part):
        rows = np.array([sample.row for sample in members], dtype=np.int64)
        blocks.append(from_stored(*vectors.stored(part, rows)))
    tokens = cut_tokens(tokenizer.encode([prefix + sample.text for sample in samples]), max_tokens, tokenizer.sep_id)
    windows = token_windows(tokens, _WINDOW)
    computed = np.concatenate(list(with_progress(embed(windows), "embedding a sample", len(samples))))
    computed, stored = shorten_vectors(computed, vectors.layout.dim), np.concatenate(blocks)
    lengths = np.linalg.norm(computed, axis=1) * np.linalg.norm(stored, axis=1)
    cosines = ((computed * stored).sum(axis=1) / np.maximum(lengths, 1e-12)).clip(-1.0, 1.0)
    worst = int(cosines.argmin())
    seen = f"{len(samples)} texts embedded again in fp32 on the CPU, cosine at least {cosines[worst]:.6f}"
    problems = [
        f"the stored and the recomputed vector of {samples[row].text[:60]!r} have cosine {cosines[row]:.4f}"
        for row in np.flatnonzero(~(cosines >= MIN_COSINE)).tolist()
    ]
    return check_result("sample", problems, seen, {"min_cosine": float(cosines[worst])})
