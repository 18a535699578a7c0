"""Jobs to replay through a policy: given in a file, or a generated mix as a search team has it."""

from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

DAY_S = 86_400.0
Floats = npt.NDArray[np.float64]


class SimulatedJob(BaseModel):
    """One job as it was, or might be, submitted."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1, description="Unique name")
    share: str = Field(pattern=r"^[A-Za-z0-9]{1,255}$", description="Share identifier; letters and digits only")
    submit_s: float = Field(ge=0, allow_inf_nan=False, description="Seconds after the start")
    duration_s: float = Field(gt=0, allow_inf_nan=False, description="Seconds of the attempt that succeeds")
    vcpus: int = Field(ge=1, description="vCPU of one node")
    nodes: int = Field(1, ge=1, le=1000, description="Nodes that run at once")
    priority: int = Field(0, ge=0, le=9999, description="Within its share, higher first")
    failed_s: tuple[float, ...] = Field((), description="Seconds of each attempt that fails first and is retried")
    depends_on: tuple[str, ...] = Field((), max_length=20, description="Jobs that must succeed before")

    @property
    def size(self) -> int:
        """vCPU of all nodes."""
        return self.vcpus * self.nodes


class Workload(BaseModel):
    """Jobs of one queue."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    jobs: tuple[SimulatedJob, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        known = {job.id for job in self.jobs}
        if len(known) < len(self.jobs):
            raise ValueError(f"{len(self.jobs) - len(known)} job ids are not unique")
        earlier = set[str]()
        for job in sorted(self.jobs, key=lambda job: job.submit_s):
            for name in job.depends_on:
                if name not in known:
                    raise ValueError(f"job {job.id} depends on {name}, which is not there")
                if name not in earlier:
                    raise ValueError(f"job {job.id} depends on {name}, which is submitted after it")
            earlier.add(job.id)
        return self


class Mix(BaseModel):
    """A generated workload: production cycles on a cron, experiments at random, backfills in bursts."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_jobs: int = Field(2000, ge=1, le=1_000_000, description="Jobs to generate")
    max_vcpus: int = Field(1280, ge=1, description="vCPU of the fleet, to size the load by")
    vcpus_per_node: int = Field(128, ge=1, description="vCPU of one node, all of them asked for (trn1.32xlarge: 128)")
    load: float = Field(0.9, gt=0, le=10, description="vCPU-seconds asked for, over those there are")
    production_share: float = Field(0.3, ge=0, le=1, description="Part of the load that is production")
    backfill_share: float = Field(0.3, ge=0, le=1, description="Part of the load that is backfills")
    seed: int = Field(0, ge=0, description="The same seed gives the same jobs")

    @model_validator(mode="after")
    def _parts(self) -> Self:
        if self.production_share + self.backfill_share > 1:
            raise ValueError("production_share and backfill_share are more than 1 together")
        return self


def generate(mix: Mix) -> Workload:
    """Jobs of three kinds, `production`, `experiment0..3` and `backfill`. Times are log-normal, gangs up to 8 nodes."""
    random = np.random.default_rng([mix.seed, 1])
    most_nodes = max(1, mix.max_vcpus // mix.vcpus_per_node)
    kinds = random.choice(3, size=mix.num_jobs, p=_parts(mix))
    nodes = np.minimum(2 ** random.integers(0, 4, size=mix.num_jobs), most_nodes)
    duration = np.clip(random.lognormal(np.log(2400.0), 0.8, size=mix.num_jobs), 60.0, 8 * 3600.0)
    asked = float((nodes * mix.vcpus_per_node * duration).sum())
    span = asked / (mix.max_vcpus * mix.load)
    submit = np.stack(
        [_cron(random, span, mix.num_jobs), random.uniform(0, span, mix.num_jobs), _bursts(random, span, mix.num_jobs)]
    )
    fails = random.random(mix.num_jobs) < 0.03
    jobs = list[SimulatedJob]()
    for i in range(mix.num_jobs):
        kind = int(kinds[i])
        share = ("production", f"experiment{i % 4}", "backfill")[kind]
        jobs.append(
            SimulatedJob(
                id=f"{share}-{i}",
                share=share,
                submit_s=round(float(submit[kind, i]), 1),
                duration_s=round(float(duration[i]), 1),
                vcpus=mix.vcpus_per_node,
                nodes=int(nodes[i]),
                priority=(100, 10, 0)[kind],
                failed_s=(round(float(duration[i]) / 2, 1),) if fails[i] else (),
            )
        )
    return Workload(jobs=tuple(jobs))


def _parts(mix: Mix) -> list[float]:
    return [mix.production_share, 1.0 - mix.production_share - mix.backfill_share, mix.backfill_share]


def _cron(random: np.random.Generator, span: float, size: int) -> Floats:
    """Every four hours, within a few minutes."""
    slots = max(1, int(span // (DAY_S / 6)))
    return np.minimum(random.integers(0, slots, size) * (DAY_S / 6) + random.uniform(0, 300, size), span)


def _bursts(random: np.random.Generator, span: float, size: int) -> Floats:
    """All at once, at a few moments."""
    moments = random.uniform(0, span, max(1, int(span // (2 * DAY_S))))
    return random.choice(moments, size)


def shares_of(workload: Workload) -> Iterator[str]:
    """Share identifiers, sorted."""
    yield from sorted({job.share for job in workload.jobs})
