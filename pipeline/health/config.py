"""Settings of the health checks."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from pipeline.core.machines import MACHINES
from pipeline.core.record import Record

Profile = Literal["quick", "full"]
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
"""Of device.py, which needs torch."""
_LONGER = 10


class HealthConfig(Record):
    """What a machine must have before work is given to it."""

    retired: ClassVar[Mapping[str, Any]] = {"max_clock_skew_s": ..., "nccom_across_nodes": ...}

    profile: Profile = Field(
        "quick",
        description="quick: before every stage, about a minute, more where graphs are compiled first; full: everything",
    )
    only: tuple[Group, ...] = Field(
        (), description="Run only these groups of checks: host, tools, cores, collectives; none named: all"
    )
    min_free_cache_gib: float = Field(
        10.0, ge=0, le=1e6, description="Free disk (GiB) where compiled graphs are kept; 0: any will do"
    )
    min_free_checkpoint_gib: float = Field(
        10.0, ge=0, le=1e6, description="Free disk (GiB) where checkpoints are written; 0: any will do"
    )
    min_open_files: int = Field(
        65_535, ge=64, le=2**30, description="Files a process may have open; ranks and collectives take thousands"
    )
    min_shm_gib: float = Field(
        1.0, ge=0, le=1e5, description="Size (GiB) of /dev/shm, through which loader workers hand over batches"
    )
    check_limit_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds a check may take that has no limit of its own; ten times that on a core in the full"
        " profile, and on Neuron, where small graphs are compiled first",
    )
    burn_s: float = Field(
        3.0, gt=0, le=600, description="Seconds of matrix products on each core, to compare cores; full: ten times that"
    )
    tolerances: dict[OperationName, Annotated[float, Field(gt=0, le=1)]] = Field(
        {},
        description="Relative error against float64 that an operation may have, in place of the usual one, as"
        " softmax=0.001,layer norm=0.001; for a new kind of device whose accuracy is not known",
    )
    slow_ratio: float = Field(
        1.5, gt=1, le=100, description="A core this many times slower than the median of its peers is unfit"
    )
    sweep_mib: int = Field(256, ge=64, description="Device memory (MiB) that is written and read back on each core")
    full_sweep_mib: int = Field(8192, ge=64, description="The same in the full profile")
    collective_limit_s: float = Field(
        30.0, gt=0, le=3600, description="Seconds after which a rank that does not come to a collective is named"
    )
    min_bus_gb_s: float = Field(
        0.0, ge=0, le=1e5, description="Bus bandwidth (GB/s) the device's largest all-reduce must reach; 0: any will do"
    )
    nodes_wait_s: float = Field(
        600.0, gt=0, le=86_400, description="Seconds to wait for the reports of the other nodes of a job"
    )
    expected_instance: str = Field(
        "", description="Instance type this must run on, such as trn1.32xlarge; empty: do not compare"
    )

    def wants(self, *groups: Group | None) -> bool:
        """True where one of these groups is to be run; None is what others need."""
        return not self.only or None in groups or not {*groups}.isdisjoint(self.only)

    def patience(self, *, on_neuron: bool) -> int:
        """By how much the limits of cores and collectives are longer."""
        return _LONGER if on_neuron or self.profile == "full" else 1

    @field_validator("expected_instance")
    @classmethod
    def _known(cls, name: str) -> str:
        if name and name not in MACHINES:
            raise ValueError(f"expected one of {', '.join(MACHINES)}, or nothing")
        return name
