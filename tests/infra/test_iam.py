"""The evaluator of policies, against the rules of IAM's documentation."""

import json
from typing import Any

import pytest

from tests.infra.iam import Decision, Policy, Request, decide

GET, BUCKET = "s3:GetObject", "arn:aws:s3:::bucket"


def policy(*statements: dict[str, Any]) -> Policy:
    return Policy.parse(json.dumps({"Version": "2012-10-17", "Statement": list(statements)}))


def allow(action: Any = GET, resource: Any = f"{BUCKET}/a/*", **more: Any) -> dict[str, Any]:
    return {"Effect": "Allow", "Action": action, "Resource": resource, **more}


def when(operator: str, key: str, value: Any) -> dict[str, Any]:
    return allow(Condition={operator: {key: value}})


@pytest.mark.parametrize(
    ("statements", "request_", "decision"),
    [
        ([], Request(GET, f"{BUCKET}/a/b"), "not allowed"),
        ([allow()], Request(GET, f"{BUCKET}/a/b"), "allowed"),
        ([allow()], Request(GET, f"{BUCKET}/a/b/c"), "allowed"),
        ([allow()], Request(GET, f"{BUCKET}/a"), "not allowed"),
        ([allow()], Request(GET, f"{BUCKET}/A/b"), "not allowed"),
        ([allow()], Request("s3:getobject", f"{BUCKET}/a/b"), "allowed"),
        ([allow()], Request("s3:GetObjectVersion", f"{BUCKET}/a/b"), "not allowed"),
        ([allow("s3:Get*")], Request("s3:GetObjectVersion", f"{BUCKET}/a/b"), "allowed"),
        ([allow(resource=f"{BUCKET}/a/?")], Request(GET, f"{BUCKET}/a/bc"), "not allowed"),
        ([allow(resource=f"{BUCKET}/[ab]/*")], Request(GET, f"{BUCKET}/a/b"), "not allowed"),
        ([allow(resource=[f"{BUCKET}/b", f"{BUCKET}/a/b"])], Request(GET, f"{BUCKET}/a/b"), "allowed"),
        ([allow(), allow() | {"Effect": "Deny"}], Request(GET, f"{BUCKET}/a/b"), "denied"),
        ([allow("s3:*"), allow("s3:Put*") | {"Effect": "Deny"}], Request(GET, f"{BUCKET}/a/b"), "allowed"),
        ([{"Effect": "Allow", "NotAction": "iam:*", "Resource": "*"}], Request(GET, f"{BUCKET}/a/b"), "allowed"),
        ([{"Effect": "Allow", "NotAction": "s3:*", "Resource": "*"}], Request(GET, f"{BUCKET}/a/b"), "not allowed"),
    ],
)
def test_statements(statements: list[dict[str, Any]], request_: Request, decision: str) -> None:
    assert decide([policy(*statements)], request_) == decision
    assert decide([policy(one) for one in statements], request_) == decision, "over several policies alike"


@pytest.mark.parametrize(
    ("operator", "wanted", "found", "holds"),
    [
        ("StringEquals", "a", "a", True),
        ("StringEquals", "a*", "ab", False),
        ("StringEquals", ["a", "b"], "b", True),
        ("StringEquals", "a", None, False),
        ("StringEqualsIfExists", "a", None, True),
        ("StringEqualsIfExists", "a", "b", False),
        ("StringLike", "a/*", "a/b", True),
        ("StringLike", "a/*", "a", False),
        ("StringLike", "a/*", None, False),
        ("ArnLike", "arn:aws:ecs:r:1:*", "arn:aws:ecs:r:1:task/c/t", True),
        ("ArnLike", "arn:aws:*:r:1:task", "arn:aws:ecs:x:r:1:task", False),
        ("ArnLike", "arn:aws:ecs:r:1:*", "arn:aws:ecs:r:2:task/c/t", False),
        ("Bool", "true", "True", True),
        ("Bool", "true", "false", False),
        ("Bool", "true", None, False),
        ("Null", "true", None, True),
        ("Null", "true", "a", False),
        ("Null", "false", None, False),
        ("Null", "false", "a", True),
    ],
)
def test_conditions(operator: str, wanted: Any, found: str | None, holds: bool) -> None:
    context = {} if found is None else {"AWS:key": found}  # keys ignore case
    decision = decide([policy(when(operator, "aws:Key", wanted))], Request(GET, f"{BUCKET}/a/b", context))
    assert decision == (Decision.ALLOWED if holds else Decision.NOT_ALLOWED)


def test_all_conditions_must_hold() -> None:
    both = policy(allow(Condition={"StringEquals": {"k": "a", "l": "b"}, "Bool": {"m": "true"}}))
    full = {"k": "a", "l": "b", "m": "true"}
    assert decide([both], Request(GET, f"{BUCKET}/a/b", full)) == "allowed"
    for key in full:
        assert decide([both], Request(GET, f"{BUCKET}/a/b", full | {key: "x"})) == "not allowed"


def test_trust_goes_by_principal() -> None:
    trust = policy({"Effect": "Allow", "Principal": {"Service": "a.amazonaws.com"}, "Action": "sts:AssumeRole"})
    assert decide([trust], Request("sts:AssumeRole", principal="a.amazonaws.com")) == "allowed"
    assert decide([trust], Request("sts:AssumeRole", principal="b.amazonaws.com")) == "not allowed"


@pytest.mark.parametrize(
    "statement",
    [
        when("DateLessThan", "aws:CurrentTime", "2030-01-01"),
        allow(resource="${aws:username}"),
        allow(resource=[]),
        allow(NotResource="*"),
        allow() | {"Effect": "allow"},
        {"Effect": "Allow", "Resource": "*"},
        {"Effect": "Allow", "Principal": "*", "Action": "sts:AssumeRole"},
    ],
)
def test_what_is_not_understood_raises(statement: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        decide([policy(statement)], Request(statement.get("Action", GET), f"{BUCKET}/a/b", {"aws:CurrentTime": "now"}))
