"""An account in moto that can take a cycle."""

import json
from typing import Any

import boto3


def make_account() -> None:
    """Queues `relevance` and `off` with a policy and `fifo` without, their trn1 instances, a bucket, a log group."""
    batch = boto3.client("batch")
    _environment(batch, 1280)
    shares = [{"shareIdentifier": "production", "weightFactor": 1.0}]
    arn = batch.create_scheduling_policy(name="fair", fairsharePolicy={"shareDistribution": shares})["arn"]
    for name, state in (("relevance", "ENABLED"), ("off", "DISABLED")):
        _queue(batch, name, state, schedulingPolicyArn=arn)
    _queue(batch, "fifo", "ENABLED")
    boto3.client("s3").create_bucket(Bucket="bucket")
    boto3.client("logs").create_log_group(logGroupName="/aws/batch/job")


def _environment(batch: Any, max_vcpus: int) -> None:
    iam, ec2 = boto3.client("iam"), boto3.client("ec2")
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument=trust)["Role"]["Arn"]
    iam.create_role(RoleName="instance", AssumeRolePolicyDocument=trust)
    profile = iam.create_instance_profile(InstanceProfileName="instance")["InstanceProfile"]["Arn"]
    subnet = ec2.describe_subnets()["Subnets"][0]
    group = ec2.describe_security_groups(Filters=[{"Name": "vpc-id", "Values": [subnet["VpcId"]]}])["SecurityGroups"][0]
    batch.create_compute_environment(
        computeEnvironmentName="trn1",
        type="MANAGED",
        state="ENABLED",
        serviceRole=role,
        computeResources={
            "type": "EC2",
            "minvCpus": 0,
            "maxvCpus": max_vcpus,
            "instanceTypes": ["trn1.32xlarge"],
            "subnets": [subnet["SubnetId"]],
            "securityGroupIds": [group["GroupId"]],
            "instanceRole": profile,
        },
    )


def _queue(batch: Any, name: str, state: str, **more: Any) -> None:
    batch.create_job_queue(
        jobQueueName=name,
        state=state,
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": "trn1"}],
        **more,
    )
