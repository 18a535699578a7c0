"""The life of one job on both routes, and ways in which SageMaker is not AWS Batch; of whole DAGs: test_dags.py."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs import cli, setup
from jobs.commands import submit
from jobs.cycle.costs import ledger_of
from jobs.cycle.job_states import (
    CANCELLED,
    EXITED,
    AttemptEnd,
    Cancel,
    Closed,
    JobRecord,
    JobState,
    Task,
    new_record,
    running_record,
    starting_record,
    tasks_of,
)
from jobs.plan.resources import prices_of
from jobs.plan.spec import JobSpec, Retry
from jobs.settings import CycleSettings, of_all_jobs
from jobs.setup import OpenCycle
from jobs.targets.sagemaker.routes import QUEUED, DirectRoute, ObservedAttempt, QueueRoute
from jobs.targets.sagemaker.target import (
    LAG_S,
    LOG_GROUP,
    CycleActions,
    SageMakerTarget,
    decide_actions,
    observed_record,
)
from pipeline.core.errors import EXIT_OK, ConfigError, Preempted, TransientError
from pipeline.core.stop import StopSignal
from tests.jobs.cycle.cases import TRN1, job
from tests.jobs.targets.faults import Faults
from tests.jobs.targets.sagemaker.setting import QUEUE, Setting, ml_plan, small

STARTING, RUNNABLE, RUNNING = JobState.STARTING, JobState.RUNNABLE, JobState.RUNNING
SUCCEEDED, FAILED = JobState.SUCCEEDED, JobState.FAILED
ROUTES = pytest.mark.parametrize("placement", [{}, {"sagemaker": QUEUE}], ids=["direct", "queue"])


@pytest.fixture
def one(tmp_path: Path) -> Setting:
    """A cycle of a single job, by SageMaker's own calls."""
    return Setting(tmp_path, plan=ml_plan(job("train")))


@pytest.fixture
def queued(tmp_path: Path) -> Setting:
    """The same through a queue."""
    return Setting(tmp_path, plan=ml_plan(job("train"), sagemaker=QUEUE))


