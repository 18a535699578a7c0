"""What Terraform is about to make, as the account that it will be: read from `terraform show -json PLAN`.

Three outputs of infra/ tell it: `settings` (what `trnjobs` is to know; ARNs are unknown before they exist, and are left
out), `settings_files` (what it goes over) and `fleet` (queues with the machines behind them).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jobs.targets.batch.preflight import Account
from pipeline.core.errors import ConfigError

T = TypeVar("T")


class _Read(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Fleet(_Read):
    """A queue, and the one compute environment behind it."""

    queue: str
    type: str = Field(description="EC2 or SPOT")
    max_vcpus: int
    instance_types: tuple[str, ...]
    shares: tuple[str, ...]


class _Output(_Read, Generic[T]):
    after: T


class _Outputs(_Read):
    fleet: _Output[tuple[Fleet, ...]]
    settings: _Output[dict[str, Any]]
    settings_files: _Output[tuple[Path, ...]]


class _Plan(_Read):
    output_changes: _Outputs


@dataclass(frozen=True)
class Planned:
    """What will be. `settings`: a part of the tree of settings, over `files`, which the driver reads in its image."""

    settings: Mapping[str, Any]
    files: tuple[Path, ...]
    account: Account


def read_planned(path: Path) -> Planned:
    """Raises ConfigError for a file that is no such plan."""
    try:
        outputs = _Plan.model_validate_json(path.read_bytes()).output_changes
    except OSError as error:
        raise _refused(path, str(error.strerror)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _refused(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return Planned(_known(outputs.settings.after), outputs.settings_files.after, account_of(outputs.fleet.after))


def account_of(fleets: Sequence[Fleet]) -> Account:
    """As AWS Batch would describe it once it is there."""
    return Account(
        queues={
            one.queue: {
                "jobQueueName": one.queue,
                "state": "ENABLED",
                "status": "VALID",
                "schedulingPolicyArn": one.queue,
                "computeEnvironmentOrder": [{"computeEnvironment": one.queue}],
            }
            for one in fleets
        },
        environments={
            one.queue: {
                "type": "MANAGED",
                "state": "ENABLED",
                "status": "VALID",
                "computeResources": {
                    "type": one.type,
                    "maxvCpus": one.max_vcpus,
                    "instanceTypes": list(one.instance_types),
                },
            }
            for one in fleets
        },
        policies={
            one.queue: {"fairsharePolicy": {"shareDistribution": [{"shareIdentifier": share} for share in one.shares]}}
            for one in fleets
        },
    )


def _known(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Drop nulls: values that Terraform knows only after apply."""
    known = {key: _known(value) if isinstance(value, Mapping) else value for key, value in tree.items()}
    return {key: value for key, value in known.items() if value is not None}


def _refused(path: Path, seen: str) -> ConfigError:
    return ConfigError(
        f"{path}: {seen}",
        expected="a plan of infra/ with its outputs fleet, settings and settings_files",
        next_command=f"terraform -chdir=infra show -json ../build/infra.plan > {path}",
    )
