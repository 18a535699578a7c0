"""How the job definitions of a plan differ from what is registered: `trnjobs plan --diff`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.plan.dag import Plan
from jobs.targets.batch.client import BatchClient, Detail, registered
from jobs.targets.batch.requests import definition_name, definition_request

_OURS = frozenset(
    {
        "type",
        "schedulingPriority",
        "retryStrategy",
        "timeout",
        "propagateTags",
        "containerProperties",
        "nodeProperties",
        "platformCapabilities",
        "tags",
    }
)
"""What RegisterJobDefinition takes of us; AWS Batch describes more."""
_NAMES = ("name", "type", "hostPath", "targetNodes")
"""What identifies an entry of a list whose order means nothing (variables, resources, limits, devices, nodes)."""


@dataclass(frozen=True)
class Difference:
    """One place, such as `timeout.attemptDurationSeconds`; None where a side has nothing."""

    path: str
    registered: Any
    planned: Any


@dataclass(frozen=True)
class DefinitionChange:
    """What a submission would do with one definition. `revision`: that it would use, or 0: it would register one."""

    name: str
    jobs: tuple[str, ...]
    revision: int
    latest: int
    differences: tuple[Difference, ...]


def definition_changes(client: BatchClient, plan: Plan) -> tuple[DefinitionChange, ...]:
    """Every definition of the plan against the newest registered revision of its name; registers nothing."""
    users: dict[str, list[str]] = {}
    requests = {}
    for job in plan.jobs:
        request = definition_request(plan, job)
        content = request["tags"]["content"]
        requests[content] = (definition_name(plan, job), request)
        users.setdefault(content, []).append(job.name)
    changes = []
    for content, (name, request) in requests.items():
        found = registered(client, request)
        latest = max(client.active_definitions(name), key=lambda one: int(one["revision"]), default=None)
        changes.append(
            DefinitionChange(
                name,
                tuple(users[content]),
                int(found["revision"]) if found else 0,
                int(latest["revision"]) if latest else 0,
                () if found or not latest else differences(request, latest),
            )
        )
    return tuple(changes)


def change_lines(changes: Sequence[DefinitionChange]) -> Iterator[str]:
    """Registered already, new, or changed; then with every place that differs."""
    for change in changes:
        jobs = ", ".join(change.jobs)
        if change.revision:
            yield f"= {change.name}:{change.revision} ({jobs}) is registered"
        elif not change.latest:
            yield f"+ {change.name}:1 ({jobs}) would be registered, the first of its name"
        else:
            yield f"~ {change.name} ({jobs}) would be registered anew; against revision {change.latest}:"
            yield from (f"    {one.path}: {one.registered!r} -> {one.planned!r}" for one in change.differences)


def differences(planned: Detail, described: Detail) -> tuple[Difference, ...]:
    """Where a request differs from a description of a registered one. The content tag is a fingerprint of the rest."""
    ours = dict(_leaves({key: value for key, value in planned.items() if key in _OURS}))
    theirs = dict(_leaves({key: value for key, value in described.items() if key in _OURS}))
    return tuple(
        Difference(path, theirs.get(path), ours.get(path))
        for path in sorted(ours.keys() | theirs.keys())
        if ours.get(path) != theirs.get(path) and path != "tags.content"
    )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of what is set. Empty lists, empty words, zero and False are what AWS Batch fills in or omits."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            name = next((one for one in _NAMES if isinstance(entry, Mapping) and one in entry), "")
            rest = {key: one for key, one in entry.items() if key != name} if name else entry
            yield from _leaves(rest, f"{path}[{entry[name] if name else index}]")
    elif value:
        # The action of a retry rule is described in small letters.
        yield path, value.upper() if path.endswith(".action") else value
