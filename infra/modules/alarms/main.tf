# Everything that somebody must know of goes to one topic: jobs that failed for good, queues that stand still, cycles
# that are late, schedules that could not start anything, and costs.

locals {
  queues = { queue_arns = jsonencode(var.queue_arns) }
  events = {
    failed = {
      description = "A job of ${var.name} has failed for good."
      # Children of an array and nodes of a multi-node job are left out by the pattern: the whole job fails too, in one message.
      text = "\"Job <job> of cycle <cycle> failed: <reason>. Next: trnjobs status --cycle <cycle>; docs/runbook.md has what to do.\""
    }
    blocked = {
      description = "A queue of ${var.name} stands still behind a job that cannot start."
      text        = "\"Job <job> of cycle <cycle> blocks its queue: <reason>. Next: trnjobs status --cycle <cycle>; docs/runbook.md has what to do.\""
    }
  }
  namespace = "trnpipe/${var.name}"
}

resource "aws_sns_topic" "this" {
  name              = "${var.name}-alarms"
  kms_master_key_id = var.key_arn
}

# EventBridge takes no Condition in the policy of a topic (its user guide, "Amazon SNS permissions"): with one, rules
# report success and nobody gets the message.
resource "aws_sns_topic_policy" "this" {
  arn = aws_sns_topic.this.arn
  policy = templatefile("${path.module}/topic.json.tftpl", {
    topic_arn  = aws_sns_topic.this.arn
    account_id = var.account_id
  })
}

resource "aws_sns_topic_subscription" "email" {
  for_each = toset(var.emails)

  topic_arn = aws_sns_topic.this.arn
  protocol  = "email"
  endpoint  = each.key
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.events

  name          = "${var.name}-${each.key}"
  description   = each.value.description
  event_pattern = templatefile("${path.module}/patterns/${each.key}.json.tftpl", local.queues)
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = local.events

  rule = aws_cloudwatch_event_rule.this[each.key].name
  arn  = aws_sns_topic.this.arn

  input_transformer {
    input_paths = {
      job    = "$.detail.jobName"
      cycle  = "$.detail.tags.cycle"
      reason = "$.detail.statusReason"
    }
    input_template = each.value.text
  }
}

# The report of a cycle and the hourly watch print this line; tests/infra binds the words to those that they print.
resource "aws_cloudwatch_log_metric_filter" "deadline" {
  name           = "${var.name}-deadline-missed"
  log_group_name = var.log_group
  pattern        = trimspace(file("${path.module}/patterns/deadline.txt"))

  metric_transformation {
    name      = "deadline-missed"
    namespace = local.namespace
    value     = "1"
  }
}

resource "aws_cloudwatch_metric_alarm" "deadline" {
  alarm_name          = "${var.name}-deadline-missed"
  alarm_description   = "A cycle of ${var.name} did not end within jobs.sla_s. Next: trnjobs status; docs/runbook.md has what to do."
  namespace           = local.namespace
  metric_name         = "deadline-missed"
  statistic           = "Sum"
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  # The watch says it again every hour until the cycle has ended: one alarm, not one an hour.
  period              = 3600
  evaluation_periods  = 2
  datapoints_to_alarm = 1
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.this.arn]
}

resource "aws_cloudwatch_metric_alarm" "dead_letter" {
  alarm_name          = "${var.name}-not-started"
  alarm_description   = "EventBridge Scheduler could not start the driver or the watch of ${var.name}. Next: read the message in ${var.dead_letter_name}; docs/runbook.md has what to do."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = var.dead_letter_name }
  statistic           = "Maximum"
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  period              = 300
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_sns_topic.this.arn]
}

# The watch writes every hour. Where it does not, machines do not start, or do not join, and nothing else would tell.
# Missing data is the alarm, and before the first job there is nothing else: so it waits until cycles are scheduled.
resource "aws_cloudwatch_metric_alarm" "silence" {
  count = var.schedule_enabled ? 1 : 0

  alarm_name          = "${var.name}-silent"
  alarm_description   = "No job of ${var.name}, the watch included, has written a line for a day. Next: aws batch list-jobs; docs/runbook.md has what to do."
  namespace           = "AWS/Logs"
  metric_name         = "IncomingLogEvents"
  dimensions          = { LogGroupName = var.log_group }
  statistic           = "Sum"
  comparison_operator = "LessThanThreshold"
  threshold           = 1
  period              = 86400
  evaluation_periods  = 1
  treat_missing_data  = "breaching"
  alarm_actions       = [aws_sns_topic.this.arn]
}

# Of the whole account: a budget by tag sees nothing until somebody has activated the tag for cost allocation.
resource "aws_budgets_budget" "this" {
  count = var.budget_usd > 0 ? 1 : 0

  name         = var.name
  budget_type  = "COST"
  limit_amount = tostring(var.budget_usd)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"

  dynamic "notification" {
    for_each = { ACTUAL = 80, FORECASTED = 100 }

    content {
      notification_type         = notification.key
      threshold                 = notification.value
      threshold_type            = "PERCENTAGE"
      comparison_operator       = "GREATER_THAN"
      subscriber_sns_topic_arns = [aws_sns_topic.this.arn]
    }
  }
}