class FakeLogs:
    """CloudWatch with these streams of one line each."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def describe_log_streams(self, logGroupName: str, logStreamNamePrefix: str) -> dict[str, Any]:
        assert logGroupName == LOG_GROUP
        return {"logStreams": [{"logStreamName": n} for n in self.names if n.startswith(logStreamNamePrefix)]}

    def get_log_events(self, logStreamName: str, **more: Any) -> dict[str, Any]:
        return {"events": [{"message": f"line of {logStreamName}"}], "nextForwardToken": more.get("nextToken", "end")}


# By SageMaker's own calls.


def test_a_name_that_belongs_to_somebody_else_is_not_adopted(one: Setting) -> None:
    one.tick()
    theirs = one.ml.jobs[one.name("train")]
    theirs |= {"Environment": {}, "_visible": 10**9}
    one.store().save_records(())
    one.ml.faults = Faults(meanwhile={3: lambda: theirs.update(_visible=0)})
    with pytest.raises(ConfigError, match="belongs to no plan of trnjobs"):
        one.target().advance(one.plan)


def test_without_quota_a_job_stays_runnable_and_says_why(one: Setting) -> None:
    one.ml.quota = 0
    record = one.tick()["train"]
    assert (record.state, record.attempts) == (RUNNABLE, ())
    (line,) = one.target().check_blocked([record])
    assert line.startswith("train cannot start: ResourceLimitExceeded: The account-level service limit")
    one.ml.quota = 1
    assert one.tick()["train"].state is STARTING


def test_records_are_only_written_when_they_have_changed(one: Setting) -> None:
    one.tick()
    faults = Faults()
    target = one.target(one.store(faults))
    target.advance(one.plan)
    assert "write_bytes" not in faults.calls
    one.ml.start(one.name("train"))
    target.advance(one.plan)
    assert faults.calls.count("write_bytes") == 1


def test_a_retry_after_the_training_job_was_deleted(one: Setting) -> None:
    one.tick()
    one.ml.finish(one.name("train"), 65)
    assert one.tick()["train"].state is FAILED
    one.ml.delete(one.name("train"))
    assert one.states() == {"train": FAILED}  # from the record
    one.begin(2, ("train",))
    one.tick()
    one.ml.finish(one.name("train", submission=2), 0)
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


@ROUTES
def test_a_job_whose_cycle_is_cancelled_and_closed_while_it_is_started_is_stopped_once_aws_shows_it(
    tmp_path: Path, placement: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record is final by then, so nobody else would look at it. Found by the simulation (seed 6001823)."""
    at = Setting(tmp_path, plan=ml_plan(job("train"), **placement), lag=3)
    route = QueueRoute if placement else DirectRoute
    start = route.start

    def start_late(self: DirectRoute | QueueRoute, *arguments: Any) -> ObservedAttempt:
        at.target().cancel(at.plan, CANCELLED + "why")
        at.store().close(Closed(outcome="cancelled", at=at.clock()))
        return start(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(route, "start", start_late)
    at.tick()
    ended = [service_job["status"] for service_job in at.batch.jobs.values()] or at.ml.stopped
    assert ended == (["FAILED"] if placement else [at.name("train")])
    assert at.states()["train"] is JobState.CANCELLED


def test_spot_capacity_that_is_taken_costs_no_try(one: Setting) -> None:
    one.tick()
    name = one.name("train")
    one.ml.start(name)
    one.tick()
    one.ml.move(name, "InProgress", "Interrupted")
    record = one.tick()["train"]
    assert (record.state, record.status_reason, len(record.attempts)) == (RUNNING, "Interrupted", 1)
    assert one.target().check_blocked([record]) == ("train is waiting for SageMaker capacity: Interrupted",)
    one.ml.finish(name, 0)
    assert one.tick()["train"].state is SUCCEEDED
    assert len(one.ml.created) == 1


def test_a_driver_that_is_told_to_stop_leaves_the_jobs_alone(one: Setting) -> None:
    one.claim()
    stop = StopSignal()
    one.ml.on_create = lambda request: stop.set("SIGTERM")
    with pytest.raises(Preempted, match="which continue"):
        one.target(stop=stop).submit(one.plan, 1, ["train"])
    assert (len(one.ml.live()), one.ml.stopped) == (1, [])


def test_an_outage_is_waited_out_for_a_quarter_of_an_hour(one: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def outage(request: object) -> dict[str, object]:
        raise TransientError("nobody answers")

    def meanwhile() -> None:
        one.clock.now += 600

    one.claim()
    monkeypatch.setattr(one.ml, "_describe_training_job", outage)
    with pytest.raises(TransientError, match="nobody answers"):
        one.drive(meanwhile)
    assert one.said.count("unreachable: nobody answers") == 3


def test_the_log_of_a_node_is_that_of_all_starts_of_its_host(tmp_path: Path) -> None:
    at = Setting(tmp_path, plan=ml_plan(job("train", num_nodes=11, resources=TRN1)))
    record = at.tick()["train"]
    name = at.name("train")
    at.logs = FakeLogs(f"{name}/algo-1-1700000009", f"{name}/algo-10-1700000001", f"{name}/algo-1-1700000001")
    target = at.target()
    streams = [f"line of {name}/algo-1-170000000{end}" for end in (1, 9)]
    assert [*dict.fromkeys(target.logs(record, attempt=1, node=0))] == streams
    assert [*dict.fromkeys(target.logs(record, attempt=1, node=1))] == [f"line of {name}/algo-10-1700000001"]
    for attempt, node in ((1, 2), (2, 0), (1, 11)):
        with pytest.raises(ConfigError, match="no log of attempt"):
            next(target.logs(record, attempt=attempt, node=node))


def test_cost_is_that_of_billable_seconds_of_whole_machines(tmp_path: Path) -> None:
    at = Setting(tmp_path, plan=ml_plan(job("train", num_nodes=2, resources=TRN1)))
    at.tick()
    name = at.name("train")
    at.ml.start(name)
    at.clock.now += 7200
    at.ml.finish(name, 0)
    at.ml.jobs[name]["BillableTimeInSeconds"] = 1800  # Spot: a quarter of the time was paid
    settings = CycleSettings.model_validate({"jobs": {"prices": {"ml.trn1.32xlarge": 24.0}}})
    prices, records = prices_of(settings.jobs, "sagemaker"), tuple(at.tick().values())
    ledger = ledger_of(at.plan, records, (), prices, now=at.clock(), outcome="succeeded", deadline_at=None)
    assert ledger.total.usd == pytest.approx(2 * 0.5 * 24.0)


# Through a queue of AWS Batch.


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"schedulingPolicyArn": ""}, "queue ml: has no scheduling policy, so it refuses share identifiers"),
        ({"jobQueueType": "ECS"}, "queue ml: has type ECS, expected SAGEMAKER_TRAINING"),
        ({"state": "DISABLED"}, "queue ml: DISABLED, so it does not accept jobs"),
        ({"jobQueueName": "other"}, "queue ml: does not exist"),
    ],
)
def test_a_queue_that_would_not_run_it_is_refused(queued: Setting, change: dict[str, str], problem: str) -> None:
    queued.target().check(queued.plan)
    queued.batch.queue |= change
    with pytest.raises(ConfigError, match=problem):
        queued.target().check(queued.plan)
    assert queued.batch.submitted == []


