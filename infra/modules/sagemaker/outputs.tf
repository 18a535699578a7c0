output "settings" {
  description = "[jobs.sagemaker] of a cycle."
  value = merge(
    { subnets = [var.subnet_id], security_groups = [var.security_group_id] },
    local.has_queue ? { queue = local.queue } : {},
  )
  depends_on = [aws_cloudformation_stack.queue]
}

output "log_group" {
  description = "Log group of all training jobs."
  value       = aws_cloudwatch_log_group.training.name
}
