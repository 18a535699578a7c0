"""`[jobs.schedule]`: when cycles are due, and what becomes of those that were missed."""

from enum import StrEnum
from typing import Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from jobs.core.cron import Schedule, parse_schedule
from pipeline.core.errors import ConfigError


class MissedPolicy(StrEnum):
    """What to do about times at which no cycle was started: the driver was down, or an earlier cycle still ran."""

    SKIP = "skip"
    """Nothing: only the cycle of the scheduled time is started."""
    CATCH_UP = "catch_up"
    """Every missed cycle is started, the oldest first, each when the one before has ended."""
    COALESCE = "coalesce"
    """One cycle, named by the newest time that has passed, stands for all that were missed."""


class ScheduleConfig(BaseModel):
    """The schedule of cycles; the same as that of EventBridge Scheduler, which starts the driver."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    expression: str = Field(
        "", description="cron(...), rate(...) or at(...) as EventBridge Scheduler takes it; empty: no schedule"
    )
    timezone: str = Field("UTC", max_length=50, description="IANA name of the zone that cron(...) is read in")
    start: AwareDatetime | None = Field(None, description="First time of a rate(...), with its offset")
    policy: MissedPolicy = Field(
        MissedPolicy.COALESCE, description="Missed cycles: skip, catch_up (each, oldest first) or coalesce (the newest)"
    )
    max_late_s: int = Field(
        6 * 3600, ge=60, description="Seconds after its scheduled time at which a cycle is not started any more"
    )

    @model_validator(mode="after")
    def _check_expression(self) -> Self:
        if self.expression:
            try:
                self.schedule()
            except ConfigError as error:
                raise ValueError(f"{error.seen}; expected {error.expected}") from error
        return self

    def schedule(self) -> Schedule:
        """Raises ConfigError without an expression."""
        if not self.expression:
            raise ConfigError(
                "jobs.schedule.expression is empty",
                expected="when cycles are due, such as cron(0 2 * * ? *)",
                next_command="set it to the expression of the schedule that starts the driver",
            )
        return parse_schedule(self.expression, self.timezone, start=self.start)
