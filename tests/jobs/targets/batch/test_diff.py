"""Definitions make the round trip: what is described compares equal to what would be registered."""

from collections.abc import Iterator
from typing import Any

import pytest

from jobs.plan.spec import Plan
from jobs.targets.batch.account import change_lines, ensure_definition
from jobs.targets.batch.client import BatchClient
from jobs.targets.batch.requests import definition_request
from tests.jobs.cycle.cases import cycle, job, plan
from tests.jobs.targets.batch.fake_batch import FakeBatch
from tests.jobs.targets.batch.setting import FAST, Clock


@pytest.mark.parametrize("revisions", [(9, 10), (10, 9)])
def test_the_tenth_revision_is_newer_than_the_ninth(revisions: tuple[int, int]) -> None:
    request = definition_request(cycle(), cycle().jobs[0])

    class Client:
        def active_definitions(self, name: str) -> list[dict[str, Any]]:
            return [{"jobDefinitionName": name, "revision": one, "tags": request["tags"]} for one in revisions]

    client: Any = Client()
    assert ensure_definition(client, request) == f"{request['jobDefinitionName']}:10"
    assert next(change_lines(client, plan(job("train", timeout_s=7200)))).endswith("against revision 10:")


def register_all(client: BatchClient, of: Plan) -> None:
    for one in of.jobs:
        ensure_definition(client, definition_request(of, one))


def changed_places(client: BatchClient, of: Plan) -> Iterator[str]:
    first, *lines = change_lines(client, of)
    assert first.endswith("would be registered anew; against revision 1:")
    yield from (line.strip().partition(": ")[0] for line in lines)


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