def test_it_waits_in_the_queue_runs_fails_is_tried_again_and_succeeds(queued: Setting) -> None:
    record = queued.tick()["train"]
    assert (record.state, record.status_reason, record.attempts) == (RUNNABLE, "in queue ml", ())
    assert queued.tick()["train"] == record
    (train,) = queued.batch.jobs.values()
    first = queued.batch.dispatch(train)
    record = queued.tick()["train"]
    assert (record.state, record.attempts[0].log_streams) == (STARTING, (f"{first}/algo-1-",))
    queued.ml.start(first)
    queued.batch.settle()
    assert queued.tick()["train"].state is RUNNING
    queued.clock.now += 7200
    queued.ml.finish(first, 75, "TransientError")
    assert queued.tick()["train"].state is RUNNING  # whether it was the last try is for AWS Batch to say
    queued.batch.settle()
    record = queued.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts], record.attempts[0].billable_s) == (
        RUNNABLE,
        [75],
        7200,
    )
    second = queued.batch.dispatch(train)
    queued.ml.finish(second, 0)
    queued.batch.settle()
    record = queued.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts]) == (SUCCEEDED, [75, 0])
    queued.logs = FakeLogs(f"{first}/algo-1-1", f"{second}/algo-1-1")
    assert {*queued.target().logs(record, attempt=2, node=0)} == {f"line of {second}/algo-1-1"}
    assert len(queued.batch.submitted) == 1


def test_a_job_of_a_quota_share_that_is_preempted_three_times_goes_on(tmp_path: Path) -> None:
    train = job("train", retry=Retry.of(1, 3))
    one = Setting(tmp_path, ml_plan(train, sagemaker=QUEUE | {"quota_share": "search"}))
    one.target().check(one.plan)
    one.tick()
    (train_job,) = one.batch.jobs.values()
    for number in range(1, 4):
        preempted = one.batch.dispatch(train_job)
        one.ml.start(preempted)
        one.batch.settle()
        assert one.tick()["train"].state is RUNNING
        one.clock.now += 60
        one.batch.preempt(train_job)
        record = one.tick()["train"]
        assert (record.state, [a.is_preempted for a in record.attempts]) == (RUNNABLE, [True] * number)
    assert len(train_job["preemptionSummary"]["recentPreemptedAttempts"]) == 2
    last = one.batch.dispatch(train_job)
    one.ml.finish(last, 0)
    one.batch.settle()
    record = one.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts]) == (SUCCEEDED, [143, 143, 143, 0])


def test_a_job_of_a_quota_share_fails_once_its_preemptions_are_used_up(tmp_path: Path) -> None:
    one = Setting(tmp_path, ml_plan(job("train", retry=Retry.of(1, 1)), sagemaker=QUEUE | {"quota_share": "search"}))
    one.tick()
    (train_job,) = one.batch.jobs.values()
    for state in (RUNNABLE, FAILED):
        one.batch.dispatch(train_job)
        one.tick()
        one.batch.preempt(train_job)
        assert one.tick()["train"].state is state


def test_taken_back_for_want_of_capacity_costs_no_try(queued: Setting) -> None:
    queued.tick()
    (train,) = queued.batch.jobs.values()
    queued.batch.dispatch(train)
    queued.tick()
    queued.batch.fall_back(train)
    record = queued.tick()["train"]
    assert (record.state, len(record.attempts)) == (STARTING, 1)
    (line,) = queued.target().check_blocked([record])
    assert line.startswith("train is waiting for SageMaker capacity: in queue ml: CAPACITY:INSUFFICIENT")
    second = queued.batch.dispatch(train)
    assert queued.tick()["train"].attempts[0].log_streams == (f"{second}/algo-1-",)
    queued.ml.finish(second, 0)
    queued.batch.settle()
    record = queued.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts]) == (SUCCEEDED, [0])


@pytest.mark.parametrize(("code", "state"), [(0, SUCCEEDED), (65, FAILED)])
def test_of_a_training_job_that_was_deleted_batch_tells_the_end(queued: Setting, code: int, state: JobState) -> None:
    queued.tick()
    name = queued.batch.dispatch(*queued.batch.jobs.values())
    queued.ml.finish(name, code)
    queued.batch.settle()
    queued.ml.delete(name)
    record = queued.tick()["train"]
    assert (record.state, record.attempts[0].exit_code, len(queued.batch.submitted)) == (state, code, 1)


