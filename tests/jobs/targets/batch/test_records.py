"""What is known of submitted jobs; their logs; their end by a user."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cycle.job_states import EXITED, JobState
from pipeline.core.errors import ConfigError, TransientError
from tests.jobs.cycle.cases import job, plan
from tests.jobs.targets.batch.fake_batch import client_error
from tests.jobs.targets.batch.faults import Faults
from tests.jobs.targets.batch.setting import Setting

DAY_S = 86_400.0


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    made = Setting(tmp_path)
    made.drive()
    return made


def ids(setting: Setting) -> dict[str, str]:
    return {name: one.id for name, one in setting.store().submitted(1).items()}


def test_a_gang_has_the_exit_code_of_its_main_node_and_the_logs_of_all(setting: Setting) -> None:
    batch, train = setting.batch, ids(setting)["train"]
    for exit_code, retry in ((75, True), (0, False)):
        for job_id in (train, f"{train}#0", f"{train}#1"):
            batch.start(job_id)
            batch.finish(job_id, exit_code, retry=retry)
    record = setting.target().records(setting.plan)[0]
    assert record.state is JobState.SUCCEEDED
    assert [one.exit_code for one in record.attempts] == [75, 0]
    assert [one.log_streams for one in record.attempts] == [
        (f"stream/{train}#0/{attempt}", f"stream/{train}#1/{attempt}") for attempt in (0, 1)
    ]
    started, stopped = record.attempts[1].started_at, record.attempts[1].stopped_at
    assert started is not None
    assert stopped is not None
    assert started <= stopped


def test_the_attempt_under_way_is_the_last(setting: Setting) -> None:
    batch, embed = setting.batch, ids(setting)["embed"]
    batch.start(f"{embed}:3")
    batch.finish(f"{embed}:3", 137, retry=True, reason="OutOfMemoryError: Container killed due to memory usage")
    batch.start(f"{embed}:3")
    child = setting.target().records(setting.plan)[1].children[3]
    assert child.state is JobState.RUNNING
    assert [(one.exit_code, one.stopped_at is None, one.reason[:16]) for one in child.attempts] == [
        (137, False, "OutOfMemoryError"),
        (None, True, ""),
    ]
    assert child.attempts[1].log_streams == (f"stream/{embed}:3/1",)


def test_jobs_that_aws_has_forgotten_are_as_last_recorded(setting: Setting) -> None:
    train, verify = ids(setting)["train"], ids(setting)["verify"]
    setting.batch.start(train)
    setting.batch.finish(train, 0)
    setting.store().save_records(setting.target().records(setting.plan))
    setting.batch.forget(train)
    setting.batch.forget(verify)
    gone, _, missing = setting.target().records(setting.plan)
    assert (gone.state, gone.attempts[0].exit_code) == (JobState.SUCCEEDED, 0)
    assert missing.state is JobState.SUBMITTED, "a gap of some minutes is no end"
    setting.clock.now += 8 * DAY_S
    gone, embed, missing = setting.target().records(setting.plan)
    assert gone.state is JobState.SUCCEEDED
    assert embed.state is JobState.PENDING
    assert (missing.state, "no longer knows" in missing.status_reason) == (JobState.FAILED, True)


class Logs:
    """CloudWatch with one stream, in pages; the first page is empty, and the last token repeats."""

    def __init__(self, stream: str, pages: list[list[str]]) -> None:
        self.stream, self.pages = stream, pages

    def get_log_events(self, **request: Any) -> dict[str, Any]:
        if (request["logGroupName"], request["logStreamName"]) != ("/aws/batch/job", self.stream):
            raise client_error("ResourceNotFoundException")
        page = int(request.get("nextToken", 0))
        lines = self.pages[page] if page < len(self.pages) else []
        return {
            "events": [{"message": line} for line in lines],
            "nextForwardToken": str(min(page + 1, len(self.pages))),
        }


def test_logs_of_every_node_and_attempt(setting: Setting) -> None:
    train, embed = ids(setting)["train"], ids(setting)["embed"]
    for job_id in (train, f"{train}#0", f"{train}#1", f"{embed}:3"):
        setting.batch.start(job_id)
    setting.logs = Logs(f"stream/{train}#1/0", [[], ["a", "b"], ["c"]])
    target = setting.target()
    gang, array, verify = target.records(setting.plan)
    assert [*target.logs(gang, attempt=1, node=1)] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="no log stream"):
        [*target.logs(gang, attempt=1, node=0)]
    setting.logs = Logs(f"stream/{embed}:3/0", [["child"]])
    assert [*setting.target().logs(array.children[3], attempt=1, node=0)] == ["child"]
    for record, attempt, node in ((gang, 2, 0), (gang, 1, 2), (gang, 0, 0), (array, 1, 0), (verify, 1, 0)):
        with pytest.raises(ConfigError, match=f"no log of attempt {attempt}"):
            target.logs(record, attempt=attempt, node=node)


def test_cancel_goes_from_the_sinks_backwards_and_can_be_repeated(setting: Setting) -> None:
    train = ids(setting)["train"]
    setting.batch.start(train)
    setting.batch.faults = faults = Faults()
    setting.target().cancel(setting.plan, "by hand")
    assert faults.calls.count("TerminateJob") == 3
    assert {one.status_reason for one in setting.target().records(setting.plan)} == {"by hand"}
    ended = sorted(setting.batch.jobs.values(), key=lambda one: -one["stoppedAt"])
    names = [one["jobName"].rpartition("-")[2] for one in ended if not {":", "#"} & {*one["jobId"]}]
    assert names == ["train", "embed", "verify"], "the last to end is the first of the plan"
    setting.target().cancel(setting.plan, "by hand")
    assert faults.calls.count("TerminateJob") == 3


def test_cancelled_jobs_are_known_by_our_own_record_whatever_aws_batch_says_of_them(setting: Setting) -> None:
    found_ids = ids(setting)
    done, rest = found_ids.pop("train"), found_ids.values()
    setting.batch.jobs[done] |= {"status": "SUCCEEDED", "stoppedAt": 1000}
    setting.target().cancel(setting.plan, "cancelled: by hand")
    for job_id in rest:
        setting.batch.jobs[job_id]["statusReason"] = "Job terminated by user request"
    found = setting.target().records(setting.plan)
    assert [(one.state, one.status_reason) for one in found[1:]] == [(JobState.CANCELLED, "cancelled: by hand")] * 2
    assert found[0].state is JobState.SUCCEEDED
    assert {child.state for child in found[1].children} == {JobState.CANCELLED}


@pytest.mark.parametrize("state", ["RUNNING", "RUNNABLE"])
def test_whoever_reconciles_ends_what_feeds_only_jobs_that_cannot_run(tmp_path: Path, state: str) -> None:
    shape = plan(job("prepare"), job("health"), job("step"), job("compile", "prepare", "health"))
    setting = Setting(tmp_path, plan=shape)
    setting.drive()
    jobs = setting.batch.jobs
    found = ids(setting)
    attempt = {"startedAt": 1000, "stoppedAt": 2000, "container": {"exitCode": 65}}
    jobs[found["prepare"]] |= {"status": "FAILED", "stoppedAt": 2000, "attempts": [attempt], "statusReason": EXITED}
    jobs[found["compile"]] |= {"status": "FAILED", "stoppedAt": 2000, "statusReason": "Dependent Job failed"}
    for name in ("health", "step"):
        jobs[found[name]]["status"] = state
    setting.target().records(setting.plan)
    assert jobs[found["health"]]["status"] == state, "a look changes nothing"
    setting.target().advance(setting.plan)
    after = {one.name: (one.state, one.status_reason) for one in setting.target().records(setting.plan)}
    assert after["health"] == (JobState.CANCELLED, "no longer needed: prepare failed")
    assert after["compile"] == (JobState.FAILED, "not run: prepare failed")
    assert after["step"][0] == state
    setting.batch.faults = faults = Faults()
    setting.target().advance(setting.plan)
    assert "TerminateJob" not in faults.calls


@pytest.mark.parametrize("then", ["cancel", "submit"])
def test_a_job_that_a_dead_retry_did_not_record_is_ended(tmp_path: Path, then: str) -> None:
    setting = Setting(tmp_path / "run")
    setting.drive()
    setting.target().cancel(setting.plan, "all have failed")
    assert any(setting.drive_killed(Faults(kill_after=number), round_=2) and setting.live() for number in range(1, 40))
    assert [one["jobName"] for one in setting.live()] == ["relevance-2026-11-20-train-round-2"]
    assert setting.store().rounds() == [1]
    job_id = setting.live()[0]["jobId"]
    if then == "cancel":
        setting.target().cancel(setting.plan, "by hand")
    else:
        setting.drive()
    assert setting.live() == []
    # Its container has 30 s: the next retry makes another job.
    setting.batch.jobs[job_id] |= {"status": "RUNNING", "isTerminated": True}
    setting.drive(round_=2)
    assert job_id not in {one.id for one in setting.store().submitted(2).values()}


@pytest.mark.parametrize("number", range(1, 20))
def test_cancel_killed_anywhere_and_run_again(setting: Setting, number: int) -> None:
    setting.batch.faults = Faults(errors={number: (client_error("AccessDeniedException", status=403), True)})
    try:
        setting.target().cancel(setting.plan, "by hand")
    except (ConfigError, TransientError):
        setting.batch.faults = Faults()
        setting.target().cancel(setting.plan, "by hand")
    assert setting.live() == []


def test_a_blocked_job_is_ended_after_the_dwell_time_only(setting: Setting) -> None:
    setting.batch.settle()
    train = setting.batch.jobs[ids(setting)["train"]]
    train["statusReason"] = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
    for minutes, state in ((0, "RUNNABLE"), (14, "RUNNABLE"), (15, "FAILED")):
        setting.clock.now = 1_763_700_000.0 + 60 * minutes
        target = setting.target()
        (line,) = target.check_blocked(target.records(setting.plan))
        assert line.startswith("train cannot start: no instance type")
        assert train["status"] == state
    assert train["statusReason"].startswith("blocked for 900 s: MISCONFIGURATION")
