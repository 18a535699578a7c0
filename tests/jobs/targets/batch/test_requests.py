"""Requests, what AWS Batch would refuse, and its retry rules as it documents them beside those of our own engine."""

import re
from typing import Any

import pytest

from jobs.cycle.job_states import EXITED, HOST_TERMINATED, TASK_NOT_STARTED, AttemptEnd, should_retry
from jobs.plan.spec import JobPlan, JobSpec, Retry
from jobs.targets.batch.requests import check_plan, definition_request, submit_request
from pipeline.core.errors import EXIT_BUG, EXIT_TABLE, ConfigError
from tests.jobs.cycle.cases import TRN1, cycle, job, plan

PLACEMENT = {"share_identifier", "queue", "priority"}
RETRY = Retry.of(attempts=3)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"share_identifier": "prod-1"}, "share identifier 'prod-1'"),
        ({"share_identifier": ""}, "share identifier ''"),
        ({"queue": ""}, "no queue"),
        ({"name": "a b"}, "job name 'relevance-2026-11-20-a b"),
        ({"name": "x" * 120}, "at most 128"),
        ({"image": "i" * 256}, "image name has 256 characters"),
        ({"command": ("trnpipe", "Ref::cycle")}, "Ref::"),
        ({"environment": {"AWS_BATCH_X": "1"}}, "environment variable AWS_BATCH_X"),
        ({"environment": {f"V{i}": "x" * 1000 for i in range(30)}}, "job definition has"),
        ({"command": ("x" * 8_192,)}, "container overrides have"),
        ({"num_nodes": 2, "resources": TRN1.model_copy(update={"vcpus": 129})}, "it would never start"),
        ({"num_nodes": 2, "resources": TRN1.model_copy(update={"memory_mib": 524_288})}, "it would never start"),
    ],
)
def test_each_rule_names_what_breaks_it(fields: dict[str, Any], problem: str) -> None:
    check_plan(cycle())
    what = {name: value for name, value in fields.items() if name not in PLACEMENT}
    where = {name: value for name, value in fields.items() if name in PLACEMENT}
    broken = plan(job("a", array_size=2), JobSpec.model_validate({**job("train").model_dump(), **what}), **where)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_plan(broken)


def test_jobs_need_a_workspace_that_they_share() -> None:
    local = cycle().model_copy(update={"workspace": "file:///w"})
    with pytest.raises(ConfigError, match="every job: workspace file:///w is not on S3, expected s3://"):
        check_plan(local)


def requests(of: JobPlan) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    ids = {one.name: f"id-of-{one.name}" for one in of.jobs}
    return [(definition_request(of, one), submit_request(of, one, definition="d:3", ids=ids)) for one in of.jobs]


def test_a_node_group_is_one_open_range_so_that_one_definition_serves_any_number_of_nodes() -> None:
    definition, submit = requests(cycle())[0]
    nodes = definition["nodeProperties"]
    assert (definition["type"], nodes["numNodes"], nodes["mainNode"]) == ("multinode", 2, 0)
    (group,) = nodes["nodeRangeProperties"]
    assert (group["targetNodes"], group["container"]["instanceType"]) == ("0:", "trn1.32xlarge")
    assert len(group["container"]["linuxParameters"]["devices"]) == 24
    (override,) = submit["nodeOverrides"]["nodePropertyOverrides"]
    assert (override["targetNodes"], submit["nodeOverrides"]["numNodes"]) == ("0:", 2)
    assert "containerOverrides" not in submit


def test_what_differs_between_cycles_is_not_in_the_definition() -> None:
    one, other = requests(cycle()), requests(cycle().model_copy(update={"cycle": "2026-11-21"}))
    assert [d for d, _ in one] == [d for d, _ in other]
    assert [s for _, s in one] != [s for _, s in other]
    tags = [requests(plan(job("train", timeout_s=of)))[0][0]["tags"]["content"] for of in (7200, 3600, 3600)]
    assert tags[0] != tags[1] == tags[2]


def of_batch(end: AttemptEnd) -> str:
    """EvaluateOnExit: the first rule decides all of whose globs match; AWS Batch tries again without one."""
    rules = definition_request(plan(job("train", retry=RETRY)), job("train", retry=RETRY))["retryStrategy"]
    seen = {"onStatusReason": end.status_reason, "onReason": end.reason, "onExitCode": str(end.exit_code)}

    def fits(rule: dict[str, str]) -> bool:
        patterns = {name: re.escape(rule[name]).replace(r"\*", ".*") for name in seen if name in rule}
        return all(re.fullmatch(pattern, seen[name]) for name, pattern in patterns.items())

    assert len(rules["evaluateOnExit"]) <= 5  # AWS Batch takes no more (user guide, job retries)
    return next((rule["action"] for rule in rules["evaluateOnExit"] if fits(rule)), "")


@pytest.mark.parametrize(("preemptions", "expected"), [(0, 3), (4, 7), (20, 10)])
def test_aws_batch_makes_attempts_for_preemptions_too(preemptions: int, expected: int) -> None:
    one = job("train", retry=Retry.of(3, preemptions))
    ((definition, submit),) = requests(plan(one))
    variables = {each["name"]: each["value"] for each in submit["containerOverrides"]["environment"]}
    assert definition["retryStrategy"]["attempts"] == expected
    assert variables.get("TRNJOBS_ATTEMPTS") == ("3" if preemptions else None)


@pytest.mark.parametrize(
    ("end", "again"),
    [
        *((AttemptEnd(rule.exit_code, EXITED), rule.retry) for rule in EXIT_TABLE),
        (AttemptEnd(EXIT_BUG, EXITED), False),
        (AttemptEnd(137, EXITED, "OutOfMemoryError: Container killed due to memory usage"), False),
        (AttemptEnd(None, HOST_TERMINATED), True),
        (AttemptEnd(137, HOST_TERMINATED, "Killed from outside"), True),
        (AttemptEnd(None, TASK_NOT_STARTED, "CannotPullContainerError: pull"), True),
        (AttemptEnd(None, TASK_NOT_STARTED, "DockerTimeoutError: Could not transition"), True),
    ],
)
def test_aws_batch_and_our_engine_try_again_for_the_same_ends(end: AttemptEnd, again: bool) -> None:
    assert (should_retry(RETRY, 1, end), of_batch(end)) == (again, "RETRY" if again else "EXIT")
    assert not should_retry(RETRY, 3, end)
