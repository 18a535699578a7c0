output "bucket_arn" {
  value       = aws_s3_bucket.workspace.arn
  description = "ARN of the bucket."
}

output "workspace" {
  value       = "s3://${aws_s3_bucket.workspace.bucket}/${var.name}"
  description = "Where cycles read and write."
}

output "workspace_arn" {
  value       = "${aws_s3_bucket.workspace.arn}/${var.name}"
  description = "ARN of the workspace, for policies."
}

output "key_arn" {
  value       = aws_kms_key.this.arn
  description = "Key of everything at rest."
  depends_on  = [aws_kms_key_policy.this] # log groups, topics and queues can be made with it only when it lets them
}

output "repository_url" {
  value       = aws_ecr_repository.images.repository_url
  description = "Where make push sends images."
}

output "repository_arn" {
  value       = aws_ecr_repository.images.arn
  description = "ARN of the repository."
}

output "log_group" {
  value       = aws_cloudwatch_log_group.jobs.name
  description = "Log group of all jobs."
}

output "log_group_arn" {
  value       = aws_cloudwatch_log_group.jobs.arn
  description = "ARN of the log group."
}
