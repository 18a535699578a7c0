"""Settings of offline embedding."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class EmbedConfig(BaseModel):
    """How catalogue texts become vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int = Field(256, ge=1, description="Texts of one batch on one device; static")
    precision: Literal["fp32", "bf16"] = Field("fp32", description="Of weights and activations; vectors are fp32")
