"""Every rule of AWS Batch that we know, one case each; requests against botocore's model."""

import re
from typing import Any

import pytest

from jobs.plan.spec import Dependency, JobSpec, Plan
from jobs.targets.batch.requests import check_plan, definition_request, submit_request
from pipeline.core.errors import ConfigError
from tests.jobs.cycle.cases import TRN1, cycle, job, plan

PLACEMENT = {"share_identifier", "queue", "priority"}


def test_a_sound_plan_has_no_problem() -> None:
    check_plan(cycle())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"share_identifier": "prod-1"}, "share identifier 'prod-1'"),
        ({"share_identifier": ""}, "share identifier ''"),
        ({"queue": ""}, "no queue"),
        ({"name": "a b"}, "job name 'relevance-2026-11-20-a b'"),
        ({"name": "x" * 120}, "at most 128"),
        ({"image": ""}, "an image of 0 characters"),
        ({"image": "i" * 256}, "an image of 256 characters"),
        ({"command": ("trnpipe", "Ref::cycle")}, "Ref::"),
        ({"environment": {"AWS_BATCH_X": "1"}}, "environment variable AWS_BATCH_X"),
        ({"environment": {f"V{i}": "x" * 1000 for i in range(30)}}, "a job definition of"),
        ({"command": ("x" * 8_192,)}, "container overrides of"),
        ({"command": ("x" * 31_000,)}, "a SubmitJob request of"),
        ({"num_nodes": 2, "resources": TRN1.model_copy(update={"vcpus": 129})}, "it would never start"),
        ({"num_nodes": 2, "resources": TRN1.model_copy(update={"memory_mib": 524_288})}, "it would never start"),
        ({"depends_on": tuple(Dependency(job="a") for _ in range(21))}, "21 dependencies"),
    ],
)
def test_each_rule_names_what_breaks_it(fields: dict[str, Any], problem: str) -> None:
    what = {name: value for name, value in fields.items() if name not in PLACEMENT}
    where = {name: value for name, value in fields.items() if name in PLACEMENT}
    broken = plan(job("a", array_size=2), JobSpec.model_validate({**job("train").model_dump(), **what}), **where)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_plan(broken)


def requests(of: Plan) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ids = {one.name: f"id-of-{one.name}" for one in of.jobs}
    return [(definition_request(of, one), submit_request(of, one, definition="d:3", ids=ids)) for one in of.jobs]


def test_a_gang_is_one_open_range_so_that_one_definition_serves_any_number_of_nodes() -> None:
    definition, submit = requests(cycle())[0]
    nodes = definition["nodeProperties"]
    assert (definition["type"], nodes["numNodes"], nodes["mainNode"]) == ("multinode", 2, 0)
    (group,) = nodes["nodeRangeProperties"]
    assert group["targetNodes"] == "0:"
    assert group["container"]["instanceType"] == "trn1.32xlarge"
    assert len(group["container"]["linuxParameters"]["devices"]) == 24
    (override,) = submit["nodeOverrides"]["nodePropertyOverrides"]
    assert override["targetNodes"] == "0:"
    assert submit["nodeOverrides"]["numNodes"] == 2
    assert "containerOverrides" not in submit


def test_what_differs_between_cycles_is_not_in_the_definition() -> None:
    one, other = cycle(), cycle().model_copy(update={"cycle": "2026-11-21"})
    assert [d for d, _ in requests(one)] == [d for d, _ in requests(other)]
    assert [s for _, s in requests(one)] != [s for _, s in requests(other)]
    changed = one.model_copy(update={"jobs": (job("train", timeout_s=7200),)})
    same = one.model_copy(update={"jobs": (job("train"),)})
    tags = [requests(p)[0][0]["tags"]["content"] for p in (changed, same, same)]
    assert tags[0] != tags[1] == tags[2]
