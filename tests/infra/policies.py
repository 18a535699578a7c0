"""The policies of infra/modules/roles, rendered as Terraform renders them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.infra.iam import Policy

MODULES = Path(__file__).parents[2] / "infra" / "modules"
FOLDER = MODULES / "roles" / "policies"
STAGES: tuple[str, ...] = tuple(json.loads((MODULES / "roles" / "stages.json").read_text()))
JOB_ROLES = ("driver", "train", "promote", "embed", "report")
READERS = ("train", "promote", "embed")
"""Roles with rights on the data inputs."""


@dataclass(frozen=True)
class Input:
    """One entry of var.data."""

    bucket: str
    prefix: str
    kms_key_arn: str = ""


@dataclass(frozen=True)
class Fleet:
    """What the roles are for; the variables of infra/modules/roles."""

    name: str = "relevance"
    account_id: str = "123456789012"
    region: str = "us-east-1"
    bucket: str = "bucket"
    queues: tuple[str, ...] = ("relevance-trainium", "relevance-cpu")
    share_identifier: str = "production"
    data: tuple[Input, ...] = ()

    def batch_arn(self, resource: str) -> str:
        return f"arn:aws:batch:{self.region}:{self.account_id}:{resource}"

    def role_arn(self, role: str) -> str:
        return f"arn:aws:iam::{self.account_id}:role/{self.name}-{role}"

    def object_arn(self, key: str) -> str:
        """Of a key of the workspace."""
        return f"{self.bucket_arn}/{self.name}/{key}"

    @property
    def bucket_arn(self) -> str:
        return f"arn:aws:s3:::{self.bucket}"

    @property
    def key_arn(self) -> str:
        return f"arn:aws:kms:{self.region}:{self.account_id}:key/workspace"

    @property
    def log_group_arn(self) -> str:
        return f"arn:aws:logs:{self.region}:{self.account_id}:log-group:/{self.name}/jobs"

    @property
    def dead_letter_arn(self) -> str:
        return f"arn:aws:sqs:{self.region}:{self.account_id}:{self.name}-dead-letter"

    def values(self) -> dict[str, str]:
        """local.values of the module."""
        definitions = self.batch_arn(f"job-definition/{self.name}")
        of_stages = [f"{definitions}-{stage}{end}" for stage in STAGES for end in ("", ":*")]
        queues = [self.batch_arn(f"job-queue/{queue}") for queue in self.queues]
        return {
            "name": self.name,
            "account_id": self.account_id,
            "region": self.region,
            "bucket_arn": self.bucket_arn,
            "workspace_arn": f"{self.bucket_arn}/{self.name}",
            "workspace_prefix": self.name,
            "key_arn": self.key_arn,
            "log_group_arn": self.log_group_arn,
            "queue_arns": json.dumps(queues),
            "schedule_queue_arn": queues[-1],
            "share_identifier": self.share_identifier,
            "definitions": definitions,
            "stage_definitions": json.dumps(of_stages),
        }

    def texts(self, role: str) -> list[str]:
        """All policies of a role, as they are attached to it."""
        names = [role] if role == "scheduler" else [role, "guard"]
        found = [render(FOLDER / f"{name}.json.tftpl", self.values()) for name in names]
        for one in self.data if role in READERS else ():
            keys = [one.prefix, f"{one.prefix}/*"] if one.prefix else ["*"]
            bucket = f"arn:aws:s3:::{one.bucket}"
            values = {
                "bucket_arn": bucket,
                "objects": json.dumps([f"{bucket}/{key}" for key in keys]),
                "prefixes": json.dumps(keys),
            }
            found.append(render(FOLDER / "data.json.tftpl", values))
            if one.kms_key_arn:
                values = {"key_arn": one.kms_key_arn, "region": self.region}
                found.append(render(FOLDER / "data-key.json.tftpl", values))
        return found

    def policies(self, role: str) -> list[Policy]:
        return [Policy.parse(text) for text in self.texts(role)]

    def trust(self, role: str) -> Policy:
        name = "trust-scheduler" if role == "scheduler" else "trust-tasks"
        return Policy.parse(render(FOLDER / f"{name}.json.tftpl", self.values()))


def render(file: Path, values: Mapping[str, str]) -> str:
    """As templatefile(). Raises KeyError for a name without a value, ValueError for more than plain ${name}."""
    text = file.read_text()
    if "%{" in text:
        raise ValueError(f"{file.name} holds more than names")
    found = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)
    if "${" in found:
        raise ValueError(f"{file.name} holds more than names")
    return found
