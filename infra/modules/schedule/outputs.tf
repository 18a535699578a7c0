output "dead_letter_name" {
  description = "Name of that queue."
  value       = aws_sqs_queue.dead_letter.name
}

output "group_name" {
  description = "Group of both schedules; the scheduler's role trusts it alone."
  value       = aws_scheduler_schedule_group.this.name
}

output "driver_schedule_name" {
  description = "Schedule that starts cycles."
  value       = aws_scheduler_schedule.this["driver"].name
}

output "watch_schedule_name" {
  description = "Schedule that looks after open cycles."
  value       = aws_scheduler_schedule.this["watch"].name
}
