# Training jobs of Amazon SageMaker, besides AWS Batch: what their roles, the driver and the report may do more, where
# they write their logs, and who is told of their failures. A role's own policies have no room for it, so these are
# policies apart.

locals {
  log_group        = "/aws/sagemaker/TrainingJobs" # SageMaker's own name: one group of the account and region
  log_group_arn    = "arn:aws:logs:${var.region}:${var.account_id}:log-group:${local.log_group}"
  training_job_arn = "arn:aws:sagemaker:${var.region}:${var.account_id}:training-job"
  queue            = "${var.name}-training"
  queue_arn        = "arn:aws:batch:${var.region}:${var.account_id}:job-queue/${local.queue}"
  has_queue        = var.instances > 0

  values = {
    name                  = var.name
    account_id            = var.account_id
    region                = var.region
    workspace_arn         = var.workspace_arn
    repository_arn        = var.repository_arn
    log_group_arn         = local.log_group_arn
    ec2_arn               = "arn:aws:ec2:${var.region}:${var.account_id}"
    subnet_id             = var.subnet_id
    security_group_id     = var.security_group_id
    training_job_arn      = local.training_job_arn
    service_job_arn       = "arn:aws:batch:${var.region}:${var.account_id}:service-job"
    queue                 = local.queue
    queue_arn             = local.queue_arn
    role_arns             = jsonencode([for role in var.training_roles : "arn:aws:iam::${var.account_id}:role/${role}"])
    share_identifier      = var.share_identifier
    scheduling_policy_arn = var.scheduling_policy_arn
    instances             = var.instances
    wait_limit_s          = var.wait_limit_s
    again                 = jsonencode(jsondecode(file("${path.module}/retry.json")))
  }

  policies = merge(
    { training = var.training_roles, direct = [var.driver_role], look = [var.report_role] },
    local.has_queue ? { queue = [var.driver_role], look-queue = [var.report_role] } : {},
  )
  attached = { for pair in flatten([for policy, roles in local.policies : [for role in roles : { policy = policy, role = role }]]) : "${pair.policy}-${pair.role}" => pair }

  events = merge(
    {
      failed = {
        description = "A training job of ${var.name} has failed, and is not tried again."
        job         = "$.detail.TrainingJobName"
        reason      = "$.detail.FailureReason"
      }
      timed-out = {
        description = "A training job of ${var.name} has reached its time limit, and is not tried again."
        job         = "$.detail.TrainingJobName"
        reason      = "$.detail.SecondaryStatus" # only a failed one has a FailureReason
      }
    },
    local.has_queue ? {
      service-failed = {
        description = "A service job of ${var.name} has failed for good."
        job         = "$.detail.jobName"
        reason      = "$.detail.statusReason"
      }
      service-blocked = {
        description = "The queue of training jobs of ${var.name} stands still behind a job that cannot start."
        job         = "$.detail.jobName"
        reason      = "$.detail.statusReason"
      }
    } : {}
  )
}

# SageMaker makes the group with the first job, without an end to what it keeps. One that is there is imported first.
resource "aws_cloudwatch_log_group" "training" {
  #checkov:skip=CKV_AWS_158: the group belongs to the account, and jobs of others write to it without rights on our key
  #checkov:skip=CKV_AWS_338: how long is the operator's to say (log_retention_days); what became of a cycle is kept in the workspace
  name              = local.log_group
  retention_in_days = var.log_retention_days
  skip_destroy      = true # it holds the logs of others, too
}

resource "aws_iam_policy" "this" {
  for_each = local.policies

  name        = "${var.name}-sagemaker-${each.key}"
  description = "Training jobs of SageMaker of pipeline ${var.name}: ${each.key}."
  policy      = templatefile("${path.module}/policies/${each.key}.json.tftpl", local.values)
}

resource "aws_iam_role_policy_attachment" "this" {
  for_each = local.attached

  role       = each.value.role
  policy_arn = aws_iam_policy.this[each.value.policy].arn
}

# The provider has no service environments and no queues of them (5.100): CloudFormation makes both.
resource "aws_cloudformation_stack" "queue" {
  #checkov:skip=CKV_AWS_124: terraform apply waits for the stack and says why it failed
  count = local.has_queue ? 1 : 0

  name          = local.queue
  template_body = templatefile("${path.module}/queue.json.tftpl", local.values)
}

resource "aws_cloudwatch_event_rule" "this" {
  for_each = local.events

  name          = "${var.name}-sagemaker-${each.key}"
  description   = each.value.description
  event_pattern = templatefile("${path.module}/patterns/${each.key}.json.tftpl", local.values)
}

resource "aws_cloudwatch_event_target" "this" {
  for_each = local.events

  rule = aws_cloudwatch_event_rule.this[each.key].name
  arn  = var.topic_arn

  # EventBridge does not escape values: a quotation mark or a backslash in one breaks the message, see `quotable` in pipeline/core/format.py.
  input_transformer {
    input_paths    = { job = each.value.job, reason = each.value.reason }
    input_template = "\"${each.value.description} <job>: <reason>. Next: trnjobs reconcile, then trnjobs status; docs/runbook.md has what to do.\""
  }
}
