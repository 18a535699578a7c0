"""A fair-share scheduling policy, with the bounds that AWS Batch puts on it.

Source: the model of AWS Batch in botocore (CreateSchedulingPolicy), and its user guide on fair-share scheduling.
"""

from itertools import combinations
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEFAULT_WEIGHT = 1.0
SHORTEST_WINDOW_S = 600
"""Used where shareDecaySeconds is 0."""


class ShareWeight(BaseModel):
    """Weight of one share identifier, or of all that begin with a prefix (`backfill*`). A lower weight gets more."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share_identifier: str = Field(
        pattern=r"^[A-Za-z0-9]{0,254}[A-Za-z0-9*]$", description="Letters and digits only; may end with *"
    )
    weight: float = Field(DEFAULT_WEIGHT, ge=0.0001, le=999.9999, description="Usage is multiplied by it")

    def matches(self, identifier: str) -> bool:
        """Whether a job's share identifier falls under this entry."""
        if self.share_identifier.endswith("*"):
            return identifier.startswith(self.share_identifier[:-1])
        return identifier == self.share_identifier

    def overlaps(self, other: "ShareWeight") -> bool:
        """Whether some identifier falls under both."""
        mine, theirs = self.share_identifier.rstrip("*"), other.share_identifier.rstrip("*")
        return self.matches(theirs) or other.matches(mine)


class FairSharePolicy(BaseModel):
    """What CreateSchedulingPolicy takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field("default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,127}$", description="Name of the policy")
    share_decay_s: int = Field(3600, ge=0, le=604_800, description="Usage older than this is forgotten; 0: 600 s")
    compute_reservation: int = Field(
        0, ge=0, le=99, description="Percent held back for shares that are not active, to the power of active ones"
    )
    shares: tuple[ShareWeight, ...] = Field((), max_length=500, description="Weights; identifiers not listed get 1.0")

    @model_validator(mode="after")
    def _no_overlap(self) -> Self:
        for one, other in combinations(self.shares, 2):
            if one.overlaps(other):
                raise ValueError(f"share identifiers {one.share_identifier} and {other.share_identifier} overlap")
        return self

    @property
    def window_s(self) -> float:
        """Seconds over which usage counts."""
        return float(self.share_decay_s or SHORTEST_WINDOW_S)

    def weight_of(self, identifier: str) -> float:
        """Weight of a job's share identifier."""
        return next((share.weight for share in self.shares if share.matches(identifier)), DEFAULT_WEIGHT)

    def request(self) -> dict[str, object]:
        """The body of a CreateSchedulingPolicy request."""
        return {
            "name": self.name,
            "fairsharePolicy": {
                "shareDecaySeconds": self.share_decay_s,
                "computeReservation": self.compute_reservation,
                "shareDistribution": [
                    {"shareIdentifier": share.share_identifier, "weightFactor": share.weight} for share in self.shares
                ],
            },
        }
