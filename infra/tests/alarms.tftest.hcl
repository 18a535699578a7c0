# What is told of, and to whom; no server, no credentials. tests/infra holds real events against the patterns.

mock_provider "aws" {
  override_during = plan

  mock_resource "aws_sns_topic" {
    defaults = { arn = "arn:aws:sns:us-west-2:123456789012:relevance-alarms" }
  }
}

variables {
  name             = "relevance"
  account_id       = "123456789012"
  queue_arns       = ["arn:aws:batch:us-west-2:123456789012:job-queue/relevance-trainium", "arn:aws:batch:us-west-2:123456789012:job-queue/relevance-cpu"]
  log_group        = "/trnpipe/relevance"
  schedule_enabled = true
  dead_letter_name = "relevance-dead-letter"
  emails           = ["oncall@example.com"]
  budget_usd       = 5000
  key_arn          = "arn:aws:kms:us-west-2:123456789012:key/00000000-0000-0000-0000-000000000000"
}

run "alarms" {
  command = plan

  module {
    source = "./modules/alarms"
  }

  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.this["failed"].event_pattern).detail.jobQueue == [for one in var.queue_arns : one]
    error_message = "failures in other queues"
  }
  assert {
    condition     = jsondecode(aws_cloudwatch_event_rule.this["failed"].event_pattern).detail.status == ["FAILED"] && jsondecode(aws_cloudwatch_event_rule.this["blocked"].event_pattern)["detail-type"] == ["Batch Job Queue Blocked"]
    error_message = "the rules are for other events"
  }
  assert {
    condition     = alltrue([for one in aws_cloudwatch_event_target.this : one.arn == aws_sns_topic.this.arn])
    error_message = "an event goes elsewhere"
  }
  assert {
    condition     = alltrue([for one in aws_cloudwatch_event_target.this : strcontains(one.input_transformer[0].input_template, "<reason>") && can(jsondecode(one.input_transformer[0].input_template))])
    error_message = "the text of a message is no JSON string, or does not give the reason"
  }
  assert {
    condition     = aws_cloudwatch_log_metric_filter.deadline.pattern == "\"deadline MISSED\"" && aws_cloudwatch_log_metric_filter.deadline.log_group_name == "/trnpipe/relevance"
    error_message = "missed deadlines are looked for elsewhere"
  }
  assert {
    condition     = aws_cloudwatch_log_metric_filter.deadline.metric_transformation[0].name == aws_cloudwatch_metric_alarm.deadline.metric_name && aws_cloudwatch_log_metric_filter.deadline.metric_transformation[0].namespace == aws_cloudwatch_metric_alarm.deadline.namespace
    error_message = "the alarm looks at another metric than the filter writes"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.dead_letter.dimensions.QueueName == "relevance-dead-letter" && aws_cloudwatch_metric_alarm.dead_letter.threshold == 0
    error_message = "the alarm looks at another queue, or not at its first message"
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.silence[0].treat_missing_data == "breaching" && aws_cloudwatch_metric_alarm.silence[0].dimensions.LogGroupName == "/trnpipe/relevance"
    error_message = "silence of the jobs is no alarm"
  }
  assert {
    condition     = alltrue([for one in [aws_cloudwatch_metric_alarm.deadline, aws_cloudwatch_metric_alarm.dead_letter, aws_cloudwatch_metric_alarm.silence[0]] : one.alarm_actions == toset([aws_sns_topic.this.arn])])
    error_message = "an alarm tells nobody"
  }
  assert {
    condition     = aws_sns_topic.this.kms_master_key_id == var.key_arn && join(" ", keys(aws_sns_topic_subscription.email)) == "oncall@example.com"
    error_message = "the topic is not encrypted with our key, or has other subscribers"
  }
  assert {
    condition     = toset([for one in aws_budgets_budget.this[0].notification : "${one.notification_type} ${one.threshold}"]) == toset(["ACTUAL 80", "FORECASTED 100"]) && aws_budgets_budget.this[0].limit_amount == "5000"
    error_message = "the budget"
  }
  assert {
    condition     = jsondecode(aws_sns_topic_policy.this.policy).Statement[0].Condition.StringEquals["aws:SourceAccount"] == "123456789012"
    error_message = "alarms and budgets of another account may write to the topic"
  }
  assert {
    condition     = jsondecode(aws_sns_topic_policy.this.policy).Statement[1].Principal.Service == "events.amazonaws.com" && !can(jsondecode(aws_sns_topic_policy.this.policy).Statement[1].Condition)
    error_message = "EventBridge takes no Condition in the policy of a topic: its messages would be lost"
  }
}

run "neither_schedule_nor_budget" {
  command = plan

  variables {
    schedule_enabled = false
    budget_usd       = 0
  }
  module {
    source = "./modules/alarms"
  }

  assert {
    condition     = length(aws_cloudwatch_metric_alarm.silence) == 0
    error_message = "the first deployment, whose log group is empty, would begin with an alarm"
  }
  assert {
    condition     = length(aws_budgets_budget.this) == 0
    error_message = "a budget of nothing"
  }
}
