"""Settings of the teach stage."""

from pydantic import Field

from pipeline.core.record import Record


class TeachConfig(Record):
    """Settings for applying the teacher (train.teacher) to the training rows."""

    workers: int = Field(1, ge=1, le=10_000, description="Number of array tasks that divide the rows")
