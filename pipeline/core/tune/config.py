"""Settings of `trnpipe tune`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pipeline.core.tune.hyperband import Hyperband
from pipeline.core.tune.ranges import FORMS, parse_range


class TuneConfig(BaseModel):
    """A search over training settings: what may vary, how long a trial is, when it ends early."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    space: Annotated[
        dict[str, str], Field(description=f"Settings of train and model to search, each with {FORMS}")
    ] = {}
    name: str = Field(
        "default", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name of this search; the same one continues it"
    )
    trials: int = Field(20, ge=1, le=100_000, description="Trials in all; the first has the settings as they are")
    steps: int = Field(500, ge=2, description="Optimizer steps of a full trial, in place of train.max_steps")
    min_steps: int = Field(
        50, ge=1, description="Steps after which a trial is first scored on valid and may be ended (Hyperband)"
    )
    reduction: int = Field(
        3, ge=2, le=16, description="Each time this many times as long; one of as many trials goes on"
    )
    metric: str = Field("", description="What to make high on valid, a value of train.metric; empty: train.metric")
    seed: int = Field(1, ge=0, description="Seed of what is tried; the seed of training is train.seed")
    folder: str | None = Field(
        None,
        min_length=1,
        description="Local or shared folder of searches, their checkpoints too (default: tune/ in a local workspace)",
    )

    @field_validator("space", mode="before")
    @classmethod
    def _dotted(cls, space: object) -> object:
        """In a TOML file a name without quotes is a table of tables."""
        return dict(_flat(space, "")) if isinstance(space, Mapping) else space

    @field_validator("space")
    @classmethod
    def _ranges(cls, space: dict[str, str]) -> dict[str, str]:
        for name, text in space.items():
            try:
                parse_range(text)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return space

    @model_validator(mode="after")
    def _has_rungs(self) -> Self:
        if self.min_steps >= self.steps:
            raise ValueError(f"min_steps {self.min_steps}: expected less than steps {self.steps}")
        return self

    @property
    def hyperband(self) -> Hyperband:
        return Hyperband(self.min_steps, self.steps, self.reduction)


def _flat(table: Mapping[str, object], parent: str) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        name = f"{parent}{key}".replace("-", "_").lower()
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        else:
            yield name, value
