"""What is known of submitted jobs; their logs; their end by a user."""

from pathlib import Path
from typing import Any

import pytest

from jobs.cycle.job_states import EXITED, JobState
from pipeline.core.errors import ConfigError, TransientError
from tests.jobs.cycle.cases import job, plan
from tests.jobs.targets.batch.setting import Setting
from tests.jobs.targets.faults import Faults, client_error

DAY_S = 86_400.0


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    made = Setting(tmp_path)
    made.drive()
    return made


def test_a_node_group_has_the_exit_code_of_its_main_node_and_the_logs_of_all(setting: Setting) -> None:
    batch, train = setting.batch, setting.ids()["train"]
    for exit_code, retry in ((75, True), (0, False)):
        for job_id in (train, f"{train}#0", f"{train}#1"):
            batch.start(job_id)
            batch.finish(job_id, exit_code, retry=retry)
    record = setting.target().records(setting.plan)[0]
    assert record.state is JobState.SUCCEEDED
    assert [(one.exit_code, one.log_streams) for one in record.attempts] == [
        (code, (f"stream/{train}#0/{attempt}", f"stream/{train}#1/{attempt}")) for attempt, code in ((0, 75), (1, 0))
    ]
    started, stopped = record.attempts[1].started_at, record.attempts[1].stopped_at
    assert started is not None and stopped is not None and started <= stopped


def test_the_attempt_under_way_is_the_last(setting: Setting) -> None:
    child_id = f"{setting.ids()['embed']}:3"
    setting.batch.start(child_id)
    setting.batch.finish(child_id, 137, retry=True, reason="OutOfMemoryError: Container killed due to memory usage")
    setting.batch.start(child_id)
    child = setting.target().records(setting.plan)[1].children[3]
    assert child.state is JobState.RUNNING
    assert [(one.exit_code, one.stopped_at is None, one.reason[:16]) for one in child.attempts] == [
        (137, False, "OutOfMemoryError"),
        (None, True, ""),
    ]
    assert child.attempts[1].log_streams == (f"stream/{child_id}/1",)


def test_jobs_that_aws_has_forgotten_are_as_last_recorded(setting: Setting) -> None:
    train, verify = setting.ids()["train"], setting.ids()["verify"]
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
    assert (gone.state, embed.state, missing.state) == (JobState.SUCCEEDED, JobState.PENDING, JobState.FAILED)
    assert "no longer knows" in missing.status_reason


class Logs:
    """CloudWatch with one stream, in pages; the first page is empty, and the last token repeats."""

    def __init__(self, stream: str) -> None:
        self.stream, self.pages = stream, [[], ["a", "b"], ["c"]]

    def get_log_events(self, **request: Any) -> dict[str, Any]:
        if (request["logGroupName"], request["logStreamName"]) != ("/aws/batch/job", self.stream):
            raise client_error("ResourceNotFoundException")
        page = int(request.get("nextToken", 0))
        lines = self.pages[page] if page < len(self.pages) else []
        token = str(min(page + 1, len(self.pages)))
        return {"events": [{"message": line} for line in lines], "nextForwardToken": token}


def test_logs_of_every_node_and_attempt(setting: Setting) -> None:
    train, embed = setting.ids()["train"], setting.ids()["embed"]
    for job_id in (train, f"{train}#0", f"{train}#1", f"{embed}:3"):
        setting.batch.start(job_id)
    setting.logs = Logs(f"stream/{train}#1/0")
    target = setting.target()
    group, array, verify = target.records(setting.plan)
    assert [*target.logs(group, attempt=1, node=1)] == ["a", "b", "c"]
    newer = iter([["d"], []])

    def more() -> bool:
        setting.logs.pages += filter(None, [page := next(newer)])
        return bool(page)

    assert [*target.logs(group, attempt=1, node=1, more=more)] == ["a", "b", "c", "d"]
    with pytest.raises(ConfigError, match="no log stream"):
        [*target.logs(group, attempt=1, node=0)]
    setting.logs = Logs(f"stream/{embed}:3/0")
    assert [*setting.target().logs(array.children[3], attempt=1, node=0)] == ["a", "b", "c"]
    for record, attempt, node in ((group, 2, 0), (group, 1, 2), (group, 0, 0), (array, 1, 0), (verify, 1, 0)):
        with pytest.raises(ConfigError, match=f"no log of attempt {attempt}"):
            target.logs(record, attempt=attempt, node=node)


