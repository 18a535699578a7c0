"""What an account would not run, said before anything is sent; and how its definitions differ from those of a plan."""

from typing import Any

import pytest

from jobs.plan.spec import JobPlan, JobSpec
from jobs.targets.batch.account import change_lines, ensure_definition, preflight
from jobs.targets.batch.client import BatchClient
from jobs.targets.batch.requests import definition_request
from pipeline.core.errors import ConfigError, TransientError
from tests.jobs.cycle.cases import TRN1, cycle, job, plan
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.faults import FAST, Clock

GROUP = job("train", num_nodes=10, resources=TRN1)
WIDE = job("train", num_nodes=2, resources={"vcpus": 96, "memory_mib": 1000, "instance_type": "p4d.24xlarge"})


def ask(of: JobPlan, **changes: dict[str, Any]) -> tuple[str, ...]:
    """`queue`, `environment`, `resources`: what is other than sound."""
    fake = FakeBatch(Clock())
    fake.queues[0] |= changes.get("queue", {})
    fake.environments[0] |= changes.get("environment", {})
    fake.environments[0]["computeResources"] |= changes.get("resources", {})
    return preflight(BatchClient(fake, policy=FAST), of)


@pytest.mark.parametrize(
    ("of", "resources"),
    [
        (cycle(), {}),
        (plan(GROUP), {}),
        (plan(job("train"), queue=FakeBatch(Clock()).queues[0]["jobQueueArn"]), {}),
        (plan(job("embed", array_size=1000)), {"maxvCpus": 2}),  # room for one child
        (plan(WIDE), {"instanceTypes": ["p4d"]}),
        (plan(WIDE), {"instanceTypes": ["optimal"]}),
        (plan(WIDE), {"instanceTypes": []}),
    ],
)
def test_a_sound_account_has_nothing_to_say(of: JobPlan, resources: dict[str, Any]) -> None:
    assert ask(of, resources=resources) == ()


@pytest.mark.parametrize(
    ("changes", "spec", "problem"),
    [
        ({"queue": {"jobQueueName": "other"}}, GROUP, "queue relevance: does not exist"),
        ({"queue": {"state": "DISABLED"}}, GROUP, "queue relevance: DISABLED, so it does not accept jobs"),
        ({"queue": {"status": "INVALID", "statusReason": "role"}}, GROUP, "queue relevance: INVALID (role)"),
        ({"queue": {"schedulingPolicyArn": None}}, GROUP, "has no scheduling policy"),
        ({"environment": {"state": "DISABLED"}}, GROUP, "no enabled compute environment"),
        ({"environment": {"status": "INVALID"}}, GROUP, "no enabled compute environment"),
        (
            {"resources": {"maxvCpus": 1279}},
            GROUP,
            "train: needs 1,280 vCPU at once, but the compute environments of relevance",
        ),
        ({"resources": {"maxvCpus": 1}}, job("train"), "train: needs 2 vCPU at once"),
        ({"resources": {"type": "SPOT"}}, GROUP, "10 nodes need a managed on-demand EC2"),
        ({"environment": {"type": "UNMANAGED"}}, GROUP, "need a managed on-demand EC2"),
        ({}, WIDE, "needs p4d.24xlarge, but the compute environments only offer trn1.32xlarge"),
    ],
)
def test_what_the_account_would_not_run(changes: dict[str, Any], spec: JobSpec, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(plan(spec), **changes)
    assert problem in str(caught.value)


def test_a_queue_that_is_changing_is_worth_another_try() -> None:
    with pytest.raises(TransientError, match="UPDATING"):
        ask(cycle(), queue={"status": "UPDATING"})


@pytest.mark.parametrize(
    ("share", "warned"), [("production", False), ("experiment7", False), ("experiment", False), ("other", True)]
)
def test_shares_that_the_policy_does_not_name(share: str, warned: bool) -> None:
    assert bool(ask(plan(job("train"), share_identifier=share))) is warned


@pytest.mark.parametrize("revisions", [(9, 10), (10, 9)])
def test_the_tenth_revision_is_newer_than_the_ninth(revisions: tuple[int, int]) -> None:
    request, fake = definition_request(cycle(), cycle().jobs[0]), FakeBatch(Clock())
    fake.definitions = [request | {"revision": one} for one in revisions]
    client = BatchClient(fake, policy=FAST)
    assert ensure_definition(client, request) == f"{request['jobDefinitionName']}:10"
    assert next(change_lines(client, plan(job("train", timeout_s=7200)))).endswith("changes to revision 10:")


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"timeout_s": 7200}, "timeout.attemptDurationSeconds"),
        ({"environment": {"A": "1"}}, "containerProperties.environment"),
        ({"resources": {"vcpus": 4, "memory_mib": 4096}}, "containerProperties.resourceRequirements.VCPU.value"),
    ],
)
def test_what_is_described_equals_what_was_registered_but_for_what_changed(fields: dict[str, Any], place: str) -> None:
    client = BatchClient(FakeBatch(Clock()), policy=FAST)
    ensure_definition(client, definition_request(plan(job("train")), job("train")))
    first, changed = change_lines(client, plan(job("train", **fields)))
    assert first.endswith("would be registered again; changes to revision 1:")
    assert changed.strip().partition(": ")[0] == place
