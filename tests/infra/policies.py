"""The policies of infra/modules/roles, rendered as Terraform renders them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.infra.iam import Policy

MODULES = Path(__file__).parents[2] / "infra" / "modules"
FOLDER, SAGEMAKER = MODULES / "roles" / "policies", MODULES / "sagemaker"
STAGES: tuple[str, ...] = tuple(json.loads((MODULES / "roles" / "stages.json").read_text()))
JOB_ROLES = ("driver", "train", "promote", "embed", "report")
TRAINING_ROLES = ("train", "promote", "embed", "report")
"""What training jobs of SageMaker may have."""
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
    sagemaker: bool = False
    instances: int = 0
    """Of the queue of service jobs; 0: none."""

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

    def sagemaker_values(self) -> dict[str, str]:
        """local.values of the module."""
        place = f"{self.region}:{self.account_id}"
        return {
            "name": self.name,
            "workspace_arn": f"{self.bucket_arn}/{self.name}",
            "repository_arn": f"arn:aws:ecr:{place}:repository/{self.name}",
            "log_group_arn": f"arn:aws:logs:{place}:log-group:/aws/sagemaker/TrainingJobs",
            "ec2_arn": f"arn:aws:ec2:{place}",
            "subnet_id": "subnet-1",
            "security_group_id": "sg-1",
            "training_job_arn": f"arn:aws:sagemaker:{place}:training-job",
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

    def sagemaker_texts(self, role: str) -> list[str]:
        """Policies that are attached to a role where SageMaker is used."""
        names = ["training"] if role in TRAINING_ROLES else []
        names += {"driver": ["direct"], "report": ["look"]}.get(role, [])
        if self.instances:
            names += {"driver": ["queue"], "report": ["look-queue"]}.get(role, [])
        found = [render(SAGEMAKER / "policies" / f"{name}.json.tftpl", self.sagemaker_values()) for name in names]
        return found if self.sagemaker else []

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
        return [Policy.parse(text) for text in (*self.texts(role), *self.sagemaker_texts(role))]

    def trust(self, role: str) -> Policy:
        name = "trust-training" if self.sagemaker and role in TRAINING_ROLES else "trust-tasks"
        name = "trust-scheduler" if role == "scheduler" else name
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
