"""The summary of prepared data for the report page: `cycles/<cycle>/prepare/digest.json`."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.data.token_sets import QUARANTINE, QuarantinedRow, Split, TokenSetInfo
from pipeline.io.storage import KeyNotFound, Storage, read_record

SAMPLES_PER_REASON = 5
MAX_REASONS, MAX_FILES, MAX_CONTENT = 50, 20, 200
"""The most frequent reasons; newest partitions whose bad rows are read; characters of a row."""


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
    """Store the summary of a cycle's partitions, given by prefix. `examples`: bad rows shown of a reason at most."""
    infos = token_sets.values()
    reasons = dict(sum((Counter(info.reasons) for info in infos), Counter[str]()).most_common(MAX_REASONS))
    samples: dict[str, list[QuarantinedRow]] = {reason: [] for reason in reasons}
    newest = sorted(token_sets.items(), key=lambda one: one[1].watermark, reverse=True)
    limit = min(examples, SAMPLES_PER_REASON)
    for prefix in [prefix for prefix, info in newest if info.rows_bad and limit][:MAX_FILES]:
        with suppress(KeyNotFound):  # a set of an early version has no such file
            for line in workspace.read_bytes(f"{prefix}/{QUARANTINE}").splitlines():
                row = QuarantinedRow.model_validate_json(line)
                if len(samples.get(row.reason, range(limit))) < limit:
                    samples[row.reason].append(row.model_copy(update={"content": row.text[:MAX_CONTENT]}))
    digest = PrepareDigest(
        cycle=cycle,
        labels=labels,
        buckets=next(iter(infos)).buckets,
        partitions=tuple(sorted(map(_partition, infos), key=lambda one: (one.watermark, one.partition))),
        reasons=reasons,
        samples=tuple(row for rows in samples.values() for row in rows),
    )
    workspace.write_bytes(digest_key(cycle), digest.model_dump_json(indent=1).encode() + b"\n")


def load_digest(workspace: Storage, cycle: str) -> PrepareDigest | None:
    """Return the stored summary of a cycle, None if there is none. Raises DataError if it cannot be read."""
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
