"""Settings of the health checks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipeline.core.machines import MACHINES
from pipeline.core.record import Record

Group = Literal["host", "tools", "cores", "collectives"]
OperationName = Literal[
    "matmul fp32",
    "matmul bf16",
    "attention fp32",
    "attention bf16",
    "layer norm",
    "softmax",
    "gelu",
    "embedding",
    "reductions",
    "optimizer step",
]
"""The operations that device.py checks."""
NUM_NCCOM_TESTS, NCCOM_LIMIT_S = 3, 300.0  # each size is compiled first
START_LIMIT_S = 60.0  # for the imports of the ranks on a busy host
SLOW_RATIO = 1.5
"""A core is unfit if it is this many times slower than the median of the others."""
_LONGER = 10


class HealthConfig(Record):
    """Requirements that a machine must meet before a job runs on it."""

    retired: ClassVar[Mapping[str, Any]] = {
        "max_clock_skew_s": ...,
        "nccom_across_nodes": ...,
        "min_free_cache_gib": ...,
        "min_free_checkpoint_gib": ...,
        "min_open_files": ...,
        "min_shm_gib": ...,
        "burn_s": ...,
        "sweep_mib": ...,
        "full_sweep_mib": ...,
        "collective_limit_s": ...,
        "profile": ...,
        "slow_ratio": ...,
    }

    only: tuple[Group, ...] = Field(
        (), description="Groups of checks to run: host, tools, cores, collectives (default: all)"
    )
    min_free_gib: float = Field(
        10.0,
        ge=0,
        le=1e6,
        description="Minimum free disk space in GiB for compiled graphs and for checkpoints (twice that on one disk)",
    )
    check_limit_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Time limit in seconds of a check, and for ranks to join a collective. Ten times that for cores and"
        " collectives on Neuron, where graphs are compiled first",
    )
    tolerances: dict[OperationName, Annotated[float, Field(gt=0, le=1)]] = Field(
        {},
        description="Maximum relative error of operations compared with float64, to override the defaults on a new kind"
        " of device, such as softmax=0.001,layer norm=0.001",
    )
    min_bus_gb_s: float = Field(
        0.0, ge=0, le=1e5, description="Minimum bus bandwidth in GB/s of the largest all-reduce (0: no minimum)"
    )
    nodes_wait_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds to wait for the reports of the other nodes of a job"
    )
    expected_instance: str = Field(
        "", description="Required instance type, such as trn1.32xlarge (empty: any instance type)"
    )

    def includes(self, *groups: Group | None) -> bool:
        """Return whether one of these groups is selected. None always is."""
        return not self.only or None in groups or not {*groups}.isdisjoint(self.only)

    def device_limit_s(self, *, on_neuron: bool) -> float:
        """Return the time limit of one check of cores or collectives."""
        return self.check_limit_s * (_LONGER if on_neuron else 1)

    def stage_limit_s(self, *, on_neuron: bool, num_nodes: int, processes: int) -> float:
        """Return the time limit of nccom-test, the checks of the ranks and the wait for other nodes together."""
        limit_s = NUM_NCCOM_TESTS * NCCOM_LIMIT_S if on_neuron and processes > 1 and self.includes("tools") else 0.0
        if self.includes("cores", "collectives"):
            limit_s += START_LIMIT_S + 6 * self.device_limit_s(on_neuron=on_neuron)
        return limit_s + (self.nodes_wait_s if num_nodes > 1 else 0.0)

    @field_validator("expected_instance")
    @classmethod
    def _check_instance(cls, name: str) -> str:
        if name and name not in MACHINES:
            raise ValueError(f"expected one of {', '.join(MACHINES)}, or an empty text")
        return name
