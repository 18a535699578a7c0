# Storage and network, module by module.

mock_provider "aws" {}

variables {
  name               = "relevance"
  account_id         = "123456789012"
  region             = "us-west-2"
  log_retention_days = 90
}

run "the_bucket_is_private_versioned_and_encrypted" {
  command = plan

  module {
    source = "./modules/storage"
  }

  assert {
    condition     = aws_s3_bucket.workspace.bucket == "relevance-123456789012-us-west-2" && !aws_s3_bucket.workspace.force_destroy
    error_message = "a bucket that destroy leaves alone while it holds something"
  }

  assert {
    condition = alltrue([
      aws_s3_bucket_public_access_block.workspace.block_public_acls,
      aws_s3_bucket_public_access_block.workspace.block_public_policy,
      aws_s3_bucket_public_access_block.workspace.ignore_public_acls,
      aws_s3_bucket_public_access_block.workspace.restrict_public_buckets,
    ])
    error_message = "nothing is public"
  }

  assert {
    condition = { for one in jsondecode(aws_s3_bucket_policy.workspace[0].policy).Statement : one.Sid => one.Condition if one.Effect == "Deny" && one.Principal == "*" } == {
      OnlyTls = { Bool = { "aws:SecureTransport" = "false" } }
      OnlyThisAccount = {
        StringNotEquals = { "aws:PrincipalAccount" = "123456789012" }
        BoolIfExists    = { "aws:PrincipalIsAWSService" = "false" }
      }
    }
    error_message = "everything without TLS and everybody of another account is denied: ${aws_s3_bucket_policy.workspace[0].policy}"
  }

  assert {
    condition     = aws_s3_bucket_versioning.workspace.versioning_configuration[0].status == "Enabled" && one(aws_s3_bucket_server_side_encryption_configuration.workspace.rule).bucket_key_enabled
    error_message = "versioned, and encrypted with a bucket key"
  }

  assert {
    condition     = one(aws_s3_bucket_lifecycle_configuration.workspace.rule[0].abort_incomplete_multipart_upload).days_after_initiation == 7
    error_message = "interrupted uploads go after a week"
  }

  assert {
    condition     = aws_kms_key.this.enable_key_rotation && aws_ecr_repository.images.image_tag_mutability == "IMMUTABLE" && one(aws_ecr_repository.images.image_scanning_configuration).scan_on_push
    error_message = "the key is rotated; tags do not move; images are scanned"
  }

  assert {
    condition     = aws_cloudwatch_log_group.jobs.retention_in_days == 90
    error_message = "logs are not kept for ever"
  }

  assert {
    condition     = output.workspace == "s3://relevance-123456789012-us-west-2/relevance"
    error_message = "workspace ${output.workspace}"
  }
}

run "one_private_subnet_with_a_way_to_aws_alone" {
  command = plan

  module {
    source = "./modules/network"
  }

  variables {
    availability_zone = "us-west-2d"
    cidr              = "10.20.0.0/16"
    key_arn           = "arn:aws:kms:us-west-2:123456789012:key/1"
  }

  assert {
    condition     = aws_subnet.nodes.cidr_block == "10.20.0.0/17" && !aws_subnet.nodes.map_public_ip_on_launch && aws_subnet.nodes.availability_zone == "us-west-2d"
    error_message = "private, in one zone, half of the range"
  }

  assert {
    condition     = length(aws_vpc_endpoint.service) == 8 && aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && alltrue([for one in aws_vpc_endpoint.service : one.private_dns_enabled])
    error_message = "eight services and S3, by their usual names"
  }

  assert {
    condition     = !contains(keys(aws_vpc_endpoint.service), "ssm")
    error_message = "neither the agent nor a job asks for parameters: the endpoint would be paid for and never used"
  }

  assert {
    condition = alltrue([for direction in [aws_default_security_group.nodes.ingress, aws_default_security_group.nodes.egress] :
      length([for rule in direction : rule if rule.self == true && rule.protocol == "-1"]) == 1
    ])
    error_message = "EFA: everything among the nodes, in both directions"
  }

  assert {
    condition     = length(aws_default_security_group.nodes.ingress) == 1
    error_message = "nobody else gets in"
  }
}
