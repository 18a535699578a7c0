"""A cycle on the fake of AWS Batch, and drivers that submit it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.cycle.cycle_store import LEASE_S, CycleStore
from jobs.plan.spec import Plan
from jobs.targets.batch.client import BatchClient, LogsClient
from jobs.targets.batch.target import BatchTarget
from pipeline.io.requests import RetryPolicy
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import cycle
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.batch.faults import Faults, Killed, faulty

FAST = RetryPolicy(first_wait_s=1e-5, max_wait_s=1e-4, total_deadline_s=60)


@dataclass
class Clock:
    """Seconds since 1970; a millisecond passes at every look."""

    now: float = 1_763_600_000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@dataclass
class Setting:
    """A workspace and an account. `warnings`: what targets said."""

    folder: Path
    lag: int = 0
    plan: Plan = field(default_factory=cycle)
    clock: Clock = field(default_factory=Clock)
    warnings: list[str] = field(default_factory=list)
    logs: Any = None

    def __post_init__(self) -> None:
        self.batch = FakeBatch(self.clock, lag=self.lag)

    def store(self, faults: Faults | None = None) -> CycleStore:
        return CycleStore(faulty(open_storage(str(self.folder)), faults or Faults()), self.plan.cycle, self.clock)

    def target(self, store: CycleStore | None = None, **more: Any) -> BatchTarget:
        client, logs = BatchClient(self.batch, policy=FAST), LogsClient(self.logs, policy=FAST)
        return BatchTarget(client, logs, store or self.store(), warn=self.warnings.append, **more)

    def drive(self, faults: Faults | None = None, *, owner: str = "driver", round_: int = 1, jobs: Any = None) -> None:
        """One driver from claim to end, in a process of its own."""
        faults = faults or Faults()
        self.batch.faults = faults
        store = self.store(faults)
        try:
            with store.submitting(self.plan, "batch", owner) as renew:
                names = jobs or [job.name for job in self.plan.jobs]
                self.target(store, renew=renew).submit(self.plan, round_, names)
        finally:
            self.batch.faults = Faults()

    def drive_killed(self, faults: Faults, **more: Any) -> bool:
        """Whether it died; then its lease runs out."""
        try:
            self.drive(faults, **more)
        except Killed:
            self.clock.now += LEASE_S + 1
            return True
        return False

    def live(self) -> list[dict[str, Any]]:
        """Whole jobs that have not failed, in order of their making."""
        return [one for name, one in self.batch.jobs.items() if not {":", "#"} & {*name} and one["status"] != "FAILED"]

    def assert_one_dag(self) -> None:
        """Every job of the plan once, on record, waiting for the jobs on record."""
        recorded = self.store().submitted(1)
        ids = {one["jobName"]: one["jobId"] for one in self.live()}
        prefix = f"{self.plan.pipeline}-{self.plan.cycle}-"
        assert len(self.live()) == len(ids) == len(self.plan.jobs)
        assert {prefix + name: one.id for name, one in recorded.items()} == ids
        whole = {one["jobId"] for one in self.live()}
        ended = {name for name, one in self.batch.jobs.items() if one["status"] == "FAILED"}
        assert not {name for name in ended if re.split("[:#]", name)[0] in whole}, "a part of a live job was ended"
        for job in self.plan.jobs:
            made = self.batch.jobs[recorded[job.name].id]
            waits_for = {one.job for one in job.depends_on}
            assert {one["jobId"] for one in made["dependsOn"]} == {recorded[name].id for name in waits_for}
