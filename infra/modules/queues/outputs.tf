output "trainium_queue" {
  value       = { name = aws_batch_job_queue.this["trainium"].name, arn = aws_batch_job_queue.this["trainium"].arn }
  description = "Queue of gangs."
}

output "cpu_queue" {
  value       = { name = aws_batch_job_queue.this["cpu"].name, arn = aws_batch_job_queue.this["cpu"].arn }
  description = "Queue of the driver and of work without Trainium."
}

output "scheduling_policy_arn" {
  value       = aws_batch_scheduling_policy.this.arn
  description = "The fair-share policy of both queues."
}
