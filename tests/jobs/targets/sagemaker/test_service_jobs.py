"""Requests of service jobs, the rules by which AWS Batch tries again, and what is refused before anything is sent."""

import json
from pathlib import Path

import pytest

from jobs.cycle.job_states import CANCELLED, JobState, Leaf, is_tried_again
from jobs.plan.spec import Retry
from jobs.targets.sagemaker.describe import RECEIVED, failure_end
from jobs.targets.sagemaker.requests import (
    Cycle,
    request_problems,
    retry_rules,
    service_job_request,
)
from pipeline.core.errors import EXIT_TABLE, ConfigError
from tests.jobs.cycle.cases import TRN1, job
from tests.jobs.targets.sagemaker.fake_service_jobs import FakeServiceJobs
from tests.jobs.targets.sagemaker.setting import QUEUE, ROLE, Setting, ml_plan
from tests.jobs.targets.sagemaker.test_target import FakeLogs

RUNNABLE, STARTING, RUNNING = JobState.RUNNABLE, JobState.STARTING, JobState.RUNNING
SUCCEEDED, FAILED, CANCELLED_STATE = JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED


@pytest.fixture
def one(tmp_path: Path) -> Setting:
    """A cycle of a single job, through a queue."""
    return Setting(tmp_path, plan=ml_plan(job("train"), sagemaker=QUEUE))


def test_the_request_of_a_gang() -> None:
    train = job("train", num_nodes=2, resources=TRN1)
    of = ml_plan(train, sagemaker=QUEUE, priority=7)
    cycle = Cycle(of, 0.0)
    request = service_job_request(cycle, Leaf(train), 1)
    name = cycle.leaf_id(Leaf(train), 1)
    payload = json.loads(request.pop("serviceRequestPayload"))
    assert name.startswith("relevance-2026-11-20-train-r1-")
    assert request == {
        "jobName": name,
        "jobQueue": "ml",
        "serviceJobType": "SAGEMAKER_TRAINING",
        "shareIdentifier": "production",
        "schedulingPriority": 7,
        "retryStrategy": {
            "attempts": 3,
            "evaluateOnExit": [
                {"action": "RETRY", "onStatusReason": "Received status from SageMaker: AlgorithmError: exit 75 *"},
                {"action": "RETRY", "onStatusReason": "Received status from SageMaker: AlgorithmError: exit 143 *"},
                {"action": "RETRY", "onStatusReason": "Received status from SageMaker: InternalServerError*"},
                {"action": "RETRY", "onStatusReason": "Received status from SageMaker: CapacityError*"},
                {"action": "EXIT", "onStatusReason": "*"},
            ],
        },
        "tags": {"pipeline": "relevance", "cycle": "2026-11-20", "job": "train"},
        "clientToken": name,
    }
    assert len(payload["TrainingJobName"]) <= 23
    assert payload["RoleArn"] == ROLE
    assert payload["ResourceConfig"]["InstanceCount"] == 2
    assert payload["Environment"]["TRNJOBS_STARTS"] == name
    assert "TRNJOBS_ATTEMPT" not in payload["Environment"]  # Batch sends the same payload for every try
    assert [*request_problems("sagemaker", "CreateTrainingJob", payload)] == []


FAILURES = [
    *(f"AlgorithmError: exit {code} {name}: words, exit code: {code}" for code, name in
      [(rule.exit_code, rule.name) for rule in EXIT_TABLE if rule.exit_code]),
    "AlgorithmError: exit 7 error, exit code: 7",
    "AlgorithmError: exit 14 error, exit code: 14",
    "AlgorithmError: exit 1 error: no exit 75 here, exit code: 1",
    "AlgorithmError: , exit code: 1",
    "InternalServerError: We encountered an internal error. Please try again.",
    "CapacityError: Unable to provision requested ML compute capacity.",
    "ClientError: Artifact upload failed: access denied",
    "ClientError: InternalServerError",
    "ResourceLimitExceeded: The account-level service limit",
    "",
]  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_the_rules_fire_for_what_the_direct_way_tries_again_and_for_nothing_else(failure: str) -> None:
    retry = Retry.of(3)
    strategy = {"attempts": 3, "evaluateOnExit": retry_rules(retry)}
    fires = FakeServiceJobs.tries_again({"retryStrategy": strategy, "attempts": []}, RECEIVED + failure)
    assert fires == is_tried_again(retry, 1, failure_end(failure))


def test_a_payload_over_its_limit_is_refused_by_its_size(tmp_path: Path) -> None:
    variables = {f"VARIABLE_{number}": "x" * 500 for number in range(30)}
    at = Setting(tmp_path, plan=ml_plan(job("train", environment=variables), sagemaker=QUEUE))
    with pytest.raises(ConfigError, match=r"train: a payload of 1\d,\d{3} bytes; expected at most 10,240"):
        at.target().check(at.plan)
    assert at.ml.faults.calls == []
    without = Setting(tmp_path, plan=ml_plan(job("train", environment=variables)))
    without.target().check(without.plan)


