"""What pages draw of the prepared data: `cycles/<cycle>/prepare/digest.json`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.data.token_sets import QUARANTINE, QuarantinedRow, Split, TokenSetInfo
from pipeline.io.storage import KeyNotFound, Storage, read_record

SAMPLES_PER_REASON = 5
MAX_REASONS = 50
"""Of more reasons the rarest are left out."""
MAX_FILES = 20
"""Newest partitions with bad rows whose quarantine is looked at."""
MAX_CONTENT = 200
"""Characters of a row in quarantine."""


class PartitionDigest(Record):
    """One prepared partition."""

    partition: str
    watermark: str = Field(description="Its date; empty when the data has none")
    rows: Mapping[Split, int]
    labels: Mapping[Split, tuple[int, ...]] = Field(description="Rows of each label; empty in sets of earlier versions")
    bucket_rows: tuple[int, ...] = Field(description="Rows of all splits by bucket")
    bad: int
    filtered: int
    blank: int
    truncated: int
    tokens: int
    without_category: Mapping[str, int] = Field({}, description="Rows without a value, by categorical column")


class PrepareDigest(Record):
    schema_version: Literal[1] = 1
    cycle: str
    labels: tuple[str, ...] = Field(description="From least to most relevant")
    buckets: tuple[str, ...]
    partitions: tuple[PartitionDigest, ...] = Field(description="In the order of their dates")
    reasons: Mapping[str, int] = Field(description="Bad rows by reason, the most frequent first")
    samples: tuple[QuarantinedRow, ...] = Field(
        description=f"At most {SAMPLES_PER_REASON} a reason; none with report.examples = 0"
    )


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/prepare/digest.json"


def store_digest(
    workspace: Storage, cycle: str, token_sets: Mapping[str, TokenSetInfo], *, labels: tuple[str, ...], examples: int
) -> None:
    """Of all partitions of a cycle, by their prefix; `examples`: bad rows of a reason, at most; 0: no texts."""
    infos = token_sets.values()
    reasons = Counter[str]()
    for info in infos:
        reasons.update(info.reasons)
    most = dict(reasons.most_common(MAX_REASONS))
    limit = min(examples, SAMPLES_PER_REASON)
    digest = PrepareDigest(
        cycle=cycle,
        labels=labels,
        buckets=next(iter(infos)).buckets,
        partitions=tuple(sorted(map(_partition, infos), key=lambda one: (one.watermark, one.partition))),
        reasons=most,
        samples=_samples(workspace, token_sets, most, limit) if limit else (),
    )
    workspace.write_bytes(digest_key(cycle), digest.model_dump_json(indent=1).encode() + b"\n")


def load_digest(workspace: Storage, cycle: str) -> PrepareDigest | None:
    """None when there is none. Raises DataError when it cannot be read."""
    return read_record(
        workspace, digest_key(cycle), PrepareDigest, "a digest of prepared data", f"trnpipe prepare --cycle {cycle}"
    )


def _partition(info: TokenSetInfo) -> PartitionDigest:
    counts = [shard.rows for shards in info.splits.values() for shard in shards]
    return PartitionDigest(
        partition=info.partition,
        watermark=info.watermark,
        rows={split: sum(sum(shard.rows) for shard in shards) for split, shards in info.splits.items()},
        labels={split: judged.labels for split, judged in info.judged.items()},
        bucket_rows=tuple(map(sum, zip(*counts, strict=True))),
        bad=info.rows_bad,
        filtered=sum(file.filtered for file in info.files),
        blank=sum(file.blank for file in info.files),
        truncated=info.truncated_rows,
        tokens=info.tokens,
        without_category=info.without_category,
    )


def _samples(
    workspace: Storage, token_sets: Mapping[str, TokenSetInfo], reasons: Mapping[str, int], limit: int
) -> tuple[QuarantinedRow, ...]:
    """Of the newest partitions, in the order of the reasons."""
    newest = sorted(token_sets.items(), key=lambda one: one[1].watermark, reverse=True)
    found: dict[str, list[QuarantinedRow]] = {reason: [] for reason in reasons}
    for prefix in [prefix for prefix, info in newest if info.rows_bad][:MAX_FILES]:
        for row in _quarantine(workspace, f"{prefix}/{QUARANTINE}"):
            if len(found.get(row.reason, range(limit))) < limit:
                found[row.reason].append(row.model_copy(update={"content": row.text[:MAX_CONTENT]}))
    return tuple(row for rows in found.values() for row in rows)


def _quarantine(workspace: Storage, key: str) -> Sequence[QuarantinedRow]:
    try:
        lines = workspace.read_bytes(key).splitlines()
    except KeyNotFound:  # of a version without one
        return ()
    return [QuarantinedRow.model_validate_json(line) for line in lines]
