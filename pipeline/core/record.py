"""The base of settings and of what is stored as JSON."""

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """Immutable; a field that this version does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
