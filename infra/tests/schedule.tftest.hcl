# The two schedules, their jobs and the dead-letter queue; no server, no credentials.

mock_provider "aws" {
  override_during = plan

  mock_resource "aws_sqs_queue" {
    defaults = { arn = "arn:aws:sqs:us-west-2:123456789012:relevance-dead-letter" }
  }
  mock_resource "aws_batch_job_definition" {
    defaults = { arn = "arn:aws:batch:us-west-2:123456789012:job-definition/relevance-mock:7" }
  }
}

variables {
  name               = "relevance"
  image              = "123456789012.dkr.ecr.us-west-2.amazonaws.com/relevance@sha256:0000000000000000000000000000000000000000000000000000000000000000"
  settings_files     = ["configs/base.toml", "configs/jobs/trn1.toml"]
  environment        = { TRNPIPE_WORKSPACE = "s3://bucket/relevance", TRNPIPE_JOBS__NAME = "relevance" }
  queue_arn          = "arn:aws:batch:us-west-2:123456789012:job-queue/relevance-cpu"
  share_identifier   = "production"
  driver_role_arn    = "arn:aws:iam::123456789012:role/relevance-driver"
  scheduler_role_arn = "arn:aws:iam::123456789012:role/relevance-scheduler"
  expression         = "cron(0 2 * * ? *)"
  timezone           = "Europe/Berlin"
  enabled            = true
  watch_expression   = "rate(1 hour)"
  attempts           = 2
  log_group          = "/trnpipe/relevance"
  key_arn            = "arn:aws:kms:us-west-2:123456789012:key/00000000-0000-0000-0000-000000000000"
}

run "schedules" {
  command = plan

  module {
    source = "./modules/schedule"
  }

  assert {
    condition     = strcontains(aws_scheduler_schedule.this["driver"].target[0].input, "\"<aws.scheduler.scheduled-time>\"")
    error_message = "the scheduler finds no keyword to put the scheduled time for"
  }
  assert {
    condition     = !strcontains(aws_scheduler_schedule.this["driver"].target[0].input, "\\u003c")
    error_message = "the keyword is escaped, so the scheduler would not find it"
  }
  assert {
    condition = jsondecode(aws_scheduler_schedule.this["driver"].target[0].input) == {
      JobName            = "relevance-driver"
      JobQueue           = var.queue_arn
      JobDefinition      = aws_batch_job_definition.this["driver"].arn
      ShareIdentifier    = "production"
      ContainerOverrides = { Environment = [{ Name = "TRNJOBS_SCHEDULED_TIME", Value = "<aws.scheduler.scheduled-time>" }] }
    }
    error_message = "the input of the driver's schedule is another SubmitJob"
  }
  assert {
    condition     = jsondecode(aws_scheduler_schedule.this["watch"].target[0].input).JobName == "relevance-watch"
    error_message = "the watch is started under another name"
  }
  assert {
    condition     = alltrue([for one in aws_scheduler_schedule.this : one.target[0].arn == "arn:aws:scheduler:::aws-sdk:batch:submitJob"])
    error_message = "a schedule does not call SubmitJob"
  }
  assert {
    condition     = alltrue([for one in aws_scheduler_schedule.this : one.target[0].retry_policy[0].maximum_retry_attempts <= 3 && one.target[0].retry_policy[0].maximum_event_age_in_seconds <= 3600])
    error_message = "a late retry would start yesterday's cycle"
  }
  assert {
    condition     = alltrue([for one in aws_scheduler_schedule.this : one.target[0].dead_letter_config[0].arn == aws_sqs_queue.dead_letter.arn && one.target[0].role_arn == var.scheduler_role_arn])
    error_message = "a schedule has another dead-letter queue or role"
  }
  assert {
    condition     = alltrue([for one in aws_scheduler_schedule.this : one.flexible_time_window[0].mode == "OFF" && one.state == "ENABLED" && one.group_name == "relevance"])
    error_message = "a schedule fires at another time, not at all, or is in a group that the role does not trust"
  }
  assert {
    condition     = aws_scheduler_schedule.this["driver"].schedule_expression == "cron(0 2 * * ? *)" && aws_scheduler_schedule.this["driver"].schedule_expression_timezone == "Europe/Berlin"
    error_message = "the driver is started at another time"
  }
  assert {
    condition     = aws_scheduler_schedule.this["watch"].schedule_expression == "rate(1 hour)"
    error_message = "the watch is started at another time"
  }
  assert {
    condition     = aws_sqs_queue.dead_letter.kms_master_key_id == var.key_arn && aws_sqs_queue.dead_letter.message_retention_seconds == 1209600 && aws_sqs_queue.dead_letter.fifo_queue != true
    error_message = "the dead-letter queue is not encrypted with our key, forgets early, or is none that the scheduler takes"
  }
  assert {
    condition = jsondecode(aws_batch_job_definition.this["driver"].container_properties).command == [
      "trnjobs-entry", "--", "trnjobs", "driver", "--config", "configs/base.toml", "--config", "configs/jobs/trn1.toml"
    ]
    error_message = "the driver's command"
  }
  assert {
    condition = jsondecode(aws_batch_job_definition.this["watch"].container_properties).command == [
      "trnjobs-entry", "--", "trnjobs", "reconcile", "--config", "configs/base.toml", "--config", "configs/jobs/trn1.toml"
    ]
    error_message = "the watch's command"
  }
  assert {
    condition = alltrue([for one in aws_batch_job_definition.this : jsondecode(one.container_properties).environment == [
      { name = "TRNPIPE_JOBS__NAME", value = "relevance" }, { name = "TRNPIPE_WORKSPACE", value = "s3://bucket/relevance" }
    ]])
    error_message = "the environment is not that of the cycle, or not in a fixed order"
  }
  assert {
    condition     = alltrue([for one in aws_batch_job_definition.this : jsondecode(one.container_properties).jobRoleArn == var.driver_role_arn && jsondecode(one.container_properties).image == var.image && !jsondecode(one.container_properties).privileged])
    error_message = "the role, the image, or privileges"
  }
  assert {
    condition     = alltrue([for one in aws_batch_job_definition.this : jsondecode(one.container_properties).logConfiguration.options["awslogs-group"] == "/trnpipe/relevance"])
    error_message = "the log goes elsewhere, where nobody looks for missed deadlines"
  }
  assert {
    condition     = alltrue([for one in aws_batch_job_definition.this : one.retry_strategy[0].attempts == 2 && length(one.retry_strategy[0].evaluate_on_exit) == 5])
    error_message = "the retries"
  }
  assert {
    condition     = alltrue([for one in aws_batch_job_definition.this : one.retry_strategy[0].evaluate_on_exit[4].action == "EXIT" && one.retry_strategy[0].evaluate_on_exit[4].on_reason == "*"])
    error_message = "without a last rule EXIT everything is tried again"
  }
  assert {
    condition     = alltrue([for one in aws_batch_job_definition.this : one.scheduling_priority > 100 && one.timeout[0].attempt_duration_seconds == 900 && one.propagate_tags])
    error_message = "a fair-share queue refuses a definition without priority; one without a time limit may stay for ever"
  }
}
