"""Ways in which SageMaker is not AWS Batch, one test each. Of nodes: tests/jobs/node; of whole DAGs: test_dags.py."""

from pathlib import Path

import pytest

from jobs.cycle.job_states import CANCELLED, HOST_TERMINATED, JobState, is_tried_again
from jobs.plan.spec import Retry
from jobs.targets.sagemaker.describe import end_of
from pipeline.core.errors import ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from tests.jobs.cycle.cases import job
from tests.jobs.targets.batch.faults import Faults
from tests.jobs.targets.sagemaker.setting import Setting, ml_plan

STARTING, RUNNABLE, RUNNING = JobState.STARTING, JobState.RUNNABLE, JobState.RUNNING
SUCCEEDED, FAILED = JobState.SUCCEEDED, JobState.FAILED


@pytest.fixture
def one(tmp_path: Path) -> Setting:
    """A cycle of a single job."""
    return Setting(tmp_path, plan=ml_plan(job("train")))


def test_a_name_that_belongs_to_somebody_else_is_not_adopted(one: Setting) -> None:
    one.tick()
    one.ml.jobs[one.name("train")]["Environment"] = {}
    one.store().save_records(())
    one.ml.jobs[one.name("train")]["_visible"] = 10**9
    one.ml.faults = Faults(meanwhile={3: lambda: one.ml.jobs[one.name("train")].update(_visible=0)})
    with pytest.raises(ConfigError, match="belongs to no plan of trnjobs"):
        one.target().advance(one.plan)


def test_trap_11_without_quota_a_job_stays_runnable_and_says_why(one: Setting) -> None:
    one.ml.quota = 0
    record = one.tick()["train"]
    assert (record.state, record.attempts) == (RUNNABLE, ())
    (line,) = one.target().check_blocked([record])
    assert line.startswith("train cannot start: ResourceLimitExceeded: The account-level service limit")
    one.ml.quota = 1
    assert one.tick()["train"].state is STARTING


def test_trap_13_a_retry_after_the_training_job_was_deleted(one: Setting) -> None:
    one.tick()
    one.ml.finish(one.name("train"), 65)
    assert one.tick()["train"].state is FAILED
    one.ml.delete(one.name("train"))
    assert one.states() == {"train": FAILED}  # from the record
    one.begin(2, ("train",))
    one.tick()
    one.ml.finish(one.name("train", round_=2), 0)
    assert one.tick()["train"].state is SUCCEEDED


@pytest.mark.parametrize("running", ["train", "embed"])
def test_what_a_driver_made_and_could_not_record_is_ended_by_a_cancel(tmp_path: Path, running: str) -> None:
    """The records say that it waits; its training job runs, and costs, until somebody ends it."""
    at = Setting(tmp_path, plan=ml_plan(job("train"), job("embed", "train"), job("verify", "embed")))
    at.tick()
    if running == "embed":
        at.ml.finish(at.name("train"), 0)
        at.tick()
    at.ml.start(at.name(running))
    at.store().save_records(())
    at.target().cancel(at.plan, CANCELLED + "why")
    assert at.ml.stopped == [at.name(running)]
    at.ml.end(at.name(running), "Stopped")
    states = {name: record.state for name, record in at.tick().items()}
    assert states.pop("train") is (SUCCEEDED if running == "embed" else JobState.CANCELLED)
    assert set(states.values()) == {JobState.CANCELLED}


# What else comes from outside.


def test_spot_capacity_that_is_taken_costs_no_try(one: Setting) -> None:
    one.tick()
    name = one.name("train")
    one.ml.start(name)
    one.tick()
    one.ml.interrupt(name)
    record = one.tick()["train"]
    assert (record.state, record.status_reason, len(record.attempts)) == (RUNNING, "Interrupted", 1)
    assert one.target().check_blocked([record]) == ("train waits for machines of SageMaker: Interrupted",)
    one.ml.finish(name, 0)
    assert one.tick()["train"].state is SUCCEEDED
    assert len(one.ml.created) == 1


def test_a_driver_that_is_told_to_stop_leaves_the_jobs_alone(one: Setting) -> None:
    one.claim()
    stop = StopSignal()
    target = one.target(stop=stop)
    one.ml.on_create = lambda request: stop.set("SIGTERM")
    with pytest.raises(Preempted, match="which run on"):
        target.submit(one.plan, 1, ["train"])
    assert (len(one.ml.live()), one.ml.stopped) == (1, [])


@pytest.mark.parametrize(
    ("reason", "code", "again"),
    [
        *(
            (f"AlgorithmError: exit 75 TransientError: {'é' * 1000}, exit code: 75".encode()[: 1024 - cut], 75, True)
            for cut in range(2)
        ),
        (b"InternalServerError: We encountered an internal error. Please try again.", None, True),
        (b"CapacityError: Unable to provision requested ML compute capacity.", None, True),
        (b"ClientError: Artifact upload failed: access denied", None, False),
        (b"AlgorithmError: , exit code: 1", 1, False),
        (b"AlgorithmError: exit 143 Preempted, exit code: 143", 143, True),
        (b"AlgorithmError: exit 1 error: no exit 75 here, exit code: 1", 1, False),
        (b"AlgorithmError: ", 1, False),
        (b"", None, False),
    ],
)
def test_every_kind_of_failure_though_its_reason_is_cut(reason: bytes, code: int | None, again: bool) -> None:
    end = end_of("Failed", "Failed", reason.decode(errors="replace"))
    assert (end.exit_code, is_tried_again(Retry.of(3), 1, end)) == (code, again)
    assert end.status_reason != HOST_TERMINATED


def test_an_outage_is_waited_out_for_a_quarter_of_an_hour(one: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    one.claim()

    def outage(**request: str) -> dict[str, object]:
        raise TransientError("nobody answers")

    def meanwhile() -> None:
        one.clock.now += 600

    monkeypatch.setattr(one.ml, "describe_training_job", outage)
    with pytest.raises(TransientError, match="nobody answers"):
        one.drive(meanwhile)
    assert one.said.count("not reached: nobody answers") == 3
