"""A cycle on the fake of SageMaker, and drivers that see it through."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.cycle.cycle_store import CycleStore
from jobs.cycle.job_states import JobRecord, JobState
from jobs.plan.spec import JobPlan, JobSpec
from jobs.targets.batch.client import LogsClient
from jobs.targets.sagemaker.routes import DirectRoute, QueueRoute
from jobs.targets.sagemaker.target import SageMakerTarget
from pipeline.core.stop import StopSignal
from pipeline.io.storage import open_storage
from tests.jobs.cycle.cases import TRN1, job, plan
from tests.jobs.targets.faults import FAST, Clock, Faults, Killed, faulty
from tests.jobs.targets.sagemaker.fake_sagemaker import FakeSageMaker, FakeServiceJobs

ROLE = "arn:aws:iam::123456789012:role/relevance-train"
COMMAND = ("trnjobs-entry", "--", "trnpipe", "train")


def ml_plan(*jobs: JobSpec, **placement: Any) -> JobPlan:
    """Every job with a role, and a command as SageMaker takes it."""
    made = [one.model_copy(update={"command": COMMAND}) if one.command[0] == "trnpipe" else one for one in jobs]
    return plan(*made, job_role=ROLE, **placement)


QUEUE = {"queue": "ml"}
"""A placement that goes through a queue."""


def small(**placement: Any) -> JobPlan:
    """A gang, and an array after it."""
    train = job("train", num_nodes=2, resources=TRN1)
    return ml_plan(train, job("embed", "train", array_size=2), job("verify", "embed"), **placement)


class Following(StopSignal):
    """The signal of a driver; while the driver waits, `meanwhile` happens."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def wait(self, timeout_s: float) -> bool:
        self._meanwhile()
        return self.is_set()


@dataclass
class Setting:
    """A workspace and an account. `said`: lines of the targets."""

    folder: Path
    plan: JobPlan = field(default_factory=small)
    lag: int = 0
    clock: Clock = field(default_factory=Clock)
    said: list[str] = field(default_factory=list)
    logs: Any = None

    def __post_init__(self) -> None:
        self.ml = FakeSageMaker(self.clock, lag=self.lag)
        self.batch = FakeServiceJobs(self.ml)

    def store(self, faults: Faults | None = None) -> CycleStore:
        return CycleStore(faulty(open_storage(str(self.folder)), faults or Faults()), self.plan.cycle, self.clock)

    def target(self, store: CycleStore | None = None, stop: StopSignal | None = None) -> SageMakerTarget:
        direct, logs = DirectRoute(self.ml, policy=FAST), LogsClient(self.logs, policy=FAST)
        queue = QueueRoute(self.batch, direct, self.said.append, policy=FAST)
        return SageMakerTarget(
            direct, queue, logs, store or self.store(), self.said.append, stop or StopSignal(), poll_s=1e-6
        )

    def claim(self) -> None:
        with self.store().submitting(self.plan, "sagemaker", "driver"):
            pass

    def drive(self, meanwhile: Callable[[], object], faults: Faults | None = None, *, submission: int = 1) -> None:
        """One driver from its submission to the end of the cycle, in a process of its own."""
        faults = self.ml.faults = faults or Faults()
        names = [one.name for one in self.plan.jobs]
        try:
            self.target(self.store(faults), Following(meanwhile)).submit(self.plan, submission, names)
        finally:
            self.ml.faults = Faults()

    def drive_killed(self, meanwhile: Callable[[], object], faults: Faults) -> bool:
        """Whether it died."""
        try:
            self.drive(meanwhile, faults)
        except Killed:
            return True
        return False

    def tick(self) -> dict[str, JobRecord]:
        """One advance by a driver; records of leaves by name."""
        if not self.store().submissions():
            self.claim()
            self.begin()
        return {task.name: task for one in self.target().advance(self.plan) for task in one.tasks()}

    def begin(self, submission: int = 1, jobs: tuple[str, ...] = ()) -> None:
        """Submissions alone, as of a driver that died right after them."""
        stop = StopSignal()
        stop.set("SIGTERM")
        target = self.target(stop=stop)
        target.record_submissions(self.plan, submission, jobs or tuple(one.name for one in self.plan.jobs))

    def name(self, task: str, attempt: int = 1, submission: int = 1) -> str:
        """Of a training job."""
        job_name, _, index = task.partition(":")
        wanted = f"-{job_name}{'-' + index if index else ''}-r{submission}a{attempt}-"
        (found,) = [name for name in self.ml.jobs if wanted in name]
        return found

    def states(self) -> dict[str, JobState]:
        return {task.name: task.state for one in self.target().records(self.plan) for task in one.tasks()}
