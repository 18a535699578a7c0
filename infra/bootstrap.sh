#!/bin/sh
# What an AWS account needs before the first `make deploy`. Prints; changes nothing. AWS_REGION and NAME may be set.
set -eu
region=${AWS_REGION:-${AWS_DEFAULT_REGION:-us-west-2}}
name=${NAME:-relevance}
images=al2023-ami-ecs-neuron-hvm-2023.0
cat <<END
Before the first deployment of "$name" in $region. Commands are yours to run; nothing is done by this page.

1. Tools: terraform 1.11 or newer, aws (version 2) with credentials that may make VPCs, Batch, IAM roles, S3, ECR, KMS,
   EventBridge, SNS and budgets; docker with buildx for the images.

     aws sts get-caller-identity

2. Quota, in vCPU, of "Running On-Demand Trn instances" (a trn1.32xlarge is 128; 4 of them 512). It is variable
   quota_vcpus; a new account often has 0, and an increase takes days.

     aws service-quotas list-service-quotas --service-code ec2 --region $region \\
       --query "Quotas[?contains(QuotaName, 'Trn instances')].[QuotaName, Value, QuotaCode]" --output table

   CPU machines have theirs ("All Standard ... Spot Instance Requests", or on-demand with cpu.spot = false): preparing data takes
   16 vCPU, embedding 128 with configs/jobs/trn1.toml. A new account may have 5.

     aws service-quotas list-service-quotas --service-code ec2 --region $region \\
       --query "Quotas[?contains(QuotaName, 'Standard')].[QuotaName, Value, QuotaCode]" --output table

3. A zone that offers both kinds of machines: variable availability_zone.

     aws ec2 describe-instance-type-offerings --location-type availability-zone --region $region \\
       --filters Name=instance-type,Values=trn1.32xlarge,m7i.4xlarge --query "InstanceTypeOfferings[].Location"

4. The service-linked roles, once an account (an error that they exist is fine).

     aws iam create-service-linked-role --aws-service-name batch.amazonaws.com
     aws iam create-service-linked-role --aws-service-name ecs.amazonaws.com
     aws iam create-service-linked-role --aws-service-name spot.amazonaws.com

5. A bucket for Terraform's state; then infra/backend.hcl, from infra/backend.hcl.example.

     aws s3api create-bucket --bucket $name-terraform-state-ACCOUNT --region $region \\
       --create-bucket-configuration LocationConstraint=$region      # without this flag in us-east-1
     aws s3api put-bucket-versioning --bucket $name-terraform-state-ACCOUNT --versioning-configuration Status=Enabled
     aws s3api put-public-access-block --bucket $name-terraform-state-ACCOUNT --public-access-block-configuration \\
       BlockPublicAcls=true,IgnorePublicAcls=true,BlockPublicPolicy=true,RestrictPublicBuckets=true

6. The machine image of Trainium hosts: variable ami_id, which may not be empty. Not the newest: its Neuron driver (2.29 or
   later, since SDK 2.31, end of June 2026) asks for a newer runtime than the container has, and nrt_init fails. These are
   from between SDK 2.29 and SDK 2.31; take the first. AWS's release pages do not name the driver of an image: the health
   stage reports it.

     aws ec2 describe-images --owners amazon --include-deprecated --region $region --output table \\
       --filters "Name=name,Values=$images.202604*,$images.202605*,$images.202606*" \\
       --query "reverse(sort_by(Images[?Name<'$images.20260628'], &Name))[:5].[Name, ImageId]"

   AWS deprecates its images after two years and may withdraw them. So copy it into the account (a snapshot of about
   30 GiB) and give ami_id the id that this prints:

     aws ec2 copy-image --region $region --source-region $region --source-image-id IMAGE-ID --name $name-trainium

7. infra/terraform.tfvars, from infra/example.tfvars. Then: make repository; make image and make push, for cpu and for
   neuron; both digests into that file; make deploy. docs/deploy.md goes through it, and docs/first-run.md has the first checks.
END
