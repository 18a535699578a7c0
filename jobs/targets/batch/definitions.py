"""Job definitions: one revision per content."""

from jobs.targets.batch.client import BatchClient, Detail
from jobs.targets.batch.requests import Request


def registered(client: BatchClient, request: Request) -> Detail | None:
    """The newest active revision with the content of this request; None when there is none."""
    content = request["tags"]["content"]
    revisions = client.active_definitions(request["jobDefinitionName"])
    same = [one for one in revisions if one.get("tags", {}).get("content") == content]
    return max(same, key=lambda one: int(one["revision"]), default=None)


def ensure_definition(client: BatchClient, request: Request) -> str:
    """`name:revision` of this content, registered if need be. (Two at once may register it twice: both serve.)"""
    found = registered(client, request)
    return f"{found['jobDefinitionName']}:{found['revision']}" if found else client.register(request)
