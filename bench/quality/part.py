"""What one part of this bench found, as kept in build/quality."""

from pydantic import BaseModel, ConfigDict


class PartResult(BaseModel):
    """What one part found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    part: str
    split: str
    seed: int
    steps: int
    batch: int
    precision: str
    rate: float
    figures: dict[str, float]
    ndcg_by_query: list[float]
    train_seconds: float

    @property
    def side(self) -> str:
        """What seeds of it share: a peer is one at each learning rate."""
        return f"{self.part}@{self.rate:g}" if self.rate else self.part

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.task}-{self.part}-{self.split}-{self.steps}x{self.batch}-{self.rate:g}-{self.seed}"
