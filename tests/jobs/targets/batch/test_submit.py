"""Submitting a cycle to AWS Batch: one DAG, one job per node of it, whatever happens on the way."""

from pathlib import Path

import pytest
from botocore.exceptions import ReadTimeoutError

from jobs.cycle.cycle_store import LEASE_S, CycleStore
from pipeline.core.errors import TransientError
from tests.jobs.cycle.cases import job, plan
from tests.jobs.targets.batch.setting import Setting
from tests.jobs.targets.faults import Faults, client_error

LOST = ReadTimeoutError(endpoint_url="http://batch")
THROTTLED = client_error("TooManyRequestsException", status=429)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path / "run")


@pytest.fixture
def calls(tmp_path: Path) -> list[str]:
    """Of one driver that is left alone."""
    faults = Faults()
    Setting(tmp_path / "count").drive(faults)
    return faults.calls


def position(calls: list[str], name: str, number: int = 1) -> int:
    """Of the n-th call of this name, from 1."""
    return [i for i, call in enumerate(calls, 1) if call == name][number - 1]


def test_a_cycle_is_one_dag_in_the_plan_s_order(setting: Setting) -> None:
    setting.drive()
    setting.assert_one_dag()
    assert [(one["jobName"], one["jobDefinition"]) for one in setting.batch.submitted] == [
        (f"relevance-2026-11-20-{name}", f"relevance-{name}:1") for name in ("train", "embed", "verify")
    ]
    recorded = setting.store().submitted(1)
    assert recorded["train"].definition == "relevance-train:1"
    assert recorded["train"].submitted_at < recorded["embed"].submitted_at
    assert setting.warnings == []


@pytest.mark.parametrize(("lag", "owner", "step"), [(0, "driver", 1), (3, "another", 4)])
def test_killed_after_any_call_and_run_again_it_converges(
    tmp_path: Path, calls: list[str], lag: int, owner: str, step: int
) -> None:
    """Dying before a call is dying after the one before it."""
    for number in range(1, len(calls) + 1, step):
        setting = Setting(tmp_path / f"{number}", lag=lag)
        assert setting.drive_killed(Faults(kill_after=number)), number
        setting.drive(owner=owner)
        setting.assert_one_dag()
        assert len(setting.batch.definitions) == 3, number


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("done", [True, False])
def test_a_submission_without_an_answer_is_looked_for_before_it_is_repeated(
    setting: Setting, calls: list[str], number: int, done: bool
) -> None:
    setting.drive(Faults(errors={position(calls, "SubmitJob", number): (LOST, done)}))
    setting.assert_one_dag()
    assert len(setting.batch.submitted) == 3


def test_every_call_throttled_once(tmp_path: Path, calls: list[str]) -> None:
    for number in [i for i, call in enumerate(calls, 1) if call[0].isupper()]:
        setting = Setting(tmp_path / f"run-{number}")
        setting.drive(Faults(errors={number: (THROTTLED, False)}))
        setting.assert_one_dag()
        assert len(setting.batch.submitted) == 3


def test_twins_are_ended_and_the_recorded_one_stays(tmp_path: Path, calls: list[str]) -> None:
    """AWS Batch lists a new job so late that a second driver does not see it."""
    setting = Setting(tmp_path / "run", lag=8)
    assert setting.drive_killed(Faults(kill_after=position(calls, "SubmitJob")))
    setting.drive()
    setting.assert_one_dag()
    (ended,) = [one for one in setting.batch.jobs.values() if one["status"] == "FAILED" and "#" not in one["jobId"]]
    assert ended["jobName"] == "relevance-2026-11-20-train"
    assert ended["statusReason"] == "train was submitted twice, and this copy is not the recorded one"


def test_jobs_of_another_workspace_or_of_an_earlier_life_of_the_cycle_are_left_alone(tmp_path: Path) -> None:
    """The same names: staging; and the workspace was emptied and the same plan submitted again the next day."""
    one, other, again = (Setting(tmp_path / name) for name in ("one", "other", "again"))
    other.plan = one.plan.model_copy(update={"workspace": "s3://bucket/staging"})
    other.batch = again.batch = one.batch
    again.clock = one.clock
    one.drive()
    other.drive()
    for job_ in one.batch.jobs.values():
        job_["status"] = "SUCCEEDED"
    one.clock.now += 86_400
    again.drive()
    assert len(one.live()) == len({*one.ids().values(), *other.ids().values(), *again.ids().values()}) == 9