@pytest.mark.parametrize("where", ["waiting", "running", "between tries"])
def test_cancelled_wherever_it_is_nothing_of_it_goes_on(queued: Setting, where: str) -> None:
    queued.tick()
    (train,) = queued.batch.jobs.values()
    if where != "waiting":
        name = queued.batch.dispatch(train)
        queued.ml.start(name)
        queued.batch.settle()
        queued.tick()
    if where == "between tries":
        queued.ml.finish(name, 75)
        queued.batch.settle()
    queued.target().cancel(queued.plan, CANCELLED + "why")
    if where == "running":
        queued.ml.end(name, "Stopped")
    queued.batch.settle()
    record = queued.tick()["train"]
    assert (record.state, record.status_reason) == (JobState.CANCELLED, CANCELLED + "why")
    assert (train["status"], train["statusReason"]) == ("FAILED", CANCELLED + "why")
    assert len(queued.batch.submitted) == 1


# The driver has died right after its submissions.


@ROUTES
def test_reconcile_alone_takes_a_cycle_to_its_report_and_one_out_of_reach_holds_back_no_other(
    placement: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = Setting(tmp_path / "workspace", plan=small(**placement))
    at.claim()
    at.store().save_settings(of_all_jobs(CycleSettings()))
    at.begin()

    def opened(cycle: OpenCycle, *_: Any) -> SageMakerTarget:
        return at.target(replace(cycle.store, clock=at.clock))

    for module in (setup, submit):  # both: commands that are imported now would keep this one
        monkeypatch.setattr(module, "open_target", opened)
    seen = []
    for _ in range(4):
        assert cli.main(["reconcile", "--workspace", str(at.folder)]) == EXIT_OK
        seen.append([record.name for record in at.store().records() if record.state is SUCCEEDED])
        for waiting in at.batch.waiting():
            at.batch.dispatch(waiting)
        for name in at.ml.live():
            at.ml.finish(name, 0)
        at.batch.settle()
    assert seen == [[], ["train"], ["train", "embed"], ["train", "embed", "verify"]]
    closed, made = at.store().closed(), at.batch.submitted or at.ml.created
    assert closed is not None and closed.outcome == "succeeded"
    assert at.store().storage.stat("reports/2026-11-20.html") is not None
    assert len(made) == 4

    first, advance = at.plan, SageMakerTarget.advance
    for name in ("2026-11-21", "2026-11-22"):
        at.plan = first.model_copy(update={"cycle": name})
        at.claim()
        at.begin()

    def refuse_one(self: SageMakerTarget, plan: Any) -> Any:
        if plan.cycle == "2026-11-21":
            raise TransientError("nobody answers")
        return advance(self, plan)

    monkeypatch.setattr(SageMakerTarget, "advance", refuse_one)
    assert cli.main(["reconcile", "--workspace", str(at.folder)]) == TransientError.exit_code
    records = json.loads(at.store().storage.read_bytes("cycles/2026-11-22/jobs/records.json"))
    assert [record["name"] for record in records] == ["train", "embed", "verify"]


# What is done for jobs that are to end before their time, from records and what was seen of attempts. Pure.

BY_HAND = Cancel(reason=CANCELLED + "by hand", at=100.0)
RUNS = ObservedAttempt(started_at=1.0)
STOPPED = ObservedAttempt(started_at=1.0, ended_at=120.0, end=AttemptEnd(143, EXITED))
WAITS = ObservedAttempt(is_queued=True, note=QUEUED)


def record_of(task: Task, state: JobState = RUNNABLE, reason: str = "") -> JobRecord:
    return new_record(task, task.spec.name, 0.0).model_copy(update={"state": state, "status_reason": reason})


def found(
    jobs: list[JobSpec],
    seen: Mapping[str, ObservedAttempt | None],
    cancelled: Mapping[str, Cancel],
    *,
    at: float = 200.0,
    note: str = "",
) -> CycleActions:
    """`seen`: of the attempts that exist."""
    tasks = [task for one in jobs for task in tasks_of(one)]
    states = {task.name: JobState.PENDING if task.spec.depends_on else RUNNABLE for task in tasks}
    records = {task.name: record_of(task, states[task.name], note) for task in tasks}
    return decide_actions(tasks, records, lambda task, attempt: seen.get(task.name), cancelled=cancelled, at=at)


@pytest.mark.parametrize("seen", [STOPPED, None, WAITS, RUNS])
def test_of_a_cancelled_cycle_every_job_says_so_and_none_that_a_dependency_failed(seen: ObservedAttempt | None) -> None:
    """Whatever it waited for is cancelled with it, and has not failed."""
    jobs = [job("a"), job("b", "a"), job("c", "b"), job("e", "b", array_size=2)]
    after = found(jobs, {"a": seen}, dict.fromkeys(["a", "b", "c", "e:0", "e:1"], BY_HAND))
    is_live = seen in (WAITS, RUNS)
    ends = {name: (one.state, one.status_reason) for name, one in after.records.items() if name != "a" or not is_live}
    assert ends == dict.fromkeys(ends, (JobState.CANCELLED, BY_HAND.reason))
    assert [(task.name, reason) for task, reason in after.stops] == ([("a", BY_HAND.reason)] if is_live else [])
    assert after.starts == ()


@pytest.mark.parametrize(("health", "stops"), [(RUNS, ["health"]), (None, []), (WAITS, ["health"])])
def test_what_feeds_only_a_job_that_cannot_run_is_ended(health: ObservedAttempt | None, stops: list[str]) -> None:
    jobs = [job("prepare"), job("health"), job("step"), job("compile", "prepare", "health")]
    failed = ObservedAttempt(started_at=1.0, ended_at=50.0, end=AttemptEnd(65, EXITED))
    after = found(jobs, {"prepare": failed, "health": health}, {})
    reason = "no longer needed: prepare failed"
    assert [(task.name, why) for task, why in after.stops] == [(name, reason) for name in stops]
    assert [task.name for task in after.starts] == ["step"]
    assert after.records["compile"].status_reason == "not run: prepare failed"


@pytest.mark.parametrize(
    ("code", "ended_at", "state"),
    [
        (65, 99.0, FAILED),
        (65, 100.0, JobState.CANCELLED),
        (65, None, JobState.CANCELLED),
        (0, 120.0, SUCCEEDED),
    ],
)
def test_an_attempt_that_ended_by_itself_before_it_was_cancelled_keeps_its_end(
    code: int, ended_at: float | None, state: JobState
) -> None:
    task = Task(job("a"))
    running = running_record(starting_record(record_of(task), ["s"]), 1.0)
    one = ObservedAttempt(started_at=1.0, ended_at=ended_at, end=AttemptEnd(code, EXITED))
    assert observed_record(task, running, one, BY_HAND, 200.0).state is state


@pytest.mark.parametrize(
    ("note", "at", "state", "stops"),
    [
        ("", 101.0, JobState.CANCELLED, []),  # it was never handed over
        (f"{QUEUED} ml", 100.0 + LAG_S, RUNNABLE, ["a"]),  # it may be listed late
        (f"{QUEUED} ml", 100.1 + LAG_S, JobState.CANCELLED, []),
    ],
)
def test_an_attempt_that_is_not_there_is_cancelled_once_no_lag_can_be_the_reason(
    note: str, at: float, state: JobState, stops: list[str]
) -> None:
    after = found([job("a")], {}, {"a": BY_HAND}, at=at, note=note)
    assert (after.records["a"].state, after.starts) == (state, ())
    assert [task.name for task, _ in after.stops] == stops


@pytest.mark.parametrize(("earlier", "state"), [((), JobState.CANCELLED), (("b",), RUNNABLE)])
def test_a_failure_of_an_earlier_submission_ends_no_job_of_a_retry(earlier: tuple[str, ...], state: JobState) -> None:
    """Of the retry, only `a` was recorded so far."""
    tasks = [Task(job("a")), Task(job("b", "a"))]
    records = {"a": record_of(tasks[0]), "b": record_of(tasks[1], JobState.FAILED, "not run: a failed")}
    after = decide_actions(tasks, records, lambda task, attempt: None, cancelled={}, earlier=earlier, at=9.0)
    assert after.records["a"].state is state


def test_what_waits_in_a_queue_stays_runnable_and_what_vanished_before_it_began_is_made_again() -> None:
    after = found([job("a"), job("b")], {"a": WAITS}, {})
    assert (after.records["a"].state, after.records["a"].status_reason) == (RUNNABLE, QUEUED)
    assert [task.name for task in after.starts] == ["b"]
    task = Task(job("a"))
    made = starting_record(record_of(task), ["s"])
    vanished = decide_actions([task], {"a": made}, lambda task, attempt: None, cancelled={}, at=9.0)
    assert ([one.name for one in vanished.starts], vanished.stops) == (["a"], ())
    done = observed_record(task, made, ObservedAttempt(ended_at=5.0, end=AttemptEnd(0, EXITED)), None, 9.0)
    assert (done.state, done.started_at) == (SUCCEEDED, 5.0)
    # Between two attempts Batch has it in its queue again, and our record still has the first as active.
    assert observed_record(task, made, WAITS, None, 9.0).state is STARTING
