# Both queues have the policy from the first day: it can be replaced later, but not added or removed.

locals {
  environments = {
    trainium = var.trainium_environment_arn
    cpu      = var.cpu_environment_arn
  }

  # Why a job at the head cannot start. It blocks all behind it.
  blocked_reasons = [
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
  ]
}

resource "aws_batch_scheduling_policy" "this" {
  name = var.name

  fair_share_policy {
    share_decay_seconds = var.share_decay_s
    compute_reservation = var.compute_reservation

    dynamic "share_distribution" {
      for_each = var.shares

      content {
        share_identifier = share_distribution.key
        weight_factor    = share_distribution.value
      }
    }
  }
}

resource "aws_batch_job_queue" "this" {
  for_each = local.environments

  name                  = "${var.name}-${each.key}"
  state                 = "ENABLED"
  priority              = 1
  scheduling_policy_arn = aws_batch_scheduling_policy.this.arn

  compute_environment_order {
    order               = 1
    compute_environment = each.value
  }

  dynamic "job_state_time_limit_action" {
    for_each = local.blocked_reasons

    content {
      state            = "RUNNABLE"
      reason           = job_state_time_limit_action.value
      max_time_seconds = var.wait_limit_s
      action           = "CANCEL"
    }
  }
}