def test_a_later_round_makes_new_jobs_that_wait_for_each_other_only(setting: Setting) -> None:
    setting.drive()
    train = setting.ids()["train"]
    for one in setting.batch.jobs.values():
        one["status"] = "SUCCEEDED" if one["jobId"].startswith(train) else "FAILED"
    setting.batch.forget(train)
    for _ in range(2):
        setting.drive(submission=2, jobs=["embed", "verify"])
        embed, verify = setting.batch.submitted[3:]
    assert embed["jobName"] == "relevance-2026-11-20-embed-round-2"
    assert {"name": "TRNJOBS_ROUND", "value": "2"} in embed["containerOverrides"]["environment"]
    assert (embed["dependsOn"], verify["dependsOn"]) == ([], [{"jobId": setting.ids(2)["embed"]}])
    assert setting.store().current()["train"].id == train


def test_what_a_driver_left_unrecorded_in_an_earlier_round_is_ended(tmp_path: Path) -> None:
    def in_second_round(folder: Path, faults: Faults) -> Setting:
        setting = Setting(folder)
        setting.drive()
        for one in setting.batch.jobs.values():
            one["status"] = "FAILED"
        setting.drive_killed(faults, submission=2, jobs=["embed", "verify"])
        return setting

    in_second_round(tmp_path / "count", count := Faults())
    setting = in_second_round(tmp_path / "run", Faults(kill_after=position(count.calls, "SubmitJob", 2)))
    assert setting.live_names() == ["embed-round-2", "verify-round-2"]
    assert setting.ids(2).keys() == {"embed"}
    setting.drive(submission=3, jobs=["verify"])
    assert setting.live_names() == ["embed-round-2", "verify-round-3"]


def test_a_changed_definition_is_a_new_revision_and_the_old_one_is_found_again(setting: Setting) -> None:
    def submit(cycle: str, timeout_s: int) -> str:
        setting.plan = plan(job("train", timeout_s=timeout_s)).model_copy(update={"cycle": cycle})
        setting.drive()
        return setting.store().submitted(1)["train"].definition

    revisions = [submit("a", 3600), submit("b", 7200), submit("c", 3600), submit("d", 7200), submit("e", 60)]
    assert [one.rpartition(":")[2] for one in revisions] == ["1", "2", "1", "2", "3"]


@pytest.mark.parametrize(
    ("call", "number", "match", "made"),
    [
        # It has found no job of that name, sleeps, and submits; another driver has done the work meanwhile.
        *(("SubmitJob", number, "another process submitted this job", 4) for number in (1, 2, 3)),
        ("RegisterJobDefinition", 2, "another process has taken over the cycle", 3),
    ],
)
def test_a_driver_that_slept_through_its_lease_leaves_no_job_of_its_own(
    setting: Setting, calls: list[str], call: str, number: int, match: str, made: int
) -> None:
    def another() -> None:
        setting.clock.now += LEASE_S + 1
        setting.drive(owner="another")

    with pytest.raises(TransientError, match=match):
        setting.drive(Faults(meanwhile={position(calls, call, number): another}))
    assert len(setting.batch.submitted) == made
    setting.assert_one_dag()


def test_a_copy_is_ended_although_no_other_record_can_be_read(
    setting: Setting, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by the simulation (seed 9006978)."""

    def outage(*given: object) -> None:
        raise TransientError("the storage does not answer")

    with monkeypatch.context() as patch:

        def another() -> None:
            setting.clock.now += LEASE_S + 1
            setting.drive(owner="another")
            patch.setattr(CycleStore, "submitted", outage)

        with pytest.raises(TransientError):
            setting.drive(Faults(meanwhile={position(calls, "SubmitJob", 3): another}))
    assert len(setting.batch.submitted) == 4
    setting.assert_one_dag()
