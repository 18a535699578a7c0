"""What of a machine is free: virtual CPUs, memory, and the places for gangs."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from jobs.cycle.states import Leaf
from jobs.plan.spec import JobSpec
from pipeline.core.errors import ConfigError


class Slots(BaseModel):
    """An amount of resources: of a machine, or of what runs on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    vcpus: int = Field(0, ge=0)
    memory_mib: int = Field(0, ge=0)
    gangs: int = Field(0, ge=0, description="Multi-node jobs at once")

    def plus(self, other: "Slots") -> "Slots":
        return Slots(
            vcpus=self.vcpus + other.vcpus,
            memory_mib=self.memory_mib + other.memory_mib,
            gangs=self.gangs + other.gangs,
        )

    def fits_in(self, room: "Slots") -> bool:
        return self.vcpus <= room.vcpus and self.memory_mib <= room.memory_mib and self.gangs <= room.gangs

    def __str__(self) -> str:
        gangs = f", {self.gangs} gang" if self.gangs else ""
        return f"{self.vcpus} vCPU, {self.memory_mib:,} MiB{gangs}"


def need_of(job: JobSpec) -> Slots:
    """Of one leaf: all nodes of a gang, or one child of an array."""
    nodes = max(1, job.num_nodes)
    return Slots(
        vcpus=job.resources.vcpus * nodes,
        memory_mib=job.resources.memory_mib * nodes,
        gangs=1 if job.num_nodes else 0,
    )


def admitted(queue: Sequence[Leaf], active: Iterable[Leaf], machine: Slots) -> list[Leaf]:
    """Who may start now, from the head of the queue on. Nobody overtakes a job that does not fit, as in AWS Batch."""
    used = Slots()
    for leaf in active:
        used = used.plus(need_of(leaf.spec))
    chosen = []
    for leaf in queue:
        used = used.plus(need_of(leaf.spec))
        if not used.fits_in(machine):
            break
        chosen.append(leaf)
    return chosen


def check_fits(jobs: Iterable[JobSpec], machine: Slots) -> None:
    """Raises ConfigError naming every job that could never run here."""
    too_big = [f"{job.name}: {need_of(job)}" for job in jobs if not need_of(job).fits_in(machine)]
    if too_big:
        raise ConfigError(
            "\n  ".join([f"{len(too_big)} jobs need more than this machine gives:", *too_big]),
            expected=f"at most {machine} at once",
            next_command="fewer nodes or smaller jobs (settings under [jobs]), or trnjobs submit --target batch",
        )
