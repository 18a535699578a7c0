"""A cycle on the fake of AWS Batch, and drivers that submit it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.cycle.cycle_store import LEASE_S, CycleStore
from jobs.plan.spec import JobPlan
from jobs.targets.batch.client import BatchClient, LogsClient
from jobs.targets.batch.target import BatchTarget
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import cycle
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.faults import FAST, Clock, Faults, Killed, Request, faulty


@dataclass
class Setting:
    """A workspace and an account. `warnings`: what targets said."""

    folder: Path
    lag: int = 0
    plan: JobPlan = field(default_factory=cycle)
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

    def drive(
        self, faults: Faults | None = None, *, owner: str = "driver", submission: int = 1, jobs: Any = None
    ) -> None:
        """One driver from claim to end, in a process of its own."""
        faults = self.batch.faults = faults or Faults()
        store = self.store(faults)
        try:
            with store.submitting(self.plan, "batch", owner) as renew:
                names = jobs or [job.name for job in self.plan.jobs]
                self.target(store, renew=renew).submit(self.plan, submission, names)
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

    def live(self) -> list[Request]:
        """Whole jobs that have not failed, in order of their making."""
        return [one for name, one in self.batch.jobs.items() if not {":", "#"} & {*name} and one["status"] != "FAILED"]

    def live_names(self) -> list[str]:
        return [one["jobName"].removeprefix(f"{self.plan.pipeline}-{self.plan.cycle}-") for one in self.live()]

    def ids(self, submission: int = 1) -> dict[str, str]:
        """Of jobs on record."""
        return {name: one.id for name, one in self.store().submitted(submission).items()}

    def assert_one_dag(self) -> None:
        """Every job of the plan once, on record, waiting for the jobs on record."""
        ids = self.ids()
        assert sorted(self.live_names()) == sorted(one.name for one in self.plan.jobs)
        assert {*ids.values()} == {one["jobId"] for one in self.live()}
        ended = {name for name, one in self.batch.jobs.items() if one["status"] == "FAILED"}
        parts = {name for name in ended if re.split("[:#]", name)[0] in ids.values()}
        assert not parts, "a part of a live job was ended"
        for job in self.plan.jobs:
            waits_for = {one["jobId"] for one in self.batch.jobs[ids[job.name]]["dependsOn"]}
            assert waits_for == {ids[one.job] for one in job.depends_on}
