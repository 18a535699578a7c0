"""Settings of saving and retention."""

from pydantic import BaseModel, ConfigDict, Field


class CheckpointConfig(BaseModel):
    """When checkpoints are made and which stay."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    every_steps: int = Field(200, ge=1, description="Steps between checkpoints")
    keep_last: int = Field(2, ge=1, description="Newest checkpoints kept")
    keep_every_steps: int = Field(0, ge=0, description="Checkpoints at multiples of this are kept for good; 0: none")
