"""What an account would not run, said before anything is sent."""

from typing import Any

import pytest

from jobs.plan.spec import JobSpec, Plan
from jobs.targets.batch.account import preflight
from jobs.targets.batch.client import BatchClient
from pipeline.core.errors import ConfigError, TransientError
from tests.jobs.cycle.cases import TRN1, cycle, job, plan
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.batch.setting import FAST, Clock

GANG = job("train", num_nodes=10, resources=TRN1)
HALF = GANG.model_copy(update={"resources": TRN1.model_copy(update={"vcpus": 64})})
WIDE = job("train", num_nodes=2, resources={"vcpus": 96, "memory_mib": 1000, "instance_type": "p4d.24xlarge"})


def ask(fake: FakeBatch, of: Plan) -> tuple[str, ...]:
    return preflight(BatchClient(fake, policy=FAST), of)


def account(**changes: dict[str, Any]) -> FakeBatch:
    """`queue`, `environment`, `resources`: what is other than sound."""
    fake = FakeBatch(Clock())
    fake.queues[0] |= changes.get("queue", {})
    fake.environments[0] |= changes.get("environment", {})
    fake.environments[0]["computeResources"] |= changes.get("resources", {})
    return fake


def test_a_sound_account_has_nothing_to_say() -> None:
    assert ask(account(), cycle()) == ()
    assert ask(account(), plan(GANG)) == ()
    by_arn = account().queues[0]["jobQueueArn"]
    assert ask(account(), plan(job("train"), queue=by_arn)) == ()


@pytest.mark.parametrize(
    ("changes", "spec", "problem"),
    [
        ({"queue": {"state": "DISABLED"}}, GANG, "queue relevance: DISABLED, it takes no jobs"),
        ({"queue": {"status": "INVALID", "statusReason": "role"}}, GANG, "queue relevance: INVALID (role)"),
        ({"queue": {"schedulingPolicyArn": None}}, GANG, "has no scheduling policy"),
        ({"queue": {"computeEnvironmentOrder": []}}, GANG, "no enabled compute environment"),
        ({"environment": {"state": "DISABLED"}}, GANG, "no enabled compute environment"),
        ({"environment": {"status": "INVALID"}}, GANG, "no enabled compute environment"),
        (
            {"resources": {"maxvCpus": 1279}},
            GANG,
            "train: 1,280 vCPU at once; the compute environments of relevance go up to 1,279",
        ),
        ({"resources": {"maxvCpus": 1279}}, HALF, "train: 1,280 vCPU at once"),
        ({"resources": {"maxvCpus": 1}}, job("train"), "train: 2 vCPU at once"),
        ({"resources": {"type": "SPOT"}}, GANG, "10 nodes; they need a managed on-demand EC2"),
        ({"resources": {"type": "FARGATE"}}, GANG, "they need a managed on-demand EC2"),
        ({"environment": {"type": "UNMANAGED"}}, GANG, "they need a managed on-demand EC2"),
        ({}, WIDE, "instance type p4d.24xlarge; the compute environments offer trn1.32xlarge"),
    ],
)
def test_what_the_account_would_not_run(changes: dict[str, Any], spec: JobSpec, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(account(**changes), plan(spec))
    assert problem in str(caught.value)
    assert caught.value.exit_code == 78


@pytest.mark.parametrize("kinds", [["p4d"], ["optimal"], ["c7i", "p4d.24xlarge"], []])
def test_instance_types_by_name_family_or_any(kinds: list[str]) -> None:
    assert ask(account(resources={"instanceTypes": kinds}), plan(WIDE)) == ()


@pytest.mark.parametrize("status", ["CREATING", "UPDATING"])
def test_a_queue_that_is_changing_is_worth_another_try(status: str) -> None:
    with pytest.raises(TransientError, match=status):
        ask(account(queue={"status": status}), cycle())


@pytest.mark.parametrize(
    ("share", "warned"), [("production", False), ("experiment7", False), ("experiment", False), ("other", True)]
)
def test_shares_that_the_policy_does_not_name(share: str, warned: bool) -> None:
    assert bool(ask(account(), plan(job("train"), share_identifier=share))) is warned


def test_an_array_needs_room_for_one_child() -> None:
    assert ask(account(resources={"maxvCpus": 2}), plan(job("embed", array_size=1000))) == ()
