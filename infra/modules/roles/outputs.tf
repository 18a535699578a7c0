output "driver_role_arn" {
  description = "Role of the driver and of the hourly watch."
  value       = aws_iam_role.job["driver"].arn
}

output "train_role_arn" {
  description = "Role of prepare, health, compile and train."
  value       = aws_iam_role.job["train"].arn
}

output "promote_role_arn" {
  description = "Role of evaluate, the only one that may write below registry/."
  value       = aws_iam_role.job["promote"].arn
}

output "embed_role_arn" {
  description = "Role of embed and verify."
  value       = aws_iam_role.job["embed"].arn
}

output "report_role_arn" {
  description = "Role of report."
  value       = aws_iam_role.job["report"].arn
}

output "scheduler_role_arn" {
  description = "Role of EventBridge Scheduler."
  value       = aws_iam_role.scheduler.arn
}

output "job_roles" {
  description = "Names of the roles by kind of job."
  value       = { for kind, role in aws_iam_role.job : kind => role.name }
}
