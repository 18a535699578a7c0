# SageMaker beside AWS Batch: called directly, and through a queue of service jobs; no server, no credentials. Whether
# it is there: fleet.tftest.hcl. What the policies allow and which events raise an alarm is judged in tests/infra.

mock_provider "aws" {
  override_during = plan

  mock_resource "aws_iam_policy" {
    defaults = { arn = "arn:aws:iam::123456789012:policy/relevance-mock" }
  }
}

variables {
  name                  = "relevance"
  region                = "us-west-2"
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

run "the_module" {
  command = plan

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
    condition     = jsondecode(aws_cloudformation_stack.queue[0].template_body).Resources.Queue.Properties.JobQueueName == output.settings.queue
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
  command = plan

  variables {
    instances      = 0
    training_roles = ["relevance-train"]
  }
  module {
    source = "./modules/sagemaker"
  }

  assert {
    condition     = length(aws_cloudformation_stack.queue) == 0 && keys(aws_iam_policy.this) == ["direct", "look", "training"] && keys(aws_cloudwatch_event_rule.this) == ["failed", "timed-out"] && keys(output.settings) == ["security_groups", "subnets"]
    error_message = "something of a queue, without one"
  }
}
