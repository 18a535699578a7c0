"""A plan: how a model is spread over devices, in one frozen value."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record

PLAN_VARIABLE = "TRNPIPE_PARALLEL"
"""Environment: a plan as JSON, or the path of a file that holds one."""


class Spread(Record):
    """How a model is spread over the ranks of a run."""

    retired: ClassVar[Mapping[str, Any]] = {"collectives": "default", "offload_horizon": 0}

    shard_degree: int = Field(
        0, ge=0, description="Ranks that share one copy of what `shard` names; 0: all data-parallel ranks, 1: none"
    )
    shard: Literal["all", "state"] = Field(
        "all",
        description="all: parameters, gradients and optimizer state (FSDP); state: the optimizer's state (ZeRO-1)",
    )
    tensor_degree: int = Field(1, ge=1, description="Ranks that share each layer's matrices (tensor parallel)")
    recompute: Literal["none", "units"] = Field(
        "none", description="units: keep only the inputs of each unit (layer), compute the rest again in backward"
    )
    offload: bool = Field(False, description="Keep the inputs of recomputed units in host memory until backward")
    process_group: str = Field(
        "",
        pattern=r"^$|^[\w.]+:\w+$",
        description="MODULE:NAME: the backend that MODULE registers with torch.distributed, for the groups that hold"
        " shards; empty: the device's own",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.offload and self.recompute == "none":
            raise ValueError("offload with recompute none: only inputs of recomputed units are offloaded")
        if self.shard == "state" and self.tensor_degree > 1:
            raise ValueError(f"shard state with tensor_degree {self.tensor_degree}, expected shard all")
        return self

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP is asked for."""
        return self.shard == "all" and self.shard_degree != 1

    def as_plan(self, precision: Literal["fp32", "bf16"] = "fp32") -> "Plan":
        """Return the plan of a run whose precision is this."""
        return Plan(**self.model_dump(), precision=precision)


class Plan(Spread):
    """How the model of a user's script is spread, with what a run of ours has among its other settings."""

    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Of parameters and activations in a unit; weights and their gradients are kept in fp32"
    )
    seed: int | None = Field(
        None, ge=0, description="Seeds torch: weights alike on all ranks, then dropout by data rank"
    )

    @staticmethod
    def read(source: "Plan | Mapping[str, Any] | str | Path | None", env: Mapping[str, str] = os.environ) -> "Plan":
        """Return a plan given as it is, as a mapping, as JSON, or as the path of a JSON file; None: PLAN_VARIABLE.

        Raises ConfigError.
        """
        if isinstance(source, Plan):
            return source
        origin = "the plan"
        if source is None:
            source, origin = env.get(PLAN_VARIABLE, "{}"), PLAN_VARIABLE
        try:
            if isinstance(source, Path) or (isinstance(source, str) and not source.lstrip().startswith("{")):
                origin = str(source)
                source = Path(source).read_text(encoding="utf-8")
            return Plan.model_validate(json.loads(source) if isinstance(source, str) else source)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{origin}: {'.'.join(map(str, first['loc']))} {first['input']!r}: {first['msg']}",
                expected=f"a plan of {', '.join(Plan.model_fields)}: see docs/parallel.md",
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{origin} cannot be read: {error}", expected='a plan as JSON, such as {"shard_degree": 8}, or its file'
            ) from error
