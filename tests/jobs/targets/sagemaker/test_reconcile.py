"""`trnjobs` on the fake of SageMaker, as it is typed: the driver dies, and `reconcile` sees the cycle through."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import cli
from jobs.cycle.job_states import JobState
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
