# SageMaker beside AWS Batch: off, called directly, and through a queue of service jobs; no server, no credentials.
# What the policies allow and which events raise an alarm is judged in tests/infra.

mock_provider "aws" {
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/relevance-mock" }
  }
  mock_resource "aws_sns_topic" {
    defaults = { arn = "arn:aws:sns:us-west-2:123456789012:relevance-alarms" }
  }
}

variables {
  name              = "relevance"
  region            = "us-west-2"
  availability_zone = "us-west-2d"
  image             = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  cpu_image         = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:1111111111111111111111111111111111111111111111111111111111111111"
  ami_id            = "ami-0123456789abcdef0"
  quota_vcpus       = 512
  budget_usd        = 20000
  notify_emails     = ["search-platform@example.com"]
}

run "off_by_default" {
  command = plan

  assert {
    condition     = length(module.sagemaker) == 0 && !contains(keys(output.settings.jobs), "sagemaker")
    error_message = "nobody has asked for SageMaker"
  }
  assert {
    condition     = !contains(keys(module.network.endpoints), "sagemaker.api")
    error_message = "an endpoint that nobody needs is paid for"
  }
}

run "on_it_has_an_endpoint_and_the_settings_of_its_network" {
  command = plan

  variables {
    sagemaker = true
  }

  assert {
    condition     = contains(keys(module.network.endpoints), "sagemaker.api") && contains(keys(module.network.endpoints), "batch")
    error_message = "the watch asks SageMaker from a subnet without a way to the internet"
  }
  assert {
    condition     = module.sagemaker[0].log_group == "/aws/sagemaker/TrainingJobs" && length(output.settings.jobs.sagemaker.subnets) == 1 && !contains(keys(output.settings.jobs.sagemaker), "queue")
    error_message = "training jobs in another network, or through a queue that nobody asked for"
  }
}

run "a_queue_needs_sagemaker" {
  command = plan

  variables {
    sagemaker_instances = 4
  }

  expect_failures = [var.sagemaker_instances]
}

run "half_an_instance_is_none" {
  command = plan

  variables {
    sagemaker           = true
    sagemaker_instances = 1.5
  }

  expect_failures = [var.sagemaker_instances]
}

run "the_module" {
  variables {
    account_id            = "123456789012"
    driver_role           = "relevance-driver"
    report_role           = "relevance-report"
    training_roles        = ["relevance-train", "relevance-promote", "relevance-embed", "relevance-report"]
    workspace_arn         = "arn:aws:s3:::bucket/relevance"
    repository_arn        = "arn:aws:ecr:us-west-2:123456789012:repository/relevance"
    subnet_id             = "subnet-1"
    security_group_id     = "sg-1"
    log_retention_days    = 30
    topic_arn             = "arn:aws:sns:us-west-2:123456789012:relevance-alarms"
    instances             = 16
    scheduling_policy_arn = "arn:aws:batch:us-west-2:123456789012:scheduling-policy/relevance"
    share_identifier      = "production"
    wait_limit_s          = 3600
  }
  module {
    source = "./modules/sagemaker"
  }

  assert {
    condition     = toset(keys(aws_iam_role_policy_attachment.this)) == toset(["training-relevance-train", "training-relevance-promote", "training-relevance-embed", "training-relevance-report", "direct-relevance-driver", "queue-relevance-driver", "look-relevance-report", "look-queue-relevance-report"])
    error_message = "a policy at another role: ${join(", ", keys(aws_iam_role_policy_attachment.this))}"
  }
  assert {
    condition     = strcontains(aws_iam_policy.this["training"].policy, "ecr:BatchGetImage") && strcontains(aws_iam_policy.this["direct"].policy, "sagemaker:CreateTrainingJob") && strcontains(aws_iam_policy.this["queue"].policy, "batch:SubmitServiceJob") && strcontains(aws_iam_policy.this["look"].policy, "training-job/relevance-*") && strcontains(aws_iam_policy.this["look-queue"].policy, "batch:ListServiceJobs")
    error_message = "a policy with the text of another"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.queue[0].template_body).Resources.Queue.Properties.JobQueueName == output.settings.queue && output.settings.via == "queue"
    error_message = "settings name another queue than the stack makes"
  }
  assert {
    condition     = jsondecode(aws_cloudformation_stack.queue[0].template_body).Resources.Environment.Properties.CapacityLimits[0].MaxCapacity == 16
    error_message = "the service environment has another size"
  }
  assert {
    condition     = toset(keys(aws_cloudwatch_event_rule.this)) == toset(["failed", "timed-out", "service-failed", "service-blocked"]) && alltrue([for one in aws_cloudwatch_event_target.this : one.arn == var.topic_arn && can(jsondecode(one.input_transformer[0].input_template))])
    error_message = "an event goes elsewhere, or the text of a message is no JSON string"
  }
  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.this["service-failed"].event_pattern).detail.jobQueue == ["arn:aws:batch:us-west-2:123456789012:job-queue/relevance-training"]
    error_message = "failures in another queue"
  }
  assert {
    condition     = aws_cloudwatch_log_group.training.retention_in_days == 30 && aws_cloudwatch_log_group.training.skip_destroy
    error_message = "logs of the whole account are kept for ever, or deleted with this stack"
  }
}

run "without_a_queue_there_is_none" {
  variables {
    account_id            = "123456789012"
    driver_role           = "relevance-driver"
    report_role           = "relevance-report"
    training_roles        = ["relevance-train"]
    workspace_arn         = "arn:aws:s3:::bucket/relevance"
    repository_arn        = "arn:aws:ecr:us-west-2:123456789012:repository/relevance"
    subnet_id             = "subnet-1"
    security_group_id     = "sg-1"
    log_retention_days    = 30
    topic_arn             = "arn:aws:sns:us-west-2:123456789012:relevance-alarms"
    instances             = 0
    scheduling_policy_arn = "arn:aws:batch:us-west-2:123456789012:scheduling-policy/relevance"
    share_identifier      = "production"
    wait_limit_s          = 3600
  }
  module {
    source = "./modules/sagemaker"
  }

  assert {
    condition     = length(aws_cloudformation_stack.queue) == 0 && keys(aws_iam_policy.this) == ["direct", "look", "training"] && keys(aws_cloudwatch_event_rule.this) == ["failed", "timed-out"] && keys(output.settings) == ["security_groups", "subnets"]
    error_message = "something of a queue, without one"
  }
}

run "roles_of_stages_are_those_of_training_jobs_too" {
  variables {
    account_id         = "123456789012"
    bucket_arn         = "arn:aws:s3:::bucket"
    workspace_arn      = "arn:aws:s3:::bucket/relevance"
    workspace_prefix   = "relevance"
    key_arn            = "arn:aws:kms:us-west-2:123456789012:key/00000000-0000-0000-0000-000000000000"
    log_group_arn      = "arn:aws:logs:us-west-2:123456789012:log-group:/trnpipe/relevance"
    queue_arns         = ["arn:aws:batch:us-west-2:123456789012:job-queue/relevance-cpu"]
    schedule_queue_arn = "arn:aws:batch:us-west-2:123456789012:job-queue/relevance-cpu"
    definition_prefix  = "relevance"
    share_identifier   = "production"
    sagemaker          = true
  }
  module {
    source = "./modules/roles"
  }

  assert {
    condition     = alltrue([for kind, role in aws_iam_role.job : contains(jsondecode(role.assume_role_policy).Statement[*].Principal.Service, "sagemaker.amazonaws.com") == (kind != "driver")])
    error_message = "the driver is no training job, everything else may be one"
  }
}
