"""A plan: how a model is spread over devices, in one frozen value."""

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from pipeline.core.errors import ConfigError
from pipeline.core.record import Record

PLAN_VARIABLE = "TRNPIPE_PARALLEL"
"""Environment: a plan as JSON, or the path of a file that holds one."""

SMP_NAMES = {
    "hybrid_shard_degree": "shard_degree",
    "tensor_parallel_degree": "tensor_degree",
    "activation_loading_horizon": "offload_horizon",
    "random_seed": "seed",
    "tensor_parallel_seed": "seed",
}
"""Keys of SageMaker's model parallel library v2 (docs.aws.amazon.com, "SMP v2 reference") and ours of the same use."""
_SMP_OFFLOAD = "sm_activation_offloading"
_SMP_HORIZON = 2  # its default
_SMP_ABSENT = ("context_parallel_degree", "expert_parallel_degree")
_SMP_IDLE = ("allow_empty_shards", "fsdp_cache_flush_warnings")
"""Switches without a use here: a rank's part may always be empty, and torch.cuda.memory_stats counts cache flushes."""


class Plan(Record):
    """How a model is spread over devices. The keys of SageMaker's model parallel library v2 are read too."""

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
    offload_horizon: int = Field(
        0, ge=0, description="Units whose inputs may be in device memory at a time, the others in the host's; 0: all"
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32", description="Of parameters and activations in a unit; weights and their gradients are kept in fp32"
    )
    collectives: Literal["default", "hierarchical", "auto"] = Field(
        "default", description="hierarchical: within nodes, then between them; auto: as the cost model says"
    )
    seed: int | None = Field(
        None, ge=0, description="Seeds torch: weights alike on all ranks, then dropout by data rank"
    )

    @model_validator(mode="before")
    @classmethod
    def _smp_names(cls, given: Any) -> Any:
        return in_our_names(given) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.offload_horizon and self.recompute == "none":
            raise ValueError(
                f"offload_horizon {self.offload_horizon} with recompute none: what is offloaded is the inputs of"
                " recomputed units, expected recompute units"
            )
        if self.shard == "state" and self.tensor_degree > 1:
            raise ValueError(f"shard state with tensor_degree {self.tensor_degree}, expected shard all")
        return self

    @property
    def shards_parameters(self) -> bool:
        """FSDP is asked for."""
        return self.shard == "all" and self.shard_degree != 1

    @staticmethod
    def read(source: "Plan | Mapping[str, Any] | str | Path | None", env: Mapping[str, str] = os.environ) -> "Plan":
        """A plan as it is, as a mapping, as JSON, or as the path of a JSON file; None: as PLAN_VARIABLE says.

        Python's `True` and `False` in JSON are read as the keys' articles print them. Raises ConfigError.
        """
        origin = "the plan"
        if source is None:
            source, origin = env.get(PLAN_VARIABLE, "{}"), PLAN_VARIABLE
        if isinstance(source, str) and source.lstrip().startswith("{"):
            source = _parsed(source, origin)
        elif isinstance(source, str | Path):
            origin = str(source)
            try:
                source = _parsed(Path(source).read_text(encoding="utf-8"), origin)
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{origin} cannot be read: {error}", expected="a JSON file with a plan, or a plan as JSON"
                ) from error
        if isinstance(source, Plan):
            return source
        try:
            return Plan.model_validate(source)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {_first(error)}", expected="a plan, see docs/parallel.md") from error


def in_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values of a plan. Raises ValueError for what has no other word here, and for two words for one thing."""
    values = dict(given)
    for name in _SMP_ABSENT:
        degree = values.pop(name, 1)
        if degree != 1:
            raise ValueError(f"{name} {degree}: there is no such parallelism here, expected 1 or nothing")
    for name in _SMP_IDLE:
        if not isinstance(switch := values.pop(name, False), bool):
            raise ValueError(f"{name} is {switch!r}, expected true or false")
    offload = values.pop(_SMP_OFFLOAD, None)
    for theirs, ours in SMP_NAMES.items():
        if theirs in values:
            if ours in values:
                raise ValueError(f"{theirs} and {ours} are the same thing, expected one of them")
            values[ours] = values.pop(theirs)
    if offload is not None and not isinstance(offload, bool):
        raise ValueError(f"{_SMP_OFFLOAD} is {offload!r}, expected true or false")
    if offload is False:
        values["offload_horizon"] = 0
    elif offload:
        values.setdefault("offload_horizon", _SMP_HORIZON)
    if values.get("offload_horizon", 0) not in (0, "0") and "recompute" not in values:  # a flag's value is a text
        values["recompute"] = "units"
    return values


def _parsed(text: str, origin: str) -> Any:
    try:
        return json.loads(text.replace(": True", ": true").replace(": False", ": false"))
    except ValueError as error:
        raise ConfigError(f"{origin} is no JSON: {error}", expected='such as {"shard_degree": 8}') from error


def _first(error: ValidationError) -> str:
    """What is wrong first, with the nearest known key for an unknown one."""
    first = error.errors()[0]
    name = ".".join(map(str, first["loc"]))
    if first["type"] != "extra_forbidden":
        return f"{name} is {first['input']!r}: {first['msg']}" if name else first["msg"].removeprefix("Value error, ")
    known = [*Plan.model_fields, *SMP_NAMES, _SMP_OFFLOAD]
    close = difflib.get_close_matches(name, known, n=1)
    return f"unknown key {name!r}" + (f", did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}")
