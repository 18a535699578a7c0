"""The results of verify for report pages: `cycles/<cycle>/verify/digest.json`. Imports neither torch nor pyarrow."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.storage import Storage, read_record


class VerifyCheck(Record):
    """The result of one check."""

    retired: ClassVar[Mapping[str, Any]] = {"histogram": ...}

    name: str
    outcome: Literal["pass", "fail", "skipped"]
    seen: str
    figures: dict[str, float] = Field({})

    def line(self) -> str:
        """Format the check as `pass     files      5 files, 1.2 MiB`."""
        return f"{self.outcome:<8} {self.name:<10} {self.seen}"


class VectorCounts(Record):
    """Counts of the ids of a catalogue."""

    embedded: int
    carried: int = Field(description="Vectors reused from an earlier cycle")
    new: int | None = Field(description="Ids that the earlier cycle did not have (none: no vectors were reused)")
    gone: int | None = Field(description="Ids of the earlier cycle that were removed")


class VerifyDigest(Record):
    """`cycles/<cycle>/verify/digest.json`: the results of verify, written whether it passed or not."""

    retired: ClassVar[Mapping[str, Any]] = dict.fromkeys(("drift", "mean_cosine", "moved_share", "ann_recall"), ...)

    schema_version: Literal[1] = 1
    cycle: str
    passed: bool
    model_digest: str = Field(description="Digest of the checkpoint that the vectors were computed with")
    vectors_digest: str = Field(description="Digest of the vectors' manifest")
    previous: str | None = Field(description="The previous cycle")
    rows: int
    counts: VectorCounts
    recompute_min_cosine: float | None = Field(description="Lowest cosine between sampled and recomputed vectors")
    checks: tuple[VerifyCheck, ...]


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/verify/digest.json"


def load_digest(workspace: Storage, cycle: str) -> VerifyDigest | None:
    """Return the digest of a cycle, or None if it has none. Raises DataError if it cannot be read."""
    return read_record(
        workspace, digest_key(cycle), VerifyDigest, "a digest of verify", f"trnpipe embed verify --cycle {cycle}"
    )
