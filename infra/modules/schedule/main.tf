# Two schedules start two small jobs on the CPU queue: the driver, which submits the cycle that is due, and the watch,
# which records what became of open cycles and tells of blocked queues and missed deadlines.

locals {
  commands = {
    driver = ["trnjobs", "driver"]
    watch  = ["trnjobs", "reconcile"]
  }
  config     = flatten([for file in var.settings_files : ["--config", file]])
  priority   = 9999 # before all other jobs of the same share: what it starts, and what it finds out, cannot wait
  timeout_s  = 900  # each takes a minute; one that hangs must not stay until the next
  vcpus      = 1
  memory_mib = 2048
}

resource "aws_batch_job_definition" "this" {
  for_each = local.commands

  name                       = "${var.name}-${each.key}"
  type                       = "container"
  platform_capabilities      = ["EC2"]
  propagate_tags             = true
  scheduling_priority        = local.priority
  deregister_on_new_revision = false # a schedule that is about to fire, or to try again, still names the one before

  container_properties = jsonencode({
    image      = var.image
    command    = concat(["trnjobs-entry", "--"], each.value, local.config)
    jobRoleArn = var.driver_role_arn
    privileged = false
    resourceRequirements = [
      { type = "VCPU", value = tostring(local.vcpus) },
      { type = "MEMORY", value = tostring(local.memory_mib) },
    ]
    environment     = [for name in sort(keys(var.environment)) : { name = name, value = var.environment[name] }]
    linuxParameters = { initProcessEnabled = true }
    logConfiguration = {
      logDriver = "awslogs"
      options   = { "awslogs-group" = var.log_group, "awslogs-stream-prefix" = "${var.name}-${each.key}" }
    }
  })

  retry_strategy {
    attempts = var.attempts

    dynamic "evaluate_on_exit" {
      for_each = jsondecode(file("${path.module}/retry.json")) # the rules of every job, see jobs/plan/spec.py

      content {
        action           = evaluate_on_exit.value.action
        on_status_reason = lookup(evaluate_on_exit.value, "onStatusReason", null)
        on_exit_code     = lookup(evaluate_on_exit.value, "onExitCode", null)
        on_reason        = lookup(evaluate_on_exit.value, "onReason", null)
      }
    }
  }

  timeout {
    attempt_duration_seconds = local.timeout_s
  }
}

resource "aws_scheduler_schedule_group" "this" {
  name = var.name
}

resource "aws_scheduler_schedule" "this" {
  #checkov:skip=CKV_AWS_297:the input of a schedule names a queue and a definition, and holds no secret

  for_each = {
    driver = { expression = var.expression, enabled = var.enabled, description = "Starts the cycle of ${var.name} that is due." }
    watch  = { expression = var.watch_expression, enabled = true, description = "Looks after the open cycles of ${var.name}." }
  }

  name                         = "${var.name}-${each.key}"
  group_name                   = aws_scheduler_schedule_group.this.name
  description                  = each.value.description
  schedule_expression          = each.value.expression
  schedule_expression_timezone = var.timezone
  state                        = each.value.enabled ? "ENABLED" : "DISABLED"

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = "arn:aws:scheduler:::aws-sdk:batch:submitJob"
    role_arn = var.scheduler_role_arn
    # A text, since jsonencode() writes < and > as \u003c and \u003e: <aws.scheduler.scheduled-time> is put in by the
    # scheduler before anyone reads this as JSON.
    input = templatefile("${path.module}/input.json.tftpl", {
      job_name         = "${var.name}-${each.key}"
      queue_arn        = var.queue_arn
      definition_arn   = aws_batch_job_definition.this[each.key].arn
      share_identifier = var.share_identifier
    })

    # The defaults, 185 tries in 24 hours, would start yesterday's cycle.
    retry_policy {
      maximum_retry_attempts       = 3
      maximum_event_age_in_seconds = 3600
    }

    dead_letter_config {
      arn = aws_sqs_queue.dead_letter.arn
    }
  }
}

resource "aws_sqs_queue" "dead_letter" {
  name                              = "${var.name}-dead-letter"
  message_retention_seconds         = 14 * 86400 # the most: somebody may be on holiday
  kms_master_key_id                 = var.key_arn
  kms_data_key_reuse_period_seconds = 3600
}
