"""Accounts in moto that can take cycles."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.io.s3_client import new_client


def make_account() -> None:
    """Queues `relevance` and `off` with a policy and `fifo` without, their trn1 instances, a bucket, a log group."""
    make_environments({"trn1": ["trn1.32xlarge"]}, max_vcpus=1280)
    arn = make_policy("fair")
    for name, state in (("relevance", "ENABLED"), ("off", "DISABLED")):
        make_queue(name, "trn1", state=state, schedulingPolicyArn=arn)
    make_queue("fifo", "trn1")
    new_client("s3").create_bucket(Bucket="bucket")
    new_client("logs").create_log_group(logGroupName="/aws/batch/job")


def make_environments(instance_types: Mapping[str, Sequence[str]], *, max_vcpus: int) -> None:
    """Compute environments by name, on demand, with the roles and the network that moto wants of them."""
    batch, iam, ec2 = new_client("batch"), new_client("iam"), new_client("ec2")
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    iam.create_role(RoleName="instance", AssumeRolePolicyDocument=trust)
    profile = iam.create_instance_profile(InstanceProfileName="instance")["InstanceProfile"]["Arn"]
    subnet = ec2.describe_subnets()["Subnets"][0]
    group = ec2.describe_security_groups(Filters=[{"Name": "vpc-id", "Values": [subnet["VpcId"]]}])["SecurityGroups"][0]
    for name, types in instance_types.items():
        batch.create_compute_environment(
            computeEnvironmentName=name,
            type="MANAGED",
            state="ENABLED",
            serviceRole=role,
            computeResources={
                "type": "EC2",
                "minvCpus": 0,
                "maxvCpus": max_vcpus,
                "instanceTypes": list(types),
                "subnets": [subnet["SubnetId"]],
                "securityGroupIds": [group["GroupId"]],
                "instanceRole": profile,
            },
        )


def make_policy(name: str) -> str:
    """The ARN of a fair-share policy that knows the share `production`."""
    shares = [{"shareIdentifier": "production", "weightFactor": 1.0}]
    made = new_client("batch").create_scheduling_policy(name=name, fairsharePolicy={"shareDistribution": shares})
    arn: str = made["arn"]
    return arn


def make_queue(name: str, environment: str, *, state: str = "ENABLED", **more: Any) -> None:
    """A queue on one compute environment."""
    new_client("batch").create_job_queue(
        jobQueueName=name,
        state=state,
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
        **more,
    )
