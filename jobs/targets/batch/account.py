"""What an account has: whether it would run the plan, asked before anything is sent, and its job definitions.

The account is the one at AWS, or the one that Terraform is about to make, read from `terraform show -json PLAN`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import AliasPath, BaseModel, Field, ValidationError

from jobs.plan.spec import JobPlan, JobSpec
from jobs.settings import differences
from jobs.targets.base import placement_of
from jobs.targets.batch.client import BatchClient, Detail
from jobs.targets.batch.requests import Request, check_plan, definition_request
from pipeline.core.errors import ConfigError, TransientError
from pipeline.core.machines import NODES


@dataclass(frozen=True)
class Queue:
    """A queue, its compute environments in order, and the shares of its policy; None: it has no policy."""

    detail: Detail
    environments: Sequence[Detail]
    shares: Sequence[str] | None


Account = Mapping[str, Queue]
"""Queues by name and by ARN."""


def preflight(client: BatchClient, plan: JobPlan) -> tuple[str, ...]:
    """Return warnings. Raises ConfigError with everything that is wrong, TransientError while a queue is changing."""
    check_plan(plan)
    account = describe_queues(client, [placement_of(plan, job).queue for job in plan.jobs])
    refuse_account(account_problems(plan, account), "an enabled fair-share queue that can hold every job")
    for name, queue in account.items():
        if queue.detail["status"] in ("CREATING", "UPDATING"):
            seen = f"queue {name} is {queue.detail['status']}"
            raise TransientError(seen, expected="VALID", next_command="run the same command again in a minute")
    return account_warnings(plan, account)


def refuse_account(problems: Iterable[str], expected: str) -> None:
    """Raises ConfigError with all problems, if any."""
    if lines := list(dict.fromkeys(problems)):
        raise ConfigError(
            "\n  ".join(["AWS Batch in this account would not run this plan:", *lines]),
            expected=expected,
            next_command="aws batch describe-job-queues; correct [jobs] or the queue, then trnjobs plan",
        )


def describe_queues(client: BatchClient, names: Iterable[str]) -> Account:
    """Describe these queues, and what is behind them."""
    described, found = client.described("queues", list(dict.fromkeys(names))), dict[str, Queue]()
    orders = [[one["computeEnvironment"] for one in queue.get("computeEnvironmentOrder", ())] for queue in described]
    arns = sorted({arn for order in orders for arn in order})
    environments = {one["computeEnvironmentArn"]: one for one in client.described("compute environments", arns)}
    policies = sorted({arn for queue in described if (arn := queue.get("schedulingPolicyArn"))})
    shares = {
        one["arn"]: [share["shareIdentifier"] for share in one.get("fairsharePolicy", {}).get("shareDistribution", ())]
        for one in client.described("scheduling policies", policies)
    }
    for queue, order in zip(described, orders, strict=True):
        behind = [environments[arn] for arn in order if arn in environments]
        made = Queue(queue, behind, shares.get(queue.get("schedulingPolicyArn", "")))
        found |= dict.fromkeys((queue["jobQueueName"], queue["jobQueueArn"]), made)
    return found


def account_problems(plan: JobPlan, account: Account) -> Iterator[str]:
    """Yield why this account would refuse the jobs or never start them, one line each."""
    for job in plan.jobs:
        where = placement_of(plan, job)
        yield from queue_problems(where.queue, account, is_shared=bool(where.share_identifier))
        if where.queue in account:
            yield from _room(job, where.queue, account[where.queue].environments)


def queue_problems(name: str, account: Account, *, is_shared: bool) -> Iterator[str]:
    """Yield what is wrong with a queue itself. `is_shared`: jobs name a share of it."""
    if name not in account:
        yield f"queue {name}: does not exist in this account and region"
        return
    queue = account[name].detail
    if queue["state"] != "ENABLED":
        yield f"queue {name}: {queue['state']}, it takes no jobs"
    if queue["status"] not in ("VALID", "CREATING", "UPDATING"):
        yield f"queue {name}: {queue['status']} ({queue.get('statusReason', 'no reason given')})"
    if is_shared and account[name].shares is None:
        yield (
            f"queue {name}: has no scheduling policy, so it refuses share identifiers; "
            "a policy cannot be added later, create the queue with one"
        )


def account_warnings(plan: JobPlan, account: Account) -> tuple[str, ...]:
    """Return what is allowed and probably not meant."""
    uses = (placement_of(plan, job) for job in plan.jobs)
    return share_warnings(((where.queue, where.share_identifier) for where in uses), account)


def share_warnings(uses: Iterable[tuple[str, str]], account: Account) -> tuple[str, ...]:
    """Return a line for each (queue, share) whose policy does not name the share."""
    lines = []
    for queue, share in dict.fromkeys(uses):
        shares = account[queue].shares
        prefixes = tuple(one[:-1] for one in shares or () if one.endswith("*"))
        if shares is not None and share not in shares and not share.startswith(prefixes):
            there = ", ".join(sorted(shares)) or "none"
            lines.append(
                f"share identifier {share} is not in the policy of queue {queue}: it gets weight 1 (there: {there})"
            )
    return tuple(lines)


def _room(job: JobSpec, queue: str, environments: Sequence[Detail]) -> Iterator[str]:
    """Check that a node group fits one compute environment, a whole machine for each node; of an array one child."""
    needs, machine = job.resources, NODES.get(job.resources.instance_type)
    vcpus = max(1, job.num_nodes) * (machine.vcpus if machine and job.num_nodes else needs.vcpus)
    usable = [one for one in environments if one["state"] == "ENABLED" and one["status"] != "INVALID"]
    managed = [one.get("computeResources", {}) for one in usable if one.get("type") != "UNMANAGED"]
    fitting = [one for one in managed if not job.num_nodes or one.get("type") == "EC2"]
    if not usable:
        yield f"queue {queue}: no enabled compute environment"
    elif job.num_nodes and not fitting:
        yield f"{job.name}: {job.num_nodes} nodes; they need a managed on-demand EC2 compute environment"
    if fitting and (most := max(one.get("maxvCpus", 0) for one in fitting)) < vcpus:
        yield f"{job.name}: {vcpus:,} vCPU at once; the compute environments of {queue} go up to {most:,}"
    offered, wanted = {kind for one in fitting for kind in one.get("instanceTypes", ())}, needs.instance_type
    if wanted and offered and not offered & {wanted, wanted.split(".")[0], "optimal"}:
        yield f"{job.name}: instance type {wanted}; the compute environments offer {', '.join(sorted(offered))}"


class Fleet(BaseModel):
    """A queue that Terraform makes, and the one compute environment behind it."""

    queue: str
    type: str = Field(description="EC2 or SPOT")
    max_vcpus: int
    instance_types: tuple[str, ...]
    shares: tuple[str, ...]


class PlannedOutputs(BaseModel):
    """What infra/ will tell. ARNs are unknown before they exist, and are left out of `settings`."""

    fleet: tuple[Fleet, ...] = Field(validation_alias=AliasPath("output_changes", "fleet", "after"))
    settings: dict[str, Any] = Field(
        validation_alias=AliasPath("output_changes", "settings", "after"), description="A part of the tree of settings"
    )
    files: tuple[Path, ...] = Field(
        validation_alias=AliasPath("output_changes", "settings_files", "after"),
        description="What the settings go over: the driver reads them in its image",
    )

    @property
    def account(self) -> Account:
        """Return the account as AWS Batch would describe it once it is there."""
        usable, account = {"state": "ENABLED", "status": "VALID"}, dict[str, Queue]()
        for one in self.fleet:
            machines = {"type": one.type, "maxvCpus": one.max_vcpus, "instanceTypes": one.instance_types}
            account[one.queue] = Queue(
                usable, [{**usable, "type": "MANAGED", "computeResources": machines}], one.shares
            )
        return account


def read_planned(path: Path) -> PlannedOutputs:
    """Read `terraform show -json PLAN`. Raises ConfigError for any other file."""
    try:
        found = PlannedOutputs.model_validate_json(path.read_bytes())
        return found.model_copy(update={"settings": _known(found.settings)})
    except OSError as error:
        seen = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        seen = f"{'.'.join(str(key) for key in first['loc'] if key != 'after')}: {first['msg']}"
    raise ConfigError(
        f"{path}: {seen}",
        expected="a plan of infra/ with its outputs fleet, settings and settings_files",
        next_command=f"terraform -chdir=infra show -json ../build/infra.plan > {path}",
    )


def _known(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls, and lists with one: values that Terraform knows only after apply."""
    known = {key: _known(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in known.items() if None not in (value if isinstance(value, list) else [value])}


# Job definitions: one revision per content, and how those of a plan differ from what is registered.

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


def change_lines(client: BatchClient, plan: JobPlan) -> Iterator[str]:
    """Yield what a submission would do with each definition of the plan, with every place that differs."""
    users: dict[str, list[str]] = {}
    requests = {job.name: definition_request(plan, job) for job in plan.jobs}
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
            for place, theirs, ours in differences(_tree(_ours(latest)), _tree(_ours(request))):
                yield f"    {place}: {theirs!r} -> {ours!r}"


def _newest(revisions: Iterable[Detail]) -> Detail | None:
    return max(revisions, key=lambda one: int(one["revision"]), default=None)


def _ours(definition: Detail) -> Detail:
    own = {key: one for key, one in definition.items() if key in _OURS}
    return own | {"tags": {key: one for key, one in own["tags"].items() if key != "content"}}  # that of all the rest


def _tree(value: Any) -> Any:
    """Return what is set, entries of lists by their names. AWS Batch fills in or omits empty lists and words, zero and
    False, and describes the action of a retry rule in small letters."""
    if isinstance(value, list | tuple):
        names = [next((one for one in _NAMES if isinstance(entry, Mapping) and one in entry), "") for entry in value]
        value = {
            entry[name] if name else str(i): entry for i, (name, entry) in enumerate(zip(names, value, strict=True))
        }
    if not isinstance(value, Mapping):
        return value
    found = {key: _tree(one.upper() if key == "action" else one) for key, one in value.items()}
    return {key: one for key, one in found.items() if one}
