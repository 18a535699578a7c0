"""Job definitions: one revision per content, and how those of a plan differ from what is registered."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jobs.plan.dag import Plan
from jobs.targets.batch.client import BatchClient, Detail
from jobs.targets.batch.requests import Request, definition_request

_OURS = {"type", "schedulingPriority", "retryStrategy", "timeout", "propagateTags", "tags"}
_OURS |= {"containerProperties", "nodeProperties", "platformCapabilities"}
"""What RegisterJobDefinition takes of us; AWS Batch describes more."""
_NAMES = ("name", "type", "hostPath", "targetNodes")
"""What identifies an entry of a list whose order means nothing (variables, resources, limits, devices, nodes)."""


def registered_definition(client: BatchClient, request: Request) -> Detail | None:
    """Return the newest active revision with the content of this request, None if there is none."""
    content = request["tags"]["content"]
    revisions = client.active_definitions(request["jobDefinitionName"])
    return _newest(one for one in revisions if one.get("tags", {}).get("content") == content)


def ensure_definition(client: BatchClient, request: Request) -> str:
    """Return `name:revision` of this content, registered if needed. (Two at once may register it twice: both serve.)"""
    found = registered_definition(client, request)
    found = found or client.call("registering a job definition", "register_job_definition", **request)
    return f"{found['jobDefinitionName']}:{found['revision']}"


def change_lines(client: BatchClient, plan: Plan) -> Iterator[str]:
    """Yield what a submission would do with each definition of the plan, with every place that differs."""
    requests = {job.name: definition_request(plan, job) for job in plan.jobs}
    users: dict[str, list[str]] = {}
    for name, request in requests.items():
        users.setdefault(request["tags"]["content"], []).append(name)
    for names in users.values():
        request, jobs = requests[names[0]], ", ".join(names)
        name = request["jobDefinitionName"]
        found, latest = registered_definition(client, request), _newest(client.active_definitions(name))
        if found:
            yield f"= {name}:{found['revision']} ({jobs}) is registered"
        elif not latest:
            yield f"+ {name}:1 ({jobs}) would be registered, the first of its name"
        else:
            yield f"~ {name} ({jobs}) would be registered anew; against revision {latest['revision']}:"
            for path, (theirs, ours) in differences(request, latest).items():
                yield f"    {path}: {theirs!r} -> {ours!r}"


def differences(planned: Detail, described: Detail) -> dict[str, tuple[Any, Any]]:
    """Return (registered, planned) by place, such as `timeout.attemptDurationSeconds`; None if a side has nothing."""
    ours = dict(_leaves({key: value for key, value in planned.items() if key in _OURS}))
    theirs = dict(_leaves({key: value for key, value in described.items() if key in _OURS}))
    paths = sorted((ours.keys() | theirs.keys()) - {"tags.content"})  # a fingerprint of the rest
    return {path: (theirs.get(path), ours.get(path)) for path in paths if ours.get(path) != theirs.get(path)}


def _newest(revisions: Iterable[Detail]) -> Detail | None:
    return max(revisions, key=lambda one: int(one["revision"]), default=None)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of what is set. AWS Batch fills in or omits empty lists and words, zero and False."""
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
