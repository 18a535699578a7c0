"""The results of `trnpipe embed verify`, as stored in `cycles/<cycle>/verify/digest.json` for the report pages.

This module imports neither torch nor pyarrow, so that the report pages load quickly.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.storage import Storage, read_record


class VerifyCheck(Record):
    """The result of a single check."""

    retired: ClassVar[Mapping[str, Any]] = {"histogram": ...}

    name: str
    outcome: Literal["pass", "fail", "skipped"]
    seen: str
    figures: dict[str, float] = Field({})

    def line(self) -> str:
        """Format the check as `pass     files      5 files, 1.2 MiB`."""
        return f"{self.outcome:<8} {self.name:<10} {self.seen}"


class VectorCounts(Record):
    """Numbers of ids in a catalogue, compared with the earlier cycle."""

    embedded: int
    carried: int = Field(description="Number of vectors that were reused from an earlier cycle")
    new: int | None = Field(description="Number of ids that the earlier cycle did not have (none: nothing was reused)")
    gone: int | None = Field(description="Number of ids of the earlier cycle that have been removed")


class VerifyDigest(Record):
    """The results of verify for one cycle. They are written even if a check failed."""

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
    """Return the verify digest of a cycle, or None if there is none. Raises DataError if it cannot be read."""
    return read_record(
        workspace, digest_key(cycle), VerifyDigest, "a digest of verify", f"trnpipe embed verify --cycle {cycle}"
    )
