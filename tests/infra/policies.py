"""The policies of infra/, rendered as Terraform renders them, and what they allow.

This is no judge of IAM's whole language: conditions are looked at by the tests, not decided.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MODULES = Path(__file__).parents[2] / "infra" / "modules"
FOLDER, SAGEMAKER = MODULES / "roles" / "policies", MODULES / "sagemaker"
STAGES: tuple[str, ...] = tuple(json.loads((MODULES / "roles" / "stages.json").read_text()))
JOB_ROLES = ("driver", "train", "promote", "embed", "report")
TRAINING_ROLES = ("train", "promote", "embed", "report")
"""What training jobs of SageMaker may have."""
ROLES = (*JOB_ROLES, "scheduler")
READERS = ("train", "promote", "embed")
"""Roles with rights on the data inputs."""
Statement = Mapping[str, Any]


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
    signing_key_arn: str = ""
    sagemaker: bool = False
    instances: int = 0
    """Of the queue of service jobs; 0: none."""

    @property
    def place(self) -> str:
        return f"{self.region}:{self.account_id}"

    @property
    def bucket_arn(self) -> str:
        return f"arn:aws:s3:::{self.bucket}"

    def batch_arn(self, resource: str) -> str:
        return f"arn:aws:batch:{self.place}:{resource}"

    def role_arn(self, role: str) -> str:
        return f"arn:aws:iam::{self.account_id}:role/{self.name}-{role}"

    def object_arn(self, key: str) -> str:
        """Of a key of the workspace."""
        return f"{self.bucket_arn}/{self.name}/{key}"

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
            "key_arn": f"arn:aws:kms:{self.place}:key/workspace",
            "log_group_arn": f"arn:aws:logs:{self.place}:log-group:/{self.name}/jobs",
            "queue_arns": json.dumps(queues),
            "schedule_queue_arn": queues[-1],
            "share_identifier": self.share_identifier,
            "definitions": definitions,
            "stage_definitions": json.dumps(of_stages),
        }

    def sagemaker_values(self) -> dict[str, str]:
        """local.values of the module."""
        return {
            "name": self.name,
            "workspace_arn": f"{self.bucket_arn}/{self.name}",
            "repository_arn": f"arn:aws:ecr:{self.place}:repository/{self.name}",
            "log_group_arn": f"arn:aws:logs:{self.place}:log-group:/aws/sagemaker/TrainingJobs",
            "ec2_arn": f"arn:aws:ec2:{self.place}",
            "subnet_id": "subnet-1",
            "security_group_id": "sg-1",
            "training_job_arn": f"arn:aws:sagemaker:{self.place}:training-job",
            "service_job_arn": self.batch_arn("service-job"),
            "queue": f"{self.name}-training",
            "queue_arn": self.batch_arn(f"job-queue/{self.name}-training"),
            "role_arns": json.dumps([self.role_arn(role) for role in TRAINING_ROLES]),
            "share_identifier": self.share_identifier,
            "scheduling_policy_arn": self.batch_arn(f"scheduling-policy/{self.name}"),
            "instances": str(self.instances),
            "wait_limit_s": "3600",
            "again": (SAGEMAKER / "retry.json").read_text(),
        }

    def texts(self, role: str) -> list[str]:
        """All policies of a role, as they are attached to it."""
        names = [FOLDER / role] if role == "scheduler" else [FOLDER / role, FOLDER / "guard"]
        found = [render(Path(f"{name}.json.tftpl"), self.values()) for name in names]
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
        if self.signing_key_arn and (name := {"promote": "sign", "embed": "verify"}.get(role)):
            found.append(render(FOLDER / f"{name}.json.tftpl", {"signing_key_arn": self.signing_key_arn}))
        return found

    def sagemaker_texts(self, role: str) -> list[str]:
        """Managed policies of a role where SageMaker is used."""
        names = ["training"] if role in TRAINING_ROLES else []
        names += {"driver": ["direct"], "report": ["look"]}.get(role, [])
        if self.instances:
            names += {"driver": ["queue"], "report": ["look-queue"]}.get(role, [])
        found = [render(SAGEMAKER / "policies" / f"{name}.json.tftpl", self.sagemaker_values()) for name in names]
        return found if self.sagemaker else []

    def statements(self, role: str, effect: str = "Allow") -> Iterator[Statement]:
        for text in (*self.texts(role), *self.sagemaker_texts(role)):
            yield from (one for one in json.loads(text)["Statement"] if one["Effect"] == effect)

    def actions(self, role: str) -> set[str]:
        return {action for one in self.statements(role) for action in listed(one["Action"])}

    def who(self, action: str, resource: str) -> list[str]:
        """Roles of which a statement allows it, whatever its conditions, and none denies it without conditions."""

        def allows(role: str) -> bool:
            denied = (one for one in self.statements(role, "Deny") if "Condition" not in one)
            is_denied = any(covers(one, action, resource) for one in denied)
            return not is_denied and any(covers(one, action, resource) for one in self.statements(role))

        return [role for role in ROLES if allows(role)]

    def trust(self, role: str) -> list[Statement]:
        name = "trust-training" if self.sagemaker and role in TRAINING_ROLES else "trust-tasks"
        name = "trust-scheduler" if role == "scheduler" else name
        found: list[Statement] = json.loads(render(FOLDER / f"{name}.json.tftpl", self.values()))["Statement"]
        return found


def listed(value: Any) -> list[str]:
    """One text or a list of them, as policies may write either."""
    return [value] if isinstance(value, str) else list(value)


def covers(statement: Statement, action: str, resource: str) -> bool:
    return any(fnmatchcase(action, one) for one in listed(statement["Action"])) and any(
        fnmatchcase(resource, one) for one in listed(statement["Resource"])
    )


def characters(text: str) -> int:
    """Length of a policy as IAM's quotas count it: without white space."""
    return len(json.dumps(json.loads(text), separators=(",", ":")))


def render(file: Path, values: Mapping[str, str]) -> str:
    """As templatefile(). Raises KeyError for a name without a value, ValueError for more than plain ${name}."""
    text = file.read_text()
    if "%{" in text:
        raise ValueError(f"{file.name} holds more than names")
    found = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)
    if "${" in found:
        raise ValueError(f"{file.name} holds more than names")
    return found
