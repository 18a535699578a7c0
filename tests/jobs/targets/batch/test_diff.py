"""Definitions make the round trip: what is described compares equal to what would be registered."""

from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.validate import validate_parameters
from hypothesis import HealthCheck, given, settings

from jobs.plan.dag import Plan
from jobs.targets.batch.client import BatchClient
from jobs.targets.batch.definitions import change_lines, differences, ensure_definition
from jobs.targets.batch.limits import plan_problems
from jobs.targets.batch.requests import definition_request, submit_request
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.targets.batch.fake_batch import FakeBatch, service
from tests.jobs.targets.batch.plans import plans
from tests.jobs.targets.batch.setting import FAST, Clock
from tests.s3 import empty_account


@pytest.fixture(scope="module")
def moto_batch() -> Iterator[Any]:
    with empty_account():
        yield boto3.client("batch", region_name="us-east-1")


@pytest.mark.parametrize("revisions", [(9, 10), (10, 9)])
def test_the_tenth_revision_is_newer_than_the_ninth(revisions: tuple[int, int]) -> None:
    request = definition_request(cycle(), cycle().jobs[0])

    class Client:
        def active_definitions(self, name: str) -> list[dict[str, Any]]:
            return [{"jobDefinitionName": name, "revision": one, "tags": request["tags"]} for one in revisions]

    client: Any = Client()
    assert ensure_definition(client, request) == f"{request['jobDefinitionName']}:10"
    assert next(change_lines(client, plan(job("train", timeout_s=7200)))).endswith("against revision 10:")


@pytest.mark.parametrize(("role", "expected"), [("arn:role", "arn:role"), ("", None)])
def test_the_role_of_a_job_is_that_of_its_container(role: str, expected: str | None) -> None:
    of = plan(job("verify"), job_role=role)
    assert definition_request(of, of.jobs[0])["containerProperties"].get("jobRoleArn") == expected


def register_all(client: BatchClient, of: Plan) -> None:
    for one in of.jobs:
        ensure_definition(client, definition_request(of, one))


def changed_places(client: BatchClient, of: Plan) -> Iterator[str]:
    first, *lines = change_lines(client, of)
    assert first.endswith("would be registered anew; against revision 1:")
    yield from (line.strip().partition(": ")[0] for line in lines)


@given(plans())
def test_requests_of_any_plan_validate_against_the_model_of_the_service(of: Plan) -> None:
    assert list(plan_problems(of)) == []
    ids = {one.name: f"{index:036d}" for index, one in enumerate(of.jobs)}
    for one in of.jobs:
        for operation, request in (
            ("RegisterJobDefinition", definition_request(of, one)),
            ("SubmitJob", submit_request(of, one, definition="name:1", ids=ids)),
        ):
            validate_parameters(request, service().operation_model(operation).input_shape)


@given(plans())
def test_what_is_registered_compares_equal_and_is_not_registered_again(of: Plan) -> None:
    fake = FakeBatch(Clock())
    client = BatchClient(fake, policy=FAST)
    register_all(client, of)
    for one in of.jobs:
        request = definition_request(of, one)
        (described,) = client.active_definitions(request["jobDefinitionName"])
        assert differences(request, described) == {}
    assert [line[0] for line in change_lines(client, of)] == ["="] * len(of.jobs)
    register_all(client, of)
    assert len(fake.definitions) == len(of.jobs)


@given(plans(max_jobs=1))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_containers_as_moto_describes_them(moto_batch: Any, of: Plan) -> None:
    """It drops the priority of definitions, and the nodes of gangs."""
    (only,) = of.jobs
    if only.num_nodes:
        return
    where = {only.name: {**of.placements[only.name], "priority": 0}}
    request = definition_request(of.model_copy(update={"placements": where}), only)
    client = BatchClient(moto_batch, policy=FAST)
    name, _, revision = ensure_definition(client, request).rpartition(":")
    described = [one for one in client.active_definitions(name) if one["revision"] == int(revision)]
    assert differences(request, described[0]) == {}


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"timeout_s": 7200}, ["timeout.attemptDurationSeconds"]),
        (
            {"environment": {"A": "1"}},
            ["containerProperties.environment[A].value"],
        ),
        ({"image": "other"}, ["containerProperties.image"]),
        ({"resources": {"vcpus": 4, "memory_mib": 4096}}, ["containerProperties.resourceRequirements[VCPU].value"]),
    ],
)
def test_what_changed_is_named(fields: dict[str, Any], paths: list[str]) -> None:
    client = BatchClient(FakeBatch(Clock()), policy=FAST)
    register_all(client, plan(job("train")))
    assert [*changed_places(client, plan(job("train", **fields)))] == paths


def test_a_changed_priority_is_named() -> None:
    client = BatchClient(FakeBatch(Clock()), policy=FAST)
    register_all(client, plan(job("train")))
    assert [*changed_places(client, plan(job("train"), priority=5))] == ["schedulingPriority"]


def test_lines_for_new_equal_and_changed_definitions() -> None:
    client = BatchClient(FakeBatch(Clock()), policy=FAST)
    of = cycle()
    assert next(change_lines(client, of)) == ("+ relevance-train:1 (train) would be registered, the first of its name")
    register_all(client, of)
    assert [*change_lines(client, of)][2] == "= relevance-verify:1 (verify) is registered"
    changed = plan(job("verify", timeout_s=60))
    assert [*change_lines(client, changed)] == [
        "~ relevance-verify (verify) would be registered anew; against revision 1:",
        "    timeout.attemptDurationSeconds: 3600 -> 60",
    ]


def test_an_older_revision_that_is_equal_is_used_again() -> None:
    client = BatchClient(FakeBatch(Clock()), policy=FAST)
    for timeout_s in (60, 120):
        register_all(client, plan(job("train", timeout_s=timeout_s)))
    assert [*change_lines(client, plan(job("train", timeout_s=60)))] == ["= relevance-train:1 (train) is registered"]
