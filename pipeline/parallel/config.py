"""Settings that control how a model is sharded over devices."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record

PLAN_VARIABLE = "TRNPIPE_PARALLEL"
"""Environment variable that contains a plan as JSON, or the path to a JSON file."""


class Spread(Record):
    """Settings for sharding a model across the ranks of a run."""

    retired: ClassVar[Mapping[str, Any]] = {"collectives": "default", "offload_horizon": 0}

    shard_degree: int = Field(
        0, ge=0, description="Number of ranks to shard each replica over; 0: all data-parallel ranks, 1: no sharding"
    )
    shard: Literal["all", "state"] = Field(
        "all",
        description="all: shard parameters, gradients and optimizer state (FSDP); state: optimizer state only (ZeRO-1)",
    )
    tensor_degree: int = Field(1, ge=1, description="Tensor parallel degree (1 disables tensor parallelism)")
    recompute: Literal["none", "units"] = Field(
        "none", description="units: use activation checkpointing, saving only the inputs of each unit (layer)"
    )
    offload: bool = Field(False, description="Offload the inputs of recomputed units to host memory until backward")
    process_group: str = Field(
        "",
        pattern=r"^$|^[\w.]+:\w+$",
        description="Process group backend to use for the shard axis, as MODULE:NAME, where importing MODULE registers"
        " NAME with torch.distributed; empty: the device's default backend",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.offload and self.recompute == "none":
            raise ValueError("offload requires recompute units, since only inputs of recomputed units are offloaded")
        if self.shard == "state" and self.tensor_degree > 1:
            raise ValueError(f"shard state does not support tensor_degree {self.tensor_degree}, expected shard all")
        return self

    def as_plan(self, precision: Literal["fp32", "bf16"] = "fp32") -> "Plan":
        """Convert these settings to a plan with the given precision."""
        return Plan(**self.model_dump(), precision=precision)


class Plan(Spread):
    """Parallelism settings for a user script, which adds the precision and seed that `trnpipe train` sets elsewhere."""

    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Compute precision within units; weights and gradients are always kept in fp32"
    )
    seed: int | None = Field(
        None,
        ge=0,
        description="Seed for torch's random number generators; each data rank uses different dropout masks",
    )

    @staticmethod
    def read(source: "Plan | Mapping[str, Any] | str | Path | None", env: Mapping[str, str] = os.environ) -> "Plan":
        """Parse a plan from a mapping, a JSON string, or the path to a JSON file. Raises ConfigError if it is invalid.

        If `source` is None, falls back to the environment variable PLAN_VARIABLE, and then to the default plan.
        """
        if isinstance(source, Plan):
            return source
        origin = "the plan"
        if source is None:
            source, origin = env.get(PLAN_VARIABLE) or "{}", PLAN_VARIABLE
        try:
            if isinstance(source, Path) or (isinstance(source, str) and not source.lstrip().startswith("{")):
                origin = f"{PLAN_VARIABLE}={source}" if origin == PLAN_VARIABLE else str(source)
                source = Path(source).read_text(encoding="utf-8")
            return Plan.model_validate(json.loads(source) if isinstance(source, str) else source)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{origin}: {'.'.join(map(str, first['loc']))} {first['input']!r}: {first['msg']}",
                expected=f"a plan with keys among {', '.join(Plan.model_fields)}; see docs/parallel.md",
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{origin} cannot be read: {error}",
                expected='JSON such as {"shard_degree": 8}, or the path to a JSON file',
            ) from error
