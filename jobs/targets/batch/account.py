"""Check that an AWS account can run a plan before anything is submitted, and manage its job definitions.

The checks apply to the resources that exist in AWS now, or to those that Terraform would create (as printed by
`terraform show -json PLAN`).
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
    """A job queue, with its compute environments in order and the shares in its scheduling policy (None: no policy)."""

    detail: Detail
    environments: Sequence[Detail]
    shares: Sequence[str] | None


Account = Mapping[str, Queue]
"""Queues by name and by ARN."""


def preflight(client: BatchClient, plan: JobPlan) -> tuple[str, ...]:
    """Check that the account can run the plan, and return warnings.

    Raises a ConfigError that lists every problem, or TransientError while a queue is being changed.
    """
    check_plan(plan)
    account = describe_queues(client, [placement_of(plan, job).queue for job in plan.jobs])
    refuse_account(account_problems(plan, account), "an enabled fair-share queue that can hold every job")
    for name, queue in account.items():
        if queue.detail["status"] in ("CREATING", "UPDATING"):
            seen = f"queue {name} is {queue.detail['status']}"
            raise TransientError(seen, expected="VALID", next_command="run the same command again in a minute")
    return account_warnings(plan, account)


def refuse_account(problems: Iterable[str], expected: str) -> None:
    """Raise a ConfigError that lists all problems. Do nothing if there are none."""
    if lines := list(dict.fromkeys(problems)):
        raise ConfigError(
            "\n  ".join(["AWS Batch in this account cannot run this plan:", *lines]),
            expected=expected,
            next_command="aws batch describe-job-queues; correct [jobs] or the queue, then trnjobs plan",
        )


def describe_queues(client: BatchClient, names: Iterable[str]) -> Account:
    """Return the queues with these names, including their compute environments and scheduling policies."""
    described, queues = client.described("queues", list(dict.fromkeys(names))), dict[str, Queue]()
    orders = [[entry["computeEnvironment"] for entry in q.get("computeEnvironmentOrder", ())] for q in described]
    arns = sorted({arn for order in orders for arn in order})
    environments = {env["computeEnvironmentArn"]: env for env in client.described("compute environments", arns)}
    policies = sorted({arn for queue in described if (arn := queue.get("schedulingPolicyArn"))})
    shares = {
        p["arn"]: [share["shareIdentifier"] for share in p.get("fairsharePolicy", {}).get("shareDistribution", ())]
        for p in client.described("scheduling policies", policies)
    }
    for detail, order in zip(described, orders, strict=True):
        existing = [environments[arn] for arn in order if arn in environments]
        queue = Queue(detail, existing, shares.get(detail.get("schedulingPolicyArn", "")))
        queues |= dict.fromkeys((detail["jobQueueName"], detail["jobQueueArn"]), queue)
    return queues


def account_problems(plan: JobPlan, account: Account) -> Iterator[str]:
    """Yield a line for each reason why this account would refuse the jobs of the plan, or never start them."""
    for job in plan.jobs:
        placement = placement_of(plan, job)
        yield from queue_problems(placement.queue, account, is_shared=bool(placement.share_identifier))
        if placement.queue in account:
            yield from _capacity_problems(job, placement.queue, account[placement.queue].environments)


def queue_problems(name: str, account: Account, *, is_shared: bool) -> Iterator[str]:
    """Yield a line for each problem of a queue. `is_shared`: whether its jobs have a share identifier."""
    if name not in account:
        yield f"queue {name}: does not exist in this account and region"
        return
    queue = account[name].detail
    if queue["state"] != "ENABLED":
        yield f"queue {name}: {queue['state']}, so it does not accept jobs"
    if queue["status"] not in ("VALID", "CREATING", "UPDATING"):
        yield f"queue {name}: {queue['status']} ({queue.get('statusReason', 'no reason given')})"
    if is_shared and account[name].shares is None:
        yield (
            f"queue {name}: has no scheduling policy, so it refuses share identifiers. "
            "A policy cannot be added later: create the queue with one"
        )


def account_warnings(plan: JobPlan, account: Account) -> tuple[str, ...]:
    """Return warnings about placements that are valid, but probably a mistake."""
    placements = (placement_of(plan, job) for job in plan.jobs)
    return share_warnings(((placement.queue, placement.share_identifier) for placement in placements), account)


def share_warnings(uses: Iterable[tuple[str, str]], account: Account) -> tuple[str, ...]:
    """Return a warning for each (queue, share) where the scheduling policy of the queue does not list the share."""
    lines = []
    for queue, share in dict.fromkeys(uses):
        shares = account[queue].shares
        prefixes = tuple(name[:-1] for name in shares or () if name.endswith("*"))
        if shares is not None and share not in shares and not share.startswith(prefixes):
            listed = ", ".join(sorted(shares)) or "none"
            lines.append(
                f"share identifier {share} is not in the policy of queue {queue} ({listed}), so it gets weight 1"
            )
    return tuple(lines)


def _capacity_problems(job: JobSpec, queue: str, environments: Sequence[Detail]) -> Iterator[str]:
    """Check that a task fits into a single compute environment.

    Each node of a multi-node job takes a whole machine, whereas the children of an array are scheduled one by one.
    """
    needs, machine = job.resources, NODES.get(job.resources.instance_type)
    vcpus = max(1, job.num_nodes) * (machine.vcpus if machine and job.num_nodes else needs.vcpus)
    usable = [env for env in environments if env["state"] == "ENABLED" and env["status"] != "INVALID"]
    managed = [env.get("computeResources", {}) for env in usable if env.get("type") != "UNMANAGED"]
    fitting = [resources for resources in managed if not job.num_nodes or resources.get("type") == "EC2"]
    if not usable:
        yield f"queue {queue}: no enabled compute environment"
    elif job.num_nodes and not fitting:
        yield f"{job.name}: {job.num_nodes} nodes need a managed on-demand EC2 compute environment"
    if fitting and (most := max(resources.get("maxvCpus", 0) for resources in fitting)) < vcpus:
        yield f"{job.name}: needs {vcpus:,} vCPU at once, but the compute environments of {queue} have at most {most:,}"
    offered, requested = {kind for r in fitting for kind in r.get("instanceTypes", ())}, needs.instance_type
    if requested and offered and not offered & {requested, requested.split(".")[0], "optimal"}:
        yield f"{job.name}: needs {requested}, but the compute environments only offer {', '.join(sorted(offered))}"


class Fleet(BaseModel):
    """A queue that Terraform would create, with its single compute environment."""

    queue: str
    type: str = Field(description="EC2 or SPOT")
    max_vcpus: int
    instance_types: tuple[str, ...]
    shares: tuple[str, ...]


class PlannedOutputs(BaseModel):
    """The planned outputs of infra/. `settings` does not contain ARNs, because these are only known after apply."""

    fleet: tuple[Fleet, ...] = Field(validation_alias=AliasPath("output_changes", "fleet", "after"))
    settings: dict[str, Any] = Field(
        validation_alias=AliasPath("output_changes", "settings", "after"),
        description="Nested settings, without those that are not known yet",
    )
    files: tuple[Path, ...] = Field(
        validation_alias=AliasPath("output_changes", "settings_files", "after"),
        description="Settings files in the image of the driver, which `settings` overrides",
    )

    @property
    def account(self) -> Account:
        """Return the queues as AWS Batch would describe them after apply."""
        usable, account = {"state": "ENABLED", "status": "VALID"}, dict[str, Queue]()
        for fleet in self.fleet:
            machines = {"type": fleet.type, "maxvCpus": fleet.max_vcpus, "instanceTypes": fleet.instance_types}
            environment = {**usable, "type": "MANAGED", "computeResources": machines}
            account[fleet.queue] = Queue(usable, [environment], fleet.shares)
        return account


def read_planned(path: Path) -> PlannedOutputs:
    """Read the output of `terraform show -json PLAN`. Raises ConfigError if the file contains anything else."""
    try:
        outputs = PlannedOutputs.model_validate_json(path.read_bytes())
        return outputs.model_copy(update={"settings": _known_values(outputs.settings)})
    except OSError as error:
        seen = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        seen = f"{'.'.join(str(key) for key in first['loc'] if key != 'after')}: {first['msg']}"
    raise ConfigError(
        f"{path}: {seen}",
        expected="a Terraform plan of infra/ with the outputs fleet, settings and settings_files",
        next_command=f"terraform -chdir=infra show -json ../build/infra.plan > {path}",
    )


def _known_values(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls, and lists that contain a null. Terraform does not know these values before apply."""
    pruned = {key: _known_values(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in pruned.items() if None not in (value if isinstance(value, list) else [value])}


# Job definitions. A revision is only registered if its content differs from that of all active revisions.

_REQUEST_FIELDS = {"type", "schedulingPriority", "retryStrategy", "timeout", "propagateTags", "tags"}
_REQUEST_FIELDS |= {"containerProperties", "nodeProperties", "platformCapabilities"}
"""Fields that we pass to RegisterJobDefinition. AWS Batch returns additional fields when it describes a definition."""
_NAMES = ("name", "type", "hostPath", "targetNodes")
"""Keys that identify the entries of unordered lists (variables, resources, limits, devices and nodes)."""


def registered_definition(client: BatchClient, request: Request) -> Detail | None:
    """Return the newest active revision with the same content as this request, or None if there is none."""
    content = request["tags"]["content"]
    revisions = client.active_definitions(request["jobDefinitionName"])
    return _newest(revision for revision in revisions if revision.get("tags", {}).get("content") == content)


def ensure_definition(client: BatchClient, request: Request) -> str:
    """Return the `name:revision` of a definition with this content, and register it if it does not exist.

    If two processes do this at the same time, the content may be registered twice, which does no harm.
    """
    definition = registered_definition(client, request)
    definition = definition or client.call("registering a job definition", "register_job_definition", **request)
    return f"{definition['jobDefinitionName']}:{definition['revision']}"


def change_lines(client: BatchClient, plan: JobPlan) -> Iterator[str]:
    """Yield lines that show, field by field, how a submission would change each job definition of the plan."""
    users: dict[str, list[str]] = {}
    requests = {job.name: definition_request(plan, job) for job in plan.jobs}
    for name, request in requests.items():
        users.setdefault(request["tags"]["content"], []).append(name)
    for names in users.values():
        request, jobs = requests[names[0]], ", ".join(names)
        name = request["jobDefinitionName"]
        definition, latest = registered_definition(client, request), _newest(client.active_definitions(name))
        if definition:
            yield f"= {name}:{definition['revision']} ({jobs}) is registered"
        elif not latest:
            yield f"+ {name}:1 ({jobs}) would be registered as the first revision"
        else:
            yield f"~ {name} ({jobs}) would be registered again; changes to revision {latest['revision']}:"
            for field, old, new in differences(_tree(_request_fields(latest)), _tree(_request_fields(request))):
                yield f"    {field}: {old!r} -> {new!r}"


def _newest(revisions: Iterable[Detail]) -> Detail | None:
    return max(revisions, key=lambda revision: int(revision["revision"]), default=None)


def _request_fields(definition: Detail) -> Detail:
    own = {key: value for key, value in definition.items() if key in _REQUEST_FIELDS}
    # The content tag is only a hash of all other fields.
    return own | {"tags": {key: value for key, value in own["tags"].items() if key != "content"}}


def _tree(value: Any) -> Any:
    """Normalize a definition for comparison: drop empty values, and key the entries of named lists by name.

    This is necessary because AWS Batch may add or omit empty lists, empty strings, zero and False, and because it
    converts the action of retry rules to lower case.
    """
    if isinstance(value, list | tuple):
        names = [next((key for key in _NAMES if isinstance(entry, Mapping) and key in entry), "") for entry in value]
        value = {
            entry[name] if name else str(i): entry for i, (name, entry) in enumerate(zip(names, value, strict=True))
        }
    if not isinstance(value, Mapping):
        return value
    tree = {key: _tree(entry.upper() if key == "action" else entry) for key, entry in value.items()}
    return {key: entry for key, entry in tree.items() if entry}
