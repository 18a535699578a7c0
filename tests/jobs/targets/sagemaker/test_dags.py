"""Whole DAGs on the fake of SageMaker, with drivers that die after any call, held against the local engine."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError
from hypothesis import given
from hypothesis import strategies as st

from jobs.cycle.job_states import JobState, tasks_of
from jobs.plan.spec import JobSpec
from jobs.targets.local.nodes import NodeEnd
from tests.jobs.cycle import cases
from tests.jobs.targets.faults import Faults
from tests.jobs.targets.local.cases import Fate, of_no_use, world
from tests.jobs.targets.local.test_engine import dags
from tests.jobs.targets.sagemaker.fake_sagemaker import FakeSageMaker, refused
from tests.jobs.targets.sagemaker.setting import QUEUE, Setting, ml_plan

ENDS: Mapping[str, NodeEnd] = {  # as the local engine sees them
    "good": NodeEnd(exit_code=0),
    "good again": NodeEnd(exit_code=0),
    "transient": NodeEnd(exit_code=75),
    "bad data": NodeEnd(exit_code=65),
    "host lost": NodeEnd(lost=True),
    "no capacity": NodeEnd(error="x: gone"),
    "timeout": NodeEnd(exit_code=143, stopped_by="timeout"),
    "stopped from the console": NodeEnd(exit_code=143),
}
End = dict[tuple[str, int], str]
THROTTLED = refused("ThrottlingException", "Rate exceeded", "")
LOST = ReadTimeoutError(endpoint_url="https://api.sagemaker.us-east-1.amazonaws.com")


def apply(ml: FakeSageMaker, name: str, end: str) -> None:
    """As SageMaker ends it."""
    match end:
        case "host lost":
            ml.start(name)
            ml.end(name, "Failed", "InternalServerError: We encountered an internal error. Please try again.")
        case "no capacity":
            ml.end(name, "Failed", "CapacityError: Unable to provision requested ML compute capacity.")
        case "timeout" | "stopped from the console":
            ml.start(name)
            ml.end(name, "Stopped", secondary="MaxRuntimeExceeded" if end == "timeout" else "Stopped")
        case _:
            ml.finish(name, ENDS[end].exit_code or 0)


def key_of(request: Mapping[str, Any]) -> tuple[str, int]:
    """Name of leaf and number of try of a training job."""
    said = request["Environment"]
    index = f":{said['TRNJOBS_INDEX']}" if "TRNJOBS_INDEX" in said else ""
    return said["TRNJOBS_JOB"] + index, int(said["TRNJOBS_ATTEMPT"])


class Unreliable(Faults):
    """AWS throttles, or its answer is lost, now and then; the workspace is there."""

    def __init__(self, rng: random.Random, kill_after: int) -> None:
        super().__init__(kill_after=kill_after)
        self._rng = rng

    def run(self, name: str, work: Any) -> Any:
        if name[:1].isupper() and (fault := self._rng.choice(["", "", "", "", "throttled", "lost"])):
            self.errors = {len(self.calls) + 1: (THROTTLED, False) if fault == "throttled" else (LOST, True)}
        return super().run(name, work)


class Sky:
    """What happens while a driver waits: jobs start, lose their Spot capacity, and end as `ends` says."""

    possible: Sequence[str] = (*ENDS,)

    def __init__(self, at: Setting, ends: End, rng: random.Random) -> None:
        self.at, self.ends, self.rng, self.waits = at, ends, rng, 0
        at.ml.on_create = self.check

    def __call__(self) -> None:
        self.waits += 1
        assert self.waits < 2000, "the cycle hangs"
        self.move_all()

    def move_all(self) -> None:
        live = self.at.ml.live()
        for number, name in enumerate(self.rng.sample(live, len(live))):
            self.move(name, self.rng.choice(["end", "start", "interrupt", "stay"]) if number else "end")

    def move(self, name: str, what: str) -> None:
        if what == "end":
            key = self.key_of(name)
            self.ends.setdefault(key, self.rng.choice(self.possible))
            apply(self.at.ml, name, self.ends[key])
        elif what == "start":
            self.at.ml.start(name)
        elif what == "interrupt" and "TrainingStartTime" in self.at.ml.jobs[name]:
            self.at.ml.move(name, "InProgress", "Interrupted")

    def key_of(self, name: str) -> tuple[str, int]:
        return key_of(self.at.ml.jobs[name])

    def check(self, request: Mapping[str, Any]) -> None:
        """At every creation: what it waits for has succeeded, and no other try of it lives or has."""
        leaf_name, attempt = key_of(request)
        done = {key_of(one): one["TrainingJobStatus"] for one in self.at.ml.jobs.values()}
        tasks = {task.name: task for spec in self.at.plan.jobs for task in tasks_of(spec)}
        good = {key[0] for key, status in done.items() if status == "Completed"}
        for needed in tasks[leaf_name].waits_for():
            assert {one.name for one in tasks.values() if needed in (one.name, one.spec.name)} <= good
        tries = {key[1]: status for key, status in done.items() if key[0] == leaf_name}
        assert set(tries) == set(range(1, attempt)), f"{leaf_name}: {tries}, then {attempt}"
        assert set(tries.values()) <= {"Failed", "Stopped"}


def of_the_local_engine(jobs: list[JobSpec], ends: End) -> dict[str, tuple[str, list[int | None]]]:
    def fate(name: str, attempt: int, node: int) -> Fate:
        return Fate(1.0, NodeEnd(exit_code=0) if node else ENDS[ends.get((name, attempt), "good")])

    made = world(jobs, fate, vcpus=64)
    made.engine().run()
    return {one.name: (one.state.value, [a.exit_code for a in one.attempts]) for one in made.files.state(1)}


def of_sagemaker(at: Setting) -> dict[str, tuple[str, list[int | None]]]:
    records = [task for one in at.target().records(at.plan) for task in one.tasks()]
    return {one.name: (one.state.value, [a.exit_code for a in one.attempts]) for one in records}


Found = Mapping[str, tuple[str, list[int | None]]]


def assert_ends_as(found: Found, jobs: list[JobSpec], expected: Found) -> None:
    """But for jobs that were of no use any more: how far those came is a matter of time."""
    tasks = [task for one in jobs for task in tasks_of(one)]
    either = of_no_use(tasks, {name: JobState(state) for name, (state, _) in expected.items()})
    assert {name: end for name, end in found.items() if name not in either} == {
        name: end for name, end in expected.items() if name not in either
    }


# The same through a queue of AWS Batch, which tries again by itself.

OF_THE_QUEUE = [end for end in ENDS if end != "stopped from the console"]
"""Batch has no rule for what was stopped from outside: SageMaker gives no reason of failure for it."""


class QueueSky(Sky):
    """Also Batch hands service jobs over, takes them back, and sees how training jobs have ended."""

    possible = OF_THE_QUEUE

    def __init__(self, at: Setting, ends: End, rng: random.Random) -> None:
        super().__init__(at, ends, rng)
        at.ml.on_create = lambda request: None
        at.batch.on_submit = self.check

    def move_all(self) -> None:
        for job in self.at.batch.waiting():
            self.at.batch.dispatch(job)
            if self.rng.random() < 0.2:
                self.at.batch.fall_back(job)
        super().move_all()
        if self.rng.random() < 0.7:
            self.at.batch.settle()

    def key_of(self, name: str) -> tuple[str, int]:
        job_id, number = self.at.batch.tries[name]
        return self.at.batch.jobs[job_id]["tags"]["job"], number

    def check(self, request: Mapping[str, Any]) -> None:
        """At every submission: what it waits for has succeeded, and there is no other service job of it."""
        tasks = {task.name: task for spec in self.at.plan.jobs for task in tasks_of(spec)}
        made = {job["tags"]["job"]: job["status"] for job in self.at.batch.jobs.values()}
        assert request["tags"]["job"] not in made
        for needed in tasks[request["tags"]["job"]].waits_for():
            of = [one.name for one in tasks.values() if needed in (one.name, one.spec.name)]
            assert {made[name] for name in of} == {"SUCCEEDED"}


def new_sky(at: Setting, ends: End, rng: random.Random, placement: Mapping[str, Any]) -> Sky:
    return (QueueSky if placement else Sky)(at, ends, rng)


ROUTES = pytest.mark.parametrize("placement", [{}, {"sagemaker": QUEUE}], ids=["direct", "queue"])


@ROUTES
@given(
    jobs=dags(),
    seed=st.integers(0, 2**32),
    lag=st.integers(0, 3),
    lives=st.lists(st.integers(1, 40), max_size=8),
    rejects=st.booleans(),
)
def test_any_dag_with_any_ends_ends_as_on_this_machine_though_drivers_die(
    placement: Mapping[str, Any], jobs: list[JobSpec], seed: int, lag: int, lives: list[int], rejects: bool
) -> None:
    rng, ends = random.Random(seed), End()
    with TemporaryDirectory() as folder:
        at = Setting(Path(folder), plan=ml_plan(*jobs, **placement), lag=lag)
        at.batch.rejects_twins = rejects
        sky = new_sky(at, ends, rng, placement)
        at.claim()
        for calls in lives:
            at.drive_killed(sky, Unreliable(rng, calls))
        at.drive(sky, Unreliable(rng, 0))
        assert (at.ml.live(), at.batch.waiting()) == ([], [])
        names = [one["jobName"] for one in at.batch.submitted] or [one["TrainingJobName"] for one in at.ml.created]
        assert len(names) == len(set(names))
        found = of_sagemaker(at)
        assert_ends_as(found, jobs, of_the_local_engine(jobs, ends))
        at.store().save_records(())  # and a process that knows nothing finds the same
        assert_ends_as(of_sagemaker(at), jobs, found)


@ROUTES
@pytest.mark.parametrize("rejects", [True, False])
def test_two_drivers_at_once_make_one_job(tmp_path: Path, placement: Mapping[str, Any], rejects: bool) -> None:
    at = Setting(tmp_path, plan=ml_plan(cases.job("train"), **placement))
    at.claim()
    at.begin()
    at.batch.rejects_twins = rejects
    other = at.target()
    at.ml.faults = Faults(meanwhile={2: lambda: other.advance(at.plan)})  # between look and creation of the first
    at.target().advance(at.plan)
    assert len({*at.ml.faults.calls} & {"CreateTrainingJob", "SubmitServiceJob"}) == 1
    assert len(at.batch.submitted or at.ml.created) == 1