def test_cancelled_from_the_sinks_backwards_and_known_by_our_own_record(setting: Setting) -> None:
    """Whatever AWS Batch says of the jobs afterwards."""
    batch = setting.batch
    done = setting.ids().pop("train")
    batch.jobs[done] |= {"status": "SUCCEEDED", "stoppedAt": 1000}
    for _ in range(2):
        setting.target().cancel(setting.plan, "cancelled: by hand")
    assert batch.faults.calls.count("TerminateJob") == 2
    ended = sorted(batch.jobs.values(), key=lambda one: -one["stoppedAt"] if one["status"] == "FAILED" else 0)
    assert [one["jobName"].rpartition("-")[2] for one in ended if not {":", "#"} & {*one["jobId"]}] == [
        "embed",
        "verify",
        "train",
    ]
    for one in ended[:-1]:
        one["statusReason"] = "Job terminated by user request"
    train, *found = setting.target().records(setting.plan)
    assert train.state is JobState.SUCCEEDED
    assert [(one.state, one.status_reason) for one in found] == [(JobState.CANCELLED, "cancelled: by hand")] * 2
    assert {child.state for child in found[0].children} == {JobState.CANCELLED}


@pytest.mark.parametrize("number", range(1, 20, 3))
def test_cancel_killed_anywhere_and_run_again(setting: Setting, number: int) -> None:
    setting.batch.faults = Faults(errors={number: (client_error("AccessDeniedException", status=403), True)})
    try:
        setting.target().cancel(setting.plan, "by hand")
    except (ConfigError, TransientError):
        setting.batch.faults = Faults()
        setting.target().cancel(setting.plan, "by hand")
    assert setting.live() == []


@pytest.mark.parametrize("state", ["RUNNING", "RUNNABLE"])
def test_whoever_reconciles_ends_what_feeds_only_jobs_that_cannot_run(tmp_path: Path, state: str) -> None:
    setting = Setting(
        tmp_path, plan=plan(job("prepare"), job("health"), job("step"), job("compile", "prepare", "health"))
    )
    setting.drive()
    jobs, found = setting.batch.jobs, setting.ids()
    attempt = {"startedAt": 1000, "stoppedAt": 2000, "container": {"exitCode": 65}}
    jobs[found["prepare"]] |= {"status": "FAILED", "stoppedAt": 2000, "attempts": [attempt], "statusReason": EXITED}
    jobs[found["compile"]] |= {"status": "FAILED", "stoppedAt": 2000, "statusReason": "Dependent Job failed"}
    for name in ("health", "step"):
        jobs[found[name]]["status"] = state
    setting.target().records(setting.plan)
    assert jobs[found["health"]]["status"] == state, "a look changes nothing"
    for _ in range(2):
        setting.target().advance(setting.plan)
    assert setting.batch.faults.calls.count("TerminateJob") == 1
    after = {one.name: (one.state, one.status_reason) for one in setting.target().records(setting.plan)}
    assert after["health"] == (JobState.CANCELLED, "no longer needed: prepare failed")
    assert after["compile"] == (JobState.FAILED, "not run: prepare failed")
    assert after["step"][0] == state


@pytest.mark.parametrize("then", ["cancel", "submit"])
def test_a_job_that_a_dead_retry_did_not_record_is_ended(setting: Setting, then: str) -> None:
    setting.target().cancel(setting.plan, "all have failed")
    assert any(
        setting.drive_killed(Faults(kill_after=number), submission=2) and setting.live() for number in range(1, 40)
    )
    assert (setting.live_names(), setting.store().submissions()) == (["train-round-2"], [1])
    job_id = setting.live()[0]["jobId"]
    if then == "cancel":
        setting.target().cancel(setting.plan, "by hand")
    else:
        setting.drive()
    assert setting.live() == []
    # Its container has 30 s: the next retry makes another job.
    setting.batch.jobs[job_id] |= {"status": "RUNNING", "isTerminated": True}
    setting.drive(submission=2)
    assert job_id not in setting.ids(2).values()


def test_a_blocked_job_is_ended_after_the_dwell_time_only(setting: Setting) -> None:
    setting.batch.settle()
    train = setting.batch.jobs[setting.ids()["train"]]
    train["statusReason"] = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
    began = setting.clock.now
    for minutes, state in ((0, "RUNNABLE"), (14, "RUNNABLE"), (15, "FAILED")):
        setting.clock.now = began + 60 * minutes
        target = setting.target()
        (line,) = target.check_blocked(target.records(setting.plan))
        assert line.startswith("train cannot start: no instance type")
        assert train["status"] == state
    assert train["statusReason"].startswith("blocked for 900 s: MISCONFIGURATION")


def test_a_job_that_has_run_in_between_is_blocked_from_then_on(setting: Setting) -> None:
    setting.batch.settle()
    train = setting.batch.jobs[setting.ids()["train"]]
    train["statusReason"] = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT"
    target, began = setting.target(), setting.clock.now
    target.check_blocked(target.records(setting.plan))
    setting.clock.now = began + 3600
    stopped_ms = int(1000 * (began + 3300))
    train["attempts"] = [{"startedAt": stopped_ms - 60_000, "stoppedAt": stopped_ms, "container": {"exitCode": 75}}]
    (line,) = target.check_blocked(target.records(setting.plan))
    assert "for 5m00s" in line and train["status"] == "RUNNABLE"
