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
"""The operations of device.py, which needs torch."""
NUM_NCCOM_TESTS, NCCOM_LIMIT_S = 3, 300.0  # each size is compiled first
START_LIMIT_S = 60.0  # for the ranks to import what they need, on a busy host
SLOW_RATIO = 1.5
"""A core that is this many times slower than the median of the others is unfit."""
_LONGER = 10


class HealthConfig(Record):
    """What a machine must have before work is given to it."""

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
        (), description="Run only these groups of checks: host, tools, cores, collectives; none named: all"
    )
    min_free_gib: float = Field(
        10.0,
        ge=0,
        le=1e6,
        description="Free disk (GiB) for compiled graphs, and for checkpoints; twice that on a disk that takes both;"
        " 0: any will do",
    )
    check_limit_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Seconds a check may take, and a rank may be late for a collective; ten times that for cores and"
        " collectives on Neuron, where small graphs are compiled first",
    )
    tolerances: dict[OperationName, Annotated[float, Field(gt=0, le=1)]] = Field(
        {},
        description="Relative error against float64 that an operation may have, in place of the usual one, as"
        " softmax=0.001,layer norm=0.001; for a new kind of device whose accuracy is not known",
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
        """Return whether one of these groups is to be run; None is run always."""
        return not self.only or None in groups or not {*groups}.isdisjoint(self.only)

    def device_limit_s(self, *, on_neuron: bool) -> float:
        """Return the seconds of one check of cores or collectives."""
        return self.check_limit_s * (_LONGER if on_neuron else 1)

    def stage_limit_s(self, *, on_neuron: bool, num_nodes: int, processes: int) -> float:
        """Return the longest that the stage may take: nccom-test, the ranks, and the wait for the other nodes.

        The short checks of the host are not in it.
        """
        limit_s = NUM_NCCOM_TESTS * NCCOM_LIMIT_S if on_neuron and processes > 1 and self.wants("tools") else 0.0
        if self.wants("cores", "collectives"):
            limit_s += START_LIMIT_S + 6 * self.device_limit_s(on_neuron=on_neuron)
        return limit_s + (self.nodes_wait_s if num_nodes > 1 else 0.0)

    @field_validator("expected_instance")
    @classmethod
    def _known(cls, name: str) -> str:
        if name and name not in MACHINES:
            raise ValueError(f"expected one of {', '.join(MACHINES)}, or nothing")
        return name
