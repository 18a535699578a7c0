"""`trnjobs` on the fake of SageMaker, as it is typed: the driver dies, and `reconcile` sees the cycle through."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trnpipe
from jobs import cli
from jobs.cycle.job_records import JobRecord, JobState
from jobs.plan.dag import Plan
from jobs.settings import CycleSettings, of_all_jobs
from jobs.setup import OpenCycle
from jobs.targets.sagemaker.target import SageMakerTarget
from pipeline.core.errors import EXIT_OK, TransientError
from tests.jobs.targets.sagemaker.setting import QUEUE, Setting, small

CYCLE = "2026-11-20"
Run = Callable[..., int]


@pytest.fixture(params=["direct", "queue"])
def at(request: pytest.FixtureRequest, tmp_path: Path) -> Setting:
    """A driver has recorded the jobs of a cycle, and died."""
    where = {"sagemaker": QUEUE} if request.param == "queue" else {}
    setting = Setting(tmp_path / "workspace", plan=small(**where))
    setting.claim()
    setting.store().save_settings(of_all_jobs(CycleSettings()))
    setting.begin()
    return setting


@pytest.fixture
def run(at: Setting, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command on the cycle; the account is the fake."""

    def opened(cycle: OpenCycle, *_: Any) -> SageMakerTarget:
        return at.target(replace(cycle.store, clock=at.clock))

    monkeypatch.setattr("jobs.setup.open_target", opened)
    return lambda *words: cli.main([*words, "--workspace", str(at.folder)])


def let_all_end(at: Setting, code: int = 0) -> None:
    for job in at.batch.waiting():
        at.batch.dispatch(job)
    for name in at.ml.live():
        at.ml.finish(name, code)
    at.batch.settle()


def test_reconcile_alone_takes_a_cycle_from_its_first_job_to_its_report(at: Setting, run: Run) -> None:
    seen = []
    for _ in range(4):
        assert run("reconcile") == EXIT_OK
        records = at.store().records()
        seen.append([record.name for record in records if record.state is JobState.SUCCEEDED])
        let_all_end(at)
    assert seen == [[], ["train"], ["train", "embed"], ["train", "embed", "verify"]]
    closed = at.store().closed()
    assert closed is not None and closed.outcome == "succeeded"
    made = at.batch.submitted or at.ml.created
    assert len(made) == 4
    assert at.store().storage.stat(f"reports/{CYCLE}.html") is not None
    assert run("reconcile") == EXIT_OK  # nothing is under way
    assert len(made) == 4


def test_waiting_in_python_sees_a_cycle_through_whose_driver_died(
    at: Setting, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    advance = SageMakerTarget.advance

    def throttled_at_times(target: SageMakerTarget, plan: Plan) -> tuple[JobRecord, ...]:
        looks.append(plan)
        if len(looks) % 3 == 1:
            raise TransientError("throttled")
        return advance(target, plan)

    monkeypatch.setattr(SageMakerTarget, "advance", throttled_at_times)
    monkeypatch.setattr("jobs.api.time.sleep", lambda _: let_all_end(at))
    status = trnpipe.Cycle(workspace=at.folder, name=CYCLE).wait()
    assert (status.outcome, [job.state for job in status.jobs]) == ("succeeded", ["SUCCEEDED"] * 3)
    assert len(at.batch.submitted or at.ml.created) == 4 and at.store().closed() is not None


def test_waiting_in_python_ends_where_nobody_answers(at: Setting, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: Any) -> None:
        raise TransientError("nobody answers")

    monkeypatch.setattr(SageMakerTarget, "advance", silent)
    monkeypatch.setattr("jobs.api.PATIENCE_S", 0.0)
    with pytest.raises(TransientError, match="nobody answers"):
        trnpipe.Cycle(workspace=at.folder, name=CYCLE).wait(every_s=0.0)


def test_reconcile_tries_again_and_records_a_refusal(at: Setting, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run("reconcile")
    let_all_end(at, 75)
    run("reconcile")
    assert at.store().closed() is None
    let_all_end(at, 80)
    run("reconcile", "--cycle", CYCLE)
    closed = at.store().closed()
    assert closed is not None and closed.outcome == "refused"
    (train,) = [record for record in at.store().records() if record.name == "train"]
    assert [attempt.exit_code for attempt in train.attempts] == [75, 80]
    said = capsys.readouterr().out
    assert "train" in said and "refused" in said


def test_reconcile_says_why_nothing_starts(at: Setting, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    at.ml.quota = 0
    run("reconcile")
    for job in at.batch.waiting():
        job["statusReason"] = "MISCONFIGURATION:SERVICE_ENVIRONMENT_MAX_RESOURCE"
    capsys.readouterr()
    run("reconcile")
    assert "train cannot start: " in capsys.readouterr().out
    assert at.store().closed() is None


def test_cancel_ends_what_a_dead_driver_left(at: Setting, run: Run) -> None:
    run("reconcile")
    assert run("cancel", "--cycle", CYCLE) == EXIT_OK
    for name in at.ml.live():
        at.ml.end(name, "Stopped")
    run("reconcile", "--cycle", CYCLE)
    closed = at.store().closed()
    assert closed is not None and closed.outcome == "cancelled"
    assert (at.ml.live(), at.batch.waiting()) == ([], [])


def test_a_cycle_that_cannot_be_reached_does_not_hold_back_another(
    at: Setting, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code tells of it; the record of the others is written."""
    other = Setting(at.folder, plan=at.plan.model_copy(update={"cycle": "2026-11-19"}))
    other.ml, other.batch, other.clock = at.ml, at.batch, at.clock
    other.claim()
    other.begin()
    real = at.target().__class__.advance

    def advance(self: SageMakerTarget, plan: Any) -> Any:
        if plan.cycle == "2026-11-19":
            raise TransientError("nobody answers")
        return real(self, plan)

    monkeypatch.setattr(SageMakerTarget, "advance", advance)
    assert run("reconcile") == TransientError.exit_code
    records = json.loads(at.store().storage.read_bytes(f"cycles/{CYCLE}/jobs/records.json"))
    assert [record["name"] for record in records] == ["train", "embed", "verify"]