def test_a_queue_that_would_not_run_it_is_one_clear_line_and_nothing_is_sent(one: Setting) -> None:
    def refusal() -> str:
        with pytest.raises(ConfigError, match="AWS Batch in this account would not run this plan") as caught:
            one.target().check(one.plan)
        return str(caught.value)

    one.target().check(one.plan)
    one.batch.queue["schedulingPolicyArn"] = ""
    assert "queue ml: has no scheduling policy, so it refuses share identifiers" in refusal()
    one.batch.queue |= {"schedulingPolicyArn": one.batch.policies[0]["arn"], "jobQueueType": "ECS"}
    assert "queue ml: of type ECS; expected SAGEMAKER_TRAINING" in refusal()
    one.batch.queue |= {"jobQueueType": "SAGEMAKER_TRAINING", "state": "DISABLED"}
    assert "queue ml: DISABLED, it takes no jobs" in refusal()
    one.batch.queue |= {"state": "ENABLED", "jobQueueName": "other"}
    assert "queue ml: does not exist" in refusal()
    one.batch.queue |= {"jobQueueName": "ml"}
    one.batch.policies[0] = {"arn": one.batch.policies[0]["arn"], "quotaSharePolicy": {}}
    assert "its scheduling policy has no fair shares" in refusal()
    assert one.batch.submitted == []


# One job, from the queue to its end.


def test_it_waits_in_the_queue_runs_fails_is_tried_again_and_succeeds(one: Setting) -> None:
    record = one.tick()["train"]
    assert (record.state, record.status_reason, record.attempts) == (RUNNABLE, "in queue ml", ())
    assert one.tick()["train"] == record
    assert len(one.batch.submitted) == 1
    first = one.batch.dispatch(one.batch.job("train"))
    record = one.tick()["train"]
    assert (record.state, record.attempts[0].log_streams) == (STARTING, (f"{first}/algo-1-",))
    one.ml.start(first)
    one.batch.settle()
    assert one.tick()["train"].state is RUNNING
    one.clock.now += 7200
    one.ml.finish(first, 75, "TransientError")
    assert one.tick()["train"].state is RUNNING  # whether it was the last try is for AWS Batch to say
    one.batch.settle()
    record = one.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts]) == (RUNNABLE, [75])
    assert record.attempts[0].billable_s == 7200
    second = one.batch.dispatch(one.batch.job("train"))
    assert second != first
    one.ml.finish(second, 0)
    one.batch.settle()
    record = one.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts]) == (SUCCEEDED, [75, 0])
    at_logs = FakeLogs(f"{first}/algo-1-1", f"{second}/algo-1-1")
    one.logs = at_logs
    lines = [*dict.fromkeys(one.target().logs(record, attempt=2, node=0))]
    assert lines == [f"line of {second}/algo-1-1"]
    assert len(one.batch.submitted) == 1


def test_taken_back_for_want_of_capacity_costs_no_try(one: Setting) -> None:
    one.tick()
    train = one.batch.job("train")
    one.batch.dispatch(train)
    one.tick()
    one.batch.fall_back(train)
    record = one.tick()["train"]
    assert (record.state, len(record.attempts)) == (STARTING, 1)
    (line,) = one.target().check_blocked([record])
    assert line.startswith("train waits for machines of SageMaker: in queue ml: CAPACITY:INSUFFICIENT")
    second = one.batch.dispatch(train)
    assert one.tick()["train"].attempts[0].log_streams == (f"{second}/algo-1-",)
    one.ml.finish(second, 0)
    one.batch.settle()
    record = one.tick()["train"]
    assert (record.state, [a.exit_code for a in record.attempts]) == (SUCCEEDED, [0])


@pytest.mark.parametrize(("code", "state"), [(0, SUCCEEDED), (65, FAILED)])
def test_of_a_training_job_that_was_deleted_batch_tells_the_end(one: Setting, code: int, state: JobState) -> None:
    one.tick()
    name = one.batch.dispatch(one.batch.job("train"))
    one.ml.finish(name, code)
    one.batch.settle()
    one.ml.delete(name)
    record = one.tick()["train"]
    assert (record.state, record.attempts[0].exit_code, len(one.batch.submitted)) == (state, code, 1)


@pytest.mark.parametrize("where", ["waiting", "running", "between tries"])
def test_cancelled_wherever_it_is_nothing_of_it_goes_on(one: Setting, where: str) -> None:
    one.tick()
    train = one.batch.job("train")
    if where != "waiting":
        name = one.batch.dispatch(train)
        one.ml.start(name)
        one.batch.settle()
        one.tick()
    if where == "between tries":
        one.ml.finish(name, 75)
        one.batch.settle()
    one.target().cancel(one.plan, CANCELLED + "why")
    if where == "running":
        one.ml.end(name, "Stopped")
    one.batch.settle()
    record = one.tick()["train"]
    assert (record.state, record.status_reason) == (CANCELLED_STATE, CANCELLED + "why")
    assert (train["status"], train["statusReason"]) == ("FAILED", CANCELLED + "why")
    assert len(one.batch.submitted) == 1
