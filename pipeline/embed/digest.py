"""What verify found, as a digest for pages: `cycles/<cycle>/verify/digest.json`. Imports neither torch nor pyarrow."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from pipeline.core.record import Record
from pipeline.io.storage import Storage, read_record


class VerifyCheck(Record):
    """One question and its answer."""

    retired: ClassVar[Mapping[str, Any]] = {"histogram": ...}

    name: str
    outcome: Literal["pass", "fail", "skipped"]
    seen: str
    figures: dict[str, float] = Field({})

    def line(self) -> str:
        """`pass     files      5 files, 1.2 MiB`"""
        return f"{self.outcome:<8} {self.name:<10} {self.seen}"


class VectorCounts(Record):
    """What became of the ids of a catalogue."""

    embedded: int
    carried: int = Field(description="Vectors taken over from an earlier cycle")
    new: int | None = Field(description="Ids that the cycle had not from which vectors were taken over; none: no such")
    gone: int | None = Field(description="Ids of that cycle that are not there any more")


class VerifyDigest(Record):
    """`cycles/<cycle>/verify/digest.json`: what verify saw, for pages and graphs; written whether it passed or not."""

    retired: ClassVar[Mapping[str, Any]] = dict.fromkeys(("drift", "mean_cosine", "moved_share", "ann_recall"), ...)

    schema_version: Literal[1] = 1
    cycle: str
    passed: bool
    model_digest: str = Field(description="Of the checkpoint that made the vectors")
    vectors_digest: str = Field(description="Of their manifest")
    previous: str | None = Field(description="The cycle before")
    rows: int
    counts: VectorCounts
    recompute_min_cosine: float | None = Field(description="Between stored vectors and a sample embedded again")
    checks: tuple[VerifyCheck, ...]


def digest_key(cycle: str) -> str:
    return f"cycles/{cycle}/verify/digest.json"


def load_digest(workspace: Storage, cycle: str) -> VerifyDigest | None:
    """None when there is none. Raises DataError when it cannot be read."""
    return read_record(
        workspace, digest_key(cycle), VerifyDigest, "a digest of verify", f"trnpipe embed verify --cycle {cycle}"
    )
