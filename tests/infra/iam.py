"""What IAM would decide about a request: the part of its policy language that our policies use, and no more.

Source: IAM user guide, "Policy evaluation logic" and "IAM JSON policy elements". Within one account a request is
allowed when a statement allows it and none denies it. What is not understood raises, so that no rule is ignored.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Statement = Mapping[str, Any]
_ELEMENTS = frozenset({"Sid", "Effect", "Principal", "Action", "NotAction", "Resource", "Condition"})
IF_EXISTS = "IfExists"


class Decision(StrEnum):
    """`NOT_ALLOWED`: no statement speaks of it."""

    ALLOWED = "allowed"
    NOT_ALLOWED = "not allowed"
    DENIED = "denied"


@dataclass(frozen=True)
class Request:
    """One thing asked of AWS. `context`: condition keys and their values. `principal`: for trust policies."""

    action: str
    resource: str = "*"
    context: Mapping[str, str] = field(default_factory=dict)
    principal: str = ""

    def __str__(self) -> str:
        return f"{self.action} {self.resource}" + (f" {dict(self.context)}" if self.context else "")


@dataclass(frozen=True)
class Policy:
    """Statements that hold together."""

    statements: tuple[Statement, ...]

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Raises ValueError for what IAM would refuse, or what is not understood here."""
        document = json.loads(text)
        if set(document) != {"Version", "Statement"} or document["Version"] != "2012-10-17":
            raise ValueError(f"a policy with {sorted(document)} and version {document.get('Version')}")
        for one in document["Statement"]:
            if unknown := set(one) - _ELEMENTS:
                raise ValueError(f"element {sorted(unknown)} in statement {one.get('Sid')}")
            if one["Effect"] not in ("Allow", "Deny"):
                raise ValueError(f"effect {one['Effect']}")
            if ("Action" in one) == ("NotAction" in one) or ("Resource" in one) == ("Principal" in one):
                raise ValueError(f"statement {one.get('Sid')} needs Action or NotAction, and Resource or Principal")
            for element in ("Action", "NotAction", "Resource"):
                if element in one and not texts(one[element]):
                    raise ValueError(f"statement {one.get('Sid')}: no {element}")
        return cls(tuple(document["Statement"]))


def decide(policies: Iterable[Policy], request: Request) -> Decision:
    """An explicit deny wins over every allow; without either the request is not allowed."""
    effects = {one["Effect"] for policy in policies for one in policy.statements if applies(one, request)}
    if "Deny" in effects:
        return Decision.DENIED
    return Decision.ALLOWED if "Allow" in effects else Decision.NOT_ALLOWED


def applies(statement: Statement, request: Request) -> bool:
    """Whether a statement speaks of a request."""
    actions = texts(statement.get("Action", statement.get("NotAction", ())))
    is_named = any(like(one.lower(), request.action.lower()) for one in actions)
    if is_named != ("Action" in statement):
        return False
    if "Principal" in statement:
        if not _is_principal(statement["Principal"], request.principal):
            return False
    elif not any(like(one, request.resource) for one in texts(statement["Resource"])):
        return False
    return all(
        _holds(operator, key, texts(wanted), request.context)
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    )


def like(pattern: str, value: str) -> bool:
    """IAM's wildcards: * for any characters, ? for one. (Policy variables are not understood.)"""
    if "${" in pattern:
        raise ValueError(f"a policy variable in {pattern}")
    parts = [".*" if part == "*" else "." if part == "?" else re.escape(part) for part in re.split(r"([*?])", pattern)]
    return re.fullmatch("".join(parts), value, re.DOTALL) is not None


def texts(value: Any) -> tuple[str, ...]:
    """One text or a list of them, as policies may write either."""
    return (value,) if isinstance(value, str) else tuple(value)


def _is_principal(principal: Any, who: str) -> bool:
    if not isinstance(principal, Mapping) or set(principal) != {"Service"}:
        raise ValueError(f"principal {principal}")
    return who in texts(principal["Service"])


def _holds(operator: str, key: str, wanted: Sequence[str], context: Mapping[str, str]) -> bool:
    """One condition: one of the wanted values fits. A key that the request lacks fits only `...IfExists` and `Null`."""
    found = next((value for name, value in context.items() if name.lower() == key.lower()), None)
    if operator == "Null":
        return (found is None) == (wanted == ("true",))
    test = _OPERATORS.get(operator.removesuffix(IF_EXISTS))
    if test is None:
        raise ValueError(f"condition operator {operator}")
    if found is None:
        return operator.endswith(IF_EXISTS)
    return any(test(one, found) for one in wanted)


def _arn_like(pattern: str, value: str) -> bool:
    """Each of the six parts of an ARN by itself."""
    patterns, values = pattern.split(":", 5), value.split(":", 5)
    return len(patterns) == len(values) == 6 and all(map(like, patterns, values))


_OPERATORS: Mapping[str, Callable[[str, str], bool]] = {
    "StringEquals": lambda wanted, found: wanted == found,
    "StringLike": like,
    "ArnLike": _arn_like,
    "Bool": lambda wanted, found: wanted.lower() == found.lower(),
}
