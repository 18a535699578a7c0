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
"""Names of the operations in device.py."""
NUM_NCCOM_TESTS, NCCOM_LIMIT_S = 4, 300.0  # includes compiling a graph for each size
NUM_LIMITS = 8  # sum of the limits of all checks of cores and collectives, as a multiple of `device_limit_s`
START_LIMIT_S = 60.0  # includes the imports of all ranks on a busy host
SLOW_RATIO = 1.5
"""A core is unfit if it is more than this many times slower than the median of the other cores."""
_LONGER = 10


class HealthConfig(Record):
    """Settings of the health checks that a machine must pass before a job runs on it."""

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
        (), description="Groups of checks to run: host, tools, cores and collectives (default: all)"
    )
    min_free_gib: float = Field(
        10.0,
        ge=0,
        le=1e6,
        description="Minimum free disk space in GiB, each for compiled graphs and for checkpoints. Twice as much is"
        " required if both are on the same disk",
    )
    check_limit_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Time limit in seconds for a check, and for all ranks to join a collective. On Neuron, the limit"
        " for cores and collectives is ten times as long, because it includes compiling graphs",
    )
    tolerances: dict[OperationName, Annotated[float, Field(gt=0, le=1)]] = Field(
        {},
        description="Maximum relative errors of operations compared with float64. Overrides the defaults, for example"
        " for a new type of device: softmax=0.001,layer norm=0.001",
    )
    min_bus_gb_s: float = Field(
        0.0,
        ge=0,
        le=1e5,
        description="Minimum bus bandwidth in GB/s that nccom-test must measure for the all-reduce (0: no minimum)",
    )
    nodes_wait_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds to wait for the reports of the other nodes of a job"
    )
    expected_instance: str = Field(
        "", description="Required instance type, for example trn1.32xlarge (empty: any instance type)"
    )

    def includes(self, *groups: Group | None) -> bool:
        """Return whether at least one of these groups is selected. None is always selected."""
        return not self.only or None in groups or not {*groups}.isdisjoint(self.only)

    def device_limit_s(self, *, on_neuron: bool) -> float:
        """Return the time limit of a single check of cores or collectives."""
        return self.check_limit_s * (_LONGER if on_neuron else 1)

    def stage_limit_s(self, *, on_neuron: bool, num_nodes: int, processes: int) -> float:
        """Return the time limit of the whole stage, including nccom-test and the wait for other nodes."""
        limit_s = NUM_NCCOM_TESTS * NCCOM_LIMIT_S if on_neuron and processes > 1 and self.includes("tools") else 0.0
        if self.includes("cores", "collectives"):
            limit_s += START_LIMIT_S + NUM_LIMITS * self.device_limit_s(on_neuron=on_neuron)
        return limit_s + (self.nodes_wait_s if num_nodes > 1 else 0.0)

    @field_validator("expected_instance")
    @classmethod
    def _check_instance(cls, name: str) -> str:
        if name and name not in MACHINES:
            raise ValueError(f"expected one of {', '.join(MACHINES)}, or an empty text")
        return name
